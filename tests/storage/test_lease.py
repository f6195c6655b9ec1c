"""Leases: one process at a time, on a file system."""

import concurrent.futures
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import REPOSITORY

from pe_lab import storage
from pe_lab.errors import DataError
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
    with lease(tmp_path / LEASE, refuse, refuse):  # who waits says so, and is refused
        assert json.loads((tmp_path / LEASE).read_text())["pid"] == os.getpid()


HOLDS = """
import sys
from pathlib import Path
from pe_lab.storage import lease, leases
leases.RENEWED_SECONDS = 0.05
with lease(Path(sys.argv[1]), print, print):
    print("taken", flush=True)
    input()
"""


@pytest.fixture
def in_a_container(tmp_path):
    """Starts a process that has a lease, under this host's name, with process numbers of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no pid namespaces")
    processes = []

    def start():
        command = [*unshare, sys.executable, "-c", HOLDS, str(tmp_path / LEASE)]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_lease_of_another_container_with_this_hosts_name_is_taken_when_it_is_not_renewed(
    tmp_path, monkeypatch, in_a_container
):
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 60.0)  # the first renewal tells, much sooner
    process = in_a_container()
    assert process.stdout.readline() == "taken\n"
    owner = json.loads((tmp_path / LEASE).read_text())
    assert (owner["host"], owner["pid"]) == (os.uname().nodename, 1)
    with pytest.raises(LeaseTaken, match="process 1 on "), lease(tmp_path / LEASE, print, refuse):
        pass
    assert process.poll() is None
    process.kill()
    process.wait()
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 2.0)
    shown = []
    with lease(tmp_path / LEASE, shown.append, refuse) as inherited:
        assert inherited and "is of process 1 on" in shown[0]


def test_a_container_does_not_take_the_lease_of_its_host(tmp_path, in_a_container):
    with lease(tmp_path / LEASE, print, refuse):
        process = in_a_container()
        assert "waiting 60 s at most" in process.stdout.readline()
        owner = json.loads((tmp_path / LEASE).read_text())
        assert owner["pid"] == os.getpid()


def dead_process() -> subprocess.Popen[bytes]:
    """A process that has ended, and whose parent has not asked how."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        ({}, True),
        ({"started": "0"}, False),  # another process has the number now
        ({"boot": "another boot"}, None),
        ({"namespace": "pid:[1]"}, None),
        ({"host": "elsewhere"}, None),
        ({"boot": "", "namespace": "", "started": ""}, None),  # of a system without /proc
        ({"pid": "7"}, None),
    ],
)
def test_a_process_is_known_to_live_or_to_be_dead_where_its_number_means_something(change, lives):
    with subprocess.Popen(["sleep", "60"]) as process:
        started = module._status(process.pid)[1]
        owner = module._this_process() | {"pid": process.pid, "started": started, "key": "k"}
        assert module.owner_lives(owner | change) is lives
        process.kill()
    assert module.owner_lives(owner | change) is (None if lives is None else False)


def test_of_a_process_that_nobody_has_waited_for_its_renewals_tell():
    process = dead_process()
    state, started = module._status(process.pid)
    assert state == "Z"
    owner = module._this_process() | {"pid": process.pid, "started": started}
    assert module.owner_lives(owner) is None
    process.wait()
    assert module.owner_lives(owner) is False


def test_without_proc_the_renewals_of_a_lease_tell(monkeypatch):
    def absent(path: Path) -> str:
        raise FileNotFoundError(path)

    owner = module._this_process()
    monkeypatch.setattr(Path, "read_text", absent)
    assert module._this_process()["boot"] == "" and module.owner_lives(owner | {"pid": 1}) is None
    assert module.owner_lives(module._this_process()) is None


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


@pytest.fixture
def no_hard_links(monkeypatch):
    """As on FAT, and where a FUSE file system has none."""

    def link(source: Path, target: Path) -> None:
        if Path(target).exists():
            raise FileExistsError
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))

    monkeypatch.setattr("os.link", link)


def test_leases_need_no_hard_links(tmp_path, no_hard_links):
    with lease(tmp_path / LEASE, print, refuse):
        owner = json.loads((tmp_path / LEASE).read_text())
        assert owner["pid"] == os.getpid() and [path.name for path in tmp_path.iterdir()] == [LEASE]
        with pytest.raises(LeaseTaken), lease(tmp_path / LEASE, print, refuse):
            pass
    assert not list(tmp_path.iterdir())


def test_of_many_processes_one_creates_a_file(tmp_path, no_hard_links):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for number in range(20):
            path = tmp_path / str(number)
            created = list(pool.map(lambda n, path=path: create_file(path, b"%d" % n), range(8)))
            assert sum(created) == 1 and path.read_bytes() == b"%d" % created.index(True)


def test_a_lease_of_a_process_that_was_killed_before_it_wrote_its_name(tmp_path, monkeypatch, no_hard_links):
    monkeypatch.setattr(module, "EXPIRY_SECONDS", 0.3)
    (tmp_path / LEASE).touch()
    shown = []
    with lease(tmp_path / LEASE, shown.append, refuse) as inherited:
        assert inherited and "lease.json is of another process: waiting" in shown[0]


def test_a_lease_that_cannot_be_made_names_its_path(tmp_path, monkeypatch):
    def refused(*args: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(tmp_path / LEASE))

    monkeypatch.setattr("os.link", refused)
    monkeypatch.setattr("os.open", refused)
    failed = pytest.raises(DataError, match=r"lease.json' cannot be written \(Operation not permitted\)")
    with failed, lease(tmp_path / LEASE, print, refuse):
        pass


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
