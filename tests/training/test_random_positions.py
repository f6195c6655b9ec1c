"""Randomized positions: sorted, without repetition, new each step, a function of seed, phase and step alone."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import compilations_kept, records, tiny, train  # noqa: F401

from pe_lab.errors import UserError
from pe_lab.training.plan import plan_phases
from pe_lab.training.step import RandomPositions

DRAWN = RandomPositions(64, (3, 1))


def test_positions_are_ascending_different_and_below_the_longest():
    draw = jax.jit(DRAWN.draw, static_argnums=1)
    found = np.stack([draw(step, 16)[0] for step in range(200)])
    assert found.dtype == np.int32 and (np.diff(found, axis=1) > 0).all()
    assert found.min() >= 0 and found.max() < 64
    # Every position is drawn about equally often: 200 * 16 / 64 = 50 times, give or take 6.2.
    counts = np.bincount(found.ravel(), minlength=64)
    assert counts.min() > 25 and counts.max() < 75


def test_steps_phases_and_seeds_draw_anew_and_the_same_step_draws_the_same():
    first = DRAWN.draw(jnp.int32(5), 16)
    np.testing.assert_array_equal(first, jax.jit(DRAWN.draw, static_argnums=1)(5, 16))
    for other, step in ((DRAWN, 6), (RandomPositions(64, (4, 1)), 5), (RandomPositions(64, (3, 2)), 5)):
        assert (np.asarray(other.draw(jnp.int32(step), 16)) != np.asarray(first)).any()


def test_as_many_as_there_are_leaves_no_choice():
    np.testing.assert_array_equal(RandomPositions(8, (0, 0)).draw(jnp.int32(1), 8)[0], np.arange(8))


def test_documents_still_begin_at_zero_and_keep_the_drawn_distances():
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7]], np.int32)
    batch = {"tokens": np.zeros((2, 8), np.int32), "positions": positions}
    drawn = np.asarray(DRAWN.draw(jnp.int32(0), 8))[0]
    replaced = np.asarray(DRAWN.replace(batch, jnp.int32(0))["positions"])
    np.testing.assert_array_equal(replaced[1], drawn - drawn[0])
    np.testing.assert_array_equal(replaced[0], [*(drawn[:4] - drawn[0]), *(drawn[4:7] - drawn[4]), 0])
    alone = DRAWN.replace({"tokens": batch["tokens"]}, jnp.int32(0))["positions"]
    np.testing.assert_array_equal(alone, np.stack([drawn] * 2))


@pytest.mark.slow
@pytest.mark.usefixtures("compilations_kept")
def test_training_with_them_differs_and_resumes_to_the_same_losses(tmp_path):
    settings = dict(phases__0__random_positions=64, phases__0__steps=6, checkpoint__every_steps=2)
    config = tiny(tmp_path / "recipe", **settings)
    config = dataclasses.replace(config, phases=config.phases[:1])
    train(config, tmp_path / "whole")
    whole = [record["loss"] for record in records(tmp_path / "whole/pretrain/metrics.jsonl") if "loss" in record]
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "cut/pretrain/checkpoints" / str(step))
    train(config, tmp_path / "cut")
    assert [record["loss"] for record in records(tmp_path / "cut/pretrain/metrics.jsonl") if "loss" in record] == whole
    counted = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], random_positions=0),))
    train(counted, tmp_path / "counted")
    plain = [record["loss"] for record in records(tmp_path / "counted/pretrain/metrics.jsonl") if "loss" in record]
    assert plain != whole


def test_fewer_positions_than_tokens_are_refused(tmp_path):
    with pytest.raises(UserError, match="random_positions is 8; 16 different positions"):
        plan_phases(tiny(tmp_path, phases__0__random_positions=8))
