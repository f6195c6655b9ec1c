"""What was run, as HTML: lineage, config, machine, versions, mixture, and what a reader should beware of."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from pe_lab.analysis.run_files import Phase, Row, Run, as_dict, number
from pe_lab.analysis.variants import is_dropped, is_rotary
from pe_lab.page.markup import Markup, element
from pe_lab.page.run_charts import lineage, phase_style
from pe_lab.results.formatting import count, duration, listing, percent


def parameters(run: Run) -> float | None:
    """Parameters of the run's model."""
    return next((value for phase in run.phases if (value := number(phase.info, "parameters"))), None)


def seconds(run: Run) -> float:
    """Wall-clock time of all phases."""
    return sum((number(phase.info, "seconds") or 0.0 for phase in run.phases), 0.0)


def tokenizer(run: Run) -> str:
    """The tokenizer's name."""
    named = next((phase.info["tokenizer"] for phase in run.phases if phase.info.get("tokenizer")), None)
    return str(named or as_dict(run.config.get("data")).get("tokenizer") or "")


def device(run: Run) -> str:
    """The device trained on, with how many if several."""
    machine = as_dict(run.info.get("machine"))
    name, devices = machine.get("device"), machine.get("devices")
    many = len(devices) if isinstance(devices, list) else devices
    return f"{many} × {name}" if name and isinstance(many, int) and many > 1 else str(name or "")


def key_facts(run: Run) -> Markup:
    """The few numbers under the headline."""
    size, trained = parameters(run), sum(phase.tokens for phase in run.phases)
    facts = [
        ("Model", f"{count(size)} parameters" if size else ""),
        ("Training length", f"{run.training_length:,} tokens" if run.training_length else ""),
        ("Trained on", f"{count(trained)} tokens" if trained else ""),
        ("Phases", " → ".join(phase.name for phase in run.phases)),
        ("Training time", duration(seconds(run)) if seconds(run) else ""),
        ("Device", device(run)),
    ]
    return element("dl", [element("div", element("dt", k), element("dd", v)) for k, v in facts if v], class_="facts")


def mixture_note(run: Run) -> Markup:
    """Whether the needles task was trained on: without that, its accuracies cannot be judged."""
    with_mixture = [phase for phase in run.phases if phase.mixture]
    measured = bool(run.evaluation.get("needles"))
    shares = {
        phase.name: percent(share)
        for phase in with_mixture
        if (share := sum(weight for source, weight in phase.mixture if source.startswith("needles")))
    }
    if shares:
        everywhere = len(shares) == len(run.phases) and len(set(shares.values())) == 1
        where = (
            f"{next(iter(shares.values()))} of all training data"
            if everywhere
            else listing([f"{share} of the data of {name}" for name, share in shares.items()])
        )
        words = (
            f"The needles task was trained on: synthetic needles were {where}. Needle accuracy here is on "
            "held-out windows of the same kind, so it measures how a learned skill carries over to longer "
            "texts, not retrieval from nothing."
        )
    elif measured and with_mixture:
        words = "No synthetic needles were in the training mixture: needle accuracy here is zero-shot."
    elif measured:
        words = "phase.json does not say what was trained on, so whether needles were part of it is not known."
    else:
        return Markup("")
    return element("div", element("p", words), class_="note")


def lineage_diagram(run: Run) -> Markup:
    """From which checkpoint each came, oldest first: boxes joined by arrows, a chain for each last
    descendant."""
    if not run.phases:
        return Markup("")
    chains: list[list[Row]] = []
    for phase in reversed(run.phases):
        chain = [*lineage(phase)]
        if not chain or not any(node.get("what") == phase.name for node in chain[-1:]):
            chain.append({"what": phase.name, "step": phase.steps_done})
        if not any(is_prefix(chain, other) for other in chains):
            chains.append(chain)
    if len(chains) == len(run.phases) > 1 and all(len(chain) == 1 for chain in chains):
        chains = [[chain[0] for chain in reversed(chains)]]  # nothing recorded: phases follow one another
    return Markup(
        "".join(
            element(
                "ol",
                [node_box(run, node) for node in chain],
                class_="lineage",
                aria_label="Lineage, oldest first",
            )
            for chain in reversed(chains)
        )
    )


def is_prefix(chain: Sequence[Row], other: Sequence[Row]) -> bool:
    """Whether `other` begins with the things that `chain` names."""
    named = [[node.get("what") for node in nodes] for nodes in (chain, other)]
    return named[1][: len(named[0])] == named[0]


