"""The files of a run: logs that continue, run.json, and workdirs that belong to one config."""

import json
import time

import jax
import pytest
from tiny_runs import records

from pe_lab.config import Config
from pe_lab.storage.manifest import crc32c, sealed
from pe_lab.training.logs import PhaseLogs, mark_complete
from pe_lab.training.trackers import Session, open_trackers


def opened(directory, resume_step):
    """The logs of a phase, with TensorBoard."""

    def trackers(skip):
        return open_trackers(Session(directory, resume_step, skip, Config()), print)

    return PhaseLogs(directory, resume_step, trackers=trackers)


def write(directory, resume_step, *records, name="metrics"):
    logs = opened(directory, resume_step)
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


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0\0", b"[]", b'{"status"', b'{"a": ' * 9999, b'{"crc32c": "00000000"}']
)
def test_a_damaged_description_of_a_phase_is_set_aside(tmp_path, capsys, content):
    (tmp_path / "phase.json").write_bytes(content)
    mark_complete(tmp_path)
    (aside,) = tmp_path.glob("phase.json.damaged-*")
    assert aside.read_bytes() == content and not (tmp_path / "phase.json").exists()
    assert capsys.readouterr().out.count("\n") == 1


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path, capsys):
    logs = opened(tmp_path, 0)
    (background,) = logs._trackers
    while background.tracker is None:  # a thread opens it
        time.sleep(0.01)
    board = background.tracker._writer._py_recordio_writer
    board._writer.close()
    with open("/dev/full", "wb") as full:
        board._writer = full
        for step in range(3000):  # more than its buffers hold
            logs.write("metrics", {"step": step, "loss": 0.5})
        logs.flush()
        logs.close()
        full.raw.close()  # what is buffered still has no place
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3000
    told = capsys.readouterr().out
    assert told.count("tensorboard: ") == 1 and "No space left on device" in " ".join(told.split())


def test_damaged_logs_of_a_complete_phase_are_said_and_set_aside(tmp_path, capsys):
    write(tmp_path, 0, {"step": 1}, {"step": 2})
    (tmp_path / "phase.json").write_text(json.dumps(sealed({"status": "running", "steps": 2})))
    mark_complete(tmp_path)
    assert capsys.readouterr().out == "" and "complete" in (tmp_path / "phase.json").read_text()
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'\x00"step": 1}\n{"step": 2}\n')
    mark_complete(tmp_path)
    assert "1 of 2 records are damaged" in capsys.readouterr().out
    assert log.read_text() == '{"step": 2}\n' and len(list(tmp_path.glob("metrics.jsonl.damaged-*"))) == 1
    log.write_text('{"step": 1}\n')
    mark_complete(tmp_path, {"size": 12, "crc32c": crc32c(b'{"step": 1}\n')})
    assert capsys.readouterr().out == ""
    mark_complete(tmp_path, {"size": 12, "crc32c": crc32c(b'{"step": 2}\n')})
    assert f"DAMAGED: {log} is not what was logged" in capsys.readouterr().out
