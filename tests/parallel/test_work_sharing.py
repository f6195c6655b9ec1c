"""Pieces of work dealt to several processes: here threads, with a key-value store of their own."""

import threading
import time

import jax
import pytest

from pe_lab.errors import DataError
from pe_lab.parallel import first_then_others, is_first, on_first, one_program, processes, shared
from pe_lab.parallel.processes import deal


def test_every_process_gets_one_of_consecutive_pieces_and_an_equal_load():
    assert deal([1, 1, 1, 1, 1], 2) == [0, 1, 0, 1, 0]
    assert deal([], 3) == [] and deal([5, 4], 3) == [0, 1] and deal([3, 1, 2], 1) == [0, 0, 0]
    # The costliest of each round goes to the process that has had the least.
    assert deal([9, 1, 1, 9, 2, 8], 2) == [0, 1, 0, 1, 1, 0]
    costs = [float(n * 37 % 101) for n in range(200)]
    owners = deal(costs, 8)
    assert all(sorted(owners[start : start + 8]) == list(range(8)) for start in range(0, 200, 8))
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == p) for p in range(8)]
    assert max(loads) - min(loads) <= max(costs)


def test_one_process_computes_everything_lazily():
    done = []

    def compute(pieces):
        for piece in pieces:
            done.append(piece)
            yield piece * 10

    results = shared([1, 2, 3], compute)
    assert next(results) == 10 and done == [1]
    assert list(results) == [20, 30] and is_first() and on_first(lambda: 5) == 5 and first_then_others(lambda: 6) == 6
    with one_program(together=True):
        assert list(shared([4], compute)) == [40]


class Store:
    """The key-value store of `jax.distributed`, in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_set(self, key, value):
        self.key_value_set_bytes(key, value.encode())

    def key_value_try_get_bytes(self, key):
        with self.changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.values[key]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, 0.02):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} after {milliseconds}")
            return self.values[key]

    def key_value_increment(self, key, by):
        with self.changed:
            self.values[key] = self.values.get(key, 0) + by
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for name in [name for name in self.values if name == key or name.startswith(f"{key}/")]:
                del self.values[name]


class PerThread:
    """The `_SharedProgram` of each thread."""

    def __init__(self, local):
        object.__setattr__(self, "local", local)

    def __getattr__(self, name):
        return getattr(self.local.program, name)

    def __setattr__(self, name, value):
        setattr(self.local.program, name, value)


@pytest.fixture
def run(monkeypatch):
    """Runs a function in several processes; returns what each returned or raised, and what the store has left."""
    local, store = threading.local(), Store()
    monkeypatch.setattr(processes, "_program", PerThread(local))

    def connect(self, together):
        self.together = together

    monkeypatch.setattr(processes._SharedProgram, "connect", connect)
    monkeypatch.setattr(processes, "start_processes", lambda: None)
    monkeypatch.setattr(processes.contextlib, "redirect_stdout", processes.contextlib.nullcontext)

    def run(function, count, **options):
        found = [None] * count

        def process(index):
            local.program = processes._SharedProgram()
            local.program.client, local.program.index, local.program.count = store, index, count
            try:
                with one_program(**options):
                    found[index] = function(index)
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=process, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not any(thread.is_alive() for thread in threads)
        return found, store.values

    return run


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_get_all_results_in_order_and_each_piece_is_computed_once(run, count):
    done = []

    def command(index):
        def inner(pieces):
            return (piece + 1 for piece in pieces)

        def compute(pieces):
            for piece in pieces:
                done.append(piece)
                time.sleep(0.001 * ((piece + index) % 3))
                yield piece, list(shared([piece], inner))  # a list inside a piece is computed there

        first = list(shared(range(11), compute, [1.0 + n % 4 for n in range(11)]))
        name = on_first(lambda: f"from {index}")
        return first, name, list(shared([], compute)), list(shared([20], compute)), is_first()

    found, left = run(command, count)
    wanted = ([(n, [n + 1]) for n in range(11)], "from 0", [], [(20, [21])])
    assert [one[:4] for one in found] == [wanted] * count and [one[4] for one in found] == [True] + [False] * (
        count - 1
    )
    assert sorted(done) == [*range(11), 20]
    assert left == {}


def test_together_all_compute_everything(run):
    found, _ = run(
        lambda index: list(shared([1, 2], lambda pieces: [(index, piece) for piece in pieces])), 2, together=True
    )
    assert found == [[(0, 1), (0, 2)], [(1, 1), (1, 2)]]


def test_the_error_of_one_ends_all(run):
    def command(index):
        def compute(pieces):
            for piece in pieces:
                if piece == 3:
                    raise DataError("piece 3 is damaged")
                yield piece

        return list(shared(range(6), compute))

    found, _ = run(command, 2)
    assert [str(error) for error in found] == ["Process 1 of 2: piece 3 is damaged", "piece 3 is damaged"]
    assert all(isinstance(error, DataError) for error in found)


def test_another_error_names_the_process(run):
    def command(index):
        if index == 1:
            raise MemoryError("no more")
        return on_first(lambda: 1), list(shared([1, 2], lambda pieces: pieces))

    (first, second), _ = run(command, 2)
    assert str(first) == "Process 1 of 2 ended with MemoryError: no more" and isinstance(second, MemoryError)


def test_different_work_is_an_error_and_no_wait_without_end(run):
    found, _ = run(lambda index: list(shared(range(4 + index), lambda pieces: pieces)), 2)
    assert any("have different work" in str(error) for error in found)


def test_a_piece_cannot_ask_the_first_process(run):
    found, _ = run(lambda index: list(shared([1, 2], lambda pieces: (on_first(lambda: 0) for _ in pieces))), 2)
    assert any("inside a piece" in str(error) for error in found)


def test_files_are_made_by_the_first_process_and_found_by_the_others(run):
    made = []

    def open_data(index):
        if not made:
            time.sleep(0.01)
            made.append(index)
        return len(made)

    found, _ = run(lambda index: first_then_others(lambda: open_data(index)), 3)
    assert found == [1, 1, 1] and made == [0]
