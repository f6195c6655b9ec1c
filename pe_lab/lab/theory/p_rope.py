"""Statements of the paper on p-RoPE (Barbero et al. 2024, "Round and Round We Go!").

Logits are without the factor 1 / sqrt(K), as in the paper, except where pe_lab's own attention computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from pe_lab.attention import LayerEncoding
from pe_lab.attention.statistics import attention_rows
from pe_lab.lab.theory.rotary import (
    BASE,
    HEAD_DIM,
    Distances,
    key_for_distance,
    logits_by_distance,
    octave_means,
    pairs,
    rotated,
    softmax,
)
from pe_lab.lab.theory.statement import Statement, statement
from pe_lab.positional import NoPE, Rope, apply_rope, frequencies, rotation_tables
from pe_lab.positional.rotation import fixed_point_frequencies

PAPER = "p-RoPE"
FALSE_ALARM = 1e-4  # probability that any z-score of a true null hypothesis passes its threshold


def statements(seed: int = 0) -> Iterator[Statement]:
    """Every statement of the paper."""
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
) -> Statement:
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
    return statement(
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


def z_scores(draws: Float[np.ndarray, "n T"]) -> Float[np.ndarray, " T"]:
    """The mean over the standard error of n independent draws."""
    return draws.mean(0) / (draws.std(0, ddof=1) / math.sqrt(len(draws)))


def z_threshold(tests: int) -> float:
    """The |z| that any of `tests` null hypotheses passes with probability of at most `FALSE_ALARM` (Bonferroni)."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * tests))


def gaussian_logits(
    inv_freq: Float[np.ndarray, " R"], distances: Distances, draws: int, rng: np.random.Generator
) -> Float[np.ndarray, "n T"]:
    """Logits of standard Gaussian queries and keys, drawn independently at every distance."""
    shape = (draws, len(distances), 2 * len(inv_freq))
    q, k = (pairs(rng.standard_normal(shape)) for _ in range(2))
    return np.einsum("ntr,ntr,tr->nt", q, np.conj(k), np.exp(1j * np.multiply.outer(distances, inv_freq))).real


def proposition_3_2(inv_freq: Float[np.ndarray, " R"], seed: int, draws: int = 4096, count: int = 48) -> Statement:
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
    return statement(
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
) -> Iterator[Statement]:
    """All-ones vectors decay with distance, Gaussian vectors do not."""
    curve = all_ones_curve(inv_freq, np.arange(length))
    means = octave_means(curve)
    at = np.unique(np.geomspace(1, length - 1, shown).astype(int))
    yield statement(
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
    yield statement(
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
) -> Iterator[Statement]:
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
    yield statement(
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
    yield statement(
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
        },
    )


# ---------------------------------------------------------------------------------------------------------------------
# Section 5: positional attention


def attention_weights(
    query: Float[np.ndarray, "T K"], key: Float[np.ndarray, "T K"], encoding: Rope | NoPE
) -> Float[np.ndarray, "T T"]:
    """The causal attention weights of one head by pe_lab's attention in float32, with its factor 1 / sqrt(K)."""
    q, k = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (query, key))
    positions = jnp.arange(len(query), dtype=jnp.int32)[None]
    tables: tuple = (None, None)
    if isinstance(encoding, Rope):
        inv_freq, gain = (x[None] for x in frequencies(encoding, query.shape[-1]))
        fixed = jnp.asarray(fixed_point_frequencies(inv_freq))
        tables = rotation_tables(fixed, jnp.asarray(gain, jnp.float32), positions)
    return np.asarray(attention_rows(q, k, LayerEncoding(*tables), rows=range(len(query)))[0, 0])


