"""Perplexity of every document by itself, from its first token: a record for each, and their mean."""

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
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.scoring.likelihood import Likelihoods
from pe_lab.evaluation.tasks import perplexity
from pe_lab.evaluation.variants import Variant, summary
from pe_lab.results.records import Record, RecordFile, finite
from pe_lab.results.samples import SampleFile, SampleRecord, key
from pe_lab.training.machine import versions

PROTOCOL = "documents-1"
TOGETHER = 32  # documents measured before their records are written


def measure_documents(
    variants: Sequence[Variant],
    source: Source,
    lengths: Sequence[int],
    directory: Path,
    count: int | None = None,
    again: bool = False,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> list[Record]:
    """Perplexities of a source's documents, in windows of each length.

    A document of more than `length` + 1 tokens is split into windows that share one token; a window has no context
    before it. The first token of a document is not scored, and a document of one token is left out.

    Args:
      count: the number of documents, from the first. None: all.
      directory: `samples/documents.jsonl` gets a record for each document, `perplexity.jsonl` one for each variant and
        length.
      again: whether documents that were measured before are measured again.
      on_tokens: called with the number of tokens that were read.

    Raises:
      ConfigError: a cropped variant.
      DataError: a variant has no tokenizer, or no document has two tokens.
    """
    file, results = SampleFile(directory / "samples" / "documents.jsonl"), []
    result_file = RecordFile(directory / "perplexity.jsonl")
    settings = hashlib.sha256(json.dumps([source.identity(), PROTOCOL], sort_keys=True).encode()).hexdigest()[:12]
    for variant, length in itertools.product(variants, lengths):
        if variant.crop is not None:
            raise ConfigError("--methods=cropped: windows of documents are cropped already. Give --lengths=1x instead.")
        records = list(_records(variant, length, source, settings, count, file, again, on_tokens))
        if not records:
            raise DataError(f"{source.name} has no document of two tokens or more; there is nothing to measure.")
        results.append(_summary(variant, length, source.name, settings, records))
        result_file.put(results[-1:])
    return results


def _records(
    variant: Variant,
    length: int,
    source: Source,
    settings: str,
    count: int | None,
    file: SampleFile,
    again: bool,
    on_tokens: Callable[[int], None],
) -> Iterator[SampleRecord]:
    """The records of all documents with a scored token. New ones are measured and written, TOGETHER at a time."""
    lm = variant.at(length)
    if lm.tokenizer is None:
        raise DataError(f"{lm.checkpoint.path} has no tokenizer, so documents cannot be read.")
    measure = Likelihoods(lm)
    identity = {
        "checkpoint_id": variant.subject.id,
        "reading": variant.fingerprint(length),
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
        identities = {index: identity | {"index": index} for index, _ in part}
        if any(key(record) not in file.records for record in identities.values()):
            ids = {index: np.asarray(lm.tokenizer.encode_prompt(text), np.int32) for index, text in part}
            start = time.perf_counter()
            losses = _losses(measure, ids, length)
            seconds = (time.perf_counter() - start) / len(part)
            new = []
            for index, tokens in ids.items():
                nll, scored = losses[index], max(len(tokens) - 1, 0)
                measured = {
                    "tokens": len(tokens),
                    "scored": scored,
                    "nll": nll / scored if scored else None,
                    "perplexity": math.exp(nll / scored) if scored and nll / scored < 700 else None,
                    "run": variant.subject.run,
                    "checkpoint": variant.subject.path,
                    "label": variant.label,
                    "positional": summary(variant.layers_at(length)),
                    "lineage": variant.subject.lineage,
                    "protocol": PROTOCOL,
                    "seconds": seconds,
                }
                new.append(finite(identities[index] | measured))
            file.add(new)
            on_tokens(sum(map(len, ids.values())))
        stored = [file.records[key(record)] for record in identities.values()]
        yield from (record for record in stored if record["scored"])


def _losses(measure: Likelihoods, ids: dict[int, Int32[np.ndarray, " _"]], length: int) -> dict[int, float]:
    """The loss of each document, nats, summed over all its tokens but the first."""
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


def _summary(variant: Variant, length: int, name: str, settings: str, records: Sequence[SampleRecord]) -> Record:
    """The result record: mean loss of all tokens, its standard error over documents, and means over documents."""
    subject = variant.subject
    scored = np.asarray([record["scored"] for record in records], np.float64)
    losses = np.asarray([record["nll"] for record in records], np.float64)
    mean = float((scored * losses).sum() / scored.sum())
    factor = length / subject.training_length
    result: dict[str, Any] = {
        "suite": "perplexity",
        "source": f"{name}, each document by itself",
        "run": subject.run,
        "phase": subject.checkpoint.metadata.get("phase", ""),
        "checkpoint": subject.path,
        "checkpoint_id": subject.id,
        "step": subject.checkpoint.step,
        "tokens_trained": subject.tokens_trained,
        "model": subject.model,
        "method": variant.method,
        "label": variant.label,
        "length": length,
        "factor": int(factor) if factor.is_integer() else factor,
        "settings": settings,
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "stderr": perplexity.standard_error((losses - mean) * scored, float(scored.sum())),
        "tokens": int(scored.sum()),
        "windows": len(records),
        "documents": {
            "count": len(records),
            "mean_nll": float(losses.mean()),
            "median_perplexity": float(np.exp(np.minimum(np.median(losses), 700))),
        },
        "versions": versions(),
    }
    return finite(result)
