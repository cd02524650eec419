"""Stop strings: found as soon as they are complete, never leaked in part, and holding back no more than they must."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one growing text for the first stop string that becomes complete.

    Which one that is does not depend on how the text is cut into pieces: the match that ends first wins, and among those
    that end together the longest.

    Args:
        stops: non-empty strings.
        includes_stop: whether the one that is found is shown.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found. Nothing may be pushed after it."""
        self.after = ""
        """What came behind it in the same piece of text."""

    def push(self, text: str) -> str:
        """Adds text and returns what can be shown: all but what a stop string has cut off or may still become one."""
        assert self.matched is None
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held, self.after = "", text[end:]
            return text[: end if self._includes_stop else start]
        keep = self._longest_open_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _longest_open_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
