"""What a run writes beside its checkpoints: rows that continue, files never half written, directories claimed."""

import json

import pytest
from tiny_runs import fingerprint, tiny

from pe_lab.errors import UserError
from pe_lab.training.files import NoRows, Rows, TensorBoard, claim_workdir, write_json, write_run


def facts() -> dict:
    return {"created": "2026-01-01T00:00:00+00:00", "versions": {"python": "3"}, "machine": {"cpus": 2}}


def test_rows_go_on_after_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = Rows(path, 0)
    for step in (0, 1, 2, 2, 3, 4):
        first.write({"step": step})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 1, "lo')  # the process died here
    again = Rows(path, 2)
    again.write({"step": 3, "loss": 0.5})
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0}, {"step": 1}, {"step": 2}, {"step": 2}, {"step": 3, "loss": 0.5}
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_start_anew_at_step_0(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):  # a session that died before its first checkpoint, and the next one
        writer = Rows(path, 0)
        writer.write({"step": 0, "validation_loss": 1.0})
        writer.close()
    assert path.read_text() == '{"step": 0, "validation_loss": 1.0}\n'


def test_a_row_is_on_disk_at_once(tmp_path):
    writer = Rows(tmp_path / "rows", 0)
    writer.write({"step": 1})
    assert (tmp_path / "rows").read_text() == '{"step": 1}\n'
    writer.close()


def test_other_processes_write_nothing(tmp_path):
    writer = NoRows()
    writer.write({"step": 1})
    writer.close()
    assert not list(tmp_path.iterdir())


def test_json_is_replaced_whole_and_keeps_the_old_file_on_failure(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_tensorboard_has_the_numbers(tmp_path):
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (the package is there)
    from tensorboardX.proto.event_pb2 import Event

    board = TensorBoard(tmp_path, 5)
    board.write({"step": 6, "loss": 0.5, "mfu": None})
    board.close()
    (file,) = tmp_path.iterdir()
    data, events = file.read_bytes(), []
    while data:  # TFRecord: length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(6, "loss", 0.5)]
    assert [e.step for e in events if e.session_log.status] == [6]  # later steps of a former session are void


def test_a_directory_belongs_to_one_config(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    claim_workdir(workdir, config)
    assert not workdir.exists()
    write_run(workdir, config, "first command", **facts())
    claim_workdir(workdir, config)
    claim_workdir(workdir, tiny(tmp_path / "recipe", log__every_steps=5))
    before = fingerprint(tmp_path)
    other = tiny(tmp_path / "recipe", phases__0__steps=9, model__d_ff=64)
    with pytest.raises(
        UserError, match="belongs to another config .model.d_ff: 32 there, 64 here; phases.0.steps: 8 there"
    ):
        claim_workdir(workdir, other)
    assert fingerprint(tmp_path) == before


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its run.json knows nothing of fields that came later, and says yes or no to QK-norm."""
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "command", **facts())
    run = json.loads((workdir / "run.json").read_text())
    later = ("norm", "activation", "gated_mlp", "parallel_block")
    for field in later:
        del run["config"]["model"][field], run["identity"][f"model.{field}"]
    for phase, _ in enumerate(config.phases):
        del run["config"]["phases"][phase]["random_positions"], run["identity"][f"phases.{phase}.random_positions"]
    run["config"]["model"]["qk_norm"] = run["identity"]["model.qk_norm"] = True
    run["config_hash"] = "0123456789ab"
    (workdir / "run.json").write_text(json.dumps(run))
    claim_workdir(workdir, config)
    with pytest.raises(UserError, match="belongs to another config .model.norm: rms there, layer here"):
        claim_workdir(workdir, tiny(tmp_path / "recipe", model__norm="layer"))


def test_the_first_session_names_the_run(tmp_path):
    config = tiny(tmp_path / "recipe")
    write_run(tmp_path / "run", config, "first command", **facts())
    write_run(
        tmp_path / "run", config, "second command", **{**facts(), "created": "later", "versions": {"python": "4"}}
    )
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["command"], run["created"]) == ("first command", "2026-01-01T00:00:00+00:00")
    assert run["versions"] == {"python": "4"} and run["notes"]["paper"] == "none"
    assert run["config"]["phases"][1]["positional"] == "nope"


def test_directories_that_are_no_run_are_left_alone(tmp_path):
    config = tiny(tmp_path / "recipe")
    strange = tmp_path / "photos"
    strange.mkdir()
    claim_workdir(strange, config)  # empty: fine
    (strange / ".run.json.123").write_text("{")  # what a killed process left
    claim_workdir(strange, config)
    (strange / "cat.jpg").touch()
    with pytest.raises(UserError, match="holds cat.jpg and no run.json"):
        claim_workdir(strange, config)
    with pytest.raises(UserError, match="is a file"):
        claim_workdir(strange / "cat.jpg", config)
    for text in ("{", "[]", "{}"):
        (strange / "run.json").write_text(text)
        with pytest.raises(UserError, match="its run.json is not one of ours"):
            claim_workdir(strange, config)
