"""OpenAI's JSON for /v1/responses: the events of a stream, and whole answers. One message of text, nothing stored."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from serve_app.engine.request import FinishReason
from serve_app.ingress.generation import Choice, ChoiceDelta, Usage
from serve_app.ingress.rendering import Json
from serve_app.ingress.schema.responses import ResponsesRequest


class ResponseRenderer:
    """POST /v1/responses. Each event has its name in `type` and its number in `sequence_number`.

    Args:
        request: the call.
        model: the served name.
        request_id: becomes part of the answer's id.
    """

    def __init__(self, request: ResponsesRequest, model: str, request_id: str) -> None:
        self._request = request
        self._model = model
        self._id = f"resp_{request_id}"
        self._item_id = f"msg_{request_id}"
        self._created = int(time.time())
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._numbers = itertools.count()

    def opening(self, num_choices: int, usage: Usage) -> list[Json]:
        """See `Renderer.opening`."""
        assert num_choices == 1
        response = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._part_event("response.content_part.added", part=_part("")),
        ]

    def chunk(self, choice_delta: ChoiceDelta, usage: Usage) -> list[Json]:
        """See `Renderer.chunk`."""
        delta = choice_delta.delta
        self._finish_reason = delta.finish_reason
        if not delta.text:
            return []
        self._text.append(delta.text)
        return [self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])]

    def closing(self, usage: Usage) -> list[Json]:
        """See `Renderer.closing`."""
        text = "".join(self._text)
        status = _status(self._finish_reason)
        item = self._item(status, [_part(text)])
        return [
            self._part_event("response.output_text.done", text=text, logprobs=[]),
            self._part_event("response.content_part.done", part=_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self._response(status, [item], usage)),
        ]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """See `Renderer.whole`."""
        [choice] = choices
        status = _status(choice.finish_reason)
        return self._response(status, [self._item(status, [_part("".join(choice.text))])], usage)

    def _event(self, type_: str, **fields: Any) -> Json:
        return {"type": type_, "sequence_number": next(self._numbers), **fields}

    def _part_event(self, type_: str, **fields: Any) -> Json:
        return self._event(type_, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, content: list[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Json], usage: Usage | None) -> Json:
        request = self._request
        is_cut = status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }


def _status(finish_reason: FinishReason | None) -> str:
    return "incomplete" if finish_reason is FinishReason.LENGTH else "completed"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
