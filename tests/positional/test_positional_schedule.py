"""The schedule: its arrays, what is static, what shares a compilation, edits that change nothing else."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab.errors import UserError
from pe_lab.positional import (
    PI,
    Alibi,
    Layer,
    LayerStructure,
    NoPE,
    Rope,
    Yarn,
    alibi_slopes,
    build_schedule,
    describe,
    frequencies,
    layers,
    rotate,
    rotation_tables,
)
from pe_lab.positional.rotation import fixed_point_frequencies

N, H, G, K = 4, 6, 3, 16
R = K // 2


def schedule_of(*pattern, count=N):
    return build_schedule(layers(list(pattern), count), H, G, K)


def same(a, b):
    """Equal structure and equal bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_shapes_and_dtypes():
    schedule = schedule_of("rope", "nope")
    shapes = {
        "inv_freq": ((N, H, R), np.float32),
        "gain": ((N, H, R), np.float32),
        "fixed_freq": ((N, H, R, 2), np.uint32),
        "alibi_slope": ((N, H), np.float32),
        "logit_scale": ((N,), np.float32),
    }
    for name, (shape, dtype) in shapes.items():
        array = getattr(schedule, name)
        assert (array.shape, array.dtype) == (shape, dtype), name
    assert schedule.num_layers == N and len(schedule.structure) == N


def test_arrays_hold_what_the_descriptions_say():
    pattern = [
        Layer(Rope(1e6), window=8),
        Layer(Alibi()),
        Layer(Rope(fraction=0.5, scaling=Yarn(4.0, 512)), logit_scale=1.5),
        Layer(NoPE()),
    ]
    schedule = build_schedule(pattern, H, G, K)
    for n, layer in enumerate(pattern):
        inv_freq, gain = frequencies(layer.encoding, K)
        np.testing.assert_array_equal(schedule.inv_freq[n], np.tile(inv_freq.astype(np.float32), (H, 1)))
        np.testing.assert_array_equal(schedule.gain[n], np.tile(gain.astype(np.float32), (H, 1)))
        # From the float64 frequencies: those of the float32 array would rotate too far at large positions.
        np.testing.assert_array_equal(schedule.fixed_freq[n], np.tile(fixed_point_frequencies(inv_freq), (H, 1, 1)))
    np.testing.assert_array_equal(schedule.alibi_slope[1], alibi_slopes(H).astype(np.float32))
    assert (schedule.alibi_slope[[0, 2, 3]] == 0).all()
    np.testing.assert_array_equal(schedule.logit_scale, np.float32([1, 1, 1.5, 1]))
    assert schedule.structure == (
        LayerStructure(rotates=True, window=8),
        LayerStructure(slopes=True),
        LayerStructure(rotates=True),
        LayerStructure(),
    )


@pytest.mark.parametrize(
    ("pattern", "rotates", "same_rotation"),
    [
        (["rope"], [True] * 4, True),
        (["nope"], [False] * 4, False),
        (["alibi"], [False] * 4, False),
        (["rope:fraction=0"], [False] * 4, False),
        (["pi:factor=1e30"], [False] * 4, False),
        (["rope/window=4", "nope"], [True, False, True, False], True),
        (["rope/window=4", "rope"], [True] * 4, True),
        (["rope", "rope:base=1e6"], [True] * 4, False),
        (["rope", "rope:fraction=0.5"], [True] * 4, False),
        (["rope", "yarn:factor=1,original_length=2"], [True] * 4, True),
        (["rope:base=1e6", "yarn:factor=2,original_length=1024,base=1e6"], [True] * 4, False),
    ],
)
def test_structure_says_which_layers_rotate_and_whether_alike(pattern, rotates, same_rotation):
    schedule = schedule_of(*pattern)
    assert [s.rotates for s in schedule.structure] == rotates
    assert schedule.same_rotation is same_rotation
    assert {s.heads for s in schedule.structure} == {"shared"}


