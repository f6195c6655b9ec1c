"""Tokenizers behind one small protocol: bytes, Hugging Face `tokenizer.json`, SentencePiece."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Int32

from pe_lab.config import UserError

KIND_FILE = "kind.json"
COMMON_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]", "<|eos|>")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. `eos_id` ends every document and never comes out of `encode`."""

    kind: str  # "bytes" | "hf" | "sentencepiece"
    vocab_size: int
    eos_id: int
    fingerprint: str  # equal fingerprints encode equally

    def encode(self, text: str) -> Int32[np.ndarray, " n"]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]: ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str: ...

    def save(self, directory: Path) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes, 0 to 255, and an end-of-document symbol, 256."""

    kind = "bytes"
    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-257"

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        _write_kind(self, directory)


class SentencePieceTokenizer:
    """A SentencePiece model, given as the bytes of its `.model` file.

    Raises:
      UserError: the bytes are not a SentencePiece model, or the model has no end-of-sentence piece.
    """

    kind = "sentencepiece"
    filename = "tokenizer.model"

    def __init__(self, model: bytes, where: str):
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = self._processor.vocab_size()
        except Exception as error:
            raise UserError(
                f"{where} is not a SentencePiece model. Give a .model file, or sentencepiece:train:SIZE."
            ) from error
        self._model = model
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(
                f"The SentencePiece model {where} has no end-of-sentence piece (eos_id). Train it with eos_id set."
            )
        self.fingerprint = "sentencepiece-" + _digest(model)

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.asarray(self._processor.encode(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [np.asarray(ids, np.int32) for ids in self._processor.encode(list(texts))]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return self._processor.decode([int(i) for i in ids if i != self.eos_id and 0 <= i < self.vocab_size])

    def save(self, directory: Path) -> None:
        _write_kind(self, directory)
        (directory / self.filename).write_bytes(self._model)


class HuggingFaceTokenizer:
    """A `tokenizer.json` as the `tokenizers` package reads it; the end-of-document symbol is found beside it.

    The symbol is `eos_token` of the `tokenizer_config.json` beside it, else the only special token, else the
    first special token with a common name. Special tokens written out in a text are encoded as text: no
    document can contain an end of document.

    Raises:
      UserError: the file cannot be read, or no end-of-document symbol is found.
    """

    kind = "hf"
    filename = "tokenizer.json"

    def __init__(self, specification: str, configuration: str | None, where: str):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(specification)
        except Exception as error:
            raise UserError(f"{where} is not a Hugging Face tokenizer.json: {error}.") from error
        self._specification, self._configuration = specification, configuration
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids may have holes: the embedding needs a row for the largest.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_id = self._find_eos(where)
        self.fingerprint = f"hf-{self.eos_id}-" + _digest(specification.encode())

    def _find_eos(self, where: str) -> int:
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        name = None
        if self._configuration:
            try:
                name = json.loads(self._configuration).get("eos_token")
            except (json.JSONDecodeError, AttributeError) as error:
                raise UserError(f"tokenizer_config.json beside {where} is not a JSON object: {error}.") from error
            if isinstance(name, dict):
                name = name.get("content")
        if name is None and len(special) == 1:
            name = special[0]
        if name is None:
            name = next((n for n in COMMON_EOS if n in special), None)
        found = None if name is None else self._tokenizer.token_to_id(name)
        if found is None:
            listed = ", ".join(special) or "none"
            looked = f"its eos_token {name!r} is not in the vocabulary" if name else f"its special tokens are: {listed}"
            raise UserError(
                f"No end-of-document symbol found for {where}: {looked}. "
                'Put a tokenizer_config.json with "eos_token" beside it.'
            )
        return found

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        _write_kind(self, directory)
        (directory / self.filename).write_text(self._specification, encoding="utf-8")
        if self._configuration is not None:
            (directory / "tokenizer_config.json").write_text(self._configuration, encoding="utf-8")


def training_size(specification: str) -> int | None:
    """SIZE of `sentencepiece:train:SIZE`, None for every other specification.

    Raises:
      UserError: SIZE is not a whole number of at least 300 (256 bytes, the specials, and something to learn).
    """
    if not specification.startswith("sentencepiece:train:"):
        return None
    size = specification.removeprefix("sentencepiece:train:")
    if not re.fullmatch(r"[0-9]+", size) or int(size) < 300:
        raise UserError(
            f"data.tokenizer={specification!r}: SIZE must be a whole number of at least 300, as in "
            "sentencepiece:train:4096."
        )
    return int(size)


def load_tokenizer(specification: str) -> Tokenizer:
    """The tokenizer named by `bytes`, `hf:PATH` or `sentencepiece:PATH`.

    Raises:
      UserError: the specification is unknown, or its file is missing or unreadable.
    """
    if specification == "bytes":
        return ByteTokenizer()
    kind, _, where = specification.partition(":")
    if kind not in ("hf", "sentencepiece") or not where:
        raise UserError(
            f"data.tokenizer={specification!r} is not a tokenizer. "
            "Use bytes, hf:PATH/tokenizer.json, sentencepiece:PATH.model or sentencepiece:train:SIZE."
        )
    path = Path(where).expanduser()
    if kind == "hf" and path.is_dir():
        path = path / HuggingFaceTokenizer.filename
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"Cannot read the tokenizer {path}: {error.strerror or error}. Check data.tokenizer={specification!r}."
        ) from error
    if kind == "sentencepiece":
        return SentencePieceTokenizer(content, str(path))
    configuration = path.with_name("tokenizer_config.json")
    try:
        text = content.decode("utf-8")
        beside = configuration.read_text(encoding="utf-8") if configuration.is_file() else None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: it is not UTF-8.") from error
    return HuggingFaceTokenizer(text, beside, str(path))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the tokenizer into `directory`, from which `load_saved_tokenizer` reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(directory)


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


def train_sentencepiece(documents: Iterable[str], size: int, where: str) -> SentencePieceTokenizer:
    """Trains a byte-pair SentencePiece model of `size` pieces on a spread sample of `documents`.

    Nothing is normalized: whitespace is kept, unseen characters and line ends fall back to bytes, so that
    decoding gives the text back. The same documents give the same model. `where` names the text in messages.

    Raises:
      UserError: there is no text, or too little of it for `size` pieces.
    """
    import sentencepiece

    sample = _sample_lines(documents, characters=max(2_000_000, 500 * size))
    if not sample:
        raise UserError(f"data source {where!r} is empty: there is no text to train a tokenizer on.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=True,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=0.9995,
            max_sentence_length=1_000_000,
            shuffle_input_sentence=False,
            num_threads=1,  # the result may depend on the number of threads
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            minloglevel=3,
        )
    except (RuntimeError, OSError) as error:
        most = re.search(r"value <= (\d+)", str(error))
        if most:
            raise UserError(
                f"data source {where!r} has too little text for a SentencePiece tokenizer of {size} pieces: "
                f"it gives at most {most[1]}. Ask for fewer, or use more text."
            ) from error
        reason = str(error).strip().splitlines()[-1]
        raise UserError(f"Cannot train a SentencePiece tokenizer on {where!r}: {reason}") from error
    return SentencePieceTokenizer(model.getvalue(), f"trained with {size} pieces")


def _sample_lines(documents: Iterable[str], characters: int) -> list[str]:
    """About `characters` characters of lines, spread evenly over the first 16 times as many characters."""
    lines, total = [], 0
    for line in _lines(documents):
        lines.append(line)
        total += len(line)
        if total >= 16 * characters:
            break
    step = max(1, total // characters)
    return lines[::step]


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.split("\n"):
            if line:
                yield line.replace("\0", " ")  # SentencePiece refuses NUL


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _write_kind(tokenizer: Tokenizer, directory: Path) -> None:
    about = {
        "kind": tokenizer.kind,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
    (directory / KIND_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
