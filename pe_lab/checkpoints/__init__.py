"""Checkpoints: the native store, lineage and surgery, import and export of external formats, the parity check."""
