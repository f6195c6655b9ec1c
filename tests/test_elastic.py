"""One run on changing numbers of processes and devices, with everything a batch can be made of."""

import shutil
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import (  # noqa: F401
    compilations_kept,
    finish,
    losses,
    opened,
    records,
    start_together,
    tiny,
    train,
    write_recipe,
)

from pe_lab.checkpoints.locating import steps_in
from pe_lab.training import loop

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compilations_kept")]
STEPS = 18
PARTS = (6, 12, STEPS)  # a run is stopped after each


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, str]:
    """Two sources of text in documents of many lengths, needles, segments masked from each other, accumulation."""
    directory = tmp_path_factory.mktemp("text")
    draw = np.random.default_rng(0)
    for name, words in (
        ("prose", "the quick brown fox jumps over the lazy dog"),
        ("code", "def f ( x ) : return x + 1"),
    ):
        (directory / name).mkdir()
        for number in range(40):
            text = " ".join(draw.choice(words.split(), draw.integers(3, 60)))
            (directory / name / f"{number}.txt").write_text(text)
    needles = "{'pairs': 1, 'queries': 1, 'keys': 4, 'values': 4, 'filler_symbols': 8, 'branches': 2}"
    sources = (
        f"[{{'source': 'text:{directory}/prose/*.txt', 'weight': 2.0}}, "
        f"{{'source': 'text:{directory}/code/*.txt', 'weight': 1.0}}, "
        f"{{'source': 'needles', 'weight': 1.0, 'options': {needles}}}]"
    )
    phases = (
        f"[{{'name': 'pretrain', 'steps': {STEPS}, 'sequence_length': 16, 'batch_size': 16, 'accumulate': 2, "
        "'optimizer': {'learning_rate': 0.003, 'warmup_steps': 4}}]"
    )
    return {
        "data.sources": sources,
        "data.segments": "True",
        "data.cache_dir": str(directory / "cache"),
        "phases": phases,
        "checkpoint.every_steps": "6",
        "checkpoint.keep": "10",
        "log.validate_every_steps": str(STEPS),
    }


def config(directory: Path, material: dict[str, str], **more: object):
    return tiny(directory, **{key.replace(".", "__"): value for key, value in material.items()}, **more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, material, compilations_kept) -> Path:  # noqa: F811
    """The run on one device, never stopped."""
    directory = tmp_path_factory.mktemp("alone")
    train(config(directory / "recipe", material), directory / "run")
    assert losses(directory / "run/pretrain")[-1] < losses(directory / "run/pretrain")[0] - 0.1
    return directory / "run"


def undo_after(run: Path, step: int) -> None:
    """Leaves the run as if it had been stopped after a step."""
    for later in steps_in(run / "pretrain/checkpoints"):
        if later > step:
            shutil.rmtree(run / f"pretrain/checkpoints/{later}")


def test_one_then_four_then_two_processes(tmp_path, material, alone):
    """Seven processes of a few seconds: 60 s."""
    recipe = write_recipe(tmp_path / "recipe")
    overrides = [f"--config.{key}={value}" for key, value in material.items()]
    argv = ["pe_lab.train", f"--config={recipe}", "--workdir=run", *overrides]
    for count, last in zip((1, 4, 2), PARTS, strict=True):
        finish(start_together(argv, [tmp_path] * count))
        undo_after(tmp_path / "run", last)
    np.testing.assert_allclose(losses(tmp_path / "run/pretrain"), losses(alone / "pretrain"), rtol=1e-5)


