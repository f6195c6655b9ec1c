"""Tokenizers: tokenizer.json with its companion files, and SentencePiece models."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from pathlib import Path

from .kind import TESTS, TEXT, Kind
from .mutations import damage_bytes, damage_json_text


class TokenizerJson(Kind):
    """tokenizer.json of byte pairs and of unigrams, and the companion files."""

    name = "tokenizer.json"

    def prepare(self, directory: Path) -> None:
        from pe_lab.data.tokenizers.companions import AddedToken
        from pe_lab.data.tokenizers.gguf import PRE_TOKENIZERS
        from pe_lab.data.tokenizers.tokenizer_json import assemble, bpe, byte_level, byte_symbols, sequence

        self.path = directory / "tokenizer.json"
        symbols = {symbol: i for i, symbol in enumerate(byte_symbols())} | {"he": 256, "ll": 257, "hell": 258}
        end = AddedToken("<|endoftext|>", 259)
        patterns = [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
            for p in PRE_TOKENIZERS["smollm"]
        ]
        merges = [("h", "e"), ("l", "l"), ("he", "ll")]
        pairs = assemble(
            bpe(symbols, merges),
            [end],
            normalizer={"type": "NFC"},
            pre_tokenizer=sequence("pretokenizers", [*patterns, byte_level(False)]),
            decoder=byte_level(True),
            before=[end],
        )
        unigrams = assemble(
            {
                "type": "Unigram",
                "unk_id": 0,
                "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["he", -3.0]],
                "byte_fallback": False,
            },
            [AddedToken("</s>", 4)],
            normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            decoder={"type": "Fuse"},
        )
        self.seeds = [json.loads(pairs), json.loads(unigrams)]
        self.companions = {
            "tokenizer_config.json": {
                "eos_token": "<|endoftext|>",
                "add_bos_token": True,
                "added_tokens_decoder": {"260": {"content": "<x>", "special": True}},
            },
            "generation_config.json": {"eos_token_id": [259, 260]},
            "added_tokens.json": {"<y>": 261},
        }
        self.path.write_text(pairs)

    def write(self, rng: random.Random) -> None:
        self.path.write_bytes(json.dumps(seed := rng.choice(self.seeds)).encode())
        for name in self.companions:
            self.path.with_name(name).unlink(missing_ok=True)
        if rng.random() < 0.3:
            name = rng.choice(list(self.companions))
            self.path.with_name(name).write_bytes(damage_json_text(rng, self.companions[name]))
        else:
            # The vocabulary has most of the places, and the rest is more interesting.
            part = rng.choice([key for key in seed])
            content = damage_json_text(rng, {part: seed[part]} if rng.random() < 0.8 else seed)
            # Too deep, another type, or bytes that are no JSON: the damaged part is the input.
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                content = json.dumps({**seed, **json.loads(content)}).encode()
            self.path.write_bytes(content)

    def read(self) -> None:
        from pe_lab.data.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(f"hf:{self.path}")
        ids = tokenizer.encode_prompt(TEXT)
        tokenizer.encode(TEXT)
        tokenizer.decode(ids)


class SentencePiece(Kind):
    """Pieces, scores, types and settings of a model, and its bytes."""

    name = "SentencePiece"

    def prepare(self, directory: Path) -> None:
        from sentencepiece import sentencepiece_model_pb2

        from pe_lab.data.tokenizers import train_sentencepiece

        self.path = directory / "tokenizer.model"
        documents = [Path(__file__).read_text(), (TESTS / "fuzz" / "mutations.py").read_text()]
        self.model = train_sentencepiece(documents, 420, "fuzz").files()["tokenizer.model"]
        self.proto = sentencepiece_model_pb2.ModelProto
        self.path.write_bytes(self.model)

    def write(self, rng: random.Random) -> None:
        content = self.model
        if rng.random() < 0.6:
            proto = self.proto.FromString(content)
            for _ in range(rng.randint(1, 3)):
                piece = proto.pieces[rng.randrange(len(proto.pieces))]
                number = rng.choice((0, 1, -1, 419, 420, 2**31 - 1, -(2**31)))
                match rng.randrange(9):
                    case 0:
                        piece.piece = rng.choice(("", "▁", "<0x41>", "a\0b", "x" * 3000, "<unk>"))
                    case 1:
                        piece.score = rng.choice((float("nan"), float("inf"), 3e38, -3e38))
                    case 2:
                        piece.type = rng.randint(1, 6)
                    case 3:
                        field = rng.choice(
                            ("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size", "max_sentence_length")
                        )
                        setattr(proto.trainer_spec, field, number)
                    case 4:
                        proto.trainer_spec.model_type = rng.randint(1, 4)
                    case 5:
                        proto.normalizer_spec.precompiled_charsmap = rng.choice(
                            (
                                b"",
                                b"\xff" * 8,
                                struct.pack("<I", 2**31),
                                struct.pack("<I", 4) + b"\1\2\3\4abc",
                                rng.randbytes(64),
                            )
                        )
                    case 6:
                        del proto.pieces[rng.randrange(len(proto.pieces)) :]
                        if not proto.pieces:
                            break
                    case 7:
                        proto.trainer_spec.byte_fallback = not proto.trainer_spec.byte_fallback
                    case 8:
                        proto.pieces.add().CopyFrom(piece)
            content = proto.SerializeToString()
        if rng.random() < 0.5:
            content = damage_bytes(rng, content)
        self.path.write_bytes(content)

    def read(self) -> None:
        from pe_lab.data.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(f"sentencepiece:{self.path}")
        tokenizer.encode(TEXT)
        tokenizer.decode(tokenizer.encode_prompt(TEXT))
