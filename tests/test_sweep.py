"""`python -m pe_lab.sweep`: its output, its exit statuses, and the input that it refuses."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from object_stores import gcs_bucket, store_servers  # noqa: F401
from tiny_runs import REPOSITORY, arrays, fingerprint, finish, start, write_recipe

from pe_lab.lab.sweeps.cells import SweepCell
from pe_lab.lab.sweeps.state import read_outcome
from pe_lab.results.records import as_dict
from pe_lab.sweep import main

RATE = "phases.0.optimizer.learning_rate"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_recipe(tmp_path)


# Writes what a run of the tiny recipe would; those of seed 1 fail until there is a file `mended`.
STAND_IN = """
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
if run.name.endswith("seed=1") and not pathlib.Path("mended").exists():
    sys.exit("error: out of luck")
for name, steps in (("pretrain", 8), ("recalibrate", 6)):
    (run / name).mkdir(parents=True)
    info = {"phase": name, "steps": steps, "tokens_per_step": 128, "status": "complete"}
    (run / name / "phase.json").write_text(json.dumps(info))
    logged = [{"step": n, "loss": 5 / n, "validation_loss": 6 / n} for n in range(1, steps + 1)]
    (run / name / "metrics.jsonl").write_text("".join(json.dumps(one) + chr(10) for one in logged))
