"""Weights and configurations of other programs: safetensors, Hugging Face's config.json, GGUF."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

from .kind import DATA, TEXT, Kind
from .mutations import damage_bytes, damage_json_text, value


def models() -> list[Path]:
    """Real Hugging Face directories, one of each family."""
    return [
        DATA / name
        for name in ("llama", "gpt_neox", "qwen3", "smollm3_window", "llama_yarn", "llama_longrope", "gemma")
    ]


class _HuggingFace(Kind):
    def prepare(self, directory: Path) -> None:
        self.sources = models()
        self.target = directory / "model"
        self.target.mkdir()
        self.place(self.sources[0])

    def place(self, source: Path) -> None:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(source / name, self.target / name)

    def read(self) -> None:
        from pe_lab.checkpoints.huggingface import HuggingFaceSource

        opened = HuggingFaceSource(self.target)
        opened.read("token_embedder.embedding", rows=slice(0, 2))
        opened.read("layers.attention.query", 0)


class Safetensors(_HuggingFace):
    """The header's JSON, its length, and the bytes."""

    name = "safetensors"

    def write(self, rng: random.Random) -> None:
        self.place(source := rng.choice(self.sources))
        content = (source / "model.safetensors").read_bytes()
        if rng.random() < 0.5:
            content = damage_bytes(rng, content[:4096]) + content[4096:]
        else:
            end = 8 + int.from_bytes(content[:8], "little")
            header = damage_json_text(rng, json.loads(content[8:end]))
            size = len(header) if rng.random() < 0.9 else rng.choice((0, 2**31, 2**63, 2**64 - 1, len(header) + 8))
            content = size.to_bytes(8, "little") + header + content[end:]
        (self.target / "model.safetensors").write_bytes(content)


class HuggingFaceConfig(_HuggingFace):
    name = "config.json"

    def write(self, rng: random.Random) -> None:
        self.place(source := rng.choice(self.sources))
        config = json.loads((source / "config.json").read_text())
        (self.target / "config.json").write_bytes(damage_json_text(rng, config))


class Gguf(Kind):
    """Types and values of metadata, shapes, number formats and offsets of tensors, and the bytes."""

    name = "GGUF"

    def prepare(self, directory: Path) -> None:
        import numpy as np
        from checkpoints.test_gguf_source import SHAPE, tensors_of

        self.path = directory / "model.gguf"
        fields: dict[str, Any] = {"general.architecture": "llama", **SHAPE}
        pieces = [
            b"<unk>",
            b"<s>",
            b"</s>",
            *(f"<0x{byte:02X}>".encode() for byte in range(256)),
            b"\xe2\x96\x81",
            b"a",
        ]
        tokens = [piece.decode() for piece in pieces]
        tokens += [f"piece{i}" for i in range(96 - len(tokens))]
        fields |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        }
        letters = [chr(0x21 + i) for i in range(90)]
        pairs = fields | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*letters, letters[40] + letters[41], "<|im_end|>"],
            "tokenizer.ggml.token_type": [*[1] * 91, 3],
            "tokenizer.ggml.merges": [f"{letters[40]} {letters[41]}"],
            "tokenizer.ggml.eos_token_id": 91,
        }
        self.seeds = [fields, pairs]
        self.tensors = {
            name: (array.shape, 0, np.ascontiguousarray(array, np.float32).tobytes())
            for name, array in tensors_of("llama", 4, 2).items()
        }
        self.path.write_bytes(encode_gguf(fields, self.tensors))

    def write(self, rng: random.Random) -> None:
        fields, tensors = dict(rng.choice(self.seeds)), dict(self.tensors)
        if rng.random() < 0.6:
            for _ in range(rng.randint(1, 3)):
                key = rng.choice(list(fields))
                fields[key] = value(rng) if rng.random() < 0.7 else fields[rng.choice(list(fields))]
                if rng.random() < 0.1:
                    del fields[key]
        if rng.random() < 0.3:
            name = rng.choice(list(tensors))
            shape, kind, data = tensors[name]
            shape = tuple(rng.choice((0, 1, n, n + 1, 2**31, 2**62)) for n in shape) * rng.choice((1, 1, 2, 3))
            tensors[name] = (shape, rng.choice((0, 1, 2, 8, 12, 30, 99)), data)
        content = encode_gguf(fields, tensors)
        if rng.random() < 0.5:
            head = min(len(content), 16_384)
            content = damage_bytes(rng, content[:head]) + content[head:]
        self.path.write_bytes(content)

    def read(self) -> None:
        from pe_lab.checkpoints.gguf.source import GgufSource
        from pe_lab.data.tokenizers import load_tokenizer
        from pe_lab.errors import UserError

        try:
            opened = GgufSource(self.path)
            opened.read("token_embedder.embedding", rows=slice(0, 2))
            opened.read("layers.attention.query", 0)
        except UserError:
            load_tokenizer(f"gguf:{self.path}").encode_prompt(TEXT)
            raise


def encode_gguf(fields: dict[str, Any], tensors: dict[str, Any]) -> bytes:
    """A GGUF file of version 3; values of Python get the type that fits them."""

    def string(text: str) -> bytes:
        encoded = text.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(encoded)) + encoded

    def typed(item: Any) -> tuple[int, bytes]:
        if isinstance(item, bool):
            return 7, struct.pack("<?", item)
        if isinstance(item, int):
            if 0 <= item < 2**32:
                return 4, struct.pack("<I", item)
            return (11, struct.pack("<q", item)) if -(2**63) <= item < 2**63 else (10, struct.pack("<Q", item % 2**64))
        if isinstance(item, float):
            return (6, struct.pack("<f", item)) if abs(item) < 1e38 else (12, struct.pack("<d", item))
        if isinstance(item, list):
            parts = [typed(one) for one in item]
            kind = parts[0][0] if parts else 4
            same = [data for found, data in parts if found == kind]
            return 9, struct.pack("<IQ", kind, len(same)) + b"".join(same)
        return 8, string(item if isinstance(item, str) else json.dumps(item))

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    for key, item in fields.items():
        kind, data = typed(item)
        out += string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (shape, kind, data) in tensors.items():
        body += b"\0" * (-len(body) % 32)
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += data
    return out + b"\0" * (-len(out) % 32) + body
