"""Perplexity of every document by itself, from its first token: a record for each, and their mean."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from pe_lab.data.sources import open_source
from pe_lab.errors import ConfigError, DataError
from pe_lab.evaluation.progress import TokenProgress
from pe_lab.evaluation.suite import Runner, Suite, SuiteMetric, option, read_settings
from pe_lab.evaluation.suites.perplexity import standard_error
from pe_lab.results.records import Record, RecordFile, SampleFile, SampleRecord, announced, digest, finite, sample_key
from pe_lab.storage import AnyPath
from pe_lab.terminal import console, positive

if TYPE_CHECKING:
    from pe_lab.data.sources.source import DataSource
    from pe_lab.evaluation.scoring.likelihood import Likelihoods
    from pe_lab.evaluation.session import EvaluationSession
    from pe_lab.evaluation.variants import Variant


@dataclass(frozen=True)
class DocumentSettings:
    samples: int | None = option(None, "documents, from the first (default: all)", positive)


class Documents(Suite):
    name = "documents"
    title = "Perplexity of documents"
    metrics = (SuiteMetric("perplexity", "perplexity", higher_is_better=False, interval="log"),)
    arrangement = "lengths"
    settings = DocumentSettings

    def runner(self) -> Runner:
        return open_documents


SUITE = Documents()
_PROTOCOL = f"{SUITE.name}-{SUITE.protocol}"
TOGETHER = 32  # documents measured before their records are written


class DocumentMeasurement:
    """Measures the perplexities of a source's documents, in windows of each length.

    A document of more than `length` + 1 tokens is split into windows that share one token; a window has no context
    before it. The first token of a document is not scored, and a document of one token is left out.

    Args:
      count: the number of documents, from the first. None: all.
      directory: `samples/documents.jsonl` gets a record for each document, `documents.jsonl` one for each variant and
        length.
      again: whether documents that were measured before are measured again.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        source: DataSource,
        lengths: Sequence[int],
        directory: AnyPath,
        count: int | None = None,
        again: bool = False,
    ):
        self._variants, self._source, self._lengths, self._count, self._again = variants, source, lengths, count, again
        self._file = SampleFile(directory / "samples" / f"{SUITE.name}.jsonl")
        self._result_file = RecordFile(directory / f"{SUITE.name}.jsonl")
        self._settings = digest([source.identity(), _PROTOCOL])

    def run(self) -> list[Record]:
        """A record of each variant and length.

        Raises:
          ConfigError: a cropped variant.
          DataError: a variant has no tokenizer, or no document has two tokens.
        """
        out, results = console(), []
        out.print(f"Documents of {self._source.name} for {', '.join(variant.label for variant in self._variants)}")
        pairs = list(itertools.product(self._variants, self._lengths))
        planned = announced(self._result_file.path.parent, [self._name(*pair) for pair in pairs])
        with planned, TokenProgress("documents") as progress:
            for variant, length in pairs:
                if variant.crop is not None:
                    raise ConfigError(
                        "--variants=cropped: windows of documents are cropped already. Give --lengths=1x instead."
                    )
                records = list(self._records(variant, length, progress))
                if not records:
                    raise DataError(
                        f"{self._source.name} has no document of two tokens or more; there is nothing to measure."
                    )
                results.append(self._summary(variant, length, records))
                self._result_file.put(results[-1:])
        if progress.read:
            out.print(progress.speed())
        out.print(f"Documents: {self._file.path}")
        return results

    def _name(self, variant: Variant, length: int) -> Record:
        """The keys of a result record that tell what it measures."""
        return {"suite": SUITE.name, "source": self._source.name, **variant.record(length)}

    def _records(self, variant: Variant, length: int, progress: TokenProgress) -> Iterator[SampleRecord]:
        """The records of all documents with a scored token. New ones are measured and written, TOGETHER at a time."""
        lm, file = variant.at(length), self._file
        if lm.tokenizer is None:
            raise DataError(f"{lm.checkpoint.path} has no tokenizer, so documents cannot be read.")
        from pe_lab.evaluation.scoring.likelihood import Likelihoods  # which imports JAX

        measure = Likelihoods(lm)
        identity = {
            "checkpoint_id": variant.subject.id,
            "fingerprint": variant.fingerprint(length),
            "suite": SUITE.name,
            "task": "document",
            "length": length,
            "settings": f"{self._settings}-{lm.tokenizer.fingerprint}",
        }
        if self._again:
            number = sum(1 for _ in itertools.islice(self._source.documents(), self._count))
            file.forget([sample_key(identity | {"index": index}) for index in range(number)])
        documents = enumerate(itertools.islice(self._source.documents(), self._count))
        while part := list(itertools.islice(documents, TOGETHER)):
            if any(document.messages for _, document in part):
                raise ConfigError(f"{self._source.name} is of chats; documents are measured where they are texts.")
            identities = {index: identity | {"index": index} for index, _ in part}
            if any(sample_key(record) not in file.records for record in identities.values()):
                ids = {
                    index: np.asarray(lm.tokenizer.encode_prompt(document.text), np.int32) for index, document in part
                }
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
                        **variant.sample_record(length),
                        "protocol": _PROTOCOL,
                        "seconds": seconds,
                    }
                    new.append(finite(identities[index] | measured))
                file.add(new)
                progress.add(sum(map(len, ids.values())))
            stored = [file.records[sample_key(record)] for record in identities.values()]
            yield from (record for record in stored if record["scored"])

    def _summary(self, variant: Variant, length: int, records: Sequence[SampleRecord]) -> Record:
        """The result record: mean loss of all tokens, its standard error over documents, and means over documents."""
        from pe_lab.identity import versions

        scored = np.asarray([record["scored"] for record in records], np.float64)
        losses = np.asarray([record["nll"] for record in records], np.float64)
        mean = float((scored * losses).sum() / scored.sum())
        result: Record = {
            **self._name(variant, length),
            "settings": self._settings,
            "nll": mean,
            "perplexity": math.exp(mean) if mean < 700 else None,
            "stderr": standard_error((losses - mean) * scored, float(scored.sum())),
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


def open_documents(chosen: Mapping[Suite, Sequence[str]], session: EvaluationSession) -> DocumentMeasurement:
    """The documents of the text that a session names; see `Suite.runner`."""
    if session.arguments.text is None:
        raise ConfigError(f"--suite={SUITE.name} needs a text with documents: --text=SOURCE.")
    source, plan = open_source(session.data.sources[0]), session.plan
    count = read_settings(SUITE, plan.options).samples
    return DocumentMeasurement(session.variants, source, plan.lengths, session.out, count, plan.again)
