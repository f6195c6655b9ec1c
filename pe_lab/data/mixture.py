"""The data of a config: the tokenizer, the shards of every source, their common vocabulary, and their weights.

What is not prepared is prepared into the cache, once: process 0 writes, and the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pe_lab import storage
from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.chat import chat_fingerprint
from pe_lab.data.filters import text_of
from pe_lab.data.grain_data import GrainIteration, GrainSource
from pe_lab.data.needles import NeedleOptions, NeedleWindows, place_symbols
from pe_lab.data.packing import Packing, pack
from pe_lab.data.preparation import building_directory, digest_of, prepare
from pe_lab.data.shard_preparation import WORK
from pe_lab.data.shards import METADATA_FILE, Prepared, open_prepared
from pe_lab.data.sources import open_source
from pe_lab.data.tokenizers import (
    KIND_FILE,
    Tokenizer,
    load_saved_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
    training_size,
)
from pe_lab.data.windows import PackedWindows, TokenWindows, Windows
from pe_lab.errors import ConfigError, DataError, did_you_mean, redacted, resource
from pe_lab.storage import is_file, is_remote, new_directory, unfinished

PATIENCE_SECONDS = 600  # without a change in the directory, until a waiting process gives up
OPENED_HERE = ("needles", "prepared", "grain")  # the kinds of sources that are no corpus of documents


@dataclass(frozen=True)
class MixtureSource:
    """One open source: prepared text, needles with the first id of their symbols, or a person's Grain dataset."""

    name: str
    config: SourceConfig
    packing: str  # of the config
    prepared: Prepared | None
    needles: NeedleOptions | None
    grain: GrainSource | None
    offset_vocab: int = 0

    @property
    def weight(self) -> float:
        return float(self.config.weight)

    @property
    def fingerprint(self) -> Any:
        """JSON that is equal for equal windows."""
        if self.needles is not None:
            return ["needles", *(f"{k}={v}" for k, v in vars(self.needles).items())]
        if self.grain is not None:
            return ["grain", self.grain.address.rpartition("/")[2]]
        return self.prepared.metadata.fingerprint

    def tokens(self, split: str) -> int | None:
        """The number of tokens of a split; None where it is not known: of needles, and of Grain datasets."""
        return None if self.prepared is None else self.prepared.metadata.tokens[split]

    def windows(self, length: int, seed: int, split: str) -> Windows | GrainIteration | None:
        """The windows of T = `length` tokens of a split; None: a Grain dataset has none.

        Needles, best-fit packing and Grain datasets depend on the seed.
        """
        if self.needles is not None:
            return NeedleWindows(self.needles, length, seed, split, self.offset_vocab)
        if self.grain is not None:
            return self.grain.open(split, seed, length)
        stream = self.prepared.streams[split]
        if self.packing == "concatenate":
            return TokenWindows(stream, length)
        plan = _plan(_Documents((self.fingerprint, split), stream.ends), length, seed)
        return PackedWindows(stream, plan, self.prepared.metadata.eos_id)


@dataclass(frozen=True)
class _Documents:
    """Where the documents of a split end; equal for equal data."""

    key: tuple[Any, ...]
    ends: np.ndarray = dataclasses.field(compare=False)


@functools.lru_cache(8)
def _plan(documents: _Documents, length: int, seed: int) -> Packing:
    """The packing of a split. A run opens its data more than once, and a plan of many documents takes seconds."""
    return pack(documents.ends, length, seed)


@dataclass(frozen=True)
class Mixture:
    """The open sources of a config."""

    tokenizer: Tokenizer
    sources: tuple[MixtureSource, ...]
    vocab_size: int  # of the tokenizer, plus the symbols of needles


