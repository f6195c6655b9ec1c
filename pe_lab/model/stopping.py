"""Where a generated text ends, and which part of it is final: ends of text, stop strings, characters cut in two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]

CONTEXT = 8  # tokens of the prompt before the new ones: some tokenizers write the first token of a text differently
INCOMPLETE = "\ufffd"  # what decoders write for the bytes of half a character


class Ending:
    """One row of generated tokens, as they come.

    Args:
      prompt: its ids.
      eos_ids: ids that end the text. They are not part of it.
      stop: strings that end the text. They are not part of it, and may begin and end within tokens.
      decode: ids -> text. None where nobody asks for text; then there are no stop strings.

    Attributes:
      ids: new ones so far. After a stop string, those before the token in which it begins.
      text: what is final of the text: no half characters, nothing that may turn out to be a stop string.
      done: nothing will be added.
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
        self._whole = ""  # of complete characters: `text`, and what is held back
        self._starts: list[int] = []  # of each id: how much of the text was complete before it
        self.ids: list[int] = []
        self.text = ""
        self.done = False

    def push(self, token: int) -> str:
        """Adds a token; returns what has become final of the text by it."""
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
        """Nothing more comes: what was held back is final."""
        if self.done:
            return ""
        piece = "" if self._decode is None else self._extend(self._pending())
        if not self.done:
            self.done = True
            piece += self._whole[len(self.text) :]
            self.text = self._whole
        return piece

    def _pending(self) -> str:
        """The text of the tokens that none has been written of. Their predecessors are decoded with them: what a
        token reads as may depend on the one before."""
        if self._decode is None or self._read == len(self._tokens):
            return ""
        known = self._decode(self._tokens[self._from : self._read])
        return self._decode(self._tokens[self._from :])[len(known) :]

    def _complete(self) -> str:
        """The same, as soon as it ends with a whole character."""
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
            final = len(self._whole) - held_back(self._whole, self._stop)
        piece, self.text = self._whole[len(self.text) : final], self._whole[:final]
        return piece

    def result(self) -> np.ndarray:
        """The new ids [n] int32."""
        return np.asarray(self.ids, np.int32)


def first_stop(text: str, stop: Sequence[str], known: int = 0) -> tuple[int, int]:
    """Where the stop string that is complete first ends and begins; (0, 0) where there is none.

    Of several that end at one place, the longest: the result does not depend on how the text came in pieces. No stop
    string ends within the first `known` characters.
    """
    found = []
    for one in stop:
        begin = text.find(one, max(0, known - len(one) + 1))
        if begin >= 0:
            found.append((begin + len(one), begin))
    return min(found, default=(0, 0))


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    longest = max((len(one) for one in stop), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-size:]
        if any(one.startswith(tail) for one in stop if len(one) > size):
            return size
    return 0
