"""Hypotheses about positions: of queries against keys, rounded to bfloat16, counted wrong from one token on.

An offset of all positions changes no rotation, which knows distances alone: it only shows in models that have positions
in another way, such as a learned table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from pe_lab.checkpoints.audit.faults import AuditedModel, Computation, Hypothesis, rotary
from pe_lab.checkpoints.audit.misreadings import AnglesInBfloat16, QueriesLater, bfloat16
from pe_lab.positional import Layer, NoPE

OFFSET = "positions offset"


def _rotating(c: Computation, change: Callable[[Layer], Layer]) -> Computation:
    """With a change of the layers that rotate."""
    return c._replace(layers=tuple(change(one) if rotary(one.encoding) else one for one in c.layers))


def positions(at: AuditedModel) -> Iterator[Hypothesis]:
    """Queries rotated for another position than the keys of their tokens; positions and angles in bfloat16."""
    rotated = tuple(at.rotated)
    for by, side in ((1, "after"), (-1, "before")):

        def later(c: Computation, by: int = by) -> Computation:
            return _rotating(
                c,
                lambda one: dataclasses.replace(one, extras=(*one.extras, QueriesLater(one.encoding, by, c.length))),
            )

        sentence = f"queries are rotated as if they stood one position {side} the keys of their own tokens"
        yield Hypothesis(OFFSET, sentence, later, rotated)

    def rounded(c: Computation) -> Computation:
        return c._replace(positions=bfloat16(c.positions.astype(np.float64)).astype(np.int32))

    def angles(c: Computation) -> Computation:
        def change(one: Layer) -> Layer:
            extras = (*one.extras, AnglesInBfloat16(one.encoding, c.length))
            return dataclasses.replace(one, encoding=NoPE(), extras=extras)

        return _rotating(c, change)

    absolute = tuple(n for n, layer in enumerate(at.layers) if any(not one.relative for _, one in layer.acting()))
    for by, what in ((1, "one too late"), (2, "two too late"), (-1, "one too early"), (-2, "two too early")):
        offset = lambda c, by=by: c._replace(positions=c.positions + np.int32(by))  # noqa: E731
        yield Hypothesis(OFFSET, f"all positions are {what}", offset, absolute)
    fault = "positions in bfloat16"
    yield Hypothesis(fault, "positions are rounded to bfloat16", rounded, rotated)
    sentence = "positions, frequencies and their products are rounded to bfloat16"
    yield Hypothesis(fault, sentence, angles, rotated)


def from_token(at: AuditedModel, token: int) -> Iterator[Hypothesis]:
    """Positions that are wrong from one token of the sequences on, where the error begins."""
    rotated = tuple(at.rotated)
    for by, side in ((1, "late"), (-1, "early")):

        def shifted(c: Computation, by: int = by) -> Computation:
            return c._replace(positions=c.positions + by * (np.arange(len(c.positions)) >= token).astype(np.int32))

        sentence = f"positions from token {token:,} on are one too {side}, as if the cache had been counted wrong"
        yield Hypothesis(OFFSET, sentence, shifted, rotated)

    def restarted(c: Computation) -> Computation:
        start = c.positions[min(token, len(c.positions) - 1)]
        after = np.arange(len(c.positions)) >= token
        return c._replace(positions=np.where(after, c.positions - start, c.positions).astype(np.int32))

    def stays(c: Computation) -> Computation:
        after = np.arange(len(c.positions)) >= token
        return c._replace(positions=np.where(after, 0, c.positions).astype(np.int32))

    yield Hypothesis(OFFSET, f"positions count from 0 again at token {token:,}", restarted, rotated)
    yield Hypothesis(OFFSET, f"all tokens from token {token:,} on have position 0", stays, rotated)
