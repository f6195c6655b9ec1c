"""The end of a generated text, and its final part: eos ids, stop strings and incomplete characters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

CONTEXT = 8  # tokens of the prompt before the new ones, because some tokenizers decode a first token differently
INCOMPLETE = "\ufffd"  # decoders write it for the bytes of an incomplete character


class Ending:
    """The ids and the text of one row, during generation.

    Args:
      prompt: its ids.
      eos_ids: ids that end the text. They are not part of it.
      stop: strings that end the text. They are not part of it, and may begin and end within tokens.
      decode: ids -> text. None if no text is needed; then there are no stop strings.

    Attributes:
      ids: the new ids so far. After a stop string, those before the token in which it begins.
      text: the final part of the text, without incomplete characters and possible beginnings of a stop string.
      done: the text has ended.
    """

    def __init__(
        self,
        prompt: np.ndarray | Sequence[int],
        eos_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        decode: Decode | None = None,
    ):
        self._eos, self._stop, self._decode = frozenset(eos_ids), tuple(stop), decode
        self._tokens = [int(i) for i in prompt[-CONTEXT:]]
        self._from, self._read = 0, len(self._tokens)
        self._whole = ""  # all complete characters: `text`, and those that may begin a stop string
        self._starts: list[int] = []  # of each id: the length of the complete text before it
        self.ids: list[int] = []
        self.text = ""
        self.done = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is final because of it."""
        if self.done:
            return ""
        if token in self._eos:
            return self.finish()
        self.ids.append(int(token))
        self._starts.append(len(self._whole))
        if self._decode is None:
            return ""
        self._tokens.append(int(token))
        return self._extend(self._complete())

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        if self.done:
            return ""
        piece = "" if self._decode is None else self._extend(self._pending())
        if not self.done:
            self.done = True
            piece += self._whole[len(self.text) :]
            self.text = self._whole
        return piece

    def _pending(self) -> str:
        """The undecoded part of the text. It is decoded with the tokens before, on which it may depend."""
        if self._decode is None or self._read == len(self._tokens):
            return ""
        known = self._decode(self._tokens[self._from : self._read])
        return self._decode(self._tokens[self._from :])[len(known) :]

    def _complete(self) -> str:
        """The undecoded part of the text if it ends with a complete character, else ""."""
        text = self._pending()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return text

    def _extend(self, complete: str) -> str:
        before, self._whole = len(self._whole), self._whole + complete
        end, begin = first_stop(self._whole, self._stop, before)
        if end:
            self.done, self._whole = True, self._whole[:begin]
            self.ids = [i for i, start in zip(self.ids, self._starts, strict=True) if start < begin]
            final = begin
        else:
            final = len(self._whole) - possible_stop(self._whole, self._stop)
        piece, self.text = self._whole[len(self.text) : final], self._whole[:final]
        return piece

    def result(self) -> np.ndarray:
        """The new ids [n] int32."""
        return np.asarray(self.ids, np.int32)


def first_stop(text: str, stop: Sequence[str], known: int = 0) -> tuple[int, int]:
    """The end and the beginning of the stop string that ends first; (0, 0) if there is none.

    Of several with the same end it is the longest, so that the result does not depend on the pieces of the text. No
    stop string ends within the first `known` characters.
    """
    found = []
    for one in stop:
        begin = text.find(one, max(0, known - len(one) + 1))
        if begin >= 0:
            found.append((begin + len(one), begin))
    return min(found, default=(0, 0))


def possible_stop(text: str, stop: Sequence[str]) -> int:
    """The number of last characters that may be the beginning of a stop string."""
    longest = max((len(one) for one in stop), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(one.startswith(tail) for one in stop if len(one) > size):
            return size
    return 0
