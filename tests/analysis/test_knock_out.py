"""Retrieval heads: their attention to a needle against a known weight, scores without them against edited weights."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pe_lab import analyze
from pe_lab.analysis import knock_out as analysis
from pe_lab.analysis.knock_out import (
    Knocked,
    masked,
    measure,
    random_heads,
    retrieval_scores,
    verdict,
    whole_answers,
    without_heads,
    without_pairs,
)
from pe_lab.analysis.sequences import SequenceQuestions, Sequences, open_sequences
from pe_lab.analysis.session import AnalysisSession
from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.config import ModelConfig
from pe_lab.data.tokenizers import load_tokenizer
from pe_lab.errors import ConfigError
from pe_lab.evaluation.variants import Subject, Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import Model, complete
from pe_lab.positional import HeadEdit, Layer, NoPE, Rope, Uniform, frequencies

V = D = K = 16
CONFIG = ModelConfig(vocab_size=V, layers=2, d_model=D, d_ff=24, heads=4, kv_heads=2, head_dim=K, dtype="float32")
T, S, Q = 19, 6, 3
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (S, T)).astype(np.int32)
AT = np.tile([12, 13, 16], (S, 1))
SOURCE = np.stack([RNG.permutation(10)[:Q] for _ in range(S)])
NEEDLE = np.stack([SOURCE, SOURCE + 1], -1)
ANSWERS = np.take_along_axis(TOKENS, AT + 1, 1)
ASKED = Sequences("prompts", TOKENS, np.full(S, T), questions=SequenceQuestions(AT, ANSWERS, SOURCE, NEEDLE))


@functools.cache
def made() -> LanguageModel:
    params = jax.tree.map(lambda a: 8 * a if a.ndim > 2 else a, jax.jit(Model(CONFIG).init)(jax.random.key(0)))
    metadata = {"id": "made", "training_length": T, "lineage": []}
    checkpoint = Checkpoint(Path("made"), 1, params, complete(CONFIG), (Layer(Rope(100.0)),) * 2, metadata)
    return LanguageModel(checkpoint, checkpoint.layers)


def session(out: Path, *options: str, sequences: Sequences = ASKED) -> AnalysisSession:
    argv = ["knock_out", "--from=made", "--suite=needles", f"--sequences={S}", *options]
    arguments = analyze.parser("knock_out").parse_args(argv)
    variant = Variant(Subject(made(), "made", "made"), "as trained", "RoPE")
    built = AnalysisSession("knock_out", arguments, out, [variant], ["RoPE"])
    built.__dict__["sequences"] = sequences
    return built


def test_attention_to_the_source_of_hand_made_heads():
    """Embeddings are one-hot: head 0 attends to the same token as its query's, head 1 to all tokens alike."""
    lm = made().drop_positional()
    params = jax.tree.map(jnp.zeros_like, lm.checkpoint.params)
    params["token_embedder"]["embedding"] = jnp.eye(V)
    layer = {**params["layers"], "attention_norm": {"scale": jnp.ones((2, D))}}
    query = jnp.zeros((2, D, 4, K)).at[:, :, 0].set(jnp.eye(D))
    layer["attention"] = {**layer["attention"], "query": query, "key": jnp.tile(jnp.eye(D)[:, None], (2, 1, 2, 1))}
    lm = dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params={**params, "layers": layer}))
    tokens = np.array([[3, 5, 3, 7, 5, 1, 2, 5] + [0] * (T - 8)], np.int32)
    # The query of 5 at 4 sees 5 tokens, 2 of them its own; that at 7 sees 8, 3 of them its own.
    # The first and the last ask for the 5 at 1, the other for the 3 at 0.
    at, source = np.array([[4, 7, 4]]), np.array([[1, 0, 1]])
    asked = SequenceQuestions(at, np.zeros_like(at), source, np.stack([source, source + 1], -1))
    found = retrieval_scores(lm, Sequences("one", tokens, np.array([8]), questions=asked))
    assert found.shape == (1, 2, 4)
    peak = np.exp(D / K**0.5)  # the norm makes one-hot vectors of length sqrt(D)
    expected = (2 * peak / (2 * peak + 3) + 1 / (3 * peak + 5)) / 3
    np.testing.assert_allclose(found[0, :, 0], expected, rtol=1e-4)
    np.testing.assert_allclose(found[0, :, 1:], (2 / 5 + 1 / 8) / 3, rtol=1e-5)


