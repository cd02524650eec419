"""What became of each call: one record, for the log (a line of JSON) and for the counters."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.engine.request import FinishReason
from serve_app.errors import DeadlineError, ServeAppError
from serve_app.ingress.schema.generation import REQUEST_ID

REQUEST_ID_HEADER = "X-Request-Id"
"""The caller's name for a call, or the one that Serve gives it."""
DISCONNECTED, DEADLINE = "disconnected", "deadline"
"""How a call ends before it is done: its caller left, or its time was over."""

logger = logging.getLogger("serve_app.calls")


@dataclass(slots=True)
class CallRecord:
    """One call, from its first byte to its end.

    Attributes:
        started_at: on the event loop's clock, like what follows.
        ending: `stop` or `length`; `disconnected`, `deadline`; an error's code (`cancelled`); `ok` if none was generated.
        gaps_s: times from what came to what came next, of any of its choices.
        prompt: set only where prompts are to be logged.
    """

    method: str
    path: str
    started_at: float
    request_id: str | None = None
    key: str | None = None
    model: str | None = None
    stream: bool = False
    status: int | None = None
    ending: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    prompt: str | None = None

    def token_came(self, num_tokens: int) -> None:
        """Counts tokens that went to the caller."""
        if not num_tokens:
            return
        self.completion_tokens += num_tokens
        now = asyncio.get_running_loop().time()
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.gaps_s.append(now - self.last_token_at)
        self.last_token_at = now

    def finish(self, reasons: set[FinishReason]) -> None:
        """All choices are complete."""
        self.ending = FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    def fail(self, error: BaseException) -> None:
        """The call ends with an error, perhaps after all was generated; the first one counts."""
        if self.ending is None or self.ending in list(FinishReason):
            self.ending = ending_of(error)

    def as_json(self) -> dict[str, Any]:
        """The line of the log."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.request_id,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "model": self.model,
            "stream": self.stream,
            "status": self.status,
            "ending": self.ending,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_ms": _ms(self.started_at, self.first_token_at),
            "total_ms": _ms(self.started_at, self.ended_at),
        }
        return line if self.prompt is None else line | {"prompt": self.prompt}


def ending_of(error: BaseException) -> str:
    """The word for a call that ended so."""
    if isinstance(error, DeadlineError):
        return DEADLINE
    if isinstance(error, ServeAppError):
        return error.code or error.type
    return DISCONNECTED if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "internal_error"


def record_of(request: Request) -> CallRecord:
    """The record of the call that a request is."""
    record: CallRecord = request.scope["state"]["record"]
    return record


class CallLog:
    """Middleware, the outermost: keeps a record of every call, and reports it when the call is over.

    Args:
        app: what is behind it.
        report: is given each record.
    """

    def __init__(self, app: ASGIApp, report: Callable[[CallRecord], None]) -> None:
        self._app = app
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        named = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        record = CallRecord(scope["method"], scope["path"], clock(), named if re.fullmatch(REQUEST_ID, named) else None)
        scope.setdefault("state", {})["record"] = record
        is_whole = False

        async def note(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, note)
        except BaseException as error:
            record.fail(error)
            raise
        finally:
            if record.ending is None:
                record.ending = "ok" if is_whole else DISCONNECTED
            record.ended_at = clock()
            try:
                self._report(record)
            except Exception:  # a fault in the counting is no fault of the call
                logger.exception("a call was not reported")


def write(record: CallRecord) -> None:
    """Logs a record, unless it is of a probe that only asked whether the server lives."""
    if record.path not in ("/health", "/ready") or record.ending != "ok":
        logger.info(json.dumps(record.as_json(), ensure_ascii=False))


def open_log() -> None:
    """Lets the lines out on standard error, as they are."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _ms(start: float, end: float | None) -> float | None:
    return None if end is None else round((end - start) * 1000, 1)
