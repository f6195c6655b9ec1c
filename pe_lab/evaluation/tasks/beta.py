"""DroPE's logit scale at inference, beta(s) = 1 + c ln s, fitted on held-out text (DroPE, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """The logit scale that gives a held-out text of some length the least loss."""

    beta: float
    nll_before: float  # at beta = 1, nats a token
    nll_after: float
    evaluations: int


def search_range(factor: float) -> tuple[float, float]:
    """Where beta is looked for at length / training length = factor: c may be twice what the paper found."""
    return 0.5, 1.5 + math.log(max(factor, 1.0))


def fit_beta(loss: Callable[[float], float], factor: float, tolerance: float = 0.01) -> Fit:
    """Minimizes `loss` (mean nats a token at a logit scale) by Brent's method within `search_range`.

    Scale 1 is kept if nothing that was tried is better.
    """
    from scipy.optimize import minimize_scalar  # half a second to import

    tried = {1.0: loss(1.0)}

    def remember(beta: float) -> float:
        beta = round(float(beta), 4)  # as it is written down, and read with again
        if beta not in tried:
            tried[beta] = loss(beta)
        return tried[beta]

    minimize_scalar(remember, bounds=search_range(factor), method="bounded", options={"xatol": tolerance})
    best = min(tried, key=lambda beta: tried[beta])
    return Fit(best, tried[1.0], tried[best], len(tried))


def coefficient(beta: float, factor: float) -> float | None:
    """c of one length; None at the training length, where every c gives 1."""
    return (beta - 1) / math.log(factor) if factor > 0 and factor != 1 else None


def common_coefficient(betas: Sequence[float], factors: Sequence[float]) -> float | None:
    """The one c that fits the scales of several lengths best (least squares in beta); None if all are 1x."""
    logs = [math.log(factor) for factor in factors]
    weight = sum(log * log for log in logs)
    return sum(log * (beta - 1) for log, beta in zip(logs, betas, strict=True)) / weight if weight else None
