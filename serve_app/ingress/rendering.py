"""OpenAI's JSON for chat and for completions: chunks of a stream, and whole answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from serve_app.ingress.generation import Choice, ChoiceDelta, Usage

Json = dict[str, Any]


class Renderer(Protocol):
    """Writes one call's answer."""

    def opening(self, num_choices: int) -> list[Json]:
        """Chunks that come before any text."""

    def chunk(self, choice_delta: ChoiceDelta) -> Json:
        """A chunk with new text, or an ending, or both."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk, when usage was asked for."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The answer in one piece."""


class _Renderer:
    """What both shapes share. With `includes_usage` every chunk has a `usage` key, null on all but the last."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, model: str, *, includes_usage: bool) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._includes_usage = includes_usage

    def _frame(self, object_: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": object_, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choices: list[Json]) -> Json:
        frame = self._frame(self.chunk_object, choices)
        return {**frame, "usage": None} if self._includes_usage else frame

    def usage_chunk(self, usage: Usage) -> Json:
        """See `Renderer.usage_chunk`."""
        return {**self._frame(self.chunk_object, []), "usage": usage.as_json()}


class ChatRenderer(_Renderer):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, num_choices: int) -> list[Json]:
        """See `Renderer.opening`: the role comes first, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(num_choices)
        ]

    def chunk(self, choice_delta: ChoiceDelta) -> Json:
        """See `Renderer.chunk`."""
        delta = choice_delta.delta
        content = {"content": delta.text} if delta.text else {}
        return self._chunk(
            [{"index": choice_delta.index, "delta": content, "logprobs": None, "finish_reason": delta.finish_reason}]
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """See `Renderer.whole`."""
        rendered = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return {**self._frame(self.whole_object, rendered), "usage": usage.as_json()}


class CompletionRenderer(_Renderer):
    """POST /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def opening(self, num_choices: int) -> list[Json]:
        """See `Renderer.opening`: completions have none."""
        return []

    def chunk(self, choice_delta: ChoiceDelta) -> Json:
        """See `Renderer.chunk`."""
        delta = choice_delta.delta
        return self._chunk([_completion_choice(choice_delta.index, delta.text, delta.finish_reason)])

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """See `Renderer.whole`."""
        rendered = [_completion_choice(choice.index, "".join(choice.text), choice.finish_reason) for choice in choices]
        return {**self._frame(self.whole_object, rendered), "usage": usage.as_json()}


def _completion_choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
