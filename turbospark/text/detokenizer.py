"""Token ids to text as they come: no character is shown before all of its bytes are there.

Knows a `decode(ids) -> str` function. Does not know special tokens, stops or events.

Decoding each id by itself is wrong: one character may be several tokens, and a leading space is
dropped at the start of a text but not inside it. So each piece is decoded behind the previous one
and the difference is what is new. (`tokenizers.decoders.DecodeStream` works alike, but it raises a
bare Exception when byte tokens that began as valid UTF-8 go on as invalid, for example C3 A9 80,
and what it still holds at the end is lost.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"


class Detokenizer:
    """One stream. The pieces and the flushed tail, joined, equal the decoded whole.

    Except where the bytes are not UTF-8: nothing already given out is ever taken back, while a
    whole decode may spell an entire run of byte tokens differently once its end is known.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # the tokens of the last piece given out
        self._shown = ""  # their text
        self._held: list[int] = []  # tokens not given out yet

    def push(self, token: int) -> str:
        """The text that `token` completes; "" for special tokens and inside a character."""
        self._held.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._context, self._held = self._held, []
        self._shown = self._decode(self._context)
        return text

    def flush(self) -> str:
        """What is still held: bytes that never became a character come out as U+FFFD."""
        text = self._new_text() if self._held else ""
        self._held = []
        return text

    def _new_text(self) -> str:
        whole = self._decode(self._context + self._held)
        if whole.startswith(self._shown):
            return whole[len(self._shown) :]
        # The held bytes turned the shown ones invalid; those are out, so decode the rest alone.
        return self._decode(self._held)
