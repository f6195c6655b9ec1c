"""Which cells train as one program, and stacks as processes under the leases of their cells."""

import os
import sys
import threading
import time

import pytest
from tiny_runs import write_recipe

from pe_lab.errors import ConfigError
from pe_lab.lab.sweeps import make_sweep, runners, running
from pe_lab.lab.sweeps.runners import Local, check_stack
from pe_lab.lab.sweeps.running import CellTask, StackTask, Stop, run_stack, run_sweep
from pe_lab.lab.sweeps.stacking import stack_cells
from pe_lab.lab.sweeps.state import file_of, read_outcome
from pe_lab.storage import lease

ADAM = "phases.0.optimizer"


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)

    def make(grid, seeds=(), **overrides):
        texts = {key.replace("__", "."): str(value) for key, value in overrides.items()}
        return make_sweep("tiny.py", grid, seeds, tmp_path / "sweep", texts).cells

    return make


def sizes(stacking):
    return [len(stack) for stack in stacking.stacks]


def test_cells_that_differ_in_arguments_alone_are_stacked(cells):
    rates = {f"{ADAM}.learning_rate": [1e-3, 1e-2], f"{ADAM}.weight_decay": [0.0, 0.1]}
    assert sizes(stack_cells(cells(rates, 2), 8)) == [8]
    shapes = {f"{ADAM}.warmup_steps": [0, 2], f"{ADAM}.schedule": ["cosine", "constant"], "phases.0.steps": [4, 8]}
    assert sizes(stack_cells(cells(shapes), 8)) == [8]
    # Two bases are one structure; NoPE, ALiBi and a window are others, each of two seeds.
    kinds = ["rope", "rope:base=500", "nope", "alibi", "rope/window=8"]
    found = stack_cells(cells({"phases.0.positional": kinds}, 2), 8)
    assert sizes(found) == [4, 2, 2, 2] and found.alone == {}
    # As equal as they can be, and nobody is alone.
    assert sizes(stack_cells(cells({}, 5), 4)) == [2, 3]
    assert sizes(stack_cells(cells({}, 4), 2)) == [2, 2]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model.d_ff", [32, 48]),
        ("phases.0.batch_size", [4, 8]),
        ("phases.1.sequence_length", [16, 32]),
        (f"{ADAM}.name", ["adamw", "muon"]),
        (f"{ADAM}.b2", [0.95, 0.99]),
        ("phases.0.random_positions", [0, 64]),
        ("data.segments", [False, True]),
        ("phases.1.qk_norm", ["head", "none"]),
    ],
)
def test_cells_that_are_compiled_differently_are_not(cells, key, values):
    made = cells({key: values})
    found = stack_cells(made, 2)
    assert found.stacks == () and set(found.alone) == {cell.name for cell in made}
    assert all(f"no other cell has its {key}=" in why for why in found.alone.values())
    assert sizes(stack_cells(cells({key: values}, 2), 4)) == [2, 2]


def test_why_a_cell_trains_alone(cells):
    learning = "{'teacher': 'runs/x', 'logits': 1.0}"
    found = stack_cells(cells({}, 2, phases__1__distill=learning), 2)
    assert str(found).splitlines() == [f"alone: seed={n} (phase 'recalibrate' learns from a teacher)" for n in (0, 1)]
    assert "alone: seed=0 (there is no other cell)" in str(stack_cells(cells({}, [0]), 2))
    assert "alone: seed=2 (left over by --stack=1)" in str(stack_cells(cells({}, 3), 1))
    assert str(stack_cells(cells({}, 2), 2)) == "stack of 2: seed=0, seed=1"
    for place in ("slurm", "ray"):
        with pytest.raises(ConfigError, match=f"leave out --on={place}"):
            check_stack(2, place)
    check_stack(1, "slurm")


# Stands in for `pe_lab.train --stack=FILE`: a cell ends as its first argument says.
STAND_IN = """
import json, pathlib, signal, sys, time
file = pathlib.Path(sys.argv[1].partition("=")[2])
runs, statuses, stopped = json.loads(file.read_text()), {}, []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
for name, one in runs.items():
    run, how = pathlib.Path(one["arguments"][1]), one["arguments"][0]
    run.mkdir(parents=True, exist_ok=True)
    (run / "ready").write_text(str(len(runs)))
    while how == "waits" and not stopped:
        time.sleep(0.01)
    if how == "dies":
        sys.exit("error: the process ends")
    if how == "fails":
        open(one["log"], "a").write("error: The loss is nan.\\n")
    if how == "trains":
        (run / "only").mkdir(exist_ok=True)
        (run / "only" / "phase.json").write_text(json.dumps({"status": "complete", "steps": 3}))
    statuses[name] = {"fails": 1, "trains": 0, "waits": 75}[how]
    file.with_suffix(".status").write_text(json.dumps(statuses))
sys.exit(max(statuses.values()))
"""


