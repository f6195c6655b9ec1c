"""Training: the plan of a run, its state and optimizer, the pure step, the visible loop."""