(run / "run.json").write_text(json.dumps({"name": "tiny", "config": {}}))
"""


def test_a_sweep_is_run_continued_and_given_more_cells(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        SweepCell, "command", lambda cell, where: [sys.executable, "-S", "-c", STAND_IN, str(where / cell.name)]
    )
    monkeypatch.setattr("pe_lab.lab.sweeps.results.draw", lambda table, form: b"drawn elsewhere")
    command = ["--config=tiny.py", "--grid", f"{RATE}=1e-3,1e-2", "--seeds=2", "--jobs=2"]
    where = tmp_path / "runs" / "tiny_sweep"
    assert main([*command, "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert "learning_rate=1e-2__seed=1  waiting" in listed and "4 cells to train: 7.2K tokens" in listed
    assert not where.exists()

    assert main(command) == 1
    out = capsys.readouterr().out
    assert "2 of 4 cells complete, 2 FAILED; --retry trains those that have failed again" in out
    log = where.relative_to(tmp_path) / "logs" / "learning_rate=1e-3__seed=1.log"
    assert f"FAILED learning_rate=1e-3__seed=1, status 1: out of luck (log: {log})" in out
    (tmp_path / "mended").touch()
    assert main(command) == 1  # what has failed is not tried again
    assert main([*command, "--retry"]) == 0
    assert "4 of 4 cells complete" in capsys.readouterr().out

    before = (where / "learning_rate=1e-3__seed=0" / "pretrain" / "phase.json").stat().st_mtime_ns
    assert main([*command[:2], f"{RATE}=1e-3,1e-1", *command[3:]]) == 0
    assert "6 of 6 cells complete" in capsys.readouterr().out
    assert (where / "learning_rate=1e-3__seed=0" / "pretrain" / "phase.json").stat().st_mtime_ns == before
    assert main(["--table", f"--workdir={where}"]) == 0
    out = capsys.readouterr().out
    assert "1 ± 0" in out and "report.html" in out and "6 of 6 cells complete" in out
    assert len(json.loads((where / "sweep.json").read_text())["commands"]) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--seeds=2"], "--config is missing"),
        (["--config=tiny.py"], "Nothing varies"),
        (["--config=tiny.py", "--seeds=0"], "--seeds=0: it is the number of seeds"),
        (["--config=tiny.py", "--grid=model.layers="], "a value is missing"),
        (["--config=tiny.py", "--grid=model.layerz=1,2"], "has no key 'layerz'"),
        (["--config=tiny.py", "--grid=model.layers=2,2.0"], "are the same run"),
        (["--config=tiny.py", "--seeds=2", "--workdir=tiny.py"], "is a file"),
        (["--config=tiny.py", "--seeds=2", "--workdir=."], "and no sweep"),
        (["--config=tiny.py", "--seeds=2", "--on=slrm"], "Did you mean 'slurm'?"),
        (["--config=tiny.py", "--seeds=2", "--slurm-partition=x"], "is an option of --on=slurm"),
        (["--config=tiny.py", "--seeds=2", "--on=ray", "--ray-gpu=1"], "Did you mean 'gpus'?"),
        (["--config=tiny.py", "--seeds=2", "--evaluate=perplexty"], "perplexity"),
        (["--config=tiny.py", "--seeds=2", "--evaluate", "--evaluate.from=x"], "the sweep sets it"),
        (
            ["--config=tiny.py", "--seeds=2", "--evaluate", "--evaluate.bogus=x"],
            "--evaluate: unrecognized arguments: --bo",
        ),
        (["--config=tiny.py", "--seeds=2", "--evaluate", "--evaluate.seed=x"], "--evaluate: argument --seed"),
        (["--config=tiny.py", "--seeds=2", "--evaluate", "--evaluate.variants=x"], "--evaluate: "),
        (["--config=tiny.py", "--seeds=2", "--evaluate", "--evaluate.steps=x"], "--evaluate: "),
        (["--config=tiny.py", "--seeds=2", "--evaluate.lengths=2x"], "is an option of --evaluate, which is missing"),
        (["--config=tiny.py", "--seeds=2", "--baseline=layers=2"], "the grid has no 'layers'"),
        (["--config=tiny.py", "--seeds=2", "--metric=validation_los"], "Did you mean 'validation_loss'?"),
        (["--table"], "--table needs --workdir"),
        (["--table", "--workdir=."], "is no sweep"),
        (["--table", "--workdir=x", "--seeds=2"], "leave --config, --grid, --seeds"),
    ],
)
def test_bad_input(recipe, tmp_path, capsys, line, message):
    assert main(line) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert list(fingerprint(tmp_path)) == ["tiny.py"]


# ---------------------------------------------------------------------------------------------------------------------
# Real training


def wait_until(happened, patience=300):
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_kills_and_stops_change_nothing_that_is_trained(tmp_path):
    """A cell and then the sweep are killed, the next one is stopped by Ctrl-C; two go on at once. 50 s."""
    write_recipe(tmp_path)
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [
        *("pe_lab.sweep", "--config=tiny.py", "--seeds=2", "--jobs=1", "--workdir=sweep"),
        *("--config.phases.0.steps=300", "--config.checkpoint.every_steps=100"),
        "--config.log.validate_every_steps=100",
    ]
    sweep = tmp_path / "sweep"

    def steps(seed: int) -> int:
        file = sweep / f"seed={seed}" / "pretrain" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def trainer(seed: int) -> int:
        return json.loads((sweep / f"seed={seed}" / "lease.json").read_text())["pid"]

    # 1. A cell is killed: it counts as stopped, and the other one goes on.
    first = start(command, tmp_path, **kept)
    wait_until(lambda: steps(0) > 120)
    os.kill(trainer(0), signal.SIGKILL)
    wait_until(lambda: steps(1) > 20)
    assert read_outcome(sweep, "seed=0")["status"] == -signal.SIGKILL
    # 2. The sweep is killed: the cell trains on, and the next sweep waits for it.
    first.kill()
    first.wait()
    orphan = trainer(1)
    second = start(command, tmp_path, **kept)
    # 3. Ctrl-C: the cell saves.
    wait_until(lambda: steps(0) > 140 or second.poll() is not None)
    second.send_signal(signal.SIGINT)
    (out,) = finish([second], status=75)
    assert "SIGINT: the cells save and end" in out and "the same command continues" in out, out
    # 4. Two at once share what is left.
    both = finish([start(command, tmp_path, **kept) for _ in range(2)])
    assert all("2 of 2 cells complete" in out for out in both), both
    assert not Path(f"/proc/{orphan}").exists()
    # As if nothing had happened.
    alone = [*command[:2], "--config.seed=0", "--config.data.seed=0", *command[5:8]]
    alone[0] = "pe_lab.train"
    finish([start([*alone, "--workdir=alone"], tmp_path, **kept)])
    for phase, step in (("pretrain", 300), ("recalibrate", 6)):
        ours, theirs = (
            arrays(where / phase / "checkpoints" / str(step), "params")
            for where in (sweep / "seed=0", tmp_path / "alone")
        )
        assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    table = (sweep / "table.md").read_text()
    assert "validation loss" in table and "± " in table
    assert as_dict(json.loads((sweep / "sweep.json").read_text()))["seeds"] == [0, 1]


@pytest.mark.slow
def test_a_sweep_on_an_object_store(gcs_bucket, recipe, capsys, monkeypatch):  # noqa: F811
    """One run of an epoch's steps, with its evaluation. 35 s."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    Path("text.txt").write_text("abcdefghij\n" * 400)
    phase = "[{'name': 'only', 'epochs': 1, 'sequence_length': 16, 'batch_size': 64, 'optimizer': {'warmup_steps': 0}}]"
    command = [
        *("--config=tiny.py", "--seeds=1", f"--workdir={gcs_bucket.url}/sweep", f"--config.phases={phase}"),
        *("--config.data.sources=[{'source': 'text:text.txt'}]", "--evaluate=perplexity"),
        "--evaluate.lengths=1x",
    ]
    for _ in range(2):
        status, out = main(command), capsys.readouterr().out
        assert status == 0 and "1 of 1 cells complete" in out and "figure.png" in out and "log perplexity" in out, out
    names = gcs_bucket.names("sweep/")
    assert {"sweep.json", "logs/seed=0.log", "logs/seed=0.json", "report.html", "seed=0/run.json"} <= {
        name.removeprefix("sweep/") for name in names
    }
    assert not any(name.endswith(".lease") for name in names)


