"""The audit: faults that other code computes are found, with their layers, and sound logits raise no alarm."""

import dataclasses
import functools

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints.external import DATA, NAMES, copy_of, golden
from checkpoints.test_gguf_source import permuted, tensors_of, write

from pe_lab.checkpoints.audit import observed
from pe_lab.checkpoints.audit.faults import FAULTS
from pe_lab.checkpoints.audit.faulty_runtime import RotaryKeys
from pe_lab.checkpoints.audit.search import Audit, Batch, HypothesisRunner, Search
from pe_lab.checkpoints.audit.self_test import INJECTIONS, MODELS, SHAPE, SelfTestModel, outcomes
from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.errors import CheckpointError
from pe_lab.positional import Layer, LongRope, NoPE, Rope, Yarn

# One model that can have most faults: a window on a local base, p-RoPE with YaRN, no encoding.
THREE = dataclasses.replace(SHAPE, layers=3, d_ff=16, d_model=16, heads=2, kv_heads=1)
KEYS = (
    RotaryKeys(1e5, window=24),
    RotaryKeys(1e6, "yarn", 4.0, 256, rotated=0.5, proportional=True),
    RotaryKeys(0.0),
)
LAYERS = (Layer(Rope(1e5), 24), Layer(Rope(1e6, 0.5, Yarn(4.0, 256))), Layer(NoPE()))


@functools.cache
def mixed() -> SelfTestModel:
    return SelfTestModel("mixed", THREE, LAYERS, KEYS)


def test_sound_logits_raise_no_alarm_and_cost_one_pass():
    audit = mixed().audit(KEYS)
    assert audit.sound and not audit.elsewhere and audit.ranked == () and audit.passes <= 2


@pytest.mark.parametrize(
    "fault", [one for one in INJECTIONS if "one NoPE" not in one.name], ids=lambda fault: fault.name
)
def test_each_fault_of_the_numpy_runtime_is_the_one_answer(fault):
    """The first of them compiles, 4 s."""
    keys = fault.inject(KEYS, THREE)
    assert not isinstance(keys, str), keys
    audit = mixed().audit(keys)
    assert not audit.sound and not audit.elsewhere and (fault.answer,) in audit.found.names, audit.found
    assert audit.equals == [] and audit.found.residual.largest < 2e-5 < audit.ranked[1].residual.largest


@pytest.mark.slow
def test_the_table_of_another_length():
    """LongRoPE's short table for sequences beyond the original length."""
    short, long = (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 2.5, 3.0), (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.0)
    layers = (Layer(Rope(1e4, 1.0, LongRope(short, long, 16, 4.0))),) * 2
    keys = RotaryKeys(1e4, "longrope", 4.0, 16, short_factor=short, long_factor=long)
    model = SelfTestModel("longrope", dataclasses.replace(THREE, layers=2), layers, (keys,) * 2, length=48)
    audit = model.audit((dataclasses.replace(keys, long_factor=short),) * 2)
    assert audit.found.hypothesis.faults == ("length ignored",) and "training length" in audit.found.hypothesis.sentence


@pytest.mark.slow  # 3 s
def test_two_faults_together():
    local, far, bare = KEYS
    audit = mixed().audit((dataclasses.replace(local, window=25), dataclasses.replace(far, factored=0), bare))
    assert set(audit.found.hypothesis.faults) == {"windows off by one", "attention factor"}
    assert "; and " in audit.found.hypothesis.sentence and audit.found.hypothesis.layers == (0, 1)


@pytest.mark.slow
def test_what_no_hypothesis_explains():
    """All pairs are tried: 5 s."""
    local, far, bare = KEYS
    audit = mixed().audit((dataclasses.replace(local, theta=777.0), far, bare))
    assert not audit.sound and not audit.elsewhere and audit.found is None and len(audit.ranked) > 100


def test_the_error_begins_where_the_fault_does():
    audit = mixed().audit(tuple(dataclasses.replace(one, late_from=200) for one in KEYS))
    assert audit.config.residual.begins == 200 and "from token 200 on" in audit.found.hypothesis.sentence
    window = mixed().audit((dataclasses.replace(KEYS[0], window=25), *KEYS[1:]))
    assert window.config.residual.begins == 24  # the first query with a key outside its window


