"""Channel layouts: external rotations become canonical by one permutation of channels, and nothing else changes."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pe_lab.errors import UserError
from pe_lab.positional import PartialRope, Rope, frequencies, rotate, rotation_tables
from pe_lab.positional.rotation import (
    CANONICAL,
    Layout,
    channel_order,
    fixed_point_frequencies,
    from_canonical,
    to_canonical,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "positional_golden.json").read_text())


def tensors(*schemes):
    return [case for case in GOLDEN["rotated"] if case["scheme"] in schemes]


def name_of(case):
    return f"{case['scheme']}-{case['head_dim']}"


def rotated_by_us(x, encoding):
    inv_freq, gain = frequencies(encoding, x.shape[-1])
    fixed_freq, positions = jnp.asarray(fixed_point_frequencies(inv_freq)), jnp.array(GOLDEN["positions"])
    cos, sin = rotation_tables(fixed_freq, jnp.asarray(gain, jnp.float32), positions)
    return np.asarray(rotate(jnp.asarray(x), cos[:, :, None], sin[:, :, None]))


def known(case):
    """The layout of the code that rotated, and our description of what it did."""
    head_dim = case["head_dim"]
    if case["scheme"] == "cohere2":
        return Layout("interleaved"), Rope(case["base"])
    if case["scheme"] == "gptj":
        return Layout("interleaved", case["rotated"]), PartialRope(case["base"], case["rotated"] / head_dim)
    encoding = PartialRope(case["base"], case["partial"])
    return Layout("half", encoding.rotated_channels(head_dim)), encoding


@pytest.mark.parametrize("case", tensors("cohere2", "gptj", "partial_rope"), ids=name_of)
def test_rotation_of_cohere2_gptj_and_neox_is_ours_in_the_canonical_layout(case):
    x, theirs = np.array(case["inputs"], np.float32), np.array(case["outputs"], np.float32)
    layout, encoding = known(case)
    ours = from_canonical(rotated_by_us(to_canonical(x, layout), encoding), layout)
    # transformers forms the angle in float32: at position 63 it is off by up to 4e-6 rad.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    # Without the permutation it is another rotation, and so it is with another layout.
    other = Layout("half" if layout.pairs == "interleaved" else "interleaved", layout.rotated)
    assert np.abs(rotated_by_us(x, encoding) - theirs).max() > 0.1
    wrong = from_canonical(rotated_by_us(to_canonical(x, other), encoding), other)
    assert np.abs(wrong - theirs).max() > 0.1


def test_golden_tensors_are_there():
    assert [name_of(case) for case in tensors("cohere2", "gptj", "partial_rope")] == [
        "partial_rope-32",
        "partial_rope-64",
        "cohere2-32",
        "gptj-32",
        "gptj-40",
    ]


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (CANONICAL, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Layout("interleaved"), [0, 2, 4, 6, 1, 3, 5, 7]),
        (Layout("half", 4), [0, 1, 4, 5, 2, 3, 6, 7]),
        (Layout("interleaved", 4), [0, 2, 4, 5, 1, 3, 6, 7]),
        (Layout("half", 8), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Layout("interleaved", 0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Layout("interleaved", 2), [0, 2, 3, 4, 1, 5, 6, 7]),
    ],
)
def test_order_by_hand(layout, order):
    assert channel_order(layout, 8).tolist() == order


def test_gguf_files_of_the_llama_family_are_interleaved():
    heads, head_dim, width = 3, 8, 5
    ours = np.random.default_rng(0).standard_normal((heads * head_dim, width))  # rows as transformers has them
    # llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute
    gguf = ours.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(ours.shape)
    by_head = gguf.reshape(heads, head_dim, width).swapaxes(1, 2)
    back = to_canonical(by_head, Layout("interleaved"))
    np.testing.assert_array_equal(back.swapaxes(1, 2).reshape(ours.shape), ours)
    np.testing.assert_array_equal(from_canonical(back, Layout("interleaved")), by_head)


@st.composite
def heads(draw):
    """A head size and a layout that fits it."""
    half = draw(st.integers(1, 64))
    rotated = draw(st.none() | st.integers(0, half).map(lambda n: 2 * n))
    return 2 * half, Layout(draw(st.sampled_from(["half", "interleaved"])), rotated)


@given(heads(), st.sampled_from([np.float32, np.float16, np.int8]), st.integers(0, 2**32 - 1))
def test_there_and_back_is_the_identity(head, dtype, seed):
    head_dim, layout = head
    x = (np.random.default_rng(seed).standard_normal((2, 3, head_dim)) * 50).astype(dtype)
    there = to_canonical(x, layout)
    back = from_canonical(there, layout)
    assert back.dtype == there.dtype == dtype
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(to_canonical(from_canonical(x, layout), layout), x)


@given(heads(), st.integers(0, 2**32 - 1))
def test_scores_do_not_notice_a_permutation_of_queries_and_keys(head, seed):
    head_dim, layout = head
    # Whole numbers: sums in another order are then exactly the same.
    q, k = np.random.default_rng(seed).integers(-9, 9, (2, 4, head_dim)).astype(np.float64)
    np.testing.assert_array_equal(to_canonical(q, layout) @ to_canonical(k, layout).T, q @ k.T)


def test_permuting_a_projection_permutes_its_heads():
    generator = np.random.default_rng(0)
    layout = Layout("interleaved", 4)
    x, weight, bias = (generator.integers(-9, 9, shape).astype(np.float64) for shape in [(6, 5), (5, 2, 8), (2, 8)])
    theirs = np.einsum("td,dhk->thk", x, weight) + bias
    ours = np.einsum("td,dhk->thk", x, to_canonical(weight, layout)) + to_canonical(bias, layout)
    np.testing.assert_array_equal(ours, to_canonical(theirs, layout))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        # The tests' own check of annotations would refuse Layout("pairs") first.
        (lambda: Layout.__post_init__(SimpleNamespace(pairs="pairs", rotated=None)), "half or interleaved"),
        (lambda: Layout("half", 3), "even number"),
        (lambda: Layout("half", -2), "even number"),
        (lambda: channel_order(Layout("half", 16), 8), "more than the 8 channels"),
        (lambda: channel_order(CANONICAL, 7), "even and positive"),
        (lambda: to_canonical(np.zeros((2, 5)), CANONICAL), "even and positive"),
    ],
)
def test_impossible_layouts_are_refused(make, says):
    with pytest.raises(UserError, match=says):
        make()
