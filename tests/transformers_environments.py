"""Virtual environments with transformers 4.56 and 5 for the slow tests, and one call that reads a model in them.

A third has lm-evaluation-harness beside transformers 5, for the test that compares its own backend with ours, and a
fourth what the Python code of vLLM and SGLang imports (tests/runtime_environments.py).

What a user of an exported model will have is a fresh process with other packages: neither major of
transformers may share an interpreter with the tests, or with the other. The environments are made on first use in
$PE_LAB_TEST_CACHE (otherwise ~/.cache/pe_lab_tests), two minutes and 2.2 GB altogether where pip finds the CPU
build of torch, and stay there until a pin below or the base interpreter changes. `python -m venv` and pip make them,
so that whatever pip is configured to on this machine (an index, a folder of wheels) applies; where that is nothing
and torch comes with CUDA, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu to save its 4 GB.

torch lies in an environment of its own, which all others see through a .pth file: it is there once.
"""

import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

READER = Path(__file__).parent / "data" / "read_with_transformers.py"
SECONDS_TO_INSTALL = 1800
LINES_OF_PIP = 25
# What an environment must be able to import before it is stamped as made.
PROOF = "import torch, numpy, safetensors"

SHARED = (
    "torch==2.13.0",
    "numpy==2.4.6",
    "safetensors==0.8.0",
    "sentencepiece==0.2.3",
    "protobuf==7.36.2",
    "gguf==0.19.0",
    "jinja2==3.1.6",
)
FIVE = ("transformers==5.23.0", "tokenizers==0.23.3", "huggingface_hub==2.4.0", "accelerate==1.15.0")
# The transformers that both vLLM 0.33.0 and SGLang 0.5.23 ask for, and what their Python code imports.
SERVERS = (
    *("transformers==5.19.0", "tokenizers==0.23.2", "huggingface_hub==1.33.0", "compressed-tensors==0.17.0"),
    *("aiohttp==3.14.5", "cachetools==8.0.2", "cbor2==6.3.0", "cloudpickle==3.1.3", "dill==0.4.1", "einops==0.8.2"),
    *("fastapi==0.136.1", "msgspec==0.22.0", "openai==3.57.0", "orjson==3.13.0", "oss-harmony==0.0.11"),
    *("partial-json-parser==0.2.1.1.post7", "pillow==13.0.0", "prometheus_client==0.26.0", "psutil==7.2.2"),
    *("pybase64==1.5.1", "pyzmq==27.3.0", "uvicorn==0.54.0"),
)
PINS = {
    "4.56": ("transformers==4.56.2", "tokenizers==0.22.2", "huggingface_hub==0.36.2", "accelerate==1.15.0"),
    "5": FIVE,
    "5+lm_eval": (*FIVE, "lm_eval==0.4.13", "datasets==5.2.0"),
    "servers": SERVERS,
}
# Of lm_eval's requirements; there are no wheels of them, and they are Python alone.
SOURCE_ONLY = ("sqlitedict", "word2number")


def cache() -> Path:
    """Where the environments lie: a directory per Python version under $PE_LAB_TEST_CACHE."""
    root = os.environ.get("PE_LAB_TEST_CACHE") or Path.home() / ".cache" / "pe_lab_tests"
    return Path(root).expanduser().absolute() / f"python{sys.version_info.major}.{sys.version_info.minor}"


@functools.cache
def environment(version: str) -> Path:
    """The python of an environment of `PINS`, made when it is not there yet.

    Raises:
      RuntimeError: it cannot be made; the message ends with pip's own last lines.
    """
    if version not in PINS:
        raise ValueError(f"no environment for transformers {version!r}: there are {', '.join(PINS)}")
    directory = cache() / f"transformers-{version}"
    stamp = {"base": sys.base_prefix, "python": sys.version.split()[0], "packages": [*SHARED, *PINS[version]]}
    if not _is_made(directory, stamp):
        with locked():
            # While this process waited, another one may have made it.
            if not _is_made(directory, stamp):
                shared = cache() / "torch"
                shared_stamp = stamp | {"packages": list(SHARED)}
                if not _is_made(shared, shared_stamp):
                    _make(shared, shared_stamp, SHARED)
                _make(directory, stamp, PINS[version], seen=shared)
    return _python(directory)


