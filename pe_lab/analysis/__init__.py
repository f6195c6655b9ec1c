"""Studies of models and runs: files of a run, scores, verdicts, frequencies, attention. Nothing here renders a page."""
