"""Requests to stop, at every moment of a command's life; processes that are lost; notices of the cloud."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from object_stores import free_port
from tiny_runs import REPOSITORY, assert_same_training, finish, start, start_together, write_recipe

from pe_lab.checkpoints.locating import steps_in
from pe_lab.parallel import stopping
from pe_lab.parallel.stopping import Stopped, stop_requests, watch_maintenance
from pe_lab.terminal import command


def test_the_first_signal_is_seen_by_a_loop_that_saves():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]  # a shell's `&` ignores SIGINT
    with stop_requests() as stops:
        stops.can_save = True
        with stop_requests() as inner:  # a phase inside a command
            assert inner is stops
        os.kill(os.getpid(), signal.SIGTERM)
        assert stops.received == signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_where_nothing_can_be_saved_is_no_error_that_somebody_handles():
    def handles_errors():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except Exception:
            pytest.fail("a damaged checkpoint is handled so; a request to stop is none")

    with pytest.raises(Stopped), stop_requests():
        handles_errors()


def test_a_signal_inside_a_finalizer_is_raised_after_it(capfd):
    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))  # Python runs the handler here, where an exception would be printed and dropped

    with pytest.raises(Stopped), stop_requests():
        Finalized()
        time.sleep(5)
    assert capfd.readouterr().err == "SIGTERM: leaving; once more to leave at once\n"


def test_an_interrupted_command_prints_one_line(capsys):
    @command
    def main(argv):
        raise KeyboardInterrupt

    assert main([]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


# A process that compiles: the main thread is inside C, where no handler of Python's runs. Locking a mutex twice stays
# there for ever.
IN_C = """
import ctypes, os, sys, threading, time
from pe_lab.parallel import stopping

def told():
    asleep = 0  # how often in a row the main thread, which has the number of the process, was
    while asleep < 10:
        time.sleep(0.02)
        with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
            asleep = asleep + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
    print("ready", flush=True)

stopping.PATIENCE, stopping.SAME_SECONDS = 1.0, float(sys.argv[2])
with stopping.stop_requests() as stops:
    stops.can_save = sys.argv[1] == "can save"
    mutex, lock = ctypes.create_string_buffer(128), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    threading.Thread(target=told, daemon=True).start()
    lock(mutex)
"""


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("kind", "same", "signals", "status"),
    [
        ("cannot save", 0.0, [TERM], os.EX_TEMPFAIL),
        ("can save", 0.0, [TERM, TERM], 143),
        pytest.param("can save", 0.0, [TERM, INT], 130, marks=pytest.mark.slow),
        # make and timeout both pass on what the whole process group got: one request.
        ("can save", 1e9, [TERM, TERM, TERM, INT], 130),
        pytest.param("can save", 1e9, [INT, INT, TERM], 143, marks=pytest.mark.slow),
        pytest.param("cannot save", 1e9, [TERM, TERM], os.EX_TEMPFAIL, marks=pytest.mark.slow),
    ],
)
def test_signals_are_seen_inside_a_compiler(kind, same, signals, status):
    """2 s each; `same` is how many seconds apart two of a kind are one."""
    words = [sys.executable, "-c", IN_C, kind, str(same)]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n" and process.stderr is not None
    process.send_signal(signals[0])
    told = process.stderr.readline()
    for number in signals[1:]:
        time.sleep(0.1)  # two that are pending at once are one to the system
        process.send_signal(number)
    printed = told + process.communicate(timeout=300)[1]
    assert process.returncode == status, printed
    assert "Traceback" not in printed and told.startswith(f"{signals[0].name}: ")


# One of several processes, as far as it knows: `jax.distributed` has a handler of SIGTERM.
CONNECTED = """
import os, sys, time
os.environ |= {"COORDINATOR_ADDRESS": sys.argv[1], "PROCESS_COUNT": "1", "PROCESS_INDEX": "0", "JAX_PLATFORMS": "cpu"}
from jax.experimental.multihost_utils import reached_preemption_sync_point
from pe_lab.parallel.processes import start_processes
from pe_lab.parallel import stopping
stopping.SAME_SECONDS = 0.0
with stopping.stop_requests() as stops:
    start_processes()
    stops.take_sigterm()
    stops.can_save = True
    print("ready", flush=True)
    step = 0
    while not reached_preemption_sync_point(step := step + 1):
        time.sleep(0.01)
    print("agreed", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_one_of_several_processes_sees_both_signals(first):
    """4 s each: `jax.distributed` looks at its signal once a second."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONNECTED, f"localhost:{free_port()}"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == "agreed\n"
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 143 and "SIGTERM again: leaving without saving" in printed, printed
    assert f"{first.name}: saving, then leaving" in printed


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a VM that is taken away a second after it was asked first."""

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        waits = "wait_for_change=true" in self.path
        if waits:
            time.sleep(1.0)
        value = b"NONE" if "maintenance" in self.path else b"TRUE" if waits else b"FALSE"
        self.send_response(200)
        self.send_header("ETag", "2" if waits else "1")
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, *args) -> None:
        pass


