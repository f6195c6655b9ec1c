"""The provenance of a run, as HTML: lineage, config, changes, machine, versions, mixture, and caveats."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from pe_lab.page.markup import Markup, element, folded, note, text
from pe_lab.page.run_charts import changes_of, phase_style
from pe_lab.page.tables import plain_table
from pe_lab.results.comparison import encoding_text
from pe_lab.results.formatting import count, duration, listing, percent
from pe_lab.results.groups import seed_words
from pe_lab.results.records import Record, as_dict, as_list, mappings, number
from pe_lab.results.runs import PhaseFiles, RunFiles
from pe_lab.results.variants import is_dropped, is_rotary


def parameters(run: RunFiles) -> float | None:
    """Parameters of the run's model."""
    return next((value for phase in run.phases if (value := number(phase.info, "parameters"))), None)


def seconds(run: RunFiles) -> float:
    """Wall-clock time of all phases."""
    return sum((number(phase.info, "seconds") or 0.0 for phase in run.phases), 0.0)


def tokenizer(run: RunFiles) -> str:
    """The tokenizer's name."""
    named = next((phase.info["tokenizer"] for phase in run.phases if phase.info.get("tokenizer")), None)
    return str(named or as_dict(run.config.get("data")).get("tokenizer") or "")


def pairs(items: Sequence[tuple[object, object]], look: str = "pairs") -> Markup:
    """A list of terms and their values, without those that are empty."""
    shown = [(element("dt", name), element("dd", value)) for name, value in items if value]
    return element("dl", shown, class_=look)


def summary(run: RunFiles) -> Markup:
    """The few numbers below the headline."""
    size, trained = parameters(run), sum(phase.tokens for phase in run.phases)
    machine = as_dict(run.info.get("machine"))
    name, devices = machine.get("device"), machine.get("devices")
    many = len(devices) if isinstance(devices, list) else devices
    items = [
        ("Model", f"{count(size)} parameters" if size else ""),
        ("Training length", f"{run.training_length:,} tokens" if run.training_length else ""),
        ("Trained on", f"{count(trained)} tokens{' each' * bool(run.members)}" if trained else ""),
        ("Phases", " → ".join(phase.name for phase in run.phases)),
        ("Seeds", listing([seed_words(member) for member in run.members])),
        ("Training time" + ", all seeds" * bool(run.members), duration(seconds(run)) if seconds(run) else ""),
        ("Device", f"{many} × {name}" if name and isinstance(many, int) and many > 1 else str(name or "")),
    ]
    shown = [element("div", element("dt", key), element("dd", value)) for key, value in items if value]
    return element("dl", shown, class_="summary")


def mixture_note(run: RunFiles) -> Markup:
    """Whether symbolic needles were trained on, without which their accuracies cannot be judged."""
    known = [phase for phase in run.phases if phase.mixture]
    measured = bool(run.evaluation.get("needles"))
    shares = {
        phase.name: percent(share)
        for phase in known
        if (share := sum(weight for source, weight in phase.mixture if source.startswith("needles")))
    }
    if shares:
        where = listing([f"{share} of the data of {name}" for name, share in shares.items()])
        if len(shares) == len(run.phases) and len(set(shares.values())) == 1:
            where = f"{next(iter(shares.values()))} of all training data"
        words = (
            f"The needles task was trained on: synthetic needles were {where}. Needle accuracy here is on held-out "
            "sequences of the same kind, so it measures how a learned skill carries over to longer sequences, not "
            "retrieval from nothing."
        )
    elif measured and known:
        words = "No synthetic needles were in the training mixture: needle accuracy here is zero-shot."
    elif measured:
        words = "phase.json does not record the training mixture, so it is not known whether needles were part of it."
    else:
        return Markup("")
    return note(words)


def lineage_diagram(run: RunFiles) -> Markup:
    """The lineage of the last checkpoints, oldest first: boxes joined by arrows, a chain for each checkpoint."""
    chains: list[list[Record]] = []
    for phase in reversed(run.phases):
        chain = [*phase.lineage]
        if not chain or _trained_in(run, chain[-1]) is not phase:
            chain.append({"what": phase.name, "step": phase.steps_done})
        names = [node.get("what") for node in chain]
        if not any([node.get("what") for node in other][: len(names)] == names for other in chains):
            chains.append(chain)
    if len(chains) == len(run.phases) > 1 and all(len(chain) == 1 for chain in chains):
        chains = [[chain[0] for chain in reversed(chains)]]  # nothing recorded: phases follow one another
    boxes = [[_node_box(run, node) for node in chain] for chain in reversed(chains)]
    return text([element("ol", nodes, class_="lineage", aria_label="Lineage, oldest first") for nodes in boxes])


