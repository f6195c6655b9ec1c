"""Attention: queries, keys, values and a row of the schedule in, outputs out."""

from pe_lab.attention.cached import Past, cached_attention
from pe_lab.attention.implementations import IMPLEMENTATIONS
from pe_lab.attention.interface import attention
from pe_lab.attention.row import Row, encode_keys, encode_queries
from pe_lab.attention.span import Rotation

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
