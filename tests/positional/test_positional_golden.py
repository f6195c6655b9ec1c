"""Parity with external code: positional_golden.json, which make_positional_golden.py writes."""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.errors import UserError
from pe_lab.positional import (
    NTK,
    PI,
    DynamicNTK,
    DynamicYarn,
    Layer,
    Llama3,
    LongRope,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    alibi_slopes,
    apply_p_rope,
    apply_rope,
    build_schedule,
    frequencies,
    rotate,
    rotation_tables,
)
from pe_lab.positional.notebook import NotebookNTK, NotebookYarn
from pe_lab.positional.rotation import Layout, channel_order, fixed_point_frequencies, from_canonical, to_canonical

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "positional_golden.json").read_text())
# Asked is 1e-6. The golden values are float64 results written with ten digits, so more can be had.
TOLERANCE = 1e-9
SCALINGS = {
    "rope": None,
    "pi": PI,
    "ntk": NTK,
    "dynamic_ntk": DynamicNTK,
    "ntk_by_parts": NTKByParts,
    "yarn": Yarn,
    "dynamic_yarn": DynamicYarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "p_rope": None,
    "p_rope_pi": PI,
    "partial_rope": None,
    "notebook_ntk": NotebookNTK,
}


def encoding_of(case):
    """Our description of a golden case."""
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in case["settings"].items()}
    kind = SCALINGS[case["scheme"]]
    scaling = kind(**settings) if kind else None
    if "partial" in case:
        return PartialRope(case["base"], case["partial"], scaling)
    return Rope(case["base"], case.get("fraction", 1.0), scaling)


def scheme_of(case):
    return ("partial " if "partial" in case else "") + case["scheme"]


def name_of(case):
    skip = ("inv_freq", "gain", "inputs", "outputs", "settings")
    settings = [f"{k}={v}" for k, v in case.get("settings", {}).items() if not isinstance(v, list)]
    return "-".join([*(str(v) for k, v in case.items() if k not in skip), *settings])


@jax.jit
def rotated(x, fixed_freq, gain, positions):
    cos, sin = rotation_tables(fixed_freq, gain, positions)
    return rotate(x, cos[:, :, None], sin[:, :, None])


def rotated_by_us(encoding, x, positions):
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    return np.asarray(rotated(x, fixed_point_frequencies(inv_freq), gain.astype(np.float32), np.array(positions)))


def ours_and_theirs(case):
    """Frequencies [R], then amplitudes [R]: each ours and theirs."""
    inv_freq, gain = frequencies(encoding_of(case), case["head_dim"], case.get("length"))
    rotating = len(case["inv_freq"])  # partial RoPE: they list the rotating pairs alone
    still = case["head_dim"] // 2 - rotating
    return (
        (inv_freq, np.array([*case["inv_freq"], *[0.0] * still])),
        (gain, np.array([case["gain"]] * rotating + [1.0] * still)),
    )


def test_golden_file_covers_every_scheme():
    counts = Counter(map(scheme_of, GOLDEN["frequencies"]))
    assert counts == {
        "rope": 11,
        "pi": 39,
        "ntk": 37,
        "dynamic_ntk": 64,
        "ntk_by_parts": 21,
        "yarn": 72,
        "dynamic_yarn": 50,
        "llama3": 28,
        "longrope": 42,
        "p_rope": 23,
        "p_rope_pi": 16,
        "notebook_ntk": 5,
        "partial rope": 12,
        "partial pi": 7,
        "partial ntk": 7,
        "partial dynamic_ntk": 14,
        "partial ntk_by_parts": 7,
        "partial yarn": 23,
        "partial dynamic_yarn": 14,
        "partial llama3": 7,
        "partial longrope": 14,
    }
    assert counts.total() >= 200
    assert {"transformers", "torch", "python"} <= set(GOLDEN["versions"])


def test_lengths_lie_below_at_and_above_training_for_every_scheme_that_reads_them():
    sides = {}
    for case in GOLDEN["frequencies"]:
        if "length" in case:
            side = np.sign(case["length"] - case["settings"]["original_length"])
            sides.setdefault(case["scheme"], set()).add(int(side))
    assert sides == dict.fromkeys(("dynamic_ntk", "dynamic_yarn", "longrope"), {-1, 0, 1})


def test_transformers_as_it_is_agrees_with_its_float64():
    # So it agrees with us to 1e-6, except where its float32 itself is not that good.
    coarse = {scheme for scheme, differs in GOLDEN["float32_differs"].items() if differs > 1e-6}
    assert coarse == {"yarn", "llama3"}
    assert max(GOLDEN["float32_differs"].values()) < 1e-5


