"""Who may call: API keys, how much each may do at once, and which web pages may ask in their name (CORS).

Keys are known by their SHA-256 alone. They are random and long, so a slow hash would protect nothing more.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.config import ApiKey, IngressLimits
from serve_app.errors import AuthenticationError, OverloadedError
from serve_app.ingress.answers import refuse
from serve_app.ingress.call_log import record_of
from serve_app.ingress.chat_page import FILES

LIVENESS = "/health"
"""It asks nobody for a key: it says that the process answers, and nothing else."""
OPEN_PATHS = {LIVENESS, *FILES}
"""What is answered without a key; the chat page's files, because a key is entered there."""


def new_key() -> tuple[str, str]:
    """A fresh key for a caller, and the digest of it that the configuration holds."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, digest_of(key)


def digest_of(key: str) -> str:
    """How a key stands in the configuration."""
    return hashlib.sha256(key.encode()).hexdigest()


def caller_of(request: Request) -> ApiKey | None:
    """Whose key a request was let in with; None where the server wants no keys."""
    caller: ApiKey | None = request.scope["state"].get("caller")
    return caller


class KeyGate:
    """Middleware: lets in who has a key, when keys are configured.

    Args:
        app: what is behind it.
        limits: asked at every request, so that a changed list of keys counts at once.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], IngressLimits]) -> None:
        self._app = app
        self._limits = limits
        self._ongoing: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 without a known key, 429 when the key has as many calls running as it may."""
        keys = self._limits().api_keys
        if scope["type"] != "http" or keys is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        caller = _find(keys, Headers(scope=scope).get("authorization", ""))
        request = Request(scope)
        if caller is None:
            error = AuthenticationError("A valid API key is required, as the header 'Authorization: Bearer KEY'.")
            await refuse(request, error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        record_of(request).key = caller.name
        if caller.max_calls is not None and self._ongoing[caller.name] >= caller.max_calls:
            busy = OverloadedError(f"This key has {caller.max_calls} calls running, as many as it may.")
            await refuse(request, busy)(scope, receive, send)
            return
        scope["state"]["caller"] = caller
        self._ongoing[caller.name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._ongoing[caller.name] -= 1


def _find(keys: Sequence[ApiKey], authorization: str) -> ApiKey | None:
    """The caller with that key. Compares with all, each in constant time: how long it takes says nothing of any key."""
    scheme, _, key = authorization.partition(" ")
    digest = digest_of(key.strip())
    found = None
    for known in keys:
        if hmac.compare_digest(known.sha256, digest):
            found = known
    return found if scheme.lower() == "bearer" else None


class Cors:
    """Middleware: answers browsers that ask whether a page of another origin may call. None may, unless configured.

    Args:
        app: what is behind it.
        limits: asked at every request.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], IngressLimits]) -> None:
        self._app = app
        self._limits = limits
        self._origins: list[str] = []
        self._open: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers for pages of the configured origins."""
        origins = self._limits().cors_origins
        if origins != self._origins:
            self._origins = origins
            self._open = CORSMiddleware(
                self._app,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After", "X-Request-Id"],
            )
        await (self._open if origins else self._app)(scope, receive, send)