def node_box(run: Run, node: Row) -> Markup:
    """One box of the lineage: what was done, and, for a phase of this run, on how much."""
    phase = run.phase(node.get("what"))
    what = str(node.get("what") or "?")
    lines = []
    if phase:
        lines.append(listing([encoding_text(row.get("encoding")) for row in phase.encodings]))
        lines.append(f"{count(phase.tokens)} tokens, {phase.steps_done:,} steps" if phase.tokens else "")
    else:
        step = number(node, "step")
        lines.append(f"at step {step:,.0f}" if step is not None else "")
    path, identity = node.get("path"), node.get("id")
    lines.append(element("code", str(path)) if path else "")
    lines.append(f"id {identity}" if identity else "")
    colour = f"--at:var(--c-{phase_style(run, phase).colour})" if phase else None
    return element("li", element("b", what), [element("span", line) for line in lines if line], style=colour)


def encoding_text(encoding: object) -> str:
    """An encoding as a text, whether it was written as one or as a mapping."""
    described = as_dict(encoding)
    if not described:
        return str(encoding or "unknown encoding")
    rest = ", ".join(f"{k}={v}" for k, v in described.items() if k != "kind" and v is not None)
    return f"{described.get('kind', '?')}({rest})" if rest else str(described.get("kind", "?"))


def what_was_run(run: Run) -> Markup:
    """Everything needed to run it again, and to know what it ran on."""
    info, machine = run.info, as_dict(run.info.get("machine"))
    notes = as_dict(info.get("notes"))
    versions = ", ".join(f"{name} {version}" for name, version in as_dict(info.get("versions")).items())
    speeds = [v for phase in run.phases for row in phase.speed if (v := number(row, "tokens_per_second"))]
    parts = [
        ("Name", run.name),
        ("Directory", element("code", str(run.directory))),
        ("Started", info.get("created")),
        ("Config hash", element("code", str(info["config_hash"])) if info.get("config_hash") else None),
        ("Model", model_text(run)),
        ("Tokenizer", tokenizer(run)),
        ("Mixture", mixture_text(run)),
        ("Speed", speed_text(run, speeds)),
        ("Machine", machine_text(machine)),
        ("Versions", versions),
        *[(name.capitalize(), notes.get(name)) for name in ("paper", "cost", "expected")],
    ]
    command = info.get("command") or notes.get("command")
    pieces: list[object] = [element("dl", [pair(k, v) for k, v in parts if v], class_="pairs")]
    if command:
        pieces += [
            element("p", "To run it again:", class_="title"),
            element("pre", command, class_="command"),
        ]
    pieces += [phase_table(phase) for phase in run.phases]
    if run.config:
        shown = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
        pieces.append(element("details", element("summary", "The whole config"), element("pre", shown)))
    return Markup("".join(element("div", pieces)))


def machine_text(machine: Row) -> str:
    """The machine in a line, whatever it says of itself."""
    units = {
        "cpus": "{} CPUs",
        "memory_gib": "{} GiB of memory",
        "devices": "{} device(s)",
        "host": "host {}",
    }
    parts = []
    for key, value in machine.items():
        if value not in (None, "", []):
            shown = len(value) if key == "devices" and isinstance(value, list) else value
            shown = f"{shown:.4g}" if isinstance(shown, float) else shown
            known = key in units or key in ("platform", "device")
            parts.append(units.get(key, "{}" if known else f"{key} {{}}").format(shown))
    return ", ".join(parts)


def pair(name: str, value: object) -> list[Markup]:
    """A term and what it is."""
    return [element("dt", name), element("dd", value)]


def model_text(run: Run) -> str:
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
    # Runs of before there were kinds of it say true or false.
    if (qk_norm := model.get("qk_norm", False)) not in (False, "none"):
        parts.append("QK-norm" if qk_norm in (True, "head") else f"QK-norm ({qk_norm})")
    if model.get("dtype"):
        parts.append(str(model["dtype"]))
    return ", ".join(parts)


def mixture_text(run: Run) -> str:
    """What each phase read."""
    texts = {p.name: listing([f"{percent(share)} {source}" for source, share in p.mixture]) for p in run.phases}
    distinct = set(filter(None, texts.values()))
    if len(distinct) == 1:
        return distinct.pop()
    return "; ".join(f"{name}: {words}" for name, words in texts.items() if words)


