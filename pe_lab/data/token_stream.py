"""Random access to the tokens of one split of prepared data, in memory-mapped shards."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt, UInt32

from pe_lab.errors import DataError
from pe_lab.storage import AnyPath, is_remote, local_copy
from pe_lab.storage.manifest import crc32c, digest_file

if TYPE_CHECKING:
    from pe_lab.data.shards import Metadata, Shard

BLOCK_TOKENS = 4096  # of a checksum: 8 or 16 kB
DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64}
MOST_HEADER_BYTES = 10_000


def tensor_places(content: bytes | np.ndarray) -> dict[str, tuple[np.dtype, int, int]]:
    """The dtype, the first byte and the number of elements of each tensor of a safetensors file, all one-dimensional.

    Raises:
      ValueError: the header is damaged, or does not fit the size of the file.
    """
    places = {}
    try:
        (size,) = struct.unpack("<Q", bytes(content[:8]))
        if size > min(MOST_HEADER_BYTES, len(content) - 8):
            raise ValueError("its size")
        for name, tensor in json.loads(bytes(content[8 : 8 + size])).items():
            dtype, (elements,), (start, stop) = DTYPES[tensor["dtype"]], tensor["shape"], tensor["data_offsets"]
            places[name] = (np.dtype(dtype).newbyteorder("<"), 8 + size + start, elements)
            if not 0 <= start <= stop <= len(content) - 8 - size or stop - start != elements * np.dtype(dtype).itemsize:
                raise ValueError(f"the place of {name!r:.40}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"its header is damaged ({error!r:.100})") from error
    return places


def index_crc32c(content: bytes | np.ndarray) -> str:
    """The CRC-32C of a shard file without its tokens, whose blocks have their own. `ValueError` as `tensor_places`."""
    dtype, start, tokens = tensor_places(content)["tokens"]
    return crc32c(bytes(content[:start]) + bytes(content[start + tokens * dtype.itemsize :]))


class _Mapped(NamedTuple):
    """A shard file mapped into memory."""

    tokens: UInt[np.ndarray, " tokens"]
    ends: Int64[np.ndarray, " documents"]
    crc32c: UInt32[np.ndarray, " blocks"]
    loss: UInt[np.ndarray, " bytes"] | None
    unverified: Bool[np.ndarray, " blocks"]  # blocks that nobody has read


class TokenStream:
    """Random access to the tokens of one split. Blocks are verified when they are read for the first time.

    Raises:
      DataError: from every method that reads: a shard is damaged, or is missing.
    """

    in_memory = True

    def __init__(self, directory: AnyPath, metadata: Metadata, split: str):
        self._directory, self._shards = directory, metadata.shards[split]
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._first = np.cumsum([0] + [shard.tokens for shard in self._shards])
        self.tokens = int(self._first[-1])
        self._mapped = functools.cache(self._map)

    def __getstate__(self) -> dict[str, Any]:  # a Grain worker maps its own files
        return {k: v for k, v in vars(self).items() if k != "_mapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._mapped = functools.cache(self._map)

    def gather(self, starts: Int[np.ndarray, " n"], length: int) -> UInt[np.ndarray, "n length"]:
        """The `length` tokens from each start; all must lie inside the stream."""
        starts = np.asarray(starts)
        found = np.empty((len(starts), length), self._dtype)
        if not len(starts) or not length:
            return found
        first, last = (np.searchsorted(self._first, at, side="right") - 1 for at in (starts, starts + length - 1))
        for i in np.flatnonzero(first != last):
            found[i] = self.read(int(starts[i]), int(starts[i]) + length)
        for number in np.unique(first[first == last]):
            mine = np.flatnonzero((first == number) & (first == last))
            mapped, inside = self._mapped(int(number)), starts[mine] - self._first[number]
            if mapped.unverified.any():
                for start in inside:
                    self._verify(int(number), int(start), int(start) + length)
            found[mine] = np.lib.stride_tricks.sliding_window_view(mapped.tokens, length)[inside]
        return found

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " n"]:
        """The tokens start..stop - 1, in the stored dtype."""
        stop = min(stop, self.tokens)
        if stop <= start:
            return np.zeros(0, self._dtype)
        parts = []
        for number in range(*self._shards_of(start, stop)):
            first = int(self._first[number])
            inside = max(start - first, 0), min(stop - first, self._shards[number].tokens)
            mapped = self._mapped(number)
            if mapped.unverified.any():
                self._verify(number, *inside)
            parts.append(mapped.tokens[slice(*inside)])
        return np.concatenate(parts)

    @functools.cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        """The number of tokens up to the end of each document."""
        parts = [self._mapped(i).ends + self._first[i] for i in range(len(self._shards))]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @property
    def has_loss(self) -> bool:
        """Whether only some tokens count as targets."""
        return any(self._mapped(i).loss is not None for i in range(len(self._shards)))

    def loss(self, starts: Int[np.ndarray, " n"], length: int) -> Bool[np.ndarray, "n length"]:
        """Whether each of the `length` tokens from each start counts as a target."""
        found = np.ones((len(starts), length), bool)
        for row, start in zip(found, map(int, starts), strict=True):
            for number in range(*self._shards_of(start, start + length)):
                first, bits = int(self._first[number]), self._mapped(number).loss
                if bits is None:
                    continue
                low, high = max(start - first, 0), min(start + length - first, self._shards[number].tokens)
                unpacked = np.unpackbits(bits[low // 8 : -(-high // 8)], bitorder="little")
                row[low + first - start : high + first - start] = unpacked[low % 8 :][: high - low]
        return found

    def _shards_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first shard that has tokens of start..stop - 1, and the one after the last."""
        first, last = np.searchsorted(self._first, [start, stop - 1], side="right")
        return int(first) - 1, int(last)

    def _verify(self, number: int, start: int, stop: int) -> None:
        """Compares the blocks of a shard that have the tokens start..stop - 1 with their checksums."""
        mapped = self._mapped(number)
        for block in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
            if mapped.unverified[block]:
                content = mapped.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
                if int(crc32c(content), 16) != mapped.crc32c[block]:
                    raise self._damaged(self._shards[number], f"block {block} is not the one that was written")
                mapped.unverified[block] = False

    def _damaged(self, shard: Shard, reason: object) -> DataError:
        return DataError(
            f"{self._directory / shard.file} is damaged: {reason}. Prepare the data again in another directory, or "
            "copy the file again."
        )

    def _map(self, number: int) -> _Mapped:
        shard = self._shards[number]
        try:
            path = self._directory / shard.file
            content = np.memmap(self._fetch(shard) if is_remote(path) else path, np.uint8, mode="r")
            if index_crc32c(content) != shard.index_crc32c:
                raise ValueError("it is not the file that was written")
            tensors = {
                name: content[start : start + count * dtype.itemsize].view(dtype)
                for name, (dtype, start, count) in tensor_places(content).items()
            }
            tokens, ends, checksums = tensors["tokens"], tensors["ends"], tensors["crc32c"]
            if (len(tokens), tokens.dtype, len(ends)) != (shard.tokens, self._dtype, shard.documents):
                raise ValueError("it does not have the tokens that metadata.json lists")
        except (OSError, ValueError, KeyError) as error:
            raise self._damaged(shard, str(error).splitlines()[0]) from error
        return _Mapped(tokens, ends, checksums, tensors.get("loss"), np.ones(len(checksums), bool))

    def _fetch(self, shard: Shard) -> Path:
        """A local copy of a shard on an object store."""

        def check(copied: Path) -> None:
            if digest_file(copied).crc32c != shard.crc32c:
                raise OSError("its digest is not the one that was written")

        return local_copy(self._directory / shard.file, check)
