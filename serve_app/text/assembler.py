"""One request's tokens become text: detokenized, cut at a stop string, its reasoning split off, ended once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.engine.request import FinishReason, TokenLogprobs, TokenOutput
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.reasoning import ReasoningSplitter
from serve_app.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token, where its text begins in characters from the beginning of the whole text, and what was reported of it."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one request. The last delta, and no other, has a finish reason.

    Attributes:
        text: may be empty while a character or a possible stop string is incomplete.
        num_tokens: tokens drawn for this delta, an end token among them.
        finish_reason: why it ended.
        reasoning: new text of the reasoning part, where that is split off.
        pieces: the tokens that became text (an end token does not).
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    pieces: tuple[TokenPiece, ...] = ()


class TextAssembler:
    """Folds `TokenOutput`s into `TextDelta`s.

    Args:
        detokenizer: of this request alone.
        stops: non-empty stop strings.
        includes_stop: whether the one that is found ends the text; else it is not part of it.
        reasoning: splits the reasoning off, where the model has it.
        offset: characters of the whole text that come before.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        reasoning: ReasoningSplitter | None = None,
        offset: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, includes_stop=includes_stop)
        self._reasoning = reasoning
        self._num_characters = offset

    def push(self, outputs: Sequence[TokenOutput]) -> TextDelta:
        """Adds tokens, in order. Tokens behind a stop string that is found among them do not count."""
        text: list[str] = []
        pieces: list[TokenPiece] = []
        count, finish_reason = 0, None
        for output in outputs:
            count += 1
            if output.finish_reason is not FinishReason.STOP:  # an end token gives no text
                pieces.append(TokenPiece(output.token, self._num_characters, output.logprobs))
                text.append(self._push_text(self._detokenizer.push(output.token)))
            if output.finish_reason is not None and self._stops.matched is None:
                text.append(self._push_text(self._detokenizer.finish()))
            if self._stops.matched is not None:
                finish_reason = FinishReason.STOP
                break
            if output.finish_reason is not None:
                finish_reason = output.finish_reason
                text.append(self._stops.finish())
        reasoning, answer = "", "".join(text)
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.push(answer, is_last=finish_reason is not None)
        return TextDelta(answer, count, finish_reason, reasoning, tuple(pieces))

    def _push_text(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stops.push(text)
