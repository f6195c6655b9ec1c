"""DoPE's entropies of heads: against equations 23 to 30 in float64, and from the analysis to surgery."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
import tiny  # noqa: E402

from pe_lab import analyze, surgery  # noqa: E402
from pe_lab.analysis import head_entropy  # noqa: E402
from pe_lab.analysis.head_entropy import (  # noqa: E402
    HeadEntropy,
    _spectra,
    choice,
    gram,
)
from pe_lab.checkpoints.checkpoint import (  # noqa: E402
    Checkpoint,
    open_checkpoint,
    weights_digest,  # noqa: E402
)
from pe_lab.checkpoints.store import metadata_of  # noqa: E402
from pe_lab.config import ModelConfig  # noqa: E402
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402
from pe_lab.errors import UserError  # noqa: E402
from pe_lab.evaluation import targets  # noqa: E402
from pe_lab.language_model import LanguageModel  # noqa: E402
from pe_lab.model import Model  # noqa: E402
from pe_lab.page import figure_files  # noqa: E402
from pe_lab.positional import layers, select_heads  # noqa: E402
from pe_lab.results.findings import read_findings  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=97, layers=2, d_model=32, d_ff=32, heads=4, kv_heads=2, dtype="float32", attention_chunk=64
)
TRAINED = 64
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def lm():
    """Random weights, grouped queries, embeddings with a common direction."""
    model = Model(CONFIG)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(RNG.normal(0, 0.4, x.shape), x.dtype), shapes)
    params["token_embedder"]["embedding"] += 0.3
    described = layers("rope:base=100", CONFIG.layers)
    more = {"id": "a", "training_length": TRAINED, "lineage": []}
    recorded = metadata_of(model.config, described, **more)
    made = Checkpoint(Path("nowhere"), 0, params, model.config, described, recorded)
    return LanguageModel(made, described)


def equations(vectors):
    """Entropies by eq. 24 to 26 and eigenvalues for eq. 30 of one head's [T, K] vectors, one matrix at a time."""
    vectors = np.asarray(vectors, np.float64)
    half, bands = vectors.shape[1] // 2, []
    for f in range(half):
        sigma = np.zeros((2, 2))
        for k in vectors[:, [f, f + half]]:
            sigma += np.outer(k, k)
        values = np.linalg.eigvalsh(sigma / np.trace(sigma))
        bands.append(-sum(x * np.log(x) for x in values if x > 0))
    squares = np.linalg.svd(vectors, compute_uv=False) ** 2
    squares = np.concatenate([squares, np.zeros(vectors.shape[1] - len(squares))])
    return np.array(bands), squares / squares.sum()


def rank_of(spectrum, r):
    """Eq. 30."""
    p = spectrum[:r] / spectrum[:r].sum()
    p = p[p > 0]
    return np.exp(-(p * np.log(p)).sum())


