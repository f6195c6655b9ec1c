"""Claims of DoPE (Xiong et al. 2025) on the spectra of rotary bands (Section 4.2); those on entropies are beside it.

A band is one pair of channels. Its keys are N vectors of the plane, here an [N, 2] matrix without 1 / sqrt(d).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab.lab.theory import dope_entropy
from pe_lab.lab.theory.claims import Claim, claim
from pe_lab.lab.theory.rotary import BASE, HEAD_DIM
from pe_lab.positional import Rope, frequencies

PAPER = "DoPE"
SLACK = 1 + 1e-9  # float64 rounding of a bound that may be an equality

Band = Float[np.ndarray, "_ 2"]  # any number of vectors


def claims(seed: int = 0) -> Iterator[Claim]:
    """Every claim of the paper."""
    yield cone_bound(seed)
    yield growth_with_length()
    yield product_bound(seed)
    yield from mean_directions(seed)
    yield entry_bound(seed)
    yield from dope_entropy.claims(seed)


def plane(angles: Float[np.ndarray, " N"], sizes: Float[np.ndarray, " N"] | float = 1.0) -> Band:
    """Vectors of the plane by angle and length."""
    return np.stack([sizes * np.cos(angles), sizes * np.sin(angles)], axis=-1)


def largest_singular_value(matrix: Float[np.ndarray, "m n"]) -> float:
    """sigma_1."""
    return float(np.linalg.norm(matrix, 2))


class Cone(NamedTuple):
    """A band's smallest length of a vector, and the largest angle of its vectors to the axis of the cone."""

    smallest: float
    half_angle: float

    def bound(self, count: int) -> float:
        """The right side of eq. 18: beta_min |k| sqrt(N) cos(gamma)."""
        return self.smallest * math.sqrt(count) * math.cos(self.half_angle)


def cone_of(band: Band, axis: Float[np.ndarray, "2"]) -> Cone:
    """The cone about `axis` that contains a band."""
    sizes = np.linalg.norm(band, axis=1)
    cosines = np.clip(band @ axis / sizes / np.linalg.norm(axis), -1, 1)
    return Cone(float(sizes.min()), float(np.arccos(cosines.min())))


def cone_ratio(band: Band, axis: Float[np.ndarray, "2"]) -> float:
    """The right side of eq. 18 over sigma_1: at most 1 by the paper, for cones of less than a half plane."""
    return cone_of(band, axis).bound(len(band)) / largest_singular_value(band)


def two_directions(count: int, half_angle: float) -> Band:
    """Half of the unit vectors on either edge of a cone: eq. 18 is an equality up to 45 degrees, for even counts."""
    return plane(half_angle * (-1.0) ** np.arange(count))


def random_cone(rng: np.random.Generator, widest: float = math.pi / 2) -> Band:
    """A random band within a cone about the first axis."""
    count, half_angle = int(rng.integers(2, 200)), rng.uniform(0, 0.999 * widest)
    return plane(rng.uniform(-half_angle, half_angle, count), 10 ** rng.uniform(-1, 1) + rng.exponential(1, count))


AXIS = np.array([1.0, 0.0])


def cone_bound(seed: int, draws: int = 1000) -> Claim:
    """The spectral lower bound on a cone, eq. 13 to 19."""
    rng = np.random.default_rng((seed, 18))
    of_random = max(cone_ratio(random_cone(rng), AXIS) for _ in range(draws))
    angles = np.deg2rad([0, 10, 30, 45, 60, 80])
    of_edges = [cone_ratio(two_directions(64, x), AXIS) for x in angles]
    slowest = frequencies(Rope(BASE), HEAD_DIM)[0][-1]
    phases = slowest * np.arange(2048)
    of_rope = cone_ratio(plane(phases), plane(phases.mean()[None])[0])
    return claim(
        f"{PAPER}, eq. 13 to 19",
        "Keys of a band within a cone of half-angle gamma < 90 degrees have sigma_1 >= beta_min |k| sqrt(N) "
        "cos(gamma).",
        f"The right side is at most {of_random:.4f} of the left over {draws} random bands, and {of_edges[0]:.6f}, "
        f"{of_edges[2]:.6f} and {of_edges[3]:.6f} for vectors on the two edges of a cone of 0, 30 and 45 degrees: an "
        f"equality. It is {of_rope:.4f} for the slowest pair of RoPE over 2,048 tokens.",
        max(of_random, *of_edges, of_rope) <= SLACK and min(of_edges[:4]) > 1 / SLACK,
        {
            "draws": draws,
            "random": of_random,
            "degrees": np.rad2deg(angles),
            "edges": of_edges,
            "edges_0": of_edges[0],
            "edges_30": of_edges[2],
            "edges_45": of_edges[3],
            "slowest_pair": of_rope,
            "tokens": len(phases),
        },
        "Beyond 45 degrees it says less than sigma_1 >= beta_min sqrt(N / 2), which holds for any band: its Gram "
        "matrix has two eigenvalues. Axis and mean direction may differ; the proof needs |S| >= <u, S> only.",
    )