def test_attention_to_the_source_is_that_of_attention_weights():
    found, lm = retrieval_scores(made(), ASKED), made()
    weights = lm.attention_weights(TOKENS)  # [N, S, H, T, T]
    for s in range(S):
        expected = weights[:, s][:, :, AT[s], SOURCE[s]].mean(-1)
        np.testing.assert_allclose(found[s], expected, rtol=1e-4, atol=1e-6)


def test_scores_are_those_of_logits_also_with_heads_masked():
    lm, heads = made(), [(1, 2), (0, 3), (1, 0)]
    edited = jax.tree.map(np.array, lm.checkpoint.params)
    for n, h in heads:
        edited["layers"]["attention"]["out"][n, h] = 0
    by_hand = dataclasses.replace(lm, checkpoint=dataclasses.replace(lm.checkpoint, params=edited))
    assert jax.tree.all(jax.tree.map(np.array_equal, without_heads(lm.checkpoint.params, heads, lm.config), edited))
    ways = [(lm, (), lm), (lm, heads, by_hand), (masked(lm, heads), (), by_hand)]
    for model, without, expected in ways:
        found = measure(model, ASKED, without)
        logits = np.asarray(jax.nn.log_softmax(expected.logits(TOKENS)))
        logits = np.take_along_axis(logits, AT[..., None], 1)
        np.testing.assert_allclose(
            found.log_prob, np.take_along_axis(logits, ANSWERS[..., None], -1)[..., 0], rtol=1e-4
        )
        np.testing.assert_array_equal(found.right, logits.argmax(-1) == ANSWERS)


def test_prompts_of_niah_ask_for_their_needles():
    arguments = session(Path("unused"), "--suite=niah:standard", "--haystack=noise", "--length=900").arguments
    lm = dataclasses.replace(made(), tokenizer=load_tokenizer("bytes"))
    arguments.sequences = 3  # fewer than the default depths
    found = open_sequences(arguments, Subject(lm, "made", "made"))
    assert found.tokens.shape == (3, 900) and found.questions.at.shape[1] == 8  # a space and seven digits
    repeated = np.take_along_axis(found.tokens, found.questions.source, 1)
    np.testing.assert_array_equal(repeated, found.questions.answers)
    np.testing.assert_array_equal(np.take_along_axis(found.tokens, found.questions.at + 1, 1), repeated)
    assert whole_answers(np.ones((3, 8), bool), found.questions) == [[True]] * 3


