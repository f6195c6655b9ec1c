"""The models, the sequences and the options of one call of `pe_lab.analyze`, and what is measured on them."""

from __future__ import annotations

import argparse
import functools
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from pe_lab.analysis.analysis import Parts
from pe_lab.analysis.sequences import Sequences, open_sequences, parse_heads, parse_numbers
from pe_lab.errors import ConfigError
from pe_lab.evaluation.command_line import parse_variants
from pe_lab.evaluation.scoring.forward import BATCH_TOKENS, BATCH_TOKENS_ELSEWHERE
from pe_lab.evaluation.targets import EvaluationTarget, load_subjects, locate_all, parse_steps
from pe_lab.evaluation.variants import Subject, Variant, all_variants, model_name
from pe_lab.identity import machine, versions
from pe_lab.language_model import LanguageModel
from pe_lab.parallel import first_then_others, shared
from pe_lab.positional import label_layers
from pe_lab.results.findings import Arrays
from pe_lab.results.records import digest
from pe_lab.storage import AnyPath, check_place
from pe_lab.terminal import Progress, bounded, console

# (model, B of the sequences) -> arrays with a leading axis of B
Measure = Callable[[LanguageModel, Sequences], Arrays]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose models."""
    add = parser.add_argument
    add("--from", dest="source", metavar="RUN[,RUN...]", help="runs, phases, checkpoints, hf:DIR, gguf:FILE")
    add("--steps", help="checkpoints of each phase: all that are kept, or of steps 8000,14000 (default: the last)")
    add("--variants", help="of as-trained, pi, ntk, yarn, beta, paper-beta, dropped (default: as-trained)")
    add(
        "--positional",
        action="append",
        default=[],
        metavar="[NAME:]ENCODING",
        help="the weights under another encoding, such as yarn:factor=2; repeatable",
    )
    add(
        "--init",
        type=bounded(int, 1, 1000),
        metavar="N",
        help="N random initializations of the shape, instead of the weights",
    )
    add("--again", action="store_true", help="measure again what was measured before")


@dataclass
class AnalysisSession:
    """One analysis of some models on some sequences.

    Attributes:
      analysis: its name.
      arguments: of the command line.
      out: the directory of the results. Its folder `parts` holds what was measured, so that an analysis that was ended
        goes on where it was.
      variants: the models: each checkpoint under each encoding.
      names: of the variants, all different.
    """

    analysis: str
    arguments: argparse.Namespace
    out: AnyPath
    variants: list[Variant]
    names: list[str]
    begun: float = field(default_factory=time.monotonic)
    reused: int = 0

    @functools.cached_property
    def parts(self) -> Parts:
        return Parts(self.out / "parts", self.arguments.again)

    @functools.cached_property
    def sequences(self) -> Sequences:
        """The sequences of the command line, in the tokens of the first checkpoint."""
        first = self.variants[0]
        for variant in self.variants:
            mine, other = variant.lm.tokenizer, first.lm.tokenizer
            if (mine and mine.fingerprint) != (other and other.fingerprint):
                raise ConfigError(
                    f"{variant.subject.path} and {first.subject.path} have different tokenizers, so they cannot be "
                    "measured on the same sequences. Analyze them one at a time."
                )
        return first_then_others(lambda: open_sequences(self.arguments, first.subject))

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.sequences.length

    def layers(self, lm: LanguageModel) -> tuple[int, ...]:
        """The layers that `--layers` names."""
        return parse_numbers("--layers", self.arguments.layers, lm.config.layers, "layer")

    def heads(self, lm: LanguageModel) -> list[tuple[int, int]] | None:
        """(layer, head) of each head that `--heads` names; None without the flag. Call it before measuring."""
        given = self.arguments.heads
        return None if given is None else parse_heads(given, self.layers(lm), lm.config.heads)

    def measure(
        self, protocol: str, measure: Measure, settings: Any = None, sequences: Sequences | None = None
    ) -> list[dict[str, np.ndarray]]:
        """For each variant, the arrays of `measure`, with a leading axis over all sequences.

        What was measured before is read from its part; the others are measured in groups (`sequence_groups`).

        Args:
          protocol: name and version of the measurement; a part of its identity.
          settings: JSON on which the results depend, beside weights, encodings and sequence.
        """
        sequences = self.sequences if sequences is None else sequences
        models = [variant.at(sequences.length) for variant in self.variants]
        identities = [
            [
                {
                    "protocol": protocol,
                    "checkpoint": variant.subject.id,
                    "encodings": variant.fingerprint(sequences.length),
                    "sequence": one,
                    "length": sequences.length,
                    "settings": settings,
                }
                for one in sequences.digests
            ]
            for variant in self.variants
        ]
        known = self.parts.find_all([identity for of_variant in identities for identity in of_variant])
        self.reused += len(known)
        planned, groups = set(known), []
        for v, lm in enumerate(models):
            missing = [i for i, identity in enumerate(identities[v]) if digest(identity) not in planned]
            planned |= {digest(identities[v][i]) for i in missing}
            groups += [(v, indices, count) for indices, count in sequence_groups(lm, missing, sequences.length)]

        def measured(chosen: Iterable[tuple[int, list[int], int]]) -> Iterator[list[dict[str, np.ndarray]]]:
            for v, indices, count in chosen:
                arrays = {key: np.asarray(x) for key, x in measure(models[v], sequences.batch(indices)).items()}
                yield [{key: value[place] for key, value in arrays.items()} for place in range(count)]

        total = len(self.variants) * len(sequences)
        done = total - sum(count for *_, count in groups)
        with self.progress(self.analysis, total) as progress:
            progress.found(done)
            for (v, indices, count), parts in zip(groups, shared(groups, measured), strict=True):
                for i, part in zip(indices, parts, strict=False):
                    known[digest(identities[v][i])] = part
                    self.parts.put(identities[v][i], part)
                done += count
                progress.update(done, f"{done} of {total} sequences", f"{self.analysis}: {self.names[v]}")
        found = []
        for of_variant in identities:
            whole = [known[digest(identity)] for identity in of_variant]
            found.append({key: np.stack([part[key] for part in whole]) for key in whole[0]})
        return found

    def progress(self, name: str, total: float) -> Progress:
        """A progress bar in a terminal, elsewhere a line every ten seconds."""
        return Progress(console(), name, total)

    def about(self) -> dict[str, Any]:
        """How the numbers were made, for `analysis.json`."""
        checkpoints = []
        for variant, name in zip(self.variants, self.names, strict=True):
            record = variant.record(None)
            lineage, layers = variant.subject.lineage, label_layers(variant.layers)
            record.update(name=name, layers=layers, lineage=lineage, path=str(variant.subject.checkpoint.path))
            checkpoints.append({key: value for key, value in record.items() if value is not None})
        used = "sequences" in vars(self)
        return {
            "models": checkpoints,
            "sequences": self.sequences.name if used else None,
            "length": self.sequences.length if used else None,
            **footprint(self.begun),
            "parts_reused": self.reused,
            "machine": machine(),
            "versions": versions(),
        }


def footprint(begun: float) -> dict[str, Any]:
    """Seconds since `begun`, and the peak of memory so far: of the process, and of the first accelerator."""
    # ru_maxrss is in KiB on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found = {"seconds": round(time.monotonic() - begun, 1), "peak_memory_gib": round(peak / 2**30, 2)}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        found["peak_device_memory_gib"] = round(stats["peak_bytes_in_use"] / 2**30, 2)
    return found


def open_session(analysis: str, arguments: argparse.Namespace, out: AnyPath | None) -> AnalysisSession:
    """The session of a command line.

    Raises:
      UserError: no checkpoint, or an encoding that is impossible for it.
    """
    if not arguments.source:
        raise ConfigError(f"{analysis} needs a model: --from=RUN, a checkpoint, hf:DIR or gguf:FILE.")
    steps = None if arguments.steps is None else parse_steps(arguments.steps)
    names = None if arguments.variants is None else parse_variants(arguments.variants)
    if names and "cropped" in names:
        raise ConfigError("--variants=cropped reads shorter sequences: give a shorter --length instead.")
    targets = locate_all(arguments.source, steps)
    where = targets[0].root / "analysis" / analysis if out is None else out
    check_place("--out", where)  # before what may take minutes
    subjects = [subject for target in targets for subject in _subjects(target, arguments.init)]
    variants = all_variants(subjects, names, arguments.positional)
    if arguments.init is not None:
        variants = list(map(named_by_encoding, variants))
    if out is None:
        targets[0].write_marker()
    return AnalysisSession(analysis, arguments, where, variants, distinct_names(variants, len(targets) > 1))


def _subjects(target: EvaluationTarget, seeds: int | None) -> list[Subject]:
    """The checkpoints of a target, each once; with `seeds`, random weights of the shape of each."""
    found = load_subjects(target, target.paths)
    found = [one for n, one in enumerate(found) if one.id not in {before.id for before in found[:n]}]
    if seeds is None:
        return found
    shapes = {repr((one.lm.config, one.lm.layers)): one for one in found}
    return [
        Subject(one.lm.initialized(seed), one.run, f"initialization {seed}")
        for one in shapes.values()
        for seed in range(seeds)
    ]


def named_by_encoding(variant: Variant) -> Variant:
    """A variant of random weights with the name of its encoding alone: they were trained with no other."""
    label = variant.label.removeprefix(f"{variant.subject.model} with ")
    return replace(variant, label=model_name(variant.layers) if label in (variant.label, variant.name) else label)


def distinct_names(variants: Sequence[Variant], several: bool) -> list[str]:
    """Names of variants: their labels, with run, phase and step, where needed to tell them apart."""

    def named(variant: Variant, parts: int) -> str:
        subject = variant.subject
        more = [subject.run if several else "", subject.path if parts else ""]
        more = [part.replace("/checkpoints/", " ") for part in more if part]
        return variant.label + (f" ({', '.join(more)})" if more else "")

    names = [named(variant, 0) for variant in variants]
    names = [named(v, 1) if names.count(name) > 1 else name for v, name in zip(variants, names, strict=True)]
    return [f"{name} #{n}" if names.count(name) > 1 else name for n, name in enumerate(names)]


def sequence_groups(
    lm: LanguageModel, indices: Sequence[int], length: int, most: int | None = None
) -> Iterator[tuple[list[int], int]]:
    """Groups of sequences that are measured at once, and how many of a group count.

    A group has as many as fit a CPU's caches, or an accelerator's memory, and no more than `most` on each device. Its
    last sequence is repeated until they divide over the devices.
    """
    shards = 1 if lm.mesh is None else lm.mesh.shape["data"]
    tokens = BATCH_TOKENS.get(jax.default_backend(), BATCH_TOKENS_ELSEWHERE)
    size = shards * min(max(1, tokens // length), most or length)
    for start in range(0, len(indices), size):
        group = list(indices[start : start + size])
        yield group + group[-1:] * (-len(group) % shards), len(group)
