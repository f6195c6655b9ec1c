"""A longer context for a checkpoint: the methods compared without training, a search, and training at equal compute."""
