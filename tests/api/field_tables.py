"""The tables of docs/api.md: every field of the `openai` package's request types, and what this server does with it.

python -m tests.api.field_tables     # writes them anew
"""

from __future__ import annotations

import re
import typing
from pathlib import Path

import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completion
import openai.types.responses.response_create_params as responses

from serve_app.ingress.schema.base import NO_EFFECT, Schema
from serve_app.ingress.schema.chat import ChatRequest
from serve_app.ingress.schema.completion import CompletionRequest
from serve_app.ingress.schema.responses import ResponsesRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
HONOURED, ACCEPTED, REFUSED = "honoured", "no effect", "refused"

TYPES: dict[str, tuple[type, type[Schema]]] = {
    "/v1/chat/completions": (chat.CompletionCreateParamsStreaming, ChatRequest),
    "/v1/completions": (completion.CompletionCreateParamsStreaming, CompletionRequest),
    "/v1/responses": (responses.ResponseCreateParamsStreaming, ResponsesRequest),
}


def openai_fields(path: str) -> set[str]:
    """The fields that the `openai` package knows."""
    return set(typing.get_type_hints(TYPES[path][0]))


def status(path: str, field: str) -> str:
    """What happens to a field."""
    info = TYPES[path][1].model_fields.get(field)
    if info is None:
        return REFUSED
    return ACCEPTED if (info.description or "").startswith(NO_EFFECT) else HONOURED


def table(path: str) -> str:
    """The table of a route, in Markdown."""
    kind = TYPES[path][1]
    known = openai_fields(path)
    lines = ["| field | | meaning, or what to do instead |", "|---|---|---|"]
    for field in [*kind.model_fields, *sorted(known - set(kind.model_fields))]:
        info = kind.model_fields.get(field)
        meaning = kind.REFUSED.get(field, "") if info is None else (info.description or "").removeprefix(NO_EFFECT).strip()
        ours = "" if field in known else " (not OpenAI's)"
        lines.append(f"| `{field}`{ours} | {status(path, field)} | {meaning} |".replace("  |", " |"))
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The document with its tables as they should be."""
    for path in TYPES:
        begin, end = f"<!-- fields of {path} -->", f"<!-- end of {path} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table(path)}\n{end}", text, flags=re.DOTALL)  # noqa: B023
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
