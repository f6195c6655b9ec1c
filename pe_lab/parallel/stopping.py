"""What ends a process: SIGTERM and SIGINT, the notice of a cloud that takes the machine away, a peer that is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from pe_lab.output import tell_at_once
from pe_lab.parallel.processes import coordination

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 1.0  # within which a signal that comes again is the same request: make and timeout both pass it on
PATIENCE = 10.0  # seconds; a program that compiles for longer than that is ended, where there is nothing to save
BEAT_SECONDS = 3.0
LOST_SECONDS = 25.0  # without a beat
ALIVE = "pe_lab/alive"
NOTICES = {"preempted": ("TRUE",), "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE",)}


class Stopped(KeyboardInterrupt):
    """The command was asked to stop. Its state is saved, and the same command continues from it.

    It is no `Exception`: what handles errors, such as that of a damaged file, lets it pass.
    """


class StopRequests:
    """The signals of this process. The first asks it to stop, the second ends it at once, with 128 and its number.

    The first one again, within `SAME_SECONDS`, is no second one.

    Python runs a signal's handler between two steps of the main thread, which may be inside a compiler for minutes.
    So a thread reads the signals too. Where the main thread does not look at `received` by itself (`can_save`), the
    signal raises `Stopped` in it, or ends the process with status 75 after `PATIENCE` seconds.
    """

    whole_process = True  # whether a request is one to end the process

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal
        self.can_save = False  # whether the main thread saves before it stops
        self.agreed = False  # whether several processes have agreed to stop
        self.raised = False  # whether `Stopped` was raised
        self._first: tuple[int, float] | None = None  # the first signal, and when the thread read it
        self.noticed = False  # the cloud takes the machine away, and will send SIGTERM itself
        self._again, self._own = False, 0  # whether to send the signal again, and how many were sent so
        self._agree: Any = None  # the handler of `jax.distributed`: processes agree on a step to stop at

    def take_sigterm(self) -> None:
        """Takes SIGTERM back from `jax.distributed`, whose own handler is told of the first request to stop.

        Through it all processes agree on a step. Call it in the main thread once the processes are connected.
        """
        if not (self.whole_process and jax.distributed.is_initialized() and self is _active):
            return
        libc = ctypes.CDLL(None)
        libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        handler = libc.signal(signal.SIGTERM, None)
        signal.signal(signal.SIGTERM, self._handle)
        if handler:
            self._agree = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after a step of the run's, counted through all phases and rewinds; alike on all processes."""
        if jax.process_count() == 1:
            return self.received is not None
        from jax.experimental import multihost_utils

        # `jax.distributed` catches SIGTERM on any host, and agrees on a step that all of them reach; it may lie in the
        # next phase. It is reached once; a rewind may come in between.
        self.agreed |= multihost_utils.reached_preemption_sync_point(step)
        return self.agreed

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        reader = threading.Thread(target=self._read, args=(reading,), name="stop requests", daemon=True)
        reader.start()
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(writing)  # ends the thread
            reader.join()
            os.close(reading)

    def _handle(self, number: int, frame: Any) -> None:
        """In the main thread."""
        if jax.distributed.is_initialized():  # the thread has told `jax.distributed`
            return
        self.received = self.received or number
        if not self.can_save and not self.raised:
            # In a finalizer, or a hook of the garbage collector, Python prints and drops an exception.
            names = {outer.f_code.co_name for outer, _ in traceback.walk_stack(frame)}
            if names & {"__del__", "_xla_gc_callback"}:
                self._again = True  # in a moment
                return
            self.raised = True
            raise Stopped("stopped before a step was trained; run it again")

    def _read(self, reading: int) -> None:
        """In a thread of its own: works while the main thread is inside a compiler or waits for a device."""
        while numbers := os.read(reading, 16):
            for number in (n for n in numbers if n in SIGNALS):
                if self._own:
                    self._own -= 1
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if self._first is not None:
                    same = number == self._first[0] and now < self._first[1] + SAME_SECONDS
                    if same or (self.noticed and number == signal.SIGTERM):
                        continue
                    tell_at_once(f"{name} again: leaving without saving")
                    os._exit(128 + number)
                self._first = number, now
                saves = self.can_save or self._agree is not None
                tell_at_once(f"{name}: {'saving, then leaving' if saves else 'leaving'}; once more to leave at once")
                if self._agree is not None:
                    self._agree(signal.SIGTERM)
                elif not jax.distributed.is_initialized():
                    threading.Thread(target=self._end_if_stuck, args=(number,), daemon=True).start()

    def _end_if_stuck(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.raised or self.can_save:
                return
            time.sleep(0.1)
            if self._again:
                self._again, self._own = False, self._own + 1
                os.kill(os.getpid(), number)
        if not self.raised and not self.can_save:
            tell_at_once("stopped before a step was trained; run it again")
            os._exit(os.EX_TEMPFAIL)


class Interrupts(StopRequests):
    """SIGINT of a process that goes on, such as a notebook; SIGTERM is its own.

    The first one asks for a save where there is something to save; any other one is an ordinary `KeyboardInterrupt`.
    """

    whole_process = False

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        handler = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is not None or not self.can_save:
            raise KeyboardInterrupt
        self.received = number


_active: StopRequests | None = None


@contextlib.contextmanager
def stop_requests(kind: type[StopRequests] = StopRequests) -> Iterator[StopRequests]:
    """Takes SIGTERM and SIGINT for the block; inside another such block, the outer one's requests are meant.

    Outside the main thread no signal is taken.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield _active or kind()
        return
    _active = kind()
    try:
        with _active._installed():
            yield _active
    finally:
        _active = None


def watch_maintenance() -> None:
    """Sends this process SIGTERM when the metadata server of its Google Cloud VM says that the VM will be stopped.

    Asks in threads of its own, and only where there is such a server. A migration that does not stop the VM is none.
    """
    product = ""
    with contextlib.suppress(OSError):
        product = Path("/sys/class/dmi/id/product_name").read_text()
    if not (os.environ.get("GCE_METADATA_IP") or product.startswith("Google")):
        return
    for key in NOTICES:
        threading.Thread(target=_watch, args=(key,), name=f"watch {key}", daemon=True).start()


def _watch(key: str) -> None:
    """Waits for a value of `NOTICES`: the server answers when the value changes, or after a minute."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{server}/computeMetadata/v1/instance/{key}"
    known, failures = "", 0
    while failures < 5:
        query = f"?wait_for_change=true&timeout_sec=60&last_etag={known}" if known else ""
        request = urllib.request.Request(address + query, headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                value, known, failures = answer.read().decode().strip(), answer.headers.get("ETag") or "0", 0
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            failures += 1
            time.sleep(failures)
            continue
        if value in NOTICES[key]:
            tell_at_once(f"the metadata server says {key}={value}: this machine will be stopped")
            if _active is not None:
                _active.noticed = True
            os.kill(os.getpid(), signal.SIGTERM)
            return


# ---------------------------------------------------------------------------------------------------------------------
# Lost processes


class _PeerWatch:
    """Tells the others that this process lives, by beats `NUMBER HOST` and at last `done`, and watches them."""

    def __init__(self, client: Any, index: int, count: int):
        self._client, self._index = client, index
        self._seen = dict.fromkeys(range(count), ("", time.monotonic()))  # the last beat of each, and when it was new
        self._lock, self.done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lost processes", daemon=True)

    def start(self) -> None:
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
        self.done.set()
        self._thread.join()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._beat("done")

    def _beat(self, text: str) -> None:
        self._client.key_value_set(f"{ALIVE}/{self._index}", text, allow_overwrite=True)

    def _run(self) -> None:
        number, unreachable = 0, 0
        while not self.done.is_set():
            number += 1
            try:
                self._beat(f"{number} {socket.gethostname()}")
                self._look(dict(self._client.key_value_dir_get(ALIVE)))
                unreachable = 0
            except jax.errors.JaxRuntimeError:
                unreachable += 1
                if unreachable >= 2 and self._index:
                    self.end([0])  # which serves the store
            self.done.wait(BEAT_SECONDS)

    def _look(self, beats: dict[str, str]) -> None:
        now = time.monotonic()
        for key, beat in beats.items():
            process = int(key.rpartition("/")[2])
            if self._seen[process][0] != beat:
                self._seen[process] = beat, now
        others = ((process, *seen) for process, seen in self._seen.items() if process != self._index)
        lost = [process for process, beat, seen in others if beat != "done" and now - seen > LOST_SECONDS]
        if lost:
            self.end(lost)

    def _aborted(self, number: int) -> None:
        host, _, port = coordination().coordinator_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError:
            self.end([0])  # else it is another abort, which goes on

    def end(self, lost: list[int]) -> None:
        """Ends this process: collective operations with a lost process never return."""
        with self._lock:  # the thread or the main thread, one of them
            hosts = {process: self._seen[process][0].partition(" ")[2] or "an unknown host" for process in lost}
            names = ", ".join(f"process {process} on {host}" for process, host in hosts.items())
            text = f"lost {names}: it ended without a word, or its host or network is down. Run the command again."
            tell_at_once(text)
            os._exit(os.EX_TEMPFAIL)


@contextlib.contextmanager
def lost_processes() -> Iterator[None]:
    """For the block, watches the other processes of `start_processes`: if one dies, this one ends with status 75.

    A message says which was lost, and its host, in place of the error of an operation that it took part in.
    """
    state = coordination()
    if state.client is None:
        yield
        return
    watch = _PeerWatch(state.client, state.process_id, state.num_processes)
    watch.start()
    try:
        yield
    except (RuntimeError, OSError):
        watch.done.wait(LOST_SECONDS + 3 * BEAT_SECONDS)  # until a lost process is known, which ends this one
        raise
    finally:
        watch.stop()
