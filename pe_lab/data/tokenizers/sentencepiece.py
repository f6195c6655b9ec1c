"""SentencePiece models: documents as sentencepiece encodes them, prompts as transformers' slow tokenizers do."""

from __future__ import annotations

import dataclasses
import io
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers.companions import CONFIGURATION, AddedToken, Companions, split_at_tokens
from pe_lab.data.tokenizers.tokenizer import (
    DIFFICULT,
    SENTENCEPIECE_MODEL,
    TOKENIZER_JSON,
    WITHOUT_END,
    Tokenizer,
    digest,
    encodable,
    transformers_configuration,
)
from pe_lab.data.tokenizers.tokenizer_json import SPACE, sentencepiece_tokenizer_json
from pe_lab.errors import ConfigError, DataError, UnsupportedError

WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")  # add BOS unless add_bos_token is false


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, given as the bytes of its `.model` file, and its companion files.

    No document (`encode`) contains the end of a document, also where its piece is a user-defined one or one of the
    vocabulary, and pieces are never sampled (`sp_model_kwargs`).

    In a prompt, control pieces (`<s>`, `</s>`), the unknown piece and every token in tokenizer_config.json or
    added_tokens.json are found first; then the text between them is encoded. BOS is added if tokenizer_config.json
    sets `add_bos_token`, or does not mention it and names one of the classes `WITH_BOS`.

    Raises:
      DataError: the bytes are not a SentencePiece model, or no file names an end-of-sentence piece.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, companions: Companions):
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        where = companions.where
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            pieces = self._processor.vocab_size()
        except Exception as error:
            raise DataError(
                f"{where} is not a SentencePiece model. Give a .model file, or sentencepiece:train:SIZE."
            ) from error
        self._model, self._pieces, self.companions = model, pieces, companions
        self._content = sentencepiece_model_pb2.ModelProto.FromString(model)
        self.fingerprint = "sentencepiece-" + digest(model)
        self.eos_id = self._processor.eos_id()
        eos = companions.named.get("eos_token")
        if self.eos_id < 0 and eos in self._found:
            self.eos_id = self._found[eos].id
            self.fingerprint = f"sentencepiece-{self.eos_id}-" + digest(model) + self._end_is_control() * WITHOUT_END
        if self.eos_id < 0:
            raise DataError(
                f"The SentencePiece model {where} has no end-of-sentence piece (eos_id). Train it with eos_id set, "
                f'or put a {CONFIGURATION} with "eos_token" beside it.'
            )
        self.vocab_size = max([pieces - 1, *(token.id for token in self._found.values())]) + 1
        bos = self._found.get(companions.named.get("bos_token", ""))
        self.bos_id = bos.id if bos else self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        named = [self._found[eos].id] if eos in self._found else []
        self.stop_ids = tuple(dict.fromkeys([*companions.stop_ids(self.eos_id), *named]))

    def _end_is_control(self) -> bool:
        """Makes the end of a document a control piece, which no text has; whether it was a piece like any other."""
        import sentencepiece

        kinds = self._content.SentencePiece
        if self.eos_id >= self._pieces:
            return False
        piece = self._content.pieces[self.eos_id]
        if piece.type not in (kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED):
            return False
        piece.type = kinds.CONTROL
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._content.SerializeToString())
        return True

    @cached_property
    def _found(self) -> dict[str, AddedToken]:
        """The tokens that a prompt may contain, by content."""
        proto = self._content
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        kinds = (proto.SentencePiece.CONTROL, proto.SentencePiece.UNKNOWN)
        found = {
            piece.piece: AddedToken(piece.piece, ids[piece.piece]) for piece in proto.pieces if piece.type in kinds
        }
        for token in self.companions.added:
            id = ids.get(token.content, token.id)
            if id is not None:  # without an id it has no embedding
                found[token.content] = dataclasses.replace(token, id=id)
        return found

    @cached_property
    def _frame(self) -> tuple[list[AddedToken], list[AddedToken]]:
        """The tokens before and after every prompt."""
        configuration, frame = self.companions.configuration, []
        by_class = str(configuration.get("tokenizer_class")).removesuffix("Fast") in WITH_BOS
        for name, default in (("bos", by_class), ("eos", False)):
            wanted = configuration.get(f"add_{name}_token")
            if not (default if wanted is None else wanted):
                frame.append([])
                continue
            piece = getattr(self._processor, f"{name}_id")()
            content = self.companions.named.get(f"{name}_token")
            if content is None and piece >= 0:
                content = self._processor.id_to_piece(piece)
            if content not in self._found:
                raise DataError(
                    f"{CONFIGURATION} beside {self.companions.where} sets add_{name}_token, but its {name}_token "
                    f"({content!r}) is neither a control piece of the model nor an added token."
                )
            frame.append([self._found[content]])
        return frame[0], frame[1]

    @cached_property
    def _continuing(self) -> Any:
        """The processor without the space that it adds before a text (transformers' legacy=false)."""
        import sentencepiece

        proto = type(self._content).FromString(self._content.SerializeToString())
        proto.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        threads = int(os.environ.get("RAYON_NUM_THREADS") or -1)  # as the other tokenizers; -1: one for each core
        encoded = self._processor.encode(list(map(encodable, texts)), num_threads=threads)
        found = [np.asarray(ids, np.int32) for ids in encoded]
        for ids, text in zip(found, texts, strict=True):
            if (ids == self.eos_id).any():
                raise DataError(
                    f"The tokenizer {self.companions.where} encodes a character of a text as the end of a document "
                    f"({self._processor.id_to_piece(self.eos_id)!r}), which no document may contain: {text[:60]!r}. "
                    "Choose another eos_token."
                )
        return found

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]:
        processor, _, fragments = self._fragments(text)
        ids: list[int] = []
        for fragment in fragments:
            ids += [fragment.id] if isinstance(fragment, AddedToken) else processor.encode(fragment)
        if add_special_tokens:
            before, after = self._frame
            ids = [*(t.id for t in before), *ids, *(t.id for t in after)]
        return np.asarray(ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        from sentencepiece.sentencepiece_pb2 import SentencePieceText

        processor, whole, fragments = self._fragments(text)
        ids, offsets, position = [], [np.zeros((0, 2), np.int64)], 0
        for fragment in fragments:
            content = fragment.content if isinstance(fragment, AddedToken) else fragment
            position = max(position, whole.find(content, position))
            if isinstance(fragment, AddedToken):
                ids.append(fragment.id)
                offsets.append(np.asarray([[position, position + len(content)]]))
            else:
                pieces = SentencePieceText.FromString(processor.encode(fragment, out_type="serialized_proto")).pieces
                ids += [piece.id for piece in pieces]
                sizes = [len(character.encode()) for character in fragment]
                character_at = np.append(np.repeat(np.arange(len(fragment)), sizes), len(fragment))  # of each byte
                bytes_of = np.asarray([(piece.begin, piece.end) for piece in pieces], np.int64).reshape(-1, 2)
                offsets.append(position + character_at[bytes_of])
            position += len(content)
        added = len(whole) - len(text)  # a space before the text
        return np.asarray(ids, np.int32), np.maximum(np.concatenate(offsets) - added, 0).astype(np.int32)

    def _fragments(self, text: str) -> tuple[Any, str, list[str | AddedToken]]:
        """The processor of a prompt, the text that it encodes, and that text split at special tokens."""
        configuration, text = self.companions.configuration, encodable(text)
        processor = self._processor
        if configuration.get("legacy") is False and text:
            processor = self._continuing
            text = text.replace(SPACE, " ")
            text = " " + text if configuration.get("add_prefix_space", True) else text
        whole = configuration.get("split_special_tokens")  # special tokens are text, but where they are all of it
        fragments = [self._found.get(text, text)] * bool(text) if whole else split_at_tokens(text, self._found)
        if processor is not self._processor and len(fragments) > 1 and fragments[0] == " ":
            fragments = fragments[1:]  # the space before a text that begins with a special token
        return processor, text, fragments

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        contents = {token.id: token for token in self._found.values()}
        text, run = [], []
        for i in map(int, ids):
            token = contents.get(i)
            if token is not None and token.special and skip_special_tokens and i != self._processor.unk_id():
                continue
            if token is not None and (not token.special or not skip_special_tokens):
                text += [self._processor.decode(run), token.content]
                run = []
            elif 0 <= i < self._pieces:
                run.append(i)
        return "".join([*text, self._processor.decode(run)])

    def files(self) -> dict[str, bytes]:
        return {SENTENCEPIECE_MODEL: self._model, **self.companions.files}

    def exported_files(self) -> dict[str, bytes]:
        """The model, its companion files, and a tokenizer.json that gives the same ids on `DIFFICULT`.

        Raises:
          UnsupportedError: the model has no tokenizer.json, or the tokenizer.json would give other ids.
        """
        ids = {name: getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "unk")}
        ids["eos"] = self.eos_id
        tokens = {
            f"{name}_token": self._processor.id_to_piece(id) for name, id in ids.items() if 0 <= id < self._pieces
        }
        # tokenizer.json contains these settings; transformers 5 would apply them a second time.
        contained = ("add_bos_token", "add_eos_token", "legacy", "add_prefix_space", "sp_model_kwargs")
        configuration = {k: v for k, v in self.companions.configuration.items() if k not in contained}
        written = {
            TOKENIZER_JSON: self._tokenizer_json().encode(),
            CONFIGURATION: transformers_configuration(configuration, **tokens),
        }
        return {**self.files(), **written}

    def _tokenizer_json(self) -> str:
        import tokenizers

        where, proto = self.companions.where, self._content
        defined = {
            piece.piece: AddedToken(piece.piece, i, special=False)
            for i, piece in enumerate(proto.pieces)
            if piece.type == proto.SentencePiece.USER_DEFINED
        }
        try:
            text = sentencepiece_tokenizer_json(proto, {**defined, **self._found}.values(), *self._frame)
            read = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise UnsupportedError(
                f"The SentencePiece model {where} cannot be written as a tokenizer.json: {error}."
            ) from error
        for sample in DIFFICULT:
            read.encode_special_tokens = True
            pairs = [(read.encode(sample, add_special_tokens=False).ids, self.encode(sample))]
            read.encode_special_tokens = False
            pairs.append((read.encode(sample).ids, self.encode_prompt(sample)))
            for exported, ids in pairs:
                if exported != ids.tolist():
                    raise UnsupportedError(
                        f"The SentencePiece model {where} cannot be written as a tokenizer.json: on {sample[:40]!r} "
                        f"that gives {exported[:12]}..., sentencepiece {ids[:12].tolist()}... "
                        "Export without a tokenizer, and keep the .model."
                    )
        return text


