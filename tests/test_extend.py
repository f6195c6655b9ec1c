"""`python -m pe_lab.extend`: budgets, arms at equal FLOPs, the answer, its page, and the whole command."""

import dataclasses
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import pe_lab
from pe_lab.config import DataConfig, SourceConfig
from pe_lab.errors import UserError
from pe_lab.extend import _budget, _stoppable, main, make_plan, parser
from pe_lab.lab.extend import budget
from pe_lab.lab.extend.answer import Trained, answer_json, answer_rows, make_answer, rank_correlation
from pe_lab.lab.extend.arms import TrainingSettings, flops_per_token, plan_arms, training_data
from pe_lab.lab.extend.extension import described, factors_of_two, read_answer, suite_commands, with_scale, write_plan
from pe_lab.lab.extend.methods import Extension, choose
from pe_lab.lab.extend.numbers import At, Number
from pe_lab.lab.extend.page import html_page, markdown
from pe_lab.lab.extend.screening import Screening
from pe_lab.model import complete, train_flops_per_token
from pe_lab.positional import Beta, Layer, NoPE, layers

sys.path.append(str(Path(__file__).parent / "evaluation"))
import tiny  # noqa: E402

from pe_lab.evaluation.variants import Subject  # noqa: E402

KEYS = ("unchanged", "yarn", "searched", "drope")


def subject(data=None):
    return Subject(tiny.language_model(tiny.checkpoint(layers("rope", 2), data)), "tiny", "pretrain/checkpoints/3")


def settings(**changes):
    data = DataConfig((SourceConfig("text:books/*.txt"), SourceConfig("needles", options=tiny.NEEDLES)))
    given = dict(checkpoint="runs/tiny", data=data, length=64, tokens=200_000, batch=256) | changes
    return TrainingSettings(**given)


def arms_of(asked, before=None, keys=KEYS):
    model = subject()
    table = "longrope:short_factor=1:1:1:1,long_factor=1:1:2:4,original_length=16,factor=4"
    given = Extension(model, 64, searched=layers(table, 2))
    chosen, _ = choose(keys, given)
    return plan_arms(chosen, model, asked, before or {})


# --------------------------------------------------------------------------------------------------------------------
# Budgets and arms


def test_budgets(monkeypatch):
    known = {"50M": 50_000_000, "1.5B": 1_500_000_000, "300k": 300_000, "2000000": 2_000_000, "2e6": 2_000_000}
    assert {text: budget.amount(text) for text in known} == known
    assert budget.tokens_of("300M", 1e9, 6) == 50_000_000
    assert budget.tokens_of("6e18flops", 1e9, 6) == 1_000_000_000
    monkeypatch.setattr(budget, "machine_flops", lambda: 1e12)
    assert budget.tokens_of("3h", 1e9, 6) == 3 * 3600 * 1000 / 6 == budget.tokens_of("180min", 1e9, 6)
    for wrong in ("soon", "3 weeks", "-1"):
        with pytest.raises(UserError, match="give tokens, as 300M, FLOPs, as 2e18flops, or time"):
            budget.tokens_of(wrong, 1e9, 1)
    assert factors_of_two(16, 64) == (16, 32, 64) and factors_of_two(16, 50) == (16, 32, 50)


def test_arms_spend_the_same_flops_with_the_search_and_the_teacher():
    asked = settings(distill="logits")
    before = {"searched": 0.4 * 200_000 * flops_per_token(subject(), subject().lm.layers, 64)}
    arms, left_out = arms_of(asked, before)
    by_key = {arm.key: arm for arm in arms}
    assert set(by_key) == set(KEYS) and not left_out
    step = {key: arm.windows * arm.length * arm.flops_per_token for key, arm in by_key.items()}
    most = max(step.values())
    assert max(arm.flops for arm in arms) - min(arm.flops for arm in arms) < most
    model = complete(subject().checkpoint.model)
    plain = train_flops_per_token(model, 64).causal
    assert by_key["unchanged"].flops_per_token == by_key["yarn"].flops_per_token == plain
    short = train_flops_per_token(model, 16).causal
    assert by_key["drope"].flops_per_token == pytest.approx(short * 4 / 3)  # a teacher's forward pass
    assert by_key["drope"].length == 16 and by_key["drope"].windows == 16 and by_key["yarn"].windows == 4
    assert by_key["unchanged"].tokens == by_key["yarn"].tokens
    assert by_key["searched"].tokens == pytest.approx(0.6 * by_key["yarn"].tokens, abs=256)
    assert by_key["drope"].rate == 10 * by_key["yarn"].rate


