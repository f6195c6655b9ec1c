"""The Hugging Face hub: checkpoints read from it, and exports sent to it, by `huggingface_hub`."""

from __future__ import annotations

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


def check_push(name: str) -> None:
    """Checks that an export can be sent to the repository `name`, before anything is written.

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
    if weights := [file for file in files if file.endswith((".safetensors", ".bin", ".gguf"))]:
        raise ConfigError(
            f"--push={name}: the repository has a model already ({weights[0]}), and files of two models would mix. "
            "Give a new name, or delete its files first."
        )


def push(directory: Path, name: str, message: str) -> str:
    """Sends a directory to the repository `name`, which is made if there is none; returns its address.

    Raises:
      CheckpointError: the hub refuses, or is not reached; the directory stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    except Exception as error:  # of huggingface_hub, requests and the system
        raise CheckpointError(
            f"{directory} is written, and was not sent to '{name}' ({first_line(error)}). "
            f"Send it with `hf upload {name} {directory}`."
        ) from None
    return str(address)
