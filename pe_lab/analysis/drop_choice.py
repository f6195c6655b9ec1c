"""Which layers lose their encoding at a price: chosen by measured losses, without training.

A layer's sensitivity is the loss without its encoding, less the loss with it. The order in which layers are dropped is
either by sensitivity (first order), or greedy: each time the layer that adds least beside those dropped already. It is
chosen on one half of the sequences and priced on the other, so that chance does not make it look cheap.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pe_lab.analysis.losses import EditedLosses, EditPlace, greedy_order, mean_loss
from pe_lab.analysis.session import AnalysisSession, open_session
from pe_lab.errors import ConfigError
from pe_lab.positional import drop
from pe_lab.results.statistics import interval
from pe_lab.storage import AnyPath

Search = Literal["greedy", "first-order"]
SEQUENCES = 32


class DropChoice(NamedTuple):
    """The layers that were chosen, and what dropping costs.

    Attributes:
      layers: those within the budget, in the order in which they are dropped.
      order: of all that were tried.
      costs: nats per token of the first 1, 2, ... of the order together, with 95% intervals over sequences.
      sensitivities: {layer: nats} of each layer alone, on the half that chooses.
      base: the loss without a drop, nats per token.
    """

    layers: tuple[int, ...]
    order: tuple[int, ...]
    costs: tuple[tuple[float, float, float], ...]
    sensitivities: dict[int, float]
    base: float


def choose_layers(
    session: AnalysisSession,
    budget: float,
    search: Search = "greedy",
    most: int | None = None,
    show: Callable[[str], None] = print,
) -> DropChoice:
    """The most layers whose encodings can be dropped together for at most `budget` nats.

    Args:
      session: of one model, with its sequences of text. What it has measured before is not measured again.
      budget: nats per token, at the sequences' length.
      search: see the module.
      most: layers; None: all that have an encoding.
      show: prints a line before the layers are measured alone, and one for each layer of the order.

    Raises:
      ConfigError: no layer has an encoding, or there are fewer than four sequences.
    """
    (variant,), sequences = session.variants, session.sequences
    length, total = sequences.length, len(sequences)
    before = variant.layers_at(length)
    after = drop().apply(before)
    candidates = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a.encoding != b.encoding]
    if not candidates:
        raise ConfigError("No layer of this model has an encoding to drop.")
    if total < 4:
        raise ConfigError(f"{total} sequences are too few to choose layers on one half and price them on the other.")
    edges = np.array([0, length])
    losses = EditedLosses(session, variant, after, sequences, edges)
    choosing, pricing = range(0, total, 2), range(1, total, 2)

    def loss(dropped: Sequence[int], tried: Sequence[int], indices: Sequence[int]) -> np.ndarray:
        """[C, S]: the loss of each sequence with each candidate dropped beside those dropped already."""
        base = [EditPlace(n) for n in dropped]
        bins = losses.measure([[*base, EditPlace(n)] for n in tried], indices, base)
        return mean_loss(bins, edges, 0, length)

    whole = mean_loss(losses.measure([()], range(total)), edges, 0, length)[0]
    base, base_pricing = whole[list(choosing)].mean(), whole[list(pricing)]
    show(f"measuring {len(candidates)} layers alone, on {len(choosing)} sequences of {length:,} tokens")
    alone = loss((), candidates, choosing).mean(-1) - base
    sensitivities = {n: float(cost) for n, cost in zip(candidates, alone, strict=True)}
    by_cost = sorted(candidates, key=sensitivities.__getitem__)
    order: list[int] = []
    costs: list[tuple[float, float, float]] = []
    while len(order) < min(len(candidates), most or len(candidates)):
        if search == "greedy":
            left = [n for n in candidates if n not in order]
            (chosen,) = greedy_order(lambda _, tried: loss(order, tried, choosing).mean(-1), left, 1)
        else:
            chosen = by_cost[len(order)]
        cost = interval(loss(order, [chosen], pricing)[0] - base_pricing)
        order.append(chosen)
        costs.append((float(cost.mean), float(cost.low), float(cost.high)))
        show(f"layer {chosen}: {len(order)} dropped cost {cost.words('{:+.3f}')} nats of a budget of {budget:g}")
        if costs[-1][0] > budget:
            break
    within = max((k + 1 for k, cost in enumerate(costs) if cost[0] <= budget), default=0)
    return DropChoice(tuple(order[:within]), tuple(order), tuple(costs), sensitivities, float(whole.mean()))


def session_of(
    source: str, text: str | None, length: str | None, sequences: int, out: AnyPath | None
) -> AnalysisSession:
    """A session of one checkpoint on held-out text, or on a text, which keeps what it measures in `out`."""
    given = dict(source=source, steps=None, variants=None, positional=[], init=None, again=False)
    given |= dict(text=text, length=length, sequences=sequences)
    return open_session("layers", argparse.Namespace(**given), out)
