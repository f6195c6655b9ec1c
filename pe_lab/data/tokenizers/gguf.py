"""Tokenizers in the metadata of GGUF files, after llama.cpp's src/llama-vocab.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pe_lab.data.tokenizers.companions import CHAT_TEMPLATE, CONFIGURATION, GENERATION, AddedToken, Companions
from pe_lab.data.tokenizers.hugging_face import HuggingFaceTokenizer
from pe_lab.data.tokenizers.sentencepiece import SentencePieceTokenizer
from pe_lab.data.tokenizers.tokenizer_json import assemble, bpe, byte_level, sequence
from pe_lab.errors import DataError, UnsupportedError
from pe_lab.storage.gguf_format import open_gguf

Roles = Mapping[str, AddedToken | None]  # by bos, eos, unk and pad
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# The names of control tokens at which llama.cpp ends generation.
# fmt: off
ENDS = frozenset([
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
])
# fmt: on

# Patterns that split a text before byte pairs are merged, by tokenizer.ggml.pre: one after another, each the parts that
# the ones before did not match.
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


_LLAMA3 = (_WORDS.format(digits=r"\p{N}{1,3}"),)
_QWEN2 = (_WORDS.format(digits=r"\p{N}"),)
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FALCON = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
# fmt: off
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    name: patterns
    for names, patterns in (
        ("default", (r"[\p{P}\$\+<=>\^~\|]+", _FALCON, r"\p{N}+", r"[0-9][0-9][0-9]")),
        ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", _FALCON, r"[0-9][0-9][0-9]")),
        ("gpt-2 phi-2 mpt olmo exaone4 trillion granite-docling", (_GPT2,)),
        ("smollm starcoder refact command-r codeshell exaone minerva-7b", (r"\p{N}", _GPT2)),
        ("llama-bpe llama3 llama-v3 falcon3 lfm2 dbrx smaug-bpe", _LLAMA3),
        ("qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan", _QWEN2),
        ("qwen35", (_QWEN35,)),
        ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        ("deepseek-v3 hunyuan-dense", _DEEPSEEK3),
    )
    for name in names.split()
}
# With these, a word of the vocabulary is one token, whatever the merges, and BOS is added by default.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2")
# fmt: on


def load_gguf_tokenizer(path: Path) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    """The tokenizer of a GGUF file.

    Raises:
      DataError: the file is missing or damaged, or its metadata are inconsistent.
      UnsupportedError: the tokenizer is of an unknown kind, or gguf is not installed.
    """
    fields = open_gguf(path, DataError, lambda key: key.startswith("tokenizer.") or key == "general.name").fields
    return gguf_tokenizer(fields, str(path))


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    """The tokenizer that the metadata of a GGUF file describe; `where` names the file in messages."""
    metadata = _Metadata(fields, where)
    model = metadata.get("model", str)
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"The tokenizer in {where} is of kind {model!r}. Known are gpt2 (byte pairs) and llama (SPM)."
        )
    return _byte_level(metadata) if model == "gpt2" else _sentencepiece(metadata)


class _Metadata:
    """The fields under `tokenizer.ggml.`. Every method raises `DataError` at a field that does not fit."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.fields, self.where = fields, where
        self.tokens: list[str] = self.get("tokens", list)
        self.types: list[int] = list(self.get("token_type", list, [NORMAL] * len(self.tokens)))
        if len(self.types) != len(self.tokens):
            raise self.wrong(f"{len(self.tokens)} tokens, but {len(self.types)} token types")
        if not all(isinstance(token, str) for token in self.tokens):
            raise self.wrong("a token is not a string")
        if unknown := [t for t in self.types if t not in range(1, 7)]:
            raise self.wrong(f"a token is of type {unknown[0]}, and types are 1 to 6")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(self.tokens)]  # llama.cpp's name
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise self.wrong(f"the token {twice!r} is listed twice")
        # Faulty conversions give these tokens another type, which llama.cpp corrects. It also changes a normal </s> or
        # <EOT>, which is wrong: Qwen2 has a piece </s>, and its own tokenizer never finds it in a text.
        for i, token in enumerate(self.tokens):
            if token in ENDS and ("|" in token or self.types[i] != NORMAL):
                self.types[i] = CONTROL

    def wrong(self, reason: str) -> DataError:
        return DataError(
            f"The tokenizer in {self.where} is inconsistent: {reason}. Download or convert the file again."
        )

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.fields.get(f"tokenizer.ggml.{name}")
        if value is None and default is not None:
            return default
        if value is None or not isinstance(value, kind):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise self.wrong(f"tokenizer.ggml.{name} {found}")
        return value

    def roles(self, bos: int | None = None, eos: int | None = None, unk: int | None = None) -> Roles:
        """The tokens with a role; the arguments are the default ids."""
        return {
            "bos": self.token("bos", bos),
            "eos": self.token("eos", eos),
            "unk": self.token("unknown", unk),
            "pad": self.token("padding"),
        }

    def token(self, name: str, default: int | None = None) -> AddedToken | None:
        """The token with the role `name`: bos, eos, unknown, padding, eot, eom."""
        value = self.fields.get(f"tokenizer.ggml.{name}_token_id")
        value = default if value is None else value
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.wrong(f"tokenizer.ggml.{name}_token_id is {value}, and there are {len(self.tokens)} tokens")
        return AddedToken(self.tokens[value], int(value))

    def added(self) -> list[AddedToken]:
        """The tokens found in a text before it is split: user-defined ones always, the others in prompts only."""
        name = str(self.fields.get("general.name", "")).lower()
        phi3 = "phi-3" in name or "phi3" in name  # its added tokens absorb the spaces after them; no field tells
        return [
            AddedToken(
                token,
                i,
                special=kind != USER_DEFINED,
                rstrip=phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]

    def frame(self, roles: Roles, add_bos: bool) -> dict[str, list[AddedToken]]:
        """The tokens `before` and `after` every prompt; `add_bos` is the default of add_bos_token."""
        frame = {}
        for place, role, default in (("before", "bos", add_bos), ("after", "eos", False)):
            wanted = bool(self.fields.get(f"tokenizer.ggml.add_{role}_token", default))
            if wanted and roles[role] is None:
                raise self.wrong(f"add_{role}_token is set, but there is no {role}_token_id")
            frame[place] = [roles[role]] if wanted else []
        return frame

    def companions(self, roles: Roles, **configuration: Any) -> Companions:
        """The companion files of the original tokenizer, as far as the metadata contain them."""
        named = {f"{name}_token": token.content for name, token in roles.items() if token is not None}
        configuration = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **configuration}
        ends = [token.id for token in (roles["eos"], self.token("eot"), self.token("eom")) if token is not None]
        ends += [i for i, token in enumerate(self.tokens) if token in ENDS and self.types[i] == CONTROL]
        files = {
            CONFIGURATION: json.dumps({**configuration, "clean_up_tokenization_spaces": False}, indent=2).encode(),
            GENERATION: json.dumps({"eos_token_id": list(dict.fromkeys(ends))}).encode(),
        }
        template = self.fields.get("tokenizer.chat_template")
        if isinstance(template, str):
            files[CHAT_TEMPLATE] = template.encode()
        return Companions(self.where, files)


