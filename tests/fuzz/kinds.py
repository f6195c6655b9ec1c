"""What is fuzzed: each kind of input with its real files, their damages, and the reader of pe_lab that gets them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .mutations import damage_bytes, damage_json_text, value

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data" / "hf"
TEXT = "Hello  world, 1234 naïve 日本\n\tdef f(x): return x ** 2  # <|endoftext|> </s>\n"


class Kind(ABC):
    """One kind of input. `prepare` makes real files below a directory, and writes them as an intact input."""

    name: str

    @abstractmethod
    def prepare(self, directory: Path) -> None: ...

    @abstractmethod
    def write(self, rng: random.Random) -> None:
        """Writes a damaged input in place of the last one."""

    @abstractmethod
    def read(self) -> None:
        """Reads the input; `UserError` if it is refused."""


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
        from checkpoints.test_gguf_file import SHAPE, tensors_of

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
        from pe_lab.checkpoints.gguf_file import GgufSource
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


class Prepared(Kind):
    """metadata.json and the ArrayRecord shards of prepared data."""

    name = "prepared data"

    def prepare(self, directory: Path) -> None:
        from pe_lab.config import SourceConfig
        from pe_lab.data.preparation import prepare
        from pe_lab.data.sources import open_source
        from pe_lab.data.tokenizers import load_tokenizer

        corpus = directory / "corpus.jsonl"
        documents = [*(TEXT * n for n in range(1, 60))]
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        self.whole, self.target = directory / "whole", directory / "prepared"
        source = open_source(SourceConfig(source=f"jsonl:{corpus}"))
        prepare(source, "text", load_tokenizer("bytes"), "bytes", self.whole, 0.2)
        shutil.copytree(self.whole, self.target)
        self.files = [p.relative_to(self.whole) for p in sorted(self.whole.rglob("*")) if p.is_file()]

    def write(self, rng: random.Random) -> None:
        for file in self.files:
            (self.target / file).write_bytes((self.whole / file).read_bytes())
        file = rng.choice(self.files)
        content = (self.whole / file).read_bytes()
        if file.suffix == ".json":
            content = damage_json_text(rng, json.loads(content))
            content = _sealed_anew(content) if rng.random() < 0.5 else content
        else:
            size = len(content)
            content = damage_bytes(rng, content)
            if rng.random() < 0.8:  # of the size that metadata.json gives
                content = content[:size].ljust(size, b"\0")
        (self.target / file).write_bytes(content)

    def read(self) -> None:
        from pe_lab.data.shards import open_prepared

        opened = open_prepared(self.target)
        for split, stream in opened.streams.items():
            opened.tokens(split, 0, min(stream.tokens, 100_000))


def _sealed_anew(content: bytes) -> bytes:
    """Damaged JSON with a digest that fits it: the reader must check each value behind the digest too."""
    from pe_lab.storage.manifest import sealed

    try:
        value = json.loads(content)
        return json.dumps(sealed(value)).encode() if isinstance(value, dict) else content
    except (ValueError, RecursionError):
        return content


class CheckpointMetadata(Kind):
    """The JSON files of a native checkpoint. A manifest that is in its directory is among them."""

    name = "checkpoint JSON"

    def prepare(self, directory: Path) -> None:
        import dataclasses

        from pe_lab.checkpoints import open_checkpoint
        from pe_lab.checkpoints.surgery import write_child

        parent = open_checkpoint(f"hf:{DATA / 'llama'}")
        # What a checkpoint of training has beside that.
        more = {"run": "fuzz", "config_hash": "0", "mixture": [], "versions": {}, "tokenizer": "bytes-257"}
        parent = dataclasses.replace(parent, metadata={**parent.metadata, **more})
        self.whole, self.target = directory / "whole", directory / "child"
        write_child(parent, parent.layers, self.whole, "fuzz")
        shutil.copytree(self.whole, self.target)
        self.files = {}
        for path in sorted(self.whole.rglob("*")):
            if path.is_file() and path.stat().st_size < 2**20:
                try:
                    self.files[path.relative_to(self.whole)] = json.loads(path.read_bytes())
                except ValueError:
                    continue

    def write(self, rng: random.Random) -> None:
        from tiny_runs import reseal

        from pe_lab.storage.manifest import MANIFEST

        for file in self.files:
            shutil.copyfile(self.whole / file, self.target / file)
        ours = [file for file in self.files if file.parts[-2] == "metadata" or "manifest" in file.name]
        file = rng.choice(ours if rng.random() < 0.8 else list(self.files))
        content, anew = damage_json_text(rng, self.files[file]), rng.random() < 0.5
        (self.target / file).write_bytes(_sealed_anew(content) if anew and file.name == MANIFEST else content)
        if anew and file.name != MANIFEST:
            reseal(self.target / "checkpoints/0")

    def read(self) -> None:
        from pe_lab.checkpoints.native import NativeSource

        NativeSource(self.target).read("layers.attention.query", 0)


class Recipe(Kind):
    """The text of a recipe, and overrides of its keys."""

    name = "recipe"

    def prepare(self, directory: Path) -> None:
        from tiny_runs import RECIPE

        self.path = directory / "recipe.py"
        self.text = RECIPE.encode()
        self.path.write_bytes(self.text)
        self.keys = [
            *("seed", "model.layers", "model.heads", "model.d_model", "phases.0.steps", "phases.1.positional"),
            *("phases.0.batch_size", "data.sources.0.options.pairs", "data.sources.0.weight", "checkpoint.milestones"),
            *("phases.0.optimizer.learning_rate", "evaluation.factors", "data.workers", "mesh.fsdp", "notes.paper"),
            *("phases", "phases.9.steps", "phases.²", "phases.", ""),
        ]
        self.overrides: dict[str, str] = {}

    def write(self, rng: random.Random) -> None:
        self.overrides, content = {}, self.text
        if rng.random() < 0.5:
            content = damage_bytes(rng, content)
        else:
            for _ in range(rng.randint(1, 3)):
                encodings = (
                    "yarn:factor=9,original_length=16",
                    "rope/heads=0-99999999999:nope",
                    "pi",
                    "rope+",
                    "rope:base=1e999",
                )
                texts = (repr(value(rng)), "[" * 5000, "1" * 5000, rng.choice(encodings), "1e11", "-1", "nan")
                self.overrides[rng.choice(self.keys)] = rng.choice(texts)
        self.path.write_bytes(content)

    def read(self) -> None:
        from pe_lab.recipes import load_config
        from pe_lab.training.run import plan_phases

        plan_phases(load_config(str(self.path), self.overrides))


class Prompts(Kind):
    """Prompt files, documents in JSON lines, gzipped or not."""

    name = "prompts"

    def prepare(self, directory: Path) -> None:
        import gzip

        from pe_lab.data.tokenizers import load_tokenizer

        self.directory = directory
        lines = "".join(json.dumps({"text": TEXT * n}) + "\n" for n in range(1, 20)).encode()
        self.seeds = {
            "prompts.txt": TEXT.encode() * 9,
            "lines.jsonl": lines,
            "lines.jsonl.gz": gzip.compress(lines),
            "bomb.txt.gz": gzip.compress(b"a" * 100_000_000),
        }
        self.tokenizer = load_tokenizer("bytes")
        self.file = directory / "lines.jsonl.gz"
        self.file.write_bytes(self.seeds["lines.jsonl.gz"])

    def write(self, rng: random.Random) -> None:
        name = rng.choice(list(self.seeds)[: 4 if rng.random() < 0.02 else 3])
        content = damage_bytes(rng, self.seeds[name]) if "bomb" not in name else self.seeds[name]
        if name == "lines.jsonl" and rng.random() < 0.5:
            content = b"\n".join(damage_json_text(rng, {"text": TEXT, "n": [1]}) for _ in range(4))
        self.file = self.directory / name
        self.file.write_bytes(content)

    def read(self) -> None:
        from pe_lab.config import SourceConfig
        from pe_lab.data.sources import open_source
        from pe_lab.data.tokenizers import encodable
        from pe_lab.generate import read_prompts

        if self.file.name == "prompts.txt":
            for prompt in read_prompts(str(self.file)):
                self.tokenizer.encode_prompt(prompt)
            return
        kind = "jsonl" if "jsonl" in self.file.name else "text"
        for document in open_source(SourceConfig(source=f"{kind}:{self.file}")).documents():
            self.tokenizer.encode(encodable(document))


KINDS: dict[str, Callable[[], Kind]] = {
    kind.name: kind
    for kind in (
        Safetensors,
        HuggingFaceConfig,
        Gguf,
        TokenizerJson,
        SentencePiece,
        Prepared,
        CheckpointMetadata,
        Recipe,
        Prompts,
    )
}


def inputs(name: str, directory: Path, seed: int, first: int, last: int) -> Iterator[Kind]:
    """Writes the inputs `first` .. `last` - 1 of a kind, each a function of (seed, kind, number), one at a time.

    An intact input is read before them: what a reader imports and compiles is no part of an input.
    """
    sys.path.insert(0, str(TESTS))  # for the helpers of the tests
    kind = KINDS[name]()
    kind.prepare(directory)
    kind.read()
    for number in range(first, last):
        kind.write(random.Random(f"{seed}/{name}/{number}"))
        yield kind