def open_mixture(config: DataConfig, process_index: int = 0, vocab_size: int = 0) -> Mixture:
    """Opens every source of a config, and prepares the shards that do not exist yet.

    A source `prepared:DIR` is a directory written by `pe_lab.prepare`; its tokenizer is then the tokenizer of the
    whole mixture. `config.prepared` and `config.grain` replace the text source; needles remain.

    Args:
      config: of the data.
      process_index: process 0 prepares, the others wait.
      vocab_size: of the model, whose ids a Grain dataset may have; 0: those of the tokenizer.

    Raises:
      UserError: a source, the tokenizer or a shard is missing, empty, damaged, or does not fit the others.
    """
    configs = _source_configs(config)
    names = _unique_names(configs)
    kinds = [c.source.partition(":")[0] for c in configs]
    options = {i: NeedleOptions.from_mapping(c.options) for i, c in enumerate(configs) if c.source == "needles"}
    prepared = {
        i: open_prepared(storage.path("data.prepared", c.source.removeprefix("prepared:")))
        for i, c in enumerate(configs)
        if kinds[i] == "prepared"
    }
    text = [i for i, kind in enumerate(kinds) if kind not in OPENED_HERE]
    for i in text:
        open_source(configs[i])  # finds a bad source before the first one is prepared
    cache_dir = storage.path("data.cache_dir", config.cache_dir)
    if prepared:
        tokenizer = next(iter(prepared.values())).tokenizer
        specification = next(iter(prepared.values())).metadata.tokenizer
    else:
        specification = config.tokenizer
        tokenizer = ensure_tokenizer(specification, [configs[i] for i in text], cache_dir, process_index)
    if tokenizer.kind == "none" and (text or options):
        raise ConfigError("data.tokenizer='none' is for Grain datasets alone: text and needles need a tokenizer.")
    for i in text:
        directory = ensure_prepared(
            configs[i], tokenizer, specification, cache_dir, config.validation_fraction, process_index
        )
        prepared[i] = open_prepared(directory)
    for i, opened in prepared.items():
        _check_prepared(configs[i], opened, tokenizer)
        if configs[i].min_tokens:
            prepared[i] = opened.of_long_documents(configs[i].min_tokens)
    offsets, needed = place_symbols(options, tokenizer.vocab_size)
    # Ids beyond the tokenizer's would be symbols of needles.
    ids_below = tokenizer.vocab_size if options else vocab_size or needed
    has_end = tokenizer.kind != "none"
    sources = tuple(
        MixtureSource(
            names[i],
            c,
            config.packing,
            prepared.get(i),
            options.get(i),
            GrainSource(names[i], c.source[len("grain:") :], ids_below, config.segments, has_end)
            if kinds[i] == "grain"
            else None,
            offsets.get(i, 0),
        )
        for i, c in enumerate(configs)
    )
    return Mixture(tokenizer, sources, needed)


def _check_prepared(config: SourceConfig, opened: Prepared, tokenizer: Tokenizer) -> None:
    """`DataError` if prepared data was made with another template, chat or tokenizer than the mixture has."""
    for setting in ("template", "chat"):
        wanted, found = getattr(config, setting), getattr(opened.metadata, setting)
        if wanted and wanted != found:
            raise DataError(
                f"data source {config.source!r} was prepared with {setting} {found!r}, not {wanted!r}. "
                f"Leave its {setting} out, or prepare the corpus with it."
            )
    if opened.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"data source {config.source!r} was prepared with tokenizer "
            f"{opened.tokenizer.fingerprint}, the mixture uses {tokenizer.fingerprint}. "
            "Prepare all sources with one tokenizer."
        )


def ensure_prepared(
    config: SourceConfig,
    tokenizer: Tokenizer,
    specification: str,
    cache_dir: Path,
    validation_fraction: float,
    process_index: int = 0,
) -> Path:
    """The directory of a source's shards in the cache. If it is missing, process 0 prepares it and the others wait.

    The name of the directory contains a hash of everything that the shards depend on.

    Raises:
      DataError: the source cannot be prepared, or process 0 does not prepare it.
    """
    source = open_source(config)
    options, shown = dict(config.options), redacted(config.source)
    key = [
        resource(config.source),
        config.column,
        options,
        source.identity(),
        tokenizer.fingerprint,
        validation_fraction,
    ]
    key += [chat_fingerprint(tokenizer)] if config.chat else []
    name = re.sub(r"[^A-Za-z0-9]+", "-", shown).strip("-")[:40].lower() or "source"
    directory = cache_dir / f"{name}-{digest_of(key)}"

    def make() -> None:
        prepare(config, tokenizer, specification, directory, validation_fraction)

    return _cached(directory, METADATA_FILE, process_index, make)


def ensure_tokenizer(
    specification: str, configs: Sequence[SourceConfig], cache_dir: Path, process_index: int = 0
) -> Tokenizer:
    """The tokenizer of a specification; `sentencepiece:train:SIZE` is trained on the sources once, by process 0.

    Raises:
      UserError: the tokenizer cannot be read or trained.
    """
    size = training_size(specification)
    if size is None:
        return load_tokenizer(specification)
    sources = [open_source(config) for config in configs]
    if not sources:
        raise ConfigError(
            f"data.tokenizer={specification!r} has no text to train on. Add a text source, or use tokenizer=bytes."
        )
    key = [size, [[resource(s.name), c.column, s.identity()] for s, c in zip(sources, configs, strict=True)]]
    directory = cache_dir / f"tokenizer-sentencepiece-{size}-{digest_of(key)}"

    def make() -> None:
        documents = (text_of(document) for source in sources for document in source.documents())
        trained = train_sentencepiece(documents, size, ", ".join(s.name for s in sources))
        with new_directory(directory, marker=KIND_FILE) as building:
            save_tokenizer(trained, building)

    return load_saved_tokenizer(_cached(directory, KIND_FILE, process_index, make))


