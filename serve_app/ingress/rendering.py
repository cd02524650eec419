"""OpenAI's JSON for chat and for completions: chunks of a stream, and whole answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serve_app.ingress.generation import Choice, ChoiceDelta, Usage
from serve_app.ingress.schema.generation import GenerationRequest
from serve_app.text.assembler import TokenPiece

Json = dict[str, Any]
TokenBytesOf = Callable[[int], bytes]

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, which JSON cannot write (OpenAI's value)."""


class Renderer(Protocol):
    """Writes one call's answer, streamed or whole."""

    def opening(self, num_choices: int, usage: Usage) -> list[Json]:
        """Events that come before any text."""

    def chunk(self, choice_delta: ChoiceDelta, usage: Usage) -> list[Json]:
        """Events with new text, or an ending, or both; none when there is nothing to show."""

    def closing(self, usage: Usage) -> list[Json]:
        """Events that come after all choices have ended."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The answer in one piece."""


class _Renderer:
    """What chat and completions share. With `include_usage` every chunk has a `usage` key, null on all but the last.

    Args:
        request: the call.
        model: the served name.
        request_id: becomes part of the answer's id.
        token_bytes: the bytes of a token.
    """

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, request: GenerationRequest, model: str, request_id: str, token_bytes: TokenBytesOf) -> None:
        self._request = request
        self._id = f"{self.prefix}-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._bytes = token_bytes

    def opening(self, num_choices: int, usage: Usage) -> list[Json]:
        """See `Renderer.opening`."""
        return []

    def chunk(self, choice_delta: ChoiceDelta, usage: Usage) -> list[Json]:
        """See `Renderer.chunk`."""
        delta = choice_delta.delta
        says_tokens = self._request.num_logprobs is not None and delta.pieces
        is_worth_telling = (
            delta.text or delta.reasoning or delta.finish_reason or says_tokens or choice_delta.prompt_logprobs
        )
        return [self._chunk([self._choice_chunk(choice_delta)], usage)] if is_worth_telling else []

    def closing(self, usage: Usage) -> list[Json]:
        """See `Renderer.closing`."""
        return [{**self._frame(self.chunk_object, []), "usage": usage.as_json()}] if self._request.includes_usage else []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """See `Renderer.whole`."""
        return {**self._frame(self.whole_object, [self._whole_choice(c) for c in choices]), "usage": usage.as_json()}

    def _choice_chunk(self, choice_delta: ChoiceDelta) -> Json:
        raise NotImplementedError

    def _whole_choice(self, choice: Choice) -> Json:
        raise NotImplementedError

    def _frame(self, object_: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": object_, "created": self._created, "model": self._model, "choices": choices}

    def _chunk(self, choices: list[Json], usage: Usage) -> Json:
        frame = self._frame(self.chunk_object, choices)
        if self._request.counts_along:
            return {**frame, "usage": usage.as_json()}
        return {**frame, "usage": None} if self._request.includes_usage else frame

    def _prompt_part(self, pieces: Sequence[TokenPiece] | None) -> Json:
        """`prompt_logprobs`, as vLLM writes them: for each token null or a map of token ids."""
        if pieces is None:
            return {}
        entries: list[Json | None] = []
        for piece in pieces:
            if piece.logprobs is None:
                entries.append(None)
                continue
            found = {piece.token: piece.logprobs.chosen, **dict(piece.logprobs.top)}
            entries.append(
                {
                    str(token): {"logprob": _finite(value), "decoded_token": self._text(token)}
                    for token, value in found.items()
                }
            )
        return {"prompt_logprobs": entries}

    def _text(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


class ChatRenderer(_Renderer):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, num_choices: int, usage: Usage) -> list[Json]:
        """See `Renderer.opening`: the role comes first, once per choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], usage)
            for index in range(num_choices)
        ]

    def _choice_chunk(self, choice_delta: ChoiceDelta) -> Json:
        delta = choice_delta.delta
        content = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        return {
            "index": choice_delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta.pieces),
            "finish_reason": delta.finish_reason,
            **self._prompt_part(choice_delta.prompt_logprobs),
        }

    def _whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        reasoning = "".join(choice.reasoning)
        return {
            "index": choice.index,
            "message": {**message, "reasoning_content": reasoning} if reasoning else message,
            "logprobs": self._logprobs(choice.pieces),
            "finish_reason": choice.finish_reason,
            **self._prompt_part(choice.prompt_logprobs),
        }

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> Json | None:
        if self._request.num_logprobs is None:
            return None
        return {"content": [self._token(piece) for piece in pieces], "refusal": None}

    def _token(self, piece: TokenPiece) -> Json:
        assert piece.logprobs is not None
        top = [self._entry(token, value) for token, value in piece.logprobs.top]
        return {**self._entry(piece.token, piece.logprobs.chosen), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> Json:
        raw = self._bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionRenderer(_Renderer):
    """POST /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _choice_chunk(self, choice_delta: ChoiceDelta) -> Json:
        delta = choice_delta.delta
        return {
            **self._choice(choice_delta.index, delta.text, delta.pieces, delta.finish_reason),
            **self._prompt_part(choice_delta.prompt_logprobs),
        }

    def _whole_choice(self, choice: Choice) -> Json:
        return {
            **self._choice(choice.index, "".join(choice.text), choice.pieces, choice.finish_reason),
            **self._prompt_part(choice.prompt_logprobs),
        }

    def _choice(self, index: int, text: str, pieces: Sequence[TokenPiece], finish_reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(pieces), "finish_reason": finish_reason}

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> Json | None:
        if self._request.num_logprobs is None:
            return None
        return {
            "tokens": [self._name(piece.token) for piece in pieces],
            "token_logprobs": [None if piece.logprobs is None else _finite(piece.logprobs.chosen) for piece in pieces],
            "top_logprobs": [
                None
                if piece.logprobs is None
                else {self._name(token): _finite(value) for token, value in piece.logprobs.top}
                for piece in pieces
            ],
            "text_offset": [piece.offset for piece in pieces],
        }

    def _name(self, token: int) -> str:
        """The token's text; for a part of a character its bytes, as OpenAI writes them, so that names stay apart."""
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
