"""The data of a config: the tokenizer, the shards of every source, and their common vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pe_lab import storage
from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.needles import NeedleOptions, NeedleWindows, place_symbols
from pe_lab.data.preparation import ensure_prepared, ensure_tokenizer
from pe_lab.data.shards import Prepared, open_prepared
from pe_lab.data.sources import open_source
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.windows import TokenWindows
from pe_lab.errors import ConfigError, DataError


@dataclass(frozen=True)
class MixtureSource:
    """One open source: prepared text, or needles with the first id of their symbols."""

    name: str
    weight: float
    prepared: Prepared | None
    needles: NeedleOptions | None
    offset_vocab: int = 0

    @property
    def fingerprint(self) -> Any:
        """JSON that is equal for equal windows."""
        if self.needles is not None:
            return ["needles", *(f"{k}={v}" for k, v in vars(self.needles).items())]
        return self.prepared.metadata.fingerprint

    def tokens(self, split: str) -> int | None:
        """The number of tokens of a split; None for needles, which are endless."""
        return None if self.prepared is None else self.prepared.metadata.tokens[split]

    def windows(self, length: int, seed: int, split: str) -> TokenWindows | NeedleWindows:
        """The windows of T = `length` tokens of a split. Only needles depend on the seed."""
        if self.needles is not None:
            return NeedleWindows(self.needles, length, seed, split, self.offset_vocab)
        return TokenWindows(self.prepared.streams[split], length)


@dataclass(frozen=True)
class Mixture:
    """The open sources of a config."""

    tokenizer: Tokenizer
    sources: tuple[MixtureSource, ...]
    vocab_size: int  # of the tokenizer, plus the symbols of needles


def open_mixture(config: DataConfig, process_index: int = 0) -> Mixture:
    """Opens every source of a config, and prepares the shards that do not exist yet.

    A source `prepared:DIR` is a directory written by `pe_lab.prepare`; its tokenizer is then the tokenizer of the
    whole mixture. `config.prepared` replaces the text source by such a directory; needles remain.

    Raises:
      UserError: a source, the tokenizer or a shard is missing, empty, damaged, or does not fit the others.
    """
    configs = _source_configs(config)
    options = {i: NeedleOptions.from_mapping(c.options) for i, c in enumerate(configs) if c.source == "needles"}
    prepared = {
        i: open_prepared(storage.path("data.prepared", c.source.removeprefix("prepared:")))
        for i, c in enumerate(configs)
        if c.source.startswith("prepared:")
    }
    text = [i for i in range(len(configs)) if i not in options and i not in prepared]
    for i in text:
        open_source(configs[i])  # finds a bad source before the first one is prepared
    cache_dir = storage.path("data.cache_dir", config.cache_dir)
    if prepared:
        tokenizer = next(iter(prepared.values())).tokenizer
        specification = next(iter(prepared.values())).metadata.tokenizer
    else:
        specification = config.tokenizer
        tokenizer = ensure_tokenizer(specification, [configs[i] for i in text], cache_dir, process_index)
    for i in text:
        directory = ensure_prepared(
            configs[i], tokenizer, specification, cache_dir, config.validation_fraction, process_index
        )
        prepared[i] = open_prepared(directory)
    for i, opened in prepared.items():
        if opened.tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"data source {configs[i].source!r} was prepared with tokenizer "
                f"{opened.tokenizer.fingerprint}, the mixture uses {tokenizer.fingerprint}. "
                "Prepare all sources with one tokenizer."
            )
    offsets, vocab_size = place_symbols(options, tokenizer.vocab_size)
    names = _unique_names([c.source for c in configs])
    sources = tuple(
        MixtureSource(names[i], float(c.weight), prepared.get(i), options.get(i), offsets.get(i, 0))
        for i, c in enumerate(configs)
    )
    return Mixture(tokenizer, sources, vocab_size)


def _source_configs(config: DataConfig) -> list[SourceConfig]:
    configs = list(config.sources)
    if config.prepared:
        text = [c for c in configs if c.source != "needles"]
        if len(text) > 1:
            raise ConfigError(
                f"data.prepared={config.prepared!r} replaces one text source, but data.sources has {len(text)}. "
                "Use a source 'prepared:DIR' for each."
            )
        weight = text[0].weight if text else 1.0
        replacement = SourceConfig(source=f"prepared:{config.prepared}", weight=weight)
        configs = [replacement if c.source != "needles" else c for c in configs]
        if not text:
            configs.insert(0, replacement)
    if not configs:
        raise ConfigError("data.sources is empty. Name at least one source, for example 'stdlib'.")
    for c in configs:
        if not 0 < c.weight < float("inf"):
            raise ConfigError(f"data source {c.source!r} has weight {c.weight}; a weight must be a number above 0.")
    return configs


def _unique_names(names: list[str]) -> list[str]:
    return [n if names.count(n) == 1 else f"{n}#{names[: i + 1].count(n)}" for i, n in enumerate(names)]