def test_eight_then_four_then_one_device(tmp_path, material, alone, monkeypatch):
    """Three compilations: 25 s."""
    meshes = {8: {"mesh__data": 4, "mesh__fsdp": 2}, 4: {"mesh__data": 2, "mesh__tensor": 2}, 1: {}}
    seen: list[dict[str, np.ndarray]] = []
    place_batch = loop.place_batch

    def noted(batch, sharding):
        if "tokens" in batch and batch["tokens"].shape[0] == 16:  # of training, not of a held-out micro-batch
            seen.append(batch)
        return place_batch(batch, sharding)

    monkeypatch.setattr(loop, "place_batch", noted)
    read: list[dict[str, np.ndarray]] = []
    for (count, mesh), last in zip(meshes.items(), PARTS, strict=True):
        seen.clear()
        train(config(tmp_path / "recipe", material, **mesh), tmp_path / "run", jax.devices()[:count])
        read += seen[: last - len(read)]
        undo_after(tmp_path / "run", last)
    np.testing.assert_allclose(losses(tmp_path / "run/pretrain"), losses(alone / "pretrain"), rtol=1e-5)

    settings = config(tmp_path / "recipe", material)
    run = opened(settings, tmp_path / "other")
    pipeline = loop.open_pipeline(run.plan, run.phases[0])
    assert len(read) == STEPS
    for mine in read:
        expected = next(pipeline)
        assert mine.keys() == expected.keys() == {"tokens", "targets", "weights", "segments", "positions"}
        assert all(np.array_equal(mine[name], expected[name]) for name in expected)
    pipeline.close()


GRAIN = """
import grain
import numpy as np


def dataset(split, seed, length):
    if split == "validation":
        return None
    return grain.MapDataset.range(360).shuffle(seed).map(lambda i: {"tokens": np.full(length + 1, i)})
"""
NOTED = """
import os
import sys
import time

from pe_lab.train import main
from pe_lab.training import loop

place_batch, name = loop.place_batch, f"read-{os.environ['SESSION']}-{os.environ.get('PROCESS_INDEX', 0)}.txt"


def noted(batch, sharding):
    with open(name, "a") as file:
        file.write(" ".join(str(row[0]) for row in batch["tokens"]) + "\\n")
    time.sleep(0.1)  # for the test to kill it between two checkpoints
    return place_batch(batch, sharding)


if __name__ == "__main__":
    loop.place_batch = noted
    sys.exit(main(sys.argv[1:]))
"""


def reached(run: Path, step: int, processes: list[subprocess.Popen]) -> None:
    """Waits until a checkpoint of a step, or a later one, is there."""
    while max([0, *steps_in(run / "pretrain/checkpoints")]) < step:
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.02)


def test_a_grain_dataset_of_ones_own_is_read_once_over_three_kills(tmp_path):
    """Two processes, killed; then one, three and two go on. Each of 360 elements is in one trained step of 30: 60 s."""
    (tmp_path / "my_data.py").write_text(GRAIN)
    (tmp_path / "noted.py").write_text(NOTED)
    recipe, run = write_recipe(tmp_path / "recipe"), tmp_path / "run"
    phases = (
        "[{'name': 'pretrain', 'steps': 30, 'sequence_length': 16, 'batch_size': 12, "
        "'optimizer': {'learning_rate': 0.003, 'warmup_steps': 4}}]"
    )
    settings = {"data.sources": "[]", "data.grain": "my_data.py:dataset", "data.tokenizer": "none"}
    settings |= {"model.vocab_size": "360", "phases": phases, "checkpoint.every_steps": "3"}
    argv = ["noted", f"--config={recipe}", "--workdir=run"]
    argv += [f"--config.{key}={value}" for key, value in settings.items()]
    trained: dict[int, list[int]] = {}  # the elements of each step, by the session that trained it last
    for session, (count, kill) in enumerate(((2, 6), (1, 12), (3, 21), (2, None))):
        first = max([0, *steps_in(run / "pretrain/checkpoints")])
        processes = start_together(argv, [tmp_path] * count, SESSION=str(session))
        if kill is None:
            finish(processes)
        else:
            reached(run, kill, processes)
            for process in processes:
                process.kill()
            finish(processes, status=-9)
        parts = [(tmp_path / f"read-{session}-{i}.txt").read_text().splitlines() for i in range(count)]
        for step, lines in enumerate(zip(*parts, strict=False), first + 1):  # a killed process may be a step behind
            trained[step] = [int(number) for line in lines for number in line.split()]
    assert sorted(trained) == list(range(1, 31)) and all(len(numbers) == 12 for numbers in trained.values())
    assert sorted(number for numbers in trained.values() for number in numbers) == list(range(360))
    log = [record for record in records(run / "pretrain/metrics.jsonl") if "tokens" in record]
    assert log[-1]["read_tokens/grain:my_data.py:dataset"] == log[-1]["tokens"] == 360 * 16
