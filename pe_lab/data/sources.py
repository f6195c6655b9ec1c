"""Corpora: the standard library, text files, JSON lines, Parquet and TensorFlow Datasets."""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import sys
import sysconfig
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pe_lab.config import SourceConfig
from pe_lab.errors import ConfigError, DataError, did_you_mean
from pe_lab.storage import json_object

MOST_EXPANSION = 100  # of a gzipped text, which shrinks to a third or a tenth; deflate can expand by 1,032
KINDS = ("stdlib", "text", "jsonl", "parquet", "tfds")
SKIPPED_DIRECTORIES = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib-dynload",
}


@runtime_checkable
class Source(Protocol):
    """A corpus: documents in a fixed order."""

    name: str

    def documents(self) -> Iterator[str]:
        """The documents. Raises `DataError` at one that cannot be read."""

    def count(self) -> int | None:
        """The number of documents; None if it is not known without reading them."""

    def identity(self) -> Any:
        """JSON that changes with the corpus (file names and sizes, versions), as a key of the cache."""


def open_source(config: SourceConfig) -> Source:
    """The source named in a config.

    Raises:
      ConfigError: the kind or the column is unknown.
      DataError: no file matches, or a file is of another kind.
    """
    kind, _, where = config.source.partition(":")
    allowed = ("data_dir",) if kind == "tfds" else ()
    for option in config.options:
        if kind in KINDS and option not in allowed:
            advice = did_you_mean(str(option), allowed) if allowed else "This kind of source has no options."
            raise ConfigError(f"data source {config.source!r}: unknown option {option!r}. {advice}")
    if kind == "stdlib" and not where:
        return StandardLibrary()
    if kind not in KINDS:
        raise ConfigError(
            f"data source {config.source!r}: unknown kind {kind!r}. "
            f"{did_you_mean(kind, (*KINDS, 'needles', 'prepared'))} "
            "Use stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, tfds:NAME[/SPLIT], prepared:DIR or needles."
        )
    if not where or kind == "stdlib":
        raise ConfigError(
            f"data source {config.source!r} is incomplete. Use stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB "
            "or tfds:NAME."
        )
    if kind == "tfds":
        return TensorFlowDataset(config.source, where, config.column, config.options)
    of_files = {"text": TextFiles, "jsonl": JsonLines, "parquet": ParquetFiles}[kind]
    return of_files(config.source, _matching_files(config.source, where), config.column)


def _matching_files(name: str, pattern: str) -> list[Path]:
    """The files that match a glob (`~` and `**` allowed), sorted."""
    expanded = str(Path(pattern).expanduser())
    found = sorted(Path(p) for p in glob.glob(expanded, recursive=True))
    files = [p for p in found if p.is_file()]
    if not files:
        base = Path(glob.glob(expanded)[0]) if found else Path(expanded)
        hint = f"{base} is a directory; {base}/**/* matches the files in it." if found else f"Looked from {Path.cwd()}."
        raise DataError(f"No file matches data source {name!r}. {hint}")
    if not any(p.stat().st_size for p in files):
        raise DataError(f"data source {name!r} is empty: its {len(files)} file(s) have 0 bytes.")
    return files


class StandardLibrary:
    """The standard library of the running interpreter: one document per module, and one per help topic of pydoc."""

    name = "stdlib"

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        self._files = [self._root / name for name in sorted(self._names())]
        if not self._files:
            raise DataError(
                f"data source 'stdlib': no Python files under {self._root}. This interpreter ships compiled modules "
                "only: use another source."
            )

    def _names(self) -> Iterator[str]:
        for directory, subdirectories, files in os.walk(self._root):
            subdirectories[:] = [d for d in subdirectories if d not in SKIPPED_DIRECTORIES]
            for file in files:
                name = (Path(directory) / file).relative_to(self._root).as_posix()
                # `_topics` yields the help topics; _sysconfigdata holds the build settings of this machine.
                if file.endswith(".py") and name != "pydoc_data/topics.py" and not file.startswith("_sysconfigdata"):
                    yield name

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                with tokenize.open(path) as file:  # decodes by the coding cookie
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # no source text
            if text.strip():
                yield text
        yield from self._topics()

    def _topics(self) -> Iterator[str]:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            return
        for name in sorted(topics):
            yield topics[name]

    def count(self) -> int | None:
        return None

    def identity(self) -> Any:
        return {
            "python": sys.version.split()[0],
            "files": len(self._files),
            "bytes": sum(p.stat().st_size for p in self._files),
        }


class _Files:
    """The files of a source; `column` names the text in a record."""

    def __init__(self, name: str, files: list[Path], column: str):
        self.name, self._files, self._column = name, files, column

    def count(self) -> int | None:
        return None

    def identity(self) -> Any:
        sizes = [(str(p), p.stat().st_size) for p in self._files]
        digest = hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()
        return {"files": len(self._files), "bytes": sum(size for _, size in sizes), "names_and_sizes": digest}


def _read_failed(path: Path, error: Exception) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{path} is not UTF-8 (byte {error.start}). Convert it, or leave it out of the glob.")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"Cannot read {path}: {reason}. Check the file, or leave it out of the glob.")


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

    def __iter__(self) -> Iterator[bytes]:
        while line := self._counted(self._file.readline(self._left + 1)):
            yield line


