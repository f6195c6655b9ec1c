"""What a phase writes of itself: the metadata of its checkpoints, and phase.json for the report."""

from __future__ import annotations

from typing import Any

import jax

from pe_lab.checkpoints.store import metadata_of
from pe_lab.config import config_hash, to_json
from pe_lab.model import Flops
from pe_lab.positional import describe, label
from pe_lab.training.machine import Peak, versions
from pe_lab.training.run import PhasePlan, Run


def checkpoint_metadata(
    run: Run, phase: PhasePlan, checkpoint_id: str, step: int, lineage: list[dict[str, Any]], data_state: Any
) -> dict[str, Any]:
    """The JSON part of a checkpoint of `phase` at `step`."""
    model, seed = run.models[phase.index].config, run.config.seed
    return metadata_of(
        model,
        phase.layers,
        id=checkpoint_id,
        run=run.config.name,
        phase=phase.name,
        phase_index=phase.index,
        step=step,
        tokens=step * phase.tokens_per_step,
        training_length=phase.config.sequence_length,
        config=to_json(run.config),
        config_hash=config_hash(run.config),
        lineage=lineage,
        mixture=list(run.mixture),
        tokenizer=run.tokenizer.fingerprint,
        vocab_size=model.vocab_size,
        versions=versions(),
        data_state=data_state,
        random={"seed": seed, "key": jax.random.key_data(jax.random.key(seed)).tolist()},
    )


def phase_facts(
    run: Run,
    phase: PhasePlan,
    status: str,
    started: int,
    seconds: float,
    flops: Flops,
    peak: Peak,
    lineage: list[dict[str, Any]],
) -> dict[str, Any]:
    """The contents of phase.json: `status` is running or complete, `started` the step this session began at."""
    model = run.models[phase.index]
    encodings: list[dict[str, Any]] = []
    for n, layer in enumerate(phase.layers):
        entry = {"layers": f"{n}", "encoding": label(layer), "window": layer.window}
        if encodings and encodings[-1]["encoding"] == entry["encoding"]:
            encodings[-1]["layers"] = f"{encodings[-1]['layers'].split('-')[0]}-{n}"
        else:
            encodings.append(entry)
    return {
        "phase": phase.name,
        "index": phase.index,
        "status": status,
        "steps": phase.config.steps,
        "started_step": started,
        "seconds": round(seconds, 1),
        "batch_size": phase.config.batch_size,
        "sequence_length": phase.config.sequence_length,
        "tokens_per_step": phase.tokens_per_step,
        "parameters": model.num_parameters,
        "head_dim": model.config.head_dim,
        "qk_norm": model.config.qk_norm,
        "random_positions": phase.config.random_positions,
        "flops_per_token_full": flops.full,
        "flops_per_token_causal": flops.causal,
        "peak_flops": peak.flops,
        "peak_source": peak.source,
        "positional": encodings,
        "describe": describe(phase.schedule, phase.layers),
        "mixture": list(run.mixture),
        "tokenizer": run.config.data.tokenizer,
        "vocab_size": model.config.vocab_size,
        "lineage": lineage,
    }
