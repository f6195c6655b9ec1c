"""What a run reads and keeps: prepared data, the JSON of checkpoints, recipes, prompts and documents."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from .kind import DATA, TEXT, Kind
from .mutations import damage_bytes, damage_json_text, value


class Prepared(Kind):
    """metadata.json and the shards of prepared data."""

    name = "prepared data"

    def prepare(self, directory: Path) -> None:
        from pe_lab.config import SourceConfig
        from pe_lab.data.preparation import prepare
        from pe_lab.data.tokenizers import load_tokenizer

        corpus = directory / "corpus.jsonl"
        documents = [*(TEXT * n for n in range(1, 60))]
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        self.whole, self.target = directory / "whole", directory / "prepared"
        source = SourceConfig(source=f"jsonl:{corpus}")
        prepare(source, load_tokenizer("bytes"), "bytes", self.whole, 0.2)
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

        from pe_lab.checkpoints.checkpoint import open_checkpoint
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
        from pe_lab.training.plan import plan_phases

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
            self.tokenizer.encode(encodable(document.text))
