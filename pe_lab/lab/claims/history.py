"""The history of a result: the recipe, measure, evaluation and rule of each verdict, and what changed in them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from pe_lab.results.records import as_dict, mappings

# What a verdict depends on, in the order of the page.
PARTS = ("recipe", "measure", "evaluation", "rule")


def now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def continued(
    before: Mapping[str, Any] | None, conditions: Mapping[str, Any], verdict: str, seeds: int, why: str = ""
) -> list[dict[str, Any]]:
    """The history of a result that follows another one; a new entry for each change, and for a reason that is given.

    Args:
      before: the result that it follows; None: it is the first.
      conditions: {part: its value} of `PARTS`; None of a part: it is not known.
      why: of the change.
    """
    history = mappings((before or {}).get("history"))
    if before is None or not history:
        history = [{"time": now(), "rule": conditions["rule"]}]
    else:
        last = history[-1]
        known = {**as_dict(before.get("conditions")), "rule": last.get("rule")}
        changed = [
            {"what": part, "from": known.get(part), "to": conditions[part]}
            for part in PARTS
            if conditions.get(part) is not None and known.get(part) != conditions[part]
        ]
        if changed or (why and last.get("verdict") != verdict):
            entry = {"time": now(), "rule": conditions["rule"], "changed": changed}
            history = [*history, entry | ({"why": why} if why else {})]
    history[-1] = {**history[-1], "verdict": verdict, "seeds": seeds}
    return history


def changes(entry: Mapping[str, Any]) -> list[str]:
    """What changed in an entry, in words: each part with what it was and what it is.

    Of a rule and of recipes, those that are gone and those that are new.
    """
    found = []
    for one in mappings(entry.get("changed")):
        was, is_now = one.get("from"), one["to"]
        if was is None:
            found.append(f"{one['what']}: {_words(is_now)} (not recorded before)")
            continue
        if isinstance(was, list) and isinstance(is_now, list):
            was, is_now = [x for x in was if x not in is_now], [x for x in is_now if x not in was]
        elif isinstance(was, Mapping) and isinstance(is_now, Mapping):
            keys = [key for key in {**was, **is_now} if was.get(key) != is_now.get(key)]
            was, is_now = ({key: side[key] for key in keys if key in side} for side in (was, is_now))
        found.append(f"{one['what']}: from {_words(was)} to {_words(is_now)}")
    return found


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_words(item)}" for key, item in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value)) or "nothing"
    return str(value)
