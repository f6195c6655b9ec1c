import dataclasses
import json
import math

import numpy as np
import pytest
import tiny

from pe_lab.config import SourceConfig
from pe_lab.errors import UserError
from pe_lab.evaluation.command_line import parse_lengths
from pe_lab.evaluation.measure import Evaluation, EvaluationPlan
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.suites import perplexity as pp
from pe_lab.evaluation.variants import Subject, all_variants
from pe_lab.positional import Alibi, NoPE, Rope
from pe_lab.results.records import RecordFile

LENGTHS = (16, 32, 64)
ROPE_METHODS = ("as trained", "cropped", "PI", "NTK", "YaRN")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.corpus(tmp_path_factory.mktemp("corpus"))


def subjects(data):
    rope = tiny.checkpoint(Rope(), data)
    dropped = tiny.checkpoint(NoPE(), data, ("random", tiny.DROPPED), seed=1, phase="recalibrate")
    return [
        Subject(tiny.language_model(rope), "tiny", "pretrain/checkpoints/3"),
        Subject(tiny.language_model(dropped), "tiny", "recalibrate/checkpoints/3"),
    ]


def evaluation(data, directory, measured=None, **plan):
    plan = {"lengths": LENGTHS, "options": tiny.SETTINGS.options} | plan
    return Evaluation(measured or subjects(data), data, EvaluationPlan(**plan), directory, tiny.one_device())


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Everything that can be measured of a RoPE model and its dropped child."""
    directory = tmp_path_factory.mktemp("evaluation")
    done = evaluation(data, directory)
    return done, done.run(), directory


def pick(rows, suite, **wanted):
    return [r for r in rows if r["suite"] == suite and all(r[k] == v for k, v in wanted.items())]


def test_the_table_is_full(whole):
    _, rows, _ = whole
    for suite in ("perplexity", "needles"):
        found = {(r["model"], r["variant"], r["length"]) for r in pick(rows, suite)}
        wanted = {("RoPE", m, n) for m in ROPE_METHODS for n in LENGTHS}
        wanted |= {("DroPE", m, n) for m in ("as trained", "beta", "paper beta") for n in LENGTHS}
        assert found == wanted and len(pick(rows, suite)) == len(wanted)
    assert [(r["model"], r["length"]) for r in pick(rows, "beta")] == [("DroPE", 32), ("DroPE", 64)]


def test_rows_say_what_they_measured(whole, data):
    _, rows, directory = whole
    row = pick(rows, "perplexity", variant="YaRN", length=64)[0]
    assert row["label"] == "RoPE + YaRN" and row["factor"] == 4 and row["step"] == 3 and row["beta"] == 1
    assert row["tokens_trained"] == 480
    assert row["checkpoint"] == "pretrain/checkpoints/3" and row["phase"] == "pretrain" and row["run"] == "tiny"
    assert row["source"] == data.sources[0].source and row["versions"]["jax"]
    assert row["perplexity"] == pytest.approx(math.exp(row["nll"]), rel=1e-4)
    needle = pick(rows, "needles", variant="as trained", model="DroPE", length=32)[0]
    assert needle["source"] == "needles" and needle["windows"] == 16 and needle["queries"] == 32
    assert needle["guessing"] == 1  # one fact a window: its value answers every question
    for suite in ("perplexity", "needles", "beta"):
        lines = (directory / f"{suite}.jsonl").read_text().splitlines()
        on_disk = [json.loads(line) for line in lines]
        assert len(on_disk) == len(pick(rows, suite))
        assert [r["variant"] for r in on_disk] == [r["variant"] for r in pick(rows, suite)]


def test_at_the_training_length_all_methods_coincide(whole):
    _, rows, _ = whole
    for suite, value in (("perplexity", "nll"), ("needles", "accuracy")):
        for model in ("RoPE", "DroPE"):
            assert len({r[value] for r in pick(rows, suite, model=model, length=16)}) == 1


def test_beyond_it_they_differ(whole):
    _, rows, _ = whole
    for length in (32, 64):
        losses = [r["nll"] for r in pick(rows, "perplexity", model="RoPE", length=length)]
        assert len(set(losses)) == len(ROPE_METHODS)


def test_all_methods_and_checkpoints_share_one_compilation_a_length(whole):
    done, _, _ = whole
    (forward,) = done.forwards.values()
    lengths = [(what, n) for what in ("losses", "scores") for n in LENGTHS]
    cropped = ("predictions", LENGTHS[0])
    assert forward.traces == dict.fromkeys([*lengths, cropped], 1)


def test_every_length_and_method_scores_the_same_tokens(whole):
    _, rows, _ = whole
    scored = pick(rows, "perplexity")
    assert len({(r["tokens"], tuple(r["tiles"])) for r in scored}) == 1 and scored[0]["tokens"] == 512
    assert {len(r["nll_by_tile"]) for r in scored} == {8}
    for r in scored:
        assert np.mean(r["nll_by_tile"]) == pytest.approx(r["nll"], abs=1e-5)


def test_a_row_is_the_loss_of_the_scored_text(whole, data):
    done, rows, _ = whole
    text = pp.held_out(data, 0, "text", (64,), 512, 256, 256)
    (forward,) = done.forwards.values()
    checkpoint = done.subjects[0].checkpoint
    losses = forward.losses(checkpoint.params, pp.as_batch(text, pp.cut(text.score, 32)), checkpoint.layers)
    row = pick(rows, "perplexity", model="RoPE", variant="as trained", length=32)[0]
    assert row["nll"] == pytest.approx(losses.mean(), abs=1e-5)


def test_beta_is_fitted_on_text_that_is_not_scored(whole):
    _, rows, _ = whole
    scored = set(pick(rows, "perplexity")[0]["tiles"])
    for row in pick(rows, "beta"):
        (fitted,) = row["tiles"]
        assert len(fitted) == 4 and not scored & set(fitted)
        assert row["nll_after"] <= row["nll_before"]
        assert row["c"] == pytest.approx((row["beta"] - 1) / math.log(row["factor"]), abs=1e-5)
        assert "256 held-out tokens" in row["fitted_on"]
        for suite in ("perplexity", "needles"):
            used = pick(rows, suite, variant="beta", length=row["length"])
            assert [r["beta"] for r in used] == [row["beta"]]


def test_encodings_that_coincide_are_measured_once(data, tmp_path, monkeypatch):
    """Dynamic NTK is RoPE at the training length, and NTK at another; 2 s."""
    described = ("kept", "dynamic_ntk", "ntk:factor=2")
    plan = dict(suites=("needles",), descriptions=described, lengths=(16, 32))
    done = evaluation(data, tmp_path, subjects(data)[:1], **plan)
    read, measured = done.scores, []

    def scores(variant, layers):
        measured.append(variant.name)
        return read(variant, layers)

    monkeypatch.setattr(done, "scores", scores)
    rows = {(row["variant"], row["length"]): row["accuracy"] for row in done.run()}
    assert measured == ["kept", "kept", "dynamic_ntk", "ntk:factor=2"] and len(rows) == 6
    assert rows["dynamic_ntk", 16] == rows["kept", 16] and rows["dynamic_ntk", 32] == rows["ntk:factor=2", 32]


def test_progress_counts_the_fits(data, tmp_path, monkeypatch):
    """Of each scale that has no record, once; 3 s."""
    shown = []
    monkeypatch.setattr(TokenProgress, "update", lambda self, done, *text: shown.append((done, self)))
    options = tiny.SETTINGS.options | {"fit_evaluations": 3}
    plan = dict(descriptions=("bare:nope",), fit_scale=True, options=options)
    for suites, fits in ((("perplexity",), 1), (("perplexity", "needles"), 0)):
        shown.clear()
        done = evaluation(data, tmp_path, subjects(data)[:1], lengths=(16, 32), suites=suites, **plan)
        done.run()
        assert shown[-1][1]._total == sum(map(done.cost, done.units)) + fits * 3 * options["fit_tokens"]
        assert [one for one, _ in shown] == sorted(one for one, _ in shown)


def test_descriptions_get_a_scale_of_their_own(data, tmp_path):
    """Each is fitted and measured as by hand, beyond the training length alone; 4 s."""
    described = ("yarn:factor=2", "bare:nope")
    plan = dict(suites=("perplexity",), descriptions=described, lengths=(16, 32), fit_scale=True)
    done = evaluation(data, tmp_path, subjects(data)[:1], **plan)
    rows = done.run()
    assert [row["label"] for row in rows[::2]] == ["RoPE with yarn:factor=2, β fitted", "RoPE with bare, β fitted"]
    fits = {fit["variant"]: fit for fit in done.files["beta"].records}
    assert set(fits) == {"yarn:factor=2 + beta", "nope + beta"}
    for row in rows:
        fit = fits[row["variant"]]
        assert row["beta"] == (fit["beta"] if row["length"] == 32 else 1)
        assert fit["nll_after"] < fit["nll_before"] and fit["length"] == 32
    by_hand = f"nope/logit_scale={fits['nope + beta']['beta']}"
    (row,) = pick(
        evaluation(
            data, tmp_path, subjects(data)[:1], suites=("perplexity",), descriptions=(by_hand,), lengths=(16, 32)
        ).run(),
        "perplexity",
        length=32,
    )
    assert row["nll"] == pytest.approx(pick(rows, "perplexity", variant="nope + beta", length=32)[0]["nll"], abs=1e-5)
    (variant,) = all_variants(done.subjects, (), described[:1], None, done.files["beta"].records)
    fit = fits["yarn:factor=2 + beta"]
    assert variant.beta_at(32) == fit["beta"] and variant.beta_at(16) == 1
    assert variant.beta_at(64) == pytest.approx(1 + fit["c_all_lengths"] * math.log(4), abs=1e-4)
    # Fits of other text do not count, nor does a law that a killed evaluation has not written.
    unfinished = {key: value for key, value in fit.items() if key != "c_all_lengths"}
    other = {**fit, "beta": 3.0, "length": 64, "settings": {**fit["settings"], "data": ["other"]}}
    (again,) = all_variants(done.subjects, (), described[:1], None, [other, unfinished])
    assert [again.beta_at(n) for n in (16, 32, 64)] == pytest.approx([variant.beta_at(n) for n in (16, 32, 64)])
    with pytest.raises(UserError, match="--fit-scale: no logit scale was fitted for .* yet"):
        all_variants(done.subjects, (), described[:1], None, [])
    (short,) = all_variants(done.subjects, (), described[:1], None, [], longest=16)
    assert short.beta_at(16) == 1 and short.name == variant.name  # none is needed


@pytest.mark.slow
def test_a_scale_is_fitted_for_a_model_that_rotates_if_it_is_named(data, tmp_path, whole):
    """1 s. A whole evaluation fits the dropped model's alone."""
    assert {row["model"] for row in pick(whole[1], "beta")} == {"DroPE"}
    done = evaluation(data, tmp_path, subjects(data), suites=("beta",), lengths=(16, 32))
    fits = {row["model"]: row for row in done.run()}
    assert set(fits) == {"RoPE", "DroPE"} and fits["RoPE"]["nll_after"] < fits["RoPE"]["nll_before"]
    plan = dict(suites=("perplexity",), variants=("as trained", "beta"), lengths=(16, 32))
    rows = evaluation(data, tmp_path, subjects(data)[:1], **plan).run()
    plain, scaled = (pick(rows, "perplexity", variant=m, length=32)[0] for m in plan["variants"])
    assert scaled["label"] == "RoPE, β" and scaled["beta"] == fits["RoPE"]["beta"] and scaled["nll"] != plain["nll"]
    assert len({row["nll"] for row in pick(rows, "perplexity", length=16)}) == 1


