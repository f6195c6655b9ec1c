"""A sample of the fuzzer: every input is accepted, or refused by one message."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest
from fuzz.__main__ import GOOD, OUTCOMES, Hang, outcome
from fuzz.kinds import KINDS, Kind, inputs
from fuzz.mutations import damage_bytes, damage_json
from tiny_runs import REPOSITORY

from pe_lab.errors import DataError

EACH = {
    "checkpoint JSON": 10,
    "GGUF": 30,
    "config.json": 10,
    "safetensors": 40,
    "run": 3,
    "sweep": 8,
}  # those that take longer


LONGEST = ("run", "sweep", "checkpoint JSON")


@pytest.mark.parametrize("name", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LONGEST)) for kind in KINDS])
def test_a_sample_of_damaged_inputs_is_accepted_or_refused(tmp_path, name):
    """The intact input is read by `inputs`, so that a kind whose real files are refused fails here."""

    def late(*_: object) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, late)
    try:
        for number, kind in enumerate(inputs(name, tmp_path, 7, 0, EACH.get(name, 60))):
            signal.alarm(20)
            letter, why = outcome(kind)
            signal.alarm(0)
            assert letter in GOOD, f"{name} {number}: {OUTCOMES[letter]}\n{why}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def test_outcomes_are_told_apart():
    def of(error: BaseException | None) -> str:
        class One(Kind):
            def prepare(self, directory): ...

            def write(self, rng): ...

            def read(self):
                if error is not None:
                    raise error

        return outcome(One())[0]

    errors = [
        None,
        DataError("no"),
        DataError("two\nlines"),
        DataError(""),
        KeyError(),
        MemoryError(),
        Hang(),
        SystemExit(),
    ]
    assert "".join(map(of, errors)) == "areeemhe"


def test_damage_is_a_function_of_the_seed_and_damages():
    data, value = bytes(range(256)) * 8, {"a": [1, {"b": "c"}], "d": None}
    for damage, whole in ((damage_bytes, data), (damage_json, value)):
        made = [damage(random.Random(n), whole) for n in range(200)]
        assert made == [damage(random.Random(n), whole) for n in range(200)]
        assert len({str(one) for one in made}) > 150 and value == {"a": [1, {"b": "c"}], "d": None}


@pytest.mark.slow
def test_many_inputs_under_a_limit_of_memory_and_of_time():
    """4,500 inputs in child processes: 90 s."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs=4500", "--seed=2", "--log=build/fuzz_test.log"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
