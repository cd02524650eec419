"""Splits what a reasoning model thinks (between two tags, at the beginning) from what it answers."""

from __future__ import annotations

from serve_app.text.stop_strings import StopStrings


class ReasoningSplitter:
    """Watches one growing text. Neither tag becomes part of either side, nor does the white space around them.

    Args:
        start: the tag that opens the reasoning; only white space may come before it.
        end: the tag that closes it.
        is_open: whether the prompt has opened it already.
    """

    def __init__(self, start: str, end: str, *, is_open: bool = False) -> None:
        self._start = start
        self._end = StopStrings([end])
        self._is_inside = is_open
        self._is_before = not is_open
        self._head = ""  # what came before it is clear whether there is a tag
        self._trims = True  # white space at the beginning of a side is not given

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Adds text; returns new reasoning and new answer."""
        if self._is_before:
            self._head += text
            trimmed = self._head.lstrip()
            if trimmed.startswith(self._start):
                self._is_before, self._is_inside = False, True
                text = trimmed[len(self._start) :]
            elif self._start.startswith(trimmed) and not is_last:
                return "", ""
            else:
                self._is_before, self._trims = False, False
                return "", self._head
        reasoning = ""
        if self._is_inside:
            reasoning = self._trim(self._end.push(text))
            if self._end.matched is None:
                return reasoning + (self._trim(self._end.finish()) if is_last else ""), ""
            self._is_inside, self._trims = False, True
            text = self._end.after
        return reasoning, self._trim(text)

    def _trim(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
