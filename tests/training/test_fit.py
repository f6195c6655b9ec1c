"""`pe_lab.fit`: training from Python, in a process that goes on."""

import json
import os
import signal

import pytest
from ml_collections import ConfigDict
from tiny_runs import (
    assert_same_training,
    at_step,
    compilations_kept,  # noqa: F401
    records,
    tiny,
    train_on_one_device,
    trained,  # noqa: F401
    write_recipe,
)

import pe_lab
from pe_lab.config import to_json
from pe_lab.errors import ConfigError
from pe_lab.training.ledger import balance, read_ledger

pytestmark = pytest.mark.usefixtures("compilations_kept")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    train_on_one_device(monkeypatch)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow  # 6 s
def test_an_interrupted_call_saves_and_the_next_one_goes_on(trained, tmp_path, monkeypatch, capsys):  # noqa: F811
    """The handlers are as before, and the run has the bytes of one that the command trained."""
    recipe, workdir = str(write_recipe(tmp_path / "recipe")), tmp_path / "run"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt)
        with pytest.raises(KeyboardInterrupt, match="tiny: stopped at step 3 of 8 of phase 'pretrain', saved; run it"):
            pe_lab.fit(recipe, workdir)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert records(workdir / "pretrain/metrics.jsonl")[-1]["step"] == 3
    run = pe_lab.fit(recipe, workdir)
    assert_same_training(trained, workdir)
    assert "resuming at step 3" in capsys.readouterr().out
    assert repr(run) == (
        f"Run('{workdir}', 11,376 parameters; pretrain: step 8 of 8 with rope(base=10000); "
        "recalibrate: step 6 of 6 with nope)"
    )
    assert run.language_model().checkpoint.step == 6 and run.language_model("pretrain").checkpoint.step == 8
    logged = [(record["phase"], record["step"]) for record in run.metrics() if "loss" in record]
    assert logged == [("pretrain", step) for step in range(1, 9)] + [("recalibrate", step) for step in range(1, 7)]
    assert [phase.name for phase in run.phases] == ["pretrain", "recalibrate"] and run.plan.models[0] is run.models[0]
    starts = balance(read_ledger(workdir / "ledger.jsonl")).starts
    assert len(starts) == 2 and all(start["start_up"] < 60 for start in starts)  # of the calls, not of this process
    assert json.loads((workdir / "run.json").read_text())["command"] == "pe_lab.fit"


def test_what_is_interrupted_before_a_step_is_an_ordinary_interruption(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 1, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pe_lab.fit(str(write_recipe(tmp_path / "recipe")), tmp_path / "run")
    assert not list((tmp_path / "run/pretrain/checkpoints").iterdir())


@pytest.mark.slow
def test_a_config_may_be_an_object(tmp_path):
    """A `Config`, and what `get_config` of a recipe returns; overrides are values or texts."""
    config = tiny(tmp_path / "recipe", phases__0__steps=4, phases__1__steps=4)
    overrides = {"phases.0.steps": 3, "phases.1.steps": "3"}
    first = pe_lab.fit(config, tmp_path / "first", overrides=overrides)
    assert [phase.config.steps for phase in first.phases] == [3, 3]
    second = pe_lab.fit(ConfigDict(to_json(config)), tmp_path / "second", overrides=overrides)
    assert second.config == first.config
    assert_same_training(tmp_path / "first", tmp_path / "second")


def test_bad_input_is_an_error_of_pe_lab_and_no_exit(tmp_path):
    config = tiny(tmp_path / "recipe")
    with pytest.raises(ConfigError, match="config.model has no key 'layer'. Did you mean 'layers'"):
        pe_lab.fit(config, tmp_path / "run", overrides={"model.layer": 3})
    with pytest.raises(ConfigError, match="there is no file 'nowhere.py'"):
        pe_lab.fit("nowhere.py")
    with pytest.raises(ConfigError, match="--until=9: there is no run in"):
        pe_lab.fit(config, tmp_path / "run", until=9)
    assert not (tmp_path / "run").exists()
