"""The recipes against the papers: budgets, sizes, rotated channels, and comparisons that vary one thing alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from pe_lab.checkpoints.checkpoint import open_checkpoint
from pe_lab.config import Config, PhaseConfig
from pe_lab.errors import UserError
from pe_lab.model import Model
from pe_lab.positional import Drop, Layer, NoPE, Rope, layers
from pe_lab.recipes import load_config, read_recipe
from pe_lab.train import main as train
from pe_lab.training.optimizer import learning_rate
from pe_lab.training.plan import plan_phases

CONFIGS = Path(__file__).parent.parent / "configs"
METHODS = ("rope", "nope", "alibi", "rnope_swa", "swan", "ssmax", "p_rope", "partial_rope", "drope")


def _load(reference: str) -> Config:
    return load_config(f"{CONFIGS}/{reference}")


def _billions(*phases: PhaseConfig) -> str:
    """Billions of tokens."""
    return f"{sum(p.steps * p.batch_size * p.sequence_length for p in phases) / 1e9:.2f}"


def _only(config: Config) -> PhaseConfig:
    (phase,) = config.phases
    return phase


def _millions(config: Config) -> str:
    """Millions of parameters, with and without embeddings."""
    total = Model(dataclasses.replace(config.model, remat="none", scan=True, loss_chunks=1)).num_parameters
    return f"{total / 1e6:.0f} {(total - config.model.vocab_size * config.model.d_model) / 1e6:.0f}"


def _rotated_frequencies(config: Config) -> list[float]:
    """The frequencies of the pairs that rotate, the same in every layer and head, from the highest."""
    inv_freq = plan_phases(config)[0].schedule.inv_freq
    assert (inv_freq == inv_freq[:1, :1]).all()
    return [float(w) for w in inv_freq[0, 0] if w > 0]


# -- DroPE, Tables 1, 4 (left column) and 6: 494M from scratch --------------------------------------------------------


def test_494m_has_the_papers_size_and_budget():
    for reference in [f"table1.py:method={method}" for method in METHODS] + ["drope_16b.py", "drope_16b.py:drop=8000"]:
        config = _load(reference)
        assert _billions(*config.phases) == "16.78" and _millions(config) == "494 358"
        assert not config.model.scaled_residual_init and config.model.init_std == 0.02
    assert _billions(_load("drope_16b.py").phases[1]) == "2.10"


@pytest.mark.parametrize("size", ["494m", "laptop"])
def test_possible_variants_table_1_differ_in_the_encoding_alone(size):
    drope = _load(f"table1.py:method=drope,size={size}")
    steps = sum(phase.steps for phase in drope.phases)
    for method in METHODS[:-1]:
        other = _load(f"table1.py:method={method},size={size}")
        for part in ("seed", "model", "data", "mesh", "checkpoint", "log", "evaluation"):
            assert getattr(other, part) == getattr(drope, part), (method, part)
        assert other.phases == (
            dataclasses.replace(drope.phases[0], steps=steps, positional=other.phases[0].positional),
        )
    assert drope.phases[0].steps == 7 * drope.phases[1].steps
    assert drope.phases[0].positional == _load(f"table1.py:method=rope,size={size}").phases[0].positional


@pytest.mark.parametrize(("size", "base"), [("494m", 1e6), ("laptop", 200.0)])
def test_rnope_swa_has_a_full_nope_layer_above_three_windowed_ones(size, base):
    config = _load(f"table1.py:method=rnope_swa,size={size}")
    phase = _only(config)
    windowed, full = Layer(Rope(base=base), phase.sequence_length // 4), Layer(NoPE())
    found = layers(phase.positional, config.model.layers)
    assert found == tuple(full if (n + 1) % 4 == 0 else windowed for n in range(config.model.layers))
    assert full in found


@pytest.mark.parametrize(("method", "pairs"), [("rope", 32), ("p_rope", 24), ("partial_rope", 8), ("nope", 0)])
def test_pairs_that_rotate_at_494m(method, pairs):
    assert len(_rotated_frequencies(_load(f"table1.py:method={method}"))) == pairs


@pytest.mark.parametrize("drop", [8_000, 14_000])
def test_a_branch_continues_the_rope_run_of_table_1(drop):
    """From a checkpoint that the run keeps, with its model, on other windows, as the second phase of the whole run."""
    rope, whole = _load("table1.py:method=rope"), _load(f"drope_16b.py:drop={drop}")
    branch = _load(f"drope_16b.py:drop={drop},from=runs/table1_rope/pretrain/checkpoints/{drop}")
    assert drop in rope.checkpoint.milestones and drop < rope.phases[0].steps
    assert branch.model == rope.model and branch.data == dataclasses.replace(rope.data, seed=1)
    start = f"runs/{rope.name}/{rope.phases[0].name}/checkpoints/{drop}"
    assert branch.phases == (dataclasses.replace(whole.phases[1], init_from=start),)
    assert whole.phases[0] == dataclasses.replace(rope.phases[0], steps=drop)
    assert branch.name != whole.name


def test_steps_without_encoding_after_all_with_rope():
    whole, branch = _load("drope_16b.py:drop=16000,more=1000"), _load("drope_16b.py:drop=16000,more=1000,from=x")
    assert [phase.steps for phase in whole.phases] == [16_000, 1000]
    assert branch.phases == (dataclasses.replace(whole.phases[1], init_from="x"),)
    for wrong in ("drop=16000,more=x", "drop=8000,more=1000"):
        with pytest.raises(UserError, match="steps after drop=16000"):
            _load(f"drope_16b.py:{wrong}")


def test_a_branch_needs_a_drop_of_table_6():
    for drop, method in ((0, "nope"), (16_000, "rope")):
        assert _load(f"drope_16b.py:drop={drop}").phases == _load(f"table1.py:method={method}").phases
        with pytest.raises(UserError, match=f"drop={drop} has no phase after a drop"):
            _load(f"drope_16b.py:drop={drop},from=x")
    with pytest.raises(UserError, match=r"drop=14000\|0\|8000\|16000"):
        _load("drope_16b.py:drop=12000")


# -- DroPE, Table 4 (right column), Tables 3 and 11: recalibration of published models --------------------------------


@pytest.mark.parametrize(
    ("reference", "billions", "norm"),
    [
        ("drope_smollm.py:model=360m,tokens=30b", "31.46", "head"),
        ("drope_smollm.py:model=360m,tokens=60b", "62.91", "head"),
        ("drope_smollm.py:model=360m,tokens=120b", "125.83", "head"),
        ("drope_smollm.py:model=1.7b", "20.00", "none"),  # QK-norm was for the 360M only
        ("drope_llama2.py", "20.00", "none"),
        ("drope_smollm.py:model=135m", "0.21", "head"),
        ("drope_smollm.py:model=135m,tokens=1b", "1.05", "head"),
    ],
)
def test_recalibrations_have_the_papers_budgets(reference, billions, norm):
    config = _load(reference)
    phase = _only(config)
    assert _billions(phase) == billions and phase.positional == NoPE()
    assert config.model.qk_norm == "none" and plan_phases(config)[0].qk_norm == norm  # it comes with the phase
    if "360m" in reference:
        assert phase.batch_size * phase.sequence_length == 1_048_576 and _millions(config) == "362 315"


def test_recalibrations_take_other_checkpoints_data_and_norms():
    config = _load("drope_smollm.py:from=runs/other,data=data/mine,qk_norm=query_flat")
    phase = _only(config)
    assert (phase.init_from, config.data.prepared, phase.qk_norm) == ("runs/other", "data/mine", "query_flat")
    llama = _load("drope_llama2.py:from=runs/other,data=data/mine")
    assert (llama.phases[0].init_from, llama.data.prepared) == ("runs/other", "data/mine")
    assert phase.distill is None
    taught = _only(_load("drope_smollm.py:model=135m,distill=logits")).distill
    assert (taught.teacher, taught.logits, taught.hidden) == ("init", 1, 0)
    for arg, message in (("model=1.7b,tokens=30b", "on 20b tokens, not 30b"), ("tokens=1b", "30b or 60b or 120b")):
        with pytest.raises(UserError, match=message):
            _load(f"drope_smollm.py:{arg}")


def test_any_checkpoint_is_recalibrated_at_its_own_length():
    """What the recipe does not set is the checkpoint's; windows, sinks and a QK-norm of its own stay."""
    given = read_recipe(f"{CONFIGS}/drope_smollm.py:model=own,from=runs/x/y,data=data/z,distill=hidden")
    (phase,) = given["phases"]
    assert phase["positional"] == Drop() and not {"sequence_length", "qk_norm"} & set(phase)
    assert not {"layers", "vocab_size", "qk_norm"} & set(given["model"])
    assert (given["name"], phase["steps"], phase["batch_size"]) == ("drope_y_hidden", 1000, 512)
    changed = "steps=20,batch=4,length=64,rate=1e-3,qk_norm=head"
    (phase,) = read_recipe(f"{CONFIGS}/drope_smollm.py:model=own,from=x,data=prose,{changed}")["phases"]
    assert (phase["steps"], phase["batch_size"], phase["sequence_length"], phase["qk_norm"]) == (20, 4, 64, "head")
    assert phase["optimizer"]["learning_rate"] == 1e-3
    for arg, message in (
        ("model=own,from=x", "takes from=CHECKPOINT and data=SOURCE"),
        ("model=own,from=x,data=prose,tokens=30b", "steps=N in the place of tokens"),
        ("model=own,from=x,data=prose,steps=many", "steps=many is not a whole number"),
        ("steps=20,rate=1e-3", "steps and rate: for model=own; the settings of model=360m"),
    ):
        with pytest.raises(UserError, match=message):
            _load(f"drope_smollm.py:{arg}")