def test_the_papers_scale_is_a_constant_that_nothing_is_fitted_for(data, tmp_path, whole):
    for row in pick(whole[1], "needles", variant="paper beta"):
        assert row["beta"] == pytest.approx(1 + 0.412 * math.log(row["factor"]), abs=1e-6)
    plan = dict(suites=("perplexity",), variants=("paper beta",), lengths=(32,))
    (row,) = evaluation(data, tmp_path, subjects(data)[1:], **plan).run()
    assert row["label"] == "DroPE, paper's β (c = 0.412)" and not (tmp_path / "beta.jsonl").exists()
    plain = pick(whole[1], "perplexity", variant="as trained", model="DroPE", length=32)[0]
    assert row["nll"] != plain["nll"]


@pytest.mark.slow
def test_a_model_dropped_after_an_external_pretraining_has_its_own_scale(data, tmp_path):
    """A record with the coefficient of models trained from scratch, as was written before, is measured again."""
    lineage = ("converted from hf:SmolLM-360M", tiny.DROPPED)
    dropped = [
        Subject(tiny.language_model(tiny.checkpoint(NoPE(), data, lineage)), "tiny", "recalibrate/checkpoints/3")
    ]
    plan = dict(suites=("needles",), variants=("paper beta",), lengths=(32,))
    (record,) = evaluation(data, tmp_path, dropped, **plan).run()
    assert record["beta"] == pytest.approx(1 + 0.103 * math.log(2), abs=1e-6) and "0.103" in record["label"]
    old = {key: value for key, value in record["settings"].items() if key != "coefficient"}
    RecordFile(tmp_path / "needles.jsonl").put([record | {"settings": old, "accuracy": -1.0}])
    (again,) = evaluation(data, tmp_path, dropped, **plan).run()
    assert again["accuracy"] == record["accuracy"] and again["settings"] == record["settings"]