@pytest.mark.slow
def test_ray_runs_cells(tmp_path):
    """A Ray of its own on this machine: of two cells one fails and the other is stopped, and goes on. 40 s."""
    write_recipe(tmp_path)
    command = ["pe_lab.sweep", "--config=tiny.py", "--workdir=sweep", "--on=ray", "--ray-cpus=1", "--seeds=1"]
    command += ["--grid", "data.tokenizer=bytes,hf:missing.json", "--config.phases.0.steps=400"]
    command += ["--config.checkpoint.every_steps=200", "--config.log.validate_every_steps=200"]
    sweep, name = tmp_path / "sweep", "tokenizer=bytes__seed=0"
    environment = {"RAY_TMPDIR": "/tmp/pe_lab_ray", "RAY_USAGE_STATS_ENABLED": "0"}  # a socket's path has 107 letters
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    stopped = start(command, tmp_path, **environment)
    metrics = sweep / name / "pretrain" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 20)
    stopped.send_signal(signal.SIGINT)
    (out,) = finish([stopped], status=75)
    log = (sweep / "logs" / f"{name}.log").read_text()
    assert "SIGTERM: saving, then leaving" in log and "again: leaving" not in log, out + log
    # Where the failing cell was stopped too, before it failed, it fails now.
    (out,) = finish([start(command, tmp_path, **environment)], status=1)
    assert "1 of 2 cells complete, 1 FAILED" in out and "missing.json" in out, out
    assert (sweep / "logs" / f"{name}.log").read_text().count("== python -m pe_lab.train") == 2
    assert (sweep / "figure.png").exists()


@pytest.mark.slow
def test_stacked_cells_survive_a_kill_and_save_at_a_request_to_stop(recipe, tmp_path):
    """A process of two cells, twice; 80 s, mostly starts and compiling."""
    command = ["pe_lab.sweep", "--config=tiny.py", "--seeds=2", "--workdir=s", "--stack=2", "--jobs=1"]
    more = ["--config.checkpoint.every_steps=1", "--config.phases.0.steps=400"]
    sweep = start([*command, *more], tmp_path)
    newest = tmp_path / "s/seed=1/pretrain/checkpoints"
    while not (newest.is_dir() and any(int(p.name) > 3 for p in newest.iterdir() if p.name.isdigit())):
        assert sweep.poll() is None, sweep.communicate()[0]
        time.sleep(0.2)
    owner = json.loads((tmp_path / "s/seed=1/lease.json").read_text())["pid"]
    assert owner == json.loads((tmp_path / "s/seed=0/lease.json").read_text())["pid"]
    os.kill(owner, signal.SIGKILL)
    finish([sweep], 75)
    for seed in (0, 1):
        assert read_outcome(tmp_path / "s", f"seed={seed}")["status"] == -signal.SIGKILL
    # Both go on, and save at a request to stop.
    sweep = start([*command, *more], tmp_path)
    before = max(int(p.name) for p in newest.iterdir() if p.name.isdigit())
    while max([int(p.name) for p in newest.iterdir() if p.name.isdigit()], default=0) <= before + 2:
        assert sweep.poll() is None, sweep.communicate()[0]
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    out = finish([sweep], 75)[0]
    assert "stack of 2: seed=0, seed=1" in out and "stopped" in out
    steps = [max(int(p.name) for p in (tmp_path / f"s/seed={seed}/pretrain/checkpoints").iterdir()) for seed in (0, 1)]
    assert steps[0] == steps[1] < 400
    log = (tmp_path / "s/logs/seed=0.log").read_text()
    assert f"stopped at step {steps[0]} of 400" in log and "resuming at step" in log
    assert "== stacked: seed=0, seed=1" in log and "s/seed=1" not in log
    ledger = [json.loads(line) for line in (tmp_path / "s/seed=0/ledger.jsonl").read_text().splitlines()]
    assert ledger[-1]["start"] == 2
    run = json.loads((tmp_path / "s/seed=0/run.json").read_text())
    assert run["command"].startswith("python -m pe_lab.train --config=tiny.py")
