"""The renderer of the report: runs in, one self-contained HTML page out."""
