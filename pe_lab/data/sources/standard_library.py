"""The standard library of the running interpreter as a corpus, which every machine has."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pe_lab.data.sources.source import DataSource, Document, InputShard, grouped
from pe_lab.errors import DataError

SHARD_BYTES = 2 * 2**20  # of modules in a shard: the whole corpus has 10 MB, and each core gets a part of it
SKIPPED_DIRECTORIES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}


class StandardLibrary(DataSource):
    """One document per module, and one per help topic of pydoc."""

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

    def shards(self) -> list[InputShard]:
        names = [path.relative_to(self._root).as_posix() for path in self._files]
        ranges = grouped((path.stat().st_size for path in self._files), SHARD_BYTES)
        modules = [
            InputShard(f"modules {names[a]} to {names[b - 1]}", {"modules": names[a:b], "topics": False})
            for a, b in ranges
        ]
        return [*modules, InputShard("help topics", {"modules": [], "topics": True})]

    def read(self, shard: InputShard) -> Iterator[Document]:
        for name in shard.read["modules"]:
            try:
                with tokenize.open(self._root / name) as file:  # decodes by the coding cookie
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # no source text
            if text.strip():
                yield Document(text)
        if shard.read["topics"]:
            with contextlib.suppress(ImportError):
                from pydoc_data.topics import topics

                yield from (Document(topics[name]) for name in sorted(topics))

    def identity(self) -> Any:
        return {
            "python": sys.version.split()[0],
            "files": len(self._files),
            "bytes": sum(p.stat().st_size for p in self._files),
        }
