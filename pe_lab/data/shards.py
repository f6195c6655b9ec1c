"""Prepared data: token shards in ArrayRecord files, with a `metadata.json` and the tokenizer.

A prepared directory holds for every split the tokens of all documents, each document ended by EOS, in records of
`RECORD_TOKENS` little-endian unsigned integers. Reading any token takes one record. Beside a shard `x.array_record`,
`x.crc32c` has the CRC-32C of each record, as little-endian uint32, and metadata.json has the digests of both files:
every record is verified when it is read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, UInt, UInt32

from pe_lab.data.tokenizers import Tokenizer, load_saved_tokenizer
from pe_lab.errors import DataError
from pe_lab.storage import AnyPath, is_remote, listing, local_copy, read_bytes, read_json, write_json
from pe_lab.storage.manifest import SEAL, Digest, Manifest, crc32c, digest_file, seal_broken, sealed

FORMAT_VERSION = 2
FORMATS = (1, 2)  # 1 has no digests
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
    crc32c: str = ""  # of the file; "": not known
    records_crc32c: str = ""  # of the file that has the CRC-32C of each record
    documents: int = 0  # documents that end in it

    @property
    def records_file(self) -> str:
        """The file that has the CRC-32C of each record."""
        return str(Path(self.file).with_suffix(".crc32c"))


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

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order, with equal held-out documents."""
        return f"{self.content}-{self.tokenizer_fingerprint}-{self.validation_fraction}"


def read_metadata(directory: AnyPath) -> Metadata:
    """The description of a prepared directory; `DataError` if it is missing, damaged, or of another version."""
    path, advice = directory / METADATA_FILE, f"Prepare the data with python -m pe_lab.prepare --out={directory}."
    content = read_json(path, advice)
    if (found := content.get("format")) not in FORMATS:
        raise DataError(f"{path} has format {found!r}, this version reads {FORMAT_VERSION}. {advice}")
    if found > 1 and seal_broken(content):
        raise DataError(f"{path} is damaged: it does not have the content that was written. {advice}")
    try:
        shards = {split: tuple(Shard(**s) for s in content["shards"][split]) for split in SPLITS}
        metadata = Metadata(**{key: item for key, item in content.items() if key != SEAL} | {"shards": shards})
        defect = _defect(metadata)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {str(error).splitlines()[0]}. {advice}") from error
    if defect:
        raise DataError(f"{path} is damaged: {defect}. {advice}")
    return metadata


def _defect(metadata: Metadata) -> str:
    """The key of a description that has another type, or contradicts another key; "" if there is none."""

    def wrong(value: Any, kind: type) -> bool:
        return not isinstance(value, kind) or isinstance(value, bool) or (kind is int and not 0 <= value < 2**62)

    shards = [shard for split in SPLITS for shard in metadata.shards[split]]
    typed = {str: ("source", "column", "tokenizer", "tokenizer_fingerprint", "content", "python", "created")}
    typed[int] = ("vocab_size", "eos_id", "characters", "record_tokens")
    for kind, names in typed.items():
        for name in names:
            if wrong(getattr(metadata, name), kind):
                return name
    for counts in (metadata.documents, metadata.tokens):
        if any(wrong(counts[split], int) for split in SPLITS):
            return "documents or tokens"
    for shard in shards:
        if wrong(shard.file, str) or any(wrong(n, int) for n in (shard.records, shard.tokens, shard.bytes)):
            return f"the shard {shard.file!r:.60}"
        if (
            not re.fullmatch(r"[\w.-]{1,100}", shard.file)
            or not 0 < shard.tokens <= shard.records * metadata.record_tokens
        ):
            return f"the shard {shard.file!r:.60}"
    for split in SPLITS:
        if metadata.tokens[split] != sum(shard.tokens for shard in metadata.shards[split]):
            return f"the tokens of {split} are not those of its shards"
    fraction = metadata.validation_fraction
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        return "validation_fraction"
    if metadata.dtype not in ("uint16", "uint32") or not 1 <= metadata.record_tokens <= 2**24:
        return "dtype or record_tokens"
    return "" if metadata.limit_documents is None or not wrong(metadata.limit_documents, int) else "limit_documents"


