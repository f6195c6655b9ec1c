"""The ledger of a run's time: its buckets add up to wall time, over kills too."""

import json
import os
import subprocess
import sys
import time

import pytest
from tiny_runs import records, start, write_recipe

from pe_lab.training.ledger import BUCKETS, Ledger, balance, process_age, read_ledger


@pytest.mark.slow
def test_the_age_of_a_process_is_counted_from_its_creation():
    script = "import time; time.sleep(0.5); from pe_lab.training.ledger import process_age; print(process_age())"
    begun = time.monotonic()
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 0.5 <= float(out) <= time.monotonic() - begun + 0.02
    assert process_age() > 0


def test_seconds_are_in_the_bucket_of_their_block(tmp_path):
    path = tmp_path / "ledger.jsonl"
    age = process_age()
    ledger = Ledger(path, age)
    assert not path.exists() and not ledger.start
    ledger.open()
    for step in (1, 2):
        ledger.begin_step("a", step)
        time.sleep(0.05)
        with ledger.time("data_wait"):
            time.sleep(0.1)
        time.sleep(0.05)
    ledger.end_steps()
    ledger.begin_step("a", 2)  # after a rewind
    time.sleep(0.07)
    closing = process_age()
    ledger.close()
    lived = process_age()
    assert ledger.start == 1
    seconds = balance(read_ledger(path)).seconds
    # A sleep is never shorter than asked for, and on a busy machine longer; the sum is exact, to ticks of the clock.
    assert seconds["start_up"] >= age and seconds["data_wait"] >= 0.2
    assert seconds["step"] >= 0.2 and seconds["replayed_steps"] >= 0.07
    assert {bucket for bucket in BUCKETS if not seconds[bucket]} == {
        "compile", "validation", "suites", "save_blocking", "restore", "down"
    }  # fmt: skip
    assert closing - 0.02 <= sum(seconds.values()) <= lived + 0.02


def test_the_balance_of_a_run_that_was_killed():
    """Two starts by hand: 30 s, a kill 4 s after the last record, and a second start a minute later."""
    written = [
        {"start": 1, "created": 1000.0, "time": 1010.0, "seconds": {"start_up": 6.0, "compile": 4.0}},
        {"start": 1, "created": 1000.0, "time": 1026.0, "phase": "a", "step": 9, "seconds": {"step": 16.0}},
        {"start": 2, "created": 1086.0, "time": 1094.0, "seconds": {"start_up": 7.0, "restore": 1.0}},
        {"start": 2, "created": 1086.0, "time": 1100.0, "seconds": {"replayed_steps": 2.0, "step": 4.0}},
    ]
    found = balance(written)
    assert found.wall == 100.0 and found.goodput == pytest.approx(0.2)
    assert [start.get("down", 0.0) for start in found.starts] == [0.0, 60.0]
    assert str(found).startswith("100.0 s in 2 starts, goodput 20.0%: down 60.0%, step 20.0%, start up 13.0%")


def test_a_ledger_goes_on_after_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = {"start": 1, "created": 1.0, "time": 2.0, "phase": "a", "step": 7, "seconds": {"step": 1.0}}
    path.write_text(json.dumps(first) + '\n{"start": 1, "cre')
    ledger = Ledger(path)
    ledger.open()
    ledger.begin_step("a", 7)
    time.sleep(0.02)
    ledger.begin_step("a", 8)
    time.sleep(0.02)
    ledger.close()
    found = read_ledger(path)
    assert found[0] == first and {record["start"] for record in found[1:]} == {2}
    last = balance(found).starts[1]
    assert last["replayed_steps"] > 0.01 and last["step"] > 0.01


@pytest.mark.slow
def test_the_buckets_add_up_to_wall_time_over_kills(tmp_path):
    """A run of real processes with two SIGKILLs: 45 s."""
    recipe = write_recipe(tmp_path / "recipe")
    argv = [
        "pe_lab.train",
        f"--config={recipe}",
        "--workdir=run",
        "--config.phases.0.steps=2400",
        "--config.checkpoint.every_steps=400",
        "--config.log.validate_every_steps=400",
    ]
    path = tmp_path / "run/ledger.jsonl"

    def reached(step: int) -> bool:
        log = tmp_path / "run/pretrain/metrics.jsonl"
        return log.exists() and log.read_bytes().count(b"\n") >= step

    begun, started = time.time(), None
    for step in (700, 1500):
        process = start(argv, tmp_path)
        started = started or time.time()
        while not reached(step):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.kill()
        process.communicate()
        time.sleep(2)
    process = start(argv, tmp_path)
    out = process.communicate(timeout=300)[0]
    ended = time.time()
    assert process.returncode == 0, out
    found = balance(read_ledger(path))
    assert len(found.starts) == 3
    # The last process writes its last record before Python ends, and its creation is the begin of the wall time.
    last = records(path)[-1]["time"]
    assert last <= ended
    assert last - started - 0.1 <= found.wall <= last - begun + 0.1
    assert all(seconds >= 0 for start in found.starts for seconds in start.values())
    never = {bucket for bucket in BUCKETS if not found.seconds[bucket]}
    assert never == {"suites"}  # it measures none; and it was killed between checkpoints
    for one in found.starts[1:]:
        assert one["down"] >= 2.0 and one["replayed_steps"] > 0
    assert f"goodput {found.goodput:.1%}" in out and "in 3 starts" in out
    assert os.path.getsize(path) < 200_000
