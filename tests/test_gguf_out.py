"""GGUF files that pe_lab writes, read by llama.cpp: every family and every edit, tokenizers, and SmolLM2, the real one.

PE_LAB_WRITE_DOCS=1 writes the tables of docs/checkpoints.md anew.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf_runtime
import numpy as np
import pytest
from checkpoint_tables import EDITS, HF, TRAINED, command, families, number, table
from real_material import essays, smollm2_gguf
from test_checkpoint_tables import check_or_write

import pe_lab
from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.convert import main as convert
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.data.tokenizers.tokenizer import DIFFICULT
from pe_lab.evaluate import main as evaluate
from pe_lab.language_model import LanguageModel
from pe_lab.positional import (
    PI,
    Beta,
    Encoding,
    Layer,
    LearnedPositions,
    NoPE,
    NTKByParts,
    PartialRope,
    Rope,
    Yarn,
    pattern,
)

pytestmark = pytest.mark.slow
LENGTHS = (512, 3000)
# Of the largest logit. llama.cpp multiplies up frequencies and angles in float32, which shows at 3,000 tokens.
LIMIT = {512: 2e-5, 3000: 2e-4}
# More, where llama.cpp reads GELU from a table of 16 bits. Gemma 4 feels it most: with GELU in 16 bits the logits of
# `gemma4_shared` differ in pe_lab itself by 5.5e-3 of the largest, at 3,000 tokens.
GELU, GELU_OF_GEMMA_4 = 1e-3, 8e-3
REFUSED = {
    "exaone4": "no sliding windows, except with 64 layers",
    "gptj": "unembedding_bias is True",
    "granite_swa": "it has one rotation",
    "llama_drope": "qk_norm is 'flat'",
    "llama_dynamic": "depends on the length",
    "mpt": "cannot be folded into queries that are clipped",
    "opt": "activation is 'relu'",
    "phi3": "no sliding windows",
    "starcoder2": "no sliding windows",
}


def _without_windows(lm: LanguageModel) -> object:
    return pattern([dataclasses.replace(layer, window=None) for layer in lm.layers])


def _yarn_on_full(lm: LanguageModel) -> object:
    (base,) = {layer.encoding.base for layer in lm.layers if layer.window is None}
    return _on_full(Rope(base, scaling=Yarn(4, TRAINED)))(lm)


def _on_full(encoding: Encoding) -> Callable[[LanguageModel], object]:
    def change(lm: LanguageModel) -> object:
        layers = lm.layers
        return pattern([one if one.window else dataclasses.replace(one, encoding=encoding) for one in layers])

    return change


@dataclass(frozen=True)
class Model:
    """A model of tests/data/hf as it is, or edited."""

    name: str
    base: str
    positional: object = None
    logit_scale: float | Beta | None = None
    options: tuple[str, ...] = ()

    def load(self) -> LanguageModel:
        lm = pe_lab.load(f"hf:{HF / self.base}")
        positional = self.positional(lm) if isinstance(self.positional, Callable) else self.positional
        return lm if positional is None else lm.with_positional(positional, self.logit_scale)


def models() -> list[Model]:
    """Everything that is written."""
    found = [Model(f"`{name}`", name) for name in families() if name not in REFUSED]
    found += [Model(one.name, one.base, one.positional, one.logit_scale, one.options) for one in EDITS]
    base = 500.0
    found += [
        Model("YaRN(4) with betas 8 and 1/4", "llama", Rope(base, scaling=Yarn(4, TRAINED, 8, 0.25))),
        Model("YaRN(4) with attention factor 1.3", "llama", Rope(base, scaling=Yarn(4, TRAINED, attention_factor=1.3))),
        Model("QK-norm, NTK-by-parts(4)", "qwen3", Rope(base, scaling=NTKByParts(4, TRAINED))),
        Model("bias, p-RoPE 0.5", "qwen2", Rope(base, 0.5)),
        Model("bias, partial RoPE 0.5 as Llama", "qwen2", PartialRope(base, 0.5), options=("--family=llama",)),
        Model("Phi-3 without windows", "phi3", _without_windows),
        Model("StarCoder2 without windows", "starcoder2", _without_windows),
        Model("Gemma 3, YaRN(4) on full layers", "gemma3", _yarn_on_full),
        Model("OLMo 3, YaRN(4) on full layers", "olmo3", _yarn_on_full),
        Model("Gemma 4, RoPE on full layers", "gemma4", _on_full(Rope(500.0))),
        Model("Gemma 4, PI(4) on full layers", "gemma4", _on_full(Rope(500.0, scaling=PI(4)))),
        Model("Gemma 4, full layers dropped", "gemma4_shared", _on_full(NoPE())),
    ]
    return [one for one in found if one.name != "dynamic NTK"]


def expected(one: Model, lm: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """The logits that the file should give: with a scale that depends on the length, those of the one given."""
    if isinstance(one.logit_scale, Beta):
        (length,) = (int(option.removeprefix("--length=")) for option in one.options)
        lm = lm.with_positional(lm.layers, one.logit_scale.at(length))
    if "--length=40" in one.options:
        lm = lm.with_positional(pattern([_at_40(layer) for layer in lm.layers]))
    return np.asarray(lm.logits(tokens))


def _at_40(layer: Layer) -> Layer:
    from pe_lab.checkpoints.hf_export import exported_layers

    return exported_layers([layer], 40)[0][0]


def test_llama_cpp_computes_what_is_written(tmp_path: Path) -> None:
    """Every family and every edit, in float32. Costs 8 minutes."""
    rows, jobs, wanted, notes = [], [], {}, {}
    for one in models():
        lm = one.load()
        child, file = tmp_path / "child" / re.sub(r"\W+", "_", one.name), tmp_path / re.sub(r"\W+", "_", one.name)
        file = file.with_suffix(".gguf")
        if one.positional is None:
            child = f"hf:{HF / one.base}"
        else:
            lm.save(child)
        notes[one] = command(f"--from={child}", f"--to=gguf:{file}:f32", *one.options)
        most = min([x.encoding.size for x in lm.layers if isinstance(x.encoding, LearnedPositions)], default=10**6)
        for length in sorted({min(length, most) for length in LENGTHS}):
            tokens = np.random.default_rng(length).integers(
                0, open_source(f"gguf:{file}").model.vocab_size, (1, length)
            )
            jobs.append((one, length, file, tokens.astype(np.int32)))
            wanted[one, length] = expected(one, lm, tokens.astype(np.int32))
    read = gguf_runtime.logits([job[2:] for job in jobs])
    found = {(one, length): logits for (one, length, *_), logits in zip(jobs, read, strict=True)}
    for one in dict.fromkeys(job[0] for job in jobs):
        cells = []
        for length in (length for other, length in found if other == one):
            theirs, ours = found[one, length], wanted[one, length]
            difference, agreement = np.abs(theirs - ours).max(), (theirs.argmax(-1) == ours.argmax(-1)).mean()
            gelu = GELU_OF_GEMMA_4 if one.base.startswith("gemma4") else GELU
            limit = LIMIT.get(length, LIMIT[512]) + (gelu if "GELU" in notes[one] else 0)
            print(one.name, length, difference, np.abs(ours).max(), agreement)
            assert difference <= limit * np.abs(ours).max(), (one.name, length, difference, agreement)
            assert agreement >= (1 if length < 3000 and "GELU" not in notes[one] else 0.99), (
                one.name,
                length,
                agreement,
            )
            cells.append(f"{number(difference)}, {agreement:.1%}")
        architecture = re.search(r"llama\.cpp's (\w+),", notes[one])[1]
        option = " ".join(f"`{option}`" for option in one.options)
        option = option or ("64 positions" if len(cells) == 1 else "")
        rows.append([one.name + (f" ({option})" if option else ""), architecture, *(cells * 2)[:2]])
    header = ["model", "written as", "512 tokens: logits, top-1", "3,000 tokens: logits, top-1"]
    check_or_write("gguf", table(header, rows))


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_otherwise_is_refused(name: str, tmp_path: Path, capsys) -> None:
    assert convert([f"--from=hf:{HF / name}", f"--to=gguf:{tmp_path / 'model.gguf'}"]) == 2
    assert REFUSED[name] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def ids_agree(source: str, vocab_size: int, scratch: Path) -> None:
    """A tokenizer, written without a model, gives the same ids in llama.cpp, as documents and as prompts."""
    import gguf

    from pe_lab.data.tokenizers.to_gguf import gguf_metadata

    tokenizer = load_tokenizer(source)
    metadata, _ = gguf_metadata(tokenizer, vocab_size, "a model")
    writer = gguf.GGUFWriter(scratch / "vocabulary.gguf", "llama")
    for key, value in metadata.items():
        kind = {bool: "bool", int: "uint32", str: "string"}.get(type(value), "array")
        getattr(writer, f"add_{kind}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = [text for text in DIFFICULT if text]
    for text, (document, prompt) in zip(texts, gguf_runtime.ids(scratch / "vocabulary.gguf", texts), strict=True):
        assert document == tokenizer.encode(text).tolist(), text
        assert prompt == tokenizer.encode_prompt(text).tolist(), text


def test_llama_cpp_gives_the_ids_of_every_tokenizer_that_is_written(tmp_path: Path) -> None:
    """Bytes, a tokenizer.json, SentencePiece trained here, and that of a GGUF file. Costs 20 s."""
    from pe_lab.data.tokenizers import save_tokenizer
    from pe_lab.data.tokenizers.sentencepiece import train_sentencepiece

    pieces = train_sentencepiece([path.read_text(encoding="utf-8") for path in essays()[:8]], 600, "essays")
    save_tokenizer(pieces, tmp_path / "pieces")
    for source, size in (("bytes", 384), (f"saved:{tmp_path / 'pieces'}", 640), (f"gguf:{smollm2_gguf()}", 49152)):
        ids_agree(source, size, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# SmolLM2-135M-Instruct


def perplexity(models: Sequence[str], directory: Path) -> list[float]:
    """Of 4,096 tokens of essays, in windows of 2,048, by pe_lab.evaluate."""
    found = []
    for n, model in enumerate(models):
        out = directory / str(n)
        text = f"--text={essays()[0].parent}/*.txt"
        options = ["--suite=perplexity", "--lengths=2048", "--variants=as-trained", "--tokens=4096", f"--out={out}"]
        assert evaluate([f"--from={model}", text, *options]) == 0
        (record,) = map(json.loads, (out / "perplexity.jsonl").read_text().splitlines())
        found.append(record["perplexity"])
    return found


def test_smollm2_through_gguf_and_back(tmp_path: Path) -> None:
    """In, out as f32 and q8_0, in again; and what llama.cpp makes of both files. Costs 6 minutes."""
    first, files = tmp_path / "first", {kind: tmp_path / f"smollm2.{kind}.gguf" for kind in ("f32", "q8_0")}
    command(f"--from=gguf:{smollm2_gguf()}", f"--to={first}")
    for kind, file in files.items():
        command(f"--from={first}", f"--to=gguf:{file}:{kind}")
    again = tmp_path / "again"
    command(f"--from=gguf:{files['f32']}", f"--to={again}")
    before, after, quantized = perplexity([str(first), str(again), f"gguf:{files['q8_0']}"], tmp_path)
    print(f"perplexity: {before:.5f}; through GGUF and back: {after:.5f}; as q8_0: {quantized:.5f}")
    assert abs(after / before - 1) <= 1e-3 and abs(quantized / before - 1) <= 1e-2
    lm = pe_lab.load(first)
    assert lm.tokenizer.fingerprint == pe_lab.load(again).tokenizer.fingerprint
    ids = np.concatenate([lm.tokenizer.encode(path.read_text(encoding="utf-8")) for path in essays()[:4]])
    texts = [text for text in DIFFICULT if text]
    for text, (document, prompt) in zip(texts, gguf_runtime.ids(files["f32"], texts), strict=True):
        assert document == lm.tokenizer.encode(text).tolist() and prompt == lm.tokenizer.encode_prompt(text).tolist()
    rows = []
    for length in LENGTHS:
        tokens = ids[None, :length].astype(np.int32)
        ours = np.asarray(lm.logits(tokens))
        cells = []
        for kind, theirs in zip(files, gguf_runtime.logits([(file, tokens) for file in files.values()]), strict=True):
            difference, agreement = np.abs(theirs - ours).max(), (theirs.argmax(-1) == ours.argmax(-1)).mean()
            print(f"{kind}, {length} tokens: {difference:.2e} of {np.abs(ours).max():.1f}, top-1 {agreement:.2%}")
            assert agreement >= (0.999 if kind == "f32" else 0.95)
            assert kind != "f32" or difference <= 2e-3 * np.abs(ours).max()
            cells.append(f"{number(difference)}, {agreement:.1%}")
        rows.append([f"{length:,}", *cells])
    check_or_write("gguf-smollm2", table(["tokens", *(f"{kind}: logits, top-1" for kind in files)], rows))
