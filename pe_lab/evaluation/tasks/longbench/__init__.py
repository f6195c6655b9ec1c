"""LongBench v1 and LongBench-E (Bai et al. 2023, arXiv 2308.14508)."""
