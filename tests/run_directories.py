"""Run directories as a run writes them, made up: for tests of whatever reads run directories."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

FACTORS = (1, 2, 4, 8)
# (model, method, label) -> needle accuracy and perplexity at each of FACTORS
WINNING = {
    ("RoPE", "as trained", "RoPE"): ((0.54, 0.29, 0.02, 0.0), (8.1, 31.0, 240.0, 910.0)),
    ("RoPE", "cropped", "RoPE, cropped context"): ((0.54, 0.27, 0.13, 0.06), (8.1, 8.05, 8.02, 8.03)),
    ("RoPE", "PI", "RoPE + PI"): ((0.54, 0.40, 0.21, 0.05), (8.1, 9.4, 14.2, 27.0)),
    ("RoPE", "NTK", "RoPE + NTK"): ((0.54, 0.45, 0.05, 0.01), (8.1, 8.3, 12.0, 40.0)),
    ("RoPE", "YaRN", "RoPE + YaRN"): ((0.54, 0.45, 0.39, 0.30), (8.1, 8.0, 8.2, 9.6)),
    ("DroPE", "as trained", "DroPE"): ((0.53, 0.53, 0.36, 0.09), (8.0, 7.9, 8.6, 12.1)),
    ("DroPE", "beta", "DroPE, β"): ((0.53, 0.56, 0.54, 0.51), (8.0, 7.6, 7.45, 7.4)),
}


def make_run(
    parent: Path,
    name: str = "demo",
    *,
    directory: str | None = None,
    methods: Mapping[tuple[str, str, str], tuple[Sequence[float], Sequence[float]]] = WINNING,
    phases: Sequence[tuple[str, str, int]] = (
        ("pretrain", "rope(base=10000)", 600),
        ("recalibrate", "nope", 160),
    ),
    evaluated: bool = True,
    training_length: int = 64,
    mixture: Sequence[tuple[str, float]] = (("stdlib", 0.7), ("needles", 0.3)),
    status: str = "complete",
) -> Path:
    """Writes a run directory below `parent`, in the run-directory format, and returns it."""
    root = parent / (directory or name)
    root.mkdir(parents=True)
    config = {
        "name": name,
        "seed": 0,
        "model": {
            "vocab_size": 512,
            "layers": 3,
            "d_model": 64,
            "d_ff": 192,
            "heads": 2,
            "kv_heads": 2,
            "head_dim": 32,
        },
        "data": {
            "tokenizer": "sentencepiece:train:512",
            "sources": [{"source": s, "weight": w} for s, w in mixture],
        },
        "phases": [{"name": n, "positional": p, "steps": s} for n, p, s in phases],
    }
    run = {
        "name": name,
        "config_hash": "9f2c1ab0",
        "config": config,
        "command": "python -m pe_lab.train --config=configs/drope_laptop.py --workdir=runs/demo",
        "created": "2026-03-01T10:00:00+00:00",
        "versions": {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8"},
        "machine": {
            "platform": "cpu",
            "device": "Intel Xeon",
            "devices": 1,
            "cpus": 2,
            "memory_gib": 8,
            "host": "lab",
        },
        "notes": {
            "paper": "DroPE",
            "command": "make demo",
            "cost": "12 minutes on 2 cores",
            "expected": "see README",
        },
    }
    (root / "run.json").write_text(json.dumps(run))
    chance = random.Random(name)
    tokens_per_step = 32 * training_length
    lineage: list[dict] = []
    start = 6.2
    for index, (phase, encoding, steps) in enumerate(phases):
        folder = root / phase
        folder.mkdir()
        if index:
            lineage.append({"id": f"{index}d0", "what": "drop", "path": f"{phase}/checkpoints/0", "step": 0})
        lineage.append({"id": f"{index}c1", "what": phase, "path": f"{phase}/checkpoints/{steps}", "step": steps})
        info = {
            "phase": phase,
            "index": index,
            "steps": steps,
            "batch_size": 32,
            "sequence_length": training_length,
            "tokens_per_step": tokens_per_step,
            "parameters": 221_440,
            "flops_per_token_full": 1.41e6,
            "flops_per_token_causal": 1.33e6,
            "positional": [{"layers": "0-2", "encoding": encoding, "window": None}],
            "describe": f"layers  encoding          window\n0-2     {encoding:16}  none",
            "tokenizer": "sentencepiece 512",
            "mixture": [{"source": s, "weight": w} for s, w in mixture],
            "lineage": list(lineage),
            "status": status,
            "started_step": 0,
            "seconds": steps * 0.09,
        }
        (folder / "phase.json").write_text(json.dumps(info))
        rows, speed = [], []
        for step in range(1, steps + 1):
            level = 2.1 + (start - 2.1) * math.exp(-step / (steps * (0.1 if index == 0 else 0.04)))
            tokens = step * tokens_per_step
            loss = level + chance.gauss(0, 0.06)
            rows.append({"step": step, "tokens": tokens, "loss": loss, "grad_norm": 0.4, "learning_rate": 1e-3})
            if step % max(steps // 12, 1) == 0:
                rows.append(
                    {
                        "step": step,
                        "tokens": tokens,
                        "validation_loss": level + 0.04,
                        "validation_loss/stdlib": level - 0.2,
                        "validation_loss/needles": level + 0.6,
                    }
                )
            if step % 50 == 0:
                speed.append(
                    {
                        "step": step,
                        "seconds": step * 0.09,
                        "tokens_per_second": 22_700 + chance.gauss(0, 400),
                        "mfu_full": None,
                        "mfu_causal": None,
                    }
                )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in speed))
        start = 4.4
    if evaluated:
        write_evaluation(root, name, methods, training_length, [p[0] for p in phases])
    return root


def write_evaluation(root: Path, name: str, methods: Mapping, training_length: int, phases: Sequence[str]) -> None:
    """The rows of `methods` as evaluation/{needles,perplexity,beta}.jsonl."""
    needles, perplexity, beta = [], [], []
    for (model, method, label), (accuracies, perplexities) in methods.items():
        phase = phases[-1] if model == "DroPE" else phases[0]
        for factor, accuracy, value in zip(FACTORS[: len(accuracies)], accuracies, perplexities, strict=True):
            length = factor * training_length
            scale = 1 + 0.2 * math.log(factor) if method == "beta" else 1.0
            common = {
                "run": name,
                "phase": phase,
                "checkpoint": f"{phase}/checkpoints/800",
                "step": 800,
                "model": model,
                "variant": method,
                "label": label,
                "length": length,
                "factor": factor,
                "beta": scale,
                "versions": {"jax": "0.10.2"},
                "seed": 0,
            }
            edges = [0, *(2**e for e in range(2, int(math.log2(length)) + 1))]
            bins = len(edges) - 1
            growth = [max(0.0, math.log2(max(edge, 1) / training_length)) for edge in edges[1:]]
            by_distance = [max(0.0, min(1.0, accuracy * (1.25 - 0.35 * g))) for g in growth]
            needles.append(
                {
                    **common,
                    "suite": "needles",
                    "accuracy": accuracy,
                    "queries": 1024,
                    "windows": 256,
                    "stderr": math.sqrt(accuracy * (1 - accuracy) / 1024),
                    "accuracy_by_distance": {"edges": edges, "accuracy": by_distance, "count": [64] * bins},
                }
            )
            nll = math.log(value)
            # made up, but smooth: falls with context, and drifts past the training length
            curve = [nll + 1.6 * 0.62**i + 0.1 * (nll - 2) * g for i, g in enumerate(growth)]
            perplexity.append(
                {
                    **common,
                    "suite": "perplexity",
                    "nll": nll,
                    "perplexity": value,
                    "stderr": 0.004,
                    "tokens": 65_536,
                    "source": "stdlib",
                    "position_edges": edges,
                    "nll_by_position": curve,
                }
            )
            if method == "beta" and factor > 1:
                beta.append(
                    {
                        **common,
                        "suite": "beta",
                        "c": 0.2,
                        "nll_before": nll + 0.1,
                        "nll_after": nll,
                        "fitted_on": f"stdlib, held out, {length} tokens",
                    }
                )
    folder = root / "evaluation"
    folder.mkdir()
    for suite, rows in (("needles", needles), ("perplexity", perplexity), ("beta", beta)):
        (folder / f"{suite}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