def test_stages_spend_the_same_flops():
    """Shorter windows cost less: an arm of two stages reads more tokens."""
    model, layers_of = subject(), subject().lm.layers
    arms, _ = arms_of(settings(stages=2))
    by_key = {arm.key: arm for arm in arms}
    whole, half = (flops_per_token(model, layers_of, n) for n in (64, 32))
    half_and_half = flops_per_token(model, layers_of, 64, 2)
    assert half_and_half == (whole + half) / 2 and half < whole
    assert by_key["yarn"].flops_per_token == half_and_half and by_key["yarn"].stages == 2
    assert by_key["drope"].stages == 1 and by_key["drope"].flops_per_token == flops_per_token(
        model, Extension(model, 64).layers, 16
    )
    assert by_key["drope"].flops == pytest.approx(by_key["yarn"].flops, rel=0.02)
    assert by_key["unchanged"].tokens == pytest.approx(200_000, abs=256)


def test_a_budget_that_is_too_small_is_refused():
    with pytest.raises(UserError, match=r"100 tokens an arm are .*, less than one step of 256 tokens \(unchanged\)"):
        arms_of(settings(tokens=100))
    arms, left_out = arms_of(settings(), {"searched": 1e12})
    assert "searched" in left_out and "its search took 1.00e+12 of them" in left_out["searched"]
    assert [arm.key for arm in arms] == ["unchanged", "yarn", "drope"]


def test_a_share_of_the_text_is_of_long_documents():
    data = training_data(settings().data, 0.75, 64)
    assert [(one.source, one.weight, one.min_tokens) for one in data.sources] == [
        ("text:books/*.txt", 0.25, 0), ("text:books/*.txt", 0.75, 64), ("needles", 1.0, 0)
    ]  # fmt: skip
    assert data.packing == "best_fit" and data.segments
    prepared = training_data(DataConfig(prepared="data/books"), 0.5, 64)
    assert {(one.source, one.min_tokens) for one in prepared.sources} == {("prepared:data/books", n) for n in (0, 64)}
    assert training_data(settings().data, 0.0, 64).sources == settings().data.sources


# --------------------------------------------------------------------------------------------------------------------
# The answer


def numbers(far, price, seeds=3):
    """An arm's numbers: the loss on far tokens at the target, and on text at the training length."""
    rng = np.random.default_rng(int(1000 * far))
    noise = rng.normal(0, 0.01, seeds).tolist()
    return {
        At("far", 64): Number(far + sum(noise) / seeds, tuple(far + n for n in noise), by_seed=True),
        At("text", 16): Number(price, tuple(price + n for n in noise), by_seed=True),
        At("text", 64): Number(far, tuple(far + n for n in noise), by_seed=True),
    }


def answer_of(**found):
    arms, _ = arms_of(settings())
    trained = [Trained(arm, numbers(*found[arm.key]), (1.0,) * 3) for arm in arms if arm.key in found]
    ranks = {key: numbers(far, price, 1) for key, (far, price, *_) in found.items()}
    screening = Screening(ranks, {key: {64: 1.2} for key in ranks}, 64, 16)
    return make_answer(trained, numbers(9.0, 2.0, 1), screening, 64, 16, 3), screening