def counting_model():
    """A compiled stand-in for the model, which reads structure as a decoder does, and its count of traces."""
    traces = []

    @jax.jit
    def run(schedule, x, positions):
        traces.append(schedule.structure)
        for n, structure in enumerate(schedule.structure):
            if structure.rotates:
                cos, sin = rotation_tables(schedule.fixed_freq[n], schedule.gain[n], positions)
                x = rotate(x, cos, sin)
            x = x * schedule.logit_scale[n]
            if structure.slopes:
                x = x - schedule.alibi_slope[n][:, None]
        return x

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, H, K)), jnp.float32)
    return lambda schedule: np.asarray(run(schedule, x, jnp.arange(5)[None] * 1000)), traces


SHARING = [
    "rope",
    "nope",
    "rope:fraction=0.25",
    "partial_rope",
    "pi:factor=4",
    "ntk:factor=4",
    "yarn:factor=2,original_length=1024",
    ["rope", "rope:base=1e6"],
    ["rope", "nope"],
    ["rope:base=1e6", "nope", "yarn:factor=8,original_length=64", "rope"],
]


def test_generalized_schedules_share_one_compilation_and_compute_the_same():
    general, general_traces = counting_model()
    special, special_traces = counting_model()
    results = []
    for pattern in SHARING:
        schedule = build_schedule(layers(pattern, N), H, G, K)
        results.append(general(schedule.generalize()))
        np.testing.assert_allclose(results[-1], special(schedule), rtol=1e-5, atol=1e-5)
    # A rotation by nothing returns its input to the bit.
    nope = schedule_of("nope")
    np.testing.assert_array_equal(general(nope.generalize()), special(nope))
    assert len(general_traces) == 1
    # As built: all layers rotate alike; none does; they differ; and two patterns with absent layers.
    assert len(special_traces) == 5
    for n, a in enumerate(results):
        for b in results[:n]:
            assert np.abs(a - b).max() > 0.01, "two encodings that compute the same test nothing"


def test_rope_and_nope_differ_in_structure_until_they_are_generalized():
    rope, nope = schedule_of("rope"), schedule_of("nope")
    assert jax.tree.structure(rope) != jax.tree.structure(nope)
    assert jax.tree.structure(rope.generalize()) == jax.tree.structure(nope.generalize())


def test_generalize_touches_no_array_and_keeps_windows_and_needs():
    schedule = schedule_of("rope/window=8", "alibi")
    general = schedule.generalize()
    assert all(a is b for a, b in zip(jax.tree.leaves(general), jax.tree.leaves(schedule), strict=True))
    rope, alibi = LayerStructure(rotates=True, window=8), LayerStructure(rotates=True, slopes=True)
    assert general.structure == (rope, alibi, rope, alibi)
    assert not general.same_rotation
    wide = schedule.generalize(heads="split", slopes=True)
    assert {(s.rotates, s.slopes, s.heads) for s in wide.structure} == {(True, True, "split")}
    split = schedule_of("rope/window=8/heads=0:nope", "alibi")
    assert {s.heads for s in split.generalize(heads="grouped").structure} == {"split", "grouped"}


def test_head_edits_share_the_compilation_of_a_split_schedule():
    run, traces = counting_model()
    rope = schedule_of("rope")
    run(rope.generalize(heads="split"))
    run(schedule_of("rope", "rope/heads=2:nope").generalize(heads="split"))
    run(schedule_of("nope").generalize(heads="split"))
    assert len(traces) == 1


