"""What Orbax lacks: directories with wildcards in their names, S3, and silence after a failure.

Orbax 0.12 writes gs:// through tensorstore's driver. For s3:// it has none (google/orbax#2739), though tensorstore has
one: here a private function of Orbax is replaced, and pyproject.toml bounds its version for that.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp

from pe_lab.storage import AnyPath, is_remote, s3_driver

REQUEST_RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}  # about a minute
# On an object store a file is the last one of a directory: a rename would copy every object. One that was copied there
# from a disk has none, and a manifest.
COMMITTED_BY_FILE = ocp.options.AtomicityOptions(ocp.options.AtomicityMode.COMMIT_FILE, allow_legacy_atomic_rename=True)


def checkpointer(directory: AnyPath, kind: type[ocp.Checkpointer] = ocp.Checkpointer, **options: Any) -> Any:
    """A checkpointer of several items, for checkpoints under a directory; `options` are those of its class."""
    _ignore_late_failures()
    _take_directories_literally()
    if not is_remote(directory):
        return kind(ocp.CompositeCheckpointHandler(), **options)
    _write_to_s3()
    items = ocp.CompositeOptions(atomicity_options=COMMITTED_BY_FILE)
    handler = ocp.CompositeCheckpointHandler(composite_options=items)
    return kind(handler, atomicity_options=COMMITTED_BY_FILE, **options)


_quiet_calls: list[int] = []  # for each call under way, the level of absl's logger before it
_lock = threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging during a call: it logs every save, and tracebacks of a failed one before it raises.

    Calls of several threads may overlap: the last one that ends gives absl's logger its level back.
    """
    log = logging.getLogger("absl")
    with _lock:
        _quiet_calls.append(log.level)
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        with _lock:
            level = _quiet_calls.pop()
            if not _quiet_calls:
                log.setLevel(level)


@functools.cache
def _take_directories_literally() -> None:
    """Lets `epath.Path.glob` read wildcards in its pattern alone, and not in the directory too.

    Orbax lists by it what the processes have written: under `lr[1e-3]` it found nothing, and took that for a save.
    """
    from etils import epath

    kind = type(epath.Path("/"))
    find = kind.glob

    def find_below(self: Any, pattern: str) -> Iterator[Any]:
        if is_remote(self):  # `storage.path` refuses wildcards there
            return find(self, pattern)
        return map(epath.Path, glob.iglob(os.path.join(glob.escape(str(self)), pattern)))

    kind.glob = find_below


@functools.cache
def _ignore_late_failures() -> None:
    """Keeps from the terminal the failures after the first one of a save, which asyncio and tensorstore print."""

    def is_other(record: logging.LogRecord) -> bool:
        frames = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
        return not any(frame.f_globals.get("__name__", "").startswith("orbax.") for frame, _ in frames)

    logging.getLogger("asyncio").addFilter(is_other)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


@functools.cache
def _write_to_s3() -> None:
    """Lets Orbax write arrays to s3://, and bounds how long a request to a store is repeated."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, name: str | None = None, **options: Any) -> dict[str, Any]:
        if not directory.startswith("s3://"):
            return build(directory, name, **options)
        return _on_s3(build(directory.replace("s3://", "gs://", 1), name, **options))

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context.update({"gcs_request_retries": REQUEST_RETRIES, "s3_request_retries": REQUEST_RETRIES})


def _on_s3(spec: Any) -> Any:
    """A tensorstore spec with S3 in place of GCS."""
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") in ("gcs", "gcs_grpc"):
        return s3_driver(spec)
    return {name: _on_s3(value) for name, value in spec.items()}
