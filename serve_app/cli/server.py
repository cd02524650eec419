"""What the commands that talk to a running server share: its address, its key, its models, its errors."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Annotated, Any, Self

import httpx
import typer

URL = "http://localhost:8000"
Url = Annotated[str, typer.Argument(help="the server's root, without /v1; any OpenAI-compatible server")]
Model = Annotated[str | None, typer.Option(help="by default the server's first")]
Key = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="where the server wants one")]


class ServerError(Exception):
    """What the server said, or that it cannot be reached."""


class ServerClient:
    """A caller of an OpenAI-compatible server.

    Args:
        url: its root, without `/v1`.
        api_key: where it wants one.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the first model that is served. Raises `ServerError`."""
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from None
        if answer.status_code != 200:
            raise ServerError(_said(answer))
        return str(answer.json()["data"][0]["id"])

    def chat(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed chat, as they come. Closing the generator ends the work. Raises `ServerError`."""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ServerError(_said(answer))
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line:
                        continue
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    yield event
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from None
        raise ServerError("The connection was lost before the answer's end.")


def _said(answer: httpx.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"The server answered {answer.status_code}."
    wait = answer.headers.get("Retry-After")
    return message if wait is None else f"{message} (try again in {wait} s)"


def _unreachable(http: httpx.Client, error: httpx.HTTPError) -> ServerError:
    return ServerError(f"{http.base_url} cannot be reached: {error or type(error).__name__}")
