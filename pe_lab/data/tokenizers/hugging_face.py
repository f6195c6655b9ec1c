"""Hugging Face `tokenizer.json`: documents as the `tokenizers` package encodes them, prompts as transformers does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int32

from pe_lab.data.tokenizers.companions import CONFIGURATION, MOST_IDS, Companions
from pe_lab.data.tokenizers.tokenizer import (
    TOKENIZER_JSON,
    WITHOUT_END,
    Tokenizer,
    digest,
    encodable,
    transformers_configuration,
)
from pe_lab.data.tokenizers.tokenizer_json import byte_symbols
from pe_lab.errors import DataError, excerpt

if TYPE_CHECKING:
    import tokenizers

_BYTES = byte_symbols()
WITH_PREFIX_SPACE = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CodeGenTokenizer")  # set it, by default to False
COMMON_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]", "<|eos|>")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Makes any error of the tokenizers package a `DataError`; a panic of its Rust code is no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {excerpt(' '.join(str(error).split()))}.") from error


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json` and its companion files.

    The end of a document is `eos_token` of tokenizer_config.json (or special_tokens_map.json), else the only
    special token, else the first special token with a common name.

    Documents (`encode`) are encoded by tokenizer.json alone, and the names of special tokens in them are plain text:
    no document can contain an end of document, whether tokenizer.json finds it in a text, merges it, or has it in place
    of unknown characters. Merges are never left out at random (`dropout`).

    Prompts (`encode_prompt`) are encoded as by transformers' AutoTokenizer: special tokens are found in the text, but
    for `split_special_tokens`; tokenizer_config.json may add some, and tokenizer.json alone determines the first and
    the last tokens (transformers 4 obeyed `add_bos_token` too, but only in a few classes). `add_prefix_space` counts in
    the classes `WITH_PREFIX_SPACE`; elsewhere transformers 5 takes it from tokenizer.json.

    Raises:
      DataError: a file cannot be read, or no end-of-document symbol is found.
    """

    kind = "hf"

    def __init__(self, specification: str, companions: Companions):
        self._specification, self.companions = specification, companions
        self._documents = self._read()
        if getattr(self._documents.model, "dropout", None) is not None:  # at random, another one for each call
            content = json.loads(specification)
            content["model"]["dropout"] = None
            self._specification = json.dumps(content, ensure_ascii=False)
            self._documents = self._read()
        known = self._documents.get_vocab(with_added_tokens=True)
        # Tokens that only a companion file lists, with an id. One without an id (a pad_token, say) has no embedding:
        # transformers would give it the next id, which the model has never seen; here it is plain text.
        self._added = [token for token in companions.added if token.content not in known and token.id is not None]
        # Some ids may be unused: the embedding must contain the largest.
        ids = self._prompts.get_vocab(with_added_tokens=True) if self._added else known
        self.vocab_size = max(ids.values(), default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise DataError(f"{companions.where} has an id of {self.vocab_size - 1:,}; ids are below {MOST_IDS:,}.")
        self.eos_id = self._find_eos()
        changed = self._end_is_special()
        self._documents.encode_special_tokens = True
        self.fingerprint = f"hf-{self.eos_id}-" + digest(self._specification.encode()) + changed * WITHOUT_END
        self.bos_id = ids.get(companions.named.get("bos_token", ""))
        self.stop_ids = companions.stop_ids(self.eos_id)

    def _read(self, specification: str = "") -> tokenizers.Tokenizer:
        import tokenizers

        os.environ["RUST_BACKTRACE"] = "0"  # a panic is raised as an error; its trace is 11 KB on stderr
        with _explained(f"{self.companions.where} is not a Hugging Face tokenizer.json"):
            read = tokenizers.Tokenizer.from_str(specification or self._specification)
        read.no_truncation()
        read.no_padding()
        return read

    def _find_eos(self) -> int:
        where = self.companions.where
        special = [token.content for token in self._documents.get_added_tokens_decoder().values() if token.special]
        name = self.companions.named.get("eos_token")
        if name is None and len(special) == 1:
            name = special[0]
        if name is None:
            name = next((n for n in COMMON_EOS if n in special), None)
        found = None if name is None else (self._prompts if self._added else self._documents).token_to_id(name)
        if found is None:
            listed = ", ".join(special) or "none"
            looked = f"its eos_token {name!r} is not in the vocabulary" if name else f"its special tokens are: {listed}"
            raise DataError(
                f"No end-of-document symbol found for {where}: {looked}. "
                f'Put a {CONFIGURATION} with "eos_token" beside it.'
            )
        return found

    @cached_property
    def _prompts(self) -> tokenizers.Tokenizer:
        """The tokenizer with the settings and the tokens that transformers adds to it."""
        import tokenizers

        read = self._read(self._prompt_specification)
        read.encode_special_tokens = bool(self.companions.configuration.get("split_special_tokens"))
        # A token of the vocabulary keeps its id, and is found in a text from now on.
        found = {token.content for token in read.get_added_tokens_decoder().values()}
        more = [t for t in self.companions.added if t.id is not None or read.token_to_id(t.content) is not None]
        read.add_tokens([tokenizers.AddedToken(t.content, **t.flags()) for t in more if t.content not in found])
        return read

    @cached_property
    def _prompt_specification(self) -> str:
        """The tokenizer.json of prompts: some classes of transformers set a part of it, 4.56 and 5.23 alike."""
        configuration = self.companions.configuration
        kind = str(configuration.get("tokenizer_class")).removesuffix("Fast")
        if kind not in WITH_PREFIX_SPACE:
            return self._specification
        content = json.loads(self._specification)
        if (content.get("pre_tokenizer") or {}).get("type") == "ByteLevel":
            content["pre_tokenizer"]["add_prefix_space"] = bool(configuration.get("add_prefix_space"))
        if kind == "GPTNeoXTokenizer":
            content["post_processor"] = None  # which would add a first or a last token
        return json.dumps(content, ensure_ascii=False)

    def _end_is_special(self) -> bool:
        """Makes the end of a document special for documents, which contain no special tokens; whether it was not."""
        added = self._documents.get_added_tokens_decoder().get(self.eos_id)
        if added is None or added.special:
            return False
        content = json.loads(self._specification)
        for token in content["added_tokens"]:
            token["special"] |= token["id"] == self.eos_id
        self._documents = self._read(json.dumps(content, ensure_ascii=False))
        return True

    @cached_property
    def _spelled(self) -> dict[int, list[int] | None]:
        """For every special token that the model itself may find in a text, the ids of its characters.

        A model of unigrams has it as a piece, byte pairs may merge into it: encode_special_tokens has no effect there.
        None, for the end of a document, if it also stands for unknown characters.
        """
        model, specification = self._documents.model, json.loads(self._specification)["model"]
        unknown = specification.get("unk_id")
        if unknown is None and specification.get("unk_token"):
            unknown = model.token_to_id(specification["unk_token"])
        found = {i: t.content for i, t in self._documents.get_added_tokens_decoder().items() if t.special}
        found[self.eos_id] = model.id_to_token(self.eos_id) or found.get(self.eos_id, "")
        found = {i: content for i, content in found.items() if model.id_to_token(i) is not None}

        def ids(character: str) -> list[int | None]:
            whole = model.token_to_id(character)
            if whole is not None and whole not in found:
                return [whole]
            encoded = character.encode()
            for form in ([_BYTES[byte] for byte in encoded], [f"<0x{byte:02X}>" for byte in encoded]):
                pieces = [model.token_to_id(byte) for byte in form]
                if all(piece is not None and piece not in found for piece in pieces):
                    return pieces
            return [unknown]

        spelled: dict[int, list[int] | None] = {}
        for token, content in found.items():
            characters = [i for character in content for i in ids(character) if i is not None]
            if token != unknown:
                spelled[token] = None if self.eos_id in characters else characters
            elif token == self.eos_id:
                spelled[token] = None
        return spelled

    @cached_property
    def _is_spelled(self) -> Bool[np.ndarray, " ids"]:
        """Whether each id is one of `_spelled`."""
        table = np.zeros(self.vocab_size, bool)
        table[list(self._spelled)] = True
        return table

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        with _explained(f"The tokenizer {self.companions.where} cannot encode a text"):
            encoded = self._documents.encode_batch_fast(list(map(encodable, texts)), add_special_tokens=False)
            found = [np.asarray(one.ids, np.int32) for one in encoded]
        pairs = zip(found, texts, strict=True)
        return [self._spell(ids, text) if self._is_spelled[ids].any() else ids for ids, text in pairs]

    def _spell(self, ids: Int32[np.ndarray, " n"], text: str) -> Int32[np.ndarray, " m"]:
        """Ids of a document with special tokens replaced by their characters."""
        replaced = [self._spelled.get(i, [i]) for i in ids.tolist()]
        if None in replaced:
            raise DataError(
                f"The tokenizer {self.companions.where} encodes a character of a text as the end of a document "
                f"({self._documents.id_to_token(self.eos_id)!r}), which no document may contain: {text[:60]!r}. Give "
                "it an unknown token of its own (unk_token), or choose another eos_token."
            )
        return np.asarray([i for one in replaced for i in one], np.int32)

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> Int32[np.ndarray, " n"]:
        with _explained(f"The tokenizer {self.companions.where} cannot encode a text"):
            ids = self._prompts.encode(encodable(text), add_special_tokens=add_special_tokens).ids
        return np.asarray(ids, np.int32)

    def encode_with_offsets(self, text: str) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, "n 2"]]:
        with _explained(f"The tokenizer {self.companions.where} cannot encode a text"):
            encoded = self._prompts.encode(encodable(text), add_special_tokens=False)
        return np.asarray(encoded.ids, np.int32), np.asarray(encoded.offsets, np.int32).reshape(-1, 2)

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        tokenizer = self._prompts if self._added else self._documents
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        with _explained(f"The tokenizer {self.companions.where} cannot decode tokens"):
            return tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def files(self) -> dict[str, bytes]:
        return {TOKENIZER_JSON: self._specification.encode(), **self.companions.files}

    def exported_files(self) -> dict[str, bytes]:
        configuration = dict(self.companions.configuration)
        splits = json.loads(self._prompt_specification).get("pre_tokenizer") or {}
        if "add_prefix_space" in splits:  # the class that is written sets it too, in transformers 4 by default to False
            configuration["add_prefix_space"] = splits["add_prefix_space"]
        eos = self._documents.id_to_token(self.eos_id)
        return {
            **self.files(),
            TOKENIZER_JSON: self._prompt_specification.encode(),
            CONFIGURATION: transformers_configuration(configuration, eos_token=eos),
        }
