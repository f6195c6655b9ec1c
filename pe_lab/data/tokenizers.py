"""Tokenizers behind one small protocol: bytes, Hugging Face `tokenizer.json`, SentencePiece, and a GGUF file's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.data.companions import CONFIGURATION, SETTINGS, VOCABULARIES, AddedToken, Companions
from pe_lab.data.gguf_tokenizer import load_gguf_tokenizer
from pe_lab.data.hf_tokenizer import HuggingFaceTokenizer
from pe_lab.data.sentencepiece_tokenizer import SentencePieceTokenizer, split_at_tokens
from pe_lab.data.sentencepiece_training import train_sentencepiece, training_size
from pe_lab.data.tokenizer_files import KIND_FILE, write_kind
from pe_lab.data.tokenizer_json import bytes_tokenizer_json
from pe_lab.errors import UserError

__all__ = [
    "KIND_FILE",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "check_vocabulary",
    "export_tokenizer",
    "load_saved_tokenizer",
    "load_tokenizer",
    "save_tokenizer",
    "train_sentencepiece",
    "training_size",
]


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. `eos_id` ends every document and never comes out of `encode`.

    There are two ways in. `encode` is for documents to train on: what looks like a special token is text, and
    nothing is added. `encode_prompt` is for a prompt to a model: special tokens written in the text are those
    tokens, and BOS is added where the original adds it (not with add_special_tokens=False: a chat template has
    written it already).
    """

    kind: str  # "bytes" | "hf" | "sentencepiece"
    vocab_size: int  # the largest id, and one
    eos_id: int
    bos_id: int | None  # what a text begins with, where there is such a token
    stop_ids: tuple[int, ...]  # where generation ends: eos_id, and what else generation_config.json lists
    fingerprint: str  # equal fingerprints encode documents equally

    def encode(self, text: str) -> Int32[np.ndarray, " n"]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]: ...

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]: ...

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...

    def save(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes, 0 to 255, and an end-of-document symbol, 256, written <|endoftext|> in a prompt."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256
    bos_id = None
    stop_ids = (256,)
    fingerprint = "bytes-257"
    end = AddedToken("<|endoftext|>", 256)

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]:
        parts = split_at_tokens(text, {self.end.content: self.end})
        ids = [[self.eos_id] if isinstance(part, AddedToken) else self.encode(part) for part in parts]
        return np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int32)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        end = b"" if skip_special_tokens else self.end.content.encode()
        known = (int(i) for i in ids if 0 <= int(i) <= 256)
        return b"".join(bytes([i]) if i < 256 else end for i in known).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        return Companions("bytes").chat(messages, add_generation_prompt, **variables)

    def save(self, directory: Path) -> None:
        write_kind(self, directory)

    def export(self, directory: Path) -> None:
        """A tokenizer.json whose ids are the bytes."""
        (directory / HuggingFaceTokenizer.filename).write_text(bytes_tokenizer_json(self.end), encoding="utf-8")
        configuration = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end.content,
            "clean_up_tokenization_spaces": False,
        }
        (directory / CONFIGURATION).write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(specification: str) -> Tokenizer:
    """The tokenizer named by `bytes`, `hf:PATH`, `sentencepiece:PATH`, `gguf:PATH`, or `saved:DIR` of a checkpoint.

    `hf:` takes a tokenizer.json or a directory with one, or else with a tokenizer.model. The files that lie
    beside (tokenizer_config.json, generation_config.json, chat_template.jinja, ...) are read and kept.

    Raises:
      UserError: the specification is unknown, or its file is missing or unreadable.
    """
    if specification == "bytes":
        return ByteTokenizer()
    kind, _, where = specification.partition(":")
    if kind == "saved" and where:
        return load_saved_tokenizer(Path(where).expanduser())
    if kind not in ("hf", "sentencepiece", "gguf") or not where:
        raise UserError(
            f"data.tokenizer={specification!r} is not a tokenizer. "
            "Use bytes, hf:PATH/tokenizer.json, hf:DIR, gguf:FILE, sentencepiece:PATH.model or "
            "sentencepiece:train:SIZE."
        )
    path = Path(where).expanduser()
    if kind == "gguf":
        return load_gguf_tokenizer(path)
    if kind == "hf" and path.is_dir():
        path = _in_directory(path)
        kind = "hf" if path.suffix == ".json" else "sentencepiece"
    try:
        content = path.read_bytes()
        companions = Companions.beside(path, (*SETTINGS, *VOCABULARIES) if kind == "hf" else SETTINGS)
    except OSError as error:
        raise UserError(
            f"Cannot read the tokenizer {path}: {error.strerror or error}. Check data.tokenizer={specification!r}."
        ) from error
    if kind == "sentencepiece":
        return SentencePieceTokenizer(content, companions)
    try:
        return HuggingFaceTokenizer(content.decode("utf-8"), companions)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: it is not UTF-8.") from error


def _in_directory(directory: Path) -> Path:
    for name in (HuggingFaceTokenizer.filename, SentencePieceTokenizer.filename):
        if (directory / name).is_file():
            return directory / name
    older = [name for name in ("vocab.json", "vocab.txt", "tekken.json") if (directory / name).is_file()]
    found = f"It holds {', '.join(older)}, which is not read: have transformers" if older else "Have transformers"
    raise UserError(
        f"{directory} holds no tokenizer.json and no tokenizer.model. {found} write a tokenizer.json with "
        f"AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})."
    )


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer and all that lay beside it, for `load_saved_tokenizer` to read."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)


def export_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the files from which `transformers.AutoTokenizer`, of major 4 or 5, reads these very ids.

    Raises:
      UserError: a SentencePiece model that no tokenizer.json equals.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.export(directory)


def load_saved_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer written by `save_tokenizer`.

    Raises:
      UserError: a file is missing, or the tokenizer is not the one that was saved.
    """
    try:
        about = json.loads((directory / KIND_FILE).read_text(encoding="utf-8"))
        kind, fingerprint = about["kind"], about["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory} holds no saved tokenizer: {KIND_FILE} is missing or damaged. Prepare the data again."
        ) from error
    if kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif kind == "sentencepiece":
        tokenizer = load_tokenizer(f"sentencepiece:{directory / SentencePieceTokenizer.filename}")
    elif kind == "hf":
        tokenizer = load_tokenizer(f"hf:{directory / HuggingFaceTokenizer.filename}")
    else:
        raise UserError(f"{directory / KIND_FILE} names an unknown kind of tokenizer, {kind!r}.")
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"The tokenizer in {directory} is not the one that was saved there: fingerprint "
            f"{tokenizer.fingerprint}, expected {fingerprint}. Prepare the data again."
        )
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Refuses a tokenizer with more ids than the model `where` has embeddings; rows to spare are padding.

    Raises:
      UserError: it is a tokenizer with another vocabulary.
    """
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{where} has {vocab_size} embeddings, but its tokenizer has ids up to {tokenizer.vocab_size - 1}: it is "
            "a tokenizer with another vocabulary. Give the one that the model was trained with."
        )
