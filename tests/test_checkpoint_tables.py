"""Every family in and out, every edit out, read by both majors of transformers in processes of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tables import (
    EDITS,
    HF,
    LIMIT,
    ONLY_IN_5,
    command,
    document,
    documented,
    edited,
    expected,
    families,
    number,
    same_bytes,
    stored,
    table,
    tensors,
    without_numbers,
)
from transformers_environments import read_several

import pe_lab

VERSIONS = ("4.56", "5")
NEW_TOKENS = 24


def check_or_write(name: str, content: str) -> None:
    """Compares a table with the document's, but for its numbers; writes it there when asked to."""
    if os.environ.get("PE_LAB_WRITE_DOCS"):
        document(name, content)
    assert without_numbers(documented(name)) == without_numbers(content), content


def decode_difference(lm: pe_lab.LanguageModel, prompt: np.ndarray) -> float:
    """Cached greedy decoding against full forward passes: the ids must be equal; the margin by which they are chosen.

    Returns the largest difference between a full pass's highest logit and its logit of the token that was decoded: 0
    where every token is the same.
    """
    new = np.asarray(lm.generate(prompt, max_new_tokens=NEW_TOKENS))
    text = np.concatenate([prompt, new])
    at = range(len(prompt), len(text))
    if any(layer.follows_length for layer in lm.layers):
        logits = np.stack([np.asarray(lm.logits(text[:n]))[0, -1] for n in at])
    else:
        logits = np.asarray(lm.logits(text[:-1]))[0, len(prompt) - 1 :]
    chosen = np.take_along_axis(logits, text[len(prompt) :, None], axis=1)[:, 0]
    return float((logits.max(-1) - chosen).max())


@pytest.mark.slow
def test_every_family_comes_in_and_goes_out(tmp_path: Path) -> None:
    rows, outs, facts = [], {}, {}
    for name in families():
        ours, out, again = tmp_path / "ours" / name, tmp_path / "out" / name, tmp_path / "again" / name
        command(f"--from=hf:{HF / name}", f"--to={ours}")
        lm = pe_lab.load(ours)
        tokens, logits = stored(name)
        difference = float(np.abs(np.asarray(lm.logits(tokens)) - logits).max())
        family = json.loads((HF / name / "config.json").read_text())["model_type"]
        command(f"--from={ours}", f"--to=hf:{out}", f"--family={family}")
        command(f"--from=hf:{out}", f"--to={again}")
        round_trip = same_bytes(tensors(HF / name), tensors(out)) and pe_lab.load(again).layers == lm.layers
        facts[name] = (difference, round_trip, decode_difference(lm, tokens[0]))
        if name != "llama_drope":
            outs[name] = out
    read = {}
    for version in VERSIONS:
        those = [name for name in outs if version == "5" or name not in ONLY_IN_5]
        logits = read_several(version, [(outs[name], stored(name)[0]) for name in those])
        read[version] = dict(zip(those, logits, strict=True))
    for name, (difference, round_trip, decoded) in facts.items():
        there = {v: np.abs(read[v][name] - stored(name)[1]).max() if name in read[v] else None for v in VERSIONS}
        assert difference <= LIMIT and round_trip and decoded <= 1e-4, (name, difference, round_trip, decoded)
        assert all(value is None or value <= LIMIT for value in there.values()), (name, there)
        absent = "needs its own code" if name not in outs else "has no such architecture"
        written = [absent if value is None else number(value) for value in there.values()]
        same = "same ids" if decoded == 0 else f"within {number(decoded)}"
        rows.append([f"`{name}`", number(difference), "equal" if round_trip else "DIFFERENT", *written, same])
    header = [
        "checkpoint",
        "in: logits",
        "round trip: bytes",
        "out: transformers 4.56",
        "out: transformers 5",
        "decode",
    ]
    check_or_write("families", table(header, rows))


@pytest.mark.slow
def test_every_edit_goes_out_natively(tmp_path: Path) -> None:
    models = {edit: edited(edit, tmp_path) for edit in EDITS}
    wanted = {edit: expected(edit, lm, stored(edit.base)[0]) for edit, (lm, _, _) in models.items()}
    jobs = [(out, stored(edit.base)[0]) for edit, (_, out, _) in models.items()]
    read = {version: dict(zip(models, read_several(version, jobs), strict=True)) for version in VERSIONS}
    rows = []
    for edit, (_, _, architecture) in models.items():
        there = [float(np.abs(read[version][edit] - wanted[edit]).max()) for version in VERSIONS]
        assert max(there) <= LIMIT, (edit.name, there)
        option = " ".join(f"`{option}`" for option in edit.options)
        rows.append([edit.name + (f" ({option})" if option else ""), architecture, *map(number, there)])
    header = ["model", "written as", "transformers 4.56", "transformers 5"]
    check_or_write("edits", table(header, rows))


@pytest.mark.slow
def test_the_edits_differ_from_each_other() -> None:
    """Their exports would pass as well if an edit changed nothing."""
    seen: dict[str, list[np.ndarray]] = {}
    for edit in EDITS:
        lm = edit.apply(pe_lab.load(f"hf:{HF / edit.base}"))
        logits = np.asarray(lm.logits(stored(edit.base)[0]))
        twin = edit.options and "--length=64" not in edit.options  # the same model under another architecture
        assert twin or all(np.abs(logits - other).max() > 1e-2 for other in seen.get(edit.base, [])), edit.name
        seen.setdefault(edit.base, []).append(logits)
