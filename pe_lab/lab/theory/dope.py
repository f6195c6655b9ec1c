"""Statements of DoPE (Xiong et al. 2025) on the spectra of rotary bands (Section 4.2), and on entropies.

A band is one pair of channels. Its keys are N vectors of the plane, here an [N, 2] matrix without 1 / sqrt(d).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from pe_lab.lab.theory.rotary import BASE, HEAD_DIM, channels, pairs, rotated
from pe_lab.lab.theory.statement import Statement, statement
from pe_lab.positional import Rope, frequencies

PAPER = "DoPE"
SLACK = 1 + 1e-9  # float64 rounding of a bound that may be an equality

Band = Float[np.ndarray, "_ 2"]  # any number of vectors


def statements(seed: int = 0) -> Iterator[Statement]:
    """Every statement of the paper."""
    yield cone_bound(seed)
    yield growth_with_length()
    yield product_bound(seed)
    yield from mean_directions(seed)
    yield entry_bound(seed)
    yield entropy_range(seed)
    yield eigenvalue_by_entropy(seed)
    yield from truncated_ranks(seed)
    yield effective_ranks(seed)
    yield from kept_bands()
    yield from figures_3_to_6(seed)


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


def cone_bound(seed: int, draws: int = 1000) -> Statement:
    """The spectral lower bound on a cone, eq. 13 to 19."""
    rng = np.random.default_rng((seed, 18))
    of_random = max(cone_ratio(random_cone(rng), AXIS) for _ in range(draws))
    angles = np.deg2rad([0, 10, 30, 45, 60, 80])
    of_edges = [cone_ratio(two_directions(64, x), AXIS) for x in angles]
    slowest = frequencies(Rope(BASE), HEAD_DIM)[0][-1]
    phases = slowest * np.arange(2048)
    of_rope = cone_ratio(plane(phases), plane(phases.mean()[None])[0])
    return statement(
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
            "slowest_pair": of_rope,
            "tokens": len(phases),
        },
        "Beyond 45 degrees it says less than sigma_1 >= beta_min sqrt(N / 2), which holds for any band: its Gram "
        "matrix has two eigenvalues. Axis and mean direction may differ; the proof needs |S| >= <u, S> only.",
    )


def eigenvalue_share(omega: float, count: int) -> float:
    """lambda_max / N of the Gram matrix of one unit vector rotated by RoPE: (1 + |sin(N w)| / (N |sin w|)) / 2."""
    return 0.5 + 0.5 * abs(math.sin(count * omega) / (count * math.sin(omega)))


def growth_with_length(lengths: tuple[int, ...] = (64, 256, 1024, 4096)) -> Statement:
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
    return statement(
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


def product_bound(seed: int, draws: int = 500) -> Statement:
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
    return statement(
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


def mean_directions(seed: int, degrees: float = 50.0, draws: int = 500) -> Iterator[Statement]:
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
    yield statement(
        f"{PAPER}, after eq. 21",
        "The angle psi between principal directions differs from that between mean directions by at most gamma_Q + "
        "gamma_K, for all half-angles below 90 degrees.",
        f"For queries on the two edges of a cone of {degrees:g} degrees and keys along its axis, gamma_Q + gamma_K is "
        f"{degrees:g} degrees, the mean directions agree, and the principal directions are {off:.1f} degrees apart.",
        off <= degrees,
        {"half_angle": degrees, "principal_to_mean": off, "product_with_mean_directions": with_mean},
        f"With the angle of the means, eq. 21's first line claims {with_mean:.2f} times the true value here.",
    )
    yield statement(
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
    yield statement(
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


def entry_bound(seed: int, draws: int = 500) -> Statement:
    """Lemma A.1: the largest entry of a matrix by its largest singular value."""
    rng = np.random.default_rng((seed, 38))
    largest = max(entry_ratio(rng.standard_normal(rng.integers(1, 24, 2)) ** rng.integers(1, 4)) for _ in range(draws))
    signs = rng.choice([-1.0, 1.0], (2, 20))
    tight = entry_ratio(np.multiply.outer(*signs))
    return statement(
        f"{PAPER}, Lemma A.1",
        "The largest entry of an m x n matrix is at least sigma_1 / sqrt(m n) in absolute value.",
        f"Over {draws} random matrices the right side is at most {largest:.6f} of the left; for entries of one size "
        f"and rank 1 it is an equality ({tight:.6f}).",
        max(largest, tight) <= SLACK and abs(tight - 1) < 1e-9,
        {"draws": draws, "random": largest, "rank_one": tight},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sections 4.3 and 5.5: matrix entropies and truncated effective ranks

ROUNDING = 1e-12
BANDS = HEAD_DIM // 2
BAND_LIMIT = 1.33  # above the maximum of lambda_max exp(H) of two eigenvalues
Gram = Float[np.ndarray, "K K"]


def spectrum(gram: Gram) -> Float[np.ndarray, " K"]:
    """Eigenvalues over their sum (eq. 24), largest first, none negative."""
    values = np.clip(np.linalg.eigvalsh(gram)[::-1], 0, None)
    return values / values.sum()


def entropy(values: Float[np.ndarray, " n"]) -> float:
    """-sum p ln p of values over their sum, in nats."""
    p = values / values.sum()
    return -float(np.sum(p * np.log(np.where(p > 0, p, 1)))) + 0.0  # not -0.0


def truncated_rank(values: Float[np.ndarray, " K"], r: int) -> float:
    """rho^r of eq. 30: exp of the entropy of the r largest eigenvalues (of `spectrum`) over their sum."""
    return math.exp(entropy(values[:r]))


def gram(vectors: Float[np.ndarray, "N K"]) -> Gram:
    """The K x K matrix of eq. 15 and 23."""
    return vectors.T @ vectors


def band_entropies(vectors: Float[np.ndarray, "N K"]) -> Float[np.ndarray, " R"]:
    """The entropy of the 2 x 2 Gram matrix of every pair of channels (eq. 25)."""
    z = pairs(vectors)
    return np.array([entropy(spectrum(gram(np.stack([x.real, x.imag], axis=1)))) for x in z.T])


def entropy_range(seed: int, draws: int = 1000) -> Statement:
    """The range of the entropy of a band and of its mean over bands (eq. 25, 26)."""
    rng = np.random.default_rng((seed, 25))
    bands = [10 ** rng.uniform(-2, 2, 2) * rng.standard_normal((rng.integers(1, 50), 2)) for _ in range(draws)]
    found = np.array([entropy(spectrum(gram(band))) for band in bands])
    rank_one, isotropic = (entropy(spectrum(m)) for m in (np.diag([1.0, 0.0]), np.eye(2)))
    means = found[: draws // BANDS * BANDS].reshape(-1, BANDS).mean(1)
    return statement(
        f"{PAPER}, eq. 24 to 26",
        "The entropy of a band, and its mean over the bands of a head, lie between 0 and ln 2.",
        f"Over {draws} random bands it is {found.min():.4f} to {found.max():.4f}, with means over {BANDS} of "
        f"{means.min():.4f} to {means.max():.4f}; it is {rank_one:.4f} for rank 1 and {isotropic:.4f} = ln 2 for an "
        "isotropic band.",
        found.min() >= -ROUNDING and found.max() <= math.log(2) + ROUNDING and isotropic - math.log(2) < ROUNDING,
        {
            "draws": draws,
            "bands": BANDS,
            "smallest": found.min(),
            "largest": found.max(),
            "smallest_mean": means.min(),
            "largest_mean": means.max(),
            "rank_one": rank_one,
            "isotropic": isotropic,
        },
    )


def eigenvalue_by_entropy(seed: int, draws: int = 1000, sizes: tuple[int, ...] = (2, 8, 64)) -> Statement:
    """The largest eigenvalue by the entropy, eq. 29."""
    rng = np.random.default_rng((seed, 29))
    key = rng.standard_normal((32, 2))
    one, four = (float(np.linalg.eigvalsh(gram(size * key))[-1]) for size in (1.0, 2.0))
    entropies = [entropy(spectrum(gram(size * key))) for size in (1.0, 2.0)]
    ratios = {size: [] for size in sizes}
    for size in sizes:
        for _ in range(draws):
            p = rng.exponential(1, size) ** rng.uniform(0, 8)
            ratios[size].append(float(p.max() / p.sum() * math.exp(entropy(p))))
    grid = np.linspace(0.5, 1, 100_001)
    of_band = max(p * math.exp(entropy(np.array([p, 1 - p]))) for p in grid[::50])
    lowest, highest = (f(min(x), max(x)) for f, x in ((min, ratios[2]), (max, ratios[2])))
    smallest = min(min(x) for x in ratios.values())
    return statement(
        f"{PAPER}, eq. 29",
        "lambda_max is approximately proportional to 1 / e_h = exp(-H_h): of bands with one trace, within "
        f"{BAND_LIMIT}.",
        f"Over {draws} random spectra of each of {', '.join(map(str, sizes))} eigenvalues, lambda_max / exp(-H) at "
        f"trace 1 is at least {smallest:.6f}. For 2 it is {lowest:.3f} to {highest:.3f} (the maximum is "
        f"{of_band:.4f}), for {sizes[-1]} up to {max(ratios[sizes[-1]]):.1f}. Keys of twice the length have "
        f"{four / one:.1f} times the eigenvalue, and the same entropy (to {abs(entropies[1] - entropies[0]):.0e}).",
        smallest >= 1 - ROUNDING and max(highest, of_band) <= BAND_LIMIT,
        {
            "draws": draws,
            "sizes": sizes,
            "smallest": smallest,
            "smallest_of_2": lowest,
            "largest_of_2": highest,
            "maximum_of_2": of_band,
            "largest": [max(ratios[size]) for size in sizes],
            "eigenvalue_ratio": four / one,
            "entropy_difference": abs(entropies[1] - entropies[0]),
        },
        "The lower bound is that the Shannon entropy is at least the min-entropy, -ln lambda_max. Proportionality is "
        "lost in a large matrix, where one eigenvalue and the tail are nearly independent, and between keys of unequal "
        "size: heads are ranked by the shape of their spectrum alone.",
    )


def truncated_ranks(seed: int, draws: int = 96, orders: tuple[int, ...] = (1, 2, 8, 16, 32)) -> Iterator[Statement]:
    """The truncated effective rank of eq. 30 for r = 1, and for larger r."""
    rng = np.random.default_rng((seed, 30))
    heads = [gram(rng.standard_normal((128, HEAD_DIM)) * rng.exponential(1, HEAD_DIM) ** 2) for _ in range(draws)]
    bands = [spectrum(gram(rng.standard_normal((128, 2)) * rng.exponential(1, 2))) for _ in range(draws)]
    spectra = [spectrum(head) for head in heads]
    ranks = {r: np.array([truncated_rank(values, r) for values in spectra]) for r in orders}
    norms = np.array([np.trace(head) * values[0] for head, values in zip(heads, spectra, strict=True)])
    yield statement(
        f"{PAPER}, eq. 30 with r = 1",
        "With r = 1 the truncated effective rank is equivalent to the spectral norm, so it can rank heads (Trunc-1).",
        f"It is {ranks[1].min():g} to {ranks[1].max():g} for all of {draws} random heads, whose spectral norms differ "
        f"by a factor of {norms.max() / norms.min():.0f}: one eigenvalue over itself has no entropy.",
        float(np.ptp(ranks[1])) > ROUNDING,
        {
            "draws": draws,
            "smallest": ranks[1].min(),
            "largest": ranks[1].max(),
            "norm_ratio": norms.max() / norms.min(),
        },
        "Trunc-1 of the tables is then the spectral norm itself (A.2), or one eigenvalue over the trace: not eq. 30.",
    )
    of_bands = np.array([[truncated_rank(values, r) for r in orders] for values in bands])
    same = float(np.abs(of_bands[:, 2:] - of_bands[:, 1:2]).max())
    means = [ranks[r].mean() for r in orders]
    order = [np.corrcoef(np.argsort(np.argsort(ranks[8])), np.argsort(np.argsort(ranks[r])))[0, 1] for r in orders[2:]]
    yield statement(
        f"{PAPER}, eq. 30",
        f"For the {HEAD_DIM} x {HEAD_DIM} Gram matrix of a whole head, r = 8, 16 and 32 give ranks that differ.",
        f"Their means over {draws} random heads are {', '.join(f'{x:.2f}' for x in means[2:])}, and the rank "
        f"correlations of 16 and 32 with r = 8 are {', '.join(f'{x:.3f}' for x in order[1:])}.",
        bool(np.all(np.diff(means[2:]) > 0.1)) and max(order[1:]) < 1 - 1e-6,
        {"draws": draws, "orders": orders, "means": means, "rank_correlations": order, "bands": same},
        "The matrix is that of the whole head, as in Section 5.5. Eq. 24 defines it for a band, of two eigenvalues and "
        f"the same rank for every r from 2 on (largest difference {same:.0e}).",
    )


def rank_one_bands(tokens: int, rng: np.random.Generator) -> Float[np.ndarray, "N K"]:
    """A head whose pairs each vary along one direction, independently: every band has entropy 0."""
    return channels(rng.standard_normal((tokens, HEAD_DIM // 2)) * np.exp(1j * np.arange(HEAD_DIM // 2)))


def one_dominant_band(tokens: int, rng: np.random.Generator) -> Float[np.ndarray, "N K"]:
    """A head of isotropic bands, one of which has nearly all the energy: every band has entropy ln 2."""
    scale = np.where(np.arange(HEAD_DIM) % (HEAD_DIM // 2) == 0, 1.0, 0.02)
    return rng.standard_normal((tokens, HEAD_DIM)) * scale


def effective_ranks(seed: int, tokens: int = 4096) -> Statement:
    """exp of the mean band entropy (eq. 27) beside the effective rank of the whole head (eq. 30 without truncation)."""
    rng = np.random.default_rng((seed, 27))
    heads = [make(tokens, rng) for make in (rank_one_bands, one_dominant_band)]
    by_bands = [math.exp(float(band_entropies(x).mean())) for x in heads]
    whole = [truncated_rank(spectrum(gram(x)), HEAD_DIM) for x in heads]
    return statement(
        f"{PAPER}, Section 5.2, patterns",
        "Matrix entropy (a mean over bands) and truncated matrix entropy (of the whole head) order heads differently.",
        f"A head of {HEAD_DIM // 2} independent bands of rank 1 has exp(H) = {by_bands[0]:.2f} and effective rank "
        f"{whole[0]:.1f}; a head with one dominant band has {by_bands[1]:.2f} and {whole[1]:.1f}. The order of "
        "the heads is reversed.",
        (by_bands[0] - by_bands[1]) * (whole[0] - whole[1]) < 0,
        {
            "exp_mean_entropy": by_bands,
            "effective_rank": whole,
        },
        "The mean over bands gives a band without energy the weight of any other, and does not see whether bands vary "
        "together. So eq. 30 without truncation is not e_h of eq. 27.",
    )


def kept_bands(length: int = 2048) -> Iterator[Statement]:
    """The bands that eq. 32 keeps, by their entropy for one key at all positions."""
    inv_freq = frequencies(Rope(BASE), HEAD_DIM)[0]
    entropies = band_entropies(rotated(np.ones((length, HEAD_DIM)), inv_freq, np.arange(length)))
    slow = inv_freq <= 2 * math.pi / length
    of_slow, of_fast = float(entropies[slow].mean()), float(entropies[~slow].mean())
    numbers = {
        "tokens": length,
        "bands": int(slow.sum()),
        "slow": of_slow,
        "fast": of_fast,
        "entropies": entropies,
        "frequency": inv_freq,
    }
    measured = (
        f"For one key at {length:,} positions, the {int(slow.sum())} bands of at most 2 pi / {length:,} have a mean "
        f"entropy of {of_slow:.3f}, the others {of_fast:.3f}."
    )
    yield statement(
        f"{PAPER}, eq. 32 to 34",
        "Bands with theta_f <= 2 pi / L are the sufficiently isotropic ones, and keeping them filters out the low-rank "
        "ones.",
        measured,
        of_slow > of_fast,
        numbers,
        "The mask of eq. 32 keeps the coherent bands, which the text beside it removes.",
    )
    yield statement(
        f"{PAPER}, eq. 32 to 34, corrected",
        "Bands with theta_f > 2 pi / L are the sufficiently isotropic ones.",
        measured,
        of_fast > of_slow and entropies[~slow].min() > entropies[slow].max(),
        numbers,
        "It is a property of one key at all positions. Keys that vary can make any band isotropic.",
    )


def component_similarity(vectors: Float[np.ndarray, "N K"]) -> Float[np.ndarray, "N K"]:
    """The cosine of every token's vector with every principal component, the largest first (Figures 3 to 6)."""
    components = np.linalg.eigh(gram(vectors))[1][:, ::-1]
    return vectors @ components / np.linalg.norm(vectors, axis=1, keepdims=True)


