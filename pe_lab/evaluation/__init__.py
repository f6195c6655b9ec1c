"""Evaluation of models on sequences longer than their training: perplexity, needles, RULER, LongBench, lm_eval."""
