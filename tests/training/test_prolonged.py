"""Runs that are made longer: the learning rate, what a schedule cannot do, and one history however often it stops."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_runs import (
    Killed,
    arrays,
    assert_same_training,
    at_step,
    compilations_kept,  # noqa: F401
    die,
    finish,
    records,
    start_together,
    tiny,
    train_on_one_device,
    write_recipe,
)

import pe_lab.train
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.locating import steps_in
from pe_lab.config import Config, OptimizerConfig, ProlongedConfig, from_dict, to_json
from pe_lab.errors import ConfigError, UserError
from pe_lab.recipes import with_prolonged
from pe_lab.training.optimizer import learning_rate
from pe_lab.training.plan import prolong
from pe_lab.verify import targets

pytestmark = pytest.mark.usefixtures("compilations_kept")

COSINE = OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_fraction=0.25)
WSD = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="wsd", decay_fraction=0.5)


def rates(config: OptimizerConfig, steps: int, *times: tuple[int, int, str]) -> np.ndarray:
    rate = learning_rate(config, steps, [ProlongedConfig(*one) for one in times])
    return np.asarray([float(rate(step)) for step in range(steps)])


@pytest.mark.parametrize("config", [COSINE, WSD, dataclasses.replace(COSINE, schedule="constant")])
def test_a_stretched_schedule_is_that_of_the_new_length_from_the_step_on(config):
    found = rates(config, 20, (10, 6, "stretch"))
    np.testing.assert_array_equal(found[:6], rates(config, 10)[:6])
    np.testing.assert_array_equal(found[6:], rates(config, 20)[6:])


def test_the_last_rate_is_kept_and_another_time_starts_from_it():
    found = rates(COSINE, 16, (10, 10, "hold"), (12, 12, "rewarm"))
    np.testing.assert_allclose(found[10:], [0.25, 0.25, 0.625, 1, 1, (1 + 0.25) / 2], rtol=1e-6)
    np.testing.assert_array_equal(found[:10], rates(COSINE, 10))


def test_a_second_warm_up_and_decay_are_those_of_the_added_steps():
    found = rates(WSD, 18, (10, 10, "rewarm"))
    np.testing.assert_allclose(found[10:], [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25], rtol=1e-6)
    found = rates(dataclasses.replace(COSINE, warmup_steps=0), 14, (10, 10, "rewarm"))
    np.testing.assert_allclose(found[[10, 12]], [1, 0.625], rtol=1e-6)


def command(directory, *more: str) -> list[str]:
    one = f"--config.phases=[{{'name': 'pretrain', 'steps': 6, {SHAPE}}}]"
    return [f"--config={write_recipe(directory / 'recipe')}", one, "--config.checkpoint.keep=9", *more]


SHAPE = "'sequence_length': 16, 'batch_size': 8, 'optimizer': {'learning_rate': 0.01, 'warmup_steps': 1}"


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    train_on_one_device(monkeypatch)


def train(directory, name: str, *more: str) -> None:
    assert pe_lab.train.main(command(directory, f"--workdir={directory / name}", *more)) == 0


@pytest.mark.slow
def test_more_steps_and_a_new_batch_size_are_one_history(copy):
    """The tokens are what was read: 6 steps of 8 windows, then 2 of 16. About 2 s."""
    last = "--config.phases.1"
    more = [f"--workdir={copy}", "--until=8", f"{last}.batch_size=16", f"{last}.optimizer.on_prolong=hold"]
    more.append(f"{last}.optimizer.final_fraction=0.1")
    recipe = f"--config={write_recipe(copy / 'recipe')}"
    assert pe_lab.train.main([recipe, *more]) == 0
    log = [record for record in records(copy / "recalibrate/metrics.jsonl") if "loss" in record]
    assert [record["step"] for record in log] == list(range(1, 9))
    assert [record["tokens"] for record in log] == [*range(128, 769, 128), 1024, 1280]
    assert log[-1]["learning_rate"] == pytest.approx(1e-3, rel=1e-5)
    metadata = open_checkpoint(copy).metadata
    assert metadata["tokens"] == 1280 and metadata["data_state"]["sequences"] == 6 * 8 + 2 * 16
    lineage = [entry["what"] for entry in metadata["lineage"]]
    assert lineage[3] == "trained 6 steps of 'recalibrate' with nope" and lineage[5].startswith("trained 8 steps")
    assert lineage[4].startswith("prolonged from 6 to 8 steps (hold); continued with phases.1.batch_size 8 -> 16, ")
    assert json.loads((copy / "recalibrate/phase.json").read_text())["steps"] == 8
    assert pe_lab.train.main([recipe, *more[:1], *more[2:]]) == 0  # the plain command has nothing to do


@pytest.mark.slow
def test_two_processes_make_a_run_longer_and_look_for_no_tpu(copy):
    """A schedule's end is computed before training starts, and processes connect before that. 15 s."""
    more = ["--until=12", "--config.phases.1.optimizer.warmup_steps=1"]
    argv = ["pe_lab.train", f"--config={write_recipe(copy / 'recipe')}", f"--workdir={copy}", *more]
    for out in finish(start_together(argv, [copy, copy], JAX_PLATFORMS="")):
        assert "TPU" not in out and "libtpu" not in out
    assert json.loads((copy / "recalibrate/phase.json").read_text())["steps"] == 12


