"""The kinds of input by name, and the damaged inputs of one, written one at a time."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .kind import TESTS, Kind
from .result_files import Results, Run, SweepFile
from .run_files import CheckpointMetadata, Prepared, Prompts, Recipe
from .tokenizer_files import SentencePiece, TokenizerJson
from .weights import Gguf, HuggingFaceConfig, Safetensors

KINDS: dict[str, Callable[[], Kind]] = {
    kind.name: kind
    for kind in (
        Safetensors,
        HuggingFaceConfig,
        Gguf,
        TokenizerJson,
        SentencePiece,
        Prepared,
        CheckpointMetadata,
        Recipe,
        Prompts,
        Run,
        SweepFile,
        Results,
    )
}


def inputs(name: str, directory: Path, seed: int, first: int, last: int) -> Iterator[Kind]:
    """Writes the inputs `first` .. `last` - 1 of a kind, each a function of (seed, kind, number), one at a time.

    An intact input is read before them: what a reader imports and compiles is no part of an input.
    """
    sys.path.insert(0, str(TESTS))  # for the helpers of the tests
    kind = KINDS[name]()
    kind.prepare(directory)
    kind.read()
    for number in range(first, last):
        kind.write(random.Random(f"{seed}/{name}/{number}"))
        yield kind