# -- DroPE's recipe on OLMo, and Gemma 4's rotation in Gemma 3 ---------------------------------------------------------


@pytest.mark.parametrize(("model", "length"), [("olmo2_1b", 4096), ("olmo3_7b", 8192)])
def test_olmo_is_recalibrated_at_its_length_with_its_own_norm(model, length):
    for tokens, billions in (("5b", "5.00"), ("20b", "20.00"), ("40b", "40.00")):
        config = _load(f"drope_olmo.py:model={model},tokens={tokens}")
        phase = _only(config)
        assert _billions(phase) == billions and phase.sequence_length == length
        assert phase.batch_size * length == 512 * 4096 and phase.optimizer.learning_rate == 3e-4
        assert config.model.qk_norm == plan_phases(config)[0].qk_norm == "flat"


def test_olmo_3_loses_the_rotation_of_its_full_layers_or_all():
    def described(arg):
        config = _load(f"drope_olmo.py:{arg}")
        return layers(_only(config).positional, config.model.layers)

    full, every = described("model=olmo3_7b"), described("model=olmo3_7b,drop=all")
    assert [layer.window for layer in full] == [layer.window for layer in every] == [4096, 4096, 4096, None] * 8
    assert [layer.encoding for layer in full] == [*[Rope(500_000.0)] * 3, NoPE()] * 8
    assert {layer.encoding for layer in every} == {NoPE()} and described("") == (Layer(NoPE()),) * 16
    with pytest.raises(UserError, match="all layers of olmo2_1b see all tokens"):
        described("drop=full")


