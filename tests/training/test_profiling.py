"""The split of a step's time, and traces that the real viewer opens."""

import json
import subprocess
import sys
import time

import jax
import pytest
from real_material import xprof
from tiny_runs import finish, start, train_on_one_device, write_recipe

from pe_lab.errors import ConfigError
from pe_lab.model import Flops
from pe_lab.train import main
from pe_lab.training.ledger import Ledger
from pe_lab.training.logs import WAITS, Speed, speed_text
from pe_lab.training.profiling import parse_steps


@pytest.fixture
def one_device(monkeypatch):
    train_on_one_device(monkeypatch)


def test_a_steps_time_is_what_was_waited_for_and_the_rest(monkeypatch):
    clock = iter([0.0, 0.02, 0.05, 0.06, 0.1, 0.12])  # at the start and the end of each wait
    times = Speed(Ledger(), 0, 1, Flops(0.0, 0.0), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        for what in ("device", "input", "device"):
            with times.wait(what):
                pass
    split = times.split(2, 0.2)
    assert split["device"] == pytest.approx(0.02) and split["input"] == pytest.approx(0.005)
    assert split["host"] == pytest.approx(0.075)
    assert times.split(1, 1.0) == {
        "device": 0.0,
        "input": 0.0,
        "validation": 0.0,
        "suites": 0.0,
        "checkpoint": 0.0,
        "host": 1.0,
    }


@pytest.mark.parametrize(("backend", "seconds"), [("cpu", 0.5), ("tpu", 0.0)])
def test_a_cpu_computes_a_step_as_it_is_started(monkeypatch, backend, seconds):
    clock, times = iter([0.0, 0.5]), Speed(Ledger(), 0, 1, Flops(0.0, 0.0), 0.0)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        with times.dispatch():
            pass
    assert times.split(1, 1.0)["device"] == seconds


def test_the_line_has_both_mfus_where_the_peak_is_known():
    speed = {"tokens_per_second": 41200.4, "mfu_full": 0.401, "mfu_causal": 0.382, "step_seconds": 0.5}
    parts = {
        "device_seconds": 0.485,
        "input_seconds": 0.01,
        "validation_seconds": 0.0,
        "suites_seconds": 0.0,
        "checkpoint_seconds": 0.001,
    }
    text = speed_text(speed | parts | {"host_seconds": 0.004})
    assert text == "41,200 tokens/s  MFU 40.1% full, 38.2% causal  device 97%, input 2%, host 1%"
    assert "MFU" not in speed_text(speed | parts | {"host_seconds": 0.0, "mfu_full": None})


@pytest.mark.parametrize("text", ["10", "13:10", "0:3", "a:b", ":", "1:2:3"])
def test_steps_that_are_no_pair_are_refused(text):
    with pytest.raises(ConfigError, match=f"--profile={text}: write the first and the last step to trace"):
        parse_steps(text)


@pytest.mark.slow
def test_a_command_that_ends_before_says_so(tmp_path, capsys, one_device):
    """2 s."""
    command = [f"--config={write_recipe(tmp_path)}", f"--workdir={tmp_path / 'run'}", "--profile=100:101"]
    assert main(command) == 0
    assert "--profile=100:101: nothing was traced; this command trained 14 steps" in capsys.readouterr().out


READ = """
import json, sys
from xprof.convert import raw_to_tool_data
files = sys.argv[1:]
trace, _ = raw_to_tool_data.xspace_to_tool_data(files, "trace_viewer@", {})
overview, _ = raw_to_tool_data.xspace_to_tool_data(files, "overview_page", {})
json.dump({"trace": json.loads(trace), "overview": json.loads(overview)}, sys.stdout)
"""


@pytest.mark.slow
def test_the_chosen_steps_are_traced_and_xprof_opens_the_trace(tmp_path):
    """14 s, and a download of 32 MB. Steps 7 to 10 are 7 and 8 of the first phase: its end cuts the trace short.

    In a process of its own: libtpu without a TPU, which other tests load, crashes the profiler.
    """
    command = [f"--config={write_recipe(tmp_path)}", f"--workdir={tmp_path / 'run'}", "--profile=7:10"]
    (said,) = finish([start(["pe_lab.train", *command], tmp_path)])
    folder = tmp_path / "run/pretrain/tensorboard/plugins/profile/step_7"
    assert f"profile: {folder}; look at it with" in said
    (trace,), (memory,) = folder.glob("*.0.xplane.pb"), folder.glob("*.0.memory.prof")
    assert memory.stat().st_size > 100
    speed = [json.loads(line) for line in (tmp_path / "run/pretrain/speed.jsonl").read_text().splitlines()]
    for record in speed:
        parts = sum(record[f"{part}_seconds"] for part in (*WAITS, "host"))
        assert parts == pytest.approx(record["step_seconds"], abs=1e-4)

    read = subprocess.run(
        [sys.executable, "-c", READ, str(trace)],
        env={"PYTHONPATH": str(xprof()), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    names = {event.get("name") for event in found["trace"]["traceEvents"]}
    assert {name for name in names if str(name).startswith("train ")} == {"train 7", "train 8"}
    assert {"wait for input", "wait for device"} <= names and found["overview"]
