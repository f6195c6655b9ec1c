"""Results that are judged again: which numbers they take from other results, and which they do not."""

import dataclasses

import pytest

from pe_lab.errors import ConfigError
from pe_lab.lab.claims import Arm, Claim, Criterion, Precondition, Reference
from pe_lab.lab.claims.page import markdown
from pe_lab.lab.claims.results import judge_again


def made_up(name, values, size="laptop", recipe="a.py", seconds=0.0):
    """A result with arms of one recipe and surgery."""
    arms = {arm: {"recipe": f"{recipe}:{arm}", "surgery": "", "seconds": seconds} for arm in values}
    return {"claim": name, "size": size, "seeds": [0, 1, 2], "arms": arms, "values": values}


NEEDED = Claim(
    sentence="A is better than b.",
    paper="none",
    arms=(Arm("a", "a.py:a"), Arm("b", "a.py:b")),
    criteria=(Criterion("lower", "a: loss", ("b: loss",), lower=True, by=0.01),),
    name="needed",
)


def judged_again(result, others, claim=NEEDED):
    history = {
        "criteria": [],
        "preconditions": [],
        "history": [{"time": "2026-01-01", "rule": ["another"], "verdict": "confirmed"}],
        "verdict": "not settled",
    }
    return judge_again(claim, {**history, **result}, others, "why")


def test_numbers_are_taken_from_the_same_runs_where_they_can_be():
    """All of the needles are found in every run, and say nothing about which runs they are."""
    result = made_up("needed", {"a": {"loss": [3.0, 3.1, 3.2], "needles": [1.0] * 3, "text": [3.5, 3.6, 3.7]}})
    other = made_up("other", {"a": {"needles": [1.0] * 3, "text": [3.4, 3.6, 3.8]}, "b": {"loss": [4.0, 4.0, 4.2]}})
    same = made_up("same", {"a": {"loss": [3.0, 3.1, 3.2]}, "b": {"loss": [4.1, 4.1, 4.3]}})
    for others in ([other, same], [same, other]):
        found = judged_again(result, others)
        assert found["values"]["b"]["loss"] == [4.1, 4.1, 4.3]
        assert found["taken_from"] == {"b": {"claim": "same", "numbers": ["loss"], "same_runs": True}}
    found = judged_again(result, [other])
    assert found["taken_from"]["b"]["same_runs"] is False
    page = markdown([{**found, "quote": "", "tried": "", "arms": {}, "minutes": 0, "command": ""}], "figures")
    assert "Numbers of the same recipe and seeds, of runs that may be others, measured in another claim: `b` of" in page
    again = judged_again(found, [same])  # what was taken is chosen anew, and not taken on from a result that took it
    assert again["values"]["b"]["loss"] == [4.1, 4.1, 4.3] and again["taken_from"]["b"]["claim"] == "same"
    assert "b" not in judged_again(result, [{**found, "claim": "took"}])["values"]


def test_runs_are_the_same_by_the_seconds_that_they_took():
    result = made_up("needed", {"a": {"loss": [3.0, 3.1, 3.2]}}, seconds=12.345678)
    other = made_up("other", {"a": {"text": [4.0] * 3}, "b": {"loss": [4.0, 4.0, 4.2]}}, seconds=12.3)
    same = made_up("same", {"a": {"text": [4.0] * 3}, "b": {"loss": [4.1, 4.1, 4.3]}}, seconds=12.345678)
    assert judged_again(result, [other, same])["taken_from"]["b"] == {
        "claim": "same",
        "numbers": ["loss"],
        "same_runs": True,
    }


def test_numbers_of_another_recipe_are_not_judged_again():
    result = made_up("needed", {"a": {"loss": [3.0, 3.1, 3.2]}, "b": {"loss": [4.0] * 3}}, recipe="before.py")
    with pytest.raises(ConfigError, match="arm 'a' has another recipe than its runs. Run it again"):
        judged_again(result, [])


def test_a_reference_is_taken_for_the_same_recipe_and_size_alone():
    """Otherwise it is measured: another size, or another arm under the same name, has other numbers."""

    def measured(config):
        return {"heads": float(config.model.heads)}

    recipe = "configs/claims.py:method=rope"
    claim = dataclasses.replace(
        NEEDED,
        arms=(Arm("a", recipe), Arm("b", "a.py:b")),
        references={"size": Reference("a", measured)},
        preconditions=(Precondition("heads", "size: heads", least=1),),
    )
    result = made_up("needed", {"a": {"loss": [3.0, 3.1, 3.2]}, "b": {"loss": [4.0] * 3}})
    result["arms"]["a"]["recipe"] = recipe
    known = {"size": {"recipe": recipe, "measure": "measured"}}
    same = made_up("same", {"size": {"heads": [99.0] * 3}}) | {"references": known}
    found = judged_again(result, [same], claim)
    assert found["values"]["size"]["heads"] == [99.0] * 3 and found["references"] == known
    other = {"size": {"recipe": "configs/claims.py:method=nope", "measure": "measured"}}
    another = {"size": {"recipe": recipe, "measure": "another"}}
    for wrong in ({"size": "paper"}, {"references": other}, {"references": another}, {"references": {}}):
        assert judged_again(result, [same | wrong], claim)["values"]["size"]["heads"] == [2.0] * 3
    kept = {**result, "values": {**result["values"], "size": {"heads": [99.0] * 3}}, "references": other}
    assert judged_again(kept, [], claim)["values"]["size"]["heads"] == [2.0] * 3
