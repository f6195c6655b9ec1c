"""pe_lab: pretrain decoder language models; choose, rescale, drop and study their positional encoding."""
