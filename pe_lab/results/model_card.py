"""The model card of an export: README.md with its encodings, its lineage, how to load it, and what was measured."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

from pe_lab.checkpoints.gguf.export import GgufExport
from pe_lab.checkpoints.hf_export import Export
from pe_lab.checkpoints.rope_parameters import declared_length
from pe_lab.checkpoints.runtimes import LLAMA_CPP, RUNTIMES, SGLANG, TRANSFORMERS, VLLM, fails, judge
from pe_lab.checkpoints.source import CheckpointSource
from pe_lab.model import model_schedule
from pe_lab.positional import Layer, describe
from pe_lab.results.records import Record, mappings, number
from pe_lab.results.scores import measure, source_of

CARD = "README.md"  # in a directory, and in a repository of the hub
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
    """The README.md of a Hugging Face directory.

    Args:
      name: by which the model is loaded: a directory, or a repository of the hub.
      records: results of the checkpoint.
    """
    form = f"as {export.family.architecture} in {export.dtype}"
    encodings = _encodings(source, export.layers, declared_length(export.config), export.notes)
    return _card("transformers", name, form, source, encodings, _loading(export, name), records)


def gguf_card(
    source: CheckpointSource,
    export: GgufExport,
    name: str,
    repository: str | None,
    notes: Sequence[str],
    records: Sequence[Record] = (),
) -> str:
    """The model card of a GGUF file, the README.md of a repository with it.

    Args:
      name: of the file.
      repository: of the hub, to which it is sent.
      notes: on the export.
      records: as in `model_card`.
    """
    numbers = ", ".join(dict.fromkeys(one.lower() for one in export.kinds))
    length = export.plan.config["context_length"]
    form = f"as llama.cpp's {export.plan.family.model_type} in {numbers}"
    commands = [f"llama-server -m {name} -c {length}"]
    if repository:
        commands.append(f"llama-server --hf-repo {repository} --hf-file {name} -c {length}")
    loading = f"**{LLAMA_CPP}**:\n\n```shell\n" + "\n".join(commands) + "\n```"
    encodings = _encodings(source, export.plan.layers, length, notes)
    return _card("gguf", name, form, source, encodings, loading, records)


def _card(
    library: str,
    name: str,
    form: str,
    source: CheckpointSource,
    encodings: str,
    loading: str,
    records: Sequence[Record],
) -> str:
    version = importlib.metadata.version("pe-lab")
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- pe_lab\n- positional-encoding\n---",
        f"# {name.rpartition('/')[2]}",
        f"A decoder language model, written {form} by pe_lab {version}.",
        *("## Positional encoding", encodings, "## Lineage", _lineage(source), "## How to load it", loading),
    ]
    if measured := _measured(records):
        parts += ["## Measured", measured]
    return "\n\n".join(parts) + "\n"


def _encodings(source: CheckpointSource, layers: Sequence[Layer], declared: int, notes: Sequence[str]) -> str:
    schedule = model_schedule(source.model, layers)
    length = f"Trained on {source.training_length:,} tokens; declared for {declared:,}."
    listed = [f"- {note}" for note in notes if not note.startswith("--")]
    return "\n".join([length, "", "```", describe(schedule, layers), "```", *([""] if listed else []), *listed])


def _lineage(source: CheckpointSource) -> str:
    entries = mappings(source.metadata.get("lineage"))
    if not entries:
        return f"Read from `{without_folders(source.display_name)}`, and not trained by pe_lab."
    return "\n".join(f"{n}. {without_folders(str(entry.get('what')))}" for n, entry in enumerate(entries, 1))


def without_folders(text: str) -> str:
    """A text without the folders of absolute paths, for what is published: `hf:SmolLM` of `hf:/home/me/SmolLM`."""
    return re.sub(r"(?<!\S)((?:hf:|gguf:)?)(?:~|\.{1,2})?/(?:[^;/]*/)*", r"\1", text)


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