def test_a_record_that_exists_gets_the_label_of_today(data, tmp_path):
    plan = dict(suites=("needles",), variants=("as trained",), lengths=(16,))
    (record,) = evaluation(data, tmp_path, subjects(data)[:1], **plan).run()
    before = {key: value for key, value in record.items() if key != "tokens_trained"} | {"label": "another"}
    RecordFile(tmp_path / "needles.jsonl").put([before])
    found = evaluation(data, tmp_path, subjects(data)[:1], **plan)
    (again,) = found.run()
    assert found.reused == found.units and again == record
    assert RecordFile(tmp_path / "needles.jsonl").records == [record]


def test_the_common_coefficient_is_in_the_file(whole):
    _, _, directory = whole
    rows = RecordFile(directory / "beta.jsonl").records
    common = {r["c_all_lengths"] for r in rows}
    cs = [r["c"] for r in rows]
    assert len(common) == 1 and min(cs) - 1e-6 <= common.pop() <= max(cs) + 1e-6


def test_scales_that_were_fitted_on_other_text_do_not_count(whole, data, tmp_path):
    file = RecordFile(tmp_path / "beta.jsonl")
    rows = RecordFile(whole[2] / "beta.jsonl").records
    other = {**rows[0], "length": 128, "factor": 8, "beta": 9.0, "settings": {**rows[0]["settings"], "data": ["x"]}}
    file.put([*rows, other])
    evaluation(data, tmp_path, subjects(data)[1:], suites=("beta",)).run()
    found = RecordFile(tmp_path / "beta.jsonl").records
    assert [r["c_all_lengths"] for r in found if r["length"] != 128] == [r["c_all_lengths"] for r in rows]