@pytest.mark.parametrize(("model", "depth", "window"), [("1b", 26, 512), ("4b", 34, 1024)])
def test_gemma_3_changes_its_global_layers_alone(model, depth, window):
    pairs = {"p_rope": 32, "own": 128, "rope": 128, "nope": 0}
    own = _load(f"p_rope_gemma.py:model={model},encoding=own")
    for encoding, rotated in pairs.items():
        config = _load(f"p_rope_gemma.py:model={model},encoding={encoding}")
        assert config.model == own.model and config.model.layers == depth
        assert dataclasses.replace(_only(config), positional=_only(own).positional) == _only(own)
        inv_freq = plan_phases(config)[0].schedule.inv_freq[:, 0]
        scaling = 8 if (model, encoding) == ("4b", "own") else 1
        for n, layer in enumerate(layers(_only(config).positional, depth)):
            wide = (n + 1) % 6 == 0
            assert layer.window == (None if wide else window)
            base, count, by = (1e6, rotated, scaling) if wide else (1e4, 128, 1)
            expected = [base ** (-2 * i / 256) / by if i < count else 0.0 for i in range(128)]
            assert list(inv_freq[n]) == pytest.approx(expected, abs=1e-7)


def test_table_11_varies_the_norm_and_the_learning_rate_alone():
    long = _load("drope_smollm.py:model=360m,tokens=30b").phases[0]
    for (norm, kind), rate in itertools.product((("yes", "head"), ("no", "none")), ("1e-3", "3e-4", "3e-5")):
        phase = _only(_load(f"table11.py:qk_norm={norm},lr={rate}"))
        init = "ones" if kind == "head" else "matched"  # ones as in the paper, where a norm is added
        assert (phase.qk_norm, phase.qk_norm_init, phase.optimizer.learning_rate) == (kind, init, float(rate))
        same = dataclasses.replace(phase.optimizer, learning_rate=1e-3)
        assert dataclasses.replace(phase, qk_norm="head", qk_norm_init="ones", optimizer=same) == long


