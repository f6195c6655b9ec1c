"""Transitions between two schedules: their ends, and the order in which things move. 2 s."""

import numpy as np
import pytest

from pe_lab.errors import ConfigError
from pe_lab.positional import Alibi, Layer, NoPE, Rope, build_schedule, layers
from pe_lab.positional.transition import ScheduleTransition, in_turn

ROPE, NOPE = (build_schedule(layers(one, 4), 2, 2, 8) for one in (Rope(base=100.0), NoPE()))
ARRAYS = ("inv_freq", "gain", "fixed_freq", "alibi_slope", "logit_scale")


@pytest.mark.parametrize("how", ["scale", "pairs", "layers"])
def test_a_transition_has_the_schedules_at_its_ends(how):
    transition = ScheduleTransition(ROPE, NOPE, how)
    for t, expected in ((0.0, ROPE), (1.0, NOPE), (-1.0, ROPE), (2.0, NOPE)):
        for name in ARRAYS:
            np.testing.assert_allclose(
                getattr(transition.at(t), name), getattr(expected, name), rtol=1e-6, err_msg=name
            )
    assert len({transition.at(t).structure for t in (0.0, 0.3, 1.0)}) == 1  # one compilation


def test_all_frequencies_shrink_together():
    np.testing.assert_allclose(ScheduleTransition(ROPE, NOPE).at(0.25).inv_freq, 0.75 * ROPE.inv_freq, rtol=1e-6)


def test_pairs_go_from_the_slowest_to_the_fastest():
    transition = ScheduleTransition(ROPE, NOPE, "pairs")
    half = transition.at(0.5).inv_freq  # of 4 pairs, which are listed from the fastest
    np.testing.assert_allclose(half[..., :2], ROPE.inv_freq[..., :2], rtol=1e-6)
    assert not half[..., 2:].any()
    p_rope = build_schedule(layers(Rope(base=100.0, fraction=0.5), 4), 2, 2, 8)
    np.testing.assert_allclose(half, p_rope.inv_freq, rtol=1e-6)


def test_layers_go_from_the_last_to_the_first():
    moved = ScheduleTransition(ROPE, NOPE, "layers").at(0.375).inv_freq
    assert not moved[3].any()
    np.testing.assert_allclose(moved[2], 0.5 * ROPE.inv_freq[2], rtol=1e-6)
    np.testing.assert_allclose(moved[:2], ROPE.inv_freq[:2], rtol=1e-6)


def test_slopes_and_logit_scales_move_too():
    alibi = build_schedule([Layer(Alibi(), logit_scale=2.0)] * 4, 2, 2, 8)
    moved = ScheduleTransition(alibi, NOPE).at(0.5)
    np.testing.assert_allclose(moved.alibi_slope, alibi.alibi_slope / 2, rtol=1e-6)
    np.testing.assert_allclose(moved.logit_scale, [1.5] * 4)
    assert not any(one.rotates for one in moved.structure)  # nor does anything rotate that does not at either end


def test_one_after_another():
    np.testing.assert_allclose(in_turn(0.625, [0, 1, 2, 3], 4), [1, 1, 0.5, 0])


def test_what_is_compiled_cannot_move():
    window = build_schedule([Layer(Rope(), 8)] * 4, 2, 2, 8)
    with pytest.raises(ConfigError, match="no gradual way for layer 0: its window"):
        ScheduleTransition(window, NOPE)
