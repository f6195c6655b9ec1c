"""Hugging Face `tokenizer.json`: documents as the `tokenizers` package encodes them, prompts as transformers does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
from jaxtyping import Int32

from pe_lab.data.tokenizers.companions import CONFIGURATION, MOST_IDS, Companions
from pe_lab.data.tokenizers.tokenizer import (
    TOKENIZER_JSON,
    Tokenizer,
    digest,
    encodable,
    transformers_configuration,
)
from pe_lab.errors import DataError, excerpt

if TYPE_CHECKING:
    import tokenizers

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
    no document can contain an end of document. Prompts (`encode_prompt`) are encoded as by transformers'
    AutoTokenizer: special tokens are found in the text, tokenizer_config.json may add some, and tokenizer.json alone
    determines the first and the last tokens (transformers 4 obeyed `add_bos_token` too, but only in a few classes).

    Raises:
      DataError: a file cannot be read, or no end-of-document symbol is found.
    """

    kind = "hf"

    def __init__(self, specification: str, companions: Companions):
        self._specification, self.companions = specification, companions
        self._documents = self._read()
        self._documents.encode_special_tokens = True
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
        self.fingerprint = f"hf-{self.eos_id}-" + digest(specification.encode())
        self.bos_id = ids.get(companions.named.get("bos_token", ""))
        self.stop_ids = companions.stop_ids(self.eos_id)

    def _read(self) -> tokenizers.Tokenizer:
        import tokenizers

        os.environ["RUST_BACKTRACE"] = "0"  # a panic is raised as an error; its trace is 11 KB on stderr
        with _explained(f"{self.companions.where} is not a Hugging Face tokenizer.json"):
            read = tokenizers.Tokenizer.from_str(self._specification)
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
        """The tokenizer with the tokens that transformers adds to it."""
        import tokenizers

        read = self._read()
        # A token of the vocabulary keeps its id, and is found in a text from now on.
        found = {token.content for token in read.get_added_tokens_decoder().values()}
        more = [t for t in self.companions.added if t.id is not None or read.token_to_id(t.content) is not None]
        read.add_tokens([tokenizers.AddedToken(t.content, **t.flags()) for t in more if t.content not in found])
        return read

    @cached_property
    def _spelled(self) -> dict[int, list[int]]:
        """For every special token that the model itself may find in a text, the ids of its characters.

        Only models of unigrams do: their special tokens are ordinary pieces, on which encode_special_tokens has no
        effect. Byte pairs never merge into a special token.
        """
        model = self._documents.model
        if type(model).__name__ != "Unigram":
            return {}
        unknown = json.loads(self._specification)["model"]["unk_id"]
        special = {i: t.content for i, t in self._documents.get_added_tokens_decoder().items() if t.special}
        characters = {i: [model.token_to_id(c) for c in content] for i, content in special.items()}
        return {i: [unknown if c is None else c for c in ids] for i, ids in characters.items() if i != unknown}

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        with _explained(f"The tokenizer {self.companions.where} cannot encode a text"):
            encoded = self._documents.encode_batch_fast(list(map(encodable, texts)), add_special_tokens=False)
            ids = [one.ids for one in encoded]
        if self._spelled:
            ids = [[j for i in one for j in self._spelled.get(i, (i,))] for one in ids]
        return [np.asarray(one, np.int32) for one in ids]

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
        eos = self._documents.id_to_token(self.eos_id)
        return {**self.files(), CONFIGURATION: transformers_configuration(self.companions.configuration, eos_token=eos)}
