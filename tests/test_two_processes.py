"""Two real processes that train as one, over loopback."""

import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from gauntlet.disk_full import Filler, small_disk
from tiny_runs import finish, losses, records, start_together, tiny, train, write_recipe

from pe_lab.checkpoints.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow
PATIENCE = 400
STEPS = 40
OPTIMIZER = "{'learning_rate': 0.003, 'warmup_steps': 4}"


def phases() -> str:
    common = f"'sequence_length': 16, 'batch_size': 8, 'optimizer': {OPTIMIZER}"
    return (
        f"[{{'name': 'pretrain', 'steps': {STEPS}, 'positional': 'rope', {common}}}, "
        f"{{'name': 'recalibrate', 'steps': 8, 'positional': 'nope', {common}}}]"
    )


def begin(directory: Path, *arguments: str) -> list[subprocess.Popen]:
    """Starts both processes of one run."""
    recipe = write_recipe(directory / "recipe")
    argv = ["pe_lab.train", f"--config={recipe}", "--workdir=two", f"--config.phases={phases()}", *arguments]
    return start_together(argv, [directory] * 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process on one device."""
    directory = tmp_path_factory.mktemp("alone")
    train(tiny(directory / "recipe", phases=phases()), directory / "run")
    return directory / "run"


def assert_same_losses(run: Path, alone: Path) -> None:
    for phase in ("pretrain", "recalibrate"):
        np.testing.assert_allclose(losses(run / phase), losses(alone / phase), rtol=1e-5)
        mine, theirs = (
            [r for r in records(p / phase / "metrics.jsonl") if "validation_loss" in r] for p in (run, alone)
        )
        assert [r["step"] for r in mine] == [r["step"] for r in theirs]
        np.testing.assert_allclose(
            [r["validation_loss"] for r in mine], [r["validation_loss"] for r in theirs], rtol=1e-5
        )


def test_two_processes_train_as_one(tmp_path, alone):
    first, second = finish(begin(tmp_path, "--profile=3:4"))
    assert "complete" in first
    assert "complete" not in second and "pretrain" not in second  # only the first process prints
    traces = (tmp_path / "two/pretrain/tensorboard/plugins/profile/step_3").glob("*.xplane.pb")
    assert sorted(trace.name.rsplit(".", 3)[1] for trace in traces) == ["0", "1"]
    assert_same_losses(tmp_path / "two", alone)
    checkpoint = open_checkpoint(tmp_path / "two")
    lineage = checkpoint.metadata["lineage"]
    assert len({entry["id"] for entry in lineage}) == 4 and lineage[-1]["id"] == checkpoint.metadata["id"]
    assert open_checkpoint(tmp_path / "two/pretrain").metadata["lineage"] == lineage[:2]
    for a, b in zip(jax.tree.leaves(checkpoint.params), jax.tree.leaves(open_checkpoint(alone).params), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4)
    # Again: both find the run complete, and end.
    assert "nothing to do" in finish(begin(tmp_path))[0]


def test_sigterm_to_one_of_two_saves_and_one_process_goes_on(tmp_path, alone):
    # A checkpoint a step makes the steps slow enough to be interrupted.
    processes = begin(tmp_path, "--config.checkpoint.every_steps=1")
    run, deadline = tmp_path / "two", time.monotonic() + PATIENCE
    log = run / "pretrain" / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        assert all(p.poll() is None for p in processes), finish(processes)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[1].terminate()
    outs = finish(processes, status=75)
    assert "saved; run it again to continue" in outs[0]
    stopped = open_checkpoint(run)
    assert stopped.metadata["phase"] == "pretrain" and stopped.step < STEPS
    assert records(log)[-1]["step"] == stopped.step

    train(tiny(tmp_path / "recipe", phases=phases()), run)
    assert_same_losses(run, alone)


def test_a_full_disk_stops_neither_of_two_processes(tmp_path, alone):
    """The process that writes the logs cannot, or a save fails; both go on, and save later. 20 s."""
    with small_disk(tmp_path / "disk"):
        run = tmp_path / "disk" / "two"
        told = ["--config.checkpoint.on_failure=continue", "--config.checkpoint.every_steps=2", f"--workdir={run}"]
        processes = begin(tmp_path, *told)
        log = run / "pretrain" / "metrics.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") < 8:
            assert all(p.poll() is None for p in processes), finish(processes)
            time.sleep(0.01)
        disk = Filler(tmp_path / "disk")
        time.sleep(3.0)
        disk.remove()
        first, _ = finish(processes)
        assert "Training goes on." in first and "Traceback" not in first
        assert_same_losses(run, alone)


def test_a_tensor_axis_across_processes_and_text_prepared_once(tmp_path):
    """Both processes have all sequences of a batch: they must read the same ones."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    changes = {
        "data.sources": f"[{{'source': 'text:{tmp_path / 'text.txt'}'}}]",
        "data.cache_dir": str(tmp_path / "cache"),
        "phases.0.steps": "10",
    }
    mesh = ["--config.mesh.data=1", "--config.mesh.tensor=2"]
    finish(begin(tmp_path, *(f"--config.{key}={text}" for key, text in changes.items()), *mesh))
    overrides = {key.replace(".", "__"): text for key, text in changes.items()}
    train(tiny(tmp_path / "recipe", phases=phases(), **overrides), tmp_path / "one")
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert len(list((tmp_path / "cache").iterdir())) == 1
