"""What each kind of fuzzed input has: real files, their damages, and the reader of pe_lab that gets them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from pathlib import Path

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "hf"
TEXT = "Hello  world, 1234 naïve 日本\n\tdef f(x): return x ** 2  # <|endoftext|> </s>\n"


class Kind(ABC):
    """One kind of input. `prepare` makes real files below a directory, and writes them as an intact input."""

    name: str

    @abstractmethod
    def prepare(self, directory: Path) -> None: ...

    @abstractmethod
    def write(self, rng: random.Random) -> None:
        """Writes a damaged input in place of the last one."""

    @abstractmethod
    def read(self) -> None:
        """Reads the input; `UserError` if it is refused."""
