"""RULER."""
