"""The generation backend: a language model writes the answers to prompts, in batches that one schedule reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pe_lab.evaluation.generation.tasks import Sample
from pe_lab.evaluation.variants import Variant
from pe_lab.language_model import LanguageModel
from pe_lab.model import GenerationStatistics
from pe_lab.model.cache import cache_bytes
from pe_lab.positional import LayerStructure

BATCH = {"cpu": 8}  # sequences decoded together, at most: on a CPU more of them are no faster a token
BATCH_ELSEWHERE = 64  # per device
CACHE = {"cpu": 2**30}  # bytes of the KV caches of a batch
CACHE_SHARE = 0.3  # elsewhere, of a device's memory


@dataclass
class ModelBackend:
    """Greedy continuations by a language model, up to the samples' stop strings and tokens, and the end of text.

    Attributes:
      lm: the model; `at_length` of the samples' length, where its encoding follows the length.
      crop: tokens of a prompt and its answer together, at most: a longer prompt keeps its end. None: no limit.
    """

    lm: LanguageModel
    crop: int | None = None

    @classmethod
    def of(cls, variant: Variant, length: int) -> ModelBackend:
        """The backend for sequences of a variant that are read with the schedule of `length` tokens."""
        return cls(variant.at(length), variant.crop)

    def batch_size(self, length: int) -> int:
        """The largest batch of samples of `length` tokens with their answers, a power of two; see `BATCH`.

        The memory for KV caches limits it.
        """
        config, backend = self.lm.config, jax.default_backend()
        devices = self.lm.devices
        capacity = max(256, 1 << (length - 1).bit_length())
        cache = cache_bytes(config, [LayerStructure()] * config.layers, capacity)
        memory = CACHE.get(backend) or CACHE_SHARE * _device_memory() * devices
        most = BATCH.get(backend, BATCH_ELSEWHERE * devices)
        fitting = int(max(1, min(most, memory // cache)))
        rows = devices if self.lm.mesh is None else devices // self.lm.mesh.shape["context"]
        return max(1 << (fitting.bit_length() - 1), rows)

    def __call__(self, samples: Sequence[Sample], statistics: GenerationStatistics | None = None) -> list[str]:
        """The answers; their cost is added to `statistics`."""
        new = max(sample.max_new_tokens for sample in samples)
        prompts = [sample.tokens for sample in samples]
        if self.crop is not None:
            prompts = [tokens[-max(1, self.crop - new) :] for tokens in prompts]
        eos_ids = {*self.lm.eos_ids, *samples[0].stop_ids}
        return self.lm.generate(prompts, new, stop=samples[0].stop, eos_ids=eos_ids, text=True, statistics=statistics)


def _device_memory() -> int:
    """Bytes of one accelerator's memory; 16 GB where it does not report any."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 16e9))