def training_size(specification: str) -> int | None:
    """SIZE of `sentencepiece:train:SIZE`; None for every other specification.

    Raises:
      ConfigError: SIZE is not a whole number of at least 300 (256 bytes, the specials, and something to learn) and at
        most 2^20.
    """
    if not specification.startswith("sentencepiece:train:"):
        return None
    size = specification.removeprefix("sentencepiece:train:")
    if not re.fullmatch(r"[0-9]{1,7}", size) or not 300 <= int(size) <= 2**20:
        raise ConfigError(
            f"data.tokenizer={specification!r}: SIZE must be a whole number of at least 300, as in "
            f"sentencepiece:train:4096, and at most {2**20:,}."
        )
    return int(size)


def train_sentencepiece(documents: Iterable[str], size: int, where: str) -> SentencePieceTokenizer:
    """Trains a byte-pair SentencePiece model of `size` pieces on a sample of `documents`.

    Decoding inverts encoding: nothing is normalized, whitespace is kept, unseen characters and line ends are
    encoded as bytes. The same documents give the same model. `where` names the documents in messages.

    Raises:
      DataError: there is no text, or too little text for `size` pieces.
    """
    import sentencepiece

    sample = _sample_lines(documents, characters=max(2_000_000, 500 * size))
    if not sample:
        raise DataError(f"data source {where!r} is empty: there is no text to train a tokenizer on.")
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
            raise DataError(
                f"data source {where!r} has too little text for a SentencePiece tokenizer of {size} pieces: "
                f"it gives at most {most[1]}. Ask for fewer, or use more text."
            ) from error
        reason = str(error).strip().splitlines()[-1]
        raise DataError(f"Cannot train a SentencePiece tokenizer on {where!r}: {reason}") from error
    return SentencePieceTokenizer(model.getvalue(), Companions(f"trained with {size} pieces"))


def _sample_lines(documents: Iterable[str], characters: int) -> list[str]:
    """About `characters` characters of lines, spread evenly over the first 16 times as many characters."""
    lines, total = [], 0
    for line in (line for document in documents for line in document.split("\n") if line):
        lines.append(line.replace("\0", " "))  # SentencePiece refuses NUL
        total += len(line)
        if total >= 16 * characters:
            break
    step = max(1, total // characters)
    return lines[::step]
