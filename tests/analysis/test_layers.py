"""What a layer's encoding is worth: shared prefixes are whole passes, costs and orders are those of brute force."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoints.external import DATA

from pe_lab import analyze
from pe_lab.analysis import layers as analysis
from pe_lab.analysis import losses as module
from pe_lab.analysis.drop_choice import choose_layers
from pe_lab.analysis.losses import (
    EditPlace,
    Streams,
    bin_edges,
    by_bin,
    counted_targets,
    edited_layers,
    greedy_order,
    mean_loss,
    sequence_groups,
)
from pe_lab.analysis.sequences import Sequences
from pe_lab.analysis.session import AnalysisSession
from pe_lab.checkpoints.checkpoint import Checkpoint, open_checkpoint
from pe_lab.config import ModelConfig
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Subject, Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model, complete
from pe_lab.positional import NTK, DynamicNTK, HeadEdit, Layer, NoPE, Rope, drop
from pe_lab.results.findings import read_findings, write_findings

CONFIG = ModelConfig(
    vocab_size=384, layers=3, d_model=16, d_ff=24, heads=4, kv_heads=2, dtype="float32", attention_chunk=8
)
T = 21  # no multiple of the chunk
ROPE = Layer(Rope(100.0))
TOKENS = np.random.default_rng(0).integers(0, 300, (4, T + 1)).astype(np.int32)


@functools.cache
def made() -> LanguageModel:
    """Wider than an initialization, so that attention is peaked and encodings matter."""
    params = jax.tree.map(lambda a: 8 * a if a.ndim > 2 else a, jax.jit(Model(CONFIG).init)(jax.random.key(0)))
    metadata = {"id": "made", "training_length": 10, "lineage": []}
    checkpoint = Checkpoint(Path("made"), 1, params, complete(CONFIG), (ROPE,) * 3, metadata, "bytes")
    return LanguageModel(checkpoint, checkpoint.layers, load_tokenizer("bytes"))


@pytest.fixture
def lm():
    return made()


@pytest.mark.slow
def test_streams_have_the_keys_of_earlier_layers_and_the_inputs_of_each():
    """Gemma 4, whose layer 4 attends to the keys of layer 2: 3 s."""
    checkpoint = open_checkpoint(f"hf:{DATA / 'gemma4_shared'}")
    lm = LanguageModel(checkpoint, checkpoint.layers, load_tokenizer("bytes"))
    tokens = TOKENS % checkpoint.model.vocab_size
    streams = Streams(lm, tokens[:, :-1])
    for dropped in ((4, 2), (0,), (2, 4)):
        edited = lm.with_positional(drop(dropped).apply(lm.layers))
        losses = streams.under(edited).losses(tokens[:, 1:])
        np.testing.assert_allclose(losses, edited.loss_by_position(tokens), rtol=2e-5, atol=1e-6)
    assert np.isclose(streams.losses(tokens[:, 1:]), lm.loss_by_position(tokens), rtol=2e-5).all()


def text(tokens: np.ndarray = TOKENS) -> Sequences:
    full = np.full(len(tokens), tokens.shape[1] - 1)
    return Sequences("windows", tokens[:, :-1], full, tokens[:, 1:])


def session(out: Path, lm: LanguageModel, *options: str, sequences: Sequences | None = None) -> AnalysisSession:
    argv = ["layers", "--from=made", "--lengths=10,21", f"--sequences={len(TOKENS)}", *options]
    arguments = analyze.parser("layers").parse_args(argv)
    variant = Variant(Subject(lm, "made", "made"), "as trained", "RoPE")
    made = AnalysisSession("layers", arguments, out, [variant], ["RoPE"])
    made.__dict__["sequences"] = text() if sequences is None else sequences
    return made


@pytest.mark.parametrize(
    ("edits", "segments"),
    [
        ([drop((n,)).apply((ROPE,) * 3) for n in range(3)], False),
        ([drop().apply((ROPE,) * 3), (ROPE, Layer(Rope(100.0, scaling=NTK(2.0))), ROPE)], False),
        pytest.param(
            [(ROPE, dataclasses.replace(ROPE, heads=(HeadEdit((1,), NoPE()),)), ROPE), (ROPE,) * 3],
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param([(ROPE, ROPE, Layer(NoPE(), window=5))], True, marks=pytest.mark.slow),
    ],
    ids=["drop", "all, rescaled", "head, none", "window, documents"],
)
def test_layers_below_an_edit_are_not_run_and_losses_are_those_of_a_whole_pass(lm, monkeypatch, edits, segments):
    run = []
    real = module.advance
    monkeypatch.setattr(module, "advance", lambda *a, **k: run.append((k["start"], k["stop"])) or real(*a, **k))
    places, targets = {}, TOKENS[:, 1:]
    if segments:
        places = {"segments": 1 + (np.arange(T) > 9).astype(np.int32)[None].repeat(4, 0)}
    streams = Streams(lm, TOKENS[:, :-1], **places)
    found = [streams.under(lm.with_positional(edit)).losses(targets) for edit in edits]
    firsts = [module.first_difference(lm.layers, edit) for edit in edits]
    kept = [(n, n + 1) for n in range(max(firsts))]
    assert sorted(run) == sorted([*kept, *((first, 3) for first in firsts)])
    batch = {"tokens": TOKENS[:, :-1], "targets": targets, **places}
    for edit, losses in zip(edits, found, strict=True):
        edited = lm.with_positional(edit)
        if segments:
            whole = jax.jit(Model(complete(CONFIG)).token_loss)
            expected = whole(lm.checkpoint.params, batch, edited.schedule_for(T))
        else:
            expected = edited.loss_by_position(TOKENS)
        np.testing.assert_allclose(losses, expected, rtol=2e-5, atol=1e-6)


def test_a_layer_whose_attention_is_not_used_costs_exactly_nothing(lm):
    params = jax.tree.map(lambda a: a, lm.checkpoint.params)
    params["layers"]["attention"]["out"] = params["layers"]["attention"]["out"].at[1].set(0)
    deaf = dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params=params))
    edits = [drop((n,)).apply(lm.layers) for n in range(3)]
    costs = analysis.measure(deaf, TOKENS[:, :-1], TOKENS[:, 1:], edits)
    assert costs.shape == (3, 4, T)
    np.testing.assert_array_equal(costs[1], 0)
    expected = deaf.with_positional(edits[2]).loss_by_position(TOKENS) - deaf.loss_by_position(TOKENS)
    np.testing.assert_allclose(costs[2], expected, rtol=2e-5, atol=1e-5)
    assert np.abs(costs[0]).max() > 0.01 and np.abs(costs[2]).max() > 0.01


def test_groups_of_sequences_divide_over_the_devices(lm, monkeypatch):
    assert list(sequence_groups(lm, range(3), 2**10)) == [([0, 1], 2), ([2], 1)]  # 2,048 tokens at once on a CPU
    assert list(sequence_groups(lm, [4, 5], 2**20)) == [([4], 1), ([5], 1)]
    monkeypatch.setattr(LanguageModel, "mesh", SimpleNamespace(shape={"data": 4}))
    assert list(sequence_groups(lm, range(6), 2**20)) == [([0, 1, 2, 3], 4), ([4, 5, 5, 5], 2)]
    assert list(sequence_groups(lm, range(6), 8, most=1)) == [([0, 1, 2, 3], 4), ([4, 5, 5, 5], 2)]


def test_edits_of_heads_keep_the_other_heads():
    after = drop().apply((ROPE,) * 3)
    edited = edited_layers((ROPE,) * 3, after, [EditPlace(2, 3), EditPlace(0), EditPlace(2, 1)])
    assert edited == (after[0], ROPE, dataclasses.replace(ROPE, heads=(HeadEdit((1, 3), NoPE()),)))


def test_greedy_order_against_brute_force():
    rng = np.random.default_rng(1)
    table = {frozenset(np.flatnonzero([i >> b & 1 for b in range(5)]).tolist()): rng.random() for i in range(32)}
    asked = []

    def loss(dropped, candidates):
        asked.append(len(candidates))
        return [table[frozenset({*dropped, c})] for c in candidates]

    expected: list[int] = []
    while len(expected) < 5:
        left = set(range(5)) - set(expected)
        expected.append(min(left, key=lambda c: table[frozenset({*expected, c})]))
    assert greedy_order(loss, range(5)) == tuple(expected) and asked == [5, 4, 3, 2, 1]
    assert greedy_order(loss, range(5), 2) == tuple(expected[:2])
    singles = sorted(range(5), key=lambda c: table[frozenset({c})])
    assert greedy_order(loss, range(5), candidates=1) == tuple(singles)


def test_bins_hold_every_boundary_and_every_loss_that_counts():
    edges = bin_edges([10, 21], 8)
    assert edges[0] == 0 and edges[-1] == T and 10 in edges and len(edges) <= 10
    assert bin_edges([3]).tolist() == [0, 1, 2, 3]
    sequences = dataclasses.replace(text(), segments=1 + (np.arange(T) > 9).astype(np.int32)[None].repeat(4, 0))
    counted = counted_targets(sequences)
    assert counted.sum() == 4 * (T - 1) and not counted[:, 9].any()
    losses = np.random.default_rng(2).random((4, T), np.float32)
    bins = by_bin(losses, counted, edges)
    np.testing.assert_allclose(mean_loss(bins, edges, 0, 10), losses[:, :9].mean(1), rtol=1e-6)
    np.testing.assert_allclose(mean_loss(bins, edges, 10, T), losses[:, 10:].mean(1), rtol=1e-6)


def test_the_analysis_against_whole_passes(lm, tmp_path, monkeypatch):
    found = analysis.ANALYSIS.run(session(tmp_path, lm, "--greedy", "--random=2"))
    losses = {
        chosen: lm.drop_positional(chosen).loss_by_position(TOKENS) if chosen else lm.loss_by_position(TOKENS)
        for chosen in [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    }
    ranges = [slice(0, 10), slice(0, T), slice(10, T)]
    assert [tuple(r) for r in found.metadata["ranges"]["RoPE"]] == [(10, 0, 10), (T, 0, T), (T, 10, T)]
    expected = np.stack([[losses[c][:, r].mean(1) for c in [(), (0,), (1,), (2,)]] for r in ranges])
    np.testing.assert_allclose(found.numbers["loss"], expected, rtol=1e-4)
    # Costs with Student's interval by hand: 3.182 is the 97.5% quantile with 3 degrees of freedom.
    costs = expected[:, 1:] - expected[:, :1]
    cheapest = int(costs[0].mean(-1).argmin())
    half = 3.182446 * costs[0, cheapest].std(ddof=1) / 2
    assert f"on a loss of {expected[0, 0].mean():.3f} [" in found.sentences[0]
    row = found.tables[0].rows[0]
    assert row[1:3] == (f"layer {cheapest}", f"{costs[0, cheapest].mean():.3f} ± {half:.3f}")
    # Orders are chosen on one half of the sequences, at the shorter length, and measured on the other half.
    order: list[int] = []
    while len(order) < 3:
        left = [n for n in range(3) if n not in order]
        order.append(min(left, key=lambda n: losses[tuple(sorted([*order, n]))][::2, :10].mean()))
    assert found.metadata["orders"]["greedy"] == [[f"layer {n}" for n in order]]
    assert found.metadata["measuring"] == {"RoPE": [1, 3]}
    together = np.stack([losses[tuple(sorted(order[: k + 1]))][1::2] for k in range(3)])
    np.testing.assert_allclose(found.numbers["greedy_loss"][1], together.mean(-1), rtol=1e-4)
    names = [figure.name for figure in found.figures]
    assert names == ["cost_by_layer", "cumulative_cost", "loss_by_position"]
    np.testing.assert_allclose(found.figures[0].panels[0][1][0].y, costs[0].mean(-1), atol=1e-5)
    write_findings(tmp_path, "layers", found, {})
    assert read_findings(tmp_path).findings.figures[1].panels[0][0] == "10 tokens"

    # Again, nothing is measured twice.
    monkeypatch.setattr(module, "Streams", None)
    later = session(tmp_path, lm, "--greedy", "--random=2")
    assert analysis.ANALYSIS.run(later).sentences == found.sentences and later.reused > 20


@pytest.mark.slow
def test_heads_one_at_a_time(lm, tmp_path):
    found = analysis.ANALYSIS.run(session(tmp_path, lm, "--by=head", "--layers=1", "--lengths=21"))
    assert found.numbers["loss"].shape == (2, 5, 4)  # 21 tokens, and those beyond the training length
    edit = dataclasses.replace(ROPE, heads=(HeadEdit((2,), NoPE()),))
    expected = lm.with_positional([ROPE, edit, ROPE]).loss_by_position(TOKENS).mean(1)
    np.testing.assert_allclose(found.numbers["loss"][0, 3], expected, rtol=1e-4)
    # All heads of a layer are the layer.
    whole = lm.drop_positional([1]).loss_by_position(TOKENS)[1::2].mean(1)
    np.testing.assert_allclose(found.numbers["cheapest_first_loss"][0, -1], whole, rtol=1e-4)
    assert next(f for f in found.figures if f.name == "cost_by_head").values.shape == (2, 1, 4)


def test_a_curve_can_have_few_points(lm, tmp_path):
    found = analysis.ANALYSIS.run(session(tmp_path, lm, "--points=1,3", "--lengths=21"))
    together = lm.drop_positional().loss_by_position(TOKENS)[1::2].mean(1)
    assert found.numbers["cheapest_first_loss"].shape[1] == 2
    np.testing.assert_allclose(found.numbers["cheapest_first_loss"][0, -1], together, rtol=1e-4)


def test_a_model_that_the_edit_leaves_as_it_is_is_left_out(lm, tmp_path):
    both = session(tmp_path, lm, "--layers=0", "--lengths=21")
    both.variants.append(Variant(Subject(lm, "made", "made"), "nope", "NoPE", (Layer(NoPE()),) * 3))
    both.names.append("NoPE")
    found = analysis.ANALYSIS.run(both)
    assert found.sentences[-1] == "NoPE is left out: --edit=drop changes none of its layers."
    assert list(found.metadata["measuring"]) == ["RoPE"]


def test_an_encoding_that_follows_the_length_has_that_of_each_length(lm, tmp_path):
    found = analysis.ANALYSIS.run(session(tmp_path, lm, "--edit=dynamic_ntk", "--layers=0"))
    after = (Layer(Rope(100.0, scaling=DynamicNTK(10))), ROPE, ROPE)
    for m, length in enumerate((10, T)):
        expected = lm.with_positional(after).loss_by_position(TOKENS[:, : length + 1]).mean(1)
        np.testing.assert_allclose(found.numbers["loss"][m, 1], expected, rtol=1e-4)


def test_fewer_than_four_sequences_are_not_halved_and_one_has_no_interval(lm, tmp_path):
    one = session(tmp_path, lm, "--layers=0", "--lengths=21", sequences=text(TOKENS[:1]))
    found = analysis.ANALYSIS.run(one)
    assert "±" not in found.tables[0].rows[0][2] and "[" not in found.sentences[0]
    assert found.metadata["measuring"] == {"RoPE": [0]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--greedy=4"], "--greedy=4: give how many of the 3 layers or heads to drop"),
        (["--greedy=some"], "--greedy=some"),
        (["--candidates=0", "--greedy"], "--candidates: '0' is not"),
        (["--random=-1"], "--random: '-1' is not"),
        (["--points=2,4"], "--points=2,4: give numbers of dropped layers or heads from 1 to 3"),
        (["--layers=7"], "--layers: there is no layer 7"),
        (["--edit=dorp"], "dorp"),
        (["--edit=nope+rope"], "A pattern of 2 layers does not tile 3 layers"),
        (["--edit=rope:base=100"], "--edit=rope:base=100 changes none of the chosen layers"),
        (["--lengths=1x,2y"], "--lengths: '2y' is no length"),
        (["--text=TEXT", "--lengths=1x,2x"], "has 19 tokens, too few for 4 sequences of 20 + 1"),
        (["--lengths=1x,2x"], "made does not tell its training data. Give a text: --text=GLOB."),
    ],
)
def test_bad_input_is_one_message(lm, tmp_path, monkeypatch, capsys, options, says):
    (tmp_path / "short.txt").write_text("a text of 19 bytes.")
    options = [option.replace("TEXT", str(tmp_path / "short.txt")) for option in options]

    def opened(name, arguments, out):
        variant = Variant(Subject(lm, "made", "made"), "as trained", "RoPE")
        made = AnalysisSession(name, arguments, tmp_path / "out", [variant], ["RoPE"])
        if not any(option.startswith(("--lengths", "--text")) for option in options):
            made.__dict__["sequences"] = text()
        return made

    monkeypatch.setattr("pe_lab.analysis.session.open_session", opened)
    argv = ["layers", "--from=made", "--sequences=4", "--lengths=10,21", f"--out={tmp_path}/out", *options]
    assert analyze.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and says in captured.err
    assert not (tmp_path / "out" / "analysis.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Layers for a budget


@pytest.mark.parametrize("search", ["greedy", "first-order"])
def test_layers_for_a_budget_cost_what_whole_evaluations_say(lm, tmp_path, search):
    """Sensitivities, the order and the prices, by evaluating each edited model whole."""
    windows = np.random.default_rng(3).integers(0, 300, (8, T + 1)).astype(np.int32)

    def whole(dropped, rows) -> np.ndarray:
        edited = lm.with_positional(drop(dropped).apply((ROPE,) * 3)) if dropped else lm
        logits = jax.nn.log_softmax(np.asarray(edited.logits(windows[rows, :-1])), -1)
        return -np.take_along_axis(np.asarray(logits), windows[rows, 1:, None], -1)[..., 0].mean(-1)

    choosing, pricing = slice(0, None, 2), slice(1, None, 2)
    base = whole([], choosing).mean()
    alone = {n: float(whole([n], choosing).mean() - base) for n in range(3)}
    order: list[int] = []
    while len(order) < 3:
        left = [n for n in range(3) if n not in order]
        cost = alone.get if search == "first-order" else lambda n: whole([*order, n], choosing).mean()  # noqa: B023
        order.append(min(left, key=cost))
    prices = [float((whole(order[: k + 1], pricing) - whole([], pricing)).mean()) for k in range(3)]

    found = choose_layers(session(tmp_path, lm, sequences=text(windows)), 1e6, search, show=lambda line: None)
    assert found.order == found.layers == tuple(order)
    assert found.sensitivities == pytest.approx(alone, abs=2e-5)
    assert [cost for cost, *_ in found.costs] == pytest.approx(prices, abs=2e-5)
    assert all(low <= cost <= high for cost, low, high in found.costs)
    between = (prices[0] + prices[1]) / 2
    if prices[0] < between < prices[1]:
        short = choose_layers(session(tmp_path, lm, sequences=text(windows)), between, search, show=lambda line: None)
        assert short.layers == tuple(order[:1]) and len(short.order) == 2
    most = choose_layers(session(tmp_path, lm, sequences=text(windows)), 1e6, search, 2, show=lambda line: None)
    assert most.layers == tuple(order[:2])


def test_layers_for_a_budget_need_encodings_and_sequences(lm, tmp_path):
    layers = (Layer(NoPE()),) * 3
    bare = dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, layers=layers), layers=layers)
    with pytest.raises(ConfigError, match="No layer of this model has an encoding"):
        choose_layers(session(tmp_path, bare), 0.1)
    with pytest.raises(ConfigError, match="2 sequences are too few"):
        choose_layers(session(tmp_path, lm, sequences=text(TOKENS[:2])), 0.1)
