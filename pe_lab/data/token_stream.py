"""Random access to the tokens of one split of prepared data, in memory-mapped shards."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np
from jaxtyping import Bool, Int, Int64, UInt, UInt32

from pe_lab.errors import DataError, excerpt
from pe_lab.storage import AnyPath, is_remote, local_copy
from pe_lab.storage.manifest import crc32c, digest_file

if TYPE_CHECKING:
    from pe_lab.data.shards import Metadata, Shard

BLOCK_TOKENS = 4096  # of a checksum: 8 or 16 kB
DTYPES = {"U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "I64": np.int64}
MOST_HEADER_BYTES = 10_000
FEW, LONG = 8, 256  # windows that are copied one by one, as NumPy takes more to find them than to copy them


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
                raise ValueError(f"the place of {excerpt(repr(name), 40)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"its header is damaged ({excerpt(repr(error), 100)})") from error
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

    threads = 1  # that read it best

    def __init__(self, directory: AnyPath, metadata: Metadata, split: str):
        self._directory, self._shards = directory, metadata.shards[split]
        self._dtype = np.dtype(metadata.dtype).newbyteorder("<")
        self._first = np.cumsum([0] + [shard.tokens for shard in self._shards])
        self.tokens = int(self._first[-1])
        self.has_loss = bool(metadata.chat)  # whether only some tokens are targets
        self._mapped = functools.cache(self._map)

    def gather(self, starts: Int[np.ndarray, " n"], length: int) -> UInt[np.ndarray, "n length"]:
        """The `length` tokens from each start; all must lie inside the stream."""
        starts = np.asarray(starts, np.int64)
        found = np.empty((len(starts), length), self._dtype)
        for number, mine, inside in self._by_shard(starts, length):
            if number is None:  # they begin in one shard and end in another one
                for i in mine.tolist():
                    found[i] = self.read(int(starts[i]), int(starts[i]) + length)
            elif len(mine) < FEW or length >= LONG:
                tokens = self._mapped(number).tokens
                for i, start in zip(mine.tolist(), inside.tolist(), strict=True):
                    found[i] = tokens[start : start + length]
            else:
                found[mine] = np.lib.stride_tricks.sliding_window_view(self._mapped(number).tokens, length)[inside]
        return found

    def gather_pieces(
        self, starts: Int[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """The tokens of pieces of documents, one after another. A document is in one shard."""
        starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
        stops = np.cumsum(lengths)
        found = np.empty(int(lengths.sum()), self._dtype)
        for number, mine, inside in self._by_shard(starts, lengths):
            tokens, each = self._mapped(number).tokens, lengths[mine]
            if each.sum() < LONG * len(mine):
                first, within = np.cumsum(each) - each, np.arange(int(each.sum()))
                found[np.repeat((stops[mine] - each) - first, each) + within] = tokens[
                    np.repeat(inside - first, each) + within
                ]
                continue
            for stop, start, length in zip(stops[mine].tolist(), inside.tolist(), each.tolist(), strict=True):
                found[stop - length : stop] = tokens[start : start + length]
        return found

    def _by_shard(
        self, starts: Int64[np.ndarray, " n"], lengths: Int64[np.ndarray, " n"] | int
    ) -> Iterator[tuple[int | None, Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]]:
        """(shard, which ranges are in it, their starts there), verified; (None, ...) of ranges in several shards."""
        if not len(starts):
            return
        lengths = np.broadcast_to(lengths, starts.shape)
        shard = np.searchsorted(self._first, starts, side="right") - 1
        shard[starts + lengths > self._first[shard + 1]] = len(self._shards)
        order = np.argsort(shard, kind="stable")
        numbers, first = np.unique(shard[order], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
            if number == len(self._shards):
                yield None, mine, starts[mine]
                continue
            inside = starts[mine] - self._first[number]
            self._verify(number, inside, inside + lengths[mine])
            yield number, mine, inside

    def read(self, start: int, stop: int) -> UInt[np.ndarray, " n"]:
        """The tokens start..stop - 1, in the stored dtype."""
        stop = min(stop, self.tokens)
        if stop <= start:
            return np.zeros(0, self._dtype)
        parts = []
        for number in range(*self._shards_of(start, stop)):
            first = int(self._first[number])
            inside = max(start - first, 0), min(stop - first, self._shards[number].tokens)
            self._verify(number, *(np.asarray([place]) for place in inside))
            parts.append(self._mapped(number).tokens[slice(*inside)])
        return np.concatenate(parts)

    @functools.cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        """The number of tokens up to the end of each document."""
        parts = [self._mapped(i).ends + self._first[i] for i in range(len(self._shards))]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def loss(self, starts: Int[np.ndarray, " n"], length: int) -> Bool[np.ndarray, "n length"]:
        """Whether each of the `length` tokens from each start counts as a target."""
        return self.loss_of((np.asarray(starts, np.int64)[:, None] + np.arange(length)).ravel()).reshape(-1, length)

    def loss_of(self, places: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Whether each of some tokens counts as a target."""
        found = np.ones(len(places), bool)
        shard = np.searchsorted(self._first, places, side="right") - 1
        for number in np.unique(shard).tolist():
            if (bits := self._mapped(number).loss) is not None:
                mine = np.flatnonzero(shard == number)
                inside = places[mine] - self._first[number]
                found[mine] = bits[inside >> 3] >> (inside & 7).astype(np.uint8) & 1
        return found

    def _shards_of(self, start: int, stop: int) -> tuple[int, int]:
        """The first shard that has tokens of start..stop - 1, and the one after the last."""
        first, last = np.searchsorted(self._first, [start, stop - 1], side="right")
        return int(first) - 1, int(last)

    def _verify(self, number: int, starts: Int64[np.ndarray, " n"], stops: Int64[np.ndarray, " n"]) -> None:
        """Compares the blocks of a shard that have the tokens of some ranges with their checksums."""
        mapped = self._mapped(number)
        if not mapped.unverified.any():
            return
        first, last = starts // BLOCK_TOKENS, -(-stops // BLOCK_TOKENS)
        wanted = np.zeros(len(mapped.unverified) + 1, np.int64)
        np.add.at(wanted, first, 1)
        np.subtract.at(wanted, last, 1)
        blocks = np.flatnonzero((np.cumsum(wanted[:-1]) > 0) & mapped.unverified)
        for block in blocks.tolist():
            content = mapped.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            if google_crc32c.value(content.tobytes()) != mapped.crc32c[block]:
                raise self._damaged(self._shards[number], f"block {block} is not the one that was written")
        mapped.unverified[blocks] = False

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
