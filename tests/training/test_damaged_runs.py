"""Damage of a run's files: it is found before it is trained on, and the same command mends the run."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import assert_same_training, compilations_kept, records, tiny, train  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.errors import CheckpointError
from pe_lab.training import loop

pytestmark = [
    pytest.mark.usefixtures("compilations_kept"),
    # Orbax leaves reads under way behind when one of them fails.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def steps_of(phase: Path) -> list[int]:
    return sorted(int(p.name) for p in (phase / "checkpoints").iterdir())


def largest(checkpoint: Path) -> Path:
    """The largest data file of a checkpoint's parameters."""
    return max((p for p in (checkpoint / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(checkpoint: Path) -> None:
    with largest(checkpoint).open("r+b") as file:
        file.truncate(largest(checkpoint).stat().st_size // 2)


def flip(checkpoint: Path) -> None:
    """Changes a bit of the weights, which Orbax restores without a word."""
    content = bytearray(largest(checkpoint).read_bytes())
    content[len(content) // 2] ^= 8
    largest(checkpoint).write_bytes(content)


def change_metadata(checkpoint: Path) -> None:
    """The position in the data, by one digit."""
    path = checkpoint / "metadata" / "metadata"
    text = path.read_text()
    assert '"batches": 4' in text or '"batches":4' in text
    path.write_text(text.replace('"batches": 4', '"batches": 0').replace('"batches":4', '"batches":0'))


def replace_by_another_step(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("2"), checkpoint)


def without(item: str):
    def remove(checkpoint: Path) -> None:
        path = checkpoint / item
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


DAMAGES = {
    "flipped": flip,
    "another step": pytest.param(replace_by_another_step, marks=pytest.mark.slow),
    "truncated": pytest.param(truncate, marks=pytest.mark.slow),
    "metadata": pytest.param(change_metadata, marks=pytest.mark.slow),
    **{
        f"no {item}": pytest.param(without(item), marks=pytest.mark.slow)
        for item in ("optimizer", "metadata", "manifest.json")
    },
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_its_steps_done_again(config, whole, copy, capsys, damage):
    phase = copy / "recalibrate"
    assert steps_of(phase) == [2, 4, 6]
    shutil.rmtree(phase / "checkpoints" / "6")
    damage(phase / "checkpoints" / "4")
    train(config, copy)
    out = capsys.readouterr().out
    assert out.count("CHECKPOINT 4 of recalibrate cannot be read, going back: ") == 1
    assert "resuming at step 2, verified" in out
    assert [path.name.split("-")[0] for path in (phase / "unreadable").iterdir()] == ["4"]
    assert_same_training(whole, copy)
    assert open_checkpoint(phase / "checkpoints" / "4").step == 4  # written anew


@pytest.mark.parametrize(("damage", "left"), [(flip, [2]), (lambda checkpoint: None, [4])], ids=["flipped", "whole"])
def test_nothing_is_deleted_before_the_newest_is_known_to_be_whole(copy, tmp_path, monkeypatch, damage, left):
    """As if step 4 was damaged after its process was killed, before it deleted step 2, which one is kept of."""
    pretrain, recalibrate = copy / "pretrain", copy / "recalibrate"
    shutil.rmtree(recalibrate / "checkpoints" / "6")
    damage(recalibrate / "checkpoints" / "4")
    complete, present = steps_of(pretrain), []

    def stop(*work):
        present.extend(steps_of(recalibrate))
        raise InterruptedError

    monkeypatch.setattr(loop, "_train_steps", stop)
    with pytest.raises(InterruptedError):
        train(tiny(tmp_path / "recipe", checkpoint__keep=1), copy)
    assert present == left
    assert steps_of(pretrain) == complete and len(complete) > 1  # what a complete phase has kept stays


def test_a_phase_without_a_readable_checkpoint_names_the_directory_to_delete(config, copy):
    phase = copy / "recalibrate"
    shutil.rmtree(phase / "checkpoints" / "6")
    for step in (2, 4):
        truncate(phase / "checkpoints" / str(step))
    with pytest.raises(CheckpointError, match=f"No checkpoint of '{phase}' can be read. To train the phase again"):
        train(config, copy)


@pytest.mark.slow
def test_the_damaged_end_of_a_complete_run_is_trained_again(config, copy, whole, capsys):
    flip(copy / "recalibrate" / "checkpoints" / "6")
    train(config, copy)
    out = capsys.readouterr().out
    assert "recalibrate: checkpoint 6 is damaged: params/" in out and "resuming at step 4" in out
    assert_same_training(whole, copy)


def test_a_changed_digit_of_the_log_is_said(config, copy, capsys):
    for phase, said in (("pretrain", "what was logged"), ("recalibrate", "what was logged up to step 4")):
        log = copy / phase / "metrics.jsonl"
        log.write_text(log.read_text().replace('"loss": 5.', '"loss": 4.', 1).replace('"loss": 4.', '"loss": 3.', 1))
        if phase == "recalibrate":
            shutil.rmtree(copy / phase / "checkpoints" / "6")
        train(config, copy)
        assert f"DAMAGED: {log} is not {said}\n" in capsys.readouterr().out


def test_a_lost_description_of_a_complete_phase_is_written_anew(config, copy, whole):
    (copy / "pretrain" / "phase.json").write_bytes(b"")
    train(config, copy)
    record, before = (json.loads((run / "pretrain" / "phase.json").read_text()) for run in (copy, whole))
    assert {**record, "seconds": before["seconds"], "crc32c": before["crc32c"]} == before


@pytest.mark.slow
def test_the_damaged_end_of_a_phase_is_trained_again_before_the_next_one(config, copy, whole):
    """5 s."""
    shutil.rmtree(copy / "recalibrate")
    truncate(copy / "pretrain" / "checkpoints" / "8")
    train(config, copy)
    assert_same_training(whole, copy)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_not_trained_on(copy, tmp_path, capsys, whole, config):
    """Whole in itself, and of the same shape; only its seed is another one. 5 s."""
    other = tmp_path / "other"
    train(tiny(tmp_path / "recipe", seed=3, phases__1__steps=3), other)
    shutil.rmtree(copy / "recalibrate" / "checkpoints" / "6")
    shutil.rmtree(copy / "recalibrate" / "checkpoints" / "4")
    shutil.copytree(other / "recalibrate" / "checkpoints" / "3", copy / "recalibrate" / "checkpoints" / "3")
    train(config, copy)
    assert (
        "CHECKPOINT 3 of recalibrate cannot be read, going back: It is of another run: its " in capsys.readouterr().out
    )
    assert_same_training(whole, copy)


@pytest.mark.slow
def test_a_run_goes_on_with_a_lower_rate(tmp_path, monkeypatch):
    """5 s."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        compiling, left = loop.compile_train_step, [None] * 5

        def interrupted(*args):
            step = compiling(*args)
            return lambda *state: left.pop() or step(*state)  # fails at the sixth step

        patch.setattr(loop, "compile_train_step", interrupted)
        with pytest.raises(IndexError):
            train(tiny(tmp_path / "recipe"), run)
    assert steps_of(run / "pretrain") == [2, 4]
    lower = {f"phases__{i}__optimizer__learning_rate": 1e-3 for i in range(2)}
    last = train(tiny(tmp_path / "recipe", **lower), run)
    lineage = open_checkpoint(last).metadata["lineage"]
    (entry,) = [entry for entry in lineage if "continued" in entry["what"]]
    assert entry["what"] == "continued with phases.0.optimizer.learning_rate 0.01 -> 0.001" and entry["step"] == 4
    rates = [record["learning_rate"] for record in records(run / "pretrain" / "metrics.jsonl") if "loss" in record]
    assert max(rates[:4]) == pytest.approx(1e-2) and max(rates[4:]) < 1e-3
