"""The Hugging Face hub: checkpoints read from it, and exports sent to it, by `huggingface_hub`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pe_lab.checkpoints.locating import first_line
from pe_lab.errors import CheckpointError, ConfigError

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def is_repository(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def download(name: str) -> Path:
    """The directory of a repository's files, downloaded or in the hub's cache; `CheckpointError` without them."""
    by_hand = (
        "Place its files by hand: a directory with config.json, *.safetensors and the tokenizer's files, and give "
        "--from=hf:DIRECTORY."
    )
    if not is_repository(name):
        raise CheckpointError(f"There is no directory '{name}', and it is no repository ORG/NAME. {by_hand}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"There is no directory '{name}', and huggingface_hub, which could download it, is not installed "
            f"(pip install huggingface_hub). {by_hand}"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # of huggingface_hub, requests and the system
        raise CheckpointError(f"'{name}' cannot be downloaded from the hub ({first_line(error)}). {by_hand}") from None


def check_push(name: str, gguf_file: str | None = None) -> list[str]:
    """The files of the repository `name`; checks that an export can be sent to it, before anything is written.

    `gguf_file`: a GGUF file of this name is sent, to which those of other number formats may be neighbours.

    Raises:
      ConfigError: no ORG/NAME, no huggingface_hub, no token that the hub takes, or a repository with a model in it.
    """
    if not is_repository(name):
        raise ConfigError(f"--push={name}: give a repository as ORG/NAME.")
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        raise ConfigError("--push needs huggingface_hub (pip install huggingface_hub).") from None
    if not get_token():
        raise ConfigError("--push needs a token: log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi()
    try:
        api.whoami()
        files = api.list_repo_files(name) if api.repo_exists(name) else []
    except Exception as error:  # of huggingface_hub, requests and the system
        raise ConfigError(f"--push={name}: the hub does not answer, or refuses ({first_line(error)}).") from None
    weights = [file for file in files if file.endswith((".safetensors", ".bin", ".gguf"))]
    if weights := [file for file in weights if gguf_file is None or file == gguf_file]:
        raise ConfigError(
            f"--push={name}: the repository has a model already ({weights[0]}), and files of two models would mix. "
            "Give a new name, or delete its files first."
        )
    return files


def push(path: Path, files: Mapping[str, Path], name: str) -> str:
    """Sends files, by their paths in the repository `name`, which is made if there is none; returns its address.

    Raises:
      CheckpointError: the hub refuses, or is not reached; the export at `path` stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True)
        added = [CommitOperationAdd(at, file) for at, file in files.items()]
        api.create_commit(name, added, commit_message="Exported by pe_lab")
    except Exception as error:  # of huggingface_hub, requests and the system
        raise CheckpointError(
            f"{path} is written, and was not sent to '{name}' ({first_line(error)}). Send it with "
            f"`hf upload {name} {path}`."
        ) from None
    return str(address)
