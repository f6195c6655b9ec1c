"""Attention: queries, keys, values and a row of the schedule in, outputs out."""

from pe_lab.attention.cached import Past, cached_attention, encode_keys
from pe_lab.attention.interface import IMPLEMENTATIONS, Row, attention

__all__ = ["IMPLEMENTATIONS", "Past", "Row", "attention", "cached_attention", "encode_keys"]