def test_what_is_measured_is_not_measured_again(whole, data):
    _, rows, directory = whole
    before = {p.name: p.read_bytes() for p in directory.iterdir()}
    again = evaluation(data, directory)
    found = again.run()
    assert again.reused == again.units and len(again.units) == len(rows)
    assert [r.get("nll", r.get("accuracy")) for r in found] == [r.get("nll", r.get("accuracy")) for r in rows]
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == before
    assert not any(forward.traces for forward in again.forwards.values())


@pytest.mark.slow
def test_other_settings_other_weights_and_again_are_measured_anew(data, tmp_path):
    plan = dict(suites=("needles",), variants=("as trained",), lengths=(16,))
    rope = subjects(data)[:1]

    def run(measured=rope, **changes):
        done = evaluation(data, tmp_path, measured, **plan | changes)
        done.run()
        return len(done.reused), len(RecordFile(tmp_path / "needles.jsonl").records)

    assert run() == (0, 1)
    assert run() == (1, 1)
    assert run(again=True) == (0, 1)
    assert run(options=tiny.SETTINGS.options | {"windows": 8}) == (0, 1)  # replaced
    retrained = dataclasses.replace(rope[0].checkpoint, metadata=rope[0].checkpoint.metadata | {"id": "other"})
    assert run([dataclasses.replace(rope[0], lm=tiny.language_model(retrained))]) == (0, 1)
    assert run(seed=5) == (0, 2)  # beside: another draw


