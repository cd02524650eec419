"""Request headers that Serve would act on before the application sees the call.

Serve cuts the connection of a call when the time in `X-Request-Timeout-Seconds` is over: no status, no event, no ending.
It also lets callers switch off that their leaving ends their call. serve.env names `middlewares`, which Serve then runs
before all else, in each of its HTTP servers: the time reaches the application under another name, the switch does not.
"""

from __future__ import annotations

import re

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import RequestError

TIMEOUT_HEADER = "X-Request-Timeout-Seconds"
KEPT_TIMEOUT_HEADER = "X-Serve-App-Timeout-Seconds"
STAY_HEADER = "X-Request-Disconnect-Disabled"

HEAD_START_S = 0.1
"""Where Serve has seen the header (a plain `serve run`, without serve.env), a call ends so much before Serve cuts it."""

_RENAMED = {TIMEOUT_HEADER.lower().encode(): KEPT_TIMEOUT_HEADER.lower().encode(), STAY_HEADER.lower().encode(): None}


class KeepFromServe:
    """Middleware: renames or drops those headers.

    Args:
        app: Serve's own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the call on."""
        if scope["type"] == "http":
            renamed = ((_RENAMED.get(name, name), value) for name, value in scope["headers"])
            scope = {**scope, "headers": [(name, value) for name, value in renamed if name is not None]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Called by Serve (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH in serve.env)."""
    return [Middleware(KeepFromServe)]


def timeout_of(request: Request) -> float | None:
    """The seconds that a caller gives its call. Raises `RequestError`."""
    kept = request.headers.get(KEPT_TIMEOUT_HEADER)
    header = request.headers.get(TIMEOUT_HEADER) if kept is None else kept
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", header) is None or float(header) == 0:
        raise RequestError(f"{TIMEOUT_HEADER} must be a number of seconds above 0.", TIMEOUT_HEADER)
    seconds = float(header)
    return seconds if kept is not None else seconds - min(HEAD_START_S, seconds / 2)
