"""What `convert` says that other runtimes make of an export."""

import contextlib
import json
import math

import pytest
from checkpoint_tables import HF, documented

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.checkpoints.families import FAMILIES
from pe_lab.checkpoints.hf_config import write_config
from pe_lab.checkpoints.rope_parameters import WriteOptions
from pe_lab.checkpoints.runtimes import LLAMA_CPP, RUNTIMES, SGLANG, VLLM, judge, report, table
from pe_lab.config import ModelConfig
from pe_lab.errors import UnsupportedError
from pe_lab.model import complete
from pe_lab.positional import NTK, PI, Layer, NoPE, NTKByParts, PartialRope, Rope, Yarn

MODEL = complete(ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, dtype="float32"))


def config(*encodings, **fields):
    layers = tuple(e if isinstance(e, Layer) else Layer(e) for e in encodings) * (4 // len(encodings))
    for family in ("llama", "smollm3"):
        with contextlib.suppress(UnsupportedError):
            return write_config(FAMILIES[family], MODEL, layers, WriteOptions(64, **fields), "float32")[0]
    raise AssertionError(layers)


def wrong(config):
    return {name for name, reasons in judge(config).items() if reasons}


# As measured by test_runtime_variants.py on models of these encodings.
@pytest.mark.parametrize(
    ("encodings", "runtimes"),
    [
        ([Rope()], set()),
        ([Rope(scaling=NTK(4))], set()),
        ([Rope(scaling=PI(4))], set()),
        ([Rope(scaling=Yarn(4, 64))], set()),
        ([Rope(scaling=NTKByParts(4, 64))], {LLAMA_CPP}),
        ([NoPE()], {VLLM, SGLANG}),
        ([Rope(10000.0, 0.5)], {LLAMA_CPP}),
        ([PartialRope(10000.0, 0.5)], {LLAMA_CPP}),
        ([Rope(scaling=Yarn(2.3, 64))], {LLAMA_CPP}),
        ([Rope(), NoPE()], {LLAMA_CPP}),
        ([Rope(), Rope(), Rope(), NoPE()], set()),
        ([Layer(Rope(), 8), Layer(Rope(), 8), Layer(Rope(), 8), Layer(NoPE())], {LLAMA_CPP, SGLANG}),
    ],
    ids=lambda value: " ".join(sorted(value)) or "none" if isinstance(value, set) else str(value),
)
def test_the_runtimes_that_do_not_compute_an_export(encodings, runtimes):
    assert wrong(config(*encodings)) == runtimes


def test_an_export_says_it_of_every_runtime():
    lines = report(config(NoPE(), max_length=8192)).splitlines()
    assert lines[0] == "Declared for 8,192 tokens. What runtimes make of it:"
    assert [line.split(" (")[0].strip() for line in lines[1:]] == list(RUNTIMES)
    assert lines[1].endswith(": right") and "does not start" in lines[3]
    assert all(RUNTIMES[name] in line for name, line in zip(RUNTIMES, lines[1:], strict=True))


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
        ("cohere2", {"rotary_pct": 1.0}),
        ("gpt2", {"n_ctx": 64}),
        ("granite_swa", {"no_rope_layers": [1, 1, 0, 1]}),
        ("exaone4", {"sliding_window_pattern": "LLG"}),
        ("exaone4_full", {"sliding_window_pattern": None}),
    ],
)
def test_an_export_has_keys_that_another_runtime_asks_for(model, keys):
    source = open_source(f"hf:{HF / model}")
    family = FAMILIES[json.loads((HF / model / "config.json").read_text())["model_type"]]
    written, _ = write_config(family, source.model, source.layers, WriteOptions(source.training_length), "float32")
    assert {key: written[key] for key in keys} == keys


@pytest.mark.parametrize("factor", [1.0, 1.3, 0.2])
def test_an_attention_factor_is_also_what_sglang_computes_of_mscale(factor):
    rope = config(Rope(scaling=Yarn(4, 64, attention_factor=factor)))["rope_parameters"]
    magnitudes = [0.1 * rope[key] * math.log(4) + 1 for key in ("mscale", "mscale_all_dim")]
    assert rope["attention_factor"] == factor == pytest.approx(magnitudes[0] / magnitudes[1])


def test_the_document_has_the_table():
    assert documented("runtimes") == table()
