"""`python -m pe_lab.extend`: budgets, arms at equal FLOPs, the answer, its page, and the whole command."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.errors import UserError
from pe_lab.lab.extend import budget
from pe_lab.lab.extend.answer import Trained, answer_json, answer_rows, make_answer, rank_correlation
from pe_lab.lab.extend.arms import TrainingSettings, flops_per_token, plan_arms, training_data
from pe_lab.lab.extend.best import with_scale
from pe_lab.lab.extend.extension import factors_of_two
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
        At("far", 64): Number(far + sum(noise) / seeds, tuple(far + n for n in noise)),
        At("text", 16): Number(price, tuple(price + n for n in noise)),
        At("text", 64): Number(far, tuple(far + n for n in noise)),
    }


def answer_of(**found):
    arms, _ = arms_of(settings())
    trained = [Trained(arm, numbers(*found[arm.key])) for arm in arms if arm.key in found]
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
    assert f"its loss is {lead.mean:.3f} nats lower than that of no change of the encoding {interval}" in told
    assert "; at 16 tokens it costs 0.098 nats (0.0" in told
    assert answer.correlation == 1.0
    best = answer.trained[0].numbers[At("far", 64)].units
    mean = np.mean(answer.trained[1].numbers[At("far", 64)].units) - np.mean(best)
    assert lead.mean == pytest.approx(mean)


def test_of_methods_that_are_not_distinguishable_the_cheapest_is_taken():
    answer, _ = answer_of(unchanged=(5.0, 2.0), yarn=(2.5, 2.3), searched=(2.503, 2.05))
    assert answer.tied == ["yarn", "searched"] and answer.chosen == "searched"
    assert answer.sentence().startswith("YaRN and searched cannot be distinguished at 64 tokens (4x)")
    assert "of these, searched costs least in short contexts; at 16 tokens it costs 0.05" in answer.sentence()
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
    assert page.count("<svg") >= 4 and "http" not in page.replace("http://www.w3.org", "")
    text = markdown(answer, screening)
    assert text.startswith(answer.sentence()) and text.count("| YaRN") == 2
    made = answer_json(answer)
    assert [one["method"] for one in made["arms"]] == ["yarn", "unchanged", "drope"] and made["chosen"] == "yarn"
    assert json.loads(json.dumps(made)) == made


def test_the_scale_of_the_answer_is_a_law_from_the_training_length():
    scaled = with_scale((Layer(NoPE()),), 1.3, 16, 64)
    assert scaled[0].logit_scale == Beta((1.3 - 1) / math.log(4), 16)
    assert scaled[0].scale_at(16) == 1 and scaled[0].scale_at(64) == pytest.approx(1.3)
    assert with_scale((Layer(NoPE()),), 1.0, 16, 64) == (Layer(NoPE()),) == with_scale((Layer(NoPE()),), 1.3, 64, 64)