def test_the_same_weights_are_measured_once(data, tmp_path):
    twice = [*subjects(data), dataclasses.replace(subjects(data)[0], path="copy/checkpoints/3")]
    assert [s.path for s in evaluation(data, tmp_path, twice).subjects] == [
        "pretrain/checkpoints/3",
        "recalibrate/checkpoints/3",
    ]


def test_alibi_is_read_as_trained(data, tmp_path):
    alibi = [Subject(tiny.language_model(tiny.checkpoint(Alibi(), data)), "tiny", "a/checkpoints/3")]
    rows = evaluation(data, tmp_path, alibi, lengths=(32,), suites=("perplexity",)).run()
    assert [(r["label"], r["length"]) for r in rows] == [("ALiBi", 32)]


def test_a_length_that_is_no_multiple(data, tmp_path):
    rows = evaluation(data, tmp_path, subjects(data)[:1], lengths=(24,), suites=("perplexity",)).run()
    assert {r["factor"] for r in rows} == {1.5} and len(rows) == 5


def test_what_is_impossible_is_refused_and_what_is_not_asked_for_left_out(data, tmp_path):
    rope, dropped = ([s] for s in subjects(data))
    text_only = dataclasses.replace(data, sources=data.sources[:1])
    with pytest.raises(UserError, match=r"--suite=needles .* trained without needles \(its data: text:"):
        evaluation(text_only, tmp_path, suites=("needles",))
    left = evaluation(text_only, tmp_path)
    assert [suite.name for suite in left.suites] == ["perplexity", "beta"] and any(
        "without needles" in s for s in left.skipped
    )
    with pytest.raises(UserError, match="--variants=pi makes no sense .*DroPE.*as-trained, beta".replace("pi", "PI")):
        evaluation(data, tmp_path, dropped, variants=("PI",))
    alibi = [Subject(tiny.language_model(tiny.checkpoint(Alibi(), data)), "tiny", "pretrain/checkpoints/3")]
    with pytest.raises(UserError, match="--suite=beta .* layers that rotate or have no encoding"):
        evaluation(data, tmp_path, alibi, suites=("beta",))
    with pytest.raises(UserError, match="no length is beyond"):
        evaluation(data, tmp_path, dropped, suites=("beta",), lengths=(16,))
    with pytest.raises(UserError, match="leave --variants out"):
        evaluation(data, tmp_path, dropped, suites=("beta", "needles"), variants=("as trained",))
    with pytest.raises(UserError, match=r"held-out tokens, too few for a sequence of 50,000"):
        evaluation(data, tmp_path, rope, lengths=(16, 50_000))
    with pytest.raises(UserError, match="too short for needles"):
        evaluation(data, tmp_path, rope, lengths=(4,))
    needles_only = dataclasses.replace(data, sources=(SourceConfig("needles", options=tiny.NEEDLES),))
    with pytest.raises(UserError, match="--suite=perplexity .* holds out no text"):
        evaluation(needles_only, tmp_path, suites=("perplexity",))
    assert not list(tmp_path.iterdir())


def test_one_text_of_the_longest_length_leaves_nothing_to_fit_on(data, tmp_path):
    longest = (len(pp.held_out_tokens(data, 0, 10**6)) - 1) // 2 + 1
    dropped = subjects(data)[1:]
    found = evaluation(data, tmp_path, dropped, lengths=(longest,), suites=("perplexity",))
    assert found.variant_names == ("as trained", "paper beta") and any("none to fit" in s for s in found.skipped)
    with pytest.raises(UserError, match="none to fit"):
        evaluation(data, tmp_path, dropped, lengths=(longest,), variants=("beta",))