def _trained_in(run: RunFiles, node: Record) -> PhaseFiles | None:
    """The phase of this run that a node of the lineage is the last checkpoint of."""
    what = str(node.get("what"))
    own = (one for one in run.phases if one.lineage[-1:] == [node] and f" steps of '{one.name}' " in what)
    return next(own, run.phase(what))


def _node_box(run: RunFiles, node: Record) -> Markup:
    """One box of the lineage: the step, and the tokens if it is a phase of this run."""
    phase, step = _trained_in(run, node), number(node, "step")
    lines: list[object] = []
    if phase:
        lines.append(listing([encoding_text(record.get("encoding")) for record in phase.encodings]))
        lines.append(f"{count(phase.tokens)} tokens, {phase.steps_done:,} steps" if phase.tokens else "")
    else:
        lines.append(f"at step {step:,.0f}" if step is not None else "")
    path, identity = node.get("path"), node.get("id")
    lines += [element("code", str(path)) if path else "", f"id {identity}" if identity else ""]
    colour = f"--at:var(--c-{phase_style(run, phase).colour})" if phase else None
    name = element("b", phase.name if phase else str(node.get("what") or "?"))
    return element("li", name, [element("span", line) for line in lines if line], style=colour)


def what_was_run(run: RunFiles) -> Markup:
    """Everything that is needed to run it again, and the machine that it ran on."""
    info, notes = run.info, as_dict(run.info.get("notes"))
    versions = ", ".join(f"{name} {version}" for name, version in as_dict(info.get("versions")).items())
    items = [
        ("Name", run.name),
        ("Directory", element("code", str(run.directory))),
        ("Started", info.get("created")),
        ("Config hash", element("code", str(info["config_hash"])) if info.get("config_hash") else None),
        ("Model", _model_text(run)),
        ("Tokenizer", tokenizer(run)),
        ("Mixture", _mixture_text(run)),
        ("Speed", _speed_text(run)),
        ("Machine", _machine_text(as_dict(info.get("machine")))),
        ("Versions", versions),
        *[(name.capitalize(), notes.get(name)) for name in ("paper", "cost", "expected")],
    ]
    parts: list[object] = [pairs(items)]
    if command := info.get("command") or notes.get("command"):
        parts += [element("p", "To run it again:", class_="title"), element("pre", command, class_="command")]
    parts.append(history_table(run))
    parts += [_phase_table(phase) for phase in run.phases]
    if run.config:
        shown = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
        parts.append(folded("The whole config", element("pre", shown)))
    return element("div", parts)


def _machine_text(machine: Record) -> str:
    """The machine in a line, with every key of its record."""
    units = {"cpus": "{} CPUs", "memory_gib": "{} GiB of memory", "devices": "{} device(s)", "host": "host {}"}
    parts = []
    for key, value in machine.items():
        if value not in (None, "", []):
            shown = len(value) if key == "devices" and isinstance(value, list) else value
            shown = f"{shown:.4g}" if isinstance(shown, float) else shown
            known = key in ("platform", "device")
            parts.append(units.get(key, "{}" if known else f"{key} {{}}").format(shown))
    return ", ".join(parts)


def _model_text(run: RunFiles) -> str:
    """The shape of the model in a line."""
    model, size = as_dict(run.config.get("model")), parameters(run)
    parts = [f"{size:,.0f} parameters"] if size else []
    for key, words in (
        ("layers", "layers"),
        ("d_model", "wide"),
        ("d_ff", "feed-forward"),
        ("heads", "heads"),
        ("kv_heads", "key heads"),
        ("vocab_size", "symbols"),
    ):
        if value := number(model, key):
            parts.append(f"{value:,.0f} {words}")
    # Older runs say true or false.
    if (qk_norm := model.get("qk_norm", False)) not in (False, "none"):
        parts.append("QK-norm" if qk_norm in (True, "head") else f"QK-norm ({qk_norm})")
    if model.get("dtype"):
        parts.append(str(model["dtype"]))
    return ", ".join(parts)


def _mixture_text(run: RunFiles) -> str:
    texts = {p.name: listing([f"{percent(share)} {source}" for source, share in p.mixture]) for p in run.phases}
    distinct = set(filter(None, texts.values()))
    if len(distinct) == 1:
        return distinct.pop()
    return "; ".join(f"{name}: {words}" for name, words in texts.items() if words)


