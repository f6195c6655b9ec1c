"""Attention: queries, keys, values and a row of the schedule in, outputs out."""

from pe_lab.attention.interface import IMPLEMENTATIONS, Row, attention

__all__ = ["IMPLEMENTATIONS", "Row", "attention"]