def search(logits: np.ndarray, **settings) -> Audit:
    model = mixed()
    model.audit(KEYS)
    return Search(model._runner, [logits], **settings).run()


def test_an_error_of_the_first_token_is_no_fault_of_positions():
    logits = mixed().runtime_logits(KEYS)
    audit = search(1.5 * logits)
    assert audit.elsewhere and audit.ranked == ()
    # A number that all logits of a position share changes no probability.
    assert search(logits + np.arange(288)[:, None]).sound


def test_rounding_is_measured_at_the_first_token():
    """In a runtime that is not exact; errors of single positions are large there."""
    noise = np.random.default_rng(0).standard_normal((2, 288, 64))
    noise[:, ::40] *= 20
    noise[:, 0] = np.clip(noise[:, 0] / 20, -2.5, 2.5)
    logits = mixed().runtime_logits(KEYS)
    assert search(logits + 0.01 * noise, exact=False).sound
    assert search(logits + 0.01 * noise).elsewhere
    assert search(logits + 0.01 * noise, tolerance=0.5).sound
    faulty = mixed().runtime_logits(tuple(dataclasses.replace(one, rounded_positions=True) for one in KEYS))
    audit = search(faulty + 0.01 * noise, exact=False)
    assert not audit.sound and audit.found.hypothesis.faults == ("positions in bfloat16",)


def test_the_self_test_injects_the_faults_that_have_a_name():
    assert {one.answer for one in INJECTIONS} <= set(FAULTS)


def test_logits_of_the_last_tokens():
    """They have no first token, which shows what rounding is."""
    model, at = mixed(), np.array([100, 257, 258, 287])
    faulty = model.runtime_logits(tuple(dataclasses.replace(one, rounded_positions=True) for one in KEYS))
    batch = Batch(model.tokens, np.arange(288, dtype=np.int32), 288, at)
    audit = Search(HypothesisRunner(model.checkpoint, [batch]), [faulty[:, at]], exact=False).run()
    assert audit.config.residual.begins == 257 and audit.found.hypothesis.faults == ("positions in bfloat16",)


# transformers' own logits (tests/data/make_hf_models.py) as the runtime, and a config.json that says something else.

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW, FULL = "sliding_attention", "full_attention"
EDITED = {
    "a layer that is not rotated": ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "rotated layers not rotated", (3,)),
    "a layer that is rotated": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, "unrotated layers rotated", (1,)),
    "a token less": ("qwen2_window", {"sliding_window": 9}, "windows off by one", (0, 2)),
    "other windows": ("qwen2_window", {"layer_types": [FULL, WINDOW] * 2}, "windows on the wrong layers", (0, 1, 2, 3)),
    "a factor": ("llama_yarn", {"rope_parameters": YARN | {"attention_factor": 1.25}}, "attention factor", (0, 1)),
    "betas": ("llama_yarn", {"rope_parameters": YARN | {"beta_fast": 2.0, "beta_slow": 0.25}}, "YaRN's ramp", (0, 1)),
    "PI": (
        "llama_linear",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
        "scaling applied twice",
        (0, 1),
    ),
    "no YaRN": ("llama", {"rope_parameters": YARN | {"rope_theta": 500.0}}, "scaling ignored", (0, 1)),
    "no rotation": ("llama_nope", {"rope_parameters": {"rope_theta": 100.0}}, "rotated layers not rotated", (0, 1)),
    "two bases": ("granite_swa", {"layer_rope_theta": [100.0, 500.0, 0.0, 100.0]}, "bases exchanged", (0, 1, 3)),
    "YaRN on full layers": (
        "olmo3",
        {
            "rope_parameters": {
                kind: {**YARN, "rope_theta": 500.0} for kind in (FULL, WINDOW)
            }
        },
        "scaling ignored",
        (0, 1, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "edits", "fault", "layers"),
    [
        pytest.param(*case, id=label, marks=pytest.mark.slow if n else ())
        for n, (label, case) in enumerate(EDITED.items())
    ],
)
def test_a_config_that_says_something_else_than_transformers_computed(name, edits, fault, layers, tmp_path):
    """One is fast; the others compile more, 1 to 3 s each."""
    checkpoint = open_checkpoint(f"hf:{copy_of(name, tmp_path / 'edited', **edits)}")
    tokens, logits = golden(name)
    length = tokens.shape[1]
    audit = Search(
        HypothesisRunner(checkpoint, [Batch(tokens, np.arange(length, dtype=np.int32), length)]), [logits]
    ).run()
    assert not audit.sound and (fault,) in audit.found.names, audit.found
    assert audit.found.hypothesis.layers == layers


