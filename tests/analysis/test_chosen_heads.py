"""DoPE's Figures 2 to 6: attention and directions of chosen heads, against all weights and numpy's eigh, by hand."""

import sys
from pathlib import Path

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import G, H, K

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
import tiny  # noqa: E402

from pe_lab import analyze  # noqa: E402
from pe_lab.analysis import chosen_heads  # noqa: E402
from pe_lab.analysis.chosen_heads import (  # noqa: E402
    CYCLES,
    PLACES,
    HeadUse,
    _statements,
    cosines,
    few,
    measure,
    periodicity,
    similarity_maps,
)
from pe_lab.analysis.heads import NEAR  # noqa: E402
from pe_lab.analysis.sequences import SequenceQuestions, Sequences  # noqa: E402
from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer  # noqa: E402
from pe_lab.errors import UserError  # noqa: E402
from pe_lab.evaluation import targets  # noqa: E402
from pe_lab.page import figure_files  # noqa: E402
from pe_lab.page.document import build_page  # noqa: E402
from pe_lab.positional import HeadEdit, Layer, NoPE, Rope, Yarn  # noqa: E402
from pe_lab.results.findings import read_findings  # noqa: E402
from pe_lab.results.runs import read_runs  # noqa: E402

LAYERS = (Layer(Rope(100.0, scaling=Yarn(4.0, 64))), Layer(Rope(100.0), heads=(HeadEdit((1,), NoPE()),)))
T, LENGTHS = 97, np.array([97, 90])
AT = np.array([[95, 96], [70, 80]])
NEEDLE = np.array([[[30, 33], [30, 33]], [[3, 6], [60, 75]]])  # the last one is near its query, at 80


