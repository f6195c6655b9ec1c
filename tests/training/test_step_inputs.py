"""Phases with a teacher, and phases whose encoding changes gradually: trained, cut and continued. 60 s, slow."""

import dataclasses
import shutil

import numpy as np
import pytest
from tiny_runs import assert_same_training, compilations_kept, losses, tiny, train, trained  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.config import DistillConfig, TransitionConfig
from pe_lab.errors import ConfigError
from pe_lab.positional import Layer, NoPE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compilations_kept")]


def second(config, **keys):
    """The config whose second phase has these keys."""
    first, other = config.phases
    return dataclasses.replace(config, phases=(first, dataclasses.replace(other, **keys)))


@pytest.fixture
def config(tmp_path):
    return tiny(tmp_path / "recipe")


def test_weights_of_zero_are_plain_training(config, trained, tmp_path):  # noqa: F811
    train(second(config, distill=DistillConfig(logits=0.0)), tmp_path / "run")
    np.testing.assert_array_equal(losses(tmp_path / "run/recalibrate"), losses(trained / "recalibrate"))


@pytest.mark.parametrize(
    "keys",
    [
        {"distill": DistillConfig(cross_entropy=0.5, logits=0.5, hidden=0.5)},
        {"transition": TransitionConfig(until=0.5)},
        {"transition": TransitionConfig(start="rope:base=100", how="pairs"), "distill": DistillConfig()},
    ],
    ids=["teacher", "transition", "both"],
)
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(config, tmp_path, keys):
    changed = second(config, **keys)
    train(changed, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in ("4", "6"):
        shutil.rmtree(tmp_path / "cut/recalibrate/checkpoints" / step)
    (tmp_path / "cut/recalibrate/phase.json").unlink()
    train(changed, tmp_path / "cut")
    assert_same_training(tmp_path / "whole", tmp_path / "cut")
    assert open_checkpoint(tmp_path / "cut/recalibrate").layers == (Layer(NoPE()), Layer(NoPE()))


def test_the_first_step_of_a_transition_is_that_of_its_start(config, trained, tmp_path):  # noqa: F811
    train(second(config, transition=TransitionConfig()), tmp_path / "gradual")
    train(second(config, positional="rope"), tmp_path / "kept")
    gradual, kept = (losses(tmp_path / name / "recalibrate") for name in ("gradual", "kept"))
    sudden = losses(trained / "recalibrate")
    np.testing.assert_allclose(gradual[0], kept[0], rtol=1e-6)
    assert abs(gradual[0] - sudden[0]) > 1e-4


def test_a_teacher_or_a_start_that_is_not_there_is_named(config, tmp_path):
    first, other = config.phases
    alone = dataclasses.replace(config, phases=(dataclasses.replace(first, distill=DistillConfig()),))
    with pytest.raises(ConfigError, match=r"phases\[0\] .'pretrain'.: distill.teacher is 'init'.*starts at random"):
        train(alone, tmp_path / "a")
    alone = dataclasses.replace(config, phases=(dataclasses.replace(first, transition=TransitionConfig()),))
    with pytest.raises(ConfigError, match=r"transition: start is 'init', and the phase starts at random"):
        train(alone, tmp_path / "b")
    windows = second(config, positional="nope/window=8", transition=TransitionConfig())
    with pytest.raises(ConfigError, match=r"phases\[1\].*transition: There is no gradual way for layer 0"):
        train(windows, tmp_path / "c")
