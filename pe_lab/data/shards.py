"""Prepared data: token shards in ArrayRecord files, with a `metadata.json` and the tokenizer.

A prepared directory holds for every split the tokens of all documents, each document ended by EOS, in records of
`RECORD_TOKENS` little-endian unsigned integers. Reading any token takes one record.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, UInt

from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.errors import DataError
from pe_lab.storage import read_json

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
TOKENIZER_DIRECTORY = "tokenizer"
SPLITS = ("train", "validation")
RECORD_TOKENS = 16_384
RECORDS_PER_SHARD = 4_096  # 67M tokens a file
IN_MEMORY_BYTES = 512 * 2**20  # splits up to this size are kept in memory
CACHED_RECORDS = 256  # kept of a larger split, 8 to 16 MB


@dataclass(frozen=True)
class Shard:
    """One ArrayRecord file."""

    file: str
    records: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Metadata:
    """The description of a prepared directory: its contents and its origin."""

    source: str
    column: str
    identity: Any  # `Source.identity` at that time
    tokenizer: str  # its specification
    tokenizer_fingerprint: str
    vocab_size: int
    eos_id: int
    dtype: str  # "uint16" | "uint32"
    validation_fraction: float
    limit_documents: int | None
    documents: Mapping[str, int]  # per split
    tokens: Mapping[str, int]  # per split, with EOS
    characters: int
    content: str  # a hash of every document, in order
    record_tokens: int
    shards: Mapping[str, tuple[Shard, ...]]  # per split
    python: str
    created: str
    format: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order, with equal held-out documents."""
        return f"{self.content}-{self.tokenizer_fingerprint}-{self.validation_fraction}"


def read_metadata(directory: Path) -> Metadata:
    """The description of a prepared directory.

    Raises:
      DataError: the directory or its metadata is missing, damaged, or of another version.
    """
    path, advice = directory / METADATA_FILE, f"Prepare the data with python -m pe_lab.prepare --out={directory}."
    content = read_json(path, advice)
    if content.get("format") != FORMAT_VERSION:
        found = content.get("format")
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT_VERSION}. {advice}")
    try:
        shards = {split: tuple(Shard(**s) for s in content["shards"][split]) for split in SPLITS}
        return Metadata(**{**content, "shards": shards})
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}. {advice}") from error


