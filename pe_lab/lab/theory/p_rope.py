"""Claims of the paper on p-RoPE (Barbero et al. 2024, "Round and Round We Go!").

Logits are without the factor 1 / sqrt(K), as in the paper, except where pe_lab's own attention computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.lab.theory.claims import Claim, claim
from pe_lab.lab.theory.positional_heads import proposition_5_2, theorem_5_3
from pe_lab.lab.theory.rotary import (
    BASE,
    HEAD_DIM,
    Distances,
    logits_by_distance,
    octave_means,
    pairs,
    rotated,
)
from pe_lab.lab.theory.swaps import theorem_6_1
from pe_lab.positional import Rope, apply_rope, frequencies

PAPER = "p-RoPE"
FALSE_ALARM = 1e-4  # probability that any z-score of a true null hypothesis passes its threshold


def claims(seed: int = 0) -> Iterator[Claim]:
    """Every claim of the paper."""
    inv_freq = frequencies(Rope(BASE), HEAD_DIM)[0]
    yield proposition_3_1(inv_freq, seed)
    yield proposition_3_2(inv_freq, seed)
    yield from figure_2(inv_freq, seed)
    yield proposition_5_2(seed)
    yield theorem_5_3(inv_freq)
    yield theorem_6_1(inv_freq)
    yield from figure_8(inv_freq, seed)


# ---------------------------------------------------------------------------------------------------------------------
# Section 3: does RoPE decay with distance?


def _largest_in_float32(query: Float[np.ndarray, " K"], inv_freq: Float[np.ndarray, " R"], count: int) -> float:
    """The share of distances 0 .. count - 1 that are the argmax of their key, by pe_lab's rotation in float32."""
    keys = rotated(query, inv_freq, np.arange(count)).astype(np.float32)
    keys = np.broadcast_to(keys[:, None, None], (count, count, 1, len(query)))
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    keys = apply_rope(jnp.asarray(keys), jnp.tile(positions, (count, 1)), base=BASE)[:, :, 0]
    at_end = apply_rope(jnp.asarray(query, jnp.float32)[None, None, None], positions[:, -1:], base=BASE)[0, 0, 0]
    found = count - 1 - np.argmax(np.asarray(jnp.einsum("rtk,k->rt", keys, at_end, precision="highest")), axis=1)
    return float(np.mean(found == np.arange(count)))


def proposition_3_1(
    inv_freq: Float[np.ndarray, " R"], seed: int, length: int = 512, queries: int = 4, float32_length: int = 192
) -> Claim:
    """For every query and every distance r there is a key whose logit is largest at r."""
    rng = np.random.default_rng((seed, 31))
    q = rng.standard_normal((queries, 2 * len(inv_freq)))
    slowest = np.zeros(2 * len(inv_freq))
    slowest[len(inv_freq) - 1] = 1.0  # the query that makes the maximum flattest
    every = np.concatenate([q, slowest[None]])
    distances = np.arange(length)
    keys = np.stack([rotated(x, inv_freq, distances) for x in every])
    logits = logits_by_distance(every[:, None], keys, inv_freq, distances)  # [queries, chosen distance, distance]
    right = (logits.argmax(-1) == distances).mean(-1)
    largest = logits.diagonal(axis1=1, axis2=2).copy()
    logits[:, distances, distances] = -np.inf
    margin = (1 - logits.max(-1) / largest).min(-1)
    in_float32 = [_largest_in_float32(x, inv_freq, float32_length) for x in (q[0], slowest)]
    numbers = {
        "distances": length,
        "queries": queries,
        "share_right": right[:-1].mean(),
        "smallest_margin": margin[:-1].min(),
        "share_right_slowest_pair": right[-1],
        "margin_slowest_pair": margin[-1],
        "share_right_float32": in_float32[0],
        "share_right_slowest_pair_float32": in_float32[1],
        "distances_float32": float32_length,
    }
    return claim(
        f"{PAPER}, Proposition 3.1",
        "For any query that is not zero and any distance r there is a key, the query rotated by r steps, whose logit "
        "is largest at distance r.",
        f"At all {length} distances and for {queries} random queries the argmax is r in float64 (share "
        f"{numbers['share_right']:.4g}; the second largest logit is lower by {margin[:-1].min():.2%} or more). With "
        f"pe_lab's rotation in float32 it is r at a share of {in_float32[0]:.4g} of {float32_length} distances.",
        right.min() == 1 and in_float32[0] == 1,
        numbers,
        "It is a statement about real numbers. A query in the slowest pair alone has a margin of "
        f"{margin[-1]:.1e}: found in float64, but in float32 at a share of only {in_float32[1]:.2g} of the distances.",
    )