@pytest.mark.parametrize(
    ("reference", "init"),
    [
        ("drope_smollm.py:model=360m,tokens=120b", "ones"),
        ("drope_smollm.py:model=360m,qk_norm=flat", "ones"),
        ("drope_smollm.py:model=1.7b,qk_norm=head", "ones"),
        ("table11.py:qk_norm=flat", "ones"),
        ("drope_smollm.py:model=1.7b", "matched"),  # no norm is added
        ("drope_smollm.py:model=135m", "matched"),  # not the paper's
        ("claims.py:method=nope,from=x,qk_norm=head", "matched"),  # the committed results' arms
        ("claims.py:method=nope,from=x,qk_norm=head,qk_norm_init=ones", "ones"),
    ],
)
def test_an_added_norm_starts_at_one_where_a_recipe_reproduces_drope(reference, init):
    assert _only(_load(reference)).qk_norm_init == init


# -- p-RoPE, Table 2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "pairs"), [("nope", 0), ("rope", 128), ("0.25", 32), ("0.75", 96)])
def test_p_rope_rotates_the_highest_frequencies_of_gemma_2b(encoding, pairs):
    config = _load(f"p_rope.py:encoding={encoding}")
    assert _rotated_frequencies(config) == pytest.approx([10_000 ** (-2 * i / 256) for i in range(pairs)], abs=1e-7)
    assert _millions(config) == "2506 1982"


# -- Partial RoPE -----------------------------------------------------------------------------------------------------

# Appendix A, Table 1: rotated channels per head, by percent.
ROTATED = {
    "pythia_1b": {0: 0, 1: 2, 10: 26, 25: 64, 50: 128, 75: 192, 100: 256},
    "llama_1b": {0: 0, 4: 2, 10: 6, 25: 16, 50: 32, 75: 48, 100: 64},
    "llama_8b": {0: 0, 10: 12, 25: 32, 50: 64, 75: 96, 100: 128},
}


