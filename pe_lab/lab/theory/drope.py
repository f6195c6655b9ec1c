"""Statements of DroPE (Gelberg et al. 2025): definitions and arithmetic. Those on models are in `drope_models`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from pe_lab.analysis.frequencies import incomplete_pairs
from pe_lab.lab.theory import drope_models
from pe_lab.lab.theory.drope_models import positional_bias, positional_weights
from pe_lab.lab.theory.statement import Statement, statement
from pe_lab.positional import NTK, PI, Llama3, Rope, Yarn, frequencies

PAPER, HEAD_DIM, BASE = "DroPE", 64, 1e4
# Validation perplexity by the training step of the drop, of 16K steps (Table 6).
TOTAL_STEPS, PERPLEXITY = 16_000, {0: 23.77, 8_000: 22.42, 14_000: 21.73, 16_000: 21.72}


def statements(seed: int = 0) -> Iterator[Statement]:
    """Every statement of the paper."""
    yield definition_3_1()
    yield from drope_models.statements(seed)
    yield from incomplete_rotations()
    yield from ntk_exponent()
    yield from yarn_thresholds()
    yield latest_drop()


def definition_3_1(length: int = 64) -> Statement:
    """The weights c_ij of a diagonal head."""
    uniform, diagonal = np.tri(length) / np.arange(1, length + 1)[:, None], np.eye(length)
    c = positional_weights(length, "diagonal")
    sums = np.abs(c.sum(1))
    of_uniform, of_diagonal = (float(positional_bias(a, c)) for a in (uniform, diagonal))
    # A linear function of each query's weights is largest at the key with the largest c.
    maximal = bool((c[1:].argmax(1) == np.arange(1, length)).all())
    return statement(
        f"{PAPER}, Definition 3.1",
        "Weights c_ij of 1 on the diagonal and -1/(i - 1) elsewhere are centred, and a diagonal head maximizes the "
        "positional bias A^c.",
        f"For {length} tokens the sums over j reach {sums.max():.3g} in absolute value; A^c is {of_uniform:.3g} "
        f"for uniform attention and {of_diagonal:.3g} for a diagonal head, "
        + ("which maximizes it." if maximal else "which does not maximize it."),
        sums.max() < 1e-12 and abs(of_uniform) < 1e-12 and maximal,
        {
            "tokens": length,
            "largest_sum": sums.max(),
            "bias_of_uniform_attention": of_uniform,
            "bias_of_a_diagonal_head": of_diagonal,
        },
        "The first query has one key only, so that its centred weight is 0, which the formula leaves open.",
    )


def incomplete_rotations(context: int = 32_000) -> Iterator[Statement]:
    """The pairs that never complete a rotation within a context (Section 4.1)."""
    inv_freq = frequencies(Rope(BASE), HEAD_DIM)[0]
    count, rotations = incomplete_pairs(inv_freq, context), inv_freq * context / (2 * math.pi)
    fifth_slowest = inv_freq[-5]
    longest = math.ceil(2 * math.pi / fifth_slowest) - 1  # tokens within which five pairs do not complete a rotation
    # The base at which the fifth slowest pair rotates exactly once within the context.
    base = (context / (2 * math.pi)) ** (HEAD_DIM / (2 * (HEAD_DIM // 2 - 5)))
    numbers = {
        "context": context,
        "pairs": count,
        "rotations_of_slowest_pairs": rotations[-6:],
        "longest_context_for_five": longest,
        "pairs_at_that_context": incomplete_pairs(inv_freq, longest),
        "base_for_five": base,
    }
    yield statement(
        f"{PAPER}, Section 4.1",
        f"With base 10,000 and {HEAD_DIM} channels, at least five pairs never complete a rotation in {context:,} "
        "tokens.",
        f"{count} do not; the six slowest pairs make {', '.join(f'{x:.2f}' for x in rotations[-6:])} rotations.",
        count >= 5,
        numbers,
        f"The argument needs one such pair, and there are {count}.",
    )
    yield statement(
        f"{PAPER}, Section 4.1, corrected",
        f"With base 10,000 and {HEAD_DIM} channels, at least five pairs never complete a rotation in {longest:,} "
        "tokens or fewer.",
        f"At {longest:,} tokens there are {numbers['pairs_at_that_context']}, and one token more completes the fifth. "
        f"At {context:,} tokens, five need a base above {base:,.0f}.",
        numbers["pairs_at_that_context"] == 5 and incomplete_pairs(inv_freq, longest + 1) == 4,
        numbers,
    )


def ntk_formula(factor: float, first: int) -> Float[np.ndarray, " R"]:
    """gamma_m of eq. 3 and 10, (1/s)^(2m / (d - 2)), with m counted from `first`."""
    m = np.arange(HEAD_DIM // 2) + first
    return factor ** (-2.0 * m / (HEAD_DIM - 2))


def _gamma(scaling: NTK | PI | Yarn | Llama3) -> Float[np.ndarray, " R"]:
    plain, scaled = (frequencies(Rope(BASE, scaling=x), HEAD_DIM)[0] for x in (None, scaling))
    return scaled / plain


def ntk_exponent(factor: float = 2.0) -> Iterator[Statement]:
    """The exponent of NTK-aware scaling, with m from 1 (as the paper counts) and from 0."""
    ntk = _gamma(NTK(factor))
    for first in (1, 0):
        gamma = ntk_formula(factor, first)
        off = np.abs(gamma - ntk).max()
        yield statement(
            f"{PAPER}, eq. 3 and 10" + ("" if first else ", corrected"),
            f"NTK-aware scaling multiplies frequency m by (1/s)^(2{'m' if first else '(m - 1)'} / (d - 2)), with m "
            + "counted from 1.",
            f"At s = {factor:g} the factors of the fastest and the slowest pair are {gamma[0]:.4f} and "
            f"{gamma[-1]:.4f}; NTK keeps the fastest and divides the slowest by s. The largest difference from "
            f"pe_lab's NTK is {off:.2g}.",
            off < 1e-12,
            {"factor": factor, "fastest": gamma[0], "slowest": gamma[-1], "largest_difference": off, "gamma": gamma},
            "m is off by one. What the paper says of the factors holds to a few per cent, and its evaluations use "
            '"standard implementations" (C.2).'
            if first
            else "",
        )


def yarn_formula(values: Float[np.ndarray, " R"], factor: float) -> Float[np.ndarray, " R"]:
    """gamma_m of eq. 11: from 1/s to 1 by a ramp of `values` from p = 1 to q = 32; the paper has frequencies."""
    kept = np.clip((values - 1.0) / (32.0 - 1.0), 0, 1)
    return (1 - kept) / factor + kept


def yarn_thresholds(factor: float = 2.0, length: int = 2048) -> Iterator[Statement]:
    """Equation 11 with thresholds on the frequency, as it has them, and on the rotations within the training length."""
    inv_freq = frequencies(Rope(BASE), HEAD_DIM)[0]
    yarn, pi = _gamma(Yarn(factor, length)), _gamma(PI(factor))
    gamma = yarn_formula(inv_freq, factor)
    yield statement(
        f"{PAPER}, eq. 11",
        "YaRN's factor is 1/s for frequencies below p = 1, 1 above q = 32 and a ramp between.",
        f"No RoPE frequency exceeds 1, so every factor is 1/s: the largest difference from PI is "
        f"{np.abs(gamma - pi).max():.2g}, and from pe_lab's YaRN {np.abs(gamma - yarn).max():.2g}.",
        np.abs(gamma - yarn).max() < 1e-12,
        {
            "factor": factor,
            "largest_frequency": inv_freq.max(),
            "difference_from_pi": np.abs(gamma - pi).max(),
            "difference_from_yarn": np.abs(gamma - yarn).max(),
            "gamma": gamma,
            "gamma_yarn": yarn,
        },
        "YaRN compares p and q with the rotations within the training length. The paper's evaluations use \"standard "
        "implementations\" (C.2). YaRN's factor on cos and sin, 0.1 ln s + 1, is not of eq. 11, which has frequencies.",
    )
    gamma = yarn_formula(length * inv_freq / (2 * math.pi), factor)
    by_rotations = _gamma(Llama3(factor, low_freq_factor=1.0, high_freq_factor=32.0, original_length=length))
    low, high = Yarn(factor, length).ramp_bounds(BASE, HEAD_DIM)
    pair = np.arange(len(inv_freq))
    outside = (pair <= low) | (pair >= high)
    numbers = {
        "factor": factor,
        "length": length,
        "difference_from_rotations": np.abs(gamma - by_rotations).max(),
        "difference_outside_ramp": np.abs(gamma - yarn)[outside].max(),
        "difference_inside_ramp": np.abs(gamma - yarn)[~outside].max(),
        "gamma": gamma,
    }
    yield statement(
        f"{PAPER}, eq. 11, corrected",
        "YaRN's factor is 1/s for pairs of fewer than p = 1 rotations in the training length, 1 for more than q = 32 "
        "and a ramp between.",
        f"With s = {factor:g} and {length} tokens it agrees with a ramp over rotations to "
        f"{numbers['difference_from_rotations']:.1g}, and with pe_lab's YaRN (as in the published code) to "
        f"{numbers['difference_outside_ramp']:.2g} outside the ramp. Inside, where the code's ramp is linear in the "
        f"index of the pair, it differs by up to {numbers['difference_inside_ramp']:.2f}.",
        numbers["difference_from_rotations"] < 1e-12 and numbers["difference_outside_ramp"] < 0.02,
        numbers,
    )


def latest_drop() -> Statement:
    """The ablation of the training step of the drop (Section D.1), by its own table."""
    steps_left = [TOTAL_STEPS - step for step in PERPLEXITY]
    values = list(PERPLEXITY.values())
    best = min(PERPLEXITY, key=lambda step: PERPLEXITY[step])
    latest = max(step for step in PERPLEXITY if step < TOTAL_STEPS)
    return statement(
        f"{PAPER}, Section D.1",
        "Dropping the positional encoding at the very end of pretraining (DroPE @ 16K) yields the best validation "
        "perplexity, and earlier dropping steadily degrades it.",
        f"Its table has {', '.join(f'{x:.2f} at {step:,}' for step, x in PERPLEXITY.items())} of {TOTAL_STEPS:,} "
        "steps: the later the better.",
        best == TOTAL_STEPS and values == sorted(values, reverse=True),
        {
            "step": list(PERPLEXITY),
            "steps_left": steps_left,
            "perplexity": values,
            "total_steps": TOTAL_STEPS,
            "latest_drop": latest,
            "above_rope": PERPLEXITY[latest] - PERPLEXITY[best],
        },
        f"The entry at {best:,} steps is the RoPE model, as the paper writes. The latest drop, at {latest:,}, is "
        f"{PERPLEXITY[latest] - PERPLEXITY[best]:.2f} above it; one run each.",
    )
