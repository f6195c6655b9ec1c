"""Claims at their papers' size: whether the numbers that their rules name are measured there, on tiny models."""

import numpy as np
import pytest
from tiny_runs import finish, start

import pe_lab
from pe_lab.config import Config, from_dict
from pe_lab.lab.claims.claim import PAPER_EVALUATION, claim_names, load_claim
from pe_lab.lab.claims.verdict import judge, number

# One prepared corpus and no needles, as the recipes of the papers have.
RECIPE = """
from ml_collections import ConfigDict


def get_config(arg=""):
    config = ConfigDict()
    config.name = arg
    config.model = dict(layers=2, d_model=16, d_ff=32, heads=2, kv_heads=2, dtype="float32")
    config.data = dict(prepared="data", segments=False)
    phase = dict(name="pretrain", steps=2, positional=arg, sequence_length=1024, batch_size=2)
    config.phases = [phase | dict(optimizer={"warmup_steps": 1})]
    config.log = dict(every_steps=1, validate_every_steps=2, validation_batches=1)
    config.evaluation = dict(factors=[1, 2, 4, 8], options=dict(tokens=8192, fit_tokens=8192))
    return config
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model with RoPE and one without encoding, evaluated as claims are at paper size."""
    root = tmp_path_factory.mktemp("paper")
    words = ["the", "key", "of", "night", "is", "seven", "and", "gone"]
    rng = np.random.default_rng(0)
    (root / "corpus").mkdir()
    for i in range(90):
        (root / f"corpus/{i}.txt").write_text(" ".join(rng.choice(words, 700)) + "\n")
    (root / "recipe.py").write_text(RECIPE)
    source = ["--source=text:corpus/*.txt", "--tokenizer=bytes", "--validation-fraction=0.3"]
    finish([start(["pe_lab.prepare", *source, "--out=data"], root)])
    for encoding in ("rope", "nope"):
        finish([start(["pe_lab.train", f"--config=recipe.py:{encoding}", f"--workdir={encoding}"], root)])
        short = ["--haystack=noise", "--samples=1", "--max-new-tokens=2"]
        finish([start(["pe_lab.evaluate", f"--from={encoding}", *PAPER_EVALUATION, *short], root)])
    return {encoding: root / encoding for encoding in ("rope", "nope")}


def has_no_encoding(arm: str, recipe: str) -> bool:
    return "nope" in arm or "drop" in arm or "table11" in recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in claim_names() if load_claim(name).recipes])
def test_the_numbers_of_a_rule_are_measured(runs, name):
    """3 minutes for all: two runs stand for those of a claim, by whether they have an encoding."""
    claim = load_claim(name).at("paper")
    names = claim.measure.__globals__  # fewer windows than a measure takes
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(runs["rope"].parent)
        for key, value in {"WINDOWS": 2, "HAYSTACK": "noise"}.items():
            if key in names:
                patch.setitem(names, key, value)
        measured = {}
        for arm in claim.arms:
            kind = "nope" if has_no_encoding(arm.name, arm.recipe) else "rope"
            if kind not in measured:
                measured[kind] = claim.measure(runs[kind])
        values = {
            arm.name: {
                metric: {0: value, 1: value}
                for metric, value in measured["nope" if has_no_encoding(arm.name, arm.recipe) else "rope"].items()
            }
            for arm in claim.arms
        }
        for name, reference in claim.references.items():
            config = from_dict(Config, pe_lab.load(runs["rope"]).checkpoint.metadata["config"])
            values[name] = {metric: {0: v, 1: v} for metric, v in reference.measure(config).items()}
    judged, _, checked = judge(claim.criteria, values, claim.preconditions)
    assert all(np.isfinite(one["mean"]) for one in (*judged, *checked))
    for lines in claim.curves.values():
        for term in lines.values():
            if "{x}" not in term:
                assert number(values, term)