def test_weights_of_another_vocabulary_or_tokenizer_are_refused(data, tmp_path):
    rope = subjects(data)[0]
    other = dataclasses.replace(rope.checkpoint, metadata=rope.checkpoint.metadata | {"tokenizer": "other"})
    with pytest.raises(UserError, match="trained with tokenizer other"):
        evaluation(data, tmp_path, [dataclasses.replace(rope, lm=tiny.language_model(other))])
    small = dataclasses.replace(rope.checkpoint.model, vocab_size=100)
    other = dataclasses.replace(rope.checkpoint, model=small)
    with pytest.raises(UserError, match="knows 100 tokens"):
        evaluation(data, tmp_path, [dataclasses.replace(rope, lm=tiny.language_model(other))])


def test_fewer_tokens_than_asked_for_are_announced(data, tmp_path):
    options = tiny.SETTINGS.options | {"tokens": 10**6}
    found = evaluation(data, tmp_path, subjects(data)[:1], options=options)
    assert any("held-out tokens scored, not 1,000,000" in s for s in found.skipped)


def test_what_lengths_do_not_share_is_told(data, tmp_path):
    made = evaluation(data, tmp_path, lengths=(16, 24), suites=("perplexity",), variants=("as trained",))
    assert not any("not all lengths" in sentence for sentence in made.skipped)
    rows = made.run()
    assert len({r["tokens"] for r in rows}) == 1 and len({tuple(r["tiles"]) for r in rows}) == 1
    made = evaluation(data, tmp_path, lengths=(16, 37), suites=("perplexity",))
    assert any("Of each 37 tokens, 5 at 16 are not scored" in sentence for sentence in made.skipped)


def test_the_tile_that_was_used_tells_records_apart(data, tmp_path):
    """The least common multiple is six units both times, and the text has one such tile. Tiles of the first evaluation
    fall back to its longest length, three units; of the second the multiple is the longest length."""
    unit = len(pp.held_out_tokens(data, 0, 10**6)) * 4 // 5 // 6
    options = tiny.SETTINGS.options | {"tokens": 12 * unit}
    plan = dict(suites=("perplexity",), variants=("as trained",), options=options)
    found = []
    for lengths in ((2 * unit, 3 * unit), (2 * unit, 6 * unit)):
        assert pp.tile_of(lengths, options["tokens"]) == 6 * unit
        made = evaluation(data, tmp_path, subjects(data)[:1], lengths=lengths, **plan)
        found.append(made.identity(made.units[0]))
    assert found[0] != found[1] and [one["tile"] for one in found] == [[3 * unit], [6 * unit]]


def test_a_loss_does_not_depend_on_the_other_texts(data, tmp_path):
    """Its settings are those of its own text; those of a fitted scale are of all."""
    more = tiny.corpus(tmp_path / "more", 4000).sources[0]
    both = dataclasses.replace(data, sources=(data.sources[0], more))
    plan = dict(suites=("perplexity",), lengths=(16, 32), variants=("as trained", "beta"))
    made = [evaluation(of, tmp_path / "out", subjects(data)[1:], **plan) for of in (data, both)]
    one, two = ({(u.variant.name, u.source): m.identity(u) for u in m.units} for m in made)
    assert one["as trained", 0] == two["as trained", 0] != two["as trained", 1]
    assert one["beta", 0] != two["beta", 0] and len(two["beta", 0]["fit"]["data"]) == 2


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1x,2x", (100, 200)),
        ("2k", (2048,)),
        ("8x,100,1x", (100, 800)),
        ("1.5x, 0.5x", (50, 150)),
        ("4096", (4096,)),
    ],
)
def test_parsing_lengths(text, lengths):
    assert parse_lengths(text, 100) == lengths


@pytest.mark.parametrize("text", ["", "abc", "x", "1.333x", "0", "-5", "1y", "1", "2xx", "infx", "nan"])
def test_bad_lengths(text):
    with pytest.raises(UserError, match="--lengths"):
        parse_lengths(text, 100)