@pytest.mark.parametrize(
    ("length", "encoding"),
    [
        pytest.param(97, "yarn:factor=2", marks=pytest.mark.slow),
        pytest.param(261, "dynamic_ntk:original_length=64", marks=pytest.mark.slow),
        (97, "heads"),
    ],
)
def test_entropies_are_those_of_the_equations(lm, length, encoding):
    """The reference sums outer products of the queries and keys that the model shows, in float64."""
    scaled = (
        lm.with_positional("rope:base=100+nope").with_heads(0, [1], "nope")
        if encoding == "heads"
        else lm.with_positional(encoding)
    )
    tokens = RNG.integers(0, 97, (2, length))
    unrotated, rotated = (scaled.queries_keys_values(tokens, rotated=r) for r in (False, True))
    trained = lm.queries_keys_values(tokens)
    for stage, seen in (("pre_ntk", trained), ("post_ntk", unrotated), ("post_rope", rotated)):
        for indicator, vectors in (("query", seen.query), ("key", seen.key)):
            found = head_entropy.measure(scaled, tokens, indicator=indicator, stage=stage)
            group = CONFIG.heads // vectors.shape[3]
            for b, layer, h in ((0, 0, 0), (1, 1, 1), (0, 1, 3), (1, 0, 2)):
                bands, spectrum = equations(vectors[layer, b, :, h // group])
                at = b, layer, h
                np.testing.assert_allclose(found.band_entropy[at], bands, atol=2e-6)
                np.testing.assert_allclose(found.spectrum[at], spectrum, atol=2e-6)
                assert found.score("vanilla")[at] == pytest.approx(np.exp(bands.mean()), abs=1e-5)
                for r in (2, 4, 8):
                    assert found.score(str(r))[at] == pytest.approx(rank_of(spectrum, r), abs=2e-5)
                assert found.score("full")[at] == pytest.approx(rank_of(spectrum, None), abs=2e-5)
                squares = (np.asarray(vectors[layer, b, :, h // group], np.float64) ** 2).sum(-1).mean()
                assert found.power[at] == pytest.approx(squares, rel=1e-5)
                assert found.score("1")[at] == pytest.approx(1 / spectrum[0], rel=1e-5)
                assert found.score("spectral_norm")[at] == pytest.approx(spectrum[0] * squares, rel=1e-5)


def test_the_scaling_reaches_unrotated_vectors_through_earlier_layers_alone(lm):
    tokens = RNG.integers(0, 97, (2, 97))
    scaled = lm.with_positional("yarn:factor=4")
    pre, post, rotated = (head_entropy.measure(scaled, tokens, stage=s) for s in ("pre_ntk", "post_ntk", "post_rope"))
    np.testing.assert_allclose(pre.spectrum[:, 0], post.spectrum[:, 0], atol=1e-6)
    assert np.abs(pre.spectrum[:, 1] - post.spectrum[:, 1]).max() > 1e-5
    assert np.abs(rotated.spectrum - post.spectrum).max() > 1e-3
    np.testing.assert_allclose(rotated.power, post.power * (0.1 * np.log(4) + 1) ** 2, rtol=1e-5)  # YaRN's factor
    only = head_entropy.measure(scaled, tokens, layers=[1])
    np.testing.assert_allclose(only.spectrum, post.spectrum[:, 1:], atol=1e-6)
    np.testing.assert_array_equal(post.spectrum[:, :, ::2], post.spectrum[:, :, 1::2])  # two heads on one key head


def test_packed_documents_and_padding(lm):
    """A sum over documents is the sum of each one's; tokens beyond a sequence's length do not count."""
    documents = [RNG.integers(0, 97, n) for n in (48, 48)]
    tokens = np.concatenate(documents)[None]
    segments = np.repeat([1, 2], [48, 48])[None].astype(np.int32)
    positions = np.tile(np.arange(48), 2)[None].astype(np.int32)
    found = head_entropy.measure(lm, tokens, stage="post_rope", segments=segments, positions=positions)
    alone = [lm.queries_keys_values(one, rotated=True).key[1, 0, :, 1] for one in documents]
    bands, spectrum = equations(np.concatenate(alone))
    np.testing.assert_allclose(found.band_entropy[0, 1, 2], bands, atol=2e-6)
    np.testing.assert_allclose(found.spectrum[0, 1, 2], spectrum, atol=2e-6)
    padded = np.pad(documents[0], (0, 49))[None].repeat(2, 0)
    found = head_entropy.measure(lm, padded, stage="post_rope", lengths=np.array([48, 97]))
    np.testing.assert_allclose(found.spectrum[0, 1, 2], equations(alone[0])[1], atol=2e-6)
    assert np.abs(found.spectrum[1] - found.spectrum[0]).max() > 1e-3


def test_queries_and_keys_together_do_not_depend_on_their_sizes(lm):
    x, y = RNG.standard_normal((2, 1, 2, 50, 8)) * np.linspace(1, 3, 8)
    grams = [np.einsum("bhtk,bhtl->bhkl", v, v) for v in (x, y)]
    tokens = np.array([50])
    one, other = _spectra(*grams, tokens)["both"], _spectra(grams[0] * 9, grams[1] / 9, tokens)["both"]
    np.testing.assert_allclose(one.spectrum, other.spectrum)
    np.testing.assert_allclose(one.band_entropy, other.band_entropy)
    scale = np.sqrt([np.trace(g[0, 0]) for g in grams])
    _, spectrum = equations(np.concatenate([x[0, 0] / scale[0], y[0, 0] / scale[1]]))
    np.testing.assert_allclose(one.spectrum[0, 0], spectrum, atol=1e-12)
    joint = head_entropy.measure(lm, RNG.integers(0, 97, (2, 97)), indicator="both")
    assert np.isnan(joint.power).all() and np.allclose(joint.spectrum.sum(-1), 1)


def test_ranks_of_a_spectrum_by_hand():
    found = HeadEntropy(
        np.zeros((1, 1, 1, 2)), np.array([0.5, 0.25, 0.25, 0]).reshape(1, 1, 1, 4), np.full((1, 1, 1), 8.0)
    )
    scores = {r: found.score(r).item() for r in ("vanilla", "1", "2", "3", "64", "full", "spectral_norm")}
    # By hand: -(2/3 ln 2/3 + 1/3 ln 1/3) = 0.6365; -(0.5 ln 0.5 + 0.5 ln 0.25) = 1.0397.
    assert scores == pytest.approx(
        {"vanilla": 1, "1": 2, "2": 1.88988, "3": 2.82843, "64": 2.82843, "full": 2.82843, "spectral_norm": 4}, abs=1e-5
    )
    # As eq. 30 is printed, r = 1 is 1 for every head; 1 / lambda is never above the full rank.
    assert rank_of(found.spectrum[0, 0, 0], 1) == 1
    empty = HeadEntropy(*(x[:, None] for x in _spectra(*np.zeros((2, 1, 1, 4, 4)), np.array([3]))["key"]))
    assert empty.score("full") == empty.score("vanilla") == empty.score("1") == 1


def test_long_sums_in_float32_and_their_memory():
    """65,536 tokens with a mean ten times their spread; XLA's scratch memory does not grow with the length."""
    x = (RNG.standard_normal((1, 65_536, 1, 8)) + 10).astype(np.float32)
    found = np.asarray(jax.jit(gram, static_argnums=2)(jnp.asarray(x), jnp.array([65_536]), 1024))[0, 0]
    exact = np.einsum("tk,tl->kl", *[x[0, :, 0].astype(np.float64)] * 2)
    assert np.abs(found / exact - 1).max() < 2e-6

    def scratch(tokens):
        shapes = jax.ShapeDtypeStruct((1, tokens, 4, 32), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.jit(gram, static_argnums=2).lower(*shapes, 256).compile().memory_analysis().temp_size_in_bytes

    assert scratch(8192) <= scratch(2048) + 4096


def test_both_orders_choose_the_same_heads_of_negated_scores():
    scores = RNG.permutation(24).reshape(4, 6).astype(float)
    for count in (1, 5, 24):
        low, high = (select_heads(scores, count, order) for order in ("ascending", "descending"))
        assert low == select_heads(-scores, count, "descending") and high == select_heads(-scores, count)
        assert set(low) | set(select_heads(scores, 24 - count, "descending")) == {
            (n, h) for n in range(4) for h in range(6)
        }


# --- The analysis, and surgery ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("entropy")
    made = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), made / "tokenizer")
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(targets, "mesh_for", lambda path: None)
    monkeypatch.setattr(figure_files, "render", lambda figure, form: b"")


@pytest.mark.slow
def test_from_scores_to_surgery(run, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["head_entropy", f"--from={run / 'pretrain'}", "--length=2x", "--sequences=2", f"--out={out}",
            "--positional=yarn:factor=2", "--format=svg"]  # fmt: skip
    assert analyze.main([*argv, "--scores=query:post_rope:2"]) == 0
    assert "scores: 78 files" in capsys.readouterr().out
    written = json.loads((out / "scores.json").read_text())
    assert json.loads((out / "scores" / "post_rope_query_trunc_2.json").read_text()) == written
    assert len(list((out / "scores").iterdir())) == 3 * (3 * 9 - 1)
    checkpoint = open_checkpoint(run / "pretrain")
    assert written["checkpoint_id"] == checkpoint.metadata["id"] and written["length"] == 32
    assert written["weights"] == weights_digest(checkpoint.params) and "yarn" in written["positional"]
    assert "--scores=query:post_rope:2" in written["command"]
    scores = np.array(written["scores"])
    analysis = read_findings(out)
    assert analysis.findings.numbers["post_rope_query_spectrum"].shape == (2, 2, 2, 8)
    spectra = analysis.findings.numbers["post_rope_query_spectrum"]
    expected = np.mean([[[rank_of(s, 2) for s in layer] for layer in sequence] for sequence in spectra], 0)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    # The lowest head is the one that surgery denoises in the model's scaled child, which has its weights.
    lowest = divmod(int(scores.argmin()), 2)
    scaled = tmp_path / "scaled"
    assert surgery.main([f"--from={run / 'pretrain'}", f"--to={scaled}", "--positional=yarn:factor=2"]) == 0
    child = tmp_path / "child"
    assert surgery.main([f"--from={scaled}", f"--to={child}", f"--mask-heads={out / 'scores.json'}"]) == 0
    found = [(n, h) for n, layer in enumerate(open_checkpoint(child).layers) for e in layer.heads for h in e.heads]
    assert found == [lowest]
    capsys.readouterr()
    # Another model of the same shape: one message that names both, and nothing written.
    other = [f"--from={run / 'recalibrate'}", f"--to={tmp_path / 'no'}", f"--mask-heads={out / 'scores.json'}"]
    assert surgery.main(other) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pretrain/checkpoints/3" in err and "recalibrate/checkpoints/3" in err
    assert not (tmp_path / "no").exists()
    # Another shape without lineage.
    (tmp_path / "wide.json").write_text(json.dumps({"scores": [[1, 2, 3]] * 2}))
    assert surgery.main([f"--from={scaled}", f"--to={tmp_path / 'no'}", f"--mask-heads={tmp_path / 'wide.json'}"]) == 2
    assert "2 lists of 2 numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("key:post_ntk", "write INDICATOR:STAGE:RANK"),
        ("keys:post_ntk:1", "Did you mean 'key'"),
        ("key:post_ntk_key:1", "Did you mean 'post_ntk'"),
        ("key:post_ntk:0", "there is no '0'"),
        ("both:post_ntk:spectral_norm", "no spectral norm"),
    ],
)
def test_scores_that_do_not_exist(text, says):
    with pytest.raises(UserError, match=says):
        choice("--scores", text)
