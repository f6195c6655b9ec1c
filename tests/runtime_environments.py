"""vLLM, SGLang and llama.cpp for the slow tests: their code, fetched once, and one call that reads models in each.

Servers need GPUs, but their Python code does not: tests/data/read_with_vllm.py and read_with_sglang.py run it on a CPU,
without the compiled part. The wheels are fetched by pip into the cache of tests/transformers_environments.py, unpacked
without what is compiled, and deleted. llama.cpp's library comes with the wheel of xllamacpp, its converter with the
source distribution of llama-cpp-python of the same month (tests/data/read_with_llama_cpp.py).

Made once: 420 MB to download, 330 MB on disk, one to two minutes.
"""

import fnmatch
import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers_environments import cache, call, environment, locked, variables

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Package:
    """A release on the Python index, and which of its files are unpacked."""

    requirement: str
    members: tuple[str, ...]  # patterns; a * matches slashes too
    source: bool = False  # a source distribution, whose first folder is left out


PACKAGES = {
    "vllm": Package("vllm==0.33.0", ("vllm/*.py", "vllm/*.json", "*/METADATA")),
    "sglang": Package(
        "sglang==0.5.23",
        ("sglang/*.py", "sglang/srt/*", "sglang/lang/*", "sglang/kernels/*", "sglang/jit_kernel/*", "*/METADATA"),
    ),
    "xllamacpp": Package("xllamacpp==2026.10.11549", ("xllamacpp/*",)),
    "llama-cpp-python": Package(
        "llama-cpp-python==0.3.36",
        ("llama_cpp/*.py", "vendor/llama.cpp/conversion/*", "vendor/llama.cpp/gguf-py/*", "vendor/llama.cpp/*.py"),
        source=True,
    ),
}


@functools.cache
def package(name: str) -> Path:
    """The folder with the unpacked files of one of `PACKAGES`, fetched when it is not there yet.

    Raises:
      RuntimeError: pip cannot fetch it; the message ends with pip's own last lines.
    """
    wanted = PACKAGES[name]
    folder = cache() / "runtimes" / f"{wanted.requirement.replace('==', '-')}"
    stamp = {"requirement": wanted.requirement, "members": list(wanted.members)}
    if not _is_there(folder, stamp):
        with locked():
            if not _is_there(folder, stamp):
                _fetch(folder, wanted)
                (folder / "stamp.json").write_text(json.dumps(stamp, indent=1) + "\n")
    return folder


def _is_there(folder: Path, stamp: dict) -> bool:
    try:
        return json.loads((folder / "stamp.json").read_text()) == stamp
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def _fetch(folder: Path, wanted: Package) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # Hundreds of megabytes: beside the cache, where there is place, and not in /tmp.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        kind = "--no-binary=:all:" if wanted.source else "--only-binary=:all:"
        pip = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        call(folder, [*pip, kind, f"--dest={scratch}", wanted.requirement])
        (file,) = Path(scratch).iterdir()
        if wanted.source:
            with tarfile.open(file) as archive:
                for member in archive.getmembers():
                    member.name = member.name.partition("/")[2]
                    if member.isfile() and _matches(member.name, wanted):
                        archive.extract(member, folder, filter="data")
        else:
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if _matches(name, wanted)])


def _matches(name: str, wanted: Package) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in wanted.members)


@dataclass(frozen=True)
class Job:
    """A model to read, the tokens, and the longest sequence to declare: 0 is what the runtime derives."""

    directory: Path
    tokens: np.ndarray  # [T] integers
    length: int = 0


@dataclass(frozen=True)
class Result:
    """What a runtime makes of a model."""

    error: str = ""  # where it does not start
    max_length: int = 0  # the longest sequence, in tokens, that it serves
    class_name: str = ""
    logits: dict[int, np.ndarray] = field(default_factory=dict)  # by the number of tokens that it read, [T, V] float32
    errors: dict[int, str] = field(default_factory=dict)  # by the number of tokens that it started with, and failed on
    windows: tuple[int, ...] = ()  # by layer, tokens; 0: all
    positions: np.ndarray | None = None  # [P]
    rotations: np.ndarray | None = None  # [N, P, R, 2]: (cos, sin) x gain; NaN where none of the runtime's is called


