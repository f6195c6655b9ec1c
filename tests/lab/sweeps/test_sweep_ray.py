"""What a sweep asks of Ray, with a stand-in for it; `test_sweep.py` has one that is real."""

from types import SimpleNamespace

import pytest

from pe_lab.errors import DataError
from pe_lab.lab.sweeps import runners
from pe_lab.lab.sweeps.running import CellTask, Stop


class StandIn:
    """Workers whose tasks end at once, with a status or an error by name, or when they are cancelled twice."""

    def __init__(self, ends):
        self.ends, self.got, self.cancelled, self.stop = ends, [], [], Stop()

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, **options):
        return lambda function: SimpleNamespace(remote=lambda task: task.name)

    def wait(self, references, num_returns=1, timeout=None):
        if "endless" in references and len(self.cancelled) < 2:
            self.stop.requests += 1
            return [], references
        return references, []

    def cancel(self, reference):
        self.cancelled.append((reference, self.stop.requests))

    def get(self, reference):
        self.got.append(reference)
        if isinstance(self.ends[reference], Exception):
            raise self.ends[reference]
        return self.ends[reference]


def run(monkeypatch, ends):
    workers = StandIn(ends)
    monkeypatch.setattr(runners, "_installed", lambda package, on: workers)
    tasks = [CellTask("sweep", name, {"only": 1}, ["train"]) for name in ends]
    return workers, lambda: runners.Ray({}, jobs=1).run(tasks, workers.stop, lambda *_: None)


def test_a_cell_that_whose_lease_cannot_be_taken_stops_no_other(monkeypatch):
    raised = type("RayTaskError", (DataError,), {"cause": DataError("The disk is full.")})("a traceback")
    workers, go = run(monkeypatch, {"a": raised, "b": 0})
    with pytest.raises(DataError, match="^The disk is full"):
        go()
    assert workers.got == ["a", "b"]


def test_each_request_to_stop_reaches_the_workers(monkeypatch):
    workers, go = run(monkeypatch, {"endless": 0})
    go()
    assert workers.cancelled == [("endless", 1), ("endless", 2)]
