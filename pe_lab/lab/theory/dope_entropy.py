"""Claims of DoPE (Xiong et al. 2025) on matrix entropies and truncated effective ranks (Sections 4.3 and 5.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from pe_lab.lab.theory.claims import Claim, claim
from pe_lab.lab.theory.rotary import BASE, HEAD_DIM, channels, pairs, rotated
from pe_lab.positional import Rope, frequencies

PAPER = "DoPE"
ROUNDING = 1e-12
BANDS = HEAD_DIM // 2
BAND_LIMIT = 1.33  # above the maximum of lambda_max exp(H) of two eigenvalues

Gram = Float[np.ndarray, "K K"]


def claims(seed: int = 0) -> Iterator[Claim]:
    """The claims on entropies."""
    yield entropy_range(seed)
    yield eigenvalue_by_entropy(seed)
    yield from truncated_ranks(seed)
    yield effective_ranks(seed)
    yield from kept_bands()
    yield from figures_3_to_6(seed)


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


def entropy_range(seed: int, draws: int = 1000) -> Claim:
    """The range of the entropy of a band and of its mean over bands (eq. 25, 26)."""
    rng = np.random.default_rng((seed, 25))
    bands = [10 ** rng.uniform(-2, 2, 2) * rng.standard_normal((rng.integers(1, 50), 2)) for _ in range(draws)]
    found = np.array([entropy(spectrum(gram(band))) for band in bands])
    rank_one, isotropic = (entropy(spectrum(m)) for m in (np.diag([1.0, 0.0]), np.eye(2)))
    means = found[: draws // BANDS * BANDS].reshape(-1, BANDS).mean(1)
    return claim(
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


def eigenvalue_by_entropy(seed: int, draws: int = 1000, sizes: tuple[int, ...] = (2, 8, 64)) -> Claim:
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
    return claim(
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
            "largest_of_most": max(ratios[sizes[-1]]),
            "eigenvalue_ratio": four / one,
            "entropy_difference": abs(entropies[1] - entropies[0]),
        },
        "The lower bound is that the Shannon entropy is at least the min-entropy, -ln lambda_max. Proportionality is "
        "lost in a large matrix, where one eigenvalue and the tail are nearly independent, and between keys of unequal "
        "size: heads are ranked by the shape of their spectrum alone.",
    )


def truncated_ranks(seed: int, draws: int = 96, orders: tuple[int, ...] = (1, 2, 8, 16, 32)) -> Iterator[Claim]:
    """The truncated effective rank of eq. 30 for r = 1, and for larger r."""
    rng = np.random.default_rng((seed, 30))
    heads = [gram(rng.standard_normal((128, HEAD_DIM)) * rng.exponential(1, HEAD_DIM) ** 2) for _ in range(draws)]
    bands = [spectrum(gram(rng.standard_normal((128, 2)) * rng.exponential(1, 2))) for _ in range(draws)]
    spectra = [spectrum(head) for head in heads]
    ranks = {r: np.array([truncated_rank(values, r) for values in spectra]) for r in orders}
    norms = np.array([np.trace(head) * values[0] for head, values in zip(heads, spectra, strict=True)])
    yield claim(
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
    yield claim(
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


def effective_ranks(seed: int, tokens: int = 4096) -> Claim:
    """exp of the mean band entropy (eq. 27) beside the effective rank of the whole head (eq. 30 without truncation)."""
    rng = np.random.default_rng((seed, 27))
    heads = [make(tokens, rng) for make in (rank_one_bands, one_dominant_band)]
    by_bands = [math.exp(float(band_entropies(x).mean())) for x in heads]
    whole = [truncated_rank(spectrum(gram(x)), HEAD_DIM) for x in heads]
    return claim(
        f"{PAPER}, Section 5.2, patterns",
        "Matrix entropy (a mean over bands) and truncated matrix entropy (of the whole head) order heads differently.",
        f"A head of {HEAD_DIM // 2} independent bands of rank 1 has exp(H) = {by_bands[0]:.2f} and effective rank "
        f"{whole[0]:.1f}; a head with one dominant band has {by_bands[1]:.2f} and {whole[1]:.1f}. The order of "
        "the heads is reversed.",
        (by_bands[0] - by_bands[1]) * (whole[0] - whole[1]) < 0,
        {
            "exp_mean_entropy": by_bands,
            "effective_rank": whole,
            "exp_mean_entropy_rank_one": by_bands[0],
            "exp_mean_entropy_dominant": by_bands[1],
            "effective_rank_rank_one": whole[0],
            "effective_rank_dominant": whole[1],
        },
        "The mean over bands gives a band without energy the weight of any other, and does not see whether bands vary "
        "together. So eq. 30 without truncation is not e_h of eq. 27.",
    )


def kept_bands(length: int = 2048) -> Iterator[Claim]:
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
    yield claim(
        f"{PAPER}, eq. 32 to 34",
        "Bands with theta_f <= 2 pi / L are the sufficiently isotropic ones, and keeping them filters out the low-rank "
        "ones.",
        measured,
        of_slow > of_fast,
        numbers,
        "The mask of eq. 32 keeps the coherent bands, which the text beside it removes.",
    )
    yield claim(
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


def figures_3_to_6(seed: int, tokens: int = 512, shown: int = 4) -> Iterator[Claim]:
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
    yield claim(
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
    yield claim(
        f"{PAPER}, Figure 6 and Section 5.5, periodicity",
        "In a head of low truncated entropy the similarity can be periodic in the position.",
        f"A head whose energy is in pair {pair} (rho^16 = {ranks['one_pair']:.1f}) has its strongest period at "
        f"{period:.1f} tokens; the pair rotates once in {expected:.1f}.",
        abs(peak - tokens / expected) <= 1,
        numbers,
        "Periods are those of the pairs that carry the energy. A head of slow pairs alone has as low an entropy and no "
        "period within the sequence, so the measure does not tell them apart.",
    )