def test_a_preemption_notice_is_a_request_to_stop(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    with stop_requests() as stops:
        stops.can_save = True
        watch_maintenance()
        deadline = time.monotonic() + 300
        while stops.received is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stops.received == signal.SIGTERM
        # The machine's own SIGTERM follows the notice, however much later: it must not end what is being saved.
        left: list[int] = []
        monkeypatch.setattr(stopping.os, "_exit", left.append)
        monkeypatch.setattr(stopping, "SAME_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        assert left == []
        os.kill(os.getpid(), signal.SIGINT)  # a person's second request does
        while not left and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == [130]
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_sigterm_at_any_moment_ends_with_status_75_and_the_run_goes_on(tmp_path):
    """A run of a few seconds, and seven that are stopped: 60 s."""
    recipe = write_recipe(tmp_path / "recipe")
    argv = ["pe_lab.train", f"--config={recipe}", "--config.checkpoint.every_steps=1000"]
    finish([start([*argv, "--workdir=whole"], tmp_path)])
    run = tmp_path / "stopped"
    moments = {
        "imports": lambda: True,
        "start-up": lambda: (run / "run.json").exists(),
        "initializing": lambda: (run / "ledger.jsonl").exists(),
        "compiling": lambda: (run / "pretrain/phase.json").exists(),
        "training": lambda: (run / "pretrain/metrics.jsonl").read_bytes().count(b"\n") >= 3,
        "phase border": lambda: steps_in(run / "pretrain/checkpoints")[-1:] == [8],
        "second phase": lambda: (run / "recalibrate/phase.json").exists(),
    }
    for number, (moment, happened) in enumerate(moments.items()):
        process = start([*argv, "--workdir=stopped"], tmp_path)
        if moment == "imports":
            time.sleep(0.7)
        while not happened():
            assert process.poll() is None, (moment, process.communicate()[0])
            time.sleep(0.001)
        if moment in ("initializing", "compiling"):
            time.sleep(0.5)
        process.send_signal(signal.SIGINT if number % 2 else signal.SIGTERM)
        out = process.communicate(timeout=300)[0]
        assert process.returncode == 75, (moment, out[-3000:])
        assert "Traceback" not in out, (moment, out[-3000:])
    finish([start([*argv, "--workdir=stopped"], tmp_path)])
    assert_same_training(tmp_path / "whole", run)
    assert not list(run.rglob("*tmp*")) and not list(run.rglob("*.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_the_other_of_two_processes_says_who_was_lost(tmp_path, lost):
    """Two processes, one of them killed; once the run goes on: 40 s each."""
    recipe = write_recipe(tmp_path / "recipe")
    argv = ["pe_lab.train", f"--config={recipe}", "--workdir=two", "--config.phases.0.steps=4000"]
    argv += ["--config.checkpoint.every_steps=50", "--config.log.validate_every_steps=4000"]
    processes = start_together(argv, [tmp_path] * 2)
    log = tmp_path / "two/pretrain/metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 120:
        assert all(p.poll() is None for p in processes), finish(processes)
        time.sleep(0.01)
    processes[lost].kill()
    out = processes[1 - lost].communicate(timeout=300)[0]
    processes[lost].communicate()
    assert processes[1 - lost].returncode == 75, out[-3000:]
    host = os.uname().nodename
    assert f"lost process {lost} on {host}: " in out and "Traceback" not in out, out[-3000:]
    assert out.count("lost process") == 1
    if lost == 0:
        return

    again = start_together([*argv, "--config.log.every_steps=10"], [tmp_path] * 2)
    while b'"step": 300,' not in log.read_bytes():
        assert all(p.poll() is None for p in again), finish(again)
        time.sleep(0.05)
    again[0].terminate()
    outs = finish(again, status=75)
    assert "resuming at step" in outs[0]
    assert json.loads((tmp_path / "two/pretrain/phase.json").read_text())["status"] == "running"