def eigenvalue_share(omega: float, count: int) -> float:
    """lambda_max / N of the Gram matrix of one unit vector rotated by RoPE: (1 + |sin(N w)| / (N |sin w|)) / 2."""
    return 0.5 + 0.5 * abs(math.sin(count * omega) / (count * math.sin(omega)))


def growth_with_length(lengths: tuple[int, ...] = (64, 256, 1024, 4096)) -> Claim:
    """How the largest eigenvalue of a band grows with the number of tokens."""
    inv_freq = frequencies(Rope(BASE), HEAD_DIM)[0]
    shares = np.array([[eigenvalue_share(w, n) for w in inv_freq] for n in lengths])
    exact = [np.linalg.eigvalsh(b.T @ b)[-1] / 1024 for b in (plane(w * np.arange(1024)) for w in inv_freq)]
    off = float(np.abs(shares[lengths.index(1024)] - exact).max())
    numbers = {
        "tokens": lengths,
        "slowest_pair": shares[:, -1],
        "fastest_pair": shares[:, 0],
        "formula_error": off,
        **{f"share_{n}_tokens": share for n, share in zip(lengths, shares, strict=True)},
    }
    listed = {name: ", ".join(f"{x:.3f}" for x in numbers[name]) for name in ("slowest_pair", "fastest_pair")}
    return claim(
        f"{PAPER}, Section 4.2",
        "The Gram matrix of a band that stays within a cone has a dominant eigenvalue of order N.",
        f"For one key at all positions, lambda_max / N of the slowest pair is {listed['slowest_pair']} at "
        f"{', '.join(map(str, lengths))} tokens (a closed form, which agrees with the eigenvalues to {off:.0e}), where "
        f"two eigenvalues add up to N. For the fastest pair it is {listed['fastest_pair']}.",
        shares[:, -1].min() > 0.75 and shares[:, 0].max() < 0.75 and off < 1e-9,
        numbers,
        "What sets the slow band apart is its share of the trace, near 1 instead of 1/2, which the entropy of eq. 25 "
        "measures. The order N does not: the larger of two eigenvalues with the sum N is N/2 or more in every band.",
    )


def principal_direction(band: Band) -> Float[np.ndarray, "2"]:
    """The first right singular vector: a direction of the plane, up to its sign."""
    return np.linalg.svd(band, full_matrices=False)[2][0]


def score_norm(queries: Band, keys: Band) -> float:
    """sigma_1(Q K^T), from the triangular factors of both, which have its singular values."""
    return largest_singular_value(np.linalg.qr(queries)[1] @ np.linalg.qr(keys)[1].T)


def product_ratio(queries: Band, keys: Band) -> float:
    """sigma_1(Q) sigma_1(K) |cos psi| / sigma_1(Q K^T), psi the angle of their right singular directions: at most 1."""
    cosine = abs(float(principal_direction(queries) @ principal_direction(keys)))
    return largest_singular_value(queries) * largest_singular_value(keys) * cosine / score_norm(queries, keys)


def product_bound(seed: int, draws: int = 500) -> Claim:
    """The product bound on attention scores, eq. 21 and 22."""
    rng = np.random.default_rng((seed, 21))
    ratios, entries = [], []
    for _ in range(draws):
        q, k = random_cone(rng), random_cone(rng)
        angle = rng.uniform(0, 2 * math.pi)
        k = k @ np.stack([plane(np.array([angle]))[0], plane(np.array([angle + math.pi / 2]))[0]])
        ratios.append(product_ratio(q, k))
        cosine = abs(float(principal_direction(q) @ principal_direction(k)))
        axes = AXIS, plane(np.array([angle]))[0]
        bounds = [cone_of(x, axis).bound(1) for x, axis in zip((q, k), axes, strict=True)]
        entries.append(bounds[0] * bounds[1] * cosine / np.abs(q @ k.T).max())
    lengths = rng.uniform(1, 2, (2, 16))
    tight = product_ratio(plane(np.zeros(16), lengths[0]), plane(np.full(16, 1.0), lengths[1]))
    return claim(
        f"{PAPER}, eq. 21 and 22",
        "sigma_1(Q K^T) >= sigma_1(Q) sigma_1(K) cos(psi), with psi the angle between the first right singular "
        "directions of Q and K, and the largest entry is at least alpha_min beta_min |q| |k| cos(gamma_Q) "
        "cos(gamma_K) cos(psi).",
        f"Over {draws} random pairs of bands the right sides are at most {max(ratios):.6f} and {max(entries):.4f} of "
        f"the left; for bands of rank 1 the first is an equality ({tight:.6f}).",
        max(ratios) <= SLACK and max(entries) <= SLACK and abs(tight - 1) < 1e-9,
        {"draws": draws, "product": max(ratios), "entry": max(entries), "rank_one": tight},
        "It is a theorem with constant 1, where the paper has an approximate sign. Q has N rows, so that its direction "
        "in the plane of the band is the right singular one.",
    )


