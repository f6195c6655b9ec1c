"""Compiled forward passes, log-likelihoods, and the metrics of answers."""