def ramp_is_empty(case):
    """YaRN on a training length within which no pair makes a full rotation, and its bounds not rounded apart."""
    settings = case["settings"]
    return "yarn" in case["scheme"] and settings["original_length"] == 6 and not settings.get("truncate", True)


@pytest.mark.parametrize("scheme", sorted(set(map(scheme_of, GOLDEN["frequencies"]))))
def test_frequencies_and_gain(scheme):
    for case in GOLDEN["frequencies"]:
        if scheme_of(case) == scheme and not ramp_is_empty(case):
            inv_freq, gain = ours_and_theirs(case)
            np.testing.assert_allclose(*inv_freq, rtol=TOLERANCE, atol=0, err_msg=name_of(case))  # so zero is zero
            np.testing.assert_allclose(*gain, rtol=TOLERANCE, atol=0, err_msg=name_of(case))


def test_where_yarn_has_nothing_to_interpolate_theirs_is_rope_and_ours_refuses():
    """A YaRN that silently scales nothing is what nobody asked for."""
    (case,) = [c for c in GOLDEN["frequencies"] if ramp_is_empty(c)]
    rope = frequencies(Rope(case["base"]), case["head_dim"])[0]
    np.testing.assert_allclose(case["inv_freq"], rope, rtol=TOLERANCE)
    with pytest.raises(UserError, match="nothing to interpolate"):
        ours_and_theirs(case)


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
            scale_factor=case["settings"].get("factor", 1.0),
        )
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", tensors("partial_rope"), ids=name_of)
def test_partial_rotation_of_neox_after_its_channels_are_permuted(case):
    x, theirs = arrays(case)
    encoding = encoding_of(case)
    rotated_channels = encoding.rotated_channels(case["head_dim"])
    order = channel_order(Layout("half", rotated_channels), case["head_dim"])
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


@pytest.mark.parametrize("case", tensors("notebook_ntk") + tensors("notebook_yarn"), ids=name_of)
def test_what_the_notebook_publishes(case):
    x, theirs = arrays(case)  # [T, K], pairs of neighbouring channels, positions 0, 1, ...
    layout, at = Layout("interleaved"), jnp.arange(len(x))[None]
    inputs = jnp.asarray(to_canonical(x, layout))[None, :, None]
    names = {"scaling": "factor", "N_train": "original_length"}
    settings = {names.get(name, name): value for name, value in case["settings"].items()}
    base = settings.pop("base", 10000.0)
    if case["scheme"] == "notebook_ntk":
        encoding = Rope(base, scaling=NotebookNTK(**settings))
        schedule = build_schedule([Layer(encoding)], num_heads=1, num_kv_heads=1, head_dim=case["head_dim"])
        fixed_freq, gain = jnp.asarray(schedule.fixed_freq[0]), jnp.asarray(schedule.gain[0])
        encoded = rotate(inputs, *rotation_tables(fixed_freq, gain, at))
    else:
        encoded, _ = NotebookYarn(base, **settings).encode({}, inputs, inputs, at, inputs[:, :, 0])
    ours = from_canonical(np.asarray(encoded)[0, :, 0], layout)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-6)
    assert np.abs(ours - x).max() > 1


@pytest.mark.parametrize("heads", GOLDEN["alibi_slopes"])
def test_alibi_slopes_of_bloom(heads):
    slopes = alibi_slopes(int(heads))
    np.testing.assert_allclose(slopes, GOLDEN["alibi_slopes"][heads], rtol=1e-6)
    assert slopes.shape == (int(heads),)


def relative_error(ours, theirs):
    """The largest error relative to theirs; where theirs is zero, ours must be."""
    assert (ours[theirs == 0] == 0).all()
    there = theirs != 0
    return np.max(np.abs(ours[there] / theirs[there] - 1), initial=0.0)


def print_table():
    """Every scheme: golden comparisons, largest relative errors, and how far transformers' float32 is by itself."""
    schemes = {}
    for case in (case for case in GOLDEN["frequencies"] if not ramp_is_empty(case)):
        schemes.setdefault(scheme_of(case), []).append([relative_error(*pair) for pair in ours_and_theirs(case)])
    print("| scheme | comparisons | frequencies: largest relative error | factor on cos and sin | float32 of theirs |")
    print("|---|---|---|---|---|")
    for scheme, errors in schemes.items():
        inv_freq, gain = np.max(errors, axis=0)
        float32 = GOLDEN["float32_differs"].get(scheme.removeprefix("partial "))
        print(f"| {scheme} | {len(errors)} | {inv_freq:.1e} | {gain:.1e} | {float32 or ''} |")
    inv_freq, gain = np.max([error for errors in schemes.values() for error in errors], axis=0)
    print(f"| all | {sum(map(len, schemes.values()))} | {inv_freq:.1e} | {gain:.1e} | |")


if __name__ == "__main__":
    print_table()
