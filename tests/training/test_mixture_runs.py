"""Runs on mixtures: steps from epochs, tokens by source in the log, epochs told, dry sources refused."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_runs import Killed, assert_same_training, at_step, die, opened, records, tiny, train

from pe_lab.checkpoints.locating import steps_in
from pe_lab.config import Config, from_dict, to_json
from pe_lab.errors import UserError
from pe_lab.recipes import with_prolonged
from pe_lab.training.plan import prolong


def mixed(directory, weights, epochs=1, batch=8, limit=0, **source):
    """A config of two sources of text, packed by best fit."""
    directory.mkdir(exist_ok=True)
    sources = []
    for name, count in (("a", 60), ("b", 20)):
        rng = np.random.default_rng(count)
        lines = [json.dumps({"text": f"{i} " + "x" * int(rng.integers(1, 12))}) for i in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
        sources.append({"source": f"jsonl:{directory / name}.jsonl", "name": name})
    sources[1] |= {"epochs": limit, **source}
    phase = {"name": "pretrain", "positional": "rope", "sequence_length": 16, "batch_size": batch, "epochs": epochs}
    phase |= {"weights": weights, "optimizer": {"learning_rate": 0.01, "warmup_steps": 2}}
    data = {"data__sources": repr(sources), "data__cache_dir": str(directory / "cache"), "data__segments": True}
    return tiny(directory, phases=repr([phase]), data__packing="best_fit", **data)


@pytest.mark.slow
def test_a_run_of_epochs_counts_the_tokens_of_each_source(tmp_path, capsys):
    settings = mixed(tmp_path / "recipe", {"a": [[0, 1], [4, 3]]}, epochs={"a": 1}, when_dry="repeat")
    train(settings, tmp_path / "run")
    phase = json.loads((tmp_path / "run/pretrain/phase.json").read_text())
    a, b = phase["mixture"]
    assert (a["name"], a["weights"], b["weights"]) == ("a", [[0, 1.0], [4, 3.0]], [[0, 1.0], [4, 1.0]])
    assert phase["packing"] == "best_fit" and 0.8 < a["packing_efficiency"] <= 1
    packed = f"best-fit packing of a: {a['windows']} windows, {a['packing_efficiency']:.2%} of their tokens"
    out, steps = capsys.readouterr().out, phase["steps"]
    assert packed in out
    of_a = 4 * 4 + (steps - 4) * 6
    assert of_a <= a["windows"] < of_a + 6
    log = records(tmp_path / "run/pretrain/metrics.jsonl")
    validated = [record for record in log if "read_tokens/a" in record]
    assert [record["step"] for record in validated] == sorted({*range(4, steps, 4), steps})
    last = validated[-1]
    (end,) = [line for line in out.splitlines() if f"complete at step {steps}" in line]
    assert end.endswith(f", validation {last['validation_loss']:.4f}")
    assert last["read_tokens/a"] == pytest.approx(last["expected_tokens/a"], rel=0.1)
    assert last["read_tokens/a"] <= of_a * 16
    assert {"validation_loss/a", "validation_loss/b"} <= last.keys()
    epochs = [record for record in log if record.get("event") == "epoch"]
    windows_of_b = steps * 8 - of_a
    assert [record["epoch"] for record in epochs] == list(range(2, -(-windows_of_b // b["windows"]) + 1))
    assert {record["source"] for record in epochs} <= {"b"}


def test_a_dry_source_is_refused_before_anything_is_written(tmp_path):
    settings = mixed(tmp_path / "recipe", {"b": 9}, epochs={"a": 1}, limit=1)
    with pytest.raises(UserError, match=r"config.phases\[0\] \('pretrain'\): data source 'b' runs dry at step"):
        opened(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    resolved = opened(mixed(tmp_path / "recipe", {}, epochs={"b": 1}), tmp_path / "run")
    assert resolved.config.phases[0].steps == resolved.phases[0].config.steps < 1000
    assert dataclasses.replace(resolved.config.phases[0], steps=1000).epochs == {"b": 1}


@pytest.mark.slow
def test_epochs_count_from_the_checkpoint_on_and_more_are_added_to_the_steps_they_gave(tmp_path, monkeypatch):
    """Two steps of 8 sequences and then steps of 4, half of them of source a. The recipe's `steps` do not matter."""

    def config(batch, **other):
        recipe = mixed(tmp_path / "recipe", {}, epochs={"a": 1}, batch=batch, when_dry="repeat")
        phase = dataclasses.replace(recipe.phases[0], steps=1)  # fewer than the warm-up, and than it has trained
        return dataclasses.replace(recipe, phases=(dataclasses.replace(phase, **other),))

    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 4, die)
        train(config(8), tmp_path / "run")
    run = opened(config(4), tmp_path / "run")
    windows = next(source["windows"] for source in run.mixtures[0] if source["name"] == "a")
    steps = run.config.phases[0].steps
    assert steps == 2 + (windows - 8) // 2

    found = from_dict(Config, with_prolonged(to_json(config(4)), to_json(run.config)))
    kept = steps_in(tmp_path / "run/pretrain/checkpoints")
    with pytest.raises(UserError, match=f"has {steps} steps, and --until is their new number"):
        prolong(found, steps - 1, kept)
    longer = prolong(found, steps + 9, kept)
    assert (longer.phases[0].prolonged[0].steps, longer.phases[0].steps) == (steps, steps + 9)
    again = from_dict(Config, with_prolonged(to_json(config(4)), to_json(longer)))  # the plain command
    assert again == longer
    assert opened(again, tmp_path / "run").config == longer
    with pytest.raises(UserError, match=f"warmup_steps is {steps}, but"):
        optimizer = dataclasses.replace(config(4).phases[0].optimizer, warmup_steps=steps)
        opened(config(4, optimizer=optimizer), tmp_path / "run")


GRAIN = """
import grain
import numpy as np


def dataset(split, seed, length):
    count = 24 if split == "validation" else 90
    windows = grain.MapDataset.range(count).shuffle(seed).repeat().to_iter_dataset()
    windows = windows.filter(lambda i: i % 3 != 0)
    return windows.map(lambda i: {"tokens": (np.arange(length + 1) + i) % 50, "weights": np.full(length + 1, 0.5)})
"""


@pytest.mark.slow
def test_a_run_on_a_grain_iter_dataset_goes_on_from_its_own_state(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(GRAIN)
    data = {"data__sources": "[]", "data__grain": f"{tmp_path}/my_data.py:dataset"}
    train(tiny(tmp_path / "recipe", **data), tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        at_step(patch, 5, die)
        train(tiny(tmp_path / "recipe", **data), tmp_path / "killed")
    train(tiny(tmp_path / "recipe", **data), tmp_path / "killed")
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
    last = records(tmp_path / "killed/pretrain/metrics.jsonl")[-1]
    assert last[f"read_tokens/grain:{tmp_path}/my_data.py:dataset"] == last["tokens"] == 8 * 8 * 16
