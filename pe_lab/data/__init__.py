"""Data: sources, tokenizers, prepared token shards, mixtures, and the Grain pipeline."""