def z_scores(draws: Float[np.ndarray, "n T"], expected: float = 0.0) -> Float[np.ndarray, " T"]:
    """(mean - expected) / standard error of n independent draws."""
    return (draws.mean(0) - expected) / (draws.std(0, ddof=1) / math.sqrt(len(draws)))


def z_threshold(tests: int, false_alarm: float = FALSE_ALARM) -> float:
    """The |z| that any of `tests` null hypotheses passes with probability of at most `false_alarm` (Bonferroni)."""
    return NormalDist().inv_cdf(1 - false_alarm / (2 * tests))


def gaussian_logits(
    inv_freq: Float[np.ndarray, " R"], distances: Distances, draws: int, rng: np.random.Generator
) -> Float[np.ndarray, "n T"]:
    """Logits of standard Gaussian queries and keys, drawn independently at every distance."""
    shape = (draws, len(distances), 2 * len(inv_freq))
    q, k = (pairs(rng.standard_normal(shape)) for _ in range(2))
    return np.einsum("ntr,ntr,tr->nt", q, np.conj(k), np.exp(1j * np.multiply.outer(distances, inv_freq))).real


def proposition_3_2(inv_freq: Float[np.ndarray, " R"], seed: int, draws: int = 4096, count: int = 48) -> Claim:
    """Gaussian queries and keys have mean logit 0 at every distance."""
    distances = np.unique(np.geomspace(1, 32768, count).astype(int)) - 1
    logits = gaussian_logits(inv_freq, distances, draws, np.random.default_rng((seed, 32)))
    z, limit, dim = z_scores(logits), z_threshold(len(distances)), 2 * len(inv_freq)
    detected = limit * math.sqrt(dim / draws) / dim  # relative to K, the logit of all-ones vectors at distance 0
    numbers = {
        "distance": distances,
        "distances": len(distances),
        "z": z,
        "false_alarm": FALSE_ALARM,
        "draws": draws,
        "largest_z": np.abs(z).max(),
        "threshold": limit,
        "detected_share_of_aligned_logit": detected,
        "variance_over_K": [logits.var(0).min() / dim, logits.var(0).max() / dim],
    }
    return claim(
        f"{PAPER}, Proposition 3.2",
        "Independent standard Gaussian queries and keys have an expected logit of 0 at every distance.",
        f"The means of {draws} draws at {len(distances)} distances up to {distances[-1]} have |z| of at most "
        f"{np.abs(z).max():.2f}; all pass {limit:.2f} with a probability below {FALSE_ALARM:g}. The variance is "
        f"{logits.var(0).min() / dim:.2f} to {logits.var(0).max() / dim:.2f} of K at every distance.",
        np.abs(z).max() < limit,
        numbers,
        f"The test would have noticed a mean of {detected:.2%} of the logit K that two equal vectors of this norm have "
        "at distance 0. A zero mean says nothing of one pair of vectors: its logits change with distance.",
    )


def all_ones_curve(inv_freq: Float[np.ndarray, " R"], distances: Distances) -> Float[np.ndarray, " T"]:
    """The logit of all-ones vectors over that at distance 0: the mean over pairs of cos(r w)."""
    ones = np.ones(2 * len(inv_freq))
    return logits_by_distance(ones, ones, inv_freq, distances) / len(ones)


