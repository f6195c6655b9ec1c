"""Parity with other people's code: positional_golden.json, which make_positional_golden.py writes."""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.positional import (
    NTK,
    PI,
    PartialRope,
    Rope,
    Yarn,
    alibi_slopes,
    apply_p_rope,
    apply_rope,
    frequencies,
    rotate,
    rotation_tables,
)
from pe_lab.positional.rotation import turns_per_position

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "positional_golden.json").read_text())
YARN_FIELDS = ("factor", "original_length", "beta_fast", "beta_slow")


def encoding_of(case):
    """Our description of a golden case."""
    base = case["base"]
    if case["scheme"] == "partial_rope":
        scaling = Yarn(**case["yarn"]) if "yarn" in case else None
        return PartialRope(base, case["fraction"], scaling)
    scaling = {
        "rope": lambda: None,
        "p_rope": lambda: None,
        "pi": lambda: PI(case["factor"]),
        "ntk": lambda: NTK(case["factor"]),
        "yarn": lambda: Yarn(**{k: case[k] for k in YARN_FIELDS if k in case}),
    }[case["scheme"]]()
    return Rope(base, case.get("fraction", 1.0), scaling)


def name_of(case):
    skip = ("inv_freq", "gain", "inputs", "outputs")
    return "-".join(str(v) for k, v in case.items() if k not in skip)


@jax.jit
def rotated(x, turns, gain, positions):
    cos, sin = rotation_tables(turns, gain, positions)
    return rotate(x, cos[:, :, None], sin[:, :, None])


def rotated_by_us(encoding, x, positions):
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    return np.asarray(rotated(x, turns_per_position(inv_freq), gain.astype(np.float32), np.array(positions)))


def canonical_from_neox(head_dim, rotated):
    """The channel of a GPT-NeoX head that each channel of ours holds.

    Both rotate half-split pairs. NeoX's pair i is channels i and i + r/2 of the first r, and the channels
    from r on pass through. Our pair i is channels i and i + K/2 of the whole head; the first r/2 rotate.
    """
    half, rest = rotated // 2, (head_dim - rotated) // 2
    first = [*range(half), *range(rotated, rotated + rest)]
    second = [*range(half, rotated), *range(rotated + rest, head_dim)]
    return np.array(first + second)


def test_golden_file_covers_every_scheme():
    counts = Counter(case["scheme"] for case in GOLDEN["frequencies"])
    assert counts == {"rope": 8, "pi": 6, "ntk": 10, "yarn": 21, "p_rope": 12, "partial_rope": 12}
    assert {"transformers", "torch", "python"} <= set(GOLDEN["versions"])


@pytest.mark.parametrize("case", GOLDEN["frequencies"], ids=name_of)
def test_frequencies_and_gain(case):
    inv_freq, gain = frequencies(encoding_of(case), case["head_dim"])
    theirs = np.zeros(case["head_dim"] // 2)  # partial RoPE: they list the rotating pairs alone
    theirs[: len(case["inv_freq"])] = case["inv_freq"]
    np.testing.assert_allclose(inv_freq, theirs, rtol=1e-6, atol=0)
    assert (inv_freq[len(case["inv_freq"]) :] == 0).all()
    np.testing.assert_allclose(gain[: len(case["inv_freq"])], case["gain"], rtol=1e-6)
    assert (gain[len(case["inv_freq"]) :] == 1).all()


def tensors(scheme):
    return [case for case in GOLDEN["rotated"] if case["scheme"] == scheme]


def arrays(case):
    return np.array(case["inputs"], np.float32), np.array(case["outputs"], np.float32)


@pytest.mark.parametrize("scheme", ["rope", "pi", "yarn"])
def test_rotated_tensors_of_llama(scheme):
    (case,) = tensors(scheme)
    x, theirs = arrays(case)
    ours = rotated_by_us(encoding_of(case), x, GOLDEN["positions"])
    # transformers forms the angle in float32: at position 63 it is off by up to 4e-6 rad.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert np.abs(ours - x).max() > 1


def test_apply_rope_is_llamas_rotation():
    for scheme in ("rope", "pi"):
        (case,) = tensors(scheme)
        x, theirs = arrays(case)
        ours = apply_rope(
            jnp.asarray(x),
            jnp.asarray(GOLDEN["positions"]),
            base=case["base"],
            scale_factor=case.get("factor", 1.0),
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", tensors("partial_rope"), ids=name_of)
def test_partial_rotation_of_neox_after_its_channels_are_permuted(case):
    x, theirs = arrays(case)
    encoding = encoding_of(case)
    order = canonical_from_neox(case["head_dim"], encoding.rotated_channels(case["head_dim"]))
    assert sorted(order) == list(range(case["head_dim"]))
    ours = rotated_by_us(encoding, x[..., order], GOLDEN["positions"])
    np.testing.assert_allclose(ours, theirs[..., order], rtol=0, atol=1e-5)
    # Without the permutation it is another rotation.
    unpermuted = rotated_by_us(encoding, x, GOLDEN["positions"])
    assert np.abs(unpermuted - theirs).max() > 0.1


@pytest.mark.parametrize("case", tensors("p_rope"), ids=name_of)
def test_published_p_rope(case):
    x, theirs = arrays(case)
    ours = apply_p_rope(
        jnp.asarray(x),
        jnp.asarray(GOLDEN["positions"]),
        case["head_dim"],
        max_wavelength=case["max_wavelength"],
        rope_percentage=case["rope_percentage"],
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    assert np.abs(np.asarray(ours) - x).max() > 1


@pytest.mark.parametrize("heads", GOLDEN["alibi_slopes"])
def test_alibi_slopes_of_bloom(heads):
    slopes = alibi_slopes(int(heads))
    np.testing.assert_allclose(slopes, GOLDEN["alibi_slopes"][heads], rtol=1e-6)
    assert slopes.shape == (int(heads),)
