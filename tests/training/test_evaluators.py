"""Suites inside training: their numbers by step, and their time in the ledger."""

import jax
import numpy as np
import pytest
from tiny_runs import compilations_kept, records, tiny, train  # noqa: F401

from pe_lab.errors import UserError
from pe_lab.evaluate import main
from pe_lab.training.evaluators import main_numbers
from pe_lab.training.plan import plan_here
from pe_lab.training.run import held_out_batches

OPTIONS = '{"tokens": 256, "windows": 4}'


@pytest.mark.slow
def test_a_run_measures_suites_as_an_evaluation_does(tmp_path, monkeypatch):
    """8 s."""
    keys = {"every_steps": "4", "factors": "[1,2]", "options": OPTIONS, "variants": '["as-trained","yarn"]'}
    config = tiny(tmp_path / "recipe", **{f"evaluation__{key}": value for key, value in keys.items()})
    train(config, tmp_path / "run")
    measured = {}
    for phase in config.phases:
        logged = records(tmp_path / "run" / phase.name / "metrics.jsonl")
        found = [one for one in logged if any(name.startswith("suite/") for name in one)]
        assert [one["step"] for one in found][-1] == phase.steps and all(
            one["step"] % 4 == 0 or one["step"] == phase.steps for one in found
        )
        measured[phase.name] = {k.removeprefix("suite/"): v for k, v in found[-1].items() if k.startswith("suite/")}
    out = tmp_path / "evaluated"
    assert main([f"--from={tmp_path / 'run'}", "--suite=needles", "--variants=as-trained", f"--out={out}"]) == 0
    found = records(out / "needles.jsonl")
    assert len(found) == 2  # the last phase, at two lengths
    for one in found:
        ((name, value),) = main_numbers([one]).items()
        assert measured[one["phase"]][name] == pytest.approx(value, rel=1e-5), name


def test_validation_has_the_same_text_whatever_the_number_of_micro_batches(tmp_path):
    """1 s. 2 batches of 8 windows, in two parts or in one."""
    found = []
    for accumulate, parts in ((1, 2), (2, 4), ("auto", 2)):  # on CPUs, whose memory is not known, "auto" is one
        config = tiny(tmp_path / "recipe", phases__0__accumulate=str(accumulate))
        plan = plan_here(config, jax.devices()[:1])
        assert plan.phases[0].config.accumulate == parts // 2 and plan.config.phases[0].accumulate == accumulate
        ((_, batches),) = held_out_batches(plan, plan.phases[0], 2).items()
        assert len(batches) == parts
        found.append(np.concatenate([batch["tokens"] for batch in batches]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_numbers_are_named_by_suite_length_source_and_variant():
    one = {"suite": "needles", "length": 64, "source": "facts of a", "variant": "as trained", "accuracy": 0.5}
    two = {"suite": "perplexity", "length": 128, "source": "prose", "variant": "YaRN", "perplexity": 12}
    none = two | {"perplexity": None, "length": 256}
    assert main_numbers([one, two, none]) == {"needles/64/facts of a": 0.5, "perplexity/128/prose/YaRN": 12.0}


def test_a_suite_that_is_not_there_is_named(tmp_path):
    config = tiny(tmp_path / "recipe", evaluation__every_steps="4", evaluation__suites='["perplexty"]')
    with pytest.raises(UserError, match="there is no suite 'perplexty'"):
        train(config, tmp_path / "run")
