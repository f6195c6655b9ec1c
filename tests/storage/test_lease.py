"""Leases: one process at a time, on a file system."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY

from pe_lab import storage
from pe_lab.storage import LeaseTaken, create_file, lease
from pe_lab.storage import leases as module

LEASE = "lease.json"


def refuse(message: str) -> None:
    raise AssertionError(message)


def test_a_second_process_is_refused_while_the_first_one_lives(tmp_path):
    with lease(tmp_path / LEASE, print, refuse):
        refused = pytest.raises(LeaseTaken, match=rf"process {os.getpid()} on ")
        with refused, lease(tmp_path / LEASE, print, refuse):
            pass
        assert (tmp_path / LEASE).exists()
    assert not (tmp_path / LEASE).exists()
    with lease(tmp_path / LEASE, print, refuse):
        pass


def test_the_lease_of_a_process_that_has_ended_here_is_taken_at_once(tmp_path):
    code = "import sys; from pathlib import Path; from pe_lab.storage import lease\n"
    code += "with lease(Path(sys.argv[1]) / 'lease.json', print, print):\n    print('taken', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    assert process.stdout.readline() == "taken\n"
    with pytest.raises(LeaseTaken, match=f"process {process.pid} on "), lease(tmp_path / LEASE, print, refuse):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    with lease(tmp_path / LEASE, refuse, refuse):
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < 1


def elsewhere(renewal: int) -> str:
    """The lease of a process on another host."""
    return json.dumps({"host": "elsewhere", "pid": 7, "started": "x", "renewal": renewal})


def test_the_lease_of_another_host_is_taken_when_it_is_not_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.3)
    (tmp_path / LEASE).write_text(elsewhere(1))
    shown = []
    with lease(tmp_path / LEASE, shown.append, refuse):
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()
    assert len(shown) == 1 and "is of process 7 on elsewhere: waiting" in shown[0]


def test_the_lease_of_another_host_that_is_renewed_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 5.0)
    (tmp_path / LEASE).write_text(elsewhere(1))
    renew = lambda line: (tmp_path / LEASE).write_text(elsewhere(2))  # noqa: E731
    with pytest.raises(LeaseTaken, match="process 7 on elsewhere"), lease(tmp_path / LEASE, renew, refuse):
        pass


def test_a_process_learns_that_its_lease_was_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RENEWED_SECONDS", 0.05)
    lost = []
    with lease(tmp_path / LEASE, print, lost.append):
        time.sleep(0.2)
        assert json.loads((tmp_path / LEASE).read_text())["renewal"] > 0 and not lost
        (tmp_path / LEASE).write_text(elsewhere(1))
        time.sleep(0.2)
    assert len(lost) == 1 and "Another process has taken the lease" in lost[0]
    assert (tmp_path / LEASE).read_text() == elsewhere(1)  # the other one's stays


@pytest.mark.parametrize(("code", "count"), [(errno.ENOSPC, 0), (errno.EIO, 1)])
def test_a_lease_outlasts_a_full_disk_and_no_other_failure(tmp_path, monkeypatch, code, count):
    """0.5 s each."""
    monkeypatch.setattr(module, "RENEWED_SECONDS", 0.05)
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.1)

    def fail(*args: object, **kwargs: object) -> bool:
        raise OSError(code, os.strerror(code))

    lost = []
    with lease(tmp_path / LEASE, print, lost.append):
        monkeypatch.setattr(module, "replace_file", fail)
        time.sleep(0.5)
    assert len(lost) == count


def test_what_a_full_disk_takes_no_part_of_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"1")

    def fail(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        storage.create_file(tmp_path / "new", b"2")
    with pytest.raises(OSError, match="No space left"):
        storage.replace_file(tmp_path / "file", b"2", expected=b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"1"


def test_a_lease_may_stay_after_an_error_and_is_then_a_dead_one(tmp_path):
    with pytest.raises(KeyError), lease(tmp_path / LEASE, print, refuse, kept_after_errors=True) as inherited:
        assert not inherited
        raise KeyError
    assert (tmp_path / LEASE).exists()
    with lease(tmp_path / LEASE, refuse, refuse, kept_after_errors=True) as inherited:
        assert inherited
    assert not (tmp_path / LEASE).exists()


def test_a_file_that_is_removed_while_another_is_created(tmp_path, monkeypatch):
    """The lease of a process that ends between the attempt to create one and the look at who has it."""
    path = tmp_path / LEASE
    path.write_bytes(b"theirs")

    def link(source, target):
        path.unlink()
        raise FileExistsError

    monkeypatch.setattr("os.link", link)
    assert not create_file(path, b"ours")
    monkeypatch.undo()
    assert create_file(path, b"ours") and path.read_bytes() == b"ours"
