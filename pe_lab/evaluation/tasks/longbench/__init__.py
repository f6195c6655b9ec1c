"""LongBench."""