class ShardWriter:
    """Writes the tokens of one split as records, with a new file every `RECORDS_PER_SHARD`."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype):
        self._directory, self._split, self._dtype = directory, split, dtype.newbyteorder("<")
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._writer: Any = None
        self._in_file = [0, 0]  # records, tokens
        self._path = directory
        self.record_tokens = RECORD_TOKENS
        self.shards: list[Shard] = []
        self.tokens = 0
        self.documents = 0

    def add(self, document: Int[np.ndarray, " n"]) -> None:
        """Appends one document with its EOS."""
        self._pending.append(document.astype(self._dtype))
        self._pending_tokens += len(document)
        self.tokens += len(document)
        self.documents += 1
        if self._pending_tokens >= self.record_tokens:
            self._flush(self.record_tokens)

    def _flush(self, at_least: int) -> None:
        joined = np.concatenate(self._pending) if self._pending else np.zeros(0, self._dtype)
        start = 0
        while len(joined) - start >= at_least:
            record = joined[start : start + self.record_tokens]
            self._write(record)
            start += len(record)
        self._pending, self._pending_tokens = [joined[start:]], len(joined) - start

    def _write(self, record: np.ndarray) -> None:
        from array_record.python import array_record_module

        if self._writer is None:
            self._path = self._directory / f"{self._split}-{len(self.shards):05d}.array_record"
            # One record per chunk: a random read decodes one record.
            self._writer = array_record_module.ArrayRecordWriter(str(self._path), "group_size:1,zstd:1")
        self._writer.write(record.tobytes())
        self._in_file[0] += 1
        self._in_file[1] += len(record)
        if self._in_file[0] == RECORDS_PER_SHARD:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        self.shards.append(Shard(self._path.name, *self._in_file, self._path.stat().st_size))
        self._in_file = [0, 0]

    def close(self) -> None:
        """Writes the last record; `shards` is then complete."""
        self._flush(1)
        self._finish_file()


class TokenStream:
    """Random access to the tokens of one split; up to `in_memory_bytes` are read into memory on first use."""

    def __init__(self, directory: Path, metadata: Metadata, split: str, in_memory_bytes: int = IN_MEMORY_BYTES):
        shards = metadata.shards[split]
        self._directory, self._shards = directory, shards
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._record_tokens = metadata.record_tokens
        self._first_record = np.cumsum([0] + [s.records for s in shards])
        self.tokens = sum(s.tokens for s in shards)
        self.in_memory = self.tokens * self._dtype.itemsize <= in_memory_bytes
        self._reset()

    def _reset(self) -> None:
        self._array: np.ndarray | None = None
        self._readers: dict[int, Any] = {}
        self._cache: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:  # a Grain worker opens its own files
        return {k: v for k, v in self.__dict__.items() if k not in ("_array", "_readers", "_cache", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def gather(self, starts: Int[np.ndarray, " n"], length: int) -> UInt[np.ndarray, "n length"]:
        """The `length` tokens from each start; all must lie inside the stream."""
        if not len(starts):
            return np.zeros((0, length), self._dtype)
        if self.in_memory:
            return np.lib.stride_tricks.sliding_window_view(self._whole(), length)[starts]
        return np.stack([self.read(int(s), int(s) + length) for s in starts])

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " n"]:
        """The tokens start..stop - 1, in the stored dtype."""
        stop = min(stop, self.tokens)
        if self.in_memory:
            return self._whole()[start:stop]
        if stop <= start:
            return np.zeros(0, self._dtype)
        first, last = start // self._record_tokens, (stop - 1) // self._record_tokens
        joined = np.concatenate([self._record(r) for r in range(first, last + 1)])
        return joined[start - first * self._record_tokens : stop - first * self._record_tokens]

    def _whole(self) -> np.ndarray:
        if self._array is None:
            with self._lock:
                if self._array is None:
                    parts = [b"".join(self._read(i, None)) for i in range(len(self._shards))]
                    self._array = np.frombuffer(b"".join(parts), self._dtype)
        return self._array

    def _record(self, record: int) -> np.ndarray:
        with self._lock:
            if record in self._cache:
                self._cache.move_to_end(record)
                return self._cache[record]
        shard = int(np.searchsorted(self._first_record, record, side="right")) - 1
        decoded = np.frombuffer(self._read(shard, record - int(self._first_record[shard]))[0], self._dtype)
        with self._lock:
            self._cache[record] = decoded
            if len(self._cache) > CACHED_RECORDS:
                self._cache.popitem(last=False)
        return decoded

    def _read(self, shard: int, record: int | None) -> list[bytes]:
        """One record of a shard file, or (None) all records."""
        from array_record.python import array_record_module

        path = self._directory / self._shards[shard].file
        try:
            if record is None:
                reader = array_record_module.ArrayRecordReader(str(path))
                records = reader.read_all()
                reader.close()
                return records
            with self._lock:
                reader = self._readers.get(shard)
                if reader is None:
                    reader = array_record_module.ArrayRecordReader(str(path), "readahead_buffer_size:0")
                    self._readers[shard] = reader
            return reader.read([record])
        except (RuntimeError, OSError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path} is damaged: {reason}. Delete {self._directory} and prepare the data again."
            ) from error


@dataclass(frozen=True)
class Prepared:
    """An open prepared directory."""

    directory: Path
    metadata: Metadata
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]  # per split

    def tokens(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """The tokens start..stop - 1 of a split."""
        return self.streams[split].read(start, stop).astype(np.int32)


def open_prepared(directory: Path, in_memory_bytes: int = IN_MEMORY_BYTES) -> Prepared:
    """Opens a prepared directory after checking the size of every file.

    Raises:
      DataError: the metadata, the tokenizer or a shard is missing, damaged, or does not fit the others.
    """
    metadata = read_metadata(directory)
    for shard in (s for split in SPLITS for s in metadata.shards[split]):
        path = directory / shard.file
        advice = f"Delete {directory} and prepare the data again, or copy the file again."
        if not path.is_file():
            raise DataError(f"{path} is missing. {advice}")
        if (size := path.stat().st_size) != shard.bytes:
            raise DataError(f"{path} is truncated or changed: {size} bytes, {shard.bytes} expected. {advice}")
    tokenizer = load_saved_tokenizer(directory / TOKENIZER_DIRECTORY)
    if tokenizer.fingerprint != metadata.tokenizer_fingerprint:
        raise DataError(
            f"{directory} was prepared with tokenizer {metadata.tokenizer_fingerprint}, but holds "
            f"{tokenizer.fingerprint}. Delete it and prepare the data again."
        )
    streams = {split: TokenStream(directory, metadata, split, in_memory_bytes) for split in SPLITS}
    return Prepared(directory, metadata, tokenizer, streams)
