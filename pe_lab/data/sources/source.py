"""The interface of a corpus: documents in a fixed order, in shards that workers read on their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

SHARD_BYTES = 48 * 2**20  # of input, about, in one shard
MOST_FILES = 1024  # in one shard


class Document(NamedTuple):
    """A text, or the messages of a chat, which the tokenizer's chat template renders."""

    text: str  # "" where there are messages
    messages: tuple[Mapping[str, str], ...] | None = None  # {"role": ..., "content": ...}


class InputShard(NamedTuple):
    """A part of a corpus. With the source's config, it is all that another machine needs to read it."""

    name: str  # for people
    read: Mapping[str, Any]  # JSON, which the kind of source defines


@runtime_checkable
class DataSource(Protocol):
    """A corpus: documents in a fixed order."""

    name: str

    @abstractmethod
    def shards(self) -> list[InputShard]:
        """The shards. Their documents, one shard after another, are those of the corpus, in its order."""

    @abstractmethod
    def read(self, shard: InputShard) -> Iterator[Document]:
        """The documents of one shard. Raises `DataError` at one that cannot be read."""

    def documents(self) -> Iterator[Document]:
        """The documents of all shards."""
        for shard in self.shards():
            yield from self.read(shard)

    def count(self) -> int | None:
        """The number of documents; None if it is not known without reading them."""
        return None

    @abstractmethod
    def identity(self) -> Any:
        """JSON that changes with the corpus (file names and sizes, versions), as a key of the cache."""


def grouped(sizes: Iterable[int], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of consecutive items that have at most `most_bytes` together, or one item that has more."""
    start, total, index = 0, 0, -1
    for index, size in enumerate(sizes):
        if index > start and (total + size > most_bytes or index - start == MOST_FILES):
            yield start, index
            start, total = index, 0
        total += size
    if index >= start:
        yield start, index + 1


def split_evenly(size: int, most: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of 0 to `size`, nearly equal, each of at most `most`."""
    parts = max(1, -(-size // most))
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
