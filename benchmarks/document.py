"""Tables that benchmarks put into documents."""

from __future__ import annotations

from pathlib import Path

from pe_lab.errors import UserError


class Place:
    """The text between `<!-- name -->` and `<!-- end of name -->` in a document; an error at once if it is missing.

    Raises:
      UserError: where there is no such document, or no such place in it.
    """

    def __init__(self, path: str | Path, name: str):
        self.path, self.first, self.last = Path(path), f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        self._around()

    def _around(self) -> tuple[str, str, str]:
        try:
            page = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--write={self.path}: it cannot be read ({error}).") from None
        before, first, rest = page.partition(self.first)
        text, last, after = rest.partition(self.last)
        if not first or not last:
            raise UserError(f"--write={self.path}: it has no place for this: {self.first.strip()} ... {self.last}.")
        return before, text, after

    @property
    def text(self) -> str:
        return self._around()[1].strip()

    def write(self, text: str) -> None:
        before, _, after = self._around()
        self.path.write_text(f"{before}{self.first}{text.strip()}\n{self.last}{after}", encoding="utf-8")
