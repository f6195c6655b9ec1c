"""DoPE's sweep: its grid, paired comparisons by hand, interruptions, tables, and many-shot learning's zero-shot row."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
import tiny  # noqa: E402

from pe_lab import analyze  # noqa: E402
from pe_lab.analysis.dope import GRID, drawn_at_random, parse_grid  # noqa: E402
from pe_lab.data.tokenizers import ByteTokenizer, load_tokenizer, save_tokenizer  # noqa: E402
from pe_lab.errors import UserError  # noqa: E402
from pe_lab.evaluation import targets  # noqa: E402
from pe_lab.evaluation.generation.backend import ModelBackend  # noqa: E402
from pe_lab.evaluation.suites.many_shot import STOP, SUITE, ManyShotSettings  # noqa: E402
from pe_lab.language_model import LanguageModel  # noqa: E402
from pe_lab.page import figure_files  # noqa: E402
from pe_lab.results.findings import read_findings  # noqa: E402
from pe_lab.results.statistics import Difference, holm, paired, sign_flip_p  # noqa: E402

# --- Paired comparisons ----------------------------------------------------------------------------------------------


def test_sign_flips_by_hand():
    # Yes-or-no answers: 8 of 9 samples that differ are better, which has 2 (1 + 9) / 2^9 by McNemar's exact test.
    assert sign_flip_p(np.array([1.0] * 8 + [-1.0] + [0.0] * 40)) == pytest.approx(20 / 512)
    assert sign_flip_p(np.zeros(7)) == 1 and sign_flip_p(np.ones(6)) == pytest.approx(2 / 64)
    units = np.array([0.5, 0.25, 0.25, -0.25, 1.0])
    sums = [
        abs(sum(s * u for s, u in zip(signs, units, strict=True))) for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip_p(units) == pytest.approx(sum(x >= 1.75 - 1e-9 for x in sums) / 32)
    # Beyond what can be counted: 30 thirds and 30 halves one way, none the other.
    assert sign_flip_p(np.array([1 / 3, 1 / 2] * 30)) == pytest.approx(1 / 100_001)


def test_pairs_by_hand():
    found = paired([1, 1, 0, 1], [0, 1, 0, 0])
    assert found.mean == 0.5 and found.count == 4 and found.p == 0.5 and found.low < 0.5 < found.high <= 1
    other = paired([0, 1, 0, 0], [1, 1, 0, 1])
    assert (other.mean, other.low, other.high) == pytest.approx((-0.5, -found.high, -found.low))
    same = paired([1, 0] * 10, [1, 0] * 10)
    assert same.mean == 0 and same.p == 1 and same.low == -same.high and 0.05 < same.high < 0.2
    # Four answers about one problem count as one.
    clustered = paired([1] * 12, [0] * 12, [i // 4 for i in range(12)])
    assert clustered.p == pytest.approx(2 / 8) and paired([1] * 12, [0] * 12).p == pytest.approx(2 / 4096)
    assert clustered.low < paired([1] * 12, [0] * 12).low


def test_intervals_of_pairs_contain_the_truth():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(300):
        before = rng.random(40) < 0.4
        after = np.where(rng.random(40) < 0.3, rng.random(40) < 0.7, before)  # 0.3 * (0.7 - 0.4) = 0.09 more
        found = paired(after.astype(float).tolist(), before.astype(float).tolist())
        inside += found.low <= 0.09 <= found.high
    assert inside >= 0.92 * 300


def test_holms_correction_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.2 times 4, 3, 2, 1, none below the one before it.
    np.testing.assert_allclose(holm([0.03, 0.01, 0.2, 0.02]), [0.06, 0.04, 0.2, 0.06])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    np.testing.assert_allclose(holm([np.nan, 0.03, 0.01]), [np.nan, 0.03, 0.02])  # of one pair there is no test
    assert holm([]).shape == (0,)
    found = [Difference(mean, -1, 1, 9, corrected=p) for mean, p in ((0.1, 0.04), (-0.1, 0.04), (0.1, 0.05))]
    assert [one.verdict for one in found] == ["better", "worse", "tie"]
    # Of 40 comparisons without any difference, 5% of sweeps find one.
    rng = np.random.default_rng(1)
    assert np.mean([holm(rng.random(40).tolist()).min() < 0.05 for _ in range(2000)]) == pytest.approx(0.05, abs=0.015)


# --- The grid --------------------------------------------------------------------------------------------------------


def test_a_grid_has_every_combination():
    cells = parse_grid("method=gaussian,all-uniform; rank=1,spectral_norm;heads=1-3,7;indicator=query", 8)
    assert len(cells) == len(set(cells)) == 2 * 2 * 4 * 2
    assert cells[0].name == "gaussian post_ntk_query trunc_1 1 ascending"
    assert len(parse_grid(None, 8)) == np.prod([len(values) for values in GRID.values()]) == 12


def test_random_heads_are_one_draw_for_each_rank():
    cells = parse_grid("method=all-nope,gaussian;rank=1,8;heads=1,3;order=random", 8)
    draws = {(c.rank, c.heads, c.method): drawn_at_random(c, (2, 4)) for c in cells}
    assert all(sorted(draw.ravel()) == list(range(8)) for draw in draws.values())
    for rank in "18":  # the same for every number of heads and every method, so that three heads have the one
        assert all((draw == draws[rank, 1, "gaussian"]).all() for key, draw in draws.items() if key[0] == rank)
    assert (draws["1", 1, "gaussian"] != draws["8", 1, "gaussian"]).any()
    # Over many ranks each head is drawn as often as another: of 800 draws each has 100, with a deviation of 9.4.
    many = parse_grid(f"method=all-nope;rank={','.join(map(str, range(1, 801)))};heads=1;order=random", 8)
    lowest = np.bincount([drawn_at_random(c, (2, 4)).argmin() for c in many], minlength=8)
    assert abs(lowest - 100).max() < 40


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ("methods=gaussian", "Did you mean 'method'"),
        ("method", "is not KEY=VALUE"),
        ("method=parts", "there is no 'parts'"),
        ("heads=9", "heads=9 is impossible; the model has 8 heads"),
        ("heads=0", "heads=0 is impossible"),
        ("heads=x", "'x' is not a number"),
        ("rank=half", "there is no 'half'"),
        ("order=ascend", "Did you mean 'ascending'"),
        ("rank=1;rank=2", "given twice"),
    ],
)
def test_bad_grids(grid, says):
    with pytest.raises(UserError, match=says):
        parse_grid(grid, 8)


# --- The sweep -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("dope")
    made = tiny.save_run(root / "tiny", tiny.corpus(root / "corpus"))
    save_tokenizer(load_tokenizer("bytes"), made / "tokenizer")
    return made


class Counts:
    """Answers by the number of heads that a model has denoised; counts the answers and the passes for entropies."""

    def __init__(self, monkeypatch):
        self.asked, self.passes, self.dies_after = [], 0, None
        pass_before = LanguageModel.layer_pass

        def answer(backend, samples, statistics):
            if self.dies_after is not None and len(self.asked) >= self.dies_after:
                raise KeyboardInterrupt
            heads = sum(len(edit.heads) for layer in backend.lm.layers for edit in layer.heads)
            self.asked += [(heads, sample.index) for sample in samples]
            # Without DoPE every third is right, with one head the first six of nine, with two none.
            right = {0: lambda i: i % 3 == 0, 1: lambda i: i < 6, 2: lambda i: False}[heads]
            return [s.references[0] if right(s.index) else "no" for s in samples]

        def passed(lm, *args, **more):
            self.passes += 1
            return pass_before(lm, *args, **more)

        monkeypatch.setattr(ModelBackend, "__call__", answer)
        monkeypatch.setattr(ModelBackend, "batch_size", lambda backend, length: 4)
        monkeypatch.setattr(LanguageModel, "layer_pass", passed)


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(targets, "mesh_for", lambda path: None)
    monkeypatch.setattr(figure_files, "render", lambda figure, form: b"")
    return Counts(monkeypatch)


def command(run, out, *more):
    return ["dope", f"--from={run / 'pretrain'}", "--suite=niah:clean", "--haystack=noise", "--length=600",
            "--sequences=1", "--samples=9", f"--out={out}", "--positional=ntk:factor=2", *more]  # fmt: skip


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_and_its_table_is_right(run, tmp_path, capsys, counts):
    argv = command(run, tmp_path / "out", "--grid=method=all-nope;rank=full;heads=1,2")
    assert analyze.main([*argv, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 cells" in printed and "9 samples each at 600 tokens" in printed and not (tmp_path / "out").exists()
    assert "At most 27,000 tokens" in printed and "up to 0.1 would look better" in printed
    assert "With 9 samples" not in printed  # 1 + log2(4 / 0.05) = 7.3
    counts.dies_after = 12
    assert analyze.main(argv) == 130
    counts.dies_after, before = None, counts.passes
    assert analyze.main(argv) == 0
    assert counts.passes == before == 2  # as trained, and scaled
    # Of four heads, the lowest differ from the highest: four cells are four models.
    assert len(counts.asked) == 5 * 9
    assert len(set(counts.asked)) == 3 * 9
    assert analyze.main(argv) == 0 and len(counts.asked) == 45
    capsys.readouterr()
    cells = json.loads((tmp_path / "out" / "cells.json").read_text())
    assert [(c["heads"], c["order"], c["score"]) for c in cells] == [
        (1, "ascending", 6 / 9), (1, "descending", 6 / 9), (2, "ascending", 0), (2, "descending", 0),
    ]  # fmt: skip
    # 0, 3 are right in both, 6 is lost, 1, 2, 4, 5 are won: (4 - 1) / 9, and 2 (1 + 5) / 2^5.
    assert cells[0]["baseline"] == pytest.approx(3 / 9) and cells[0]["difference"]["mean"] == pytest.approx(3 / 9)
    assert cells[0]["difference"]["p"] == pytest.approx(12 / 32) and cells[2]["difference"]["p"] == pytest.approx(2 / 8)
    assert [c["corrected_p"] for c in cells] == [1.0] * 4 and {c["verdict"] for c in cells} == {"tie"}
    lowest, highest = (set(map(tuple, c["chosen"])) for c in (cells[0], cells[1]))
    assert len(lowest) == len(highest) == 1 and not lowest & highest
    assert lowest < set(map(tuple, cells[2]["chosen"])) and highest < set(map(tuple, cells[3]["chosen"]))
    found = read_findings(tmp_path / "out").findings
    (table,) = found.tables
    assert [row[0] for row in table.rows] == ["all-nope", "all-nope", "no DoPE", "all-nope", "all-nope"]
    assert table.rows[0][5].startswith("66.7% (") and table.rows[2][5].startswith("33.3% (")
    assert table.rows[0][6].startswith("+33.3 (") and table.rows[4][6].startswith("-33.3 (")
    assert "up to 0.1 would look better by luck" in table.title
    np.testing.assert_allclose(found.numbers["difference"][:, 0], [1 / 3, 1 / 3, -1 / 3, -1 / 3])
    assert "0 better, 0 worse, 4 ties" in found.sentences[0]


@pytest.mark.slow
def test_cells_that_choose_the_same_heads_are_one_model(run, tmp_path, capsys, counts):
    argv = command(run, tmp_path / "out", "--grid=method=all-nope,all-uniform;heads=1;rank=1,1,2,full;stage=pre_ntk")
    assert analyze.main(argv) == 0
    cells = json.loads((tmp_path / "out" / "cells.json").read_text())
    models = {(c["method"], tuple(map(tuple, c["chosen"]))) for c in cells}
    assert len(cells) == 12 and len(counts.asked) == 9 * (len(models) + 1) and len(models) < 12
    assert f"12 cells are {len(models)} different models" in capsys.readouterr().out


@pytest.mark.slow
def test_random_heads_are_chosen_by_no_score(run, tmp_path, counts):
    """3 s."""
    argv = command(run, tmp_path / "out", "--grid=method=all-nope;rank=1,2,4,8;heads=1,2;order=random")
    assert analyze.main(argv) == 0
    cells = json.loads((tmp_path / "out" / "cells.json").read_text())
    chosen = {(c["rank"], c["heads"]): set(map(tuple, c["chosen"])) for c in cells}
    assert all(len(heads) == count for (_, count), heads in chosen.items())
    assert all(chosen[rank, 1] < chosen[rank, 2] for rank in "1248") and len(set(map(tuple, chosen.values()))) > 2
    (table,) = read_findings(tmp_path / "out").findings.tables
    assert {row[3] for row in table.rows} == {"random", ""}


@pytest.mark.slow
def test_many_shot_learning_has_its_zero_shot_row(run, tmp_path, capsys, counts):
    lines = [{"problem": f"{n} + 1?", "solution": f"\\boxed{{{n + 1}}}", "answer": str(n + 1)} for n in range(12)]
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (zero,) = SUITE.open(["zero_shot"], ManyShotSettings(problems, max_new_tokens=16))
    (plain,) = SUITE.open(["plain"], ManyShotSettings(problems, max_new_tokens=16, buffer=20))
    samples = zero.samples(ByteTokenizer(), None, 100, 3)
    assert len(samples) == 12 and samples[0].text.count("Problem:") == 1 and samples[0].stop == STOP
    assert [s.references for s in samples[:9]] == [s.references for s in plain.samples(ByteTokenizer(), 400, 9, 3)]
    assert zero.score(samples[0], f"\\boxed{{{samples[0].references[0]}}}") == {"accuracy": 1.0}
    argv = [a for a in command(run, tmp_path / "out", "--grid=method=all-nope;rank=1;heads=2;order=ascending")
            if not a.startswith(("--suite", "--haystack", "--length"))]  # fmt: skip
    argv += ["--suite=many_shot:plain", f"--problems={problems}", "--max-new-tokens=16", "--buffer=20", "--length=400"]
    assert analyze.main(argv) == 0
    (table,) = read_findings(tmp_path / "out").findings.tables
    assert [row[0] for row in table.rows] == ["no DoPE", "zero-shot, as trained", "all-nope"]
    assert [row[5][:5] for row in table.rows] == ["33.3%", "33.3%", "0.0% "]
    answered = [json.loads(x) for x in (tmp_path / "out" / "samples" / "many_shot.jsonl").read_text().splitlines()]
    assert {(x["task"], x["positional"].partition(" on ")[0]) for x in answered} >= {("zero_shot", "rope(base=10000)")}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--grid=head=1"], "Did you mean 'heads'"),
        (["--grid=heads=5"], "the model has 4 heads"),
        (["--suite=perplexity"], "the sweep asks prompts"),
        (["--samples=0"], "--samples: '0' is not"),
        (["--suite=longbench:trec", "--longbench=empty"], "empty"),
        (["--suite=many_shot:plain"], "there is no file of problems"),
        (["--heads-suite=niah"], "name one task"),
        (["--positional=nope"], "no layer of RoPE with nope rotates"),
    ],
)
def test_bad_sweeps_measure_nothing(run, tmp_path, monkeypatch, capsys, counts, more, says):
    monkeypatch.chdir(tmp_path)
    assert analyze.main([*command(run, tmp_path / "out"), *more]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
    assert not counts.asked and not counts.passes and not (tmp_path / "out" / "analysis.json").exists()
