"""A SentencePiece `.model`: documents as sentencepiece encodes them, prompts as transformers' slow tokenizers do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int32

from pe_lab.data.companions import CONFIGURATION, AddedToken, Companions
from pe_lab.data.difficult_text import DIFFICULT
from pe_lab.data.tokenizer_files import digest, write_kind
from pe_lab.data.tokenizer_json import SPACE, sentencepiece_tokenizer_json
from pe_lab.errors import UserError

WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")  # add BOS unless their configuration says no


class SentencePieceTokenizer:
    """A SentencePiece model, given as the bytes of its `.model` file, and the files beside it.

    In a prompt, control pieces (`<s>`, `</s>`), the unknown piece and every token that tokenizer_config.json or
    added_tokens.json names are found before the text between them is encoded. BOS comes first where
    tokenizer_config.json says `add_bos_token`, or is silent and of a class that adds it.

    Raises:
      UserError: the bytes are not a SentencePiece model, or nothing names an end-of-sentence piece.
    """

    kind = "sentencepiece"
    filename = "tokenizer.model"

    def __init__(self, model: bytes, companions: Companions):
        import sentencepiece

        where = companions.where
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            pieces = self._processor.vocab_size()
        except Exception as error:
            raise UserError(
                f"{where} is not a SentencePiece model. Give a .model file, or sentencepiece:train:SIZE."
            ) from error
        self._model, self._pieces, self.companions = model, pieces, companions
        self.fingerprint = "sentencepiece-" + digest(model)
        self.eos_id = self._processor.eos_id()
        eos = companions.named.get("eos_token")
        if self.eos_id < 0 and eos in self._found:
            self.eos_id = self._found[eos].id
            self.fingerprint = f"sentencepiece-{self.eos_id}-" + digest(model)
        if self.eos_id < 0:
            raise UserError(
                f"The SentencePiece model {where} has no end-of-sentence piece (eos_id). Train it with eos_id set, "
                f'or put a {CONFIGURATION} with "eos_token" beside it.'
            )
        self.vocab_size = max([pieces - 1, *(token.id for token in self._found.values())]) + 1
        bos = self._found.get(companions.named.get("bos_token", ""))
        self.bos_id = bos.id if bos else self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        named = [self._found[eos].id] if eos in self._found else []
        self.stop_ids = tuple(dict.fromkeys([*companions.stop_ids(self.eos_id), *named]))

    @cached_property
    def _found(self) -> dict[str, AddedToken]:
        """The tokens found in a prompt, by content."""
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(self._model)
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        kinds = (proto.SentencePiece.CONTROL, proto.SentencePiece.UNKNOWN)
        found = {
            piece.piece: AddedToken(piece.piece, ids[piece.piece]) for piece in proto.pieces if piece.type in kinds
        }
        for token in self.companions.added:
            id = ids.get(token.content, token.id)
            if id is not None:  # else it has no embedding
                found[token.content] = AddedToken(**{**vars(token), "id": id})
        return found

    @cached_property
    def _frame(self) -> tuple[list[AddedToken], list[AddedToken]]:
        """What a prompt begins and ends with."""
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
                raise UserError(
                    f"{CONFIGURATION} beside {self.companions.where} says add_{name}_token, but its {name}_token "
                    f"({content!r}) is neither a control piece of the model nor an added token."
                )
            frame.append([self._found[content]])
        return frame[0], frame[1]

    @cached_property
    def _continuing(self) -> Any:
        """The processor without the space that it puts before a text (transformers' legacy=false)."""
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(self._model)
        proto.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def encode(self, text: str) -> Int32[np.ndarray, " n"]:
        return np.asarray(self._processor.encode(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        return [np.asarray(ids, np.int32) for ids in self._processor.encode(list(texts))]

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]:
        configuration = self.companions.configuration
        processor = self._processor
        if configuration.get("legacy") is False and text:
            processor = self._continuing
            text = text.replace(SPACE, " ")
            text = " " + text if configuration.get("add_prefix_space", True) else text
        fragments = split_at_tokens(text, self._found)
        if processor is not self._processor and len(fragments) > 1 and fragments[0] == " ":
            fragments = fragments[1:]  # the space before a text that begins with a special token
        ids: list[int] = []
        for fragment in fragments:
            ids += [fragment.id] if isinstance(fragment, AddedToken) else processor.encode(fragment)
        if add_special_tokens:
            before, after = self._frame
            ids = [*(t.id for t in before), *ids, *(t.id for t in after)]
        return np.asarray(ids, np.int32)

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

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        return self.companions.chat(messages, add_generation_prompt, **variables)

    def save(self, directory: Path) -> None:
        write_kind(self, directory)
        (directory / self.filename).write_bytes(self._model)
        self.companions.write(directory)

    def export(self, directory: Path) -> None:
        """The model, and a tokenizer.json that gives the same ids on `DIFFICULT`: transformers 4 and 5 read that.

        Raises:
          UserError: the model cannot be said as a tokenizer.json, or would give other ids.
        """
        text = self._tokenizer_json()
        self.companions.write(directory)
        (directory / self.filename).write_bytes(self._model)
        (directory / "tokenizer.json").write_text(text, encoding="utf-8", newline="")
        configuration = {**self.companions.configuration, "tokenizer_class": "PreTrainedTokenizerFast"}
        for name in ("bos", "eos", "unk"):
            id = self.eos_id if name == "eos" else getattr(self._processor, f"{name}_id")()
            if id >= 0:
                configuration.setdefault(f"{name}_token", self._processor.id_to_piece(id))
        configuration.setdefault("clean_up_tokenization_spaces", False)
        # tokenizer.json says these; transformers 5 would build its own in their place.
        for key in ("auto_map", "add_bos_token", "add_eos_token", "legacy", "add_prefix_space", "sp_model_kwargs"):
            configuration.pop(key, None)
        written = json.dumps(configuration, indent=2, ensure_ascii=False) + "\n"
        (directory / CONFIGURATION).write_text(written, encoding="utf-8")

    def _tokenizer_json(self) -> str:
        import tokenizers

        where = self.companions.where
        try:
            text = sentencepiece_tokenizer_json(self._model, self._exported_tokens(), *self._frame)
            read = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise UserError(
                f"The SentencePiece model {where} cannot be written as a tokenizer.json: {error}."
            ) from error
        for sample in DIFFICULT:
            read.encode_special_tokens = True
            pairs = [(read.encode(sample, add_special_tokens=False).ids, self.encode(sample))]
            read.encode_special_tokens = False
            pairs.append((read.encode(sample).ids, self.encode_prompt(sample)))
            for theirs, ours in pairs:
                if theirs != ours.tolist():
                    raise UserError(
                        f"The SentencePiece model {where} cannot be written as a tokenizer.json: on {sample[:40]!r} "
                        f"that gives {theirs[:12]}..., sentencepiece {ours[:12].tolist()}... "
                        "Export without a tokenizer, and keep the .model."
                    )
        return text

    def _exported_tokens(self) -> list[AddedToken]:
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto.FromString(self._model)
        defined = {
            piece.piece: AddedToken(piece.piece, i, special=False)
            for i, piece in enumerate(proto.pieces)
            if piece.type == proto.SentencePiece.USER_DEFINED
        }
        return list({**defined, **self._found}.values())


def split_at_tokens(text: str, tokens: Mapping[str, AddedToken]) -> list[str | AddedToken]:
    """The text around, and the tokens found in it, the longest first; their flags as transformers takes them."""
    if not tokens:
        return [text] if text else []
    either = "|".join(re.escape(content) for content in sorted(tokens, key=len, reverse=True) if content)
    parts: list[str] = [part for part in re.split(f"({either})", text) if part]
    for i, part in enumerate(parts):
        if part not in tokens:
            continue
        token = tokens[part]
        left, right = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
        if token.rstrip and right:
            parts[i + 1] = right.lstrip()
        if token.lstrip and left:
            parts[i - 1] = left.rstrip()
        if token.single_word and left and left[-1] != " ":
            parts[i - 1], parts[i] = parts[i - 1] + part, ""
        elif token.single_word and right and right[0] != " ":
            parts[i + 1], parts[i] = part + parts[i + 1], ""
    return [tokens.get(part, part) for part in parts if part]
