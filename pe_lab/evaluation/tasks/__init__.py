"""The suites: one package or file each, and what suites that ask with prompts have in common."""
