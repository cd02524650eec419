"""Turns token ids into text one token at a time, and never gives out half a character.

For every tokenizer, the joined pieces equal the tokenizer's own decoding of all ids at once. A character that is spread
over several tokens comes out with the last of them; bytes that can never become a character come out as U+FFFD. When
generation ends in the middle of a character, `finish` gives one U+FFFD for its dangling bytes, streamed or not.
"""

from __future__ import annotations

import codecs
import re
from typing import Protocol

from tokenizers import Tokenizer, decoders

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def finish(self) -> str:
        """What is left when no more tokens come."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, the wrong way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return characters


BYTE_OF = _byte_level_alphabet()


BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte that it has no other token for."""


class TokenBytes:
    """The bytes of each token: exact for byte-level tokenizers; for others what the token usually stands for."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)

    def of(self, token_id: int) -> bytes:
        """The bytes that the token stands for; empty for an id the tokenizer does not know."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            if all(character in BYTE_OF for character in piece):
                return bytes(BYTE_OF[character] for character in piece)
            return piece.encode()
        byte = BYTE_TOKEN.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").removeprefix("##").encode()


class ByteLevelDetokenizer:
    """For byte-level tokenizers (GPT-2 and its heirs): tokens are bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, token_bytes: TokenBytes, skipped_ids: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._skipped = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes.of(token_id))

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes a short window of ids with the tokenizer's own decoder and gives what is new.

    The window starts at ids whose text is already out, because many decoders treat the first token of a list in their own
    way (SentencePiece drops its space). The method is that of text-generation-inference and vLLM.

    A run of byte tokens (SentencePiece's byte fallback) is decoded as a whole, because one wrong byte in it makes every
    byte of it U+FFFD: its text comes with the token behind it.
    """

    def __init__(self, backend: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped_ids
        self._ids: list[int] = []
        self._given = 0  # the first so many ids of the window have their text out

    def push(self, token_id: int) -> str:
        """See `Detokenizer.push`."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or ""):
            return ""
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):  # perhaps half a character
            return ""
        del self._ids[: self._given]
        self._given = len(self._ids)
        return text

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        text = self._new_text()
        self._ids, self._given = [], 0
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._given])
        return self._decode(self._ids)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def new_detokenizer(backend: Tokenizer, skipped_ids: frozenset[int]) -> Detokenizer:
    """The detokenizer that fits the tokenizer's decoder. `skipped_ids` (special tokens) give no text."""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return ByteLevelDetokenizer(TokenBytes(backend), skipped_ids)
    return WindowDetokenizer(backend, skipped_ids)
