"""One request's tokens become text: detokenized, cut at a stop string, ended once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.engine.request import FinishReason, TokenOutput
from serve_app.text.detokenizer import Detokenizer
from serve_app.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one request. The last delta, and no other, has a finish reason.

    Attributes:
        text: may be empty while a character or a possible stop string is incomplete.
        num_tokens: tokens drawn for this delta.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None


class TextAssembler:
    """Folds `TokenOutput`s into `TextDelta`s.

    Args:
        detokenizer: of this request alone.
        stops: non-empty stop strings; the one found is not part of the text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    def push(self, outputs: Sequence[TokenOutput]) -> TextDelta:
        """Adds tokens, in order. Tokens behind a stop string that is found among them do not count."""
        text = []
        for count, output in enumerate(outputs, start=1):
            is_end_token = output.finish_reason is FinishReason.STOP
            text.append(self._stops.push("" if is_end_token else self._detokenizer.push(output.token)))
            if output.finish_reason is not None and self._stops.matched is None:
                text.append(self._stops.push(self._detokenizer.finish()))
            if self._stops.matched is not None:
                return TextDelta("".join(text), count, FinishReason.STOP)
            if output.finish_reason is not None:
                text.append(self._stops.finish())
                return TextDelta("".join(text), count, output.finish_reason)
        return TextDelta("".join(text), len(outputs))
