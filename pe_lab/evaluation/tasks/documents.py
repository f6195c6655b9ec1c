"""Perplexity of every document by itself, read from its first token on: a line each, and their mean."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from pe_lab.data.sources import Source
from pe_lab.errors import UserError
from pe_lab.evaluation.scoring.likelihood import Likelihoods
from pe_lab.evaluation.tasks import perplexity
from pe_lab.evaluation.variants import Variant, summary
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, SampleRecord, key
from pe_lab.training.machine import versions

PROTOCOL = "documents-1"
TOGETHER = 32  # documents measured before their lines are written


def measure_documents(
    readers: Sequence[Variant],
    source: Source,
    lengths: Sequence[int],
    directory: Path,
    count: int | None = None,
    again: bool = False,
    heard: Callable[[int], None] = lambda tokens: None,
) -> list[Record]:
    """Perplexities of the source's documents, in windows of each length.

    A document of more than `length` + 1 tokens is read in windows that share one token, each without what was before
    it; a document's first token is given, and a text of one token is passed over.

    Args:
      count: of the first so many documents. None: of all.
      directory: `samples/documents.jsonl` gets a line a document, `perplexity.jsonl` a row a reader and length.
      heard: is told of tokens as they are read.

    Raises:
      UserError: a reader has no tokenizer, or no document has two tokens.
    """
    file, rows = SampleFile(directory / "samples" / "documents.jsonl"), []
    summary = RecordFile(directory / "perplexity.jsonl")
    settings = hashlib.sha256(json.dumps([source.identity(), PROTOCOL], sort_keys=True).encode()).hexdigest()[:12]
    for reader, length in itertools.product(readers, lengths):
        if reader.crop is not None:
            raise UserError("--methods=cropped: windows of documents are cropped texts. Give --lengths=1x instead.")
        lines = [line for line in _lines(reader, length, source, settings, count, file, again, heard)]
        if not lines:
            raise UserError(f"{source.name} has no document of two tokens or more; there is nothing to measure.")
        rows.append(_summary(reader, length, source.name, settings, lines))
        summary.put(rows[-1:])
    return rows


def _lines(
    reader: Variant,
    length: int,
    source: Source,
    settings: str,
    count: int | None,
    file: SampleFile,
    again: bool,
    heard: Callable[[int], None],
) -> Iterator[SampleRecord]:
    """The lines of all documents, those that are not there yet measured and written, some at a time."""
    lm = reader.at(length)
    if lm.tokenizer is None:
        raise UserError(f"{lm.checkpoint.path} came without a tokenizer, so documents cannot be read.")
    measure = Likelihoods(lm)
    identity = {
        "checkpoint_id": reader.subject.id,
        "reading": reader.fingerprint(length),
        "suite": "perplexity",
        "task": "document",
        "length": length,
        "settings": f"{settings}-{lm.tokenizer.fingerprint}",
    }
    if again:
        number = sum(1 for _ in itertools.islice(source.documents(), count))
        file.forget([key(identity | {"index": index}) for index in range(number)])
    documents = enumerate(itertools.islice(source.documents(), count))
    while part := list(itertools.islice(documents, TOGETHER)):
        named = {index: identity | {"index": index} for index, _ in part}
        if any(key(line) not in file.records for line in named.values()):
            ids = {index: np.asarray(lm.tokenizer.encode_prompt(text), np.int32) for index, text in part}
            start = time.perf_counter()
            losses = _losses(measure, ids, length)
            seconds = (time.perf_counter() - start) / len(part)
            new = []
            for index, tokens in ids.items():
                nll, scored = losses[index], max(len(tokens) - 1, 0)
                told = {
                    "tokens": len(tokens),
                    "scored": scored,
                    "nll": nll / scored if scored else None,
                    "perplexity": math.exp(nll / scored) if scored and nll / scored < 700 else None,
                    "run": reader.subject.run,
                    "checkpoint": reader.subject.path,
                    "label": reader.label,
                    "positional": summary(reader.layers_at(length)),
                    "lineage": reader.subject.lineage,
                    "protocol": PROTOCOL,
                    "seconds": seconds,
                }
                new.append(finite(named[index] | told))
            file.add(new)
            heard(sum(map(len, ids.values())))
        kept = [file.records[key(line)] for line in named.values()]
        yield from (line for line in kept if line["scored"])


def _losses(measure: Likelihoods, ids: dict[int, Int32[np.ndarray, " _"]], length: int) -> dict[int, float]:
    """Nats paid for all tokens of each document but its first."""
    pairs, owners = [], []
    for index, tokens in ids.items():
        for start in range(0, len(tokens) - 1, length):
            window = tokens[start : start + length + 1].tolist()
            pairs.append((window[:1], window[1:]))
            owners.append(index)
    totals = dict.fromkeys(ids, 0.0)
    for pair, likelihood in sorted(measure(pairs)):
        totals[owners[pair]] -= likelihood.total
    return totals


def _summary(reader: Variant, length: int, name: str, settings: str, lines: Sequence[SampleRecord]) -> Record:
    """The mean loss of all tokens, its standard error over documents, and the documents' own perplexities."""
    subject = reader.subject
    scored = np.asarray([line["scored"] for line in lines], np.float64)
    losses = np.asarray([line["nll"] for line in lines], np.float64)
    mean = float((scored * losses).sum() / scored.sum())
    factor = length / subject.training_length
    row: dict[str, Any] = {
        "suite": "perplexity",
        "source": f"{name}, each document by itself",
        "run": subject.run,
        "phase": subject.checkpoint.metadata.get("phase", ""),
        "checkpoint": subject.path,
        "checkpoint_id": subject.id,
        "step": subject.checkpoint.step,
        "tokens_trained": subject.tokens_trained,
        "model": subject.model,
        "method": reader.method,
        "label": reader.label,
        "length": length,
        "factor": int(factor) if factor.is_integer() else factor,
        "settings": settings,
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "stderr": perplexity.standard_error((losses - mean) * scored, float(scored.sum())),
        "tokens": int(scored.sum()),
        "windows": len(lines),
        "documents": {
            "count": len(lines),
            "mean_nll": float(losses.mean()),
            "median_perplexity": float(np.exp(np.minimum(np.median(losses), 700))),
        },
        "versions": versions(),
    }
    return finite(row)