def proposition_5_2(seed: int, heads: int = 512, length: int = 8, width: int = 16) -> Statement:
    """A NoPE head cannot attend to the diagonal or to the previous token."""
    rng = np.random.default_rng((seed, 52))
    x = rng.standard_normal((heads, length, width))
    x[:, -1] = x[:, -2]  # the counterexample: the last token repeats the one before it
    scale = 10 ** rng.uniform(-2, 2, (heads, 1, 1))
    w_q, w_k = (rng.standard_normal((heads, width, width)) * scale for _ in range(2))
    w_k[: heads // 2] = w_q[: heads // 2]  # adversarial: queries equal keys, as sharp as a diagonal can be
    logits = np.einsum("hd,htd->ht", (x @ w_q)[:, -1], x @ w_k)
    weights = softmax(logits)[:, -2:]
    both = np.abs(weights[:, 1] - weights[:, 0]).max()
    in_pe_lab = attention_weights((x @ w_q)[0], (x @ w_q)[0], NoPE())[-1, -2:]
    with_rope = attention_weights(*_constant_head(2.0**8, length), Rope(BASE))[-1, -1]
    numbers = {
        "heads": heads,
        "largest_diagonal": weights[:, 1].max(),
        "largest_previous": weights[:, 0].max(),
        "largest_difference": both,
        "pe_lab_difference": abs(in_pe_lab[1] - in_pe_lab[0]),
        "with_rope": with_rope,
    }
    return statement(
        f"{PAPER}, Proposition 5.2",
        "A head without positional encoding cannot learn a diagonal or a previous-token pattern: where a token is "
        "repeated, both copies have equal weights, so neither exceeds 1/2.",
        f"In {heads} heads, half of them as sharp as possible, the last token's weight on itself is at most "
        f"{weights[:, 1].max():.4f} and differs from that on its repeated predecessor by at most {both:.1e} "
        f"({numbers['pe_lab_difference']:.1e} in pe_lab's attention). With RoPE it reaches {with_rope:.4f} on a "
        "sequence of one token only.",
        weights.max() <= 0.5 + 1e-12 and both < 1e-12 and numbers["pe_lab_difference"] < 1e-6 and with_rope > 0.5,
        numbers,
        "It concerns one layer whose inputs repeat. Deeper layers of a causal NoPE model can see positions.",
    )


def required_norm_squared(tokens: int, epsilon: float, gap: float) -> float:
    """|psi|^2 from which every weight exceeds 1 - epsilon: ln((N - 1)(1 - epsilon) / epsilon) / gap.

    From the proof of Theorem 5.3: each of N - 1 other keys has a logit lower by at least |psi|^2 * gap, where gap is
    1 - max cos over the distances. With N = 2 the weight is 1 - epsilon exactly.
    """
    return math.log((tokens - 1) * (1 - epsilon) / epsilon) / gap


def misalignment(inv_freq: Float[np.ndarray, " R"], distances: Distances) -> Float[np.ndarray, " T"]:
    """1 - mean over pairs of cos(r w), as a square so that it is exact near 0."""
    return 2 * np.mean(np.sin(np.multiply.outer(distances, inv_freq) / 2) ** 2, axis=-1)


def peak_weight(inv_freq: Float[np.ndarray, " R"], norm_squared: float, offsets: Distances) -> float:
    """The weight of the aligned key beside keys at these offsets from it, for |psi|^2 divided equally among pairs."""
    return float(1 / (1 + np.exp(-norm_squared * misalignment(inv_freq, offsets)).sum()))


def _constant_head(
    norm_squared: float, tokens: int, distance: int = 0
) -> tuple[Float[np.ndarray, "T K"], Float[np.ndarray, "T K"]]:
    """Equal queries, and keys aligned with them at `distance`; pe_lab's factor 1 / sqrt(K) is compensated."""
    query = np.full((tokens, HEAD_DIM), math.sqrt(norm_squared / HEAD_DIM * HEAD_DIM**0.5))
    return query, key_for_distance(query, frequencies(Rope(BASE), HEAD_DIM)[0], distance)


def theorem_5_3(
    inv_freq: Float[np.ndarray, " R"],
    lengths: tuple[int, ...] = (2, 16, 256, 4096),
    epsilons: tuple[float, ...] = (0.1, 1e-2, 1e-4),
    pe_lab_case: tuple[int, float] = (256, 1e-3),
) -> Statement:
    """A RoPE head can attend to the diagonal or to the previous token."""
    spectra = {"one_pair": inv_freq[:1], "all_pairs": inv_freq}
    norms: dict[str, list[float]] = {name: [] for name in spectra}
    excess = []
    for name, spectrum in spectra.items():
        for N in lengths:
            gap = float(misalignment(spectrum, np.arange(1, N)).min())
            for epsilon in epsilons:
                norm = required_norm_squared(N, epsilon, gap)
                norms[name].append(norm)
                # The last query sees most keys. Of the previous token, they are at offsets 1, 1, 2, .. N - 2.
                for offsets in (np.arange(1, N), np.abs(np.delete(np.arange(N) - 1, 1))):
                    excess.append((peak_weight(spectrum, norm, offsets) - (1 - epsilon)) / epsilon)
    tokens, epsilon = pe_lab_case
    norm = required_norm_squared(tokens, epsilon, float(misalignment(inv_freq, np.arange(1, tokens)).min()))
    diagonal, previous = (attention_weights(*_constant_head(norm, tokens, r), Rope(BASE)) for r in (0, 1))
    in_pe_lab = [diagonal.diagonal().min(), previous.diagonal(-1).min()]
    numbers = {
        "lengths": np.repeat(lengths, len(epsilons)),
        "epsilons": epsilons * len(lengths),
        "norm_squared_one_pair": norms["one_pair"],
        "norm_squared_all_pairs": norms["all_pairs"],
        "smallest_excess": min(excess),
        "pe_lab_tokens": tokens,
        "pe_lab_epsilon": epsilon,
        "pe_lab_diagonal": in_pe_lab[0],
        "pe_lab_previous": in_pe_lab[1],
    }
    return statement(
        f"{PAPER}, Theorem 5.3",
        "A head with RoPE can learn a diagonal and a previous-token pattern: with equal queries and keys of a norm "
        "that depends on N and epsilon, every weight exceeds 1 - epsilon.",
        f"At |psi|^2 = ln((N - 1)(1 - epsilon) / epsilon) / (1 - max cos), all weights are 1 - epsilon or more for N "
        f"up to {max(lengths)} and epsilon down to {min(epsilons):g} (smallest excess {min(excess):.1e} of epsilon, at "
        f"N = 2, where the bound is an equality). |psi|^2 is {min(norms['all_pairs']):.3g} to "
        f"{max(norms['all_pairs']):.3g} with all pairs, and up to {max(norms['one_pair']):.1e} with the fastest pair "
        f"alone. pe_lab's attention in float32 with N = {tokens} and epsilon = {epsilon:g}: at least "
        f"{in_pe_lab[0]:.5f} on the diagonal and {in_pe_lab[1]:.5f} on the previous token.",
        min(excess) > -1e-6 and min(in_pe_lab) > 1 - epsilon,
        numbers,
        "One pair suffices in the proof and not in practice: at distance 710 the fastest pair is back within 6e-5 "
        "radians. The first token has no predecessor, so the previous-token pattern begins with the second.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Theorem 6.1: with one frequency, swaps of tokens move the largest logit off its target. A token's key has a strength
# and a phase, and at position p of N its logit with the last query is strength * cos(phase + p * w): moving a key by
# one position rotates it by w.

Case = Literal["negative", "positive", "two swaps"]
CASES: tuple[Case, ...] = ("negative", "positive", "two swaps")


class TokenSequence(NamedTuple):
    """A sequence with one key per token; `target` is the position that the last query attends to."""

    strength: Float[np.ndarray, " N"]
    phase: Float[np.ndarray, " N"]
    omega: float
    target: int

    def logits(self, order: Int[np.ndarray, " N"] | None = None) -> Float[np.ndarray, " N"]:
        """The logit at every position, with token order[p] at position p."""
        at = np.arange(len(self.phase))
        order = at if order is None else order
        return self.strength[order] * np.cos(self.phase[order] + at * self.omega)

    def swapped(self, *swaps: tuple[int, int]) -> TokenSequence:
        """The sequence with tokens swapped; the target's position follows its token."""
        order = np.arange(len(self.phase))
        for a, b in swaps:
            order[[a, b]] = order[[b, a]]
        return self._replace(
            strength=self.strength[order], phase=self.phase[order], target=int(np.flatnonzero(order == self.target)[0])
        )

    def weight(self) -> float:
        """The attention weight of the target."""
        logits = self.logits()
        return float(1 / np.exp(logits - logits[self.target]).sum())

    def attended(self) -> bool:
        """Whether the target has the largest logit."""
        return int(self.logits().argmax()) == self.target


def attending_sequence(omega: float, tokens: int, case: Case, epsilon: float = 0.01) -> TokenSequence:
    """A sequence of N tokens whose target has weight 1 - epsilon (or more), for a case of the proof.

    Every token's key is chosen for its position. "negative": all logits are below 0. "positive": the target's logit is
    above 0. "two swaps": it is, and after a swap with the target by a third of a rotation it is still the largest.
    """
    needed = math.log((tokens - 1) * (1 - epsilon) / epsilon)  # the target's logit less the others'
    at = np.arange(tokens)
    if case == "negative":
        target, strength, offset = tokens // 2, np.full(tokens, 1 + needed), np.full(tokens, math.pi)
        strength[target] = 1.0
    else:
        target, strength = 0, np.full(tokens, needed)
        offset = np.full(tokens, math.pi if case == "positive" else 4 * math.pi / 3)
        if case == "two swaps":
            strength = 1 + 2 * strength  # logits of -1/2 - needed
        strength[target], offset[target] = 1.0, 0.0
    return TokenSequence(strength, offset - at * omega, omega, target)


def first_swap(sequence: TokenSequence, first: int) -> tuple[int, int] | None:
    """The swap of position `first` with the nearest later one after which the target is not the argmax, or None.

    The last position is left alone: it is the query's.
    """
    strength, phase, omega, target = sequence
    logits = sequence.logits()
    later = np.arange(first + 1, len(phase) - 1)
    second = later[later != target]
    moved_up = strength[first] * np.cos(phase[first] + second * omega)
    moved_down = strength[second] * np.cos(phase[second] + first * omega)
    others = logits.copy()
    others[[target, first]] = -np.inf
    best, next_best = np.argsort(others)[[-1, -2]]
    unmoved = np.where(second == best, others[next_best], others[best])
    if first == target:
        broken = np.maximum(unmoved, moved_down) > moved_up
    else:
        broken = np.maximum(unmoved, np.maximum(moved_up, moved_down)) > logits[target]
    return (first, int(second[broken.argmax()])) if broken.any() else None


def _third(omega: float) -> int:
    """The distance in tokens after which a key is rotated by a third of a full rotation."""
    return round(2 * math.pi / 3 / omega)


def breaking_swaps(sequence: TokenSequence, case: Case) -> list[tuple[int, int]]:
    """The swaps of the proof; the last one is the nearest that moves the largest logit off the target."""
    if case == "negative":  # two tokens, neither of them the target
        swap = first_swap(sequence, 0)
        return [swap] if swap else []
    if case == "positive":
        swap = first_swap(sequence, sequence.target)
        return [swap] if swap else []
    third = (sequence.target, sequence.target + _third(sequence.omega))
    after = sequence.swapped(third)
    swap = first_swap(after, after.target + 1)
    return [third, swap] if after.attended() and swap else []


def predicted_distance(sequence: TokenSequence, case: Case) -> int:
    """The distance in tokens of the breaking swap: where the moved key's logit passes the target's.

    "negative": -b cos(r w) > -a for logits -b and -a. "positive": a cos(r w) < -b cos(r w). "two swaps":
    b cos(4 pi / 3 + r w) > a cos(g w), with g the distance of the first swap.
    """
    largest = sequence.strength.max()
    if case == "negative":
        angle = math.acos(1 / largest)
    elif case == "positive":
        angle = math.pi / 2
    else:
        angle = 2 * math.pi / 3 - math.acos(math.cos(_third(sequence.omega) * sequence.omega) / largest)
    return math.floor(angle / sequence.omega) + 1


def theorem_6_1(inv_freq: Float[np.ndarray, " R"], chosen: tuple[int, ...] = (0, 8, 16, 24, 31)) -> Statement:
    """Swaps that break a head of one frequency, and the sequences that it does attend in."""
    rows = []
    for pair in chosen:
        omega = float(inv_freq[pair])
        tokens = math.ceil(2 * math.pi / omega) + 16
        for case in CASES:
            before = attending_sequence(omega, tokens, case)
            swaps = breaking_swaps(before, case)
            after = before.swapped(*swaps)
            distance = swaps[-1][1] - swaps[-1][0] if swaps else 0
            same = before._replace(omega=0.0, phase=before.phase + np.arange(tokens) * omega)  # the same logits, NoPE
            unmoved = abs(same.swapped(*swaps).weight() - same.weight())
            rows.append((case, omega, tokens, before, after, distance, predicted_distance(before, case), unmoved))
    cases, omegas, tokens, before, after, distances, predicted, unmoved = zip(*rows, strict=True)
    broken = [b.attended() and not a.attended() for b, a in zip(before, after, strict=True)]
    by_case = {case: [d for c, d in zip(cases, distances, strict=True) if c == case] for case in CASES}
    weights_before, weights_after = [s.weight() for s in before], [s.weight() for s in after]
    return statement(
        "p-RoPE, Theorem 6.1",
        "A head with one RoPE frequency cannot attend to a target token robustly: in every sequence that is long "
        "enough, one or two swaps of tokens move the largest logit to another token, and the target's weight below "
        "1/2.",
        f"With weights on the target of at least {min(weights_before):.3f} before, swaps were found for all of "
        f"{len(chosen)} frequencies and 3 cases ({sum(broken)} of {len(rows)}); the weight after is at most "
        f"{max(weights_after):.3f}. The nearest swap is over "
        f"{', '.join(map(str, by_case['positive']))} tokens if the target's logit is positive (a quarter of the "
        f"wavelength), {', '.join(map(str, by_case['negative']))} if all logits are negative, and "
        f"{', '.join(map(str, by_case['two swaps']))} for the second of two swaps.",
        all(broken) and max(weights_after) <= 0.5 and max(unmoved) < 1e-9 and distances == predicted,
        {
            "frequency": omegas,
            "tokens": tokens,
            "distance": distances,
            "predicted_distance": predicted,
            "weight_before": weights_before,
            "weight_after": weights_after,
            "broken": sum(broken),
            "largest_change_without_encoding": max(unmoved),
        },
        "Without encoding the same swaps change no weight. Every case needs a swap over about a quarter of the "
        f"wavelength or more: {min(by_case['negative'][-1], by_case['positive'][-1]):,} tokens for the slowest pair of "
        f"{2 * len(inv_freq)} channels at base 10,000. The theorem is about a head that must attend in every order of "
        f"the tokens, as its proof does: in one given order, sequences of any length (here {min(tokens)} to "
        f"{max(tokens)} tokens) have keys with which it attends.",
    )