def test_a_method_that_is_better_is_named_with_its_lead_and_its_price():
    answer, _ = answer_of(unchanged=(3.0, 2.0), yarn=(2.5, 2.1), drope=(4.0, 2.5))
    assert answer.chosen == "yarn" and answer.tied == ["yarn"]
    told = answer.sentence()
    assert told.startswith("Take YaRN: at 64 tokens (4x), after ")
    lead = answer.against_best["unchanged"]
    interval = f"({lead.low:.3f} to {lead.high:.3f})"
    assert f", it leads no change of the encoding by {lead.mean:.3f} nats {interval}; at 16 tokens it costs" in told
    assert "; at 16 tokens it costs 0.098 nats (0.0" in told
    assert answer.correlation == 1.0
    best = answer.trained[0].numbers[At("far", 64)].units
    mean = np.mean(answer.trained[1].numbers[At("far", 64)].units) - np.mean(best)
    assert lead.mean == pytest.approx(mean)


def test_of_methods_that_are_not_distinguishable_the_cheapest_is_taken():
    answer, _ = answer_of(unchanged=(5.0, 2.0), yarn=(2.5, 2.3), searched=(2.503, 2.05))
    assert answer.tied == ["yarn", "searched"] and answer.chosen == "searched"
    assert answer.sentence().startswith("YaRN and the searched table cannot be distinguished at 64 tokens (4x)")
    lead = answer.against_best["unchanged"].mean
    assert f", and YaRN leads no change of the encoding by {lead:.3f} nats (" in answer.sentence()
    assert "; take the searched table, which costs least in short contexts" in answer.sentence()
    assert "; at 16 tokens it costs 0.05" in answer.sentence()
    nothing, _ = answer_of(unchanged=(2.501, 1.9), yarn=(2.5, 2.3))
    assert nothing.sentence().startswith("No method is distinguishable at 64 tokens (4x)")
    assert nothing.chosen == "unchanged" and "it gains 0.099" in nothing.sentence()


def test_rank_correlation_is_spearmans():
    from scipy.stats import spearmanr

    orders = [list("abcde"), list("badce")]
    ranks = [[order.index(letter) for letter in "abcde"] for order in orders]
    assert rank_correlation(*orders) == pytest.approx(spearmanr(*ranks).statistic)
    assert math.isnan(rank_correlation(["a", "b"], ["b", "a"]))


def test_tables_page_and_json_have_every_arm():
    answer, screening = answer_of(unchanged=(3.0, 2.0), yarn=(2.5, 2.1), drope=(4.0, 2.5))
    header, rows = answer_rows(answer)
    assert [row[0] for row in rows] == ["YaRN", "unchanged", "DroPE", "before training"]
    assert {len(row) for row in rows} == {len(header)}
    page = html_page(answer, screening, "runs/<tiny>", ["python -m pe_lab.train --config=x"])
    assert f"<h1>{answer.sentence()}</h1>" in page and "runs/&lt;tiny&gt;" in page and "<tiny>" not in page
    assert "Not measured: RULER" in page
    assert page.count("<svg") >= 4 and "http" not in page.replace("http://www.w3.org", "")
    text = markdown(answer, screening)
    assert text.startswith(answer.sentence()) and text.count("| YaRN") == 2
    made = answer_json(answer)
    assert [one["variant"] for one in made["arms"]] == ["yarn", "unchanged", "drope"] and made["chosen"] == "yarn"
    assert json.loads(json.dumps(made)) == made


def test_the_scale_of_the_answer_is_a_law_from_the_training_length():
    scaled = with_scale((Layer(NoPE()),), 1.3, 16, 64)
    assert scaled[0].logit_scale == Beta((1.3 - 1) / math.log(4), 16)
    assert scaled[0].scale_at(16) == 1 and scaled[0].scale_at(64) == pytest.approx(1.3)
    again = with_scale(scaled, 1.1, 16, 64)[0]  # a scale that was fitted multiplies the one that is there
    assert again.scale_at(16) == 1 and again.scale_at(64) == pytest.approx(1.1 * 1.3)
    assert with_scale((Layer(NoPE()),), 1.0, 16, 64) == (Layer(NoPE()),) == with_scale((Layer(NoPE()),), 1.3, 64, 64)


