"""What Orbax lacks: directories with wildcards in their names, S3, GCS buckets of which an account may read only the
objects, and silence after a failure.

Orbax 0.12 writes gs:// through tensorstore's driver and commits with a file. For s3:// it has neither
(google/orbax#2739).
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from pe_lab.errors import ConfigError
from pe_lab.storage.manifest import MANIFEST
from pe_lab.storage.paths import AnyPath, absolute, is_remote, s3_driver

COMMIT_FILE = "commit_success.txt"  # the last object of a checkpoint on a store; one without it is unfinished
PATH_BYTES, NAME_BYTES = 4095, 255  # of a path, and of a name in it, on Linux
BELOW_BYTES = 200  # of the path of a checkpoint's file below the directory of the steps, while it is written
REQUEST_RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "16s"}  # about a minute


def check_checkpoints(option: str, directory: AnyPath) -> None:
    """Refuses a directory below which Orbax cannot write checkpoints, before there is one.

    tensorstore takes a backslash for a slash, and refuses names that are not UTF-8 or end in its own suffixes.

    Args:
      option: what named it, for messages.
      directory: which may not exist yet.

    Raises:
      ConfigError: the name is not taken as it is, or is so long that those of the files below it would be too long.
    """
    if is_remote(directory):
        return
    import tensorstore as ts

    path = f"{absolute(directory)}/"
    try:
        taken = ts.KvStore.Spec({"driver": "file", "path": path}).to_json()["path"]
    except (ValueError, RuntimeError):  # the latter for what is not UTF-8
        taken = ""
    what = f"{option} '{directory}'"
    if taken != path:
        raise ConfigError(
            f"{what}: tensorstore, which writes checkpoints, cannot take this name. Choose one of UTF-8 text, without "
            "a backslash."
        )
    size, longest = (
        len(os.fsencode(path)) + BELOW_BYTES,
        max(len(os.fsencode(part)) for part in absolute(directory).parts),
    )
    if size > PATH_BYTES or longest > NAME_BYTES:
        raise ConfigError(f"{what}: the names of the checkpoints' files would be too long. Choose a shorter one.")


def enable_orbax(path: AnyPath) -> None:
    """Prepares Orbax for checkpoints under a path. Call it before a checkpointer is made."""
    _ignore_late_failures()
    _take_directories_literally()
    if is_remote(path):
        _enable()


@functools.cache
def _take_directories_literally() -> None:
    """Lets `epath.Path.glob` read wildcards in its pattern alone.

    It reads them in the directory too. Orbax lists by it what the processes have written: under `lr[1e-3]` it found
    nothing, merged nothing, and took that for a save.
    """
    from etils.epath import gpath

    find = gpath._GPath.glob

    def find_below(self: Any, pattern: str) -> Iterator[Any]:
        if self._uri_scheme is not None:  # `path` refuses wildcards there
            return find(self, pattern)
        return map(self._new, glob.iglob(self._PATH.join(glob.escape(self._path_str), pattern)))

    gpath._GPath.glob = find_below


@functools.cache
def _ignore_late_failures() -> None:
    """Keeps from the terminal what follows a failed save, of which Orbax raises the first failure.

    asyncio logs each of the others, and tensorstore's threads answer to an event loop that Orbax has closed.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


@functools.cache
def _enable() -> None:
    from orbax.checkpoint._src.path import atomicity, atomicity_defaults, gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, name: str | None = None, **options: Any) -> dict[str, Any]:
        if not directory.startswith("s3://"):
            return build(directory, name, **options)
        return _on_s3(build(directory.replace("s3://", "gs://", 1), name, **options))

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    for kind in ("get_default_temporary_path_class", "get_item_default_temporary_path_class"):
        setattr(atomicity_defaults, kind, _committing(getattr(atomicity_defaults, kind), atomicity))
    hierarchical = gcs_utils.is_hierarchical_namespace_enabled

    @functools.cache
    def is_hierarchical(bucket: str) -> bool:
        try:
            return bool(hierarchical(bucket))
        except Exception:  # it takes storage.buckets.get, which accounts that may write objects often lack
            return False

    gcs_utils.is_hierarchical_namespace_enabled = lambda path: is_hierarchical("/".join(str(path).split("/")[:4]))
    for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
        context.update({"gcs_request_retries": REQUEST_RETRIES, "s3_request_retries": REQUEST_RETRIES})


def _committing(default: Any, atomicity: Any) -> Any:
    """Orbax's choice of how a directory is committed, with a commit file on S3: a rename copies every object there.

    A manifest is as good: a checkpoint that was written to a disk and copied to a store has no commit file.
    """

    class Committed(atomicity.CommitFileTemporaryPath):
        @classmethod
        async def validate_final(cls, final_path: Any) -> None:
            if not (final_path / MANIFEST).exists():
                await super().validate_final(final_path)

    def choose(path: Any, *, atomicity_options: Any = None) -> Any:
        return Committed if is_remote(path) else default(path, atomicity_options=atomicity_options)

    return choose


def _on_s3(spec: Any) -> Any:
    """A tensorstore spec with S3 in place of GCS."""
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") in ("gcs", "gcs_grpc"):
        return s3_driver(spec)
    return {name: _on_s3(value) for name, value in spec.items()}
