"""What moves the cost of a drop at the smallest rung: depth, tokens a parameter, recalibration's share, window, batch.

A fractional factorial of two levels, 2^(5-2) with D = AB and E = AC (Box, Hunter & Hunter, "Statistics for
Experimenters", chapter 6): main effects are confounded with interactions of two factors, and with each other not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pe_lab.lab.claims import Arm, Claim, Criterion, Precondition, Rates, Reference, trigram
from pe_lab.lab.claims.laws import fit_line
from pe_lab.lab.claims.values import Values

from .arms import NATS
from .ladder import BEST, LOSS, RECIPE, RUNGS, of_runs, of_width

PARAMETERS = 327_680  # of the layers, at both depths
# (name, the level -1, the level +1); layers with the width that gives equally many parameters.
FACTORS = (
    ("layers", (8, 64), (2, 128)),
    ("tokens per parameter", 20, 40),
    ("share after the drop", 0.125, 0.5),
    ("window", 256, 512),
    ("tokens a step", 1024, 2048),
)
LADDER = [(8, 64), 20, 0.125, 512, 2048]  # the rung of width 64
ROWS = tuple((a, b, c, a * b, a * c) for c, b, a in itertools.product((-1, 1), repeat=3))
LITTLE = 0.1  # nats, a quarter of what the ladder's width 64 loses; in DroPE NoPE is 0.090 behind RoPE
# Half of the tokens take another rate than an eighth. The ladder has that of the drop. That of its control is assumed
# until its pilot is trained, whose precondition fails if another one is better.
GRID, HALF_RATE = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), 8e-3
CONTROL = of_width(64, "rewarmed_half", "method=rope", HALF_RATE, RUNGS[64]["rope"], "at=0.5")
RATE = BEST | {"rewarmed_half": HALF_RATE}


def levels(row: tuple[int, ...]) -> list[Any]:
    """The level of each factor."""
    return [factor[1 + (sign > 0)] for factor, sign in zip(FACTORS, row, strict=True)]


def arms(n: int) -> dict[str, Arm]:
    """RoPE, NoPE, the dropped model and its control, at one combination of levels."""
    if levels(ROWS[n]) == LADDER:
        return {name: RUNGS[64][name] for name in ("rope", "nope", "dropped", "rewarmed")}
    (layers, width), per_parameter, share, window, batch = levels(ROWS[n])
    same = f"width={width},layers={layers},per_parameter={per_parameter},window={window},batch={batch}"

    def arm(name: str, method: str, parent: Arm | None = None) -> Arm:
        start = f",from={{parent}},at={1 - share:g}" if parent else ""
        rate = RATE[f"{name}_half" if parent and share == 0.5 else name]
        recipe = f"{RECIPE}:{same},method={method},rate={rate:g}{start}"
        return Arm(f"factorial{n}_{name}", recipe, parent)

    rope = arm("rope", "rope")
    late = {"dropped": arm("dropped", "nope", rope), "rewarmed": arm("rewarmed", "rope", rope)}
    return {"rope": rope, "nope": arm("nope", "nope"), **late}


CELLS = [arms(n) for n in range(len(ROWS))]


def gap(n: int) -> str:
    """What the drop costs beyond as many more steps with RoPE."""
    return f"{CELLS[n]['dropped'].name}: {LOSS} - {CELLS[n]['rewarmed'].name}: {LOSS}"


def over_table(n: int, name: str, text: str, **bounds: float) -> Precondition:
    """A bound on the loss of an arm over that of a trigram table of its training tokens, in nats."""
    return Precondition(f"combination {n}: {text}", f"{CELLS[n][name].name}: {LOSS} - trigram{n}: {LOSS}", **bounds)


def effects(values: Values) -> Mapping[str, Any]:
    """Main effects with Lenth's margin, and G over the recalibration's tokens in onsets.

    The responses are ln G, ln onset, and what NoPE and RoPE are over a trigram table of their tokens, which is known
    also of a model that never reaches its onset. An effect beyond Lenth's margin of error (1989, Technometrics 31) is
    larger than chance makes most of them.
    """
    gaps, onsets, reads = [], [], []
    over: dict[str, list[float]] = {"NoPE over the table": [], "RoPE over the table": []}
    for n, (cell, row) in enumerate(zip(CELLS, ROWS, strict=True)):
        dropped, control = (values[cell[name].name][LOSS] for name in ("dropped", "rewarmed"))
        onset = values[cell["nope"].name].get("onset", {})
        gaps.append(np.mean([dropped[seed] - control[seed] for seed in dropped if seed in control]))
        onsets.append(np.mean([*onset.values()]) if onset else math.nan)
        table = values[f"trigram{n}"][LOSS]
        for name, arm in (("NoPE", "nope"), ("RoPE", "rope")):
            each = [loss - table[seed] for seed, loss in values[cell[arm].name][LOSS].items()]
            over[f"{name} over the table"].append(float(np.mean(each)))
        _, per_parameter, share, _, _ = levels(row)
        reads.append(share * per_parameter * PARAMETERS)
    found: dict[str, Any] = {
        "cells": [
            {name: level for (name, *_), level in zip(FACTORS, levels(row), strict=True)}
            | {"gap": float(G), "onset": None if math.isnan(T) else float(T), "tokens after the drop": float(R)}
            | {name: each[n] for name, each in over.items()}
            for n, (row, G, T, R) in enumerate(zip(ROWS, gaps, onsets, reads, strict=True))
        ]
    }
    design = np.asarray(ROWS, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        responses = {"ln gap": np.log(gaps), "ln onset": np.log(onsets)}
        responses |= {name: np.asarray(each) for name, each in over.items()}
    for name, response in responses.items():
        if np.isfinite(response).all():
            each = design.T @ response / 4  # the difference of the means at both levels
            sizes = np.abs(each)
            first = 1.5 * np.median(sizes)
            error = 1.5 * np.median(sizes[sizes <= 2.5 * first])
            found[f"effects on {name}"] = {
                factor[0]: float(effect) for factor, effect in zip(FACTORS, each, strict=True)
            } | {"margin of error": float(3.76 * error)}  # t of 5 / 3 degrees of freedom
    # A model that never reaches its onset has read more tokens than come after the drop.
    beyond = [R > T for R, T in zip(reads, onsets, strict=True)]
    found["gaps beyond the onset"] = [float(G) for G, past in zip(gaps, beyond, strict=True) if past]
    found["gaps short of the onset"] = [float(G) for G, past in zip(gaps, beyond, strict=True) if not past]
    known = [(R / T, G) for R, T, G in zip(reads, onsets, gaps, strict=True) if T > 0 and G > 0]
    if len(known) > 2:
        line = fit_line([math.log(x) for x, _ in known], [math.log(G) for _, G in known])
        found["ln G over ln (tokens after the drop / onset)"] = line.slope().json()
    return found


CLAIM = Claim(
    sentence="A drop costs little only if more tokens come after it than a model without positions needs from random "
    "weights to pass a trigram table.",
    paper="ours, on DroPE, Observation 3: 'after short recalibration on a fraction of the training tokens'",
    arms=(CONTROL, *(arm for cell in CELLS for arm in cell.values())),
    criteria=tuple(
        Criterion(
            f"combination {n}: short of the onset, a drop costs {LITTLE:g} nats or more",
            gap(n),
            ("little: gap",),
            tolerance=0.01,
            effect=0.1,
            unit=NATS,
        )
        for n in range(len(ROWS))
    ),
    preconditions=tuple(
        one
        for n in range(len(ROWS))
        for one in (
            over_table(n, "rope", "RoPE predicts text better than a trigram table: it has an order to lose", most=0.0),
            over_table(n, "nope", "NoPE does not: it needs more than all of the tokens", least=0.0),
        )
    ),
    # The other rates are those of the ladder's width 64, by muP; batch and window have none of their own.
    rates=Rates(GRID, of=LOSS, within=0.001, arms=(CONTROL.name,)),
    evaluation=None,
    measure=of_runs,
    references={f"trigram{n}": Reference(cell["nope"].name, trigram) for n, cell in enumerate(CELLS)}
    | {"little": Reference(CELLS[0]["nope"].name, lambda config: {"gap": LITTLE})},
    fits=effects,
    curves={"gap after the drop, nats": {f"combination {n}": gap(n) for n in range(len(ROWS))}},
)
