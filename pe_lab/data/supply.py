"""How often the data may be read: the epochs of each source, and the steps that they are enough for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Int64

from pe_lab.config import INT32, SourceConfig
from pe_lab.data.order import Order
from pe_lab.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True)
class Supply:
    """The sources of a mixture and their numbers of windows; 0: endless."""

    names: tuple[str, ...]
    configs: tuple[SourceConfig, ...]
    windows: tuple[int, ...]

    def epochs(self, read: Int[np.ndarray, " sources"]) -> Int64[np.ndarray, " sources"]:
        """The epochs that have begun of each source, of which so many windows are read; of endless ones 0."""
        sizes = np.asarray(self.windows)
        return np.where(sizes > 0, -(-read // np.maximum(sizes, 1)), 0)

    def _limit(self, source: int) -> float:
        """The windows of a source that a phase may read."""
        config = self.configs[source]
        if not self.windows[source] or not config.epochs or config.when_dry == "repeat":
            return math.inf
        return math.floor(config.epochs * self.windows[source])

    def _dry(self, source: int, when: str) -> DataError:
        epochs = self.configs[source].epochs
        return DataError(
            f"data source {self.names[source]!r} runs dry at {when}: epochs={epochs:g} of its "
            f"{self.windows[source]:,} windows are {self._limit(source):,}. Train for fewer steps, lower its weight, "
            "raise its epochs, or set its when_dry='repeat'."
        )

    def check_now(self, read: Int[np.ndarray, " sources"], step: int) -> None:
        """`DataError` if a step has read more than there may be."""
        for i, count in enumerate(read):
            if count > self._limit(i):
                raise self._dry(i, f"step {step}")

    def check(self, order: Order, done: int, index: int, steps: int) -> None:
        """`DataError` if a source runs dry in `steps` steps, of which `done` are done and batch `index` is the next."""
        found = []
        for i in range(len(self.names)):
            if self._limit(i) < math.inf and steps > done:
                batch = order.first_batch(i, int(self._limit(i)), index + steps - done - 1)
                found += [] if batch is None else [(batch, i)]
        if found:
            batch, source = min(found)
            raise self._dry(source, f"step {done + 1 + batch - index} of {steps}")

    def steps_of(self, order: Order, epochs: float | Mapping[str, Any]) -> int:
        """The most steps that read no source more than `epochs` times.

        `epochs` is a number, of every source that is not endless, or {name: number}.

        Raises:
          ConfigError: there is no such source, it is endless or never read so often, or has less than a batch.
        """
        finite = [name for name, size in zip(self.names, self.windows, strict=True) if size]
        wanted = epochs if isinstance(epochs, Mapping) else dict.fromkeys(finite, epochs)
        steps = []
        for name, number in wanted.items():
            if name not in finite:
                why = "is endless" if name in self.names else "does not exist"
                raise ConfigError(f"epochs names the data source {name!r}, which {why}. {did_you_mean(name, finite)}")
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= 10**6:
                raise ConfigError(f"epochs of data source {name!r} is {number!r}; it must be above 0, at most 10^6.")
            source = self.names.index(name)
            batch = order.first_batch(source, math.floor(number * self.windows[source]), INT32)
            steps += [] if batch is None else [batch]
        if not steps:
            sources = ", ".join(wanted) or "all sources are endless"
            raise ConfigError(f"epochs={epochs!r} is never reached ({sources}). Set steps, or a higher weight.")
        if min(steps) < 1:
            raise ConfigError(f"epochs={epochs!r} of the data is less than a batch of {order.batch_size} windows.")
        return min(steps)
