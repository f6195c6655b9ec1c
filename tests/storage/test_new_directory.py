"""A directory that appears whole or not at all, with processes that are killed, that live and that race."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from tiny_runs import REPOSITORY

from pe_lab.errors import ConfigError
from pe_lab.storage import check_place, new_directory, unfinished

FILL = """
import pathlib, signal, sys
from pe_lab.storage import new_directory
with new_directory(pathlib.Path(sys.argv[1])) as building:
    (building / "half").write_text("half")
    print("filling", flush=True)
    signal.pause()
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that has begun to fill tmp_path/out."""
    command = [sys.executable, "-c", FILL, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "filling\n"
        yield process
        process.kill()


def test_a_finished_directory_is_renamed_and_a_failed_one_is_removed(tmp_path):
    path = tmp_path / "new" / "out"
    with pytest.raises(KeyError), new_directory(path) as building:
        (building / "file").write_text("x")
        assert unfinished(path) == [building] and not path.exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []  # nor are the parents left
    with new_directory(path) as building:
        (building / "file").write_text("x")
    assert [p.name for p in path.iterdir()] == ["file"] and unfinished(path) == []


def test_a_killed_processes_directory_is_removed_by_the_next(tmp_path, other_process):
    path = tmp_path / "out"
    (left,) = unfinished(path)
    other_process.kill()
    other_process.wait()
    assert left.is_dir()
    with new_directory(path):
        assert not left.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_living_processes_directory_is_left_alone(tmp_path, other_process):
    path = tmp_path / "out"
    (theirs,) = unfinished(path)
    with new_directory(path) as building:
        assert len(unfinished(path)) == 2 and building != theirs
    assert (theirs / "half").is_file()


def test_of_two_processes_the_first_to_finish_wins(tmp_path):
    path = tmp_path / "out"
    with new_directory(path, marker="done") as slow:
        (slow / "done").write_text("slow")
        with new_directory(path, marker="done") as fast:
            (fast / "done").write_text("fast")
    assert (path / "done").read_text() == "fast" and unfinished(path) == []
    with pytest.raises(ConfigError, match="'.*out' exists and is not empty"), new_directory(path):
        pass


def test_a_path_that_cannot_be_written_names_its_option(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(ConfigError, match="--out '.*' cannot be written"),
        new_directory(tmp_path / "file" / "x", "--out"),
    ):
        pass


def test_a_file_system_without_locks_abandons_nothing(tmp_path, other_process, monkeypatch):
    def refuse(error):
        def flock(descriptor, operation):
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(fcntl, "flock", flock)

    (theirs,) = unfinished(tmp_path / "out")
    refuse(errno.ENOLCK)
    with new_directory(tmp_path / "out") as building:
        (building / "file").write_text("x")
    assert (tmp_path / "out" / "file").is_file() and (theirs / "half").is_file()
    refuse(errno.EIO)
    with pytest.raises(ConfigError, match="Input/output error"), new_directory(tmp_path / "other"):
        pass
    assert not unfinished(tmp_path / "other")


def test_a_check_of_a_place_leaves_an_empty_directory_untouched(tmp_path, monkeypatch):
    """Another process that checks the same place, and finds a file there, would refuse it."""
    place = tmp_path / "out"
    place.mkdir()
    os.utime(place, ns=(0, 0))  # of a directory, changes with what is in it
    check_place("--out", place, new=True)
    check_place("--out", place / "new.json", file=True)
    assert place.stat().st_mtime_ns == 0
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # chmod means nothing to root
    for path, file in ((place, False), (place / "new.json", True)):
        with pytest.raises(ConfigError, match=r"--out '.*' cannot be written \(Permission denied\)"):
            check_place("--out", path, file=file)


@pytest.mark.parametrize("name", ["file", "file/below", "missing/" + "x" * 300, "x" * 300])
@pytest.mark.parametrize("file", [False, True])
def test_a_place_where_nothing_can_be_is_refused_and_nothing_is_left(tmp_path, name, file):
    (tmp_path / "file").touch()
    if name == "file" and file:
        check_place("--out", tmp_path / name, file=True)  # it is to be replaced
        return
    with pytest.raises(ConfigError, match="--out '.*' cannot be written"):
        check_place("--out", tmp_path / name, file=file)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
