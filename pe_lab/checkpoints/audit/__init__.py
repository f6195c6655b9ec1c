"""The audit: which fault of a runtime's positional encoding explains the logits that it computes from a checkpoint."""