@pytest.mark.parametrize("model", ROTATED)
def test_partial_rope_rotates_the_papers_channels(model):
    for percent in (0, 1, 4, 10, 25, 50, 75, 100):
        reference = f"partial_rope.py:model={model},percent={percent}"
        if percent in ROTATED[model]:
            channels = ROTATED[model][percent]
            expected = [10_000 ** (-2 * i / channels) for i in range(channels // 2)]
            assert _rotated_frequencies(_load(reference)) == pytest.approx(expected, abs=1e-7)
        else:
            has = ", ".join(map(str, ROTATED[model]))
            with pytest.raises(UserError, match=f"no {percent}% of {model}; it has {has}"):
                _load(reference)


def test_partial_rope_has_as_many_tokens_at_every_length():
    for model, length in itertools.product(ROTATED, (1024, 2048, 4096, 8192)):
        config = _load(f"partial_rope.py:model={model},length={length}")
        phase = _only(config)
        assert phase.batch_size * phase.sequence_length == 4096 * 2048 and _billions(phase) == "100.66"
        assert phase.optimizer.warmup_steps / phase.steps == 0.05 and not config.model.scaled_residual_init


@pytest.mark.parametrize(
    ("arg", "perplexity"),
    [
        ("percent=10", "19.89"),
        ("percent=50,length=4096", "22.05"),
        ("percent=0,length=8192", "237.85"),
        ("percent=0,length=8192,qk_norm=head", "33.49"),
        ("model=pythia_1b,percent=0,qk_norm=head", "94.31"),
        ("model=llama_8b,percent=10", "8.25"),
        ("percent=10,qk_norm=head", ""),
    ],
)
def test_partial_rope_finds_the_row_of_table_4(arg, perplexity):
    expected = f"perplexity on LAMBADA {perplexity}" if perplexity else "not in the paper"
    assert _load(f"partial_rope.py:{arg}").notes.expected == expected


# -- The speedrun: train_gpt_simple.py of modded-nanogpt ----------------------------------------------------------


def test_the_speedrun_has_the_baselines_model_and_rates():
    """124M parameters without the input embedding, which costs nothing, as GPT-2 small with its tied one."""
    muon, adamw = _load("speedrun.py"), _load("speedrun.py:optimizer=adamw")
    assert muon.model == adamw.model and muon.data == adamw.data and muon.model.vocab_size == -(-50_257 // 128) * 128
    assert _millions(muon) == "162 124" and (_billions(_only(muon)), _billions(_only(adamw))) == ("1.97", "3.28")
    assert muon.model.d_model // muon.model.heads == 128
    phase, optimizer = _only(muon), _only(muon).optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.muon.scale) == (0.025, 0.05, "spectral")
    assert optimizer.learning_rate * optimizer.head_multiplier == pytest.approx(0.004)
    assert optimizer.learning_rate * optimizer.vector_multiplier == pytest.approx(0.015)
    # An embedding that starts at 1 has 0.7; here it starts at 0.02, and is multiplied by sqrt(768).
    assert optimizer.learning_rate * optimizer.embedding_multiplier == pytest.approx(0.7 * 0.02, rel=0.01)
    aux = _only(adamw).optimizer
    rates = [aux.learning_rate * m for m in (aux.embedding_multiplier, aux.head_multiplier, aux.vector_multiplier)]
    assert rates == pytest.approx([0.3 * 0.02, 1 / 320, 0.01], rel=0.01) and aux.weight_decay == 0.1
    rate = learning_rate(optimizer, phase.steps)
    assert [float(rate(n)) for n in (0, 1125, phase.steps)] == pytest.approx([0.025, 0.025, 0], rel=1e-3, abs=1e-6)
    assert float(rate(2438)) == pytest.approx(0.0125, rel=1e-2)


def test_the_speedrun_compares_encodings_and_optimizers_alone():
    for size in ("124m", "laptop"):
        base = _load(f"speedrun.py:size={size}")
        for encoding in ("nope", "p_rope", "partial_rope", "alibi", "rnope_swa"):
            other = _load(f"speedrun.py:size={size},positional={encoding}")
            assert dataclasses.replace(_only(other), positional=_only(base).positional) == _only(base)
            assert (other.model, other.data) == (base.model, base.data)


# -- all of them -----------------------------------------------------------------------------------------------

FAMILIES = {
    "table1.py": {"method": METHODS, "size": ("494m", "laptop")},
    "drope_16b.py": {"drop": ("0", "8000", "14000", "16000")},
    "table11.py": {"qk_norm": ("head", "flat", "query_head", "query_flat", "none"), "lr": ("1e-3", "3e-4", "3e-5")},
    "drope_smollm.py": {
        "model": ("360m", "1.7b", "135m"),
        "qk_norm": ("head", "flat", "query_head", "query_flat", "none"),
    },
    "drope_olmo.py": {"tokens": ("5b", "20b", "40b"), "rate": ("3e-4", "1e-3"), "model": ("olmo2_1b", "olmo3_7b")},
    "p_rope_gemma.py": {
        "model": ("1b", "4b"),
        "encoding": ("p_rope", "own", "rope", "nope"),
        "tokens": ("1b", "5b", "20b"),
        "rate": ("1e-4", "3e-4"),
    },
    "speedrun.py": {
        "optimizer": ("muon", "adamw"),
        "positional": ("rope", "nope", "p_rope", "partial_rope", "alibi", "rnope_swa"),
        "size": ("124m", "laptop"),
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
@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("swan", "ssmax")])
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
