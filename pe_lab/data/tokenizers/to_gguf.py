"""A tokenizer as the metadata of a GGUF file, with which llama.cpp gives the same ids.

llama.cpp knows the patterns that split a text by a name alone (`tokenizer.ggml.pre`): the name of those that split a
difficult text into the same parts is written. What is written is read again as llama.cpp reads it (`gguf_tokenizer`),
and must give the ids of the original.
"""

from __future__ import annotations

import contextlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pe_lab.data.tokenizers.gguf import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS,
    gguf_tokenizer,
)
from pe_lab.data.tokenizers.tokenizer import DIFFICULT, SENTENCEPIECE_MODEL, TOKENIZER_JSON, Tokenizer
from pe_lab.data.tokenizers.tokenizer_json import byte_symbols
from pe_lab.errors import UnsupportedError, UserError

_ABSENT = -1e6  # the score of a piece that is never the result of a merge


class _Vocabulary(NamedTuple):
    """Strings and types by id, and the fields of one kind of tokenizer."""

    tokens: dict[int, str]
    types: dict[int, int]
    fields: dict[str, Any]


def gguf_metadata(tokenizer: Tokenizer, vocab_size: int, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata of a GGUF file whose model has `vocab_size` embeddings, and messages about differences that stay.

    `name` is the model's: llama.cpp treats spaces beside the special tokens of one called Phi-3 otherwise.

    Raises:
      UnsupportedError: llama.cpp would give other ids.
    """
    try:
        if tokenizer.kind == "sentencepiece":
            return _checked(tokenizer, _of_sentencepiece(tokenizer), vocab_size, name)
        if tokenizer.kind == "bytes":
            return _checked(tokenizer, _of_bytes(tokenizer, vocab_size), vocab_size, name)
        content = json.loads(tokenizer.exported_files()[TOKENIZER_JSON])
        return _checked(tokenizer, _of_json(content), vocab_size, name, _normal_form(content))
    except UserError as error:
        raise UnsupportedError(
            f"The tokenizer {tokenizer.companions.where} cannot be written into a GGUF file: {error} Write the model "
            "without it: --tokenizer=none."
        ) from None


def _of_bytes(tokenizer: Tokenizer, vocab_size: int) -> _Vocabulary:
    tokens = dict(enumerate(byte_symbols())) | {tokenizer.eos_id: tokenizer.end.content}
    types = dict.fromkeys(range(256), NORMAL) | {tokenizer.eos_id: CONTROL}
    if vocab_size <= len(tokens):
        raise UnsupportedError("llama.cpp needs a merge of byte pairs, and no embedding is left for its result.")
    # llama.cpp refuses a file without merges: this is one of a token that no text contains.
    left, right = tokenizer.end.content, tokens[ord("!")]
    tokens[len(tokens)], types[len(types)] = left + right, UNUSED
    return _Vocabulary(tokens, types, {"model": "gpt2", "pre": "gpt-2", "merges": [f"{left} {right}"]})


def _of_json(content: Mapping[str, Any]) -> _Vocabulary:
    model = content["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(f"llama.cpp has no tokenizer of kind {model.get('type')} for this model.")
    tokens = {id: token for token, id in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for added in content.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if model.get("byte_fallback"):
        return _scored(content, tokens, types, pairs)
    fields = {"model": "gpt2", "pre": _pre_tokenizer(content), "merges": [" ".join(pair) for pair in pairs]}
    return _Vocabulary(tokens, types, fields)


def _scored(
    content: Mapping[str, Any], tokens: dict[int, str], types: dict[int, int], pairs: Sequence[Sequence[str]]
) -> _Vocabulary:
    """A tokenizer.json that was made of a SentencePiece model: the score of a piece is the rank of its merge."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    unknown = content["model"].get("unk_token")
    for id, token in tokens.items():
        if len(token) == 6 and token.startswith("<0x"):
            types[id] = BYTE
        elif token == unknown:
            types[id] = UNKNOWN
    scores = {id: -float(ranks[token]) if token in ranks else _ABSENT for id, token in tokens.items()}
    before = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    space = '"Prepend"' in before or '"prepend_scheme": "first"' in before or '"prepend_scheme": "always"' in before
    return _Vocabulary(tokens, types, {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": space})


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name of the patterns that split a text as a tokenizer.json does."""
    import tokenizers
    from tokenizers import Regex, pre_tokenizers

    read = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))
    form = _normal_form(content)
    texts = [unicodedata.normalize(form, text) if form else text for text in DIFFICULT]
    if read.pre_tokenizer is None:
        raise UnsupportedError("it does not split a text before it merges, as all of llama.cpp's do.")
    wanted = [_parts(read.pre_tokenizer, text) for text in texts]
    whole_words = bool(content["model"].get("ignore_merges"))
    for name, patterns in PRE_TOKENIZERS.items():
        if (name in WHOLE_WORDS) != whole_words:
            continue
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        splits = pre_tokenizers.Sequence([*steps, bytes_of])
        if all(_parts(splits, text) == parts for text, parts in zip(texts, wanted, strict=True)):
            return name
    raise UnsupportedError(
        "it splits a text before it merges as none of the pre-tokenizers of llama.cpp that pe_lab knows "
        f"({', '.join(PRE_TOKENIZERS)})."
    )


def _parts(splits: Any, text: str) -> list[str]:
    return [part for part, _ in splits.pre_tokenize_str(text)]


def _normal_form(content: Mapping[str, Any]) -> str:
    """The normal form of Unicode that a byte-level tokenizer.json makes first; llama.cpp makes none."""
    normalizer = content.get("normalizer")
    if normalizer is None or content["model"].get("byte_fallback"):
        return ""
    steps = normalizer.get("normalizers", [normalizer])
    kinds = [step.get("type") for step in steps]
    if kinds and set(kinds) - {"NFC", "NFKC", "NFD", "NFKD"} or len(kinds) > 1:
        raise UnsupportedError(f"it normalizes a text ({', '.join(map(str, kinds))}), which llama.cpp does not.")
    return kinds[0] if kinds else ""


def _of_sentencepiece(tokenizer: Tokenizer) -> _Vocabulary:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.files()[SENTENCEPIECE_MODEL])
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise UnsupportedError("it is a SentencePiece model of another kind than byte pairs.")
    tokens = {i: piece.piece for i, piece in enumerate(proto.pieces)}
    types = {i: piece.type for i, piece in enumerate(proto.pieces)}
    scores = {i: piece.score for i, piece in enumerate(proto.pieces)}
    for added in tokenizer.companions.added:
        id = next((i for i, token in tokens.items() if token == added.content), added.id)
        if id is not None:
            tokens[id] = added.content
            types[id] = CONTROL if added.special and types.get(id) != UNKNOWN else types.get(id, USER_DEFINED)
            scores.setdefault(id, _ABSENT)
    space = proto.normalizer_spec.add_dummy_prefix
    return _Vocabulary(tokens, types, {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": space})


def _checked(
    tokenizer: Tokenizer, found: _Vocabulary, vocab_size: int, name: str, form: str = ""
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All fields, compared: read again they give the ids of the tokenizer."""
    tokens, types, fields = found
    ids = range(vocab_size)
    ggml: dict[str, Any] = {**fields}
    ggml["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in ids]
    ggml["token_type"] = [types.get(i, UNUSED) for i in ids]
    if "scores" in fields:
        ggml["scores"] = [float(fields["scores"].get(i, _ABSENT)) for i in ids]
    ggml |= _roles(tokenizer, tokens)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    with contextlib.suppress(UnsupportedError):  # a model that was not made for chats
        metadata["tokenizer.chat_template"] = tokenizer.companions.template
    read = gguf_tokenizer(metadata | {"general.name": name}, "what was to be written")
    added = [tokens[i] for i, kind in types.items() if kind in (CONTROL, USER_DEFINED)]
    texts = [unicodedata.normalize(form, text) if form else text for text in DIFFICULT]
    plain = [text for text in texts if not any(token in text for token in added)]
    pairs = [(text, read.encode(text), tokenizer.encode(text)) for text in texts]
    pairs += [(text, read.encode_prompt(text), tokenizer.encode_prompt(text)) for text in plain]
    for text, theirs, own in pairs:
        if theirs.tolist() != own.tolist():
            at = next((n for n, (x, y) in enumerate(zip(theirs, own, strict=False)) if x != y), len(own))
            there, here = (one[at : at + 8].tolist() for one in (theirs, own))
            raise UnsupportedError(
                f"of {text[:40]!r} llama.cpp would make {there} from id {at} on, and it makes {here}."
            )
    notes = []
    # Of a token within a prompt: whether it is found, and what becomes of the spaces beside it.
    differ = [token for token in added[:64] if not _same(read, tokenizer, f"a{token}b a {token} b")]
    if differ:
        shown = ", ".join(map(repr, differ[:4])) + (f" and {len(differ) - 4} more" if len(differ) > 4 else "")
        notes.append(
            f"llama.cpp gives other ids to a prompt with {shown} within the text, or to the spaces beside them."
        )
    if form:
        notes.append(f"llama.cpp does not normalize a text to {form}: one in another form gets other ids there.")
    lost = [i for i in tokenizer.stop_ids if i not in _ends(ggml, tokens, types)]
    if lost:
        notes.append(f"llama.cpp does not end generation at {', '.join(repr(tokens.get(i, i)) for i in lost)}.")
    return metadata, tuple(notes)


def _roles(tokenizer: Tokenizer, tokens: Mapping[int, str]) -> dict[str, Any]:
    """The ids of tokens with a role, and whether a prompt begins or ends with one."""
    ids = {token: i for i, token in tokens.items()}
    named = tokenizer.companions.named
    roles: dict[str, Any] = {"eos_token_id": int(tokenizer.eos_id)}
    if tokenizer.bos_id is not None:
        roles["bos_token_id"] = int(tokenizer.bos_id)
    for role, name in (("padding", "pad_token"), ("unknown", "unk_token")):
        if named.get(name) in ids:
            roles[f"{role}_token_id"] = ids[named[name]]
    others = [int(i) for i in tokenizer.stop_ids if i != tokenizer.eos_id]
    if others:
        roles["eot_token_id"] = others[0]
    framed, bare = (tokenizer.encode_prompt("a", add_special_tokens=one).tolist() for one in (True, False))
    first, last = _frame(framed, bare)
    if first not in ([], [tokenizer.bos_id]) or last not in ([], [tokenizer.eos_id]):
        raise UnsupportedError(
            f"it makes {framed} of the prompt {bare}; llama.cpp adds BOS before it, the end after it, or nothing."
        )
    return roles | {"add_bos_token": bool(first), "add_eos_token": bool(last)}


def _frame(framed: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """What stands before and after `bare` in `framed`."""
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return framed, []


def _same(one: Tokenizer, other: Tokenizer, text: str) -> bool:
    return one.encode_prompt(text).tolist() == other.encode_prompt(text).tolist()


def _ends(ggml: Mapping[str, Any], tokens: Mapping[int, str], types: Mapping[int, int]) -> set[int]:
    """The ids at which llama.cpp ends generation."""
    named = {i for i, token in tokens.items() if token in ENDS and (types[i] == CONTROL or "|" in token)}
    return named | {ggml[name] for name in ("eos_token_id", "eot_token_id") if name in ggml}