# --------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a tiny model with RoPE on 16 tokens, and then without, on documents of 333 bytes and needles."""
    directory = tmp_path_factory.mktemp("extend")
    return tiny.save_run(directory / "run", tiny.corpus(directory / "texts", 6000))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--length=1x"], "--length=16: the checkpoint was trained on 16 tokens. Give more, such as 4x."),
        (["--length=512"], "none of .* documents has 512 tokens; the longest has 335"),
        (["--length=512", "--long=0"], "None of .* held-out documents has more than 512 tokens; the longest has 335"),
        (["--tokens=100"], "less than one step of"),
        (["--methods=pi,yran"], "--methods: there is no method 'yran'"),
        (["--budget=soon"], "--budget='soon': give tokens, as 300M"),
        (["--budget=3h", "--tokens=5M"], "give one of them"),
        (["--arms=searched", "--population=0"], "--arms=searched needs a search"),
        (["--arms=yran"], "--arms: there is no method 'yran'"),
        (["--stages=9"], "--stages=9: 64 tokens cannot be halved 8 times"),
        (["--on=slrum"], "--on='slrum': there is no such place"),
        (["--config.mesh.fspd=2"], "config.mesh has no key 'fspd'"),
        (["--suites=perplexity"], "--suites: perplexity has no score"),
        (["--rate=0"], "rate"),
        (["--no-training", "--only=train"], "--no-training trains nothing, so that --only=train has nothing to do"),
        (["--no-training", "--tokens=5M"], "--no-training trains nothing"),
        (["--export=onnx"], "--export=onnx: there is no form 'onnx'"),
        (["--arms=clipped", "--export=hf"], "(?s)--export: clipped RoPE: it cannot be exported: .* has ClippedRope"),
        (["--evaluate.documnets=4"], "evaluation.options: no suite has an option 'documnets'"),
        (
            ["--evaluate.passkey-windows=4"],
            "--evaluate.passkey-windows is an option of passkeys, but this command measures long_range, needles, beta. "
            "Did you mean 'windows'?",
        ),
        (["--suites=ruler", "--evaluate.buffer=4"], "buffer is an option of many_shot, but .* needles, beta, ruler"),
        (["--only=train"], "has no screening yet"),
        (["--data=nowhere/*.jsonl"], "has no tokenizer, so that --data has to be a directory of pe_lab.prepare"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(run, tmp_path, capsys, monkeypatch, arguments, says):
    """Status 2, before anything is measured or trained; 0.5 s each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pe_lab.extend, "_stoppable", lambda command: pytest.fail("something was measured"))
    assert main([f"--from={run}/pretrain", "--workdir=longer", *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.startswith("error: ") and error.count("error: ") == 1
    written = [file.name for file in (tmp_path / "longer").rglob("*")]
    assert written == (["extend.json"] if arguments == ["--only=train"] else [])


def test_a_checkpoint_that_does_not_tell_its_training_length(tmp_path, capsys):
    """transformers would take 2,048, the default of the class."""
    source = Path(__file__).parent / "data" / "hf" / "llama"
    shutil.copytree(source, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert described(f"hf:{tmp_path}/hf").training_length == config.pop("max_position_embeddings")
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    assert main([f"--from=hf:{tmp_path}/hf", "--data=stdlib", f"--workdir={tmp_path}/longer"]) == 2
    assert "does not tell its training length. Write it into config.json" in capsys.readouterr().err


def test_a_scale_of_its_own_is_refused(tmp_path, capsys):
    scaled = [dataclasses.replace(layer, logit_scale=1.2) for layer in layers("rope", 2)]
    data = tiny.corpus(tmp_path / "texts", 6000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps({"name": "tiny"}))
    tiny.save(tiny.checkpoint(scaled, data, phase="pretrain", phase_index=0), tmp_path / "run/pretrain")
    assert main([f"--from={tmp_path}/run/pretrain", f"--workdir={tmp_path}/longer"]) == 2
    assert "has a logit scale of its own within its training length" in capsys.readouterr().err


def test_a_budget_in_hours_is_that_of_the_first_command(run, tmp_path, monkeypatch):
    """The speed of a machine varies, and a resumed command has the same arms."""
    start, speeds = described(f"{run}/pretrain"), iter((1e12, 3e12))
    monkeypatch.setattr(budget, "machine_flops", lambda: next(speeds))
    args = parser().parse_args([f"--from={run}/pretrain", "--budget=3min", f"--workdir={tmp_path}/longer"])
    first = make_plan(args, start, {}, {})
    write_plan(first.directory, {"source": "x"}, _budget(args, first))
    assert make_plan(args, start, {}, {}).training.tokens == first.training.tokens
    write_plan(first.directory, {"source": "x"}, {})  # a command without one keeps it
    args.seeds = "2"
    assert make_plan(args, start, {}, {}).training.tokens == pytest.approx(1.5 * first.training.tokens, abs=1)


def test_a_part_that_is_killed_is_an_error_and_one_that_is_stopped_is_not():
    """A part that the system has killed is not a stop, after which a queue would start it again; 0.5 s."""
    kill = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(UserError, match=r"was killed by signal 9 \(9: often for memory\)"):
        _stoppable(kill)
    assert _stoppable([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_a_checkpoint_without_data_or_a_directory_of_something_else(run, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("x")
    assert main([f"--from={run}/pretrain", f"--workdir={tmp_path}/taken", "--tokens=20000", "--batch=256"]) == 2
    assert "is not empty and no extension" in capsys.readouterr().err
    assert main([f"--workdir={tmp_path}/new"]) == 2
    assert "--from is missing" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_with_its_cost(run, tmp_path, capsys):
    asked = [f"--from={run}/pretrain", "--tokens=20000", "--batch=256", f"--workdir={tmp_path}/longer", "--dry-run"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "14 methods at 16, 32, 64 tokens" in out and "And the best 2 of the screening." in out
    rows = [line for line in out.splitlines() if line.startswith(("unchanged", "YaRN", "DroPE", "slow half"))]
    assert len(rows) == 4 and "78 " in rows[0]  # steps of 256 tokens
    assert "6 runs" in out and "Evaluation: at most 128 tokens" in out and not (tmp_path / "longer").exists()
    assert main([*asked, "--arms=unchanged,searched,cheapest_dropped", "--population=8", "--iterations=0"]) == 0
    out = capsys.readouterr().out
    assert "3 runs" in out and "not trained" not in out
    searched = next(line for line in out.splitlines() if line.startswith("searched"))
    assert float(searched.split()[-1]) > 0  # FLOPs of the search


@pytest.mark.slow
def test_a_screening_that_is_stopped_goes_on(run, tmp_path):
    """SIGTERM to the command alone ends its part too, with status 75; what was measured stays; 30 s."""
    where = tmp_path / "longer"
    asked = [sys.executable, "-m", "pe_lab.extend", f"--from={run}/pretrain", "--length=2x", "--no-training"]
    asked += ["--methods=unchanged,pi,ntk,yarn", "--evaluate.documents=4", "--evaluate.windows=8", f"--workdir={where}"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    records = where / "screening" / "needles.jsonl"
    deadline = time.monotonic() + 120
    while not records.is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    process.stdout.close()
    before = records.read_text().splitlines()
    time.sleep(1)
    assert records.read_text().splitlines() == before  # no part of it goes on alone
    assert main(asked[3:]) == 0
    assert records.read_text().splitlines()[: len(before)] == before
    assert (where / "screening/screening.json").is_file()


@pytest.mark.slow
def test_from_a_checkpoint_to_an_answer(run, tmp_path, capfd):
    """Screening with a search, two seeds of two arms, evaluation, page and best; 60 s."""
    where = tmp_path / "longer"
    asked = [f"--from={run}/pretrain", "--length=2x", "--tokens=20000", "--batch=256", "--seeds=2"]
    asked += ["--population=8", "--iterations=1", "--search-sequences=4", "--methods=unchanged,searched,drope"]
    asked += ["--arms=unchanged,drope", "--evaluate.documents=4", "--evaluate.windows=8", f"--workdir={where}"]
    assert main([*asked, "--only=screen"]) == 0
    files = [where / "screening" / f"{name}.jsonl" for name in ("long_range", "needles", "search")]
    before = [file.stat().st_mtime_ns for file in files]
    assert main(asked) == 0
    assert [file.stat().st_mtime_ns for file in files] == before  # nothing is measured again
    out = capfd.readouterr().out
    answer = json.loads((where / "answer.json").read_text())
    assert answer["answer"] in out and answer["answer"] in (where / "table.md").read_text()
    assert {one["variant"] for one in answer["arms"]} == {"unchanged", "drope"} and answer["seeds"] == 2
    flops = [one["flops"] for one in answer["arms"]]
    assert max(flops) - min(flops) < 0.03 * max(flops)
    for one in answer["arms"]:
        for number in one["numbers"]:
            assert len(number["units"]) == 2 and number["mean"] == pytest.approx(np.mean(number["units"]))
    page = (where / "report.html").read_text()
    assert answer["answer"] in page and page.count("<svg") >= 4
    start = described(f"{run}/pretrain")
    options = [one for one in asked if not one.startswith("--evaluate.")]
    given = parser().parse_args([*options, "--suites=ruler:vt"])
    plan = make_plan(given, start, {}, {"samples": "2"})
    commands = suite_commands(plan, start)
    assert len(commands) == 5 and all(
        {"--suite=ruler:vt", "--samples=2", "--lengths=16,32,64"} <= set(one) for one in commands
    )
    assert commands[0][-2:] == [f"--out={where}/before", "--variants=as-trained"]
    trained = {one["variant"]: one for one in answer["arms"]}
    variants = {}
    for key, name in (("unchanged", "unchanged"), ("drope", "DroPE")):
        for seed, scale in enumerate(trained[key]["scales"]):
            out = f"--out={where}/arms/{key}__seed={seed}/evaluation"
            (text,) = [one[-1] for one in commands if out in one]
            law = f"/beta={(scale - 1) / math.log(2)!r}@16" if scale != 1 and key == "drope" else ""
            variants[key, seed] = f"{trained[key]['encoding']}{law}"
            assert text == f"--positional={name}:{variants[key, seed]}"
    # Scores of such a suite are numbers of the answer; those of another variant are not.
    for (key, seed), variant in variants.items():
        scores = {"vt": 0.25 if key == "drope" else 0.75, "cwe": 0.75}
        lines = [{"task": task, "score": score, "variant": variant} for task, score in scores.items()]
        lines.append({"task": "vt", "score": 0.0, "variant": "other"})
        text = "".join(json.dumps({"suite": "ruler", "length": 32, **one}) + "\n" for one in lines)
        (where / f"arms/{key}__seed={seed}/evaluation/ruler.jsonl").write_text(text)
    again = {
        one.arm.key: one.numbers[At("ruler", 32)] for one in read_answer(plan, described(f"{run}/pretrain")).trained
    }
    assert again == {
        "drope": Number(0.5, (0.5, 0.5), by_seed=True), "unchanged": Number(0.75, (0.75, 0.75), by_seed=True)
    }  # fmt: skip
    best = pe_lab.load(where / "best")
    arm = next(one for one in answer["arms"] if one["variant"] == answer["chosen"])
    trained = pe_lab.load(where / f"arms/{answer['chosen']}__seed=0")
    assert same_parameters(best, trained)
    assert best.layers[0].scale_at(32) == pytest.approx(arm["scales"][0] * trained.layers[0].scale_at(32), rel=1e-5)
    assert main([*asked, "--length=3x"]) == 2
    assert "is another extension (length: 2x there, 3x here)" in capfd.readouterr().err
    assert main([*asked, "--tokens=30000"]) == 2
    assert "has a cell 'unchanged__seed=0' with another config" in capfd.readouterr().err
    assert main([*asked, "--seeds=1", "--only=answer"]) == 2
    assert "is of 2 seeds, not of 1. Run --only=evaluate first" in capfd.readouterr().err


def same_parameters(one, other):
    pairs = zip(jax.tree.leaves(one.checkpoint.params), jax.tree.leaves(other.checkpoint.params), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
