"""What `convert` says that other runtimes make of an export."""

import pytest
from checkpoint_tables import EDITS, HF, documented

from pe_lab.checkpoints.checkpoint import open_source
from pe_lab.checkpoints.hf_config import write_config
from pe_lab.checkpoints.huggingface import choose_family, exported_layers
from pe_lab.checkpoints.runtimes import CONTENTS, LLAMA_CPP, RUNTIMES, SGLANG, VLLM, contents, judge, report, table
from pe_lab.config import ModelConfig
from pe_lab.model import complete
from pe_lab.positional import NTK, PI, Layer, NoPE, NTKByParts, PartialRope, Rope, Yarn, read_with

MODEL = complete(ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, dtype="float32"))


def config(*encodings, **fields):
    layers = tuple(e if isinstance(e, Layer) else Layer(e) for e in encodings) * (4 // len(encodings))
    family = choose_family(MODEL, layers)
    return write_config(family, MODEL, layers, 64, "float32", **fields)[0]


def wrong(config):
    return {name for name, reasons in judge(config).items() if reasons}


# Of llama.cpp: as measured with tests/data/read_with_llama_cpp.py on these models at 40 tokens, trained on 16.
@pytest.mark.parametrize(
    ("encodings", "runtimes"),
    [
        ([Rope()], set()),
        ([Rope(scaling=NTK(4))], set()),
        ([Rope(scaling=PI(4))], set()),
        ([Rope(scaling=Yarn(4, 64))], set()),
        ([Rope(scaling=NTKByParts(4, 64))], {LLAMA_CPP, SGLANG}),
        ([NoPE()], {VLLM, SGLANG}),
        ([Rope(10000.0, 0.5)], {LLAMA_CPP}),
        ([PartialRope(10000.0, 0.5)], {LLAMA_CPP}),
        ([Rope(scaling=Yarn(2.3, 64))], {LLAMA_CPP, VLLM, SGLANG}),
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
    assert all(", run)" in line or ", by its code)" in line for line in lines[1:])


def test_every_export_has_a_content():
    sources = {base: open_source(f"hf:{HF / base}") for base in {edit.base for edit in EDITS}}
    for edit in EDITS:
        source = sources[edit.base]
        length = next((int(o.removeprefix("--length=")) for o in edit.options if "--length" in o), None)
        layers, _ = exported_layers(read_with(edit.positional, source.layers, 16), length)
        written = write_config(choose_family(source.model, layers), source.model, layers, 16, "float32")[0]
        assert contents(written), edit.name
    assert all(set(content.not_right) <= set(RUNTIMES) for content in CONTENTS)


def test_the_document_has_the_table():
    assert documented("runtimes") == table()
