"""What is learned from runs: their files, scores, verdicts and charts, and the page made of them."""
