"""What may change between two starts of a run: the declared list, its records, and the position in the data."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import compilations_kept, opened, records, tiny, train  # noqa: F401

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.locating import steps_in
from pe_lab.config import to_json
from pe_lab.errors import ConfigError
from pe_lab.identity import MAY_CHANGE, change_text, changed, check_workdir, may_change, write_run
from pe_lab.training import loop
from pe_lab.training.evaluators import Evaluator

pytestmark = pytest.mark.usefixtures("compilations_kept")
DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_the_docs_have_the_declared_list():
    table = [line.split("|")[1:3] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    listed = {key.strip(" `"): what.strip() for key, what in table}
    assert {key: listed.get(key) for key in MAY_CHANGE} == MAY_CHANGE


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("phases.1.batch_size", True),
        ("phases.12.optimizer.b1", True),
        ("phases.0.prolonged.1.how", True),
        ("data.sources.2.weight", True),
        ("data.sources.2.source", False),
        ("data.seed", False),
        ("phases.1.sequence_length", False),
        ("phases.2.sequence_length", True),  # of a phase that is added
        ("mesh.fsdp", True),
        ("model.layers", False),
        ("seed", False),
        ("namex", False),
    ],
)
def test_what_is_declared_may_change(key, may):
    assert may_change(key, phases=2) == may


def test_every_key_that_differs_is_recorded_and_a_lineage_has_those_of_its_phase(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "first", {})
    more = {"log__every_steps": 5, "evaluation__tokens": 99, "phases__0__batch_size": 4, "phases__1__batch_size": 2}
    other = tiny(tmp_path / "recipe", **more)
    write_run(workdir, other, "second", check_workdir(workdir, other))
    (change,) = json.loads((workdir / "run.json").read_text())["changes"]
    assert change["keys"] == {
        "evaluation.tokens": [65536, 99],
        "log.every_steps": [1, 5],
        "phases.0.batch_size": [8, 4],
        "phases.1.batch_size": [8, 2],
    }
    assert change_text(changed(to_json(config), other), 1) == "log.every_steps 1 -> 5, phases.1.batch_size 8 -> 2"


def test_a_refusal_lists_what_may_change_and_deletes_nothing(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "first", {})
    with pytest.raises(ConfigError) as refused:
        check_workdir(workdir, tiny(tmp_path / "recipe", seed=3))
    message = str(refused.value)
    assert "seed: 0 there, 3 here" in message and message.endswith("Choose another --workdir.")
    assert all(key in message for key in MAY_CHANGE) and "delete" not in message


@pytest.mark.slow
def test_no_sequence_is_read_twice_or_skipped_after_a_change_of_the_batch_size(tmp_path, monkeypatch):
    """Batches of 8, 4 and 16 windows are one order of windows, over more than an epoch. 10 s."""
    (tmp_path / "text").mkdir()
    draw = np.random.default_rng(0)
    for number in range(12):
        (tmp_path / f"text/{number}.txt").write_text("".join(map(chr, draw.integers(97, 123, 60))))
    settings = {
        "data__sources": f"[{{'source': 'text:{tmp_path}/text/*.txt'}}]",
        "data__cache_dir": str(tmp_path / "cache"),
        "log__validate_every_steps": 100,
    }
    seen: list[np.ndarray] = []
    place_batch = loop.place_batch

    def noted(batch, sharding):
        seen.append(np.asarray(batch["tokens"]))
        return place_batch(batch, sharding)

    monkeypatch.setattr(loop, "validation", lambda *_: Evaluator("validation", lambda step, params: {}, 1000))
    monkeypatch.setattr(loop, "place_batch", noted)
    for size, steps in ((8, 4), (4, 7), (16, 9)):
        config = tiny(tmp_path / "recipe", phases__0__batch_size=size, phases__0__steps=steps, **settings)
        train(dataclasses.replace(config, phases=config.phases[:1]), tmp_path / "run")
    read = np.concatenate(seen)
    assert len(read) == 4 * 8 + 3 * 4 + 2 * 16
    one = dataclasses.replace(config, phases=(dataclasses.replace(config.phases[0], batch_size=1),))
    run = opened(one, tmp_path / "other")
    pipeline = loop.open_pipeline(run.plan, run.phases[0])
    expected = np.concatenate([next(pipeline)["tokens"] for _ in read])
    pipeline.close()
    assert len(np.unique(expected, axis=0)) < len(expected)  # more than one epoch
    np.testing.assert_array_equal(read, expected)
    log = [record["tokens"] for record in records(tmp_path / "run/pretrain/metrics.jsonl") if "loss" in record]
    assert log == (np.cumsum([8] * 4 + [4] * 3 + [16] * 2) * 16).tolist()
    assert steps_in(tmp_path / "run/pretrain/checkpoints")[-1] == 9
    lineage = [entry["what"] for entry in open_checkpoint(tmp_path / "run").metadata["lineage"]]
    assert [what.partition(" with ")[2] for what in lineage if what.startswith("continued")] == [
        "phases.0.batch_size 8 -> 4, phases.0.steps 4 -> 7",
        "phases.0.batch_size 4 -> 16, phases.0.steps 7 -> 9",
    ]
