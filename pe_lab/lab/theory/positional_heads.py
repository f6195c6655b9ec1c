"""Claims of the paper on p-RoPE (Barbero et al. 2024) on positional attention (Section 5)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pe_lab.attention import LayerEncoding
from pe_lab.attention.statistics import attention_rows
from pe_lab.lab.theory.claims import Claim, claim
from pe_lab.lab.theory.rotary import BASE, HEAD_DIM, Distances, key_for_distance
from pe_lab.positional import NoPE, Rope, frequencies, rotation_tables
from pe_lab.positional.rotation import fixed_point_frequencies

PAPER = "p-RoPE"


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


def _softmax(logits: Float[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T"]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def proposition_5_2(seed: int, heads: int = 512, length: int = 8, width: int = 16) -> Claim:
    """A NoPE head cannot attend to the diagonal or to the previous token."""
    rng = np.random.default_rng((seed, 52))
    x = rng.standard_normal((heads, length, width))
    x[:, -1] = x[:, -2]  # the counterexample: the last token repeats the one before it
    scale = 10 ** rng.uniform(-2, 2, (heads, 1, 1))
    w_q, w_k = (rng.standard_normal((heads, width, width)) * scale for _ in range(2))
    w_k[: heads // 2] = w_q[: heads // 2]  # adversarial: queries equal keys, as sharp as a diagonal can be
    logits = np.einsum("hd,htd->ht", (x @ w_q)[:, -1], x @ w_k)
    weights = _softmax(logits)[:, -2:]
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
    return claim(
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
) -> Claim:
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
        "smallest_norm_squared_all_pairs": min(norms["all_pairs"]),
        "largest_norm_squared_all_pairs": max(norms["all_pairs"]),
        "largest_norm_squared_one_pair": max(norms["one_pair"]),
        "pe_lab_tokens": tokens,
        "pe_lab_epsilon": epsilon,
        "pe_lab_diagonal": in_pe_lab[0],
        "pe_lab_previous": in_pe_lab[1],
    }
    return claim(
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
