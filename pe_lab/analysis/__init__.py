"""What is measured inside a model: the analyses of `pe_lab.analyze`, a module each."""
