"""Tokenizers with one interface: bytes, Hugging Face `tokenizer.json`, SentencePiece and GGUF; loaded and saved."""

from __future__ import annotations

import json
from pathlib import Path

from pe_lab import storage
from pe_lab.data.tokenizers.companions import COMPANIONS, VOCABULARIES, Companions
from pe_lab.data.tokenizers.gguf import load_gguf_tokenizer
from pe_lab.data.tokenizers.hugging_face import HuggingFaceTokenizer
from pe_lab.data.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece, training_size
from pe_lab.data.tokenizers.tokenizer import (
    DIFFICULT,
    SENTENCEPIECE_MODEL,
    TOKENIZER_JSON,
    ByteTokenizer,
    NoTokenizer,
    Tokenizer,
    encodable,
)
from pe_lab.errors import CheckpointError, ConfigError, DataError
from pe_lab.storage import AnyPath, read_json, write_files

KIND_FILE = "kind.json"  # written by `save_tokenizer`


def load_tokenizer(specification: str) -> Tokenizer:
    """The tokenizer of `bytes`, `hf:PATH`, `sentencepiece:PATH`, `gguf:PATH`, `saved:DIR` of a checkpoint, or `none`.

    `hf:` takes a tokenizer.json, or a directory with a tokenizer.json or a tokenizer.model. The companion files in
    the same directory (tokenizer_config.json, generation_config.json, chat_template.jinja, ...) are loaded too.

    Raises:
      ConfigError: the specification is unknown.
      DataError: the file is missing or unreadable.
    """
    if specification in ("bytes", "none"):
        return ByteTokenizer() if specification == "bytes" else NoTokenizer()
    kind, _, where = specification.partition(":")
    if kind not in ("saved", "hf", "sentencepiece", "gguf") or not where:
        raise ConfigError(
            f"data.tokenizer={specification!r} is not a tokenizer. "
            "Use bytes, hf:PATH/tokenizer.json, hf:DIR, gguf:FILE, sentencepiece:PATH.model or "
            "sentencepiece:train:SIZE; or none, of a Grain dataset whose ids need no tokenizer."
        )
    path = storage.path("the tokenizer", where)
    if storage.is_remote(path):
        # With the files beside it, which belong to it.
        alone = kind in ("gguf", "sentencepiece") or kind != "saved" and path.is_dir()
        path = storage.local_copy(path) if alone or kind == "saved" else storage.local_copy(path.parent) / path.name
    if kind == "saved":
        return load_saved_tokenizer(path)
    if kind == "gguf":
        return load_gguf_tokenizer(path)
    if kind == "hf" and path.is_dir():
        path = _in_directory(path)
        kind = "hf" if path.suffix == ".json" else "sentencepiece"
    try:
        content = path.read_bytes()
        companions = Companions.beside(path, (*COMPANIONS, *VOCABULARIES) if kind == "hf" else COMPANIONS)
    except OSError as error:
        raise DataError(
            f"Cannot read the tokenizer {path}: {error.strerror or error}. Check data.tokenizer={specification!r}."
        ) from error
    if kind == "sentencepiece":
        return SentencePieceTokenizer(content, companions)
    try:
        return HuggingFaceTokenizer(content.decode("utf-8-sig"), companions)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a Hugging Face tokenizer.json: it is not UTF-8.") from error


def _in_directory(directory: Path) -> Path:
    for name in (TOKENIZER_JSON, SENTENCEPIECE_MODEL):
        if (directory / name).is_file():
            return directory / name
    older = [name for name in ("vocab.json", "vocab.txt", "tekken.json") if (directory / name).is_file()]
    found = f"It holds {', '.join(older)}, which is not read: have transformers" if older else "Have transformers"
    raise DataError(
        f"{directory} holds no tokenizer.json and no tokenizer.model. {found} write a tokenizer.json with "
        f"AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})."
    )


def save_tokenizer(tokenizer: Tokenizer, directory: AnyPath) -> None:
    """Writes the tokenizer and its companion files, for `load_saved_tokenizer`."""
    about = {name: getattr(tokenizer, name) for name in ("kind", "fingerprint", "vocab_size", "eos_id")}
    files = {**tokenizer.files(), KIND_FILE: (json.dumps(about, indent=2) + "\n").encode()}
    write_files({directory / name: content for name, content in files.items()})


def export_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the files from which `transformers.AutoTokenizer`, of major version 4 or 5, gives the same ids.

    Raises:
      UnsupportedError: a SentencePiece model that no tokenizer.json is equal to.
    """
    write_files({directory / name: content for name, content in tokenizer.exported_files().items()})


def load_saved_tokenizer(directory: AnyPath) -> Tokenizer:
    """The tokenizer written by `save_tokenizer`; `DataError` if a file is missing or another tokenizer is there."""
    directory = storage.local_copy(directory)
    about = read_json(directory / KIND_FILE, f"{directory} holds no saved tokenizer. Prepare the data again.")
    kind = str(about.get("kind"))
    saved = {
        "bytes": "bytes",
        "sentencepiece": f"sentencepiece:{directory / SENTENCEPIECE_MODEL}",
        "hf": f"hf:{directory / TOKENIZER_JSON}",
    }
    if kind not in saved:
        raise DataError(f"{directory / KIND_FILE} names an unknown kind of tokenizer, {kind!r}.")
    tokenizer = load_tokenizer(saved[kind])
    if tokenizer.fingerprint != about.get("fingerprint"):
        raise DataError(
            f"The tokenizer in {directory} is not the one that was saved there: fingerprint "
            f"{tokenizer.fingerprint}, expected {about.get('fingerprint')}. Prepare the data again."
        )
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Raises `CheckpointError` if the tokenizer has more ids than the model `where` has embeddings.

    Fewer are allowed: the other embeddings are padding.
    """
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{where} has {vocab_size} embeddings, but its tokenizer has ids up to {tokenizer.vocab_size - 1}: it is "
            "a tokenizer with another vocabulary. Give the one that the model was trained with."
        )


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers give equal ids, whatever files they come from, on strings that are easy to get wrong.

    They may end documents with different tokens.
    """
    if one.fingerprint == other.fingerprint:
        return True
    pairs = zip(one.encode_batch(DIFFICULT), other.encode_batch(DIFFICULT), strict=True)
    return all(mine.tolist() == others.tolist() for mine, others in pairs)
