"""Where text comes from: the standard library, files of text, JSON lines, Parquet, TensorFlow Datasets."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pe_lab.config import SourceConfig
from pe_lab.errors import UserError, did_you_mean

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
        """The documents, one after another. Raises UserError at one that cannot be read."""

    def count(self) -> int | None:
        """How many documents, where that is known without reading them."""

    def identity(self) -> Any:
        """JSON that changes when the corpus does (file names and sizes, versions): the key of the cache."""


def open_source(config: SourceConfig) -> Source:
    """The source a config names.

    Raises:
      UserError: the kind is unknown, nothing matches, or a column or package is missing.
    """
    kind, _, where = config.source.partition(":")
    if kind == "stdlib" and not where:
        return StandardLibrary()
    if kind not in KINDS:
        raise UserError(
            f"data source {config.source!r}: unknown kind {kind!r}. "
            f"{did_you_mean(kind, (*KINDS, 'needles', 'prepared'))} "
            "Use stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB, tfds:NAME[/SPLIT], prepared:DIR or needles."
        )
    if not where or kind == "stdlib":
        raise UserError(
            f"data source {config.source!r} is incomplete. Use stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB "
            "or tfds:NAME."
        )
    if kind == "tfds":
        return TensorFlowDataset(config.source, where, config.column, config.options)
    files = _matching_files(config.source, where)
    if kind == "text":
        return TextFiles(config.source, files)
    if kind == "jsonl":
        return JsonLines(config.source, files, config.column)
    return ParquetFiles(config.source, files, config.column)


def _matching_files(name: str, pattern: str) -> list[Path]:
    """Files matching a glob (`~` and `**` allowed), sorted."""
    expanded = str(Path(pattern).expanduser())
    found = sorted(Path(p) for p in glob.glob(expanded, recursive=True))
    files = [p for p in found if p.is_file()]
    if not files:
        base = Path(glob.glob(expanded)[0]) if found else Path(expanded)
        hint = (
            f"{base} is a directory; write {base}/**/* to take what is in it."
            if found
            else f"Looked from {Path.cwd()}."
        )
        raise UserError(f"No file matches data source {name!r}. {hint}")
    if not any(p.stat().st_size for p in files):
        raise UserError(f"data source {name!r} is empty: its {len(files)} file(s) have 0 bytes.")
    return files


def _file_identity(files: list[Path]) -> dict[str, Any]:
    sizes = [(str(p), p.stat().st_size) for p in files]
    digest = hashlib.blake2b(repr(sizes).encode(), digest_size=8).hexdigest()
    return {"files": len(files), "bytes": sum(size for _, size in sizes), "names_and_sizes": digest}


def _read_failed(path: Path, error: Exception) -> UserError:
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{path} is not UTF-8 (byte {error.start}). Convert it, or leave it out of the glob.")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(f"Cannot read {path}: {reason}.")


class StandardLibrary:
    """The running interpreter's standard library: a document a module, and the prose of its help topics."""

    name = "stdlib"

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        self._files = [self._root / name for name in sorted(self._names())]
        if not self._files:
            raise UserError(
                f"data source 'stdlib': no Python files under {self._root}. This interpreter ships compiled "
                "modules only."
            )

    def _names(self) -> Iterator[str]:
        for directory, subdirectories, files in os.walk(self._root):
            subdirectories[:] = [d for d in subdirectories if d not in SKIPPED_DIRECTORIES]
            for file in files:
                name = (Path(directory) / file).relative_to(self._root).as_posix()
                # The help topics are read as prose below; _sysconfigdata is this machine's build settings.
                if file.endswith(".py") and name != "pydoc_data/topics.py" and not file.startswith("_sysconfigdata"):
                    yield name

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                with tokenize.open(path) as file:  # honours a coding cookie
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # not source text; the rest of the library is enough
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


class TextFiles:
    """One UTF-8 file (or .gz of one), one document."""

    def __init__(self, name: str, files: list[Path]):
        self.name, self._files = name, files

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                content = path.read_bytes()
                content = gzip.decompress(content) if path.suffix == ".gz" else content
                text = content.decode("utf-8")
            except (OSError, EOFError, UnicodeDecodeError) as error:
                raise _read_failed(path, error) from error
            if text:
                yield text

    def count(self) -> int | None:
        return len(self._files)

    def identity(self) -> Any:
        return _file_identity(self._files)


