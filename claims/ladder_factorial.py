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

from pe_lab.lab.claims import Arm, Claim, Criterion, Rates, Reference, trigram
from pe_lab.lab.claims.laws import fit_line
from pe_lab.lab.claims.values import Values

from .arms import NATS
from .ladder import BEST, LOSS, RECIPE, RUNGS, of_runs, of_width

PARAMETERS = 327_680  # of the layers, at both depths
# (name, the level -1, the level +1); layers with the width that gives equally many parameters.
FACTORS = (
    ("layers", (8, 64), (2, 128)),
    ("tokens per parameter", 10, 20),
    ("share after the drop", 0.125, 0.5),
    ("window", 256, 512),
    ("tokens a step", 2048, 8192),
)
ROWS = tuple((a, b, c, a * b, a * c) for c, b, a in itertools.product((-1, 1), repeat=3))
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


def effects(values: Values) -> Mapping[str, Any]:
    """Main effects with Lenth's margin, and G over the recalibration's tokens in onsets.

    The responses are ln G, ln onset, and what NoPE is short of a trigram table of its tokens, which is known also of a
    model that never reaches its onset. An effect beyond Lenth's margin of error (1989, Technometrics 31) is larger than
    chance makes most of them.
    """
    gaps, onsets, reads, short = [], [], [], []
    for n, (cell, row) in enumerate(zip(CELLS, ROWS, strict=True)):
        dropped, control = (values[cell[name].name][LOSS] for name in ("dropped", "rewarmed"))
        onset = values[cell["nope"].name].get("onset", {})
        gaps.append(np.mean([dropped[seed] - control[seed] for seed in dropped if seed in control]))
        onsets.append(np.mean([*onset.values()]) if onset else math.nan)
        table = values[f"trigram{n}"][LOSS]
        short.append(np.mean([loss - table[seed] for seed, loss in values[cell["nope"].name][LOSS].items()]))
        _, per_parameter, share, _, _ = levels(row)
        reads.append(share * per_parameter * PARAMETERS)
    found: dict[str, Any] = {
        "cells": [
            {name: level for (name, *_), level in zip(FACTORS, levels(row), strict=True)}
            | {"gap": float(G), "onset": None if math.isnan(T) else float(T), "tokens after the drop": float(R)}
            | {"NoPE over the table": float(over)}
            for row, G, T, R, over in zip(ROWS, gaps, onsets, reads, short, strict=True)
        ]
    }
    design = np.asarray(ROWS, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        responses = {"ln gap": np.log(gaps), "ln onset": np.log(onsets), "NoPE over the table": np.asarray(short)}
    for name, response in responses.items():
        if np.isfinite(response).all():
            each = design.T @ response / 4  # the difference of the means at both levels
            sizes = np.abs(each)
            first = 1.5 * np.median(sizes)
            error = 1.5 * np.median(sizes[sizes <= 2.5 * first])
            found[f"effects on {name}"] = {
                factor[0]: float(effect) for factor, effect in zip(FACTORS, each, strict=True)
            } | {"margin of error": float(3.76 * error)}  # t of 5 / 3 degrees of freedom
    known = [(R / T, G) for R, T, G in zip(reads, onsets, gaps, strict=True) if T > 0 and G > 0]
    if len(known) > 2:
        line = fit_line([math.log(x) for x, _ in known], [math.log(G) for _, G in known])
        found["ln G over ln (tokens after the drop / onset)"] = line.slope().json()
        found["beyond the onset"] = [float(G) for x, G in known if x > 1]
        found["short of it"] = [float(G) for x, G in known if x <= 1]
    return found


CLAIM = Claim(
    sentence="A drop costs less where more of the tokens come after it: it is cheap only if they exceed what a model "
    "without positions needs from random weights to pass a trigram table.",
    paper="ours, on DroPE, Observation 3: 'after short recalibration on a fraction of the training tokens'",
    arms=(RUNGS[64]["rope"], CONTROL, *(arm for cell in CELLS for arm in cell.values())),
    criteria=tuple(
        Criterion(
            f"half of the tokens after the drop cost less than an eighth: combinations {n + 4} and {n}, whose tokens a "
            "step differ too",
            gap(n + 4),
            (gap(n),),
            lower=True,
            by=0.05,
            unit=NATS,
        )
        for n in range(4)
    ),
    # The other rates are those of the ladder's width 64, by muP; batch and window have none of their own.
    rates=Rates(GRID, of=LOSS, within=0.001, arms=(CONTROL.name,)),
    evaluation=None,
    measure=of_runs,
    references={f"trigram{n}": Reference(cell["nope"].name, trigram) for n, cell in enumerate(CELLS)},
    fits=effects,
    curves={"gap after the drop, nats": {f"combination {n}": gap(n) for n in range(len(ROWS))}},
)