def test_positions_that_a_learned_table_does_not_begin_with():
    """gpt2, whose table is moved by a row: transformers' logits are those of positions that are one too late."""
    checkpoint = open_checkpoint(f"hf:{DATA / 'gpt2'}")
    table = checkpoint.params["layers"]["positional"]["learned_positions"]["table"]
    checkpoint.params["layers"]["positional"]["learned_positions"]["table"] = jnp.roll(table, 1, axis=1)
    tokens, logits = golden("gpt2")
    batch = Batch(tokens, np.arange(40, dtype=np.int32), 40)
    audit = Search(HypothesisRunner(checkpoint, [batch]), [logits]).run()
    assert audit.first > 0.01 and audit.found.hypothesis.sentence == "all positions are one too late"


def test_batches_have_positions_that_the_model_has():
    for name, last in (("gpt2", 63), ("bloom", 319), ("llama_yarn", 319)):
        checkpoint = open_checkpoint(f"hf:{DATA / name}")
        batches = observed.audited_batches(checkpoint, observed.default_length(checkpoint.layers))
        assert max(int(batch.positions.max()) for batch in batches) == last
        assert all(batch.tokens.max() < 64 and batch.length == batch.positions[-1] + 1 for batch in batches)
    assert observed.default_length([Layer(NoPE(), 512), Layer(NoPE())]) == 576
    assert observed.default_length([Layer(NoPE(), 4096)]) == observed.LONGEST


# GGUF files

VOCABULARY = {"llama.vocab_size": 64}


def of_gguf(path) -> tuple[Checkpoint, Checkpoint, tuple[str, ...]]:
    own = open_checkpoint(f"hf:{DATA / 'llama'}")
    return own, *observed.with_weights_of(own, path)


def test_a_quantized_file_gives_its_own_weights(tmp_path):
    write(tmp_path / "model.gguf", tensors_of("llama", 4, 2), kind=gguf.GGMLQuantizationType.Q8_0.name)
    own, found, notes = of_gguf(tmp_path / "model.gguf")
    key = found.params["layers"]["attention"]["key"]
    assert notes == () and 0 < float(jnp.abs(key - own.params["layers"]["attention"]["key"]).max()) < 0.05


def test_keys_in_another_order_stay_those_of_the_checkpoint(tmp_path):
    tensors = tensors_of("llama", 4, 2)
    for name in ("blk.0.attn_k.weight", "blk.1.attn_k.weight"):
        tensors[name] = permuted(tensors[name], 4)
    write(tmp_path / "model.gguf", tensors)
    own, found, notes = of_gguf(tmp_path / "model.gguf")
    assert (found.params["layers"]["attention"]["key"] == own.params["layers"]["attention"]["key"]).all()
    assert "layers.attention.key" in notes[0]


def test_a_file_of_another_model_is_refused(tmp_path):
    write(tmp_path / "model.gguf", tensors_of("llama_sharded", 4, 2))
    with pytest.raises(CheckpointError, match="other weights than the checkpoint"):
        of_gguf(tmp_path / "model.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_family_raises_an_alarm(name):
    """1 s each."""
    checkpoint, (tokens, logits) = open_checkpoint(f"hf:{DATA / name}"), golden(name)
    length = tokens.shape[1]
    audit = Search(
        HypothesisRunner(checkpoint, [Batch(tokens, np.arange(length, dtype=np.int32), length)]), [logits]
    ).run()
    assert audit.sound and audit.first < 2e-6


@pytest.mark.slow
def test_the_self_test_finds_everything():
    """Six families, twelve sound models: 90 s."""
    found = list(outcomes(MODELS, INJECTIONS))
    assert [(one.model, one.fault) for one in found if not one.passed] == []
    assert sum(one.fault is None for one in found) == 12
    assert sum(one.audit is not None for one in found if one.fault is not None) > 90
    for one in found:
        assert one.why if one.audit is None else one.audit.equals == []
