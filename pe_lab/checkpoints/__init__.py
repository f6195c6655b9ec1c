"""Checkpoints: the Orbax store, lineage and surgery, and other people's files, in and out."""

from pe_lab.checkpoints.opening import is_external, open_checkpoint, open_source
from pe_lab.checkpoints.store import Checkpoint, Store, find_checkpoints, resolve

__all__ = ["Checkpoint", "Store", "find_checkpoints", "is_external", "open_checkpoint", "open_source", "resolve"]