def _speed_text(run: RunFiles) -> str:
    """Time, median tokens per second, MFU in both conventions, and what the loop waited for."""

    def median(key: str) -> float | None:
        values = [v for phase in run.phases for record in phase.speed if (v := number(record, key)) is not None]
        return statistics.median(values) if values else None

    parts = [duration(seconds(run))] if seconds(run) else []
    if speed := median("tokens_per_second"):
        parts.append(f"{count(speed)} tokens/s (median)")
    for key, words in (("mfu_full", "full attention counted"), ("mfu_causal", "causal half counted")):
        if (share := median(key)) is not None:
            parts.append(f"MFU {percent(share)} ({words})")
    if step := median("step_seconds"):
        split = {part: (median(f"{part}_seconds") or 0.0) / step for part in ("device", "input", "host")}
        parts.append("of a step " + ", ".join(f"{percent(share)} {part}" for part, share in split.items()))
    return ", ".join(parts)


def _phase_table(phase: PhaseFiles) -> Markup:
    """A phase's numbers and its positional schedule, folded."""
    info, steps, time = phase.info, number(phase.info, "steps"), number(phase.info, "seconds")
    flops = [(number(info, f"flops_per_token_{kind}"), kind) for kind in ("full", "causal")]
    items = [
        ("Steps", f"{phase.steps_done:,} of {steps:,.0f}" if steps else None),
        ("Status", info.get("status")),
        ("Sequences per step", info.get("batch_size")),
        ("Sequence length", f"{phase.length:,} tokens" if phase.length else None),
        ("Tokens", f"{phase.tokens:,.0f}" if phase.tokens else None),
        ("FLOPs per token", ", ".join(f"{count(value)} with {kind} attention" for value, kind in flops if value)),
        ("Time", duration(time) if time else None),
    ]
    rows = [
        [str(r.get("layers", "–")), encoding_text(r.get("encoding")), str(r.get("window") or "none")]
        for r in phase.encodings
    ]
    schedule = plain_table(f"Encodings of {phase.name}", ("Layers", "Encoding", "Window"), rows) if rows else None
    described = element("pre", str(info["describe"])) if info.get("describe") else None
    return folded(f"Phase {phase.name}: positional schedule and figures", pairs(items), schedule, described)


def caveats(run: RunFiles) -> list[str]:
    """The limits of the conclusions from a run."""
    result = []
    records = [record for found in run.evaluation.values() for record in found]
    dropped = {str(record.get("phase")) for record in records if is_dropped(record)}
    rotary = {str(record.get("phase")) for record in records if is_rotary(record)}
    more = max((run.tokens_until(name) or 0.0 for name in dropped), default=0.0)
    less = max((run.tokens_until(name) or 0.0 for name in rotary), default=0.0)
    if more > less > 0:
        result.append(
            f"The dropped model has read {percent(more / less - 1)} more training tokens than the RoPE model it is "
            "compared with: its recalibration."
        )
    if any(record.get("variant") == "beta" for record in records):
        result.append(
            "β was fitted on held-out text at each length; PI, NTK and YaRN use their formulas and fit nothing."
        )
    seeds = {str(record.get("seed")) for record in records if "seed" in record}
    if records and run.members:
        few = (
            "The interval of two seeds is their range; comparisons use Student's t, under which two seeds decide "
            "nothing but large differences."
        )
        result += [
            f"Means are over {len(run.members)} training seeds, and intervals are Student's t over them. They cover "
            "the luck of initialization and data order. All seeds were measured on the same held-out samples, whose "
            "choice they do not cover.",
            *([few] if len(run.members) == 2 else []),
        ]
    elif records:
        seed = f" (seed {seeds.pop()})" if len(seeds) == 1 else ""
        result += [
            "One run is one draw of initialization and data order. The intervals cover the noise of the evaluation "
            f"only{seed}, not that of training.",
            "All variants were measured on the same texts, so the differences between them are surer than two "
            "intervals that overlap suggest.",
        ]
    size = parameters(run)
    if records and size and size < 1e8:
        result.append(
            f"This is a small model ({count(size)} parameters). It shows the effect, not the figures of a large one."
        )
    for phase in run.phases:
        if phase.running and (phase.metrics or phase.info):
            steps = number(phase.info, "steps")
            share = f" ({phase.steps_done:,} of {steps:,.0f} steps)" if steps else ""
            if run.members:
                done = sum(not one.running for member in run.members if (one := member.phase(phase.name)))
                share = f" ({done} of {len(run.members)} seeds have finished it)"
            result.append(f"Phase {phase.name} is not complete{share}: its figures are preliminary.")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# What was read of each source, and how the config changed


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
