"""Data: sources, tokenizers, prepared token shards, packing, mixtures, and the pipeline."""
