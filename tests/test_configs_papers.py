"""What the papers say, in literal numbers, against what the recipes would train."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from pe_lab.checkpoints import open_checkpoint
from pe_lab.config import Config
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.planning.plan import plan_phases
from pe_lab.positional import Alibi, Layer, NoPE, PartialRope, Rope, build_schedule, layers
from pe_lab.recipes import load_config
from pe_lab.train import main as train

CONFIGS = Path(__file__).parent.parent / "configs"
METHODS = ("rope", "nope", "alibi", "rnope_swa", "p_rope", "partial_rope", "drope")


def _load(reference: str) -> Config:
    return load_config(f"{CONFIGS}/{reference}")


def _tokens(config: Config) -> int:
    return sum(p.steps * p.batch_size * p.sequence_length for p in config.phases)


def _only(config: Config):
    (phase,) = config.phases
    return phase


# -- DroPE, Table 4, left column: 494M from scratch ------------------------------------------------------------

# The paper's budget: 16.8B tokens, of which 2.10B after the drop, at 2^20 tokens a step.
BUDGETS = {
    "table1.py:method=rope": [("pretrain", Rope(base=1e6), 16_000, 3e-4, 520)],
    "table1.py:method=nope": [("pretrain", NoPE(), 16_000, 3e-4, 520)],
    "table1.py:method=alibi": [("pretrain", Alibi(), 16_000, 3e-4, 520)],
    "table1.py:method=p_rope": [("pretrain", Rope(base=1e6, fraction=0.75), 16_000, 3e-4, 520)],
    "table1.py:method=partial_rope": [("pretrain", PartialRope(base=1e6, fraction=0.25), 16_000, 3e-4, 520)],
    "table1.py:method=drope": [
        ("pretrain", Rope(base=1e6), 14_000, 3e-4, 520),
        ("recalibrate", NoPE(), 2_000, 1e-3, 70),
    ],
    "drope_16b.py": [
        ("pretrain", Rope(base=1e6), 14_000, 3e-4, 520),
        ("recalibrate", NoPE(), 2_000, 1e-3, 70),
    ],
    "drope_16b.py:drop=8000": [
        ("pretrain", Rope(base=1e6), 8_000, 3e-4, 520),
        ("recalibrate", NoPE(), 8_000, 1e-3, 70),
    ],
    "drope_16b.py:drop=0": [("pretrain", NoPE(), 16_000, 3e-4, 520)],
    "drope_16b.py:drop=16000": [("pretrain", Rope(base=1e6), 16_000, 3e-4, 520)],
    "drope_16b.py:from=x": [("recalibrate", NoPE(), 2_000, 1e-3, 70)],
}


@pytest.mark.parametrize("reference", BUDGETS)
def test_494m_phases_are_the_papers(reference):
    config = _load(reference)
    found = [
        (p.name, p.positional, p.steps, p.optimizer.learning_rate, p.optimizer.warmup_steps) for p in config.phases
    ]
    assert found == BUDGETS[reference]
    for phase in config.phases:
        assert (phase.batch_size, phase.sequence_length) == (1024, 1024)
        adamw = phase.optimizer
        assert (adamw.b1, adamw.b2, adamw.epsilon, adamw.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
        assert (adamw.schedule, phase.qk_norm) == ("cosine", "")
    if "from=" in reference:
        assert f"{_tokens(config) / 1e9:.2f}" == "2.10"
        assert config.phases[0].init_from == "x"
    else:
        assert f"{_tokens(config) / 1e9:.1f}" == "16.8"
        assert "16.8B tokens" in " ".join((CONFIGS / reference.partition(":")[0]).read_text().split())


def test_494m_shape_is_the_papers():
    config = _load("table1.py")
    model = config.model
    assert (model.d_model, model.d_ff, model.layers, model.heads, model.kv_heads) == (896, 4864, 24, 14, 2)
    assert (model.head_dim, model.init_std, model.activation, model.dtype) == (64, 0.02, "silu", "bfloat16")
    assert (model.qk_norm, model.attention_bias, model.tie_embeddings) == ("none", False, True)
    assert config.data.segments is False
    total = Model(model).num_parameters
    assert f"{total / 1e6:.0f} {(total - 151936 * 896) / 1e6:.0f}" == "494 358"


def test_drope_is_drope_16b():
    table, flagship = _load("table1.py:method=drope"), _load("drope_16b.py")
    for part in ("seed", "model", "data", "mesh", "phases", "checkpoint", "log", "evaluation"):
        assert getattr(table, part) == getattr(flagship, part), part


@pytest.mark.parametrize(("drop", "method"), [(0, "nope"), (16_000, "rope")])
def test_ends_of_table_6_are_rows_of_table_1(drop, method):
    one, other = _load(f"drope_16b.py:drop={drop}"), _load(f"table1.py:method={method}")
    assert (one.model, one.data, one.phases) == (other.model, other.data, other.phases)


@pytest.mark.parametrize("size", ["494m", "laptop"])
def test_methods_of_table_1_differ_in_the_encoding_alone(size):
    drope = _load(f"table1.py:method=drope,size={size}")
    steps = sum(phase.steps for phase in drope.phases)
    names = {drope.name}
    for method in METHODS[:-1]:
        other = _load(f"table1.py:method={method},size={size}")
        for part in ("seed", "model", "data", "mesh", "checkpoint", "log", "evaluation"):
            assert getattr(other, part) == getattr(drope, part), (method, part)
        assert other.phases == (
            dataclasses.replace(drope.phases[0], steps=steps, positional=other.phases[0].positional),
        )
        names.add(other.name)
    assert len(names) == 7
    assert drope.phases[0].steps == 7 * drope.phases[1].steps
    assert drope.phases[0].positional == _load(f"table1.py:method=rope,size={size}").phases[0].positional


@pytest.mark.parametrize(("size", "base", "window"), [("494m", 1e6, 256), ("laptop", 200.0, 16)])
def test_rnope_swa_has_a_full_nope_layer_above_three_windowed_ones(size, base, window):
    config = _load(f"table1.py:method=rnope_swa,size={size}")
    phase = _only(config)
    assert window * 4 == phase.sequence_length
    windowed, full = Layer(Rope(base=base), window), Layer(NoPE())
    found = layers(phase.positional, config.model.layers)
    assert found == tuple(full if (n + 1) % 4 == 0 else windowed for n in range(config.model.layers))
    assert full in found


@pytest.mark.parametrize(("method", "turning"), [("rope", 32), ("p_rope", 24), ("partial_rope", 8), ("nope", 0)])
def test_pairs_that_turn_at_494m(method, turning):
    config = _load(f"table1.py:method={method}")
    schedule = plan_phases(config)[0].schedule
    assert {int((row > 0).sum()) for row in schedule.inv_freq.reshape(-1, 32)} == {turning}


def test_laptop_is_the_demos_experiment_one_layer_deeper():
    laptop, demo = _load("table1.py:method=drope,size=laptop"), _load("drope_laptop.py")
    assert dataclasses.replace(laptop.model, layers=3) == demo.model
    assert laptop.data == demo.data and laptop.evaluation == demo.evaluation
    assert sum(p.steps for p in laptop.phases) == sum(p.steps for p in demo.phases) == 6000
    for mine, theirs in zip(laptop.phases, demo.phases, strict=True):
        assert (mine.positional, mine.sequence_length, mine.batch_size) == (
            theirs.positional,
            theirs.sequence_length,
            theirs.batch_size,
        )


def test_drope_16b_branch_is_the_second_phase_on_other_windows():
    drope, branch = _load("drope_16b.py"), _load("drope_16b.py:from=x")
    assert branch.phases == (dataclasses.replace(drope.phases[1], init_from="x"),)
    assert branch.data.seed != drope.data.seed
    assert branch.name != drope.name
    assert _load("drope_16b.py:drop=8000,from=x").phases[0].steps == 8_000


@pytest.mark.parametrize("drop", [0, 16_000])
def test_a_branch_needs_a_drop(drop):
    with pytest.raises(UserError, match=f"drop={drop} drops nothing"):
        _load(f"drope_16b.py:drop={drop},from=x")


@pytest.mark.parametrize(("drop", "perplexity"), [("0", "23.77"), ("8000", "22.42"), ("16000", "21.72")])
def test_table_6(drop, perplexity):
    assert _load(f"drope_16b.py:drop={drop}").notes.expected == f"validation perplexity {perplexity}"
    assert "21.73" in _load("drope_16b.py:drop=14000").notes.expected
    with pytest.raises(UserError, match=r"drop=14000\|0\|8000\|16000"):
        _load("drope_16b.py:drop=12000")


# -- DroPE, Table 4, right column, and Table 11: SmolLM --------------------------------------------------------


@pytest.mark.parametrize(("tokens", "billions"), [("30b", "31.46"), ("60b", "62.91"), ("120b", "125.83")])
def test_smollm_360m_is_the_papers(tokens, billions):
    config = _load(f"drope_smollm.py:model=360m,tokens={tokens}")
    phase, model = _only(config), config.model
    assert f"{_tokens(config) / 1e9:.2f}" == billions
    assert phase.batch_size * phase.sequence_length == 1_048_576
    assert (phase.sequence_length, phase.batch_size) == (2048, 512)
    adamw = phase.optimizer
    assert (adamw.learning_rate, adamw.warmup_steps, adamw.schedule) == (1e-3, 490, "cosine")
    assert (adamw.b1, adamw.b2, adamw.epsilon, adamw.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (phase.positional, phase.qk_norm, phase.init_from) == (NoPE(), "head", "runs/smollm_360m")
    assert (model.d_model, model.d_ff, model.layers, model.heads, model.kv_heads) == (960, 2560, 32, 15, 5)
    # The checkpoint has no QK-norm: it comes with the phase.
    assert (model.qk_norm, model.attention_bias, model.tie_embeddings) == ("none", False, True)
    total = Model(model).num_parameters
    assert f"{total / 1e6:.0f} {(total - 49152 * 960) / 1e6:.0f}" == "362 315"


@pytest.mark.parametrize(
    ("reference", "length", "batch", "rate", "warmup", "steps"),
    [
        # 20B tokens; the rates and warm-ups of the public code, see the recipes' texts
        ("drope_smollm.py:model=1.7b", 2048, 512, 3e-4, 600, 19_073),
        ("drope_llama2.py", 4096, 512, 1e-4, 100, 9_537),
    ],
)
def test_larger_models_are_recalibrated_on_20b_tokens(reference, length, batch, rate, warmup, steps):
    config = _load(reference)
    phase = _only(config)
    assert (phase.sequence_length, phase.batch_size, phase.steps) == (length, batch, steps)
    assert (phase.optimizer.learning_rate, phase.optimizer.warmup_steps) == (rate, warmup)
    assert (phase.optimizer.schedule, phase.optimizer.final_fraction) == ("cosine", 0.0)
    assert f"{_tokens(config) / 1e9:.1f}" == "20.0"
    assert phase.positional == NoPE()
    assert plan_phases(config)[0].qk_norm == "none"  # "only for these experiments", the 360M's


def test_smollm_135m_is_short():
    config = _load("drope_smollm.py:model=135m")
    phase = _only(config)
    assert (phase.sequence_length, config.model.layers, config.model.d_model) == (8192, 30, 576)
    assert f"{_tokens(config) / 1e9:.2f}" == "1.05"
    assert phase.batch_size // phase.accumulate * phase.sequence_length == 65_536  # what one device takes at once


def test_smollm_takes_other_checkpoints_data_and_norms():
    config = _load("drope_smollm.py:from=runs/other,data=data/mine,qk_norm=query_flat")
    phase = _only(config)
    assert (phase.init_from, config.data.prepared, phase.qk_norm) == ("runs/other", "data/mine", "query_flat")
    llama = _load("drope_llama2.py:from=runs/other,data=data/mine")
    assert (llama.phases[0].init_from, llama.data.prepared) == ("runs/other", "data/mine")
    for arg, says in (("model=1.7b,tokens=30b", "on 20b tokens, not 30b"), ("tokens=1b", "30b or 60b or 120b")):
        with pytest.raises(UserError, match=says):
            _load(f"drope_smollm.py:{arg}")


TABLE_11 = [
    ("yes", "1e-3", 1e-3, "2.496"),
    ("no", "1e-3", 1e-3, "6.334"),
    ("yes", "3e-4", 3e-4, "2.555"),
    ("no", "3e-4", 3e-4, "2.530"),
    ("yes", "3e-5", 3e-5, "3.102"),
    ("no", "3e-5", 3e-5, "2.713"),
]


@pytest.mark.parametrize(("norm", "lr", "rate", "loss"), TABLE_11)
def test_table_11(norm, lr, rate, loss):
    config = _load(f"table11.py:qk_norm={norm},lr={lr}")
    phase, long = _only(config), _load("drope_smollm.py:model=360m,tokens=30b").phases[0]
    assert phase.optimizer.learning_rate == rate
    assert phase.qk_norm == {"yes": "head", "no": "none"}[norm]
    assert loss in config.notes.expected and loss in (CONFIGS / "table11.py").read_text()
    # Everything else is the recalibration of the same model.
    same = dataclasses.replace(phase.optimizer, learning_rate=1e-3)
    assert dataclasses.replace(phase, qk_norm="head", optimizer=same) == long


@pytest.mark.parametrize("kind", ["head", "flat", "query_head", "query_flat", "none"])
def test_table_11_has_every_kind_of_norm(kind):
    config = _load(f"table11.py:qk_norm={kind}")
    assert config.phases[0].qk_norm == kind and config.phases[0].init_from == "runs/smollm_360m"
    assert f"{plan_phases(config)[0].qk_norm}" == kind


# -- p-RoPE, Table 2 -------------------------------------------------------------------------------------------

TABLE_2 = [
    ("nope", "wiki", "4.8594", 0),
    ("nope", "flan", "6.6429", 0),
    ("rope", "wiki", "4.4627", 128),
    ("rope", "flan", "6.4429", 128),
    ("0.25", "wiki", "4.5302", 32),
    ("0.25", "flan", "6.5111", 32),
    ("0.75", "wiki", "4.4414", 96),
    ("0.75", "flan", "6.4422", 96),
]


@pytest.mark.parametrize(("encoding", "data", "perplexity", "turning"), TABLE_2)
def test_p_rope_table_2(encoding, data, perplexity, turning):
    config = _load(f"p_rope.py:encoding={encoding},data={data}")
    (plan,), phase = plan_phases(config), _only(config)
    assert config.notes.expected == f"validation perplexity {perplexity}"
    assert config.data.prepared == f"data/{data}-gemma"
    row = plan.schedule.inv_freq[0, 0]
    assert int((row > 0).sum()) == turning and row.shape == (128,)
    assert all(abs(row[i] - 10_000 ** (-2 * i / 256)) < 1e-7 for i in range(turning))
    assert (phase.sequence_length, phase.steps, phase.batch_size) == (8192, 10_000, 256)
    # Gemma 2B: 2.51B parameters, of which 0.52B embed 256,000 pieces.
    assert (config.model.head_dim, config.model.kv_heads, config.model.vocab_size) == (256, 1, 256_000)
    assert f"{Model(config.model).num_parameters / 1e9:.2f}" == "2.51"


# -- Partial RoPE ----------------------------------------------------------------------------------------------

# Appendix A, Table 1: rotated channels per head, by percent.
ROTATED = {
    "pythia_1b": {0: 0, 1: 2, 10: 26, 25: 64, 50: 128, 75: 192, 100: 256},
    "llama_1b": {0: 0, 4: 2, 10: 6, 25: 16, 50: 32, 75: 48, 100: 64},
    "llama_8b": {0: 0, 10: 12, 25: 32, 50: 64, 75: 96, 100: 128},
}


@pytest.mark.parametrize(
    ("model", "percent", "channels"), [(m, p, c) for m, row in ROTATED.items() for p, c in row.items()]
)
def test_partial_rope_rotates_the_papers_channels(model, percent, channels):
    config = _load(f"partial_rope.py:model={model},percent={percent}")
    shape = config.model
    assert shape.head_dim == {"pythia_1b": 256, "llama_1b": 64, "llama_8b": 128}[model]
    found = layers(_only(config).positional, shape.layers)
    schedule = build_schedule(found, shape.heads, shape.kv_heads, shape.head_dim, 2048)
    assert {int(2 * (row > 0).sum()) for row in schedule.inv_freq.reshape(-1, shape.head_dim // 2)} == {channels}
    turning = schedule.inv_freq[0, 0][: channels // 2]
    assert all(abs(w - 10_000 ** (-2 * i / channels)) < 1e-7 for i, w in enumerate(turning))


def test_partial_rope_refuses_percents_that_the_paper_does_not_have():
    for model, percent in itertools.product(ROTATED, (0, 1, 4, 10, 25, 50, 75, 100)):
        reference = f"partial_rope.py:model={model},percent={percent}"
        if percent in ROTATED[model]:
            assert _load(reference)
        else:
            has = ", ".join(map(str, ROTATED[model]))
            with pytest.raises(UserError, match=f"no {percent}% of {model}; it has {has}"):
                _load(reference)


@pytest.mark.parametrize(("length", "windows"), [(1024, 8192), (2048, 4096), (4096, 2048), (8192, 1024)])
@pytest.mark.parametrize("model", ROTATED)
def test_partial_rope_reads_as_many_tokens_at_every_length(model, length, windows):
    config = _load(f"partial_rope.py:model={model},length={length}")
    phase = _only(config)
    assert (phase.sequence_length, phase.batch_size, phase.steps) == (length, windows, 12_000)
    assert phase.batch_size * phase.sequence_length == 4096 * 2048 == 8_388_608
    assert f"{_tokens(config) / 1e9:.1f}" == "100.7"
    adamw = phase.optimizer
    assert (adamw.learning_rate, adamw.warmup_steps / phase.steps) == (4e-4, 0.05)
    assert (adamw.schedule, adamw.final_fraction) == ("cosine", 0.1)
    assert (adamw.b1, adamw.b2, adamw.epsilon, adamw.weight_decay, adamw.clip_norm) == (0.9, 0.95, 1e-8, 0.1, 1.0)


def test_partial_rope_shapes_are_the_papers():
    llama, pythia, large = (
        _load(f"partial_rope.py:model={name}").model for name in ("llama_1b", "pythia_1b", "llama_8b")
    )
    assert (llama.layers, llama.d_model, llama.d_ff, llama.heads, llama.kv_heads) == (16, 2048, 8192, 32, 8)
    assert (large.layers, large.d_model, large.d_ff, large.heads, large.kv_heads) == (36, 4096, 14336, 32, 8)
    assert (pythia.layers, pythia.d_model, pythia.heads, pythia.parallel_block) == (16, 2048, 8, True)
    for shape in (llama, pythia, large):
        assert (shape.vocab_size, shape.tie_embeddings) == (50304, False)
    assert _load("partial_rope.py:qk_norm=head").model.qk_norm == "head"


@pytest.mark.parametrize(
    ("arg", "perplexity"),
    [
        ("percent=0,data=fineweb_edu", "48.30"),
        ("percent=4,length=1024", "22.90"),
        ("percent=10", "19.89"),
        ("percent=50,length=4096", "22.05"),
        ("percent=0,length=8192", "237.85"),
        ("percent=0,length=8192,qk_norm=head", "33.49"),
        ("model=pythia_1b,percent=1", "93.79"),
        ("model=pythia_1b,percent=0,qk_norm=head", "94.31"),
        ("model=llama_8b,percent=10", "8.25"),
        ("model=llama_8b,percent=100", "7.57"),
        ("percent=10,qk_norm=head", ""),
        ("model=pythia_1b,data=fineweb", ""),
    ],
)
def test_partial_rope_table_4(arg, perplexity):
    expected = f"perplexity on LAMBADA {perplexity}" if perplexity else "not in the paper"
    assert _load(f"partial_rope.py:{arg}").notes.expected == expected


# -- all of them -----------------------------------------------------------------------------------------------

FAMILIES = {
    "table1.py": {"method": METHODS, "size": ("494m", "laptop")},
    "drope_16b.py": {"drop": ("0", "8000", "14000", "16000")},
    "table11.py": {"qk_norm": ("head", "flat", "query_head", "query_flat", "none"), "lr": ("1e-3", "3e-4", "3e-5")},
    "drope_smollm.py": {
        "model": ("360m", "1.7b", "135m"),
        "qk_norm": ("head", "flat", "query_head", "query_flat", "none"),
    },
    "p_rope.py": {"encoding": ("nope", "rope", "0.25", "0.75"), "data": ("wiki", "flan")},
    "partial_rope.py": {
        "model": ("llama_1b", "pythia_1b", "llama_8b"),
        "percent": ("0", "10", "25", "50", "75", "100"),
        "length": ("1024", "2048", "4096", "8192"),
        "data": ("fineweb", "fineweb_edu"),
        "qk_norm": ("none", "head"),
    },
}


@pytest.mark.parametrize("path", FAMILIES)
def test_every_run_of_a_family_has_a_name_of_its_own(path):
    choices = FAMILIES[path]
    pairs = [[f"{key}={value}" for value in values] for key, values in choices.items()]
    names = [_load(f"{path}:{','.join(arguments)}").name for arguments in itertools.product(*pairs)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and "," not in name and "=" not in name for name in names)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_table_1_trains_on_a_laptop(method, cache, tmp_path):
    """Twenty steps a phase, as a user would: the loss falls, and the checkpoint holds the encodings of the recipe."""
    reference = f"{CONFIGS}/table1.py:method={method},size=laptop"
    phases = load_config(reference).phases
    steps = [f"--config.phases.{i}.steps=20" for i in range(len(phases))]
    common = [f"--config.data.cache_dir={cache}", f"--workdir={tmp_path / 'run'}"]
    assert train([f"--config={reference}", *steps, *common]) == 0
    for phase in phases:
        rows = [json.loads(line) for line in (tmp_path / f"run/{phase.name}/metrics.jsonl").read_text().splitlines()]
        losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
        assert losses[-1] < losses[0] - 0.1, losses
        assert open_checkpoint(tmp_path / "run" / phase.name).layers == layers(phase.positional, 4)
