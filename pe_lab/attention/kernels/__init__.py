"""Attention kernels for TPUs and GPUs: ours, and those of external packages."""
