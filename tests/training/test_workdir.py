"""The workdir of a run: one config, changes that a run may make, and one process at a time."""

import json
import os
import subprocess
import sys
import time

import jax
import pytest
from tiny_runs import REPOSITORY, fingerprint, tiny, write_recipe

from pe_lab.errors import ConfigError
from pe_lab.identity import LEASE_FILE, check_workdir, write_run
from pe_lab.storage.manifest import sealed
from pe_lab.training.fit import _lease


def test_a_directory_belongs_to_one_config(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    check_workdir(workdir, config)
    assert not workdir.exists()
    write_run(workdir, config, "first command", {})
    check_workdir(workdir, config)
    check_workdir(workdir, tiny(tmp_path / "recipe", log__every_steps=5))
    before = fingerprint(tmp_path)
    other = tiny(tmp_path / "recipe", phases__0__sequence_length=32, model__d_ff=64)
    with pytest.raises(
        ConfigError,
        match="belongs to another config .model.d_ff: 32 there, 64 here; phases.0.sequence_length: 16 there",
    ):
        check_workdir(workdir, other)
    assert fingerprint(tmp_path) == before


def test_a_config_that_is_none_of_pe_lab_is_refused(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "command", {})
    run = json.loads((workdir / "run.json").read_text())
    run["config"]["model"]["rotary"], run["config_hash"] = True, "0123456789ab"
    (workdir / "run.json").write_text(json.dumps(sealed(run)))
    with pytest.raises(ConfigError, match="its run.json has a config that is none of pe_lab"):
        check_workdir(workdir, config)


def test_the_date_and_command_of_the_first_session_stay(tmp_path):
    config, path = tiny(tmp_path / "recipe"), tmp_path / "run" / "run.json"
    write_run(tmp_path / "run", config, "first command", {})
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "created": "2026-01-01", "versions": {}})))
    write_run(tmp_path / "run", config, "second command", check_workdir(tmp_path / "run", config))
    run = json.loads(path.read_text())
    assert (run["command"], run["created"]) == ("first command", "2026-01-01")
    assert run["versions"]["jax"] == jax.__version__ and run["notes"]["paper"] == "none"
    assert run["config"]["phases"][1]["positional"] == "nope"


def test_directories_that_are_no_run_are_left_alone(tmp_path):
    config = tiny(tmp_path / "recipe")
    strange = tmp_path / "photos"
    strange.mkdir()
    check_workdir(strange, config)  # empty: fine
    (strange / ".run.json.123").write_text("{")  # what a killed process left
    check_workdir(strange, config)
    (strange / "cat.jpg").touch()
    with pytest.raises(ConfigError, match="holds cat.jpg and no run.json"):
        check_workdir(strange, config)
    with pytest.raises(ConfigError, match="is a file"):
        check_workdir(strange / "cat.jpg", config)
    for text in ("{", "[]", "{}"):
        (strange / "run.json").write_text(text)
        with pytest.raises(ConfigError, match="its run.json is damaged, or not one of pe_lab"):
            check_workdir(strange, config)


def test_what_may_change_between_two_starts_is_recorded(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "first", {})
    lower = {f"phases__{i}__optimizer__learning_rate": 1e-4 for i in range(2)}
    changed = tiny(tmp_path / "recipe", phases__0__steps=9, **lower)
    write_run(workdir, changed, "second", check_workdir(workdir, changed))
    write_run(workdir, changed, "third", check_workdir(workdir, changed))
    (change,) = json.loads((workdir / "run.json").read_text())["changes"]
    assert change["command"] == "second" and change["keys"] == {
        "phases.0.optimizer.learning_rate": [1e-2, 1e-4],
        "phases.0.steps": [8, 9],
        "phases.1.optimizer.learning_rate": [1e-2, 1e-4],
    }


def test_trained_phases_do_not_change(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "command", {})
    for phase, step in (("pretrain", 8), ("recalibrate", 4)):
        checkpoint = workdir / phase / "checkpoints" / str(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    check_workdir(workdir, tiny(tmp_path / "recipe", phases__1__steps=5))
    for change in ({"phases__0__steps": 9}, {"phases__1__steps": 3}):
        with pytest.raises(ConfigError, match=r"has trained phases that this config changes \(phases"):
            check_workdir(workdir, tiny(tmp_path / "recipe", **change))


@pytest.mark.parametrize("damage", ["zeros", "one value"])
def test_a_damaged_run_file_of_a_run_is_set_aside(tmp_path, capsys, damage):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "command", {})
    whole = (workdir / "run.json").read_text()
    (workdir / "run.json").write_text("\0" * 40 if damage == "zeros" else whole.replace('"seed": 0', '"seed": 8'))
    with pytest.raises(ConfigError, match="is damaged, or not one of pe_lab"):  # nothing says whose it is
        check_workdir(workdir, config)
    (workdir / "pretrain" / "checkpoints").mkdir(parents=True)
    assert check_workdir(workdir, config) == {}
    assert "run.json is damaged, and is now run.json.damaged-" in capsys.readouterr().err
    assert sorted(path.name[:17] for path in workdir.iterdir()) == ["pretrain", "run.json.damaged-"]


@pytest.mark.slow
def test_two_runs_on_one_workdir(tmp_path):
    """The second one refuses with status 2, and the first one is not disturbed. 15 s."""
    recipe = write_recipe(tmp_path / "recipe")
    argv = [sys.executable, "-m", "pe_lab.train", f"--config={recipe}", "--workdir=run", "--config.phases.0.steps=2000"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while not (tmp_path / "run" / LEASE_FILE).exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert second.returncode == 2 and f"process {first.pid} on " in second.stderr and second.stderr.count("\n") == 1
    assert first.poll() is None
    first.terminate()
    assert first.wait() == os.EX_TEMPFAIL
    assert not (tmp_path / "run" / LEASE_FILE).exists()


def test_a_second_run_is_refused(tmp_path):
    first = _lease(tmp_path, print)
    refused = pytest.raises(ConfigError, match=r"--workdir '.*': process \d+ on .* trains there, and has its lease 'le")
    with first, refused, _lease(tmp_path, print):
        pass
    with _lease(tmp_path, print):
        pass