def read(
    version: str,
    directory: Path | str,
    tokens: np.ndarray,
    *,
    gguf_file: str | None = None,
    dtype: str = "float32",
    last: int | None = None,
    timeout: float = 600,
) -> np.ndarray:
    """The logits [B, T, V] (float32) of a model directory as transformers `version` reads it in a fresh process.

    Args:
      version: "4.56" or "5".
      directory: what `from_pretrained` is given. Remote code is never trusted.
      tokens: [B, T] integers.
      gguf_file: the name of the GGUF file in `directory` to read instead of safetensors.
      dtype: of the weights and the computation.
      last: only the logits of the last so many positions.
      timeout: seconds.

    Raises:
      RuntimeError: with what the process wrote to stderr. A tensor that is missing, left over or of another shape
        is such an error.
    """
    options = dict(gguf_file=gguf_file, dtype=dtype, last=last, timeout=timeout)
    return read_several(version, [(directory, tokens)], **options)[0]


def read_or_refused(
    version: str, models: Sequence[tuple[Path | str, np.ndarray]], timeout: float = 600
) -> list[np.ndarray | str]:
    """`read_several`, with the message of the error in place of the logits of a model that is not loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments, outs = ["--go-on"], []
        for index, (directory, tokens) in enumerate(models):
            outs.append(Path(scratch) / f"logits_{index}.npy")
            arguments += [f"--model={directory}", _of_tokens(scratch, tokens, index), f"--out={outs[-1]}"]
        _run(version, arguments, None, timeout)
        return [np.load(out) if out.exists() else Path(f"{out}.txt").read_text() for out in outs]


def read_several(
    version: str,
    models: Sequence[tuple[Path | str, np.ndarray]],
    *,
    gguf_file: str | None = None,
    dtype: str = "float32",
    last: int | None = None,
    timeout: float = 600,
) -> list[np.ndarray]:
    """`read` of several (directory, tokens), one after another in one process: it takes seconds to start."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments, outs = [f"--dtype={dtype}"], []
        for index, (directory, tokens) in enumerate(models):
            outs.append(Path(scratch) / f"logits_{index}.npy")
            arguments += [f"--model={directory}", _of_tokens(scratch, tokens, index), f"--out={outs[-1]}"]
        if last is not None:
            arguments.append(f"--last={last}")
        _run(version, arguments, gguf_file, timeout)
        return [np.load(out) for out in outs]


def generate(
    version: str,
    directory: Path | str,
    tokens: np.ndarray,
    new_tokens: int,
    *,
    gguf_file: str | None = None,
    dtype: str = "float32",
    timeout: float = 600,
) -> np.ndarray:
    """The greedy continuation [B, new_tokens] of `tokens` [B, T], end-of-sequence tokens ignored; as `read`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "generated.npy"
        arguments = [f"--model={directory}", _of_tokens(scratch, tokens), f"--dtype={dtype}"]
        _run(version, [*arguments, f"--generate={new_tokens}", f"--generated-out={out}"], gguf_file, timeout)
        return np.load(out)


def projections(
    version: str, directory: Path | str, tokens: np.ndarray, *, gguf_file: str | None = None, timeout: float = 600
) -> dict[str, np.ndarray]:
    """The outputs of `q_proj`, `k_proj` and `v_proj`, [L, B, T, heads * K] each, by hooks on the modules; as `read`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "projections.npz"
        arguments = [f"--model={directory}", _of_tokens(scratch, tokens), f"--projections-out={out}"]
        _run(version, arguments, gguf_file, timeout)
        with np.load(out) as stored:
            return dict(stored)


