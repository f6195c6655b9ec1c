"""The files of a run: run.json, and for each phase its logs, phase.json and the metadata of its checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from pe_lab.checkpoints.store import metadata_of
from pe_lab.config import to_json
from pe_lab.identity import config_hash, versions
from pe_lab.model import Flops
from pe_lab.positional import describe, label
from pe_lab.positional.codec import ranges
from pe_lab.storage import AnyPath, AppendedLog, salvage_records, write_json
from pe_lab.storage.manifest import salvage_sealed, sealed
from pe_lab.storage.run_files import LOGS, PHASE_FILE, LogDigest, no_step
from pe_lab.terminal import console
from pe_lab.training.ledger import Ledger
from pe_lab.training.plan import PhasePlan
from pe_lab.training.run import Run
from pe_lab.training.trackers import Background


class PhaseLogs:
    """metrics.jsonl, speed.jsonl and spikes.jsonl of a phase, and its trackers. Only the first process writes."""

    def __init__(
        self,
        directory: AnyPath,
        resume_step: int,
        left_out: Collection[int] = (),
        expected: Mapping[str, Any] | None = None,
        trackers: Callable[[int], Sequence[Background]] = lambda skip: (),
    ):
        """Opens the logs, without the records after `resume_step`, and the trackers; see `trackers.Session.skip`.

        At step 0 no record is kept: the phase starts over, and logs step 0 again. Rewinds that left out batches of
        `left_out` stay, whatever their step: these batches are not met again. If metrics.jsonl is not what `digest`
        was when the checkpoint was saved (`expected`), a line says so.
        """
        self._digest, self.reached = LogDigest(), -1  # the highest step that was logged before
        self._logs: dict[str, AppendedLog] = {}
        self._directory = directory
        self._trackers: Sequence[Background] = ()
        if jax.process_index() != 0:
            return

        def stays(record: Mapping[str, Any]) -> bool:
            if record.get("event") == "rewind":
                return set(record.get("batches", [record.get("batch")])) <= set(left_out)
            return resume_step > 0 and record["step"] <= resume_step

        for name in LOGS:
            path = directory / f"{name}.jsonl"
            records = salvage_records(path, no_step, console().print)
            if name != "spikes" or records:
                kept = [record for record in records if stays(record)]
                self._logs[name] = AppendedLog(path, kept, waits=True)
                if name == "metrics":
                    self._digest.add(*kept)
                    self.reached = max((record["step"] for record in records), default=-1)
        if expected not in (None, self.digest):
            console().print(f"DAMAGED: {directory / 'metrics.jsonl'} is not what was logged up to step {resume_step}")
        # After a rewind, the steps that are trained again have other values.
        self._trackers = trackers(-1 if left_out else self.reached)

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends a record of one step to a log of `LOGS`; numbers of metrics and speed also go to the trackers."""
        if jax.process_index() != 0:
            return
        if name not in self._logs:  # spikes.jsonl exists where there was one
            self._logs[name] = AppendedLog(self._directory / f"{name}.jsonl", waits=True)
        self._logs[name].append(record)
        if name == "metrics":
            self._digest.add(record)
        if name == "spikes" or "event" in record:
            return
        numbers = {key: value for key, value in record.items() if key != "step" and _is_finite_number(value)}
        for tracker in self._trackers:
            tracker.write(record["step"], numbers)

    @property
    def digest(self) -> dict[str, Any]:
        """The size and the CRC-32C of metrics.jsonl, as JSON."""
        return self._digest.value

    def flush(self) -> None:
        """Returns when all records are on disk, or in the object store."""
        for log in self._logs.values():
            log.flush()
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Stores all records; the trackers end even if a log cannot be written."""
        with contextlib.ExitStack() as stack:  # which begins with what came last
            for one in (*self._trackers, *self._logs.values()):
                stack.callback(one.close)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# What the loop waits for. The rest of a step's time is the host's own: starting programs and writing logs.
WAITS = ("device", "input", "validation", "suites", "checkpoint")
_BUCKETS = {"input": "data_wait", "validation": "validation", "suites": "suites", "checkpoint": "save_blocking"}


class Speed:
    """How fast the steps of a session, which begins at `step`, are, and what the loop waits for.

    The loop starts a step before it waits for the metrics of the step before. As long as it waits for the device, the
    device has work, and the time of a step is the time of its computation; otherwise the device idles.
    """

    def __init__(self, ledger: Ledger, step: int, tokens_per_step: int, flops: Flops, peak: float):
        self._ledger, self._tokens_per_step, self._flops, self._peak = ledger, tokens_per_step, flops, peak
        self._began = self._timer = time.perf_counter()
        self._step = step
        self._waited: Counter[str] = Counter()

    @contextlib.contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Counts the time of the block as waiting for one of `WAITS`, and names it in a trace."""
        start = time.perf_counter()
        bucket = _BUCKETS.get(what)
        with (
            jax.profiler.TraceAnnotation(f"wait for {what}" if what in ("device", "input") else what),
            self._ledger.time(bucket) if bucket else contextlib.nullcontext(),
        ):
            yield
        self._waited[what] += time.perf_counter() - start

    def dispatch(self) -> contextlib.AbstractContextManager[None]:
        """The context in which to start a step. On a CPU, XLA may compute it in this thread: the time of the device."""
        return self.wait("device") if jax.default_backend() == "cpu" else contextlib.nullcontext()

    @property
    def seconds(self) -> float:
        """Since the start of the session."""
        return time.perf_counter() - self._began

    def begin(self, step: int) -> None:
        """Counts from now on: the steps up to `step` have compiled."""
        self._timer, self._step = time.perf_counter(), step
        self._waited.clear()

    def split(self, steps: int, seconds: float) -> dict[str, float]:
        """Seconds of one step by part, of `steps` that took `seconds` since the previous call: WAITS and host."""
        parts = {what: self._waited[what] / steps for what in WAITS}
        self._waited.clear()
        return parts | {"host": max(0.0, seconds / steps - sum(parts.values()))}

    def record(self, step: int, tokens: int, cells: int = 1, at_once: bool = False) -> dict[str, Any] | None:
        """The speed of the steps since the last record; None as long as they took less than a second, unless `at_once`.

        `tokens` were read in the phase so far. The steps were computed with those of other `cells`, if there are more
        than one: the time is that of all, the tokens and the FLOPs are this one's.
        """
        seconds, steps = time.perf_counter() - self._timer, step - self._step
        if seconds <= 1.0 and not at_once:
            return None
        split, rate = self.split(steps, seconds), steps * self._tokens_per_step / seconds
        flops, peak = self._flops, self._peak
        self._timer, self._step = self._timer + seconds, step
        return {
            "step": step,
            "tokens": tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(rate, 1),
            "mfu_full": round(rate * flops.full / peak, 4) if peak else None,
            "mfu_causal": round(rate * flops.causal / peak, 4) if peak else None,
            **({"cells": cells} if cells > 1 else {}),
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


def validation_text(losses: Mapping[str, float]) -> str:
    """`, validation 3.4193`, to follow a training loss; empty where nothing was validated."""
    return f", validation {losses['validation_loss']:.4f}" if "validation_loss" in losses else ""


def write_phase(
    run: Run,
    phase: PhasePlan,
    flops: Flops,
    lineage: Sequence[Mapping[str, Any]],
    status: str,
    started: int,
    seconds: float,
) -> None:
    """Writes phase.json, with its own digest, for the report: of a session from step `started` on.

    `flops` is per token, `lineage` of the checkpoint that was read or saved last, `status` running or complete.
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
        "peak_flops": run.peak.flops or None,
        "peak_source": run.peak.source,
        "positional": encodings,
        "describe": describe(phase.schedule, phase.layers),
        "packing": run.config.data.packing,
        "mixture": list(run.mixtures[phase.index]),
        "tokenizer": run.config.data.tokenizer,
        "vocab_size": model.config.vocab_size,
        "lineage": lineage,
    }
    write_json(run.workdir / phase.name / PHASE_FILE, sealed(record))


def mark_complete(directory: AnyPath, expected: Mapping[str, Any] | None = None) -> bool:
    """Sets the status in phase.json of a process that died before; returns whether there is a whole phase.json.

    Damaged logs are set aside, and metrics.jsonl is compared with its digest in the last checkpoint, `expected`.
    """
    path, record = directory / PHASE_FILE, {"status": "complete"}
    if jax.process_index() == 0:
        logs = {}
        for name in LOGS:
            told: list[str] = []
            logs[name] = salvage_records(directory / f"{name}.jsonl", no_step, told.append)
            if told:
                console().print(told[0])
                AppendedLog(directory / f"{name}.jsonl", logs[name]).close()
        record = salvage_sealed(path, console().print)
        found = LogDigest()
        found.add(*logs["metrics"])
        if expected not in (None, found.value):
            console().print(f"DAMAGED: {directory / 'metrics.jsonl'} is not what was logged")
        if record and record.get("status") != "complete":
            write_json(path, sealed({**record, "status": "complete"}))
    return bool(record)


def checkpoint_metadata(
    run: Run,
    phase: PhasePlan,
    lineage: Sequence[Mapping[str, Any]],
    tokens: int,
    data_state: Mapping[str, Any] | None,
    stability: Mapping[str, Any] | None = None,
    log: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The metadata of a checkpoint of `phase`, whose id and step are in the last entry of `lineage`.

    `tokens` were read in the phase so far, `stability` is the state of its `Monitor`, `log` that of metrics.jsonl.
    """
    model, seed, step = run.models[phase.index].config, run.config.seed, lineage[-1]["step"]
    return metadata_of(
        model,
        phase.layers,
        id=lineage[-1]["id"],
        run=run.config.name,
        phase=phase.name,
        phase_index=phase.index,
        step=step,
        tokens=tokens,
        training_length=phase.config.sequence_length,
        config=to_json(run.config),
        config_hash=config_hash(run.config),
        lineage=lineage,
        mixture=list(run.mixtures[phase.index]),
        tokenizer=run.tokenizer.fingerprint,
        vocab_size=model.vocab_size,
        versions=versions(),
        data_state=data_state,
        stability=stability,
        log=log,
        random={"seed": seed, "key": jax.random.key_data(jax.random.key(seed)).tolist()},
    )
