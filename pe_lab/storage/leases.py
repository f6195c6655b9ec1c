"""Leases: files by which of several processes, perhaps on several hosts, one works in a directory."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pe_lab.errors import DataError, UserError
from pe_lab.storage.files import create_file, replace_file
from pe_lab.storage.json_files import json_object
from pe_lab.storage.paths import AnyPath, is_full, read_bytes, remove

RENEWED_SECONDS = 15.0  # between two renewals of a lease
EXPIRY_SECONDS = 60.0  # without a renewal, after which its process counts as dead
_active: set[str] = set()  # the keys of the leases that this process has


class LeaseTaken(Exception):
    """A process that is alive has the lease. `owner` names it: `process 17 on HOST`."""

    def __init__(self, owner: str):
        super().__init__(owner)
        self.owner = owner


@contextlib.contextmanager
def lease(
    path: AnyPath, show: Callable[[str], None], lost: Callable[[str], None], kept_after_errors: bool = False
) -> Iterator[bool]:
    """Takes a lease for the block, and yields whether a dead process had it.

    The file names the process, and is renewed every `RENEWED_SECONDS`. A lease whose process has ended is taken at once
    where that can be told (see `owner_lives`); any other one, if it is not renewed for `EXPIRY_SECONDS`.

    Args:
      show: prints a line, before this process waits to learn whether another one is alive.
      lost: called from a thread with a message, if another process has taken the lease or it cannot be renewed.
      kept_after_errors: whether the file stays if the block raises, as the lease of a dead process.

    Raises:
      LeaseTaken: another process has the lease.
      DataError, StoreError: the file cannot be written.
    """
    owner = _this_process() | {"key": secrets.token_hex(8)}
    content, inherited = _content(owner, 0), False
    _active.add(owner["key"])  # before the file: another thread of this process may read it at once
    try:
        while not create_file(path, content):
            found = _dead_lease(path, show)
            if found is not None and replace_file(path, content, expected=found):
                inherited = True
                break
    except BaseException as error:
        _active.discard(owner["key"])
        if not isinstance(error, OSError):
            raise
        advice = "Free some space." if is_full(error) else "Change the permissions of the directory, or give another."
        why = error.strerror or error
        raise DataError(f"The lease '{path}' cannot be written ({why}). {advice}") from None
    ended, keeps = threading.Event(), kept_after_errors

    def renew() -> None:
        nonlocal content
        number, last = 0, time.monotonic()
        while not ended.wait(RENEWED_SECONDS):
            number += 1
            try:
                renewed = _content(owner, number)
                if not replace_file(path, renewed, expected=content):
                    return lost(f"Another process has taken the lease '{path}': this one stops.")
                content, last = renewed, time.monotonic()
            except (UserError, OSError) as error:
                if is_full(error):  # nobody else can write a lease either; if one could, it is found above
                    last = time.monotonic()
                if time.monotonic() - last > EXPIRY_SECONDS:
                    return lost(f"The lease '{path}' cannot be renewed: {error}")

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        yield inherited
        keeps = False
    finally:
        ended.set()
        renewing.join()
        _active.discard(owner["key"])
        with contextlib.suppress(UserError, OSError):
            if not keeps and read_bytes(path) == content:
                remove(path)


def lease_is_live(path: AnyPath, show: Callable[[str], None]) -> bool:
    """Whether a process that is alive has a lease. Where that cannot be told, this waits up to `EXPIRY_SECONDS`."""
    try:
        _dead_lease(path, show)
    except LeaseTaken:
        return True
    return False


def owner_lives(owner: Mapping[str, Any]) -> bool | None:
    """Whether the process that a lease names is alive; None where this process cannot tell, and its renewals do.

    A process number means something to processes of one kernel and one pid namespace alone; containers may share a host
    name.
    """
    if owner.get("key") in _active:
        return True
    pid, here = owner.get("pid"), _this_process()
    names = ("host", "boot", "namespace")
    if not isinstance(pid, int) or not here["boot"] or any(owner.get(name) != here[name] for name in names):
        return None
    if pid == here["pid"]:
        return False  # of an earlier process of that number, or an earlier lease of this one
    try:
        state, started = _status(pid)
    except OSError:
        try:
            os.kill(pid, 0)  # sends nothing
        except ProcessLookupError:
            return False
        except OSError:
            pass
        return None  # /proc hides the processes of other users
    if started != owner.get("started"):
        return False
    return None if state in "ZX" else True  # it has ended, though what it writes may not have


def _content(owner: Mapping[str, Any], number: int) -> bytes:
    """The content of a lease at its renewal of that number."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return json.dumps({**owner, "renewal": number, "time": now}).encode()


def _this_process() -> dict[str, Any]:
    """A name of this process alone, also among containers and after a restart; "" for what the system does not tell."""
    named = {"host": socket.gethostname(), "pid": os.getpid(), "boot": "", "namespace": "", "started": ""}
    with contextlib.suppress(OSError, ValueError, IndexError):
        # /proc may be that of another pid namespace, whose numbers are others.
        if int(Path("/proc/self/stat").read_text().split()[0]) == os.getpid():
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space, started = os.readlink("/proc/self/ns/pid"), _status(os.getpid())[1]
            named |= {"boot": boot, "namespace": space, "started": started}
    return named


def _status(pid: int) -> tuple[str, str]:
    """The state of a process, a letter, and when it started, in ticks since the machine's boot (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _dead_lease(path: AnyPath, show: Callable[[str], None]) -> bytes | None:
    """The content of a lease whose process has ended, None without a lease; `LeaseTaken` if the process is alive."""
    try:
        found = read_bytes(path)
    except FileNotFoundError:
        return None
    owner = json_object(found) or {}
    name = f"process {owner['pid']} on {owner.get('host')}" if "pid" in owner else "another process"
    taken, lives = LeaseTaken(name), owner_lives(owner)
    if lives is not None:
        if lives:
            raise taken
        return found
    deadline = time.monotonic() + EXPIRY_SECONDS
    show(f"{path} is of {name}: waiting {EXPIRY_SECONDS:.0f} s at most to see whether it is alive")
    while time.monotonic() < deadline:
        time.sleep(min(1.0, EXPIRY_SECONDS / 10))
        try:
            if read_bytes(path) != found:
                raise taken
        except FileNotFoundError:
            return None
    return found