def speed_text(run: Run, speeds: Sequence[float]) -> str:
    """Time, median tokens per second, and MFU in both conventions where the device's peak is known."""
    parts = [duration(seconds(run))] if seconds(run) else []
    if speeds:
        parts.append(f"{count(statistics.median(speeds))} tokens/s (median)")
    for key, words in (("mfu_full", "full attention counted"), ("mfu_causal", "causal half counted")):
        values = [v for phase in run.phases for row in phase.speed if (v := number(row, key)) is not None]
        if values:
            parts.append(f"MFU {percent(statistics.median(values))} ({words})")
    return ", ".join(parts)


def phase_table(phase: Phase) -> Markup:
    """A phase's figures and the table of its positional schedule, folded."""
    info = phase.info
    steps = number(info, "steps")
    facts = [
        ("Steps", f"{phase.steps_done:,} of {steps:,.0f}" if steps else None),
        ("Status", info.get("status")),
        ("Windows per step", info.get("batch_size")),
        ("Window", f"{phase.length:,} tokens" if phase.length else None),
        ("Tokens", f"{phase.tokens:,.0f}" if phase.tokens else None),
        ("FLOPs per token", flops_text(info)),
        ("Time", duration(number(info, "seconds") or 0) if number(info, "seconds") else None),
    ]
    table = element(
        "table",
        element(
            "thead",
            element(
                "tr",
                [element("th", name, scope="col", class_="text") for name in ("Layers", "Encoding", "Window")],
            ),
        ),
        element(
            "tbody",
            [
                element(
                    "tr",
                    [
                        element("td", str(value), class_="text")
                        for value in (
                            row.get("layers", "–"),
                            encoding_text(row.get("encoding")),
                            row.get("window") or "none",
                        )
                    ],
                )
                for row in phase.encodings
            ],
        ),
    )
    return element(
        "details",
        element("summary", f"Phase {phase.name}: positional schedule and figures"),
        element("dl", [pair(name, value) for name, value in facts if value], class_="pairs"),
        element("div", table, class_="scroll") if phase.encodings else None,
        element("pre", str(info["describe"])) if info.get("describe") else None,
    )


def flops_text(info: Row) -> str | None:
    """FLOPs per token in both conventions."""
    full, causal = number(info, "flops_per_token_full"), number(info, "flops_per_token_causal")
    parts = [f"{count(full)} with full attention"] if full else []
    parts += [f"{count(causal)} with causal attention"] if causal else []
    return ", ".join(parts) or None


def caveats(run: Run) -> list[str]:
    """What a careful reader would ask about."""
    result = []
    rows = [row for found in run.evaluation.values() for row in found]
    dropped = {str(row.get("phase")) for row in rows if is_dropped(row)}
    rotary = {str(row.get("phase")) for row in rows if is_rotary(row)}
    more = max((run.tokens_until(name) or 0.0 for name in dropped), default=0.0)
    less = max((run.tokens_until(name) or 0.0 for name in rotary), default=0.0)
    if more > less > 0:
        result.append(
            f"The dropped model has read {percent(more / less - 1)} more training tokens than the RoPE "
            f"model it is "
            "compared with: its recalibration."
        )
    if any(row.get("method") == "beta" for row in rows):
        result.append(
            "β was fitted on held-out text at each length; PI, NTK and YaRN use their formulas and fit nothing."
        )
    seeds = {str(row.get("seed")) for row in rows if "seed" in row}
    if rows:
        result.append(
            "One run is one draw of initialization and data order. The intervals cover the noise of the "
            "evaluation "
            f"only{f' (seed {seeds.pop()})' if len(seeds) == 1 else ''}, not that of training."
        )
        result.append(
            "All methods were measured on the same texts, so the differences between them are surer than two "
            "intervals that overlap suggest."
        )
    size = parameters(run)
    if rows and size and size < 1e8:
        result.append(
            f"This is a small model ({count(size)} parameters). It shows the effect, not the figures of a large one."
        )
    for phase in run.phases:
        if phase.running and (phase.metrics or phase.info):
            steps = number(phase.info, "steps")
            share = f" ({phase.steps_done:,} of {steps:,.0f} steps)" if steps else ""
            result.append(f"Phase {phase.name} is not complete{share}: its figures are preliminary.")
    return result