@pytest.fixture
def stack(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.1)
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN)
    start = running._process

    def process(command, *rest):
        if command[1:3] == ["-m", "pe_lab.train"]:
            command = [sys.executable, "-S", str(stand_in), command[3]]
        return start(command, *rest)

    monkeypatch.setattr(running, "_process", process)

    def make(evaluate=None, **hows):
        tasks = []
        for name, how in hows.items():
            train = [sys.executable, "-m", "pe_lab.train", how, str(tmp_path / name)]
            before = read_outcome(tmp_path, name)
            tasks.append(CellTask(str(tmp_path), name, {"only": 3}, train, evaluate, evaluate, before, str(tmp_path)))
        return StackTask(tuple(tasks))

    return make


def outcomes(directory, *names):
    found = [read_outcome(directory, name) for name in names]
    return [(one.get("status"), one.get("error")) for one in found]


def test_each_cell_of_a_stack_has_its_own_outcome_and_log(stack, tmp_path):
    assert run_stack(stack(a="trains", b="fails", c="trains"), Stop()) == ()
    assert outcomes(tmp_path, "a", "b", "c") == [(0, ""), (1, "The loss is nan."), (0, "")]
    log = file_of(tmp_path, "b", "log").read_text()
    assert log.startswith("== python -m pe_lab.train fails") and "== stacked: a, b, c\n" in log
    assert not list((tmp_path / "logs").glob("*.lease"))
    # What is complete, or has failed, is not trained again.
    (tmp_path / "a/ready").unlink()
    run_stack(stack(a="trains", d="trains"), Stop())
    assert not (tmp_path / "a/ready").exists() and (tmp_path / "d/ready").read_text() == "1"


def test_a_process_that_ends_says_so_of_the_cells_without_a_status(stack, tmp_path):
    run_stack(stack(a="trains", b="dies", c="trains"), Stop())
    assert outcomes(tmp_path, "a", "b", "c") == [(0, ""), *[(1, "the process ends")] * 2]
    assert "error: the process ends" in file_of(tmp_path, "a", "stack.log").read_text()


def test_a_stack_is_evaluated_cell_by_cell(stack, tmp_path):
    evaluate = [sys.executable, "-S", "-c", "print('scored')"]
    run_stack(stack(evaluate, a="trains", b="fails"), Stop())
    assert read_outcome(tmp_path, "a")["evaluated"] == [evaluate] and read_outcome(tmp_path, "b")["evaluated"] == []
    assert "scored" in file_of(tmp_path, "a", "log").read_text()


def test_cells_of_another_sweep_are_left_to_it_and_a_stop_reaches_the_stack(stack, tmp_path):
    task = stack(a="trains", b="waits", c="trains")
    with lease(file_of(tmp_path, "a", "lease"), print, print):
        stop, found = Stop(), []
        thread = threading.Thread(target=lambda: found.extend(run_stack(task, stop)))
        thread.start()
        while not (tmp_path / "b/ready").exists():
            time.sleep(0.01)
        stop.requests = 1
        thread.join()
    assert [one.name for one in found] == ["a"] and read_outcome(tmp_path, "a") == {}
    assert outcomes(tmp_path, "b", "c") == [(os.EX_TEMPFAIL, ""), (0, "")]
    assert (tmp_path / "b/ready").read_text() == "2"


def test_a_sweep_says_its_stacks_and_trains_them(cells, tmp_path, monkeypatch):
    made = make_sweep("tiny.py", {"model.d_ff": [32, 48]}, 3, tmp_path / "sweep")
    ran, lines = [], []

    def run(task, *how):
        ran.append(task.names)
        return () if isinstance(task, StackTask) else 0

    monkeypatch.setattr(runners, "run_stack", run)
    monkeypatch.setattr(runners, "run_task", run)
    run_sweep(made, Local(1), stack=2, show=lines.append)
    assert sorted(map(len, ran)) == [1, 1, 2, 2] and len({name for names in ran for name in names}) == 6
    told = lines[0].splitlines()
    assert told[0] == "stack of 2: d_ff=32__seed=1, d_ff=32__seed=2"
    assert told[2:] == [f"alone: d_ff={width}__seed=0 (left over by --stack=2)" for width in (32, 48)]
    ran.clear()
    run_sweep(made, Local(1), show=lines.append)
    assert [len(names) for names in ran] == [1] * 6 and len(lines) == 1
