"""Every family in and out, every edit out, read by both majors of transformers in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tables import (
    EDITS,
    HF,
    LIMIT,
    ONLY_IN_5,
    SCHEDULES,
    VEHICLES,
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
    written_as,
)
from transformers_environments import read_or_refused, read_several

import pe_lab
from pe_lab.checkpoints.runtimes import TRANSFORMERS, judge

VERSIONS = ("4.56", "5")
NEW_TOKENS = 24
VEHICLE_LIMIT = 3e-5


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


def listed(able: list[str]) -> str:
    """The architectures, or those that are left where they are fewer."""
    others = [vehicle for vehicle in VEHICLES if vehicle not in able]
    return ", ".join(able) or "none" if len(able) <= len(others) else f"all but {', '.join(others)}"


@pytest.mark.slow  # 5 minutes
def test_every_schedule_is_right_in_every_vehicle_that_takes_it(tmp_path: Path) -> None:
    """Logits over five windows' length, of the model under the schedule and of its export in transformers."""
    wanted, jobs = {}, {}
    for vehicle in VEHICLES:
        lm = pe_lab.load(f"hf:{HF / vehicle}")
        tokens, _ = stored(vehicle)
        own = lm.layers[0].extras
        for schedule, of in SCHEDULES.items():
            layers = of(len(lm.layers))
            if out := written_as(vehicle, layers, tmp_path / vehicle / re.sub(r"\W+", "_", schedule)):
                under = lm.with_positional([dataclasses.replace(layer, extras=own) for layer in layers])
                wanted[schedule, vehicle] = np.asarray(under.logits(tokens))
                jobs[schedule, vehicle] = (out, tokens)
    differences: dict[tuple[str, str], dict[str, float]] = {cell: {} for cell in wanted}
    refused: dict[tuple[tuple[str, str], str], str] = {}
    for version in VERSIONS:
        for cell, logits in zip(jobs, read_or_refused(version, list(jobs.values()), timeout=1800), strict=True):
            if isinstance(logits, str):
                refused[cell, version] = logits
            else:
                differences[cell][version] = float(np.abs(logits - wanted[cell]).max())
    wrong = {cell: found for cell, found in differences.items() if max(found.values()) > VEHICLE_LIMIT}
    assert not wrong, wrong
    configs = {cell: json.loads((out / "config.json").read_text()) for cell, (out, _) in jobs.items()}
    assert refused.keys() == {(cell, "4.56") for cell in jobs if judge(configs[cell])[TRANSFORMERS]}, refused
    rows = []
    for schedule in SCHEDULES:
        able = [vehicle for vehicle in VEHICLES if (schedule, vehicle) in wanted]
        most = [
            max((f[version] for cell, f in differences.items() if cell[0] == schedule and version in f), default=None)
            for version in VERSIONS
        ]
        rows.append([schedule, listed(able), *("–" if one is None else number(one) for one in most)])
    header = ["schedule", "architectures that take it", "transformers 4.56", "transformers 5"]
    check_or_write("vehicles", table(header, rows))


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