def manifest_of_prepared(metadata: Metadata) -> Manifest | None:
    """The digests of the shards as a manifest; None for data of an earlier version."""
    shards = [shard for split in SPLITS for shard in metadata.shards[split]]
    if not all(shard.crc32c for shard in shards):
        return None
    files = {shard.file: Digest(shard.bytes, shard.crc32c) for shard in shards}
    return Manifest(files | {shard.records_file: Digest(4 * shard.records, shard.records_crc32c) for shard in shards})


def write_metadata(directory: Path, metadata: Metadata) -> None:
    """Writes metadata.json, with a digest of itself."""
    write_json(directory / METADATA_FILE, sealed(dataclasses.asdict(metadata)))


class ShardWriter:
    """Writes the tokens of one split as records, with a new file every `RECORDS_PER_SHARD`."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype):
        self._directory, self._split, self._dtype = directory, split, dtype.newbyteorder("<")
        self._pending = np.zeros(0, self._dtype)  # less than a record
        self._writer: Any = None
        self._in_file = [0, 0]  # records, tokens
        self._checksums: list[int] = []  # of the records in the file
        self._ends: list[int] = []  # the number of tokens up to the end of each document that is not in a file yet
        self._path = directory
        self.record_tokens = RECORD_TOKENS
        self.shards: list[Shard] = []
        self.tokens = 0
        self.documents = 0

    def add(self, document: Int[np.ndarray, " n"]) -> None:
        """Appends one document with its EOS."""
        self._pending = np.concatenate([self._pending, document.astype(self._dtype)])
        self.tokens += len(document)
        self.documents += 1
        self._ends.append(self.tokens)
        while len(self._pending) >= self.record_tokens:
            self._write(self._pending[: self.record_tokens])
            self._pending = self._pending[self.record_tokens :]

    def _write(self, record: np.ndarray) -> None:
        from array_record.python import array_record_module

        if self._writer is None:
            self._path = self._directory / f"{self._split}-{len(self.shards):05d}.array_record"
            # One record per chunk: a random read decodes one record.
            self._writer = array_record_module.ArrayRecordWriter(str(self._path), "group_size:1,zstd:1")
        content = record.tobytes()
        self._writer.write(content)
        self._checksums.append(int(crc32c(content), 16))
        self._in_file[0] += 1
        self._in_file[1] += len(record)
        if self._in_file[0] == RECORDS_PER_SHARD:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        digest = digest_file(self._path)
        shard = Shard(self._path.name, *self._in_file, digest.size, digest.crc32c)
        checksums = np.asarray(self._checksums, "<u4").tobytes()
        (self._directory / shard.records_file).write_bytes(checksums)
        written = sum(s.tokens for s in self.shards) + shard.tokens
        ended = int(np.searchsorted(self._ends, written, side="right"))
        self.shards.append(dataclasses.replace(shard, records_crc32c=crc32c(checksums), documents=ended))
        self._in_file, self._checksums, self._ends = [0, 0], [], self._ends[ended:]

    def close(self) -> None:
        """Writes the last record; `shards` is then complete."""
        if len(self._pending):
            self._write(self._pending)
        self._finish_file()


class TokenStream:
    """Random access to the tokens of one split; up to IN_MEMORY_BYTES are read into memory on first use."""

    def __init__(self, directory: AnyPath, metadata: Metadata, split: str):
        shards = metadata.shards[split]
        self._directory, self._shards = directory, shards
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._record_tokens = metadata.record_tokens
        self._first_record = np.cumsum([0] + [s.records for s in shards])
        self.tokens = sum(s.tokens for s in shards)
        self.in_memory = self.tokens * self._dtype.itemsize <= IN_MEMORY_BYTES
        self._make_caches()

    def _make_caches(self) -> None:
        self._array: np.ndarray | None = None
        self._lock = threading.Lock()
        self._reader = functools.cache(self._open_shard)
        self._checksums = functools.cache(self._read_checksums)
        self._copy = functools.cache(self._fetch)
        self._record = functools.lru_cache(CACHED_RECORDS)(self._read_record)

    def __getstate__(self) -> dict[str, Any]:  # a Grain worker opens its own files
        return {
            k: v
            for k, v in vars(self).items()
            if k not in ("_array", "_lock", "_reader", "_record", "_checksums", "_copy")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_caches()

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

    def _whole(self) -> UInt[np.ndarray, " n"]:
        with self._lock:  # one thread reads
            if self._array is None:
                records = [record for shard in range(len(self._shards)) for record in self._read(shard, None)]
                self._array = np.frombuffer(b"".join(records), self._dtype)
            return self._array

    def _read_record(self, record: int) -> UInt[np.ndarray, " n"]:
        shard = int(np.searchsorted(self._first_record, record, side="right")) - 1
        (content,) = self._read(shard, [record - int(self._first_record[shard])])
        return np.frombuffer(content, self._dtype)

    def _read(self, shard: int, records: list[int] | None) -> list[bytes]:
        """Some records of a shard file, or (None) all, compared with their checksums."""
        path = self._directory / self._shards[shard].file
        try:
            if is_remote(path):  # ArrayRecord reads local files
                path = self._copy(shard)
            if records is not None:
                found = self._reader(path).read(records)
            else:
                reader = self._open_shard(path, readahead=2**24)
                found = reader.read_all()
                reader.close()
            if (expected := self._checksums(shard)) is not None:
                if records is None and len(found) != len(expected):
                    raise IndexError(f"it has {len(found)} records, {len(expected)} expected")
                for number, content in zip(range(len(found)) if records is None else records, found, strict=True):
                    if int(crc32c(content), 16) != expected[number]:
                        raise IndexError(f"record {number} is not the one that was written")
            return found
        except (RuntimeError, OSError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"{path} is damaged: {reason}. Delete {self._directory} and prepare the data again."
            ) from error

    def _read_checksums(self, shard: int) -> UInt32[np.ndarray, " records"] | None:
        """The checksum of each record of a shard; None for data of an earlier version."""
        if not (expected := self._shards[shard].records_crc32c):
            return None
        content = read_bytes(self._directory / self._shards[shard].records_file)
        if crc32c(content) != expected:
            raise OSError(f"{self._shards[shard].records_file} has changed")
        return np.frombuffer(content, "<u4")

    def _fetch(self, shard: int) -> Path:
        """A local copy of a shard on an object store."""
        expected = self._shards[shard]

        def check(copied: Path) -> None:
            if expected.crc32c and digest_file(copied).crc32c != expected.crc32c:
                raise OSError("its digest is not the one that was written")

        return local_copy(self._directory / expected.file, check)

    def _open_shard(self, path: Path, readahead: int = 0) -> Any:
        from array_record.python import array_record_module

        return array_record_module.ArrayRecordReader(str(path), f"readahead_buffer_size:{readahead}")


@dataclass(frozen=True)
class Prepared:
    """An open prepared directory."""

    directory: AnyPath
    metadata: Metadata
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]  # per split

    def tokens(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """The tokens start..stop - 1 of a split."""
        return self.streams[split].read(start, stop).astype(np.int32)


def open_prepared(directory: AnyPath) -> Prepared:
    """Opens a prepared directory after checking the size of every file.

    Raises:
      DataError: the metadata, the tokenizer or a shard is missing, damaged, or does not fit the others.
    """
    metadata, files = read_metadata(directory), listing(directory)
    for shard in (s for split in SPLITS for s in metadata.shards[split]):
        path = directory / shard.file
        advice = f"Delete {directory} and prepare the data again, or copy the file again."
        if shard.file not in files:
            raise DataError(f"{path} is missing. {advice}")
        if (size := files[shard.file].size) != shard.bytes:
            raise DataError(f"{path} is truncated or changed: {size} bytes, {shard.bytes} expected. {advice}")
    tokenizer = load_saved_tokenizer(directory / TOKENIZER_DIRECTORY)
    if tokenizer.fingerprint != metadata.tokenizer_fingerprint:
        raise DataError(
            f"{directory} was prepared with tokenizer {metadata.tokenizer_fingerprint}, but holds "
            f"{tokenizer.fingerprint}. Delete it and prepare the data again."
        )
    streams = {split: TokenStream(directory, metadata, split) for split in SPLITS}
    return Prepared(directory, metadata, tokenizer, streams)
