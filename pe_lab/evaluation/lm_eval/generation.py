"""Texts that the harness asks for, in batches that follow from all that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pe_lab.evaluation.generation.backend import Model as Answering
from pe_lab.language_model import LanguageModel


class Generation(NamedTuple):
    """What one request generates: from which tokens, until what, how."""

    prompt: list[int]
    room: int  # tokens of the prompt that are read, its last ones
    until: list[str]
    new_tokens: int
    sampling: dict[str, Any]
    seed: int  # of its draws


def seed_of(seed: int, index: int) -> int:
    """Of one request's draws: requests of one seed, or of seeds beside it, share none."""
    return int(np.random.SeedSequence((seed % 2**32, index)).generate_state(1)[0])


def batches(
    lm: LanguageModel, batch_size: int | None, asked: Mapping[int, Generation], indices: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Requests that differ in their prompts and seeds alone, the longest prompts first; each batch also filled up.

    One at a time where a layer follows the length, or where tokens are drawn: a row draws by its number.
    """
    order = sorted(indices, key=lambda index: -len(asked[index].prompt))
    first = asked[order[0]]
    follows = any(layer.follows_length for layer in lm.layers) and lm.schedule_length is None
    alone = follows or bool(first.sampling.get("temperature"))
    start = 0
    while start < len(order):
        longest = min(len(asked[order[start]].prompt), first.room) + first.new_tokens
        rows = 1 if alone else batch_size * lm.devices if batch_size else Answering(lm).rows(longest)
        some = order[start : start + rows]
        # As many rows as a power of two: few programs serve all.
        fill = min(rows, 1 << (len(some) - 1).bit_length()) - len(some)
        yield some, [*some, *some[-1:] * fill]
        start += len(some)


def write(lm: LanguageModel, batch: Sequence[Generation]) -> list[str]:
    """The text that continues each prompt."""
    first = batch[0]
    prompts = [one.prompt[-one.room :] for one in batch]
    return lm.generate(prompts, first.new_tokens, stop=first.until, text=True, seed=first.seed, **first.sampling)
