"""HTTP answers: JSON, server-sent events, and errors - all in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Generic, Protocol, Self, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve_app.errors import (
    GenerationError,
    MethodNotAllowedError,
    RequestCancelledError,
    RequestError,
    RetryLaterError,
    ServeAppError,
    SlowReaderError,
    UnknownRouteError,
)
from serve_app.ingress.call_log import record_of

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class SupportsAclose(Protocol):
    """Something that can be closed."""

    async def aclose(self) -> None: ...


def error_body(error: ServeAppError) -> dict[str, Any]:
    """The one error shape."""
    body: dict[str, Any] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    if isinstance(error, RetryLaterError):
        body["retry_after_s"] = error.retry_after_s
    return {"error": body}


def error_answer(error: ServeAppError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as an HTTP answer."""
    headers = dict(headers or {})
    if isinstance(error, RetryLaterError):
        headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse(error_body(error), error.status, headers)


def refuse(request: Request, error: ServeAppError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer to a call that ends with an error, which its record notes."""
    record_of(request).fail(error)
    return error_answer(error, headers)


async def on_serve_app_error(request: Request, error: Exception) -> Response:
    """Exception handler for the project's own errors."""
    assert isinstance(error, ServeAppError)
    return refuse(request, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for the router's: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return refuse(request, UnknownRouteError(f"There is no {request.url.path} here."))
    if error.status_code == 405:
        known = MethodNotAllowedError(f"{request.url.path} does not take {request.method}.")
        return refuse(request, known, dict(error.headers or {}))
    return refuse(request, RequestError(error.detail))


async def on_bug(request: Request, error: Exception) -> Response:
    """Exception handler for everything else: the log has the trace, the caller learns nothing of it."""
    record_of(request).fail(error)
    return error_answer(GenerationError("Internal server error."))


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs `work`, and cancels it when the client leaves.

    Raises:
        RequestCancelledError: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestCancelledError("The client has left.")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`; an error becomes the last event instead.

    Args:
        events: JSON objects.
        source: what the events are made from; closed in every case, also when the client left before the first byte.
        reader_timeout_s: how long the caller may take nothing of what is sent.
        headers: besides those that every stream has.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        source: SupportsAclose,
        reader_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._reader_timeout_s = reader_timeout_s
        self._events = events
        self._source = source
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end, the client leaves, or he does not read."""
        request = Request(scope)
        async with aclosing(self._source):
            try:
                await until_disconnect(receive, self._send_all(request, send))
            except SlowReaderError as error:
                record_of(request).fail(error)
            except RequestCancelledError:  # nobody is there to be told
                pass

    async def _send_all(self, request: Request, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await self._send(send, self.frame(event))
            await self._send(send, self.ending())
        except SlowReaderError:  # he would not read that, either
            raise
        except ServeAppError as error:
            logger.warning("a stream ends with an error: %s", error)
            await self._send(send, self.failure(error))
        except Exception as error:
            logger.exception("a stream broke")
            record_of(request).fail(error)
            await self._send(send, self.failure(GenerationError("Internal server error.")))
        await self._send(send, "", is_last=True)

    async def _send(self, send: Send, text: str, *, is_last: bool = False) -> None:
        """Waits while the connection is full, but not for ever."""
        try:
            async with asyncio.timeout(self._reader_timeout_s):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})
        except TimeoutError:
            raise SlowReaderError(f"The caller has read nothing for {self._reader_timeout_s:g} s.") from None

    def frame(self, event: dict[str, Any]) -> str:
        """An event as it goes over the wire."""
        return f"data: {_json(event)}\n\n"

    def ending(self) -> str:
        """What tells that all events have come."""
        return "data: [DONE]\n\n"

    def failure(self, error: ServeAppError) -> str:
        """What tells that no more will come."""
        return self.frame(error_body(error))


class NamedEventStream(EventStream):
    """The events of /v1/responses: each has its type as its name, and the last one tells that it is the last."""

    _next_number = 0

    def frame(self, event: dict[str, Any]) -> str:
        """See `EventStream.frame`."""
        self._next_number = event["sequence_number"] + 1
        return f"event: {event['type']}\ndata: {_json(event)}\n\n"

    def ending(self) -> str:
        """See `EventStream.ending`."""
        return ""

    def failure(self, error: ServeAppError) -> str:
        """See `EventStream.failure`."""
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self.frame({"type": "error", "sequence_number": self._next_number, **told})


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


class Primed(Generic[ResultT]):
    """An async generator whose first item is already there, so that what failed before it still has its HTTP status."""

    def __init__(self, first: ResultT, rest: AsyncGenerator[ResultT, None]) -> None:
        self._first: list[ResultT] = [first]
        self._rest = rest

    @classmethod
    async def wait(cls, items: AsyncGenerator[ResultT, None]) -> Self:
        """Waits for the first item; closes the generator when that fails."""
        try:
            return cls(await anext(items), items)
        except BaseException:
            await items.aclose()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ResultT:
        return self._first.pop() if self._first else await anext(self._rest)

    async def aclose(self) -> None:
        """Closes the generator, whether or not anything was read."""
        await self._rest.aclose()
