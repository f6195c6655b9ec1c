"""Answers to prompts, in batches, resumed where a killed process stopped."""
