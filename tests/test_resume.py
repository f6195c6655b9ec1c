"""Real processes, killed: what they leave is enough for the same command to end in the same bytes."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY, assert_same_training, records, start, write_recipe

from pe_lab.recipes import load_config

pytestmark = pytest.mark.slow
PATIENCE = 400  # seconds for one process
STEPS = (60, 10, 40)
SHORT = [
    "--config.data.sources.0.source=text:corpus/*.py",
    "--config.data.cache_dir=cache",
    *(f"--config.phases.{n}.steps={steps}" for n, steps in enumerate(STEPS)),
    *(f"--config.phases.{n}.optimizer.warmup_steps=5" for n in range(len(STEPS))),
    "--config.log.every_steps=1",
    "--config.log.validate_every_steps=20",
    "--config.log.validation_batches=2",
    "--config.checkpoint.every_steps=10",
]


def command(workdir: str) -> list[str]:
    return ["pe_lab.train", f"--config={REPOSITORY / 'configs/drope_laptop.py'}", *SHORT, f"--workdir={workdir}"]


def write_corpus(directory: Path) -> None:
    """Some real text that nobody edits while the test runs."""
    directory.mkdir()
    for number, source in enumerate(sorted((REPOSITORY / "pe_lab").rglob("*.py"))):
        shutil.copyfile(source, directory / f"{number}.py")


def wait_until(process: subprocess.Popen, happened) -> None:
    """Polls without pause to speak of, so that a kill that follows comes within a millisecond or so."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if process.poll() is not None:
            out = process.communicate()[0]
            pytest.fail(f"the process ended by itself, with {process.returncode}:\n{out[-3000:]}")
        assert time.monotonic() < deadline, "nothing happened for too long"
        time.sleep(0.0005)


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def finish(process: subprocess.Popen, status: int = 0) -> str:
    out = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == status, out[-3000:]
    return out


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished(phase: Path) -> list[Path]:
    return list((phase / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def test_sigkill_at_three_moments_changes_nothing(tmp_path):
    seed = random.randrange(2**32)
    print(f"moments drawn with seed {seed}")  # pytest shows it where the test fails
    draw = random.Random(seed)
    overrides = dict(item.removeprefix("--config.").split("=", 1) for item in SHORT)
    config = load_config(str(REPOSITORY / "configs/drope_laptop.py"), overrides)
    names = [phase.name for phase in config.phases]
    first, last = names[0], names[-1]
    assert "recal" in last

    write_corpus(tmp_path / "corpus")
    finish(start(command("whole"), tmp_path))

    run = tmp_path / "killed"
    # 1. At any moment of pretraining: before, between and after its first checkpoints.
    process, at = start(command("killed"), tmp_path), draw.randint(1, 40)
    wait_until(process, lambda: line_count(run / first / "metrics.jsonl") >= at)
    kill(process)

    # 2. Inside a save: Orbax writes beside, and renames at the end. What was there before is not what we wait for.
    caught = False
    for _ in range(6):
        old = set(unfinished(run / first))
        process = start(command("killed"), tmp_path)
        wait_until(process, lambda old=old: set(unfinished(run / first)) - old)
        kill(process)
        caught = bool(set(unfinished(run / first)) - old)  # still there: it was not complete
        if caught:
            break
    assert caught, "never quick enough to catch a save"

    # 3. In the recalibration.
    process, at = start(command("killed"), tmp_path), draw.randint(1, 35)
    wait_until(process, lambda: line_count(run / last / "metrics.jsonl") >= at)
    kill(process)

    out = finish(start(command("killed"), tmp_path))
    assert f"{first}: complete at step {STEPS[0]}, nothing to do" in out
    assert_same_training(tmp_path / "whole", run, names)
    assert [record["step"] for record in records(run / last / "metrics.jsonl") if "loss" in record] == list(
        range(1, STEPS[-1] + 1)
    )

    again = finish(start(command("killed"), tmp_path))
    assert again.count("nothing to do") == len(names)


def test_sigterm_saves_and_ends_with_status_75(tmp_path):
    recipe = write_recipe(tmp_path / "recipe")
    # Hundreds of steps, and a checkpoint rarely: the one that is found is SIGTERM's.
    argv = [
        "pe_lab.train",
        f"--config={recipe}",
        "--config.phases.0.steps=600",
        "--config.checkpoint.every_steps=100000",
    ]
    finish(start([*argv, "--workdir=whole"], tmp_path))

    process = start([*argv, "--workdir=stopped"], tmp_path)
    run = tmp_path / "stopped"
    wait_until(process, lambda: line_count(run / "pretrain" / "metrics.jsonl") >= 20)
    process.terminate()
    out = finish(process, status=75)  # a launcher runs the same command again
    assert "of phase 'pretrain', saved; run it again to continue" in out
    (saved,) = (run / "pretrain" / "checkpoints").iterdir()
    assert int(saved.name) + 5 >= 20 and int(saved.name) < 600
    assert records(run / "pretrain" / "metrics.jsonl")[-1]["step"] == int(saved.name)

    assert f"resuming at step {saved.name}" in finish(start([*argv, "--workdir=stopped"], tmp_path))
    assert_same_training(tmp_path / "whole", run)
