"""Reads a request body: bounded while it arrives, JSON that is really JSON, or an error that says why not."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from serve_app.config import IngressLimits
from serve_app.errors import BodyTooLargeError, RequestError, RequestTimeoutError, UnsupportedMediaTypeError

MAX_DEPTH = 64
"""Levels of lists and objects in a body."""


async def read_json(request: Request, limits: IngressLimits) -> dict[str, Any]:
    """The body as a JSON object, whatever media type it claims (curl's `-d` claims a form), as long as it is UTF-8.

    Raises:
        BodyTooLargeError, RequestTimeoutError, UnsupportedMediaTypeError, RequestError.
    """
    _check_charset(request)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            raw = await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise RequestTimeoutError(f"The body did not arrive within {limits.body_timeout_s:g} s.") from None
    return parse_json_object(raw)


def _check_charset(request: Request) -> None:
    _, _, parameters = request.headers.get("content-type", "").partition(";")
    for parameter in parameters.lower().split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('" ') not in ("utf-8", "utf8"):
            raise UnsupportedMediaTypeError(f"The body must be JSON in UTF-8, not {value}.")


async def _read(request: Request, limit: int) -> bytes:
    too_large = BodyTooLargeError(f"The body is larger than the limit of {limit} bytes.")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parses strict JSON: no NaN or Infinity, no lone surrogates, bounded depth. Raises `RequestError`."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in raw:  # an escape may spell half a surrogate pair, which is no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise RequestError("The body is not valid UTF-8 text.") from None
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    if _depth(value) > MAX_DEPTH:
        raise RequestError(f"The JSON body is nested more than {MAX_DEPTH} deep.")
    return value


def _depth(value: Any) -> int:
    """How many levels of lists and objects there are; looks no further than one beyond MAX_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        level = [
            child
            for parent in level
            if isinstance(parent, (dict, list))
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        depth += 1
    return depth


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