def test_a_pytree_that_survives_jit_and_flattening():
    schedule = schedule_of("rope/window=8/heads=1:nope", "alibi")
    back = jax.jit(lambda s: s)(schedule)
    assert same(back, schedule)
    assert back.structure == schedule.structure and back.same_rotation == schedule.same_rotation
    leaves, tree = jax.tree.flatten(schedule)
    assert len(leaves) == 5
    assert same(jax.tree.unflatten(tree, leaves), schedule)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: build_schedule(layers("rope", 2), 6, 4, K), "6 query heads do not divide into 4"),
        (lambda: build_schedule(layers("rope", 2), 6, 0, K), "6 query heads do not divide into 0"),
        (lambda: build_schedule(layers("rope", 2), 0, 1, K), "0 heads"),
        (lambda: build_schedule([], 6, 3, K), "0 layers"),
        (lambda: build_schedule(layers("rope", 2), 6, 3, 15), "head_dim is 15"),
        (lambda: build_schedule(layers("nope", 2), 6, 3, 15), "head_dim is 15"),
        (lambda: describe(schedule_of("rope"), layers("rope", 2)), "2 layers cannot name the 4"),
    ],
)
def test_bad_shapes_and_indices_are_refused(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert says in str(error.value)


def table(text):
    """The cells of `describe`'s table, by column name."""
    header, *rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_describe_reads_right():
    pattern = [
        Layer(Rope(), window=512),
        Layer(Rope(), window=512),
        Layer(Rope(scaling=Yarn(2.0, 2048))),
        Layer(NoPE(), logit_scale=1.25),
        Layer(Alibi()),
        Layer(Rope(fraction=0.25)),
    ]
    rows = table(describe(build_schedule(pattern, 8, 2, 64), pattern))
    slowest = 2 * math.pi * 10000 ** (62 / 64)
    rope = {
        "layers": "0-1",
        "encoding": "rope(base=10000) / window 512",
        "rotated pairs": "32/32",
        "wavelength (tokens)": f"6.283 .. {slowest:.4g}",
        "gain": "1",
        "slope": "none",
        "window": "512",
        "logit scale": "1",
        "heads": "shared",
    }
    yarn = {
        "layers": "2",
        "encoding": "rope(base=10000) + yarn(factor=2, original_length=2048)",
        "wavelength (tokens)": f"6.283 .. {2 * slowest:.4g}",
        "gain": "1.069",
        "window": "all",
    }
    nothing = {"rotated pairs": "0/32", "wavelength (tokens)": "none", "gain": "none", "heads": "none"}
    nope = {"layers": "3", "encoding": "nope / logit scale 1.25", **nothing, "window": "all", "logit scale": "1.25"}
    alibi = {"layers": "4", "encoding": "alibi", **nothing, "window": "all", "slope": "0.003906 .. 0.5"}
    p_rope = {
        "layers": "5",
        "encoding": "rope(base=10000, fraction=0.25)",
        "rotated pairs": "8/32",
        "wavelength (tokens)": f"6.283 .. {2 * math.pi * 10000 ** (14 / 64):.4g}",
        "window": "all",
    }
    assert rows == [rope, rope | yarn, rope | nope, rope | alibi, rope | p_rope]


def test_describe_counts_the_pairs_whose_angle_changes():
    """PI by 1e30 is how a dropped model is exported: its frequencies are not zero, and no pair rotates."""
    (row,) = table(describe(build_schedule([Layer(Rope(scaling=PI(1e30)))], 2, 1, 8)))
    assert row["rotated pairs"] == "0/4" and row["wavelength (tokens)"] == "none"


def test_describe_shows_heads_that_differ():
    layer = "yarn:factor=8,original_length=64"
    first, second = table(describe(schedule_of(layer, layer, f"{layer}/heads=0:nope", layer)))
    assert "encoding" not in first
    assert (first["layers"], second["layers"]) == ("0-1,3", "2")
    assert (second["rotated pairs"], second["heads"], second["gain"]) == ("0-8/8", "split", "1 .. 1.208")


def test_a_notebook_shows_the_table_of_describe_with_a_strip_of_frequencies_for_each_range():
    schedule = schedule_of("rope", "nope")
    page = schedule._repr_html_()
    lines = [re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in re.findall(r"<tr>(.*?)</tr>", page)]
    described = [re.split(r"\s{2,}", line) for line in describe(schedule).split("\n")]
    assert [line[:-1] for line in lines] == described and len(lines) == 3
    rotated, unrotated = (re.findall(r'fill="rgb\((\d+),', line[-1]) for line in lines[1:])
    # Pair i rotates by 1e4^(-i/8) radians a token: i ln(1e4) / 8 below the fastest, 16 shades a unit.
    assert list(map(int, rotated)) == [round(16 * i * math.log(1e4) / R) for i in range(R)]
    assert unrotated == ["255"] * R
