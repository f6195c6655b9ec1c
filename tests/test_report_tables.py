"""Tables, provenance and sections of the report, from records and phases made here."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from prompted_rows import row

from pe_lab.analysis.frequencies import Settings, analysis, size_text, telling_pairs
from pe_lab.page import provenance, tables
from pe_lab.page.document import headline, joint_headline
from pe_lab.page.frequency_figures import draw
from pe_lab.page.markup import element, folded, text
from pe_lab.page.run_section import section, title_of, top, work_out
from pe_lab.page.task_section import suite_parts
from pe_lab.results.runs import Phase, Run
from pe_lab.results.scores import Column
from pe_lab.results.tables import build_tables


def plain(markup: object) -> str:
    return " ".join(html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", str(markup))).split())


def lines(markup: object) -> list[list[str]]:
    """The text of each cell of each line of a table."""
    found = re.findall(r"<tr.*?</tr>", str(markup), re.S)
    return [[plain(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", line, re.S)] for line in found]


def phase(name="pretrain", steps=600, logged=600, **info):
    known = {"phase": name, "steps": steps, "sequence_length": 64, "tokens_per_step": 2048, "status": "complete"}
    return Phase(name, known | info, [{"step": logged}] if logged else [])


def run_of(evaluation=None, phases=None, name="one", source="", **info):
    phases = [phase()] if phases is None else phases
    return Run(name, Path(f"runs/{name}"), info, phases, dict(evaluation or {}), [], source)


def measured(label="RoPE", factor=2.0, **more):
    model, method = {"NTK": ("RoPE", "NTK"), "β": ("DroPE", "beta")}.get(label, (label, "as trained"))
    return {
        "label": label, "model": model, "variant": method, "factor": factor, "length": int(64 * factor), "step": 1600,
        "phase": "pretrain", "stderr": 0.02, "checkpoint": "c/1", "seed": 3,
    } | more  # fmt: skip


def first_table(suite, records):
    return build_tables(suite, [run_of({suite: records})])[0]


# --- Markup -------------------------------------------------------------------------------------------------


def test_elements_escape_text_and_write_attributes():
    assert text(["<", None, ("a", 1)]) == "&lt;a1"
    made = element("p", "x&y", class_="a", aria_label="b", hidden=True, title=None, open=False, x=1.50, y=2.0, z=0.126)
    assert made == '<p class="a" aria-label="b" hidden x="1.5" y="2" z="0.13">x&amp;y</p>'
    assert [element(tag) for tag in ("br", "line", "p")] == ["<br>", "<line/>", "<p></p>"]
    assert element("path", element("title", "t")) == "<path><title>t</title></path>"
    assert (
        folded("t", None, "") == "" and " open" not in folded("t", "x") and " open>" in folded("t", "x", unfolded=True)
    )
    assert section(3, "T", "i", "x") == '<section><h3 id="i">T</h3>x</section>' and section(3, "T", "i", None) == ""
    assert "long" in title_of("x" * 181) and "long" not in title_of("x" * 180)


# --- Scores -------------------------------------------------------------------------------------------------


def test_a_cells_hover_text_says_how_it_was_measured():
    record = measured("β", 1.0, accuracy=0.5, queries=1024, windows=256, beta=1.25, nll=2.0, truncated=0)
    scores = first_table("needles", [record])
    cell = str(tables.score_cell(scores, "β", scores.columns[0]))
    assert html.unescape(re.search(r'title="([^"]*)"', cell).group(1)) == (
        "β at 1×: 50% · 95% interval 46–54% · the model as trained: nothing is changed up to the training length · "
        "2.0000 nats per token · 1,024 questions · 256 sequences · β = 1.250 · weights c/1"
    )
    assert 'class="trained"' in cell and "<small>as trained</small>" in cell
    assert "trained" not in re.sub('title="[^"]*"', "", str(tables.score_cell(
        first_table("needles", [measured("RoPE", 1.0, accuracy=0.5, beta=1.0)]), "RoPE", Column(1.0, 64), framed=False
    )))  # fmt: skip
    prompted = row(
        "niah", "a", "RoPE", 0.5, 128, scores={"fraction_found": 0.5, "all_found": 0.25, "x": "y"}, truncated=3
    )
    cell = plain(
        str(tables.score_cell(first_table("niah", [prompted]), "RoPE", Column(2.0, 128))).replace("title=", ">")
    )
    assert "all found 25%" in cell and "fraction found" not in cell and "3 of them to sequences" in cell
    assert cell.endswith("50% 40–60% all: 25%") and "β =" not in cell


def test_what_is_not_measured_is_a_dash_in_the_frame_of_its_column():
    scores = first_table("needles", [measured("RoPE", 1.0, accuracy=0.5), measured("NTK", 2.0, accuracy=0.5)])
    assert lines(tables.score_table(scores, {})) == [
        ["Variant length in tokens", "trained 1× 64", "2× 128"],
        ["RoPE", "● 50% 46–54%", "–"],
        ["NTK", "–", "● 50% 46–54%"],
    ]
    assert 'class="trained"' in tables.score_cell(scores, "NTK", scores.columns[0])
    assert 'class="trained"' not in tables.score_cell(scores, "RoPE", scores.columns[1])


def heats(suite, records):
    scores = first_table(suite, records)
    found = [tables.score_cell(scores, label, scores.columns[0]) for label in scores.variants]
    return [re.search(r"--heat:([^\"]*)", cell).group(1) for cell in found]


def test_how_deep_a_colour_is():
    assert heats("niah", [row("niah", "a", label, s, 64) for label, s in (("RoPE", 0.25), ("DroPE", 1.0))]) == [
        "0.25",
        "1.00",
    ]
    # Of perplexities 1 - log4 of the ratio to the best: 1, 1/2 at twice the best, 0 from four times on.
    texts = [measured(label, perplexity=p) for label, p in (("RoPE", 8.0), ("NTK", 16.0), ("DroPE", 80.0))]
    assert heats("perplexity", texts) == ["1.00", "0.50", "0.00"]
    # Of other numbers by their place between the worst and the best.
    others = [measured(label, score=s) for label, s in (("RoPE", 10.0), ("NTK", 25.0), ("DroPE", 30.0))]
    assert heats("x", others) == ["0.00", "0.75", "1.00"] and heats("x", others[:1]) == ["1.00"]


def test_notes_below_a_table():
    def notes(*records):
        return plain(tables.score_table(first_table("needles", list(records)), {}))

    bad = measured("NTK", accuracy=None)
    assert "(higher is better)" in notes(measured(accuracy=0.5)) and "Chance" not in notes(measured(accuracy=0.5))
    assert notes(measured(accuracy=0.5), bad).endswith("1 record(s) had no number that could be shown.")
    assert "finds 0%." in notes(measured(accuracy=0.5, guessing=0.0))
    assert "(lower is better)" in notes(measured(perplexity=8.0)) and "record(s)" not in notes(measured(perplexity=8.0))
    assert lines(tables.score_table(first_table("x", [measured(factor=2.0, length=None, score=3.0)]), {}))[0] == [
        "Variant",
        "2×",
    ]


def test_a_dropped_models_row_stands_out():
    markup = str(
        tables.score_table(first_table("needles", [measured("RoPE", accuracy=0.5), measured("β", accuracy=0.5)]), {})
    )
    assert markup.count('<tr class="ours">') == 1 and markup.index("ours") > markup.index("RoPE")


def test_tasks_name_their_metric_once_or_each_its_own():
    def tasks(*metrics):
        rows = [row("niah", f"t{i}", "RoPE", 0.5, 128, metric=metric) for i, metric in enumerate(metrics)]
        return build_tables("niah", [run_of({"niah": rows})])

    same = tables.task_table(tasks("f1_score", "f1_score"), Column(2.0, 128), {})
    assert lines(same)[0] == ["Variant", "t0", "t1"] and plain(same).startswith(
        "Needle in a haystack at 2× (128 tokens) (f1 score) Variant"
    )
    mixed = tables.task_table(tasks("f1", "acc"), Column(2.0, 128), {})
    assert lines(mixed)[0] == ["Variant", "t0 f1", "t1 acc"]
    assert plain(mixed).startswith("Needle in a haystack at 2× (128 tokens) Variant")
    own = build_tables("longbench", [run_of({"longbench": [row("longbench", "t", "RoPE", 0.5)]})])
    assert plain(tables.task_table(own, own[0].columns[0], {})).startswith("LongBench (fraction found) Variant")


def test_the_harness_table_has_one_standard_error_each():
    rows = [row("lm_eval", "a", "RoPE", 0.5, stderr=0.0123), row("lm_eval", "b", "RoPE", 2.0, stderr=0.5)]
    rows += [row("lm_eval", "c", "RoPE", 0.25, stderr=None, low=0.2, high=0.3)]
    found = build_tables("lm_eval", [run_of({"lm_eval": rows})])
    body = lines(tables.harness_table(found, found[0].columns[0], {}))
    assert [cell for _, cell in body[1:4]] == ["● 50% ±1.2", "● 2.00 ±0.50", "● 25%"]


def test_duels_by_suite_and_length():
    needles = [measured(label, f, accuracy=a) for label, f, a in (
        ("RoPE", 2.0, 0.5), ("DroPE", 2.0, 0.8), ("RoPE", 4.0, 0.5), ("DroPE", 4.0, 0.5), ("DroPE", 8.0, 0.5)
    )]  # fmt: skip
    texts = [measured(label, 1.0, perplexity=p) for label, p in (("RoPE", 8.0), ("DroPE", 8.8))]
    verdict = work_out(run_of({"needles": needles, "perplexity": texts})).verdict
    board = tables.duel_board(verdict.duels)
    assert lines(board) == [
        ["Sequence length", "1×", "2×", "4×"],
        ["Needle accuracy", "–", "✓ wins 30 points higher vs RoPE", "≈ ties 0.0 points higher vs RoPE"],
        ["Perplexity", "✗ loses 10.0% higher vs RoPE", "–", "–"],
    ]
    assert 'title="DroPE 80%, RoPE 50%"' in board and tables.duel_board([(verdict.duels[0][0], [])]) == ""


def test_fitted_scales_and_weights_and_unknown_records():
    fits = [{"label": "b", "length": 2048, "factor": 2, "beta": 1.25, "c": 0.2, "nll_before": 3, "nll_after": 2.5},
            {"label": "b", "length": 64}, {"label": "a", "factor": 1.5, "fitted_on": "text"},
            {"label": "c"}]  # fmt: skip
    assert lines(tables.beta_table(fits))[1:] == [
        ["a", "1.5×", "–", "–", "–", "–", "text"],
        ["b", "(64 tokens)", "–", "–", "–", "–", "–"],
        ["b", "2× (2,048 tokens)", "1.250", "0.200", "3.0000", "2.5000", "–"],
        ["c", "–", "–", "–", "–", "–", "–"],
    ]
    behind = first_table("x", [measured(score=1.0), measured(factor=4.0, score=1.0)])
    assert lines(tables.weights_table([behind, behind]))[1:] == [["RoPE", "c/1", "1,600", "3"]]
    bare = first_table("x", [{"label": "RoPE", "score": 1.0, "length": 64}])
    assert lines(tables.weights_table([bare]))[1:] == [["RoPE", "–", "–", "–"]]
    records = [{"suite": "x", "n": n, "list": [1]} for n in range(201)] + [{"f": 0.5}]
    found = lines(tables.records_table("x", records))
    assert found[0] == ["n", "f"] and found[1] == ["0", ""] and len(found) == 1 + 200
    assert lines(tables.records_table("x", [{"f": 0.125, "t": "a"}]))[1] == ["0.12", "a"]
    assert "<table" not in tables.records_table("x", [{"suite": "x", "list": []}])


def test_columns_of_words_are_aligned_as_words():
    markup = str(tables.plain_table("n", ("A", "B"), [["1", "2"]], words=("B",)))
    assert '<td class="text">2' in markup and markup.count('class="text"') == 2
    assert str(tables.plain_table("n", ("A", "B"), [["1", "2"]])).count('class="text"') == 3


# --- Provenance ---------------------------------------------------------------------------------------------


def terms(markup) -> dict[str, str]:
    return {plain(k): plain(v) for k, v in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", str(markup), re.S)}


def test_the_summary_of_a_run():
    phases = [phase(parameters=221_440, seconds=50, tokens_per_step=2048), phase("later", 400, 400, seconds=18)]
    machine = {"device": "H100", "devices": 2}
    assert terms(provenance.summary(run_of(phases=phases, machine=machine))) == {
        "Model": "221K parameters",
        "Training length": "64 tokens",
        "Trained on": "2.0M tokens",  # 1,000 steps of 2,048
        "Phases": "pretrain → later",
        "Training time": "1 min 8 s",
        "Device": "2 × H100",
    }
    for machine, shown in (({"device": "A", "devices": 1}, "A"), ({"device": "A", "devices": ["x", "y"]}, "2 × A")):
        assert terms(provenance.summary(run_of(phases=[], machine=machine))) == {"Device": shown}
    assert terms(provenance.summary(run_of(phases=[], machine={"devices": 2}))) == {}


@pytest.mark.parametrize(
    ("mixtures", "evaluated", "words"),
    [
        ([{"needles": 1, "t": 3}, {"needles": 1, "t": 3}], False, "synthetic needles were 25% of all training data."),
        ([{"needles": 1, "t": 3}, {"needles": 1, "t": 1}], True, "25% of the data of p0 and 50% of the data of p1."),
        ([{"needles": 1, "t": 3}, {"t": 1}], True, "synthetic needles were 25% of the data of p0."),
        ([{"t": 3}, {}], True, "No synthetic needles were in the training mixture"),
        ([{}, {}], True, "phase.json does not record the training mixture"),
        ([{"t": 3}, {}], False, ""),
    ],
)
def test_whether_needles_were_trained_on(mixtures, evaluated, words):
    phases = [
        phase(f"p{i}", mixture=[{"source": s, "weight": w} for s, w in mixture.items()])
        for i, mixture in enumerate(mixtures)
    ]
    said = plain(provenance.mixture_note(run_of({"needles": [{}]} if evaluated else {}, phases)))
    assert words in said if words else said == ""


def test_a_phases_machine_and_model_in_a_line():
    machine = {"platform": "cpu", "device": "Xeon", "devices": ["a", "b"], "cpus": 2, "memory_gib": 7.654321,
               "host": "", "gpu": None, "kernel": "6.1"}  # fmt: skip
    model = {"layers": 3, "d_model": 1024, "heads": 0, "qk_norm": "head", "dtype": "float32"}
    first = phase(parameters=221_440, seconds=50, batch_size=32, flops_per_token_full=1.5e6, logged=300,
                  status="running", positional=[{"layers": "0-2", "encoding": "rope", "window": 8}, {}])  # fmt: skip
    first = Phase(
        first.name,
        first.info,
        first.metrics,
        [
            {"tokens_per_second": n, "mfu_full": 0.5, "step_seconds": 2.0, "device_seconds": 1.9, "host_seconds": 0.1}
            for n in (1, 3000, 9000)
        ],
    )
    run = run_of(phases=[first], machine=machine, config={"model": model, "data": {"tokenizer": "t"}}, config_hash="9f",
                 versions={"jax": "1"}, notes={"command": "make it", "paper": "P"})  # fmt: skip
    markup = provenance.what_was_run(run)
    found = terms(markup)
    assert found["Machine"] == "cpu, Xeon, 2 device(s), 2 CPUs, 7.654 GiB of memory, kernel 6.1"
    assert found["Model"] == "221,440 parameters, 3 layers, 1,024 wide, QK-norm, float32"
    assert found["Speed"] == (
        "50 s, 3K tokens/s (median), MFU 50% (full attention counted), of a step 95% device, 0% input, 5.0% host"
    )
    assert (found["Tokenizer"], found["Config hash"], found["Versions"], found["Paper"]) == ("t", "9f", "jax 1", "P")
    assert (found["Steps"], found["Tokens"], found["Time"]) == ("300 of 600", "614,400", "50 s")
    assert (found["Sequence length"], found["Sequences per step"]) == ("64 tokens", "32")
    assert found["FLOPs per token"] == "1.5M with full attention"
    assert lines(markup)[1:] == [["0-2", "rope", "8"], ["–", "unknown encoding", "none"]]
    assert "To run it again: make it" in plain(markup) and "The whole config" in plain(markup)
    assert "make that" in plain(provenance.what_was_run(run_of(command="make that", notes={"command": "make it"})))
    for given, shown in ((True, "QK-norm"), (False, ""), ("none", ""), ("all", "QK-norm (all)")):
        shape = terms(provenance.what_was_run(run_of(config={"model": {"qk_norm": given}}))).get("Model", "")
        assert shape == shown


def test_mixtures_of_phases_are_told_apart_where_they_differ():
    def shown(*mixtures):
        phases = [phase(f"p{i}", mixture=mixture) for i, mixture in enumerate(mixtures)]
        return terms(provenance.what_was_run(run_of(phases=phases))).get("Mixture")

    a, b = [{"source": "a", "weight": 1}], [{"source": "a", "weight": 1}, {"source": "b", "weight": 3}]
    assert shown(a, a) == "100% a" == shown(a, []) and shown([], []) is None
    assert shown(a, [], b) == "p0: 100% a; p2: 25% a and 75% b"


def chains(*phases):
    markup = str(provenance.lineage_diagram(run_of(phases=list(phases))))
    return [
        [plain(box) for box in re.findall(r"<li.*?</li>", chain)] for chain in re.findall(r"<ol.*?</ol>", markup, re.S)
    ]


def test_a_lineage_is_a_chain_of_boxes():
    node = {"what": "drop", "step": 1600, "path": "a/b", "id": "7"}
    trained = {"what": "pretrain", "step": 600}
    first = "pretrain unknown encoding 1.2M tokens, 600 steps"
    encoded = [{"encoding": "unknown encoding"}]
    base = phase(positional=encoded, lineage=[trained])
    child = phase("later", positional=encoded, lineage=[trained, node])
    assert chains(base, child) == [
        [first, "drop at step 1,600 a/b id 7", "later unknown encoding 1.2M tokens, 600 steps"]
    ]
    apart = phase("later", positional=encoded, lineage=[{"what": "x"}])
    assert chains(base, apart) == [[first], ["x", "later unknown encoding 1.2M tokens, 600 steps"]]
    named = {"what": "trained 600 steps of 'pretrain' with unknown encoding", "step": 600}
    assert chains(phase("pretrain", positional=encoded, lineage=[named])) == [[first]]
    earlier = phase("pretrain", positional=encoded, lineage=[named, node])  # of another run
    assert chains(earlier) == [[f"{named['what']} at step 600", "drop at step 1,600 a/b id 7", first]]
    bare = [phase(name, positional=encoded) for name in ("pretrain", "later")]
    assert [len(chain) for chain in chains(*bare)] == [2] and [len(chain) for chain in chains(base)] == [1]


def test_what_to_keep_in_mind():
    phases = [phase(parameters=99e6), phase("later", 150, 150), phase("last", 100, 40, status="running")]
    records = [measured(phase="pretrain"), measured("DroPE", phase="later")]
    said = provenance.caveats(run_of({"x": records}, phases))
    assert said[0].startswith("The dropped model has read 25% more training tokens")  # 150 of 600
    assert "(seed 3)" in said[1] and "a small model (99M parameters)" in said[3]
    assert said[4:] == ["Phase last is not complete (40 of 100 steps): its figures are preliminary."]
    records = [measured(phase="pretrain"), measured("β", phase="pretrain", seed=4)]
    said = provenance.caveats(run_of({"x": records}, [phase(parameters=1e8)]))
    assert said[0].startswith("β was fitted") and len(said) == 3 and "seed" not in said[1]
    assert provenance.caveats(run_of({}, [phase(parameters=5)])) == []
    assert provenance.caveats(run_of({"x": [measured("DroPE")]}))[0].startswith("One run is one draw")


# --- Sections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_several_tasks_have_a_chart_each_and_more_than_four_are_folded(n):
    rows = [row("niah", f"t{i}", "RoPE", 0.5, length) for i in range(n) for length in (64, 128)]
    found = build_tables("niah", [run_of({"niah": rows})])
    markup = str(text(suite_parts("niah", found, {}, 3)))
    assert markup.count("By length, task by task") == (n > 1) and markup.count("<figure") == n
    assert ("<details open><summary>By length" in markup) == (1 < n <= 4) and ("grid thirds" in markup) == (n > 4)
    assert "<figure" not in str(text(suite_parts("niah", found, {}, 3, charts=False)))


def test_the_story_is_told_where_both_models_were_measured():
    def shown(level, *labels, **more):
        run = run_of({"needles": [measured(label, f, accuracy=0.5) for label in labels for f in (1.0, 2.0)]}, **more)
        return plain(top(work_out(run), level))

    story = "A language model was trained with RoPE, a rotary positional encoding."
    assert story in shown(1, "RoPE", "DroPE") and story not in shown(2, "RoPE", "DroPE")
    assert story not in shown(1, "RoPE", "NTK") and story not in shown(1, "DroPE")
    assert "To measure it" not in shown(1, "RoPE")
    unfinished = [phase(), phase("b", status="running"), phase("c", status="running")]
    assert "Training is not complete (phase c). To measure it: python -m" in shown(1, phases=unfinished)
    assert "not complete" not in shown(1) and "To measure it" in shown(1)


def test_the_verdict_of_several_runs():
    def one(name, drope):
        labels = {"RoPE": 0.5} | ({} if drope is None else {"DroPE": drope})
        return run_of({"needles": [measured(label, accuracy=a) for label, a in labels.items()]}, name=name)

    def joint(*scores):
        return joint_headline([work_out(one(f"r{i}", drope)) for i, drope in enumerate(scores)])

    said = "of the {} runs that drop their positional encoding {} every RoPE variant at all lengths past training{}."
    assert joint(0.9, None).startswith("r0: Without its positional encoding")
    assert joint(0.9, 0.1, None) == "1 " + said.format(2, "beats", ": r0")
    assert joint(0.9, 0.9, 0.1) == "2 " + said.format(3, "beat", ": r0 and r1")
    assert joint(0.1, 0.1) == "None " + said.format(2, "beat", "")
    assert (
        headline([one("r0", 0.9)]).startswith("Without its") and headline([one("a", 0.9)] * 2).count("\na: With") == 1
    )


# --- Frequencies --------------------------------------------------------------------------------------------


def test_sizes_in_decimal_units():
    given = (0, 999, 1000, 4_194_304, 1e9, 2.5e12)
    assert [size_text(size) for size in given] == ["0 B", "999 B", "1 kB", "4.19 MB", "1 GB", "2.5 TB"]


def test_the_pairs_of_the_table_are_the_ends_the_middle_and_yarns_ramp():
    # The ramp of 64 channels, base 1e4 and 2,048 tokens goes from pair 8 to pair 21 (transformers).
    assert telling_pairs(Settings()) == [0, 1, 8, 9, 10, 15, 20, 21, 30, 31]
    assert telling_pairs(Settings(head_dim=4)) == [0, 1]


def test_the_axis_of_a_caches_lengths_has_powers_of_four_and_ten_million():
    (axes,) = draw(analysis(Settings(factors=(2.0,), variants=("pi",))))["rotation_cache"].axes
    places = [4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 10_000_000]
    assert axes.xaxis.get_majorticklocs().tolist() == places
    show = axes.xaxis.get_major_formatter()
    assert [show(place, 0) for place in places] == ["4k", "16k", "64k", "256k", "1M", "4M", "10M"]
    assert axes.yaxis.get_major_formatter()(1.5e9, 0) == "1.5 GB"


def test_of_many_runs_each_has_its_scores_and_the_command_for_the_rest(tmp_path, monkeypatch):
    from run_directories import make_run

    from pe_lab.page import document
    from pe_lab.results.runs import read_runs

    monkeypatch.setattr(document, "MANY", 1)
    made = [make_run(tmp_path, name, phases=(("pretrain", "rope(base=10000)", 20),)) for name in ("one", "two")]
    page = document.build_page(read_runs(made))
    assert f"python -m pe_lab.report {made[0]}</code>" in page
    assert 'id="run-0-results"' in page and 'id="run-0-training"' not in page
