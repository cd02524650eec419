"""The chat page at `/`: four static files, which know nothing of the server and ask it like any other caller.

They are given without a key, because the page is where a person enters it.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page/chat.css": ("chat.css", "text/css"),
    "/page/chat.js": ("chat.js", "text/javascript"),
    "/page/markdown.js": ("markdown.js", "text/javascript"),
}
"""Path -> file and media type."""

HEADERS = {
    # what a model writes can neither run, nor fetch, nor send anything anywhere
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """The routes of the page's files, read once."""
    return [
        Route(path, _File(FOLDER / name, media_type).answer, methods=["GET"]) for path, (name, media_type) in FILES.items()
    ]


class _File:
    def __init__(self, path: Path, media_type: str) -> None:
        self._content = path.read_bytes()
        self._media_type = media_type

    async def answer(self, _: Request) -> Response:
        return Response(self._content, headers=HEADERS, media_type=self._media_type)
