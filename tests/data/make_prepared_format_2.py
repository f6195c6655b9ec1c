"""Makes tests/data/prepared_format_2.tar.gz: prepared data as the commit 5b967bf wrote them, in ArrayRecord files.

Usage, with a checkout of that commit:
  PYTHONPATH=CHECKOUT .venv/bin/python tests/data/make_prepared_format_2.py tests/data/prepared_format_2.tar.gz

Its records are small, so that 300 short documents fill several files. The test knows the documents.
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

from pe_lab.config import SourceConfig
from pe_lab.data import shards
from pe_lab.data.preparation import prepare
from pe_lab.data.sources import open_source
from pe_lab.data.tokenizers import ByteTokenizer


def main(out: Path) -> None:
    shards.RECORD_TOKENS, shards.RECORDS_PER_SHARD = 128, 40
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory) / "corpus.jsonl"
        documents = [f"document {i}: " + "lorem ipsum " * (i % 7) for i in range(300)]
        corpus.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        prepared = Path(directory) / "prepared"
        prepare(open_source(SourceConfig(f"jsonl:{corpus}")), "text", ByteTokenizer(), "bytes", prepared, 0.1)
        with tarfile.open(out, "w:gz") as archive:
            archive.add(prepared, "prepared")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