def read_with_vllm(jobs: Sequence[Job], prefixes: Sequence[int], timeout: float = 900) -> list[Result]:
    """What vLLM's own code computes of the first so many tokens of each job, in one process of some ten seconds."""
    return _read_with_server("vllm", jobs, prefixes, timeout)


def read_with_sglang(jobs: Sequence[Job], prefixes: Sequence[int], timeout: float = 900) -> list[Result]:
    """What SGLang's own code computes; as `read_with_vllm`."""
    return _read_with_server("sglang", jobs, prefixes, timeout)


def _read_with_server(name: str, jobs: Sequence[Job], prefixes: Sequence[int], timeout: float) -> list[Result]:
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [f"--packages={package(name)}", f"--prefixes={','.join(map(str, prefixes))}"]
        for index, job in enumerate(jobs):
            np.save(f"{scratch}/{index}.npy", np.asarray(job.tokens, np.int64))
            arguments += [f"--model={job.directory}", f"--tokens={scratch}/{index}.npy"]
            arguments += [f"--length={job.length}", f"--out={scratch}/{index}.npz"]
        _run(environment("servers"), f"read_with_{name}.py", arguments, timeout)
        return [_result(Path(f"{scratch}/{index}.npz")) for index in range(len(jobs))]


def _result(file: Path) -> Result:
    with np.load(file) as found:
        if "error" in found:
            return Result(error=str(found["error"]))
        return Result(
            max_length=int(found["max_length"]),
            class_name=str(found["class_name"]),
            logits={int(key.removeprefix("logits_")): found[key] for key in found if key.startswith("logits_")},
            errors={int(key.removeprefix("error_")): str(found[key]) for key in found if key.startswith("error_")},
            windows=tuple(found["windows"].tolist()),
            positions=found["positions"],
            rotations=found["rotations"],
        )


def read_with_llama_cpp(jobs: Sequence[Job], prefixes: Sequence[int], timeout: float = 900) -> list[Result]:
    """What llama.cpp computes of the GGUF file that its converter makes of each directory; lengths are not derived."""
    bindings, library = package("llama-cpp-python"), package("xllamacpp")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [f"--source={bindings}/vendor/llama.cpp", f"--bindings={bindings}/llama_cpp"]
        for index, job in enumerate(jobs):
            for n in prefixes:
                np.save(f"{scratch}/{index}_{n}.npy", np.asarray(job.tokens[None, :n], np.int64))
                arguments += [f"--model={job.directory}", f"--tokens={scratch}/{index}_{n}.npy"]
                arguments += [f"--out={scratch}/{index}_{n}.out.npy"]
        # transformers 5 has other keys for GPT-NeoX than the converter asks for.
        _run(environment("4.56"), "read_with_llama_cpp.py", arguments, timeout, PYTHONPATH=str(library))
        for index in range(len(jobs)):
            outs = {n: Path(f"{scratch}/{index}_{n}.out.npy") for n in prefixes}
            errors = [out.with_suffix(".txt").read_text() for out in outs.values() if not out.exists()]
            if errors:
                results.append(Result(error=errors[0]))
            else:
                results.append(Result(logits={n: np.load(out)[0] for n, out in outs.items()}))
    return results


def _run(python: Path, script: str, arguments: list[str], timeout: float, **environ: str) -> None:
    process = subprocess.run(
        [str(python), str(DATA / script), *arguments],
        env=variables() | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if os.environ.get("PE_LAB_SHOW_RUNTIMES"):
        print(process.stdout + process.stderr)
    if process.returncode:
        raise RuntimeError(f"{script} ended with status {process.returncode}:\n{process.stderr[-6000:]}")


READERS: dict[str, Callable[..., list[Result]]] = {
    "vLLM": read_with_vllm,
    "SGLang": read_with_sglang,
    "llama.cpp": read_with_llama_cpp,
}
