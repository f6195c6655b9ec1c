"""Attention kernels for TPUs and GPUs, written here or by external packages."""
