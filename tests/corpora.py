"""Small corpora of random words as JSON lines, and what a preparation of them wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pe_lab.config import SourceConfig
from pe_lab.data.preparation import prepare
from pe_lab.data.shards import Metadata, open_prepared
from pe_lab.data.tokenizers import ByteTokenizer

COLOURS = ["red", "orange", "yellow", "green", "blue", "indigo", "violet", "black", "white", "grey"]
WORDS = [f"word{i}" for i in range(500)]


def numbered(path: Path, count: int, seed: int = 0, words: int = 30) -> str:
    """Writes `count` documents, each of its number and up to `words` - 1 colours; the name of the source."""
    rng = np.random.default_rng(seed)
    rows = [{"text": f"{i}: " + " ".join(rng.choice(COLOURS, rng.integers(1, words)))} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def sentences(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Documents of so many words each."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def corpus(directory: Path, *files: Sequence[str]) -> SourceConfig:
    """A source of files with these documents."""
    for number, documents in enumerate(files):
        text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        (directory / f"c{number}.jsonl").write_text(text)
    return SourceConfig(f"jsonl:{directory}/c*.jsonl")


def run(config: SourceConfig, out: Path, fraction: float = 0.1, **settings) -> Metadata | None:
    """Prepares the bytes of a source."""
    return prepare(config, ByteTokenizer(), "bytes", out, fraction, **settings)


def documents_of(out: Path, split: str) -> list[str]:
    """The documents of a split of a prepared directory."""
    opened = open_prepared(out)
    stream = opened.streams[split]
    tokens = stream.read(0, stream.tokens)
    pieces = np.split(tokens, stream.ends)[:-1] if len(stream.ends) else []
    return [opened.tokenizer.decode(piece) for piece in pieces]