class JsonLines:
    """One JSON object a line (or .gz of such), one document: the text in `column`."""

    def __init__(self, name: str, files: list[Path], column: str):
        self.name, self._files, self._column = name, files, column

    def documents(self) -> Iterator[str]:
        for path in self._files:
            try:
                with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                    for number, line in enumerate(file, start=1):
                        if line.strip() and (text := self._text(path, number, line)):
                            yield text
            except (OSError, EOFError, UnicodeDecodeError) as error:
                raise _read_failed(path, error) from error

    def _text(self, path: Path, number: int, line: bytes) -> str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}.") from error
        if not isinstance(row, dict) or self._column not in row:
            has = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
            raise UserError(
                f"{path}, line {number} has no column {self._column!r} (it has: {has}). Set the source's column."
            )
        text = row[self._column]
        if text is not None and not isinstance(text, str):
            raise UserError(f"{path}, line {number}: column {self._column!r} holds a {type(text).__name__}, not text.")
        return text or ""

    def count(self) -> int | None:
        return None

    def identity(self) -> Any:
        return _file_identity(self._files)


class ParquetFiles:
    """Rows of Parquet files, streamed a few thousand at a time: the text in `column`."""

    def __init__(self, name: str, files: list[Path], column: str):
        self.name, self._files, self._column = name, files, column
        self._open(files[0]).close()  # a wrong column is known before any work is done

    def _open(self, path: Path) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(
                f"Cannot read {path} as Parquet: {error}. Check the file, or leave it out of the glob."
            ) from error
        if self._column not in file.schema_arrow.names:
            has = ", ".join(file.schema_arrow.names)
            raise UserError(f"{path} has no column {self._column!r} (it has: {has}). Set the source's column.")
        kind = file.schema_arrow.field(self._column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"{path}: column {self._column!r} is of type {kind}, not text. Set the source's column.")
        return file

    def documents(self) -> Iterator[str]:
        import pyarrow

        for path in self._files:
            with self._open(path) as file:
                try:
                    for batch in file.iter_batches(batch_size=2048, columns=[self._column]):
                        yield from filter(None, batch.column(0).to_pylist())
                except (OSError, pyarrow.ArrowException) as error:
                    raise UserError(
                        f"Cannot read {path} as Parquet: {error}. Check the file, or leave it out of the glob."
                    ) from error

    def count(self) -> int | None:
        total = 0
        for path in self._files:
            with self._open(path) as file:
                total += file.metadata.num_rows
        return total

    def identity(self) -> Any:
        return _file_identity(self._files)


class TensorFlowDataset:
    """`tfds:NAME[/CONFIG][/SPLIT]`, prepared as array_record, read at random without TensorFlow.

    The split is `train` unless named. `options`: `data_dir`, where TFDS keeps its data.
    """

    def __init__(self, name: str, where: str, column: str, options: Any):
        import tensorflow_datasets as tfds

        self.name, self._column = name, column
        if unknown := set(options) - {"data_dir"}:
            raise UserError(
                f"data source {name!r}: unknown option {min(unknown)!r}. {did_you_mean(min(unknown), ('data_dir',))}"
            )
        self._builder, self._split = self._find(tfds, where, options.get("data_dir"))
        try:
            self._data = self._builder.as_data_source(split=self._split)
        except Exception as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"data source {name!r} cannot be read at random: {first_line}") from error
        features = self._builder.info.features
        if column not in features:
            raise UserError(
                f"data source {name!r} has no column {column!r} (it has: {', '.join(features)}). Set the "
                "source's column."
            )
        if not len(self._data):
            raise UserError(f"data source {name!r} is empty: split {self._split!r} has no examples.")

    def _find(self, tfds: Any, where: str, data_dir: str | None) -> tuple[Any, str]:
        head, _, tail = where.rpartition("/")
        candidates = [(where, "train")] + ([(head, tail)] if head else [])
        failures = []
        for dataset, split in candidates:
            try:
                builder = tfds.builder(dataset, data_dir=data_dir)
            except Exception as error:  # TFDS raises whatever its registry or the file system does
                failures.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
                continue
            if not builder.info.splits:
                raise UserError(
                    f"data source {self.name!r}: {dataset} is not prepared under {builder.data_dir}. "
                    f"Run: tfds build {dataset} --file_format=array_record"
                )
            if split.partition("[")[0] not in builder.info.splits:
                has = ", ".join(builder.info.splits)
                raise UserError(f"data source {self.name!r}: {dataset} has no split {split!r} (it has: {has}).")
            return builder, split
        raise UserError(f"data source {self.name!r}: TensorFlow Datasets finds no such dataset: {failures[0]}")

    def documents(self) -> Iterator[str]:
        for index in range(len(self._data)):
            text = self._data[index][self._column]
            if not isinstance(text, bytes | str):
                raise UserError(
                    f"data source {self.name!r}: column {self._column!r} holds {type(text).__name__}, not text."
                )
            if text:
                yield text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text

    def count(self) -> int | None:
        return len(self._data)

    def identity(self) -> Any:
        info = self._builder.info
        return {
            "dataset": info.full_name,
            "split": self._split,
            "examples": len(self._data),
            "bytes": int(info.dataset_size),
        }
