"""Checkpoints: the native store, lineage and surgery, import and export of external formats, the parity check."""

from pe_lab.checkpoints.checkpoint import Checkpoint
from pe_lab.checkpoints.locating import find_checkpoints, resolve
from pe_lab.checkpoints.opening import is_external, open_checkpoint, open_source
from pe_lab.checkpoints.store import Store
