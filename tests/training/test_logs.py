"""The files of a run: logs that continue, run.json, and workdirs that belong to one config."""

import json

import jax
import pytest
from tiny_runs import fingerprint, records, tiny

from pe_lab.errors import ConfigError
from pe_lab.training.logs import PhaseLogs, claim_workdir, mark_complete, write_run


def write(directory, resume_step, *records, name="metrics"):
    logs = PhaseLogs(directory, resume_step)
    for record in records:
        logs.write(name, record)
    logs.close()


def test_logs_continue_after_the_step_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, *({"step": step} for step in (0, 1, 2, 2, 3, 4)))
    with path.open("a") as file:
        file.write('{"step": 1, "lo')  # the process died here
    write(tmp_path, 2, {"step": 3, "loss": 0.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0}, {"step": 1}, {"step": 2}, {"step": 2}, {"step": 3, "loss": 0.5}
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "speed.jsonl", "tensorboard"]


def test_logs_start_anew_at_step_0(tmp_path):
    for _ in range(2):  # a session that died before its first checkpoint, and the next one
        write(tmp_path, 0, {"step": 0, "validation_loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "validation_loss": 1.0}\n'


def test_a_record_is_on_disk_at_once(tmp_path):
    logs = PhaseLogs(tmp_path, 0)
    logs.write("speed", {"step": 1})
    assert (tmp_path / "speed.jsonl").read_text() == '{"step": 1}\n'
    logs.close()


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path, 0, {"step": 1})
    assert not list(tmp_path.iterdir())


def test_tensorboard_has_the_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    write(tmp_path, 5, {"step": 6, "loss": 0.5, "mfu": None})
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []
    while data:  # TFRecord: length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(6, "loss", 0.5)]
    assert [e.step for e in events if e.session_log.status] == [6]  # later steps of an earlier session are void


def test_a_directory_belongs_to_one_config(tmp_path):
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    claim_workdir(workdir, config)
    assert not workdir.exists()
    write_run(workdir, config, "first command")
    claim_workdir(workdir, config)
    claim_workdir(workdir, tiny(tmp_path / "recipe", log__every_steps=5))
    before = fingerprint(tmp_path)
    other = tiny(tmp_path / "recipe", phases__0__steps=9, model__d_ff=64)
    with pytest.raises(
        ConfigError, match="belongs to another config .model.d_ff: 32 there, 64 here; phases.0.steps: 8 there"
    ):
        claim_workdir(workdir, other)
    assert fingerprint(tmp_path) == before


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    """Its run.json has no fields that were added later, and a bool for the QK-norm."""
    config, workdir = tiny(tmp_path / "recipe"), tmp_path / "run"
    write_run(workdir, config, "command")
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
    with pytest.raises(ConfigError, match="belongs to another config .model.norm: rms there, layer here"):
        claim_workdir(workdir, tiny(tmp_path / "recipe", model__norm="layer"))


def test_the_date_and_command_of_the_first_session_stay(tmp_path):
    config, path = tiny(tmp_path / "recipe"), tmp_path / "run" / "run.json"
    write_run(tmp_path / "run", config, "first command")
    path.write_text(json.dumps({**json.loads(path.read_text()), "created": "2026-01-01", "versions": {}}))
    write_run(tmp_path / "run", config, "second command")
    run = json.loads(path.read_text())
    assert (run["command"], run["created"]) == ("first command", "2026-01-01")
    assert run["versions"]["jax"] == jax.__version__ and run["notes"]["paper"] == "none"
    assert run["config"]["phases"][1]["positional"] == "nope"


def test_directories_that_are_no_run_are_left_alone(tmp_path):
    config = tiny(tmp_path / "recipe")
    strange = tmp_path / "photos"
    strange.mkdir()
    claim_workdir(strange, config)  # empty: fine
    (strange / ".run.json.123").write_text("{")  # what a killed process left
    claim_workdir(strange, config)
    (strange / "cat.jpg").touch()
    with pytest.raises(ConfigError, match="holds cat.jpg and no run.json"):
        claim_workdir(strange, config)
    with pytest.raises(ConfigError, match="is a file"):
        claim_workdir(strange / "cat.jpg", config)
    for text in ("{", "[]", "{}"):
        (strange / "run.json").write_text(text)
        with pytest.raises(ConfigError, match="its run.json is not one of pe_lab"):
            claim_workdir(strange, config)


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\0", b"[]", b'{"loss": 1}', b'{"step": "2"}', b"\xff", b"[" * 9999, b'{"step": 2']
)
def test_a_damaged_log_is_set_aside_and_the_run_goes_on(tmp_path, capsys, damage):
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 3, 4)]
    whole = b"".join(line + b"\n" for line in lines)
    (tmp_path / "speed.jsonl").write_bytes(whole)
    damaged = lines[0] + b"\n" + damage + b"\n" + lines[2] + b"\n" + lines[3] + b"\n" + b'{"step": 5'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    logs = PhaseLogs(tmp_path, 3)
    logs.write("metrics", {"step": 4, "loss": 0.5})
    logs.close()
    assert [row["step"] for row in records(tmp_path / "metrics.jsonl")] == [1, 3, 4]
    assert [row["step"] for row in records(tmp_path / "speed.jsonl")] == [1, 2, 3]
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.name.startswith("metrics.jsonl.damaged-") and aside.read_bytes() == damaged
    said = capsys.readouterr().out
    assert "1 of 4 records are damaged" in said and aside.name in said and said.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"[]", b'{"status"', b'{"a": ' * 9999])
def test_a_damaged_description_of_a_phase_or_a_run_is_set_aside(tmp_path, capsys, content):
    (tmp_path / "phase.json").write_bytes(content)
    mark_complete(tmp_path)
    (aside,) = tmp_path.glob("phase.json.damaged-*")
    assert aside.read_bytes() == content and not (tmp_path / "phase.json").exists()
    (tmp_path / "run.json").write_bytes(content)
    write_run(tmp_path, tiny(tmp_path / "recipe"), "again")
    assert json.loads((tmp_path / "run.json").read_text())["command"] == "again"
    (aside,) = tmp_path.glob("run.json.damaged-*")
    assert aside.read_bytes() == content
    assert capsys.readouterr().out.count("\n") == 2