@pytest.mark.parametrize(
    ("optimizer", "kept", "steps", "says"),
    [
        (COSINE, [10], 8, "has 10 steps, and --until is their new number in all. Give more than 10"),
        (COSINE, [10], 12, "warmup_steps is 2, but 2 steps are added"),
        (dataclasses.replace(COSINE, on_prolong="hold", final_fraction=0.0), [10], 12, "ended at the rate 0"),
        (WSD, [8, 10], 20, "began to decay after step 6: .*kept ones are of steps 8, 10. Choose .*rewarm or hold"),
        (dataclasses.replace(WSD, on_prolong="rewarm"), [8, 10], 12, "2 steps are added"),
    ],
)
def test_what_a_schedule_cannot_do_is_one_message(tmp_path, optimizer, kept, steps, says):
    config = tiny(tmp_path / "recipe")
    phase = dataclasses.replace(config.phases[0], steps=10, optimizer=optimizer)
    with pytest.raises(ConfigError, match=rf"^--until={steps}: phase 'pretrain'.*{says}"):
        prolong(dataclasses.replace(config, phases=(phase,)), steps, kept)


@pytest.mark.slow
def test_wsd_goes_on_before_its_decay_as_if_the_steps_had_been_planned(tmp_path):
    """Also with the same losses; what is not gone on from is set aside. 5 s."""
    wsd = ["--config.phases.0.optimizer.schedule=wsd", "--config.phases.0.optimizer.decay_fraction=0.5"]
    train(tmp_path, "planned", *wsd, "--config.phases.0.steps=10")
    train(tmp_path, "run", *wsd)
    train(tmp_path, "run", *wsd, "--until=10")
    phase = tmp_path / "run/pretrain"
    assert steps_in(phase / "checkpoints") == [2, 4, 6, 8, 10]
    last = (where / "pretrain/checkpoints/10" for where in (tmp_path / "planned", tmp_path / "run"))
    planned, found = (arrays(checkpoint, "params") for checkpoint in last)
    assert all(planned[name].tobytes() == found[name].tobytes() for name in planned)
    logs = [records(tmp_path / name / "pretrain/metrics.jsonl") for name in ("planned", "run")]
    assert logs[0] == logs[1]
    assert sorted(path.name[:2] for path in (phase / "former").iterdir()) == ["6-", "me"]
    assert [record["step"] for record in records(phase / "former/metrics-6.jsonl")][-1] == 6
    assert [target.path.name for target in targets(phase) if target.kind == "checkpoint"] == ["10", "2", "4", "6", "8"]
    lineage = [entry["what"] for entry in open_checkpoint(phase).metadata["lineage"]]
    assert lineage[1].startswith("trained 4 steps") and lineage[2] == "prolonged from 6 to 10 steps (stretch)"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stretch", "hold", "rewarm"])
def test_a_longer_run_that_is_stopped_ends_in_the_same_bytes(tmp_path, monkeypatch, how):
    """Made longer twice, killed in both, and gone on with by the plain command. 10 s each."""
    more = ["--config.phases.0.optimizer.final_fraction=0.1", f"--config.phases.0.optimizer.on_prolong={how}"]
    for name in ("whole", "stopped"):
        train(tmp_path, name, *more)
    train(tmp_path, "whole", *more, "--until=9")
    train(tmp_path, "whole", *more, "--until=13")
    for steps in (9, 13):
        for number in (1, 2):
            with monkeypatch.context() as patch, pytest.raises(Killed):
                at_step(patch, number, die)
                train(tmp_path, "stopped", *more, f"--until={steps}")
        train(tmp_path, "stopped", *more)
    train(tmp_path, "stopped", *more, "--until=13")  # a launcher's command, once more
    assert_same_training(tmp_path / "whole", tmp_path / "stopped", ["pretrain"])
    logged = [record["step"] for record in records(tmp_path / "stopped/pretrain/metrics.jsonl") if "loss" in record]
    assert logged == list(range(1, 14))
    run = json.loads((tmp_path / "stopped/run.json").read_text())
    assert [one["steps"] for one in run["config"]["phases"][0]["prolonged"]] == [6, 9]
    assert [change["keys"]["phases.0.steps"] for change in run["changes"]] == [[6, 9], [9, 13]]


def test_a_recipe_with_other_steps_than_the_longer_run_is_refused(tmp_path):
    tree = to_json(tiny(tmp_path / "recipe"))
    saved = {"phases": [{"name": "pretrain", "steps": 12, "prolonged": [{"steps": 8, "at": 8, "how": "hold"}]}]}
    longer = with_prolonged(tree, saved)
    assert from_dict(Config, longer).phases[0].steps == 12 and with_prolonged(longer, saved) == longer
    tree["phases"][0]["steps"] = 9
    with pytest.raises(UserError, match="steps is 9, and the run was made longer, from 8 to 12 steps. Leave"):
        with_prolonged(tree, saved)


def test_there_is_nothing_to_make_longer_without_a_run(tmp_path, capsys):
    assert pe_lab.train.main(command(tmp_path, f"--workdir={tmp_path / 'run'}", "--until=9")) == 2
    assert "there is no run in" in capsys.readouterr().err and not (tmp_path / "run").exists()