def mean_ratio(queries: Band, keys: Band) -> float:
    """sqrt(M N) |mean q| |mean k| cos(angle of the means) / sigma_1(Q K^T), for M queries and N keys: at most 1."""
    sums = float(queries.sum(0) @ keys.sum(0))
    return sums / math.sqrt(len(queries) * len(keys)) / score_norm(queries, keys)


def misaligned_degrees(band: Band) -> float:
    """The angle between a band's first right singular direction and its mean, in degrees up to 90."""
    mean = band.mean(0) / np.linalg.norm(band.mean(0))
    return math.degrees(math.acos(min(1.0, abs(float(principal_direction(band) @ mean)))))


def mean_directions(seed: int, degrees: float = 50.0, draws: int = 500) -> Iterator[Claim]:
    """The angle between singular directions by that between mean directions (after eq. 21)."""
    rng = np.random.default_rng((seed, 211))
    wide = two_directions(64, math.radians(degrees))
    off = misaligned_degrees(wide)
    bands = [two_directions(64, math.radians(44.9)), *(random_cone(rng, math.pi / 4) for _ in range(draws))]
    half_angles = [math.degrees(cone_of(band, band.mean(0)).half_angle) for band in bands]
    within = [(band, x) for band, x in zip(bands, half_angles, strict=True) if x <= 45]
    excess = max(misaligned_degrees(band) - x for band, x in within)
    keys = plane(np.zeros(64))
    with_mean = largest_singular_value(wide) * largest_singular_value(keys) / score_norm(wide, keys)
    yield claim(
        f"{PAPER}, after eq. 21",
        "The angle psi between principal directions differs from that between mean directions by at most gamma_Q + "
        "gamma_K, for all half-angles below 90 degrees.",
        f"For queries on the two edges of a cone of {degrees:g} degrees and keys along its axis, gamma_Q + gamma_K is "
        f"{degrees:g} degrees, the mean directions agree, and the principal directions are {off:.1f} degrees apart.",
        off <= degrees,
        {"half_angle": degrees, "principal_to_mean": off, "product_with_mean_directions": with_mean},
        f"With the angle of the means, eq. 21's first line claims {with_mean:.2f} times the true value here.",
    )
    yield claim(
        f"{PAPER}, after eq. 21, corrected",
        "The same for half-angles up to 45 degrees, where the principal direction lies within the cone.",
        f"In {len(within)} bands the angle between the principal and the mean direction, less the half-angle of the "
        f"cone about the mean, is {excess:.1e} degrees or less.",
        excess <= 1e-6,
        {"bands": len(within), "largest_excess": excess},
    )
    ratios = []
    for _ in range(draws):
        q, k = random_cone(rng), random_cone(rng)
        ratios.append(mean_ratio(q, k))
    ratios.append(mean_ratio(wide, keys))
    tight = mean_ratio(plane(np.zeros(16)), plane(np.full(16, 1.0)))
    yield claim(
        f"{PAPER}, eq. 21 by mean directions, corrected",
        "sigma_1(Q K^T) >= N |mean q| |mean k| cos(angle of the means), so the last line of eq. 21 holds with that "
        "angle, for every half-angle below 90 degrees.",
        f"Over {draws} random pairs of bands and the example above, the right side is at most {max(ratios):.6f} of the "
        f"left; with equal vectors it is an equality ({tight:.6f}).",
        max(ratios) <= SLACK and abs(tight - 1) < 1e-9,
        {"draws": draws, "largest": max(ratios), "equal_vectors": tight},
        "The proof is one line: sigma_1 is at least 1^T Q K^T 1 / N. It needs no singular directions.",
    )


def entry_ratio(matrix: Float[np.ndarray, "m n"]) -> float:
    """sigma_1 / sqrt(m n) over the largest entry: at most 1 by Lemma A.1."""
    return largest_singular_value(matrix) / math.sqrt(matrix.size) / float(np.abs(matrix).max())


def entry_bound(seed: int, draws: int = 500) -> Claim:
    """Lemma A.1: the largest entry of a matrix by its largest singular value."""
    rng = np.random.default_rng((seed, 38))
    largest = max(entry_ratio(rng.standard_normal(rng.integers(1, 24, 2)) ** rng.integers(1, 4)) for _ in range(draws))
    signs = rng.choice([-1.0, 1.0], (2, 20))
    tight = entry_ratio(np.multiply.outer(*signs))
    return claim(
        f"{PAPER}, Lemma A.1",
        "The largest entry of an m x n matrix is at least sigma_1 / sqrt(m n) in absolute value.",
        f"Over {draws} random matrices the right side is at most {largest:.6f} of the left; for entries of one size "
        f"and rank 1 it is an equality ({tight:.6f}).",
        max(largest, tight) <= SLACK and abs(tight - 1) < 1e-9,
        {"draws": draws, "random": largest, "rank_one": tight},
    )
