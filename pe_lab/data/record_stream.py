"""Prepared data of formats 1 and 2: tokens in records of ArrayRecord files.

Reading any token takes one record. Beside a shard `x.array_record` of format 2, `x.crc32c` has the CRC-32C of each
record, as little-endian uint32: every record is verified when it is read.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt, UInt32

from pe_lab.errors import DataError
from pe_lab.storage import AnyPath, is_remote, local_copy, read_bytes
from pe_lab.storage.manifest import crc32c, digest_file

if TYPE_CHECKING:
    from pe_lab.data.shards import Metadata

IN_MEMORY_BYTES = 512 * 2**20  # splits up to this size are kept in memory
CACHED_RECORDS = 256  # kept of a larger split, 8 to 16 MB


class RecordStream:
    """Random access to the tokens of one split; up to IN_MEMORY_BYTES are read into memory on first use."""

    has_loss = False

    def __init__(self, directory: AnyPath, metadata: Metadata, split: str):
        shards = metadata.shards[split]
        self._directory, self._shards = directory, shards
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._record_tokens, self._eos_id = metadata.record_tokens, metadata.eos_id
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

    @functools.cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        """The number of tokens up to the end of each document; reads the whole split."""
        size = self._record_tokens
        found = [s + np.flatnonzero(self.read(s, s + size) == self._eos_id) for s in range(0, self.tokens, size)]
        return np.concatenate([np.zeros(0, np.int64), *found]) + 1

    def loss(self, starts: Int[np.ndarray, " n"], length: int) -> Bool[np.ndarray, "n length"]:
        """Whether each of the `length` tokens from each start counts as a target: all do."""
        return np.ones((len(starts), length), bool)

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
                f"{path} is damaged: {reason}. Prepare the data again in another directory, or copy the file again."
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
