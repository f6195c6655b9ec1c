"""What was answered of the harness's requests: kept on disk a batch at a time, so that a task goes on where it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.results.samples import SampleFile, SampleRecord, key


@dataclass
class Used:
    """What the requests of one document came to: tokens of the longest, before and after cuts; seconds of all."""

    tokens: int = 0
    tokens_before_truncation: int = 0
    seconds: float = 0.0

    def add(self, other: Used) -> None:
        self.tokens = max(self.tokens, other.tokens)
        self.tokens_before_truncation = max(self.tokens_before_truncation, other.tokens_before_truncation)
        self.seconds += other.seconds


class Journal:
    """The answers of one measurement: of one reader, on what one name of a task stands for.

    Args:
      path: a file of lines; None keeps nothing.
      identity: what the answers depend on besides the requests: checkpoint_id, reading, suite, task, settings ...

    Attributes:
      found: answers that an earlier process gave.
      seconds: what they took then.
    """

    def __init__(self, path: Path | None = None, identity: Mapping[str, Any] | None = None):
        self._file = None if path is None else SampleFile(path)
        self._identity = dict(identity or {})
        self.found, self.seconds = 0, 0.0

    def plan(self, kind: str, requests: Sequence[Any]) -> Plan:
        """All requests of a call, of which some may be answered.

        What a batch holds follows from all requests, and so may the last digits of its answers: they are taken for
        a request at the same place among the same requests only.

        Args:
          kind: the method that was called, such as `generate_until`.
          requests: what each asks, as it is given to the model: tokens, stop strings, the seed of draws. Their `repr`
            says it all.
        """
        digests = [hashlib.sha256(repr(request).encode()).hexdigest()[:16] for request in requests]
        whole = hashlib.sha256("".join([kind, *digests]).encode()).hexdigest()[:16]
        plan = Plan(self._identity | {"kind": kind}, whole, digests, self._file)
        self.found += len(plan.answers)
        self.seconds += sum(plan.seconds.values())
        return plan


class Plan:
    """The requests of a call.

    Attributes:
      answers: by place, as far as they are known.
      seconds: that each took.
    """

    def __init__(self, identity: Mapping[str, Any], whole: str, digests: Sequence[str], file: SampleFile | None):
        self._identity, self._whole, self._digests, self._file = identity, whole, digests, file
        self.answers: dict[int, Any] = {}
        self.seconds: dict[int, float] = {}
        for place in range(len(digests)) if file is not None and file.records else ():
            if (kept := file.records.get(key(self._line(place)))) is not None:
                self.answers[place], self.seconds[place] = kept["answer"], kept["seconds"]

    def _line(self, place: int) -> SampleRecord:
        return {**self._identity, "request": self._digests[place], "index": f"{self._whole}:{place}"}

    def answered(self, places: Iterable[int]) -> bool:
        return all(place in self.answers for place in places)

    def put(self, answers: Mapping[int, Any], seconds: float) -> None:
        """The answers of a batch, which took so many seconds; on return they are on disk. The first answer stays."""
        new = {place: answer for place, answer in answers.items() if place not in self.answers}
        self.answers |= new
        self.seconds |= dict.fromkeys(new, seconds / len(answers))
        if self._file is not None:
            more = [{"answer": answer, "seconds": self.seconds[place]} for place, answer in new.items()]
            self._file.add([self._line(place) | rest for place, rest in zip(new, more, strict=True)])