def share_by_hand(signal):
    """(share of each signal's strongest period in all power, its period) of [n, K], by a sum for each frequency."""
    n, strongest, total, best = len(signal), 0.0, 0.0, (0.0, 0)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(n) + 0.5) / n)
    for s in np.asarray(signal, np.float64).T:
        s = (s - s.mean()) * hann
        power = np.array([abs((s * np.exp(-2j * np.pi * f * np.arange(n) / n)).sum()) ** 2 for f in range(n // 2 + 1)])
        three = [power[f - 1] + power[f] + power[f + 1] for f in range(CYCLES, n // 2)]
        strongest, total = strongest + max(three), total + power[1:].sum()
        best = max(best, (max(three), CYCLES + int(np.argmax(three))))
    return strongest / total, n / best[1]


@pytest.fixture(scope="module")
def case():
    lm, ids = dense.language_model(LAYERS), dense.tokens(T)
    asked = SequenceQuestions(AT, AT, NEEDLE[..., 0], NEEDLE)
    found = measure(lm, ids, questions=asked, lengths=LENGTHS)
    unrotated, rotated = (lm.queries_keys_values(ids, rotated=form) for form in (False, True))
    return lm, ids, found, unrotated, rotated


def test_attention_is_what_all_weights_say(case):
    lm, _, found, unrotated, _ = case
    positions, one = np.broadcast_to(np.arange(T), (2, T)), np.ones((2, T))
    for n, layer in enumerate(LAYERS):
        weights = dense.weights(np.asarray(unrotated.query[n]), np.asarray(unrotated.key[n]), layer, positions, one)
        for b in range(2):
            first, near, needle, entropy = [], [], [], []
            for at, (begin, end) in zip(AT[b], NEEDLE[b], strict=True):
                row = weights[b][:, at]  # [H, T]
                in_needle = [s for s in range(T) if begin <= s < end]
                in_near = [s for s in range(at - NEAR + 1, at + 1) if s > 0 and s not in in_needle]
                first.append(row[:, 0])
                needle.append(row[:, in_needle].sum(-1))
                near.append(row[:, in_near].sum(-1))
                entropy.append(-(row * np.log(np.where(row > 0, row, 1))).sum(-1))
            by_hand = {"first": first, "near": near, "needle": needle, "entropy": entropy}
            for name, values in by_hand.items():
                np.testing.assert_allclose(getattr(found, name)[b, n], np.mean(values, 0), rtol=1e-4, atol=2e-5)
            rows = weights[b][:, AT[b]].mean(1)
            places = np.zeros((H, PLACES + 1))
            places[:, 0] = rows[:, 0]
            for s in range(1, LENGTHS[b]):
                places[:, 1 + s * PLACES // LENGTHS[b]] += rows[:, s]
            np.testing.assert_allclose(found.by_place[b, n], places, rtol=1e-4, atol=2e-5)
    assert lm.config.heads == H


def test_directions_are_those_of_numpys_eigenvectors(case):
    lm, ids, found, unrotated, rotated = case
    fields = ((rotated, found.mass, found.peak), (unrotated, found.mass_unrotated, found.peak_unrotated))
    maps = similarity_maps(lm, ids, [(1, 2), (0, 3)], LENGTHS)
    for b, n, h in ((0, 0, 3), (0, 1, 2), (1, 1, 1), (1, 0, 3), (1, 1, 2)):
        for seen, mass, peak in fields:
            query = np.asarray(seen.query[n, b, : LENGTHS[b], h], np.float64)
            vectors = np.linalg.eigh(sum(np.outer(q, q) for q in query))[1][:, ::-1]
            found_cosines = (query / np.linalg.norm(query, axis=1)[:, None]) @ vectors
            np.testing.assert_allclose(mass[b, n, h], (found_cosines**2).mean(0), atol=2e-4)
            assert mass[b, n, h].sum() == pytest.approx(1, abs=1e-5)
            if LENGTHS[b] == T:  # padding changes the frequencies
                share, period = share_by_hand(found_cosines)
                assert peak[b, n, h] == pytest.approx(share, rel=1e-3)
                assert seen is unrotated or found.period[b, n, h] == pytest.approx(period)
            if seen is rotated and (n, h) in ((1, 2), (0, 3)):
                signs = np.sign(vectors[np.abs(vectors).argmax(0), np.arange(K)])
                at = np.arange(LENGTHS[b]) * T // LENGTHS[b]
                by_hand = np.zeros((T, K))
                for t, cosine in zip(at, found_cosines * signs, strict=True):
                    by_hand[t] += cosine  # RANGES > T: each token has a range of its own
                np.testing.assert_allclose(maps[b, [(1, 2), (0, 3)].index((n, h))], by_hand, atol=2e-3)
    # A head without a rotation is the same in both forms, and one with it is not.
    np.testing.assert_allclose(found.mass[:, 1, 1], found.mass_unrotated[:, 1, 1], atol=1e-5)
    assert np.abs(found.mass[:, 1, 2] - found.mass_unrotated[:, 1, 2]).max() > 1e-2
    assert G < H  # a query head has a Gram matrix of its own queries, whatever its key head is


def test_a_head_of_one_pair_has_its_period_and_two_directions():
    """A vector that rotates at one rate: both eigenvalues are equal, and each cosine is a sine of that rate."""
    tokens, rate = 512, 2 * np.pi * 37.3 / 512
    phase = rate * np.arange(tokens)
    x = np.zeros((1, tokens, 2, K), np.float32)
    x[0, :, 0, 1], x[0, :, 0, 1 + K // 2] = np.cos(phase), np.sin(phase)
    x[0, :, 1, 1] = 1 + np.arange(tokens) / tokens  # the second head drifts, along one direction
    found = cosines(jnp.asarray(x), jnp.array([tokens]), 128)
    np.testing.assert_allclose((found[0, :, 0] ** 2).mean(0)[:2], 0.5, atol=4e-3)
    np.testing.assert_allclose((found[0, :, 1] ** 2).mean(0), [1] + [0] * (K - 1), atol=1e-6)
    share, period = periodicity(found, jnp.array([tokens]))
    assert share[0, 0] > 0.96 and period[0, 0] == pytest.approx(512 / 37)


def test_drifts_and_noise_are_not_periodic():
    rng, tokens = np.random.default_rng(0), 1024
    at = np.arange(tokens) / tokens
    signals = np.stack([at, np.cos(np.pi * at), at**2, rng.standard_normal(tokens), np.sin(2 * np.pi * 80 * at)], -1)
    signals = signals[None, :, :, None].astype(np.float32)  # five heads of one signal
    share, period = np.asarray(periodicity(jnp.asarray(signals), jnp.array([tokens])))[:, 0]
    assert (share[:3] < 0.01).all() and share[3] < 0.03 and share[4] > 0.99 and period[4] == tokens / 80
    for h in range(5):
        assert share[h] == pytest.approx(share_by_hand(signals[0, :, h])[0], rel=1e-3, abs=1e-5)


@pytest.mark.slow  # 5 s
def test_text_has_no_needle_and_padding_does_not_count(case):
    lm, ids = case[:2]
    padded = np.pad(ids[:, :80], ((0, 0), (0, 17)), mode="edge")
    found, alone = measure(lm, padded, lengths=np.array([80, 80])), measure(lm, ids[:, :80])
    assert np.isnan(found.needle).all() and np.isfinite(found.near).all()
    for name in ("entropy", "first", "near", "by_place", "mass", "mass_unrotated"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), atol=2e-4)
    segments, positions = np.repeat([1, 2], [40, 40])[None], np.tile(np.arange(40), 2)[None].astype(np.int32)
    second = measure(lm, ids[:1, :80], segments=segments.astype(np.int32), positions=positions)
    # The last tokens do not see the first document.
    np.testing.assert_allclose(second.by_place[..., :33].sum(-1), 0, atol=1e-6)
    np.testing.assert_allclose(second.first, measure(lm, ids[:1, 40:80]).first, rtol=1e-3)
    with pytest.raises(UserError, match="at least 16"):
        measure(lm, ids[:, :15])


def test_memory_is_linear_in_the_length():
    """XLA's scratch memory of a layer: twice the tokens, twice the bytes."""

    def scratch(tokens):
        shapes = jax.ShapeDtypeStruct((1, tokens, 4, 32), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled = jax.jit(chosen_heads._directions, static_argnums=2).lower(*shapes, 256).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch(8192) < 2.2 * scratch(4096) < 200 * 4096 * 4 * 32


# --- The statements ---------------------------------------------------------------------------------------------------


def use_of(**changed):
    """Four heads of one layer in three sequences: all alike, but for what is changed; [4] or [3, 4] by field."""
    ones = np.ones((3, 1, 4))
    mass = np.full((3, 1, 4, 16), 1 / 16)
    fields = {name: 0.1 * ones for name in HeadUse._fields} | {"by_place": np.zeros((3, 1, 4, 65)), "mass": mass}
    fields |= {"mass_unrotated": mass}
    for name, values in changed.items():
        fields[name] = np.broadcast_to(np.asarray(values, float), fields[name].shape)
    return HeadUse(**fields)


GROUPS = {("vanilla", "lowest"): [(0, 0)], ("vanilla", "highest"): [(0, 1)], ("16", "lowest"): [(0, 2)]}
GROUPS |= {("16", "highest"): [(0, 3)]}
DRAWN = {key: heads[0] for key, heads in GROUPS.items()}


def verdicts(**changed):
    """What is so of each measured number, by its first words."""
    return {measured: (number, here) for _, measured, number, here in _statements(use_of(**changed), GROUPS, DRAWN)}


def test_statements_by_hand():
    noise = np.array([0.01, 0, -0.01])[:, None, None]
    found = verdicts(first=noise * np.array([[[0, 0, 1, 0]]]) + [0.1, 0.1, 0.7, 0.1])
    sink = "low truncated entropy against the other heads: weight on the first token"
    # 0.6 with a deviation of 0.01 over three sequences: t = 4.303, 4.303 * 0.01 / sqrt(3) = 0.0248.
    assert found[sink] == ("+0.600 [+0.575, +0.625]", "so here")
    assert found["high matrix entropy against the other heads: weight on the first token"][1] == "not so here"
    other = "the other heads against those of low truncated entropy: weight on the needle"
    missing = "low matrix entropy against the other heads: weight on the needle"
    found = verdicts(needle=noise * np.array([[[1, 0, 1, 0]]]) + [0.0, 0.4, 0.0, 0.4])
    assert found[other][1] == "so here" and found[missing][1] == "so here"
    found = verdicts(needle=noise * np.array([[[1, 0, 1, 0]]]) + [0.4, 0.0, 0.0, 0.0])
    assert found[missing][1] == "not so here" and found[other][1] == "so here"
    found = verdicts(needle=10 * noise * np.array([[[1, 0, 1, 0]]]))
    assert found[missing][1] == found[other][1] == "not settled"
    assert not any("needle" in measured for measured in verdicts(needle=np.nan))


def test_low_rank_and_periodicity_by_hand():
    mass = np.tile(np.full(16, 0.25 / 14), (3, 1, 4, 1))
    mass[..., :2] = 0.375  # two of sixteen are an eighth
    mass[:, :, 2] = 1 / 16
    noise = np.array([0.001, 0, -0.001])[:, None, None]
    wobble = np.zeros((3, 1, 4, 16))
    wobble[..., 0] = noise
    np.testing.assert_allclose(few(use_of(mass=mass))[0, 0], [0.75, 0.75, 0.125, 0.75])
    found = verdicts(mass=mass + wobble, peak=noise * np.array([[[1, 0, 0, 0]]]) + [0.2, 0.2, 0.5, 0.1])
    low_rank = {name: here for name, here in found.items() if "against 1/2" in name}
    # Of unrotated queries an eighth is in the first eighth; of rotated ones (3 * 0.75 + 0.125) / 4.
    assert next(here for name, here in found.items() if name.startswith("all heads")) == (
        "+0.469 [+0.466, +0.471]",
        "so here",
    )
    assert all(name.endswith("(all heads have 0.594)") for name in low_rank)
    figure_4, by_text, by_caption = (
        next(here for name, here in low_rank.items() if name.startswith("the head") and figure in name)
        for figure in ("(Figure 4)", "by section 5.5", "by its caption")
    )
    assert figure_4[1] == by_text[1] == "so here" and figure_4[0].startswith("0.750") and by_caption[1] == "not so here"
    periodic = [here for name, here in found.items() if name.startswith("the head") and "one period" in name]
    assert [here for _, here in periodic] == ["not so here", "so here"]
    assert [number.split(" ")[0] for number, _ in periodic] == ["-0.100", "+0.300"]


# --- The analysis -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("chosen")
    made = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), made / "tokenizer")
    return made


@pytest.mark.slow
def test_the_analysis_writes_figures_tables_and_arrays(run, tmp_path, capsys, monkeypatch):
    """From the command to a page; 15 s."""
    monkeypatch.setattr(targets, "mesh_for", lambda path: None)
    out = run / "analysis" / "head_entropy"
    argv = ["head_entropy", f"--from={run / 'pretrain'}", "--sequences=3", f"--out={out}", "--format=svg",
            "--scores=query:post_rope:16"]  # fmt: skip
    prompts = ["--suite=niah:standard", "--haystack=noise", "--length=900", "--depths=0"]
    assert analyze.main([*argv, *prompts, "--selected=1"]) == 0
    printed = capsys.readouterr().out
    assert "statements of DoPE, sections 5.4 and 5.5" in " ".join(printed.split())
    found = read_findings(out).findings
    numbers = found.numbers
    assert numbers["chosen_mass"].shape[:1] == (3,) and numbers["chosen_similarity"].shape[:2] == (4, 128)
    np.testing.assert_allclose(numbers["chosen_mass"].sum(-1), 1, atol=1e-5)
    figures = {figure.name: figure for figure in found.figures}
    assert {"chosen_attention", "similarity", "low_rank"} <= set(figures)
    # The heads that are drawn are those at the ends of the scores.
    spectra = numbers["post_rope_query_spectrum"]
    kept = spectra[..., :16] / spectra[..., :16].sum(-1, keepdims=True)
    truncated = np.exp(-(kept * np.log(np.maximum(kept, 1e-30))).sum(-1)).mean(0)
    vanilla = np.exp(numbers["post_rope_query_band_entropy"].mean(-1)).mean(0)
    ends = [np.unravel_index(end(x), x.shape) for x in (vanilla, truncated) for end in (np.argmin, np.argmax)]
    assert numbers["chosen_heads"].tolist() == [list(end) for end in ends]
    n, h = ends[2]
    assert figures["similarity"].panels[2] == f"{n}.{h} lowest truncated"
    ((mark, text),) = figures["chosen_attention"].marks
    assert text == "needle" and mark < PLACES / 2  # at depth 0, after the instruction
    tables = "\n".join(table.title for table in found.tables)
    for words in ("DoPE, Figure 2", "DoPE, Figures 3 to 6", "Rank correlation", "What DoPE writes"):
        assert words in tables
    for figure in figures:
        assert (out / f"{figure}.svg").stat().st_size > 1000
    page = build_page(read_runs([run]))
    for words in ("Queries along the eigenvectors", "severe attention sink", "clear periodicity"):
        assert words in page
    parts = len(list((out / "parts").iterdir()))
    # Another choice of heads measures nothing again but the maps, and text has no needle.
    assert analyze.main([*argv[:-1], *prompts, "--selected=2", "--scores=key:post_ntk:16"]) == 0
    assert len(list((out / "parts").iterdir())) <= parts + 1
    capsys.readouterr()
    assert analyze.main([*argv, "--length=2x", "--selected=1"]) == 0
    headers = {table.title.split(" (")[0]: table.header for table in read_findings(out).findings.tables}
    assert headers["What heads chosen by post_rope_query attend to"] == (
        "heads", "entropy, nats", "first token", "nearest 32", "elsewhere"
    )  # fmt: skip
    capsys.readouterr()
    assert analyze.main([*argv, "--length=2x", "--selected=3"]) == 2
    assert "Give at most 2" in capsys.readouterr().err


def test_figures_render():
    rng = np.random.default_rng(0)
    use = use_of(by_place=rng.random((3, 1, 4, 65)), mass=rng.dirichlet(np.ones(16), (3, 1, 4)))

    asked = SequenceQuestions(*(np.zeros((3, 1), int),) * 3, np.full((3, 1, 2), 8))
    made = Sequences("made", np.zeros((3, 512), np.int32), np.full(3, 512), questions=asked)
    figures = chosen_heads._figures(made, use, GROUPS, DRAWN, rng.uniform(-1, 1, (4, 128, 16)), "key", "", "")
    for figure in figures:
        svg = figure_files.render(figure, "svg").decode()
        assert "(b) truncated matrix entropy" in svg or "0.3 highest truncated" in svg
    assert figures[0].marks == ((2.0, "needle"),)
