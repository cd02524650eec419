"""`serve-app chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rich.console import Console

from serve_app.cli.server import ServerClient, ServerError

HELP = "/new begins anew, /system TEXT sets the system prompt, /exit or Ctrl-D ends; Ctrl-C stops an answer."


class Conversation:
    """What was said, and how to go on.

    Args:
        client: the server.
        options: fields of every call: `model`, `temperature`, ...
        system: the system prompt.
    """

    def __init__(self, client: ServerClient, options: dict[str, Any], system: str | None, console: Console) -> None:
        self._client = client
        self._options = options
        self._console = console
        self._system = system
        self._messages: list[dict[str, str]] = []

    def run(self) -> None:
        """Reads lines until the end of the input."""
        self._console.print(HELP, style="dim")
        with contextlib.suppress(EOFError):
            while True:
                try:
                    line = self._console.input("[bold]> [/bold]").strip()
                except KeyboardInterrupt:
                    self._console.print()
                    continue
                if line == "/exit":
                    return
                self._take(line)

    def _take(self, line: str) -> None:
        if line == "/new":
            self._messages.clear()
        elif line.startswith("/system"):
            self._system = line.removeprefix("/system").strip() or None
        elif line.startswith("/"):
            self._console.print(HELP, style="dim")
        elif line:
            self._messages.append({"role": "user", "content": line})
            self._answer()

    def _answer(self) -> None:
        """Prints the answer as it comes. A stopped one stays in the conversation as far as it came."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        body = {**self._options, "messages": system + self._messages, "stream_options": {"include_usage": True}}
        text, num_tokens, began_at, first_at = "", 0, time.monotonic(), 0.0
        try:
            with contextlib.closing(self._client.chat(body)) as events:
                for event in events:
                    for choice in event["choices"]:
                        piece = choice["delta"].get("content") or ""
                        first_at = first_at or (time.monotonic() if piece else 0.0)
                        text += piece
                        self._console.out(_harmless(piece), end="", highlight=False)
                    num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        except KeyboardInterrupt:
            self._console.print("\nstopped", style="dim", end="")
        except ServerError as error:
            self._console.print(f"\n{error}", style="red", end="", markup=False)
            if not text:
                self._messages.pop()  # an unanswered question would spoil the next
        self._console.print()
        if text:
            self._messages.append({"role": "assistant", "content": text})
        if num_tokens > 1 and first_at:
            rate = (num_tokens - 1) / max(time.monotonic() - first_at, 1e-6)
            told = f"first token after {(first_at - began_at) * 1000:.0f} ms, {num_tokens} tokens, {rate:.1f} tokens/s"
            self._console.print(told, style="dim", highlight=False)


def _harmless(text: str) -> str:
    """Without control characters: a model's answer must not move the cursor or retitle the terminal."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")
