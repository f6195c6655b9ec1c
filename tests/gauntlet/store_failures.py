"""Failures of an object store while a run trains on it: passed over, or one message; then the same bytes."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gauntlet.outcome import Row, content, differences
from gauntlet.world import Ended, World, draw

# What happens to how many requests in a row, from a random one on.
PASSING = (("503", 1), ("cut", 1), ("lost", 1), ("stall", 1), ("lag", 20), ("503", 4), ("cut", 3), ("lost", 2))
FAULTS = (*PASSING, ("outage", 10**9))
STALL_SECONDS = 2.0
REQUESTS = 1000  # of which the first failing one is drawn; a run makes about so many
_starting, _ports, _processes = threading.Lock(), dict[str, int](), list[subprocess.Popen]()


class NoEnvironment:
    """Leaves the environment of this process alone: only the processes that a case starts are to find its bucket."""

    def setenv(self, name: str, value: str) -> None:
        pass


@contextlib.contextmanager
def new_bucket(scheme: str) -> Iterator[Any]:
    """A bucket of tests/object_stores.py behind its proxy."""
    import object_stores

    yield from object_stores.new_bucket(scheme, _servers(), NoEnvironment())


def _servers() -> dict[str, int]:
    """The ports of the emulators, which all cases share; they end with this process, which holds their input."""
    import object_stores

    with _starting:
        if not _ports:
            ports = {"gs": object_stores.free_port(), "s3": object_stores.free_port()}
            argv = [sys.executable, "-c", object_stores.SERVERS, *map(str, ports.values())]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            _processes.append(subprocess.Popen(argv, text=True, **pipes))
            if _processes[0].stdout.readline() != "ready\n":
                raise RuntimeError("the emulators of object stores do not start")
            _ports.update(ports)
    return _ports


def run_case(world: World, seed: int, number: int) -> Row:
    """Trains on a bucket whose requests fail from a moment on; then, if that ended it, again without failures."""
    case = f"store-{number}"
    rng, (kind, times) = draw(seed, case), FAULTS[number % len(FAULTS)]
    scheme = ("gs", "s3")[number % 2]
    skip = rng.randrange(REQUESTS)
    project = world.project(case, ("recipe.py", "data"))
    what, where = f"{kind} x {times if times < 10**9 else 'all'} on {scheme}", f"after {skip} requests"
    with new_bucket(scheme) as bucket:
        argv = ("pe_lab.train", "--config=recipe.py", f"--workdir={bucket.url}/run")
        fault = _inject(bucket, rng, kind, times, skip)
        ended = _run(world, argv, project, bucket)
        told = f"{fault.met} met, status {ended.status}" + (f": {ended.last_line[:200]}" if ended.status else "")
        if ended.wrong:
            return Row(case, what, where, told, ended.wrong)
        if ended.status not in (0, 2, 3, 75):  # 75: the lease was lost, and everything that could be saved is
            return Row(case, what, where, told, f"status {ended.status}")
        bucket.proxy.faults.clear()
        if ended.status or kind == "outage":
            again = _run(world, argv, project, bucket)
            told += f"; then status {again.status}"
            if again.wrong or again.status:
                return Row(case, what, where, f"{told}: {again.last_line[:200]}", again.wrong or "not repeated")
        download(bucket, "run", project / "run")
        found = renamed(content(project / "run"), f"{bucket.url}/run", "run")
    if wrong := differences(world.expected["train"], found):
        return Row(case, what, where, told, f"differs: {wrong[0]}")
    shutil.rmtree(project)
    return Row(case, what, where, told, "same bytes")


def _inject(bucket: Any, rng: random.Random, kind: str, times: int, skip: int) -> Any:
    if kind == "lag":
        step = rng.choice((5, 10, 15, 20))
        names = [f"run/{rng.choice(('pretrain', 'recalibrate'))}/checkpoints/{step}/{n}" for n in
                 ("manifest.json", "commit_success.txt", "metadata/metadata", "params/manifest.ocdbt")]  # fmt: skip
        listing = r"^GET .*(/o\?|list-type)"
        return bucket.inject("lag", listing, times=times, skip=rng.randrange(20), hidden=frozenset(names))
    return bucket.inject("503" if kind == "outage" else kind, ".", times=times, skip=skip, seconds=STALL_SECONDS)


def _run(world: World, argv: tuple[str, ...], project: Path, bucket: Any) -> Ended:
    return world.run(argv, project, **bucket.environment)


def download(bucket: Any, prefix: str, target: Path) -> None:
    """Copies the objects under a prefix to a directory, past the proxy; a log's segments become its file."""
    sessions: dict[Path, dict[str, list[tuple[str, bytes]]]] = {}
    for name in bucket.names(f"{prefix}/"):
        path = target / name.removeprefix(f"{prefix}/")
        body = _object(bucket, name)
        if path.parent.suffix == ".segments":
            session, _, number = path.name.partition(".")
            log = path.parent.with_suffix("")
            sessions.setdefault(log, {}).setdefault(session, []).append((number, body))
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    for log, segments in sessions.items():
        newest = max(name for name, parts in segments.items() if min(parts)[0] == "000000")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"".join(body for _, body in sorted(segments[newest])))


def _object(bucket: Any, name: str) -> bytes:
    import object_stores

    if bucket.scheme == "gs":
        return bucket._ask("GET", f"/storage/v1/b/{bucket.name}/o/{quote(name, safe='')}?alt=media")
    return object_stores.ask(bucket.server, "GET", f"/{bucket.name}/{quote(name)}", Authorization="AWS tests:tests")


def renamed(value: Any, old: str, new: str) -> Any:
    """A JSON value in whose texts `old` is replaced."""
    if isinstance(value, dict):
        return {key: renamed(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value
