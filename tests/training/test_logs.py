"""The files of a run: logs that continue, run.json, and workdirs that belong to one config."""

import json

import jax

from pe_lab.training.logs import PhaseLogs


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
