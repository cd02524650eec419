"""What all request bodies have in common: strictness, defaults, and errors that name the field.

A field is honoured, or accepted without effect (`no_effect`), or refused by name: nothing is ignored in silence. The same
models parse the requests and describe them (OpenAPI, docs/api.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from serve_app.errors import RequestError

NO_EFFECT = "Accepted without effect."


class Schema(BaseModel):
    """Strict: no unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Known fields that are refused, and what to do instead."""


def no_effect(description: str = "") -> Any:
    """A field that OpenAI clients send and that changes nothing here."""
    return Field(default=None, description=f"{NO_EFFECT} {description}".rstrip(), json_schema_extra={"x-no-effect": True})


User = Annotated[
    str | None,
    Field(max_length=256, description="On a server without API keys: who it is that shares the engine with others."),
]


def default(value: Any) -> BeforeValidator:
    """null means the default."""
    return BeforeValidator(lambda given: value if given is None else given)


def _as_tuple(value: Any) -> Any:
    """null, one item or a list of items, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


StringOrList = BeforeValidator(_as_tuple, json_schema_input_type=str | list[str] | None)
ItemList = BeforeValidator(_as_tuple)
OptionalItemList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

Flag = Annotated[bool, default(False)]

RequestT = TypeVar("RequestT", bound=Schema)


def problem(field: str, message: str) -> PydanticCustomError:
    """The error of a validator that looks at several fields; `field` becomes (the end of) `param`."""
    return PydanticCustomError("in_field", "{message}", {"field": field, "message": message})


def parse_request(kind: type[RequestT], body: dict[str, Any]) -> RequestT:
    """Checks a JSON object. Raises `RequestError` that names the first wrong field in `param`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        # a field that is unknown explains more than one that is missing because of it
        first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
        param = _param((*first["loc"], first["ctx"]["field"]) if first["type"] == "in_field" else first["loc"])
        raise RequestError(_message(kind, first, param), param) from None


def _message(kind: type[Schema], detail: Any, param: str | None) -> str:
    if detail["type"] == "extra_forbidden":
        advice = kind.REFUSED.get(str(detail["loc"][0])) if len(detail["loc"]) == 1 else None
        return (
            f"{param} is not supported: {advice}" if advice else f"{param} is not a field that is known here; leave it out."
        )
    if detail["type"] == "missing":
        return f"{param} is required."
    return f"{param}: {detail['msg']}." if param and detail["type"] != "in_field" else f"{detail['msg']}."


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].role`, as OpenAI writes it."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".") or None
