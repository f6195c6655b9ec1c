"""A process of several that dies without a word: the others say which one, and end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from pe_lab.output import tell_at_once

BEAT_SECONDS = 3.0
LOST_SECONDS = 25.0  # without a beat
ALIVE = "pe_lab/alive"


class _Watch:
    """Tells the others through the key-value store of `jax.distributed` that this process lives, and watches them."""

    def __init__(self, client: Any, index: int, count: int):
        self._client, self._index, self._count = client, index, count
        now = time.monotonic()
        self._beats = dict.fromkeys(range(count), ("", now))  # the last beat of each process, and when it was seen
        self._hosts: dict[int, str] = {}
        self._lock, self._done = threading.Lock(), threading.Event()
        self._unreachable = 0
        self._thread = threading.Thread(target=self._run, name="lost processes", daemon=True)

    def start(self) -> None:
        self._set(f"{ALIVE}/host/{self._index}", socket.gethostname())
        self._thread.start()
        if self._index:
            # Without process 0, which serves the store, XLA's client aborts this process with a stack of addresses. It
            # calls no function of Python's before, so abort's own signal is taken, in the thread that aborts.
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
            libc = ctypes.CDLL(None)
            libc.signal.restype = ctypes.c_void_p
            libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
            self._restore = libc.signal, libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def stop(self) -> None:
        if self._index:
            set_handler, before = self._restore
            set_handler(signal.SIGABRT, before)
        self._done.set()
        self._thread.join()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f"{ALIVE}/beat/{self._index}", "done")

    def _set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def _run(self) -> None:
        number = 0
        while not self._done.wait(BEAT_SECONDS):
            number += 1
            try:
                self._set(f"{ALIVE}/beat/{self._index}", str(number))
                beats = dict(self._client.key_value_dir_get(f"{ALIVE}/beat"))
                if len(self._hosts) < self._count:
                    hosts = self._client.key_value_dir_get(f"{ALIVE}/host")
                    self._hosts = {int(key.rpartition("/")[2]): host for key, host in hosts}
                self._unreachable = 0
            except jax.errors.JaxRuntimeError:
                self._unreachable += 1  # process 0 serves the store
                beats = {}
            self._look({int(key.rpartition("/")[2]): beat for key, beat in beats.items()})

    def _look(self, beats: dict[int, str]) -> None:
        now, lost = time.monotonic(), []
        for process in range(self._count):
            beat, seen = self._beats[process]
            if beats.get(process, beat) != beat:
                self._beats[process] = beats[process], now
            elif process != self._index and beat != "done" and now - seen > LOST_SECONDS:
                lost.append(process)
        if self._unreachable >= 2 and self._index:
            lost = [0]
        if lost:
            self.end(lost)

    def _aborted(self, number: int) -> None:
        host, _, port = distributed.global_state.coordinator_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError:
            self.end([0])  # else it is another abort, which goes on

    def end(self, lost: list[int]) -> None:
        """Ends this process: collective operations with a lost process never return."""
        with self._lock:  # the thread or the main thread, one of them
            names = ", ".join(f"process {n} on {self._hosts.get(n, 'an unknown host')}" for n in lost)
            text = f"lost {names}: it ended without a word, or its host or network is down. Run the command again."
            tell_at_once(text)
            os._exit(os.EX_TEMPFAIL)

    def wait_for_lost(self) -> None:
        """Waits until a lost process is known, and ends this one; returns if all live."""
        self._done.wait(LOST_SECONDS + 3 * BEAT_SECONDS)


@contextlib.contextmanager
def lost_processes() -> Iterator[None]:
    """For the block, watches the other processes of `start_processes`: if one dies, this one ends with status 75.

    The message says which process was lost, and its host. The error of an operation that a lost process took part in
    is replaced by that message.
    """
    state = distributed.global_state
    if state.client is None:
        yield
        return
    watch = _Watch(state.client, state.process_id, state.num_processes)
    watch.start()
    try:
        yield
    except (RuntimeError, OSError):
        watch.wait_for_lost()
        raise
    finally:
        watch.stop()
