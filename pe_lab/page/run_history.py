"""What a run has read of each source, and how its config changed between its starts, as tables."""

from __future__ import annotations

from pe_lab.page.loss_charts import changes_of
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.tables import plain_table
from pe_lab.results.formatting import count, percent
from pe_lab.results.records import as_dict, as_list, mappings, number
from pe_lab.results.runs import PhaseFiles, RunFiles

HEAD = ("Phase", "Source", "Weight", "Tokens expected", "Tokens read", "Read / expected", "Epochs")


def mixture_table(run: RunFiles) -> Markup:
    """Tokens of each source in each phase: as its weight says, as read, and in epochs of the source; "" without logs.

    From `read_tokens/SOURCE` and `expected_tokens/SOURCE` of metrics.jsonl, and from `mixture` of phase.json.
    """
    rows = [row for phase in run.phases for row in _phase_rows(phase)]
    if not rows:
        return Markup("")
    title = element("p", "Tokens of each source", class_="title below")
    words = [f"Means over {len(run.members)} seeds."] if run.members else []
    if any(row[-1] != "–" for row in rows):
        words.append("An epoch is one pass over the tokens that the source has for training.")
    note = element("p", " ".join(words), class_="small soft") if words else None
    return element("div", title, plain_table("Tokens of each source", HEAD, rows, words=HEAD[:2]), note)


def _phase_rows(phase: PhaseFiles) -> list[list[str]]:
    weights = dict(phase.mixture)
    sizes = {str(one.get("source")): number(one, "tokens") for one in mappings(phase.info.get("mixture"))}
    read = _last(phase, "read_tokens/")
    expected = _last(phase, "expected_tokens/")
    rows = []
    for source in dict.fromkeys([*weights, *read] if read else ()):
        tokens, wanted, size = read.get(source), expected.get(source), sizes.get(source)
        rows.append(
            [
                phase.name,
                source,
                percent(weights[source]) if source in weights else "–",
                "–" if wanted is None else count(wanted),
                "–" if tokens is None else count(tokens),
                f"{tokens / wanted:.3f}" if tokens is not None and wanted else "–",
                f"{tokens / size:.3g}" if tokens is not None and size else "–",
            ]
        )
    return rows


def _last(phase: PhaseFiles, prefix: str) -> dict[str, float]:
    """The last value of every key that begins so, by the rest of the key."""
    found = {}
    for record in phase.metrics:
        for key in record:
            if key.startswith(prefix) and (value := number(record, key)) is not None:
                found[key.removeprefix(prefix)] = value
    return found


def history_table(run: RunFiles) -> Markup:
    """When and how the config of a run changed between its starts; "" if it did not.

    From `changes` of run.json, and from the lineage of each phase, which knows the step.
    """
    rows: list[list[object]] = []
    for change in mappings(run.info.get("changes")):
        keys = [f"{key}: {_value(pair, 0)} → {_value(pair, 1)}" for key, pair in as_dict(change.get("keys")).items()]
        command = element("code", str(change["command"])) if change.get("command") else "–"
        rows.append([str(change.get("time") or "–"), text(["; ".join(keys) or "–"]), command])
    for phase in run.phases:
        for entry in changes_of(phase):
            step = number(entry, "step")
            at = f"{phase.name}, step {step:,.0f}" if step is not None else phase.name
            rows.append([at, str(entry["what"]), "–"])
    if not rows:
        return Markup("")
    title = element("p", "Changes since the first start", class_="title below")
    head = ("When", "Change", "Command")
    return element("div", title, plain_table("Changes since the first start", head, rows))


def _value(pair: object, index: int) -> str:
    values = as_list(pair)
    value = values[index] if len(values) == 2 else pair
    return "absent" if value is None else str(value)