def tokenize(
    version: str,
    directory: Path | str,
    text: str,
    *,
    gguf_file: str | None = None,
    new_tokens: int = 0,
    timeout: float = 600,
) -> dict:
    """What AutoTokenizer makes of a text: ids `plain` and `with_special_tokens`, the plain ones `decoded`, `class`.

    With `new_tokens` also `answer`: the ids of `model.generate(**tokenizer(text, return_tensors="pt"))`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # Bytes: a text file would have its line ends translated.
        (Path(scratch) / "text").write_bytes(text.encode())
        out = Path(scratch) / "ids.json"
        arguments = [f"--model={directory}", f"--text={scratch}/text", f"--ids-out={out}"]
        arguments += [f"--generate={new_tokens}"] if new_tokens else []
        _run(version, arguments, gguf_file, timeout)
        return json.loads(out.read_text())


def _of_tokens(scratch: str, tokens: np.ndarray, index: int = 0) -> str:
    path = Path(scratch) / f"tokens_{index}.npy"
    np.save(path, np.asarray(tokens, np.int64))
    return f"--tokens={path}"


def _run(version: str, arguments: list[str], gguf_file: str | None, timeout: float) -> None:
    models = ", ".join(part.removeprefix("--model=") for part in arguments if part.startswith("--model="))
    command = [str(environment(version)), "-I", str(READER), *arguments]
    if gguf_file is not None:
        command.append(f"--gguf-file={gguf_file}")
    try:
        process = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        raise RuntimeError(f"transformers {version} was not done with {models} after {timeout:g} s\n{stderr}") from None
    if process.returncode:
        raise RuntimeError(f"transformers {version} could not read {models}\n{process.stdout}{process.stderr}")
    # Not that of another environment: a .pth file and PYTHONPATH can put one before it.
    if not process.stdout.startswith(f"transformers {version}."):
        raise RuntimeError(f"not transformers {version}: {process.stdout}")


def variables() -> dict[str, str]:
    """The environment variables of a child: nothing of the tests' own interpreter, no network, no GPU."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_", "COVERAGE"))}
    variables.pop("VIRTUAL_ENV", None)
    return variables | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


def _site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _is_made(directory: Path, stamp: dict) -> bool:
    try:
        written = json.loads((directory / "stamp.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    # The python is a link to the base interpreter, which may have gone.
    return written == stamp and _python(directory).exists()


@contextmanager
def locked() -> Iterator[None]:
    """Holds the cache while something is made in it: one process at a time."""
    path = cache() / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        # The kernel lets go of it when the process that holds it dies.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(directory: Path, stamp: dict, packages: tuple[str, ...], seen: Path | None = None) -> None:
    """Makes an environment from nothing; its stamp is written last, so that an interrupted one is made again."""
    started = time.monotonic()
    if directory.exists():
        shutil.rmtree(directory)
    call(directory, [sys.executable, "-I", "-m", "venv", str(directory)])
    if seen is not None:
        # Behind this environment's own packages on sys.path; pip takes what it finds there as installed.
        (_site_packages(directory) / "shared.pth").write_text(f"{_site_packages(seen)}\n")
    # --only-binary: a package without a wheel for this Python must not start a compiler.
    install = ["-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--only-binary=:all:"]
    call(directory, [str(_python(directory)), "-I", *install, f"--no-binary={','.join(SOURCE_ONLY)}", *packages])
    call(directory, [str(_python(directory)), "-I", "-c", PROOF])
    (directory / "stamp.json").write_text(json.dumps(stamp, indent=1) + "\n")
    size = sum(path.lstat().st_size for path in directory.rglob("*"))
    print(f"{directory}: made in {time.monotonic() - started:.0f} s, {size / 1e6:.0f} MB")


def call(directory: Path, command: list[str]) -> None:
    """Runs a command that makes `directory`. Raises RuntimeError with the last lines that it printed."""
    try:
        process = subprocess.run(
            command,
            env={key: value for key, value in variables().items() if key != "CUDA_VISIBLE_DEVICES"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_TO_INSTALL,
        )
        printed, how = process.stdout, f"exit status {process.returncode}"
        failed = process.returncode != 0
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        how, failed = f"not done after {SECONDS_TO_INSTALL} s", True
    if failed:
        last = "\n".join(printed.strip().splitlines()[-LINES_OF_PIP:])
        raise RuntimeError(
            f"{directory} cannot be made ({how}): {' '.join(command)}\n{last}\n"
            "Its packages come from pip's own configuration (pip config list); without a network, put wheels of the "
            "pins in tests/transformers_environments.py and runtime_environments.py in the folder PIP_FIND_LINKS."
        )
