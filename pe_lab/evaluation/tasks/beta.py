"""DroPE's logit scale at inference, beta(s) = 1 + c ln s, fitted on held-out tokens (DroPE, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pe_lab.evaluation.tasks.task import Suite
from pe_lab.terminal import positive


@dataclass(frozen=True)
class Fit:
    """The logit scale of the least loss at a length."""

    beta: float
    nll_before: float  # the mean loss at scale 1, nats a token
    nll_after: float  # and at `beta`
    evaluations: int  # how many scales were tried


def search_range(factor: float) -> tuple[float, float]:
    """The bounds of beta at length / training length = factor; they allow about twice the paper's c."""
    return 0.5, 1.5 + math.log(max(factor, 1.0))


def fit_beta(loss: Callable[[float], float], factor: float, tolerance: float = 0.01) -> Fit:
    """Minimizes `loss` (mean nats a token at a logit scale) by Brent's bounded method within `search_range`.

    Scale 1 is kept unless another scale has a lower loss.
    """
    from scipy.optimize import minimize_scalar  # half a second to import

    tried = {1.0: loss(1.0)}

    def remember(beta: float) -> float:
        beta = round(float(beta), 4)  # as it is stored, and read again
        if beta not in tried:
            tried[beta] = loss(beta)
        return tried[beta]

    minimize_scalar(remember, bounds=search_range(factor), method="bounded", options={"xatol": tolerance})
    best = min(tried, key=lambda beta: tried[beta])
    return Fit(best, tried[1.0], tried[best], len(tried))


def coefficient(beta: float, factor: float) -> float | None:
    """c from the scale of one length; None at the training length, where every c gives 1."""
    return (beta - 1) / math.log(factor) if factor > 0 and factor != 1 else None


def common_coefficient(betas: Sequence[float], factors: Sequence[float]) -> float | None:
    """The c that fits the scales of several lengths best, by least squares in beta; None if all factors are 1."""
    logs = [math.log(factor) for factor in factors]
    weight = sum(log * log for log in logs)
    return sum(log * (beta - 1) for log, beta in zip(logs, betas, strict=True)) / weight if weight else None


SUITE = Suite(
    "beta",
    "Beta",
    flags={"--fit-tokens": {"type": positive, "help": "other held-out tokens, for the logit scale"}},
)