class TextFiles(_Files):
    """UTF-8 files, also gzipped (.gz), one document each."""

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                with _Expanded(path) if path.suffix == ".gz" else path.open("rb") as file:
                    text = file.read().decode("utf-8")
            except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
                raise _read_failed(path, error) from error
            if text:
                yield text

    def count(self) -> int | None:
        return len(self._files)


class JsonLines(_Files):
    """Files of JSON lines, also gzipped (.gz), one document per line."""

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                with _Expanded(path) if path.suffix == ".gz" else path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        if line.strip() and (text := self._text(path, number, line)):
                            yield text
            except (OSError, EOFError, zlib.error) as error:
                raise _read_failed(path, error) from error

    def _text(self, path: Path, number: int, line: bytes) -> str:
        record = json_object(line)
        if record is None:
            raise DataError(f"{path}, line {number} is not a JSON object. Mend it, or leave the file out of the glob.")
        _check_column(f"{path}, line {number}", self._column, record)
        text = record[self._column]
        if text is not None and not isinstance(text, str):
            raise DataError(f"{path}, line {number}: column {self._column!r} holds a {type(text).__name__}, not text.")
        return text or ""


def _check_column(where: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        has = ", ".join(str(name) if str(name).isprintable() else repr(name) for name in columns)
        raise ConfigError(f"{where} has no column {column!r} (it has: {has:.500}). Set the source's column.")


class ParquetFiles(_Files):
    """Parquet files, one document per row, streamed a few thousand rows at a time."""

    def __init__(self, name: str, files: list[Path], column: str):
        super().__init__(name, files, column)
        self._open(files[0]).close()  # finds a wrong column early

    def _open(self, path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise _read_failed(path, error) from error
        _check_column(str(path), self._column, file.schema_arrow.names)
        kind = file.schema_arrow.field(self._column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise ConfigError(f"{path}: column {self._column!r} is of type {kind}, not text. Set the source's column.")
        return file

    def documents(self) -> Iterator[str]:
        import pyarrow

        for path in self._files:
            with self._open(path) as file:
                try:
                    for batch in file.iter_batches(batch_size=2048, columns=[self._column]):
                        yield from filter(None, batch.column(0).to_pylist())
                except (OSError, pyarrow.ArrowException) as error:
                    raise _read_failed(path, error) from error

    def count(self) -> int | None:
        total = 0
        for path in self._files:
            with self._open(path) as file:
                total += file.metadata.num_rows
        return total


class TensorFlowDataset:
    """`tfds:NAME[/CONFIG][/SPLIT]`, prepared as array_record and read without TensorFlow.

    The split is `train` by default. `options`: `data_dir`, the directory of the datasets.
    """

    def __init__(self, name: str, where: str, column: str, options: Any):
        import tensorflow_datasets as tfds

        self.name, self._column = name, column
        data_dir = options.get("data_dir")
        if not isinstance(data_dir, str | None):
            raise ConfigError(f"data source {name!r}: option data_dir is {data_dir!r}; it must be a directory's path.")
        self._builder, self._split = self._find(tfds, where, data_dir)
        try:
            self._data = self._builder.as_data_source(split=self._split)
        except Exception as error:
            raise DataError(f"data source {name!r} has no random access: {_first_line(error)}") from error
        _check_column(f"data source {name!r}", column, self._builder.info.features)
        if not len(self._data):
            raise DataError(f"data source {name!r} is empty: split {self._split!r} has no examples.")

    def _find(self, tfds: Any, where: str, data_dir: str | None) -> tuple[Any, str]:
        head, _, tail = where.rpartition("/")
        candidates = [(where, "train")] + ([(head, tail)] if head else [])
        failures = []
        for dataset, split in candidates:
            try:
                builder = tfds.builder(dataset, data_dir=data_dir)
            except Exception as error:  # of any type: from the registry or the file system
                failures.append(_first_line(error))
                continue
            if not builder.info.splits:
                raise DataError(
                    f"data source {self.name!r}: {dataset} is not prepared under {builder.data_dir}. "
                    f"Run: tfds build {dataset} --file_format=array_record"
                )
            if split.partition("[")[0] not in builder.info.splits:
                has = ", ".join(builder.info.splits)
                raise ConfigError(f"data source {self.name!r}: {dataset} has no split {split!r} (it has: {has}).")
            return builder, split
        raise ConfigError(f"data source {self.name!r}: TensorFlow Datasets finds no such dataset: {failures[0]}")

    def documents(self) -> Iterator[str]:
        for index in range(len(self._data)):
            text = self._data[index][self._column]
            if not isinstance(text, bytes | str):
                raise ConfigError(
                    f"data source {self.name!r}: column {self._column!r} holds {type(text).__name__}, not text."
                )
            if text:
                yield text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text

    def count(self) -> int | None:
        return len(self._data)

    def identity(self) -> Any:
        info = self._builder.info
        sizes = {"examples": len(self._data), "bytes": int(info.dataset_size)}
        return {"dataset": info.full_name, "split": self._split, **sizes}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