def test_a_quarter_of_the_pairs_adds_nothing_to_the_logits_of_a_head():
    """Logits by hand, from queries and keys whose slowest or fastest channels are 0."""
    lm, (n, h) = made(), (1, 2)
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (1, 6))
    found = lm.queries_keys_values(tokens, layers=[n], rotated=True)
    rates = np.argsort(frequencies(lm.layers[n].encoding, lm.config.head_dim)[0])
    R = len(rates)
    for mask, gone in (("slow", rates[: R // 4]), ("fast", rates[-(R // 4) :])):
        query, key = found.query[0, 0, :, h].copy(), found.key[0, 0, :, h // 2]
        query[:, [*gone, *(gone + R)]] = 0
        logits = query @ key.T / np.sqrt(2 * R)
        logits[np.triu_indices(6, 1)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        edited = masked(lm, [(n, h)], mask)
        ours = edited.attention_weights(tokens, layers=[n])[0, 0]
        np.testing.assert_allclose(ours[h], weights / weights.sum(-1, keepdims=True), atol=2e-6)
        others = [i for i in range(lm.config.heads) if i != h]
        np.testing.assert_array_equal(ours[others], lm.attention_weights(tokens, layers=[n])[0, 0][others])


def test_a_random_quarter_is_zero_in_the_queries_alone():
    """Logits by hand, from queries whose channels are 0 where the edited weights are; other heads keep theirs."""
    lm, heads = made(), [(0, 3), (1, 2)]
    edited = masked(lm, heads, "random")
    before, after = (np.asarray(one.checkpoint.params["layers"]["attention"]["query"]) for one in (lm, edited))
    gone = {}
    for n, h in heads:
        zero = np.flatnonzero((after[n, :, h] == 0).all(0))
        gone[n, h] = zero
        assert len(zero) == K // 4 and sorted(zero[: K // 8] + K // 2) == sorted(zero[K // 8 :])  # pairs
        kept = np.setdiff1d(np.arange(K), zero)
        np.testing.assert_array_equal(after[n, :, h][:, kept], before[n, :, h][:, kept])
        others = [i for i in range(4) if i != h]
        np.testing.assert_array_equal(after[n][:, others], before[n][:, others])
    assert sorted(gone[0, 3]) != sorted(gone[1, 2])
    tokens = np.random.default_rng(0).integers(0, V, (1, 6))
    found = lm.queries_keys_values(tokens, layers=[0], rotated=True)
    query, key = found.query[0, 0, :, 3].copy(), found.key[0, 0, :, 1]
    query[:, gone[0, 3]] = 0
    logits = query @ key.T / np.sqrt(K)
    logits[np.triu_indices(6, 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    ours = edited.attention_weights(tokens, layers=[0])[0, 0, 3]
    np.testing.assert_allclose(ours, weights / weights.sum(-1, keepdims=True), atol=2e-6)
    normed = dataclasses.replace(lm.config, qk_norm="head")
    with pytest.raises(ConfigError, match="would enlarge the others"):
        without_pairs(lm.checkpoint.params, {(0, 3): [0]}, normed)


def test_other_masks_are_edits_of_heads():
    heads = [(1, 2), (0, 3), (1, 0)]
    for mask, to in (("uniform", Uniform()), ("nope", NoPE())):
        layers = masked(made(), heads, mask).layers
        assert [layer.heads for layer in layers] == [(HeadEdit((3,), to),), (HeadEdit((2, 0), to),)]


def test_an_answer_is_found_if_all_its_tokens_are():
    needle = np.array([[[1, 3], [1, 3], [1, 3], [5, 7]]])
    asked = SequenceQuestions(np.array([[8, 9, 11, 12]]), np.zeros((1, 4), int), np.zeros((1, 4), int), needle)
    # 8 and 9 are one answer; 11 is not next, and 12 has another needle.
    assert whole_answers(np.array([[True, False, True, True]]), asked) == [[False, True, True]]
    assert whole_answers(np.array([[True, True, False, True]]), asked) == [[True, False, True]]


@pytest.mark.parametrize("control", ["any", "layers"])
def test_random_heads_are_others(control):
    retrieval = ((1, 0), (1, 3), (0, 2))
    draws = [random_heads(retrieval, 2, 4, seed, control) for seed in range(20)]
    assert len(set(draws)) > 5 and all(len(set(draw)) == 3 and not set(draw) & set(retrieval) for draw in draws)
    layers = {tuple(n for n, _ in draw) for draw in draws}
    assert layers == {(1, 1, 0)} if control == "layers" else len(layers) > 2
    # Four retrieval heads of one layer leave none there.
    assert {n for n, _ in random_heads(tuple((1, h) for h in range(4)), 2, 4, 0, "layers")} == {0}


def knocked(retrieval: float, random: float) -> Knocked:
    """Ten sequences of one answer, all found without a mask; the shares that are found with one head masked."""

    def answers(share: float) -> list[list[bool]]:
        return [[s >= 10 * (1 - share)] for s in range(10)]

    found = {"none": answers(1), ("retrieval", 1): answers(retrieval), ("random", 1, 0): answers(random)}
    log_prob = {key: np.zeros(10) for key in found}
    return Knocked("made", np.zeros((10, 2, 4)), ((0, 1),), (((1, 2),),), found, log_prob)


def test_shares_have_wilsons_interval_and_a_verdict():
    one = knocked(0.2, 1)
    z2 = 1.959964**2
    assert one.share("random", 1).low == pytest.approx(10 / (10 + z2)) and one.share("random", 1).high == 1
    assert one.share("retrieval", 1).mean == 0.2 and one.share("retrieval", 0).mean == 1
    # 8 ones and 2 zeros: t with 9 degrees of freedom is 2.262, and 2.262 * sqrt(0.16 * 10 / 9 / 10) is 0.30.
    assert verdict(one, (1,)).startswith("confirmed that the answers depend on the retrieval heads")
    assert "the share of answers lost is larger by 0.80 [0.50, 1.10]." in verdict(one, (1,))
    assert "depend on the encoding of the retrieval heads" in verdict(one, (1,), "nope")
    assert verdict(knocked(0.9, 0.9), (1,)).startswith("not confirmed")
    nothing = dataclasses.replace(one, found={**one.found, "none": [[False]] * 10})
    assert verdict(nothing, (1,)).startswith("undecided")


def test_the_analysis_and_again(tmp_path, monkeypatch):
    found = analysis.ANALYSIS.run(session(tmp_path, "--count=1,2", "--draws=2"))
    order = np.random.default_rng(0).permutation(S)
    choosing, testing = sorted(order[:3].tolist()), sorted(order[3:].tolist())
    weights = retrieval_scores(made(), ASKED.batch(choosing))
    np.testing.assert_allclose(found.numbers["retrieval"], weights, rtol=1e-6)
    strongest = [divmod(int(i), 4) for i in np.argsort(-weights.mean(0).ravel())[:2]]
    heads = found.metadata["heads"]["RoPE"]
    assert list(heads["retrieval"]) == strongest and len(heads["random"]) == 2
    others = ASKED.batch(testing)
    change = measure(made(), others, strongest).log_prob - measure(made(), others).log_prob
    np.testing.assert_allclose(found.numbers["retrieval_log_prob_change"][2], change.mean(-1), rtol=1e-3, atol=1e-5)
    assert found.numbers["random_found"].shape == (3, 3) and len(found.tables[0].rows) == 5
    assert [figure.name for figure in found.figures] == ["retrieval_scores", "needles_found", "answer_log_prob"]

    monkeypatch.setattr("pe_lab.analysis.losses.Streams", None)
    monkeypatch.setattr(analysis, "retrieval_scores", None)
    later = session(tmp_path, "--count=1,2", "--draws=2")
    assert analysis.ANALYSIS.run(later).sentences == found.sentences and later.reused == 3 + 3 * (1 + 2 * 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--count=5"], "RoPE has 8 heads, and as many others are masked for comparison: give at most 4."),
        (["--count=one"], "--count=one: give whole numbers of heads"),
        (["--count=0"], "--count=0: give whole numbers of heads"),
        (["--draws=0"], "--draws: '0' is not"),
        (["--mask=nope", "--positional=nope"], "--mask=nope changes nothing in RoPE, whose heads have no encoding."),
        ([], "knock_out needs prompts with needles: --suite=niah:standard or --suite=needles."),
        (["--suite=needles", "--sequences=1"], "chooses heads on one half of the sequences"),
        (["--suite=niah"], "made came without a tokenizer"),
        (["--suite=needles", "--text=*"], "--text and --suite each give the sequences"),
    ],
)
def test_bad_input_is_one_message(tmp_path, monkeypatch, capsys, options, says):
    def opened(name, arguments, out):
        lm = made().drop_positional() if arguments.positional else made()
        variant = Variant(Subject(made(), "made", "made"), "as trained", "RoPE", lm.layers)
        built = AnalysisSession(name, arguments, tmp_path / "out", [variant], ["RoPE"])
        if arguments.suite != "niah" and arguments.text is None:
            built.__dict__["sequences"] = ASKED.batch(range(arguments.sequences if arguments.sequences < S else S))
        return built

    monkeypatch.setattr("pe_lab.analysis.session.open_session", opened)
    suite = ["--suite=needles"] if options and not any("suite" in option for option in options) else []
    assert analyze.main(["knock_out", "--from=made", f"--out={tmp_path}/out", *suite, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and says in captured.err


def test_text_has_no_needles():
    with pytest.raises(analysis.ConfigError, match="windows hold no needles: give --suite=niah:standard"):
        measure(made(), Sequences("windows", TOKENS, np.full(S, T)))
