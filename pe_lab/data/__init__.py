"""Sources, tokenizers, prepared token shards, windows, and the Grain pipeline over them."""
