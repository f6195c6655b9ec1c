"""GGUF files, the format of llama.cpp: read as a source, and written."""
