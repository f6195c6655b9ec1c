"""The README.md of an export."""

import pytest
from checkpoints.external import Memory

from pe_lab.checkpoints.gguf.export import plan_gguf
from pe_lab.checkpoints.hf_export import plan_export
from pe_lab.config import ModelConfig
from pe_lab.positional import Layer, LongRope, NoPE, Rope
from pe_lab.results.model_card import gguf_card, model_card, without_folders

MODEL = ModelConfig(vocab_size=64, layers=4, d_model=32, d_ff=48, heads=4, kv_heads=2, dtype="float32")
RECORDS = [
    {"suite": "perplexity", "source": "essays", "label": "dropped", "length": 2048, "nll": 2.0, "stderr": 0.01},
    {"suite": "niah", "label": "dropped", "length": 4096, "accuracy": 0.75, "low": 0.7, "high": 0.8},
    {"suite": "niah", "label": "dropped", "length": 8192},
]


def card(encoding, records=(), **options):
    source = Memory(MODEL, (Layer(encoding),) * 4)
    source.metadata = {"lineage": [{"what": "initialized at random, seed 0"}, {"what": "rope -> nope on layers 0-3"}]}
    return model_card(source, plan_export(source, **options), "org/name", records)


def test_a_card_has_the_encoding_the_lineage_and_how_to_load_it():
    text = card(NoPE(), max_length=4096)
    assert text.startswith("---\nlibrary_name: transformers\n") and "\n# name\n" in text
    assert "declared for 4,096." in text and "0-3     nope" in text
    assert "1. initialized at random, seed 0\n2. rope -> nope on layers 0-3" in text
    assert 'AutoModelForCausalLM.from_pretrained("org/name")' in text and "`vllm serve org/name`" in text
    # llama.cpp's converter drops tables.
    assert "): wrong: its converter drops the tables." in text and "--to=gguf:FILE" in text
    assert "## Measured" not in text


def test_a_card_has_the_option_with_which_a_server_serves_the_declared_length():
    tables = LongRope((1.0,) * 4, (4.0,) * 4, 256, 4.0)
    assert "`vllm serve org/name --max-model-len=1024`" in card(Rope(scaling=tables), family="smollm3")


def test_the_card_of_a_gguf_file():
    source = Memory(MODEL, (Layer(NoPE()),) * 4)
    text = gguf_card(source, plan_gguf(source, "q8_0"), "bare.gguf", "org/bare", ["A note."], RECORDS)
    assert text.startswith("---\nlibrary_name: gguf\n") and "\n# bare.gguf\n" in text
    assert "as llama.cpp's llama in q8_0, " in text and "\n- A note.\n" in text
    assert "llama-server --hf-repo org/bare --hf-file bare.gguf -c 32\n" in text and "## Measured" in text
    assert "--hf-repo" not in gguf_card(source, plan_gguf(source), "bare.gguf", None, [])


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("converted from hf:/home/me/my models/SmolLM", "converted from hf:SmolLM"),
        ("converted from gguf:../SmolLM.gguf; rope -> nope", "converted from gguf:SmolLM.gguf; rope -> nope"),
        ("converted from hf:org/name", "converted from hf:org/name"),
        ("~/runs/x", "x"),
        ("PI, 2/3 of the pairs", "PI, 2/3 of the pairs"),
    ],
)
def test_a_card_names_no_folder_of_ones_own(text, public):
    assert without_folders(text) == public


def test_a_card_has_what_was_measured():
    table = card(Rope(), RECORDS).partition("## Measured\n\n")[2].splitlines()
    assert table == [
        "| suite | variant | tokens | result | 95% interval |",
        "| --- | --- | --- | --- | --- |",
        "| perplexity essays | dropped | 2,048 | 7.39 | 7.25 to 7.54 |",
        "| niah | dropped | 4,096 | 75% | 70% to 80% |",
    ]
