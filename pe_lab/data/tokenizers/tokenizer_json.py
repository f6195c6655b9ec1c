"""The text of a `tokenizer.json`, made from a vocabulary of byte pairs or from a SentencePiece model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pe_lab.data.tokenizers.companions import AddedToken

SPACE = "\u2581"  # SentencePiece's visible space


def byte_symbols() -> list[str]:
    """GPT-2's character for each byte: a printable byte stands for itself, the others for U+0100 and following."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def byte_level(use_regex: bool) -> dict[str, Any]:
    """A pre-tokenizer or decoder between bytes and their characters."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def sequence(kind: str, steps: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """`steps` as one normalizer, pre-tokenizer or decoder: None of none, the step itself, or a Sequence."""
    return {"type": "Sequence", kind: list(steps)} if len(steps) > 1 else next(iter(steps), None)


def bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """A model of byte pairs."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
    }
    return {**model, "vocab": dict(vocabulary), "merges": [list(pair) for pair in merges]}


def assemble(
    model: Mapping[str, Any],
    added: Iterable[AddedToken],
    *,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    decoder: dict[str, Any] | None = None,
    before: Sequence[AddedToken] = (),
    after: Sequence[AddedToken] = (),
) -> str:
    """The text of a `tokenizer.json`; the tokens `before` and `after` (BOS, EOS) are added to every prompt."""

    def special(token: AddedToken, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token.content, "type_id": type_id}}

    def framed(name: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": name, "type_id": type_id}}
        return [*(special(t, type_id) for t in before), middle, *(special(t, type_id) for t in after)]

    post_processor = None
    if before or after:
        frame = {t.content: {"id": t.content, "ids": [t.id], "tokens": [t.content]} for t in (*before, *after)}
        single, second = framed("A", 0), framed("B", 1)
        post_processor = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + second,
            "special_tokens": frame,
        }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token.to_json() for token in sorted(added, key=lambda token: token.id)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": dict(model),
    }
    return json.dumps(whole, ensure_ascii=False)


def bytes_tokenizer_json(end: AddedToken) -> str:
    """A tokenizer.json with an id for every byte, and one for `end`."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary[end.content] = end.id
    return assemble(bpe(vocabulary, ()), [end], pre_tokenizer=byte_level(False), decoder=byte_level(False))


def sentencepiece_tokenizer_json(
    proto: Any, added: Iterable[AddedToken], before: Sequence[AddedToken], after: Sequence[AddedToken]
) -> str:
    """The nearest `tokenizer.json` to a SentencePiece model (its `ModelProto`) of byte pairs or unigrams.

    The two may differ: `tokenizers` merges byte pairs by rank, sentencepiece by score and then from left to right.
    The caller compares their ids.

    Raises:
      ValueError: a model of words or characters, for which there is no `tokenizer.json`.
    """
    trainer, normalization, kinds = proto.trainer_spec, proto.normalizer_spec, proto.SentencePiece
    unknown = next((i for i, p in enumerate(proto.pieces) if p.type == kinds.UNKNOWN), None)
    byte_fallback = any(p.type == kinds.BYTE for p in proto.pieces)
    if trainer.model_type == trainer.UNIGRAM:
        vocabulary = [[p.piece, p.score] for p in proto.pieces]
        body = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": byte_fallback}
    elif trainer.model_type == trainer.BPE:
        scores = {p.piece: p.score for p in proto.pieces if p.type == kinds.NORMAL}
        ids = {p.piece: i for i, p in enumerate(proto.pieces)}
        body = bpe(
            ids,
            _merges(scores, ids),
            unk_token=None if unknown is None else proto.pieces[unknown].piece,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    else:
        raise ValueError("it is a model of words or characters")
    if trainer.treat_whitespace_as_suffix:
        raise ValueError("it writes spaces after words")

    steps: list[dict[str, Any]] = []
    if normalization.precompiled_charsmap:
        charsmap = base64.b64encode(normalization.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normalization.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if normalization.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoding: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoding += [{"type": "ByteFallback"}] if byte_fallback else []
    decoding.append({"type": "Fuse"})
    if normalization.add_dummy_prefix:
        decoding.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return assemble(
        body,
        added,
        normalizer=sequence("normalizers", steps),
        decoder=sequence("decoders", decoding),
        before=before,
        after=after,
    )


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose concatenation is a piece, the piece with the highest score first."""
    pairs = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]
