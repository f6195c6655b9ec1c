"""Files of texts and of JSON lines, on this machine."""

from __future__ import annotations

import glob
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pe_lab.data.sources.records import Records
from pe_lab.data.sources.source import SHARD_BYTES, Document, InputShard, Source, grouped, split_evenly
from pe_lab.errors import DataError
from pe_lab.storage import json_object

MOST_EXPANSION = 100  # of a gzipped text, which shrinks to a third or a tenth; deflate can expand by 1,032


class InputFile(NamedTuple):
    """A file of a corpus: its path, and its size in bytes."""

    name: str
    size: int


class Part(NamedTuple):
    """The bytes [start, stop) of a file of `size` bytes."""

    name: str
    size: int
    start: int
    stop: int

    def __str__(self) -> str:
        base = self.name.rpartition("/")[2]
        whole = self.stop - self.start == self.size
        return base if whole else f"{base} bytes {self.start:,} to {self.stop:,}"


def find_files(source: str, pattern: str) -> list[InputFile]:
    """The files that match a glob (`~` and `**` allowed), sorted."""
    expanded = str(Path(pattern).expanduser())
    found = sorted(Path(p) for p in glob.glob(expanded, recursive=True))
    files = [p for p in found if p.is_file()]
    if not files:
        base = Path(glob.glob(expanded)[0]) if found else Path(expanded)
        hint = f"{base} is a directory; {base}/**/* matches the files in it." if found else f"Looked from {Path.cwd()}."
        raise DataError(f"No file matches data source {source!r}. {hint}")
    if not any(p.stat().st_size for p in files):
        raise DataError(f"data source {source!r} is empty: its {len(files)} file(s) have 0 bytes.")
    return [InputFile(str(p), p.stat().st_size) for p in files]


class Files(Source):
    """The files of a source. A shard is a list of parts of files: [name, start, stop] in bytes."""

    def __init__(self, name: str, files: Sequence[InputFile], records: Records):
        self.name, self._files, self._records = name, files, records

    def splits(self, file: InputFile | Part) -> bool:
        """Whether a part of a file can be read by itself."""
        return False

    def shards(self) -> list[InputShard]:
        parts = [
            Part(*file, start, stop)
            for file in self._files
            for start, stop in (split_evenly(file.size, SHARD_BYTES) if self.splits(file) else [(0, file.size)])
        ]
        shards = []
        for first, after in grouped(part.stop - part.start for part in parts):
            name = str(parts[first]) + (f" to {parts[after - 1]}" if after - first > 1 else "")
            shards.append(InputShard(len(shards), name, {"parts": [list(part) for part in parts[first:after]]}))
        return shards

    def read(self, shard: InputShard) -> Iterator[Document]:
        for part in shard.read["parts"]:
            yield from self.read_part(Part(*part))

    def read_part(self, part: Part) -> Iterator[Document]:
        """The documents that begin in a part of a file."""
        raise NotImplementedError

    def count(self) -> int | None:
        return None

    def identity(self) -> Any:
        sizes = [(file.name, file.size) for file in self._files]
        digest = hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()
        total = {"files": len(self._files), "bytes": sum(size for _, size in sizes), "names_and_sizes": digest}
        return {**total, **self._records.identity()}


def read_failed(name: str, error: Exception) -> DataError:
    """What an error of reading a file means for a user."""
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{name} is not UTF-8 (byte {error.start}). Convert it, or leave it out of the glob.")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"Cannot read {name}: {reason}. Check the file, or leave it out of the glob.")


class _Expanded:
    """A gzipped file, of which at most `MOST_EXPANSION` times its size, and 16 MiB, are decompressed."""

    def __init__(self, path: Path):
        self._path, self._file = path, gzip.open(path, "rb")  # noqa: SIM115 - closed below
        self._left = MOST_EXPANSION * path.stat().st_size + 2**24

    def __enter__(self) -> _Expanded:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._path} expands to more than {MOST_EXPANSION} times its size, which no text does. Decompress it "
                "by hand and look at it, or leave it out of the glob."
            )
        return content

    def read(self) -> bytes:
        return self._counted(self._file.read(self._left + 1))

    def readline(self) -> bytes:
        return self._counted(self._file.readline(self._left + 1))


def _open(name: str) -> BinaryIO | _Expanded:
    path = Path(name)
    return _Expanded(path) if path.suffix == ".gz" else path.open("rb")


class TextFiles(Files):
    """UTF-8 files, also gzipped (.gz), one document each."""

    def read_part(self, part: Part) -> Iterator[Document]:
        try:
            with _open(part.name) as file:
                text = file.read().decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise read_failed(part.name, error) from error
        if text:
            yield Document(text)

    def count(self) -> int | None:
        return len(self._files)


class JsonLines(Files):
    """Files of JSON lines, also gzipped (.gz), one document per line."""

    def splits(self, file: InputFile | Part) -> bool:
        return not file.name.endswith(".gz")

    def read_part(self, part: Part) -> Iterator[Document]:
        position, number, name = part.start, 0, part.name
        try:
            with _open(name) as file:
                if position:  # the line before the part belongs to the part in which it begins
                    file.seek(position - 1)
                    position += len(file.readline()) - 1
                while (position < part.stop or not self.splits(part)) and (line := file.readline()):
                    begins, number = position, number + 1
                    position += len(line)
                    if line.strip() and (document := self._document(line, part, begins, number)):
                        yield document
        except (OSError, EOFError, zlib.error) as error:
            raise read_failed(name, error) from error

    def _document(self, line: bytes, part: Part, begins: int, number: int) -> Document | None:
        def where() -> str:
            return f"{part.name}, " + (f"the line at byte {begins:,}" if part.start else f"line {number}")

        record = json_object(line)
        if record is None:
            raise DataError(f"{where()} is not a JSON object. Mend it, or leave the file out of the glob.")
        return self._records.document(record, where)
