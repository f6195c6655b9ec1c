"""Held-out data: validation batches of every source, contiguous tokens, and needles of any length."""

from __future__ import annotations

import numpy as np
from jaxtyping import Shaped

from pe_lab.config import DataConfig
from pe_lab.data.grain_data import GrainIteration
from pe_lab.data.mixture import MixtureSource, local_size, open_mixture
from pe_lab.data.needles import NeedleWindows
from pe_lab.data.windows import Batch, WindowArrays, documents_of_chats, make_batch
from pe_lab.errors import ConfigError


def validation_batches(
    config: DataConfig,
    *,
    sequence_length: int,
    batch_size: int,
    count: int,
    process_index: int = 0,
    process_count: int = 1,
    source: str | None = None,
    vocab_size: int = 0,
) -> dict[str, list[Batch]]:
    """This process's part of up to `count` held-out batches of every source, or of one; equal at every call.

    The windows are spaced evenly over the split; of what is endless, and of a `grain.IterDataset`, they are the first.
    A shorter split gives fewer batches, the last one padded with sequences of weight 0. A source without held-out data
    (`validation_fraction=0`) is left out. `vocab_size` is that of the model, see `open_mixture`.

    Raises:
      UserError: the data cannot be opened, the batch does not divide, or there is no such source.
    """
    local = local_size(batch_size, process_count)
    mixture = open_mixture(config, process_index, vocab_size)
    names = [s.name for s in mixture.sources]
    if source is not None and source not in names:
        raise ConfigError(f"There is no data source {source!r} to validate on. The sources are: {', '.join(names)}.")
    found, eos_id = {}, mixture.tokenizer.eos_id
    for s in mixture.sources:
        if source not in (None, s.name) or s.tokens("validation") == 0:
            continue
        arrays = _held_out_windows(s, sequence_length, config.seed, count * batch_size, eos_id, config.segments)
        if arrays is None:
            continue
        whole = make_batch(arrays, segments=config.segments, eos_id=eos_id)
        missing = -len(whole["tokens"]) % batch_size
        paddings = {"tokens": eos_id, "targets": eos_id, "weights": 0, "segments": 1, "positions": 0}
        for name, padding in paddings.items():
            if name in whole:
                whole[name] = np.pad(whole[name], ((0, missing), (0, 0)), constant_values=padding)
        found[s.name] = [
            {name: array[i : i + local] for name, array in whole.items()}
            for i in range(process_index * local, len(whole["tokens"]), batch_size)
        ]
    return found


def _held_out_windows(
    source: MixtureSource, length: int, seed: int, wanted: int, eos_id: int, segments: bool
) -> WindowArrays | None:
    """At most `wanted` held-out windows of a source, at least one; None if it has none."""
    windows = source.windows(length, seed, "validation")
    if windows is None:
        return None
    if isinstance(windows, GrainIteration):
        elements = windows.first(wanted)
        return windows.arrays(elements, 0) if elements else None
    if len(windows):
        step = 1 if windows.endless else max(1, len(windows) // wanted)
        chosen = np.arange(min(wanted, len(windows))) * step
        return windows.read(chosen, segments)
    # Less than one window: padded.
    stream = source.prepared.streams["validation"]
    tokens = stream.read(0, length + 1).astype(np.int32)
    weights = np.zeros((1, length), np.float32)
    weights[0, : len(tokens) - 1] = stream.loss(np.arange(1, len(tokens))) if stream.has_loss else 1
    tokens = np.pad(tokens, (0, length + 1 - len(tokens)), constant_values=eos_id)[None]
    # The padding is one more document.
    return WindowArrays(tokens, weights, documents_of_chats(stream, np.zeros(1, int), length + 1))


# A token of chats, where EOS may end any message: its document, and whether it is a target that counts.
CHAT_TOKEN = np.dtype([("token", np.int32), ("document", np.int32), ("counts", bool)])


def held_out_tokens(config: DataConfig, source_index: int, n_tokens: int) -> Shaped[np.ndarray, " n"]:
    """The first `n_tokens` held-out tokens of a text source, or all if it has fewer.

    They are int32, and EOS ends every document; of chats they are `CHAT_TOKEN`. `held_out_batch` takes both.

    Raises:
      ConfigError: the source is needles (use `needle_windows`), or has no held-out data.
    """
    source = _source(config, source_index)
    if source.prepared is None:
        raise ConfigError(f"data source {source.name!r} has no held-out text: its windows are made for every length.")
    tokens = source.prepared.tokens("validation", 0, n_tokens)
    if not len(tokens):
        raise ConfigError(f"data source {source.name!r} holds out nothing. Set data.validation_fraction above 0.")
    stream = source.prepared.streams["validation"]
    if not stream.has_loss:
        return tokens
    found = np.empty(len(tokens), CHAT_TOKEN)
    found["token"], found["counts"] = tokens, stream.loss(np.arange(len(tokens)))
    found["document"] = documents_of_chats(stream, np.zeros(1, int), len(tokens))[0]
    return found


def held_out_batch(windows: Shaped[np.ndarray, "n W"], *, segments: bool, eos_id: int) -> Batch:
    """Windows of `held_out_tokens` as a batch of `make_batch`; of chats only answers count."""
    if windows.dtype != CHAT_TOKEN:
        weights = np.ones((len(windows), windows.shape[1] - 1), np.float32)
        return make_batch(WindowArrays(windows, weights), segments=segments, eos_id=eos_id)
    documents, weights = windows["document"], windows["counts"][:, 1:].astype(np.float32)
    documents = documents - documents[:, :1] + 1
    return make_batch(WindowArrays(windows["token"], weights, documents), segments=segments, eos_id=eos_id)


def needle_windows(
    config: DataConfig, source_index: int, length: int, seed: int | None = None, split: str = "validation"
) -> NeedleWindows:
    """The windows of a needles source, of any length, in the vocabulary of the config.

    Raises:
      ConfigError: the source is not needles, or the length is too short for it.
    """
    source = _source(config, source_index)
    if source.needles is None:
        raise ConfigError(f"data source {source.name!r} is not needles.")
    return source.windows(length, config.seed if seed is None else seed, split)


def _source(config: DataConfig, index: int) -> MixtureSource:
    sources = open_mixture(config).sources
    if not 0 <= index < len(sources):
        raise ConfigError(f"There is no data source number {index}: the config has {len(sources)}.")
    return sources[index]
