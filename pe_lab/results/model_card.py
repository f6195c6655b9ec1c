"""The model card of an export: README.md with its encodings, its lineage, how to load it, and what was measured."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from pe_lab.checkpoints.hf_export import Export
from pe_lab.checkpoints.rope_parameters import declared_length
from pe_lab.checkpoints.runtimes import LLAMA_CPP, RUNTIMES, SGLANG, TRANSFORMERS, VLLM, fails, judge
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.model import model_schedule
from pe_lab.positional import describe
from pe_lab.results.records import Record, mappings, number
from pe_lab.results.scores import measure, source_of

_LOAD = {
    TRANSFORMERS: """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```""",
    VLLM: "`vllm serve {name}{longer}`",
    SGLANG: "`python -m sglang.launch_server --model-path {name}{longer}`",
    LLAMA_CPP: "`python convert_hf_to_gguf.py DIRECTORY`",
}
_LONGER = {VLLM: " --max-model-len={}", SGLANG: " --context-length={}"}


def model_card(source: CheckpointSource, export: Export, name: str, records: Sequence[Record] = ()) -> str:
    """The text of README.md.

    Args:
      name: by which the model is loaded: a directory, or a repository of the hub.
      records: results of the checkpoint.
    """
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- pe_lab\n- positional-encoding\n---",
        f"# {name.rpartition('/')[2]}",
        f"A decoder language model, written as {export.family.architecture} in {export.dtype} by pe_lab "
        f"{importlib.metadata.version('pe-lab')} from `{source.display_name}`.",
        "## Positional encoding",
        _encodings(source, export),
        "## Lineage",
        _lineage(source),
        "## How to load it",
        _loading(export, name),
    ]
    if measured := _measured(records):
        parts += ["## Measured", measured]
    return "\n\n".join(parts) + "\n"


def _encodings(source: CheckpointSource, export: Export) -> str:
    schedule = model_schedule(source.model, export.layers)
    length = f"Trained on {source.training_length:,} tokens; declared for {declared_length(export.config):,}."
    notes = [f"- {note}" for note in export.notes if not note.startswith("--")]
    return "\n".join([length, "", "```", describe(schedule, export.layers), "```", *([""] if notes else []), *notes])


def _lineage(source: CheckpointSource) -> str:
    entries = mappings(source.metadata.get("lineage"))
    if not entries:
        return f"Read from `{source.display_name}`, and not trained by pe_lab."
    return "\n".join(f"{n}. {entry.get('what')}" for n, entry in enumerate(entries, 1))


def _loading(export: Export, name: str) -> str:
    if not export.family.stock:
        return f"transformers has no {export.family.architecture}: the family's own code reads this."
    found, parts = judge(export.config), []
    for runtime, version in RUNTIMES.items():
        reasons = found[runtime]
        if fails(reasons):
            parts.append(f"**{runtime}** ({version}): {'; '.join(reasons)}.")
            continue
        longer = _LONGER.get(runtime, "").format(declared_length(export.config)) if reasons else ""
        note = f" {'; '.join(reasons)}." if reasons else ""
        parts.append(f"**{runtime}** ({version}):{note}\n\n{_LOAD[runtime].format(name=name, longer=longer)}")
    if fails(found[LLAMA_CPP]):
        parts.append("For llama.cpp, write a GGUF file: `python -m pe_lab.convert --from=hf:DIRECTORY --to=gguf:FILE`.")
    return "\n\n".join(parts)


def _measured(records: Sequence[Record]) -> str:
    """A table of the results with their 95% intervals; "" without results."""
    rows = []
    for record in records:
        cell, length = measure(record), number(record, "length")
        if cell is not None:
            interval = "" if cell.ends is None else f"{cell.format(cell.ends[0])} to {cell.format(cell.ends[1])}"
            what = " ".join(filter(None, [str(record.get("suite") or ""), source_of(record)]))
            tokens = "" if length is None else f"{length:,.0f}"
            rows.append([what, str(record.get("label") or ""), tokens, cell.format(cell.value), interval])
    if not rows:
        return ""
    header = ["suite", "variant", "tokens", "result", "95% interval"]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])
