"""The lemmas of DroPE's proof of Theorem 3.4 (Appendix B.3), with constants computed from the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab.lab.theory.claims import Claim, claim
from pe_lab.lab.theory.positional_bias import (
    HEADS,
    LAYERS,
    LENGTH,
    embeddings_near_one_vector,
    initial_parameters,
    measured_layers,
    prefix_spread,
)
from pe_lab.positional import NoPE

SLACK = 1 + 1e-6  # hidden states come from float32


def claims(seed: int = 0) -> Iterator[Claim]:
    """The claims of the lemmas."""
    yield lemma_b_4(seed)
    yield propositions_b_3_and_b_5(seed)


def softmax(x: Float[np.ndarray, "*batch n"]) -> Float[np.ndarray, "*batch n"]:
    """The softmax over the last axis; entries of -inf have weight 0."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def softmax_change(
    a: Float[np.ndarray, "*batch n"], b: Float[np.ndarray, "*batch n"]
) -> Float[np.ndarray, "*batch"] | float:
    """|softmax(a + b) - softmax(a)|_1 over max |b|: at most 1 by Lemma B.4."""
    return np.abs(softmax(a + b) - softmax(a)).sum(-1) / np.abs(b).max(-1)


def tightest_change(size: float) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Logits and a change of them that reach the bound of Lemma B.4 as `size` goes to 0: two equal weights."""
    return np.zeros(2), np.array([size, -size])


def lemma_b_4(seed: int, draws: int = 20_000, entries: int = 12) -> Claim:
    """The softmax is 1-Lipschitz from the largest to the summed absolute difference."""
    rng = np.random.default_rng((seed, 204))
    scale = 10 ** rng.uniform(-3, 2, (2, draws, 1))
    ratio = softmax_change(*(scale * rng.standard_normal((2, draws, entries)))).max()
    tight = float(softmax_change(*tightest_change(1e-4)))
    return claim(
        "DroPE, Lemma B.4",
        "|softmax(a + b) - softmax(a)|_1 is at most max |b|.",
        f"Over {draws:,} random a and b of {entries} entries the ratio is at most {ratio:.3f}; for two equal weights "
        f"and a small change it is {tight:.8f}, so the constant 1 is the least possible.",
        max(ratio, tight) <= 1 and tight > 0.999,
        {"draws": draws, "entries": entries, "largest_ratio": ratio, "tightest_ratio": tight},
    )


class Ratios(NamedTuple):
    """The left sides of three bounds over their right sides; at most 1 where the bounds hold.

    Attributes:
      logits: |s_ij - mean of s_i| by B^2 sqrt(H) Delta (Proposition B.3).
      weights: |alpha_i - u_i|_1 by the same (eq. 12).
      outputs: |z_i - mean of v| by B^3 sqrt(H) Delta^2 (eq. 13).
    """

    logits: float
    weights: float
    outputs: float


def spread_ratios(
    w_q: Float[np.ndarray, "D K"],
    w_k: Float[np.ndarray, "D K"],
    w_v: Float[np.ndarray, "D K"],
    hidden: Float[np.ndarray, "T D"],
) -> Ratios:
    """How near a NoPE head comes to the bounds, for hidden states of norm sqrt(D).

    B^2 and B^3 are products of the operator norms of the head's own projections, and sqrt(H) is sqrt(D / K).
    """
    h, (D, K) = np.asarray(hidden, np.float64), w_q.shape
    q, k, v = (h @ np.asarray(w, np.float64) for w in (w_q, w_k, w_v))
    norms = [float(np.linalg.norm(np.asarray(w, np.float64), 2)) for w in (w_q, w_k, w_v)]
    visible = np.tri(len(h), dtype=bool)
    counts = np.arange(1, len(h) + 1)[:, None]
    logits = q @ k.T / math.sqrt(K)
    mean = np.where(visible, logits, 0).sum(1, keepdims=True) / counts
    weights = softmax(np.where(visible, logits, -np.inf))
    bound = norms[0] * norms[1] * math.sqrt(D / K) * float(prefix_spread(h))
    means_of_v = np.cumsum(v, axis=0) / counts
    return Ratios(
        float(np.abs(np.where(visible, logits - mean, 0)).max() / bound),
        float(np.abs(weights - visible / counts).sum(1).max() / bound),
        float(np.linalg.norm(weights @ v - means_of_v, axis=1).max() / (norms[2] * float(prefix_spread(h)) * bound)),
    )


def opposite_states(width: int = 8) -> tuple[Float[np.ndarray, "D K"], Float[np.ndarray, "T D"]]:
    """A projection and two hidden states for which Proposition B.3 is an equality."""
    h = np.zeros((2, width))
    h[:, 0] = math.sqrt(width), -math.sqrt(width)
    return np.eye(width), h


def propositions_b_3_and_b_5(seed: int, deviations: tuple[float, ...] = (1e-3, 1e-1, 1e1)) -> Claim:
    """Proposition B.3 and equations 12 and 13 on the heads of a model."""
    params = initial_parameters(seed)
    embedded = embeddings_near_one_vector(seed, np.array(deviations))
    no_patterns = np.zeros((1, LENGTH, LENGTH))
    found = []
    for n, measured in enumerate(measured_layers(params, NoPE(), embedded, no_patterns)):
        attention = {name: np.asarray(params["layers"]["attention"][name][n]) for name in ("query", "key", "value")}
        for head in range(HEADS):
            projections = [w[:, head] for w in attention.values()]
            found += [spread_ratios(*projections, hidden) for hidden in measured.hidden]
    largest = Ratios(*np.max(found, axis=0).tolist())
    projection, states = opposite_states()
    tight = spread_ratios(projection, projection, projection, states).logits
    return claim(
        "DroPE, Proposition B.3, eq. 12 and 13",
        "Logits, weights and outputs of a NoPE head differ from those of uniform attention by at most B^2 sqrt(H) "
        "Delta, B^2 sqrt(H) Delta and B^3 sqrt(H) Delta^2, with B from the operator norms of its projections and Delta "
        "the prefix spread.",
        f"In {LAYERS * HEADS} heads, with embeddings from nearly equal to independent, the left sides reach "
        f"{largest.logits:.2f}, {largest.weights:.2f} and {largest.outputs:.2f} of the right ones. Two opposite hidden "
        f"states make the first bound an equality ({tight:.6f}).",
        max(largest) <= SLACK and abs(tight - 1) < 1e-9,
        {
            "heads": LAYERS * HEADS,
            "deviation": deviations,
            "logits": largest.logits,
            "weights": largest.weights,
            "outputs": largest.outputs,
            "tightest_logits": tight,
        },
        "The statement's sqrt(H) is sqrt(d / d_k), so it needs d = H d_k. The first sum of the proof should be "
        "subtracted; what follows is right.",
    )