def _byte_level(metadata: _Metadata) -> HuggingFaceTokenizer:
    pre = metadata.get("pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"The tokenizer in {metadata.where} has the pre-tokenizer {pre!r} (tokenizer.ggml.pre), which is not "
            f"known here. Known are {', '.join(sorted(PRE_TOKENIZERS))}. Give the original's tokenizer.json instead."
        )
    merges = [_pair(text, metadata) for text in metadata.get("merges", list)]
    roles = metadata.roles()
    if roles["eos"] is None:
        raise metadata.wrong("tokenizer.ggml.eos_token_id is missing")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre]
    ]
    specification = assemble(
        bpe(metadata.ids, merges, ignore_merges=pre in WHOLE_WORDS),
        metadata.added(),
        pre_tokenizer=sequence("pretokenizers", [*splits, byte_level(use_regex=False)]),
        decoder=byte_level(use_regex=True),
        **metadata.frame(roles, add_bos=pre in WHOLE_WORDS),
    )
    return HuggingFaceTokenizer(specification, metadata.companions(roles))


def _pair(text: Any, metadata: _Metadata) -> tuple[str, str]:
    left, space, right = str(text)[1:].partition(" ")  # a symbol has at least one character
    left = str(text)[:1] + left
    if not space or not right:
        raise metadata.wrong(f"the merge {text!r} is not two symbols")
    for symbol in (left, right, left + right):
        if symbol not in metadata.ids:
            raise metadata.wrong(f"the merge {text!r} names {symbol!r}, which is not a token")
    return left, right


def _sentencepiece(metadata: _Metadata) -> SentencePieceTokenizer:
    from sentencepiece import sentencepiece_model_pb2

    scores: Sequence[float] = metadata.get("scores", list)
    if not all(isinstance(score, int | float) for score in scores):
        raise metadata.wrong("a score is not a number")
    if len(scores) != len(metadata.tokens):
        raise metadata.wrong(f"{len(metadata.tokens)} tokens, but {len(scores)} scores")
    roles = metadata.roles(bos=1, eos=2, unk=0)
    unknown = roles["unk"].id
    types = [NORMAL if t == UNKNOWN and i != unknown else t for i, t in enumerate(metadata.types)]
    types[unknown] = UNKNOWN  # SentencePiece requires exactly one
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(metadata.tokens, scores, types, strict=True):
        proto.pieces.add(piece=token, score=score, type=kind)
    trainer, normalization = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    if types.count(BYTE) not in (0, 256):
        raise metadata.wrong(f"{types.count(BYTE)} of its tokens are bytes, and there are 256 bytes")
    trainer.byte_fallback = BYTE in types
    trainer.vocab_size = len(types)
    trainer.unk_id, trainer.unk_piece = unknown, roles["unk"].content
    trainer.bos_id, trainer.bos_piece = roles["bos"].id, roles["bos"].content
    trainer.eos_id, trainer.eos_piece = roles["eos"].id, roles["eos"].content
    trainer.pad_id, trainer.pad_piece = -1, ""
    normalization.name = "identity"
    normalization.add_dummy_prefix = bool(metadata.fields.get("tokenizer.ggml.add_space_prefix", True))
    normalization.remove_extra_whitespaces = False
    frame = metadata.frame(roles, add_bos=True)
    companions = metadata.companions(
        roles,
        add_bos_token=bool(frame["before"]),
        add_eos_token=bool(frame["after"]),
        added_tokens_decoder={str(t.id): {"content": t.content, **t.flags()} for t in metadata.added()},
    )
    return SentencePieceTokenizer(proto.SerializeToString(), companions)
