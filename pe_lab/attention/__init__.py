"""Attention: queries, keys, values and a row of the schedule in, outputs out."""

from pe_lab.attention.api import attention
from pe_lab.attention.cached import Past, cached_attention
from pe_lab.attention.dispatch import IMPLEMENTATIONS
from pe_lab.attention.key_block import Rotation
from pe_lab.attention.layer_encoding import Row, encode_keys, encode_queries

__all__ = [
    "IMPLEMENTATIONS",
    "Past",
    "Rotation",
    "Row",
    "attention",
    "cached_attention",
    "encode_keys",
    "encode_queries",
]
