"""The files of a run: run.json, and for each phase its logs, phase.json and the metadata of its checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pe_lab.checkpoints.store import metadata_of
from pe_lab.config import Config, config_hash, from_dict, identity, to_json
from pe_lab.errors import ConfigError, UserError
from pe_lab.model import Flops
from pe_lab.positional import describe, label
from pe_lab.positional.codec import ranges
from pe_lab.storage import json_object, salvage_json, salvage_records, write_json, write_records
from pe_lab.terminal import console
from pe_lab.training.machine import Peak, machine, versions
from pe_lab.training.profiling import WAITS
from pe_lab.training.run import PhasePlan, Run


class PhaseLogs:
    """metrics.jsonl, speed.jsonl and the TensorBoard events of a phase. Only the first process writes them."""

    def __init__(self, directory: Path, resume_step: int):
        """Opens the logs, without the records after `resume_step`, whose steps are trained again.

        At step 0 no record is kept: the phase starts over, and logs step 0 again.
        """
        self._files, self._board = {}, None
        if jax.process_index() != 0:
            return
        from tensorboardX import SummaryWriter

        for name in ("metrics", "speed"):
            path = directory / f"{name}.jsonl"
            records = salvage_records(path, _no_step, console().print) if resume_step else ()
            write_records(path, [record for record in records if record["step"] <= resume_step])
            self._files[name] = path.open("a", encoding="utf-8")
        purge_step = resume_step + 1 if resume_step else 0
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step)

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends a record of one step to the log `name`, metrics or speed, and to TensorBoard."""
        if self._board is None:
            return
        self._files[name].write(json.dumps(record, ensure_ascii=False) + "\n")
        self._files[name].flush()
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._board.add_scalar(key, value, record["step"])

    def close(self) -> None:
        for writer in (*self._files.values(), self._board):
            if writer is not None:
                writer.close()


def _no_step(record: Mapping[str, Any]) -> str:
    """Why a record of a log cannot be placed; "" if it can."""
    step = record.get("step")
    return "" if isinstance(step, int) and not isinstance(step, bool) else "no step"


def speed_record(
    phase: PhasePlan,
    flops: Flops,
    peak: Peak,
    step: int,
    steps: int,
    seconds: float,
    total: float,
    split: Mapping[str, float],
) -> dict[str, Any]:
    """The speed of the last `steps` steps, which took `seconds`, `total` seconds after the start of the session.

    `split` has the seconds of a step by part, as `StepTimes.split`.
    """
    rate = steps * phase.tokens_per_step / seconds
    return {
        "step": step,
        "seconds": round(total, 3),
        "tokens_per_second": round(rate, 1),
        "mfu_full": round(rate * flops.full / peak.flops, 4) if peak.flops else None,
        "mfu_causal": round(rate * flops.causal / peak.flops, 4) if peak.flops else None,
        "step_seconds": round(seconds / steps, 6),
        **{f"{part}_seconds": round(part_seconds, 6) for part, part_seconds in split.items()},
    }


