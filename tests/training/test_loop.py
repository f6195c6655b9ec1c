"""The loop and its checkpoints: stopping anywhere and going on gives the bytes of a run that never stopped."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    Killed,
    assert_same_training,
    at_step,
    compilations_kept,  # noqa: F401
    die,
    fingerprint,
    opened,
    records,
    tiny,
    train,
)

import pe_lab
from pe_lab import terminal
from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.checkpoints.locating import find_checkpoints
from pe_lab.errors import DataError, TrainingDiverged, UserError
from pe_lab.identity import config_hash
from pe_lab.parallel.stopping import Stopped
from pe_lab.training import loop
from pe_lab.training.evaluators import Evaluator

pytestmark = pytest.mark.usefixtures("compilations_kept")


def steps_of(phase: Path) -> list[int]:
    return sorted(int(p.name) for p in (phase / "checkpoints").iterdir())


def test_the_log_of_a_run(whole):
    for phase, steps in (("pretrain", 8), ("recalibrate", 6)):
        log = records(whole / phase / "metrics.jsonl")
        logged = [record for record in log if "loss" in record]
        assert [record["step"] for record in logged] == list(range(1, steps + 1))
        assert [record["tokens"] for record in logged] == [128 * s for s in range(1, steps + 1)]
        assert all(np.isfinite(record[k]) for record in logged for k in ("loss", "grad_norm", "learning_rate"))
        assert np.isclose(logged[0]["learning_rate"], 5e-3) and np.isclose(logged[1]["learning_rate"], 1e-2)
        validated = [record for record in log if "validation_loss" in record]
        assert [record["step"] for record in validated] == [0, 4, steps]
        assert validated[0]["validation_loss/needles"] == validated[0]["validation_loss"]
        record = json.loads((whole / phase / "phase.json").read_text())
        assert (record["status"], record["started_step"], record["steps"]) == ("complete", 0, steps)
        assert record["mixture"][0]["source"] == "needles"
        assert any((whole / phase / "tensorboard").iterdir())
    first, second = (records(whole / p / "metrics.jsonl") for p in ("pretrain", "recalibrate"))
    assert first[-1]["validation_loss"] < first[0]["validation_loss"] - 0.5  # it learns
    # The drop happens between the phases: the same weights, without positions.
    assert abs(second[0]["validation_loss"] - first[-1]["validation_loss"]) < 0.5
    assert second[0]["validation_loss"] != first[-1]["validation_loss"]


@pytest.mark.slow
def test_learned_values_of_encodings_are_logged_by_layer_where_the_loss_is_validated(tmp_path, capsys):
    """A run of 4 steps: 4 s."""
    positional = "['rope/with=t5', 'rope/with=t5/with=ssmax']"
    one = f"[{{'name': 'only', 'steps': 4, 'batch_size': 8, 'sequence_length': 16, 'positional': {positional}}}]"
    last = train(tiny(tmp_path / "recipe", phases=one, phases__0__optimizer__warmup_steps=1), tmp_path / "run")
    logged = [r for r in records(tmp_path / "run/only/metrics.jsonl") if "validation_loss" in r]
    assert [r["step"] for r in logged] == [0, 4]
    learned = open_checkpoint(last).params["layers"]["positional"]
    for record, same in zip(logged, (False, True), strict=True):
        for name, layers in (("t5.table", (0, 1)), ("ssmax.scale", (1,))):
            encoding, parameter = name.split(".")
            for i, n in enumerate(layers):
                values = np.asarray(learned[encoding][parameter][i], np.float64)
                found = [record[f"learned/{name}/{n}{part}"] for part in ("", "/low", "/high")]
                assert np.allclose(found, [values.mean(), values.min(), values.max()], atol=1e-7) == same
        assert sum(name.startswith("learned/") for name in record) == 9
    out = capsys.readouterr().out
    assert "t5.table" in out and "ssmax.scale" in out  # `describe`, at the start


@pytest.mark.slow
def test_another_evaluator_runs_in_the_loop_and_is_logged(tmp_path, monkeypatch):
    made = loop._programs

    def with_probe(*args):
        programs = made(*args)
        probe = Evaluator("validation", lambda step, params: {"probe/step": 2.0 * step}, 3)
        return programs._replace(evaluators=[*programs.evaluators, probe])

    monkeypatch.setattr(loop, "_programs", with_probe)
    one = "[{'name': 'only', 'steps': 5, 'batch_size': 8, 'sequence_length': 16, 'optimizer': {'warmup_steps': 1}}]"
    train(tiny(tmp_path / "recipe", phases=one), tmp_path / "run")
    logged = [(r["step"], r["probe/step"]) for r in records(tmp_path / "run/only/metrics.jsonl") if "probe/step" in r]
    assert logged == [(0, 0.0), (3, 6.0), (5, 10.0)]


@pytest.mark.slow
def test_learned_values_are_logged_where_nothing_is_validated(tmp_path):
    """A run of 2 steps: 3 s."""
    (tmp_path / "a.txt").write_text("The grass is green. " * 200)
    one = "[{'name': 'only', 'steps': 2, 'batch_size': 2, 'sequence_length': 16, 'positional': 'rope/with=ssmax'}]"
    settings = {"data__sources": f"[{{'source': 'text:{tmp_path}/a.txt'}}]", "data__validation_fraction": 0.0}
    settings |= {"data__cache_dir": str(tmp_path / "cache"), "phases__0__optimizer__warmup_steps": 1}
    train(tiny(tmp_path / "recipe", phases=one, **settings), tmp_path / "run")
    logged = records(tmp_path / "run/only/metrics.jsonl")
    assert [r["step"] for r in logged if "learned/ssmax.scale/1" in r] == [0, 2] and "validation_loss" not in logged[0]


def test_a_changed_description_of_a_phase_is_not_sealed_anew(config, copy):
    path = copy / "pretrain" / "phase.json"
    record = json.loads(path.read_text()) | {"status": "running", "sequence_length": 17}
    path.write_text(json.dumps(record))
    train(config, copy)
    assert (found := json.loads(path.read_text()))["status"] == "complete" and found["sequence_length"] == 16


@pytest.mark.slow
def test_what_takes_long_before_the_first_step_is_told(tmp_path, capsys, monkeypatch):
    """Every ten seconds, here every hundredth of one. A run of 1 step: 3 s."""
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.01)
    one = "[{'name': 'only', 'steps': 1, 'batch_size': 8, 'sequence_length': 16, 'optimizer': {'warmup_steps': 0}}]"
    train(tiny(tmp_path / "recipe", phases=one), tmp_path / "run")
    lines = [line.rpartition(":")[0] for line in capsys.readouterr().out.splitlines()]
    told = ["placing the weights", "validation before the first step, which compiles it", "compiling the first step"]
    assert [line for line in dict.fromkeys(lines) if line in {f"only: {one}" for one in told}] == [
        f"only: {one}" for one in told
    ]


def test_a_model_that_was_trained_from_python_has_its_tokenizer(whole):
    """`whole` was trained by `train_phase`, not by the command."""
    lm = pe_lab.load(whole)
    assert lm.tokenizer is not None and lm.tokenizer.fingerprint == "bytes-257"
    assert isinstance(lm.generate("a", max_new_tokens=2), str)


def test_the_second_phase_is_a_child_of_the_first(whole, config):
    pretrained, child, last = (
        open_checkpoint(whole / p) for p in ("pretrain/checkpoints/8", "recalibrate/checkpoints/2", "recalibrate")
    )
    ids = [entry["id"] for entry in last.metadata["lineage"]]
    assert len(set(ids)) == len(ids) == 4
    assert [e["what"] for e in last.metadata["lineage"]] == [
        "initialized at random, seed 0",
        "trained 8 steps of 'pretrain' with rope(base=10000)",
        "rope(base=10000) -> nope on layers 0-1",
        "trained 6 steps of 'recalibrate' with nope",
    ]
    assert pretrained.metadata["lineage"] == last.metadata["lineage"][:2]
    assert child.metadata["lineage"][:3] == last.metadata["lineage"][:3]
    assert pretrained.metadata["id"] == ids[1] and last.metadata["id"] == ids[3]
    assert json.loads((whole / "recalibrate" / "phase.json").read_text())["lineage"] == last.metadata["lineage"]
    assert last.metadata["config_hash"] == config_hash(config)


@pytest.mark.slow
def test_a_run_killed_at_every_kind_of_moment_ends_in_the_same_bytes(config, whole, tmp_path, monkeypatch):
    moments = [
        (2, "pretrain"),  # before the first checkpoint: from random again
        (6, "pretrain"),  # checkpoint 4 is there, and the log has a later record
        (6, "recalibrate"),  # four steps to the end of pretrain; then from the child
        (5, "recalibrate"),  # from recalibrate's checkpoint 4
    ]
    for number, phase in moments:
        with monkeypatch.context() as patch:
            at_step(patch, number, die)
            with pytest.raises(Killed):
                train(config, tmp_path / "run")
        assert (tmp_path / "run" / "recalibrate").exists() == (phase == "recalibrate")
        with (tmp_path / "run" / phase / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "tok')  # half a line
    train(config, tmp_path / "run")
    assert_same_training(whole, tmp_path / "run")
    assert json.loads((tmp_path / "run/recalibrate/phase.json").read_text())["status"] == "complete"


def test_a_complete_run_is_left_as_it_is(config, whole, copy, capsys):
    before = fingerprint(copy)
    train(config, copy)
    assert fingerprint(copy) == before
    assert capsys.readouterr().out.count("nothing to do") == 2


def test_a_run_that_died_before_it_marked_the_phase_complete_marks_it_later(config, copy):
    path = copy / "recalibrate" / "phase.json"
    path.write_text(path.read_text().replace('"complete"', '"running"'))
    train(config, copy)
    assert json.loads(path.read_text())["status"] == "complete"


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(config, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match=r"stopped at step 3 of 8 of phase 'pretrain', saved"):
            train(config, tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert steps_of(tmp_path / "run" / "pretrain")[-1] == 3
    assert records(tmp_path / "run/pretrain/metrics.jsonl")[-1]["step"] == 3
    train(config, tmp_path / "run")
    assert_same_training(whole, tmp_path / "run")


@pytest.mark.slow
def test_sigterm_while_a_phase_writes_its_last_checkpoint_stops_before_the_next(config, whole, tmp_path, monkeypatch):
    save = loop.Store.save

    def interrupted(store, step, *rest):
        save(store, step, *rest)
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Store, "save", interrupted)
        with pytest.raises(Stopped, match="stopped at step 8 of 8 of phase 'pretrain'"):
            train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run/pretrain/phase.json").read_text())["status"] == "complete"
    assert not (tmp_path / "run/recalibrate").exists()
    train(config, tmp_path / "run")
    assert_same_training(whole, tmp_path / "run")


def test_data_that_changed_between_two_sessions_is_refused(config, copy, tmp_path):
    shutil.rmtree(copy / "recalibrate" / "checkpoints" / "6")
    other = tiny(tmp_path / "recipe", data__sources__0__options__queries=2)
    with pytest.raises(UserError, match=r"It is of another run: its data\."):
        train(other, copy)


def test_data_that_changed_between_two_phases_is_refused(copy, tmp_path):
    shutil.rmtree(copy / "recalibrate")
    other = tiny(tmp_path / "recipe", data__sources__0__options__queries=2)
    with pytest.raises(DataError, match="The data has changed since 'pretrain': sources was"):
        train(other, copy)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    config = tiny(
        tmp_path / "recipe",
        phases__0__optimizer__learning_rate=1000,
        phases__0__optimizer__weight_decay=1000,
        checkpoint__every_steps=99,
    )
    diverged = r"The loss is \S+ and the norm of its gradient (nan|inf) at step \d.*lower config.phases.0"
    with pytest.raises(TrainingDiverged, match=diverged):
        train(config, tmp_path / "run")
    assert find_checkpoints(tmp_path / "run") == []  # step 2 would have been saved, and be worth nothing


@pytest.mark.slow
def test_a_phase_can_start_from_any_checkpoint(config, whole, tmp_path):
    source = whole / "pretrain" / "checkpoints" / "8"
    before = fingerprint(whole)
    child = tiny(tmp_path / "recipe", phases="[{'name': 'more', 'steps': 3, 'positional': 'nope', 'batch_size': 8, "
                 f"'sequence_length': 16, 'init_from': '{source}', 'optimizer': {{'warmup_steps': 1}}}}]")  # fmt: skip
    train(child, tmp_path / "run")
    first = records(tmp_path / "run/more/metrics.jsonl")[0]
    assert first["validation_loss"] == records(whole / "recalibrate/metrics.jsonl")[0]["validation_loss"]
    lineage = open_checkpoint(tmp_path / "run").metadata["lineage"]
    assert lineage[1]["id"] == open_checkpoint(source).metadata["id"]
    assert fingerprint(whole) == before
    # Once it has checkpoints of its own, the phase no longer needs its source.
    gone = tiny(tmp_path / "recipe", phases__0__init_from="nowhere")
    with pytest.raises(UserError, match="There is no checkpoint at 'nowhere'"):
        opened(gone, tmp_path / "new")


def test_a_source_of_another_shape_is_refused_before_anything_is_written(config, whole, tmp_path):
    wide = tiny(tmp_path / "recipe", model__d_ff=64, model__kv_heads=1, phases__0__init_from=str(whole / "pretrain"))
    with pytest.raises(UserError, match="is a model of another shape: d_ff 32 -> 64, kv_heads 2 -> 1"):
        opened(wide, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_only_steps_that_are_asked_for_are_logged(tmp_path, whole):
    config = tiny(tmp_path / "recipe", log__every_steps=3, log__validate_every_steps=100)
    train(config, tmp_path / "run")
    log = records(tmp_path / "run/pretrain/metrics.jsonl")
    assert [(record["step"], "loss" in record) for record in log] == [
        (0, False),
        (3, True),
        (6, True),
        (8, True),
        (8, False),
    ]
    every = {record["step"]: record["loss"] for record in records(whole / "pretrain/metrics.jsonl") if "loss" in record}
    assert [record["loss"] for record in log if "loss" in record] == [every[s] for s in (3, 6, 8)]