def _cached(directory: Path, marker: str, process_index: int, make: Callable[[], None]) -> Path:
    """The directory; if it has no file `marker`, process 0 makes it and the others wait."""
    if is_file(directory / marker):
        return directory
    if process_index == 0:
        make()
        return directory
    last_change = time.time()
    while not is_file(directory / marker):
        time.sleep(0.2)
        being_filled = [building_directory(directory), building_directory(directory) / WORK, *unfinished(directory)]
        for building in being_filled if not is_remote(directory) else ():
            with contextlib.suppress(OSError):
                last_change = max(last_change, *(p.stat().st_mtime for p in (building, *building.iterdir())))
        if time.time() - last_change > PATIENCE_SECONDS:
            raise DataError(
                f"Waited {PATIENCE_SECONDS:.0f} s for process 0 to write {directory}, without any change there. "
                "Put data.cache_dir on a file system that all hosts share, or run python -m pe_lab.prepare on "
                "each host and set data.prepared."
            )
    return directory


def _source_configs(config: DataConfig) -> list[SourceConfig]:
    configs = list(config.sources)
    if config.prepared and config.grain:
        raise ConfigError("data.prepared and data.grain both replace the text source. Name both in data.sources.")
    for kind in ("prepared", "grain"):
        if where := getattr(config, kind):
            configs = _replaced(configs, kind, where)
    if not configs:
        raise ConfigError("data.sources is empty. Name at least one source, for example 'stdlib'.")
    for source in configs:
        if source.source.startswith("grain:") and (source.template or source.chat or source.options):
            raise ConfigError(f"data source {source.source!r} has no template, chat or options; leave them out.")
    if config.packing == "best_fit" and not config.segments:
        raise ConfigError(
            "data.packing='best_fit' puts documents side by side, which must not attend to each other: set "
            "data.segments=True, or data.packing='concatenate'."
        )
    return configs


def _replaced(configs: Sequence[SourceConfig], kind: str, where: str) -> list[SourceConfig]:
    """The sources with `KIND:WHERE` in the place of the one of text."""
    text = [c for c in configs if c.source != "needles"]
    if len(text) > 1:
        raise ConfigError(
            f"data.{kind}={where!r} replaces one text source, but data.sources has {len(text)}. "
            f"Use a source '{kind}:...' for each."
        )
    replaced = text[0] if text else SourceConfig(weight=1.0)
    replacement = dataclasses.replace(replaced, source=f"{kind}:{where}", options={})
    needles_and_it = [replacement if c.source != "needles" else c for c in configs]
    return needles_and_it if text else [replacement, *needles_and_it]


def _unique_names(configs: Sequence[SourceConfig]) -> list[str]:
    given = [c.name for c in configs if c.name]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ConfigError(f"Two data sources have the name {twice!r}. Give each its own.")
    names = [redacted(c.source) for c in configs if not c.name]
    numbered = iter(n if names.count(n) == 1 else f"{n}#{names[: i + 1].count(n)}" for i, n in enumerate(names))
    return [c.name or next(numbered) for c in configs]


def local_size(batch_size: int, process_count: int) -> int:
    """The number of sequences of one process."""
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"batch_size={batch_size} does not divide into {process_count} processes. Make it a multiple of "
            f"{process_count}."
        )
    return batch_size // process_count


def mixture_stages(sources: Sequence[MixtureSource], weights: Mapping[str, Any]) -> list[tuple[int, tuple[float, ...]]]:
    """(first step, weights of all sources) of a phase whose `weights` replace those of the sources, ascending.

    A weight of `weights` is a number, or [[first step, weight], ...] from step 0 on.

    Raises:
      ConfigError: a name is of no source, a weight or a step is none, or all weights of a stage are 0.
    """
    names = [source.name for source in sources]
    for name in weights:
        if name not in names:
            raise ConfigError(
                f"weights names the data source {name!r}, which there is not. {did_you_mean(name, names)}"
            )
    schedules = [_schedule(source.name, weights.get(source.name, source.weight)) for source in sources]
    stages = []
    for at in sorted({first for schedule in schedules for first, _ in schedule}):
        stages.append((at, tuple(next(w for first, w in schedule[::-1] if first <= at) for schedule in schedules)))
    for at, stage in stages:
        if not any(stage):
            since = f" from step {at} on" if at else ""
            raise ConfigError(f"All data sources ({', '.join(names)}) have weight 0{since}: give one a weight above 0.")
    return stages


def _schedule(name: str, weight: Any) -> list[tuple[int, float]]:
    """(first step, weight) from what a config has."""
    pairs = weight if isinstance(weight, list | tuple) else [[0, weight]]

    def real(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    listed = isinstance(pairs, list | tuple) and all(isinstance(pair, list | tuple) for pair in pairs)
    if not pairs or not listed or not all(len(pair) == 2 and all(map(real, pair)) for pair in pairs):
        raise ConfigError(
            f"data source {name!r} has weight {weight!r}; it must be a number, or [[first step, weight], ...]."
        )
    steps = [step for step, _ in pairs]
    if steps[0] != 0 or steps != sorted({int(step) for step in steps}):
        raise ConfigError(f"data source {name!r} has weights from steps {steps} on; they must ascend from 0.")
    for _, value in pairs:
        if not 0 <= value <= 10**9:
            raise ConfigError(f"data source {name!r} has weight {value}; it must be at least 0 and at most 10^9.")
    return [(int(step), float(value)) for step, value in pairs]