def figures_3_to_6(seed: int, tokens: int = 512, shown: int = 4) -> Iterator[Statement]:
    """Similarity of tokens to principal components, in constructed heads."""
    rng, inv_freq = np.random.default_rng((seed, 3)), frequencies(Rope(BASE), HEAD_DIM)[0]
    at, pair = np.arange(tokens), 6
    noise = [rng.standard_normal((tokens, HEAD_DIM)) for _ in range(3)]
    common = np.tile(np.where(inv_freq <= 2 * math.pi / (4 * tokens), 1.0, 0.0), 2)
    middle = np.zeros(HEAD_DIM)
    middle[pair] = math.sqrt(HEAD_DIM)
    heads = {"coherent": common + 0.3 * noise[0], "isotropic": noise[1], "one_pair": middle + 0.3 * noise[2]}
    similarity = {name: component_similarity(rotated(x, inv_freq, at)) for name, x in heads.items()}
    energy = {name: (x**2).mean(0) for name, x in similarity.items()}
    ranks = {name: truncated_rank(spectrum(gram(rotated(x, inv_freq, at))), 16) for name, x in heads.items()}
    first = {name: float(x[:shown].sum()) for name, x in energy.items()}
    peak = np.abs(np.fft.rfft(similarity["one_pair"][:, 0]))[1:].argmax() + 1
    period, expected = tokens / peak, 2 * math.pi / inv_freq[pair]
    numbers = {
        **{f"energy_{name}": x for name, x in energy.items()},
        **{f"first_{name}": x for name, x in first.items()},
        **{f"rank_16_{name}": x for name, x in ranks.items()},
        **{f"token_similarity_{name}": x[:, 0] for name, x in similarity.items()},
        "components": shown,
        "tokens": tokens,
        "period": period,
        "expected_period": expected,
    }
    yield statement(
        f"{PAPER}, Figures 3 to 6 and Section 5.5, low rank",
        "In a head of low truncated entropy the tokens' similarity lies in a few of its principal components, in one "
        "of high entropy in all.",
        f"In constructed heads of {tokens} tokens, the first {shown} of {HEAD_DIM} components have "
        f"{first['coherent']:.0%} of the squared similarity if slow pairs cohere (rho^16 = {ranks['coherent']:.1f}) "
        f"and {first['isotropic']:.0%} if all directions are equal (rho^16 = {ranks['isotropic']:.1f}).",
        first["coherent"] > 0.5 > 0.2 > first["isotropic"] and ranks["coherent"] < ranks["isotropic"],
        numbers,
        "It shows what the figures measure. Whether heads of models are like this, it does not.",
    )
    yield statement(
        f"{PAPER}, Figure 6 and Section 5.5, periodicity",
        "In a head of low truncated entropy the similarity can be periodic in the position.",
        f"A head whose energy is in pair {pair} (rho^16 = {ranks['one_pair']:.1f}) has its strongest period at "
        f"{period:.1f} tokens; the pair rotates once in {expected:.1f}.",
        abs(peak - tokens / expected) <= 1,
        numbers,
        "Periods are those of the pairs that carry the energy. A head of slow pairs alone has as low an entropy and no "
        "period within the sequence, so the measure does not tell them apart.",
    )