def speed_text(speed: Mapping[str, Any]) -> str:
    """The speed in a line: `41,200 tokens/s  MFU 40.1% full, 38.2% causal  device 97%, input 2%, host 1%`."""
    parts = [f"{speed['tokens_per_second']:,.0f} tokens/s"]
    if speed["mfu_full"]:
        parts.append(f"MFU {speed['mfu_full']:.1%} full, {speed['mfu_causal']:.1%} causal")
    shares = {part: speed[f"{part}_seconds"] / speed["step_seconds"] for part in (*WAITS, "host")}
    parts.append(", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005))
    return "  ".join(parts)


def write_phase(
    run: Run,
    phase: PhasePlan,
    flops: Flops,
    peak: Peak,
    lineage: Sequence[Mapping[str, Any]],
    status: str,
    started: int,
    seconds: float,
) -> None:
    """Writes phase.json, for the report.

    `flops` is per token, `peak` that of the machine, `lineage` of the checkpoint that was read or saved last, `status`
    running or complete; the session began at step `started` and took `seconds`.
    """
    if jax.process_index() != 0:
        return
    model = run.models[phase.index]
    encodings = []
    for encoding, equal in itertools.groupby(enumerate(phase.layers), key=lambda item: label(item[1])):
        places, layers = zip(*equal, strict=True)
        encodings.append({"layers": ranges(places), "encoding": encoding, "window": layers[0].window})
    record = {
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
        "peak_flops": peak.flops or None,
        "peak_source": peak.source,
        "positional": encodings,
        "describe": describe(phase.schedule, phase.layers),
        "mixture": list(run.mixture),
        "tokenizer": run.config.data.tokenizer,
        "vocab_size": model.config.vocab_size,
        "lineage": lineage,
    }
    write_json(run.workdir / phase.name / "phase.json", record)


def mark_complete(directory: Path) -> None:
    """Sets the status in phase.json of a process that died between its last checkpoint and this."""
    path = directory / "phase.json"
    if jax.process_index() == 0:
        record = salvage_json(path, console().print)
        if record and record.get("status") != "complete":
            write_json(path, {**record, "status": "complete"})


def checkpoint_metadata(
    run: Run, phase: PhasePlan, lineage: Sequence[Mapping[str, Any]], data_state: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The metadata of a checkpoint of `phase`, whose id and step are in the last entry of `lineage`."""
    model, seed, step = run.models[phase.index].config, run.config.seed, lineage[-1]["step"]
    return metadata_of(
        model,
        phase.layers,
        id=lineage[-1]["id"],
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


def claim_workdir(workdir: Path, config: Config) -> None:
    """Checks that a run of `config` may be written to `workdir`; writes nothing.

    Raises:
      ConfigError: it is a file, or a directory that holds a run of another config or anything else.
    """
    if not workdir.exists():
        return
    if not workdir.is_dir():
        raise ConfigError(f"--workdir '{workdir}' is a file; give a directory.")
    path = workdir / "run.json"
    if not path.exists():
        # A process that was killed while it wrote its first file leaves a temporary one.
        others = sorted(p.name for p in workdir.iterdir() if not p.name.startswith(".run.json."))
        if others:
            raise ConfigError(
                f"--workdir '{workdir}' holds {', '.join(others[:3])}{' ...' if len(others) > 3 else ''} and no "
                "run.json: it is not a run. Choose an empty or new directory."
            )
        return
    run = json_object(path.read_bytes()) or {}
    if not {"config_hash", "identity"} <= run.keys():
        raise ConfigError(f"--workdir '{workdir}': its run.json is not one of pe_lab. Choose another --workdir.")
    if run["config_hash"] == config_hash(config):
        return
    before, now = run["identity"], identity(config)
    with contextlib.suppress(UserError, KeyError):
        # Fields that the earlier version of pe_lab did not have get their defaults.
        before = identity(from_dict(Config, run["config"]))
    keys = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    if not keys:
        return
    shown = [f"{k}: {before.get(k, 'absent')} there, {now.get(k, 'absent')} here" for k in keys[:4]]
    raise ConfigError(
        f"--workdir '{workdir}' belongs to another config ({'; '.join(shown)}{'; ...' if len(keys) > 4 else ''}). "
        "Choose another --workdir, or delete that one."
    )


def write_run(workdir: Path, config: Config, command: str) -> None:
    """Writes run.json: the config, the versions and the machine. The date and command of the first session stay."""
    path = workdir / "run.json"
    before = salvage_json(path, console().print)
    run = {
        "name": config.name,
        "config_hash": config_hash(config),
        "command": before.get("command", command),
        "created": before.get("created", datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")),
        "versions": versions(),
        "machine": machine(),
        "notes": to_json(config.notes),
        "config": to_json(config),
        "identity": identity(config),
    }
    write_json(path, run)