def figure_2(
    inv_freq: Float[np.ndarray, " R"], seed: int, length: int = 4096, draws: int = 512, shown: int = 96
) -> Iterator[Claim]:
    """All-ones vectors decay with distance, Gaussian vectors do not."""
    curve = all_ones_curve(inv_freq, np.arange(length))
    means = octave_means(curve)
    at = np.unique(np.geomspace(1, length - 1, shown).astype(int))
    yield claim(
        f"{PAPER}, Figure 2 (a)",
        "With all-ones queries and keys the logits decay with distance.",
        f"Relative to distance 0 the mean over an octave of distances falls in every octave, from {means[0]:.3f} at "
        f"distance 1 to {means[-1]:.3f} at {length // 2} and beyond.",
        bool(np.all(np.diff(means) < 0)),
        {"distance": at, "logit": curve[at], "octave_means": means, "last_octave_from": length // 2},
        f"Between neighbouring distances it also rises ({np.mean(np.diff(curve) > 0):.0%} of the steps).",
    )
    logits = gaussian_logits(inv_freq, at, draws, np.random.default_rng((seed, 2))) / (2 * len(inv_freq))
    # One fit per draw: the slope over log2(distance), whose mean is 0 if the expectation does not depend on distance.
    log_distance = np.log2(at) - np.log2(at).mean()
    slopes = logits @ log_distance / (log_distance @ log_distance)
    z, fall = float(z_scores(slopes[:, None])[0]), np.polyfit(np.log2(at), curve[at], 1)[0]
    limit = z_threshold(1)
    yield claim(
        f"{PAPER}, Figure 2 (b)",
        "With Gaussian queries and keys the logits do not decay with distance.",
        f"Over {draws} draws the mean slope is {slopes.mean():+.5f} per octave (z = {z:.2f}, threshold {limit:.2f}); "
        f"that of all-ones vectors is {fall:+.5f}.",
        abs(z) < limit < abs(fall) / (slopes.std(ddof=1) / math.sqrt(draws)),
        {
            "distance": at,
            "logit": logits.mean(0),
            "standard_error": logits.std(0, ddof=1) / math.sqrt(draws),
            "draws": draws,
            "slope": slopes.mean(),
            "z": z,
            "threshold": limit,
            "slope_all_ones": fall,
        },
        "It fails if the slope differs from 0, or if the draws are too few to tell it from that of all-ones vectors.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Appendix B.2: randomized positions


def randomized_positions(tokens: int, limit: int, rng: np.random.Generator) -> Int[np.ndarray, " T"]:
    """Sorted positions drawn without replacement from 0 .. limit - 1 (Ruoss et al. 2023)."""
    return np.sort(rng.choice(limit, tokens, replace=False))


def figure_8(
    inv_freq: Float[np.ndarray, " R"], seed: int, tokens: int = 256, limits: tuple[int, ...] = (1, 4, 16, 64)
) -> Iterator[Claim]:
    """Randomized positions from a larger range: all-ones logits decay faster, Gaussian logits do not decay."""
    rng, draws, dim = np.random.default_rng((seed, 8)), 24, 2 * len(inv_freq)
    ones, largest_z, gaussian_draws = {}, [], 512
    at = np.unique(np.geomspace(1, tokens - 1, 24).astype(int))
    for limit in limits:
        drawn = [randomized_positions(tokens, limit * tokens, rng) for _ in range(draws)]
        ones[limit] = np.mean([all_ones_curve(inv_freq, p[-1] - p[::-1]) for p in drawn], axis=0)
        distances = (drawn[0][-1] - drawn[0][::-1])[at]
        largest_z.append(np.abs(z_scores(gaussian_logits(inv_freq, distances, gaussian_draws, rng))).max())
    means = {limit: octave_means(curve) for limit, curve in ones.items()}
    faster = all(np.all(means[b] < means[a]) for a, b in zip(limits, limits[1:], strict=False))
    yield claim(
        f"{PAPER}, Figure 8 (a)",
        "With positions drawn at random from a larger range, the logits of all-ones vectors decay faster with the "
        "distance in tokens.",
        f"For {tokens} tokens in ranges of {', '.join(f'{x}' for x in limits)} times as many positions, the mean "
        f"logit over distances 16 to 31 is {', '.join(f'{m[4]:.3f}' for m in means.values())} of that at distance 0, "
        "and a larger range lowers every octave of distances.",
        faster,
        {
            "tokens": tokens,
            "range": limits,
            "distance": at,
            "octave_5": [m[4] for m in means.values()],
            **{f"logit_range_{limit}": curve[at] for limit, curve in ones.items()},
        },
    )
    limit_z = z_threshold(len(at) * len(limits))
    yield claim(
        f"{PAPER}, Figure 8 (b)",
        "With Gaussian vectors, the range of random positions does not change the expected logits, which are 0.",
        f"Over {gaussian_draws} draws at {len(at)} distances and {len(limits)} ranges, |z| is at most "
        f"{max(largest_z):.2f} (threshold {limit_z:.2f}).",
        max(largest_z) < limit_z,
        {
            "range": limits,
            "distances": len(at),
            "largest_z": largest_z,
            "threshold": limit_z,
            "draws": gaussian_draws,
            "dimension": dim,
            "over_all_largest_z": max(largest_z),
        },
    )
