"""Checkpoints: the Orbax store, lineage, and surgery."""

from pe_lab.checkpoints.store import Checkpoint, Store, find_checkpoints, open_checkpoint, resolve

__all__ = ["Checkpoint", "Store", "find_checkpoints", "open_checkpoint", "resolve"]
