"""Opening what a config reads: the tokenizer, every source's shards, and the vocabulary they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pe_lab.config import DataConfig, SourceConfig
from pe_lab.data.needles import NeedleOptions, NeedleWindows, needle_vocab
from pe_lab.data.preparation import ensure_prepared, ensure_tokenizer
from pe_lab.data.shards import Prepared, open_prepared
from pe_lab.data.sources import open_source
from pe_lab.data.tokenizers import Tokenizer
from pe_lab.data.windows import TokenWindows
from pe_lab.errors import UserError


@dataclass(frozen=True)
class MixtureSource:
    """One source, open: prepared text, or needles with the place of their symbols in the vocabulary."""

    name: str
    weight: float
    prepared: Prepared | None
    needles: NeedleOptions | None
    offset_vocab: int = 0

    @property
    def fingerprint(self) -> Any:
        """JSON that is equal where the windows are."""
        if self.needles is not None:
            return ["needles", *(f"{k}={v}" for k, v in vars(self.needles).items())]
        return self.prepared.metadata.fingerprint

    def tokens(self, split: str) -> int | None:
        """Tokens of a split; None for needles, which never end."""
        return None if self.prepared is None else self.prepared.metadata.tokens[split]

    def windows(self, length: int, seed: int, split: str) -> TokenWindows | NeedleWindows:
        """The windows of T = `length` of a split. Only needles depend on the seed."""
        if self.needles is not None:
            return NeedleWindows(self.needles, length, seed, split, self.offset_vocab)
        return TokenWindows(self.prepared.streams[split], length)


@dataclass(frozen=True)
class Mixture:
    """Everything a config reads, open."""

    tokenizer: Tokenizer
    sources: tuple[MixtureSource, ...]
    vocab_size: int  # the tokenizer's, and after it the needles' symbols


def open_mixture(config: DataConfig, process_index: int = 0) -> Mixture:
    """Opens every source of a config, preparing shards that do not exist yet.

    A source `prepared:DIR` is a directory written by `pe_lab.prepare`; its tokenizer is then the tokenizer of
    the whole mixture. `config.prepared` stands for one such source in the place of the text sources; needles
    stay.

    Raises:
      UserError: a source, the tokenizer or a shard is missing, empty, damaged, or does not fit the others.
    """
    configs = _source_configs(config)
    options = {i: NeedleOptions.from_mapping(c.options) for i, c in enumerate(configs) if c.source == "needles"}
    prepared = {
        i: open_prepared(Path(c.source.removeprefix("prepared:")).expanduser())
        for i, c in enumerate(configs)
        if c.source.startswith("prepared:")
    }
    text = [i for i in range(len(configs)) if i not in options and i not in prepared]
    for i in text:
        open_source(configs[i])  # all of them exist, before the first is prepared
    cache_dir = Path(config.cache_dir).expanduser()
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
            raise UserError(
                f"data source {configs[i].source!r} was prepared with tokenizer "
                f"{opened.tokenizer.fingerprint}, the mixture uses {tokenizer.fingerprint}. "
                "Prepare all sources with one tokenizer."
            )
    offsets, vocab_size = _vocabulary(options, tokenizer.vocab_size)
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
            raise UserError(
                f"data.prepared={config.prepared!r} stands for one text source, but data.sources has "
                f"{len(text)}. Use sources 'prepared:DIR', one each."
            )
        weight = text[0].weight if text else 1.0
        replacement = SourceConfig(source=f"prepared:{config.prepared}", weight=weight)
        configs = [replacement if c.source != "needles" else c for c in configs]
        if not text:
            configs.insert(0, replacement)
    if not configs:
        raise UserError("data.sources is empty. Name at least one source, for example 'stdlib'.")
    for c in configs:
        if not 0 < c.weight < float("inf"):
            raise UserError(f"data source {c.source!r} has weight {c.weight}; a weight must be a number above 0.")
    return configs


def _vocabulary(options: dict[int, NeedleOptions], size: int) -> tuple[dict[int, int], int]:
    """Where each needles source's symbols start, and the size of it all; equal vocabularies are shared."""
    offsets, taken = {}, {}
    for i, option in options.items():
        if option.vocabulary not in taken:
            taken[option.vocabulary] = size
            size += needle_vocab(option)
        offsets[i] = taken[option.vocabulary]
    return offsets, size


def _unique_names(names: list[str]) -> list[str]:
    return [n if names.count(n) == 1 else f"{n}#{names[: i + 1].count(n)}" for i, n in enumerate(names)]
