"""`python -m pe_lab.prepare`: tokenizes a corpus once, into shards that training reads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pe_lab.config import SourceConfig
from pe_lab.data.preparation import encodable, prepare
from pe_lab.data.shards import METADATA_FILE, Metadata, open_prepared
from pe_lab.data.sources import Source, open_source
from pe_lab.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece, training_size
from pe_lab.errors import UserError
from pe_lab.storage import local_path
from pe_lab.terminal import command

DESCRIPTION = """\
Tokenizes a corpus and writes it to a directory of ArrayRecord shards, with a metadata.json (source,
tokenizer, counts) and the tokenizer itself. A config reads it with data.prepared=DIR."""

EXAMPLES = """\
sources:
  stdlib               the standard library of the Python that runs this
  text:GLOB            files of text, one document each (.gz too)
  jsonl:GLOB           JSON lines, one document each (.gz too); --column names the text
  parquet:GLOB         Parquet files, one document a row; --column names the text
  tfds:NAME[/SPLIT]    a TensorFlow dataset prepared as array_record; --column names the text
  Quote a GLOB, so that the shell leaves it alone. ** reaches into subdirectories.

tokenizers:
  bytes                     UTF-8 bytes
  hf:PATH/tokenizer.json    a Hugging Face tokenizer; or hf:DIR
  gguf:FILE                 the one inside a GGUF file
  saved:DIR                 the one of a checkpoint: saved:runs/NAME/tokenizer
  sentencepiece:PATH.model  a SentencePiece model
  sentencepiece:train:SIZE  a SentencePiece model of SIZE pieces, trained on this corpus

examples:
  python -m pe_lab.prepare --source=stdlib --tokenizer=sentencepiece:train:4096 --out=data/stdlib
  python -m pe_lab.prepare --source=parquet:'fineweb/*.parquet' --tokenizer=hf:tok.json --out=data/fineweb
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m pe_lab.prepare",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--source", required=True, help="the corpus, see below")
    p.add_argument("--tokenizer", required=True, help="the tokenizer, see below")
    p.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="directory to write; must not exist, or be empty",
    )
    p.add_argument("--column", default="text", help="the column that holds the text (default: %(default)s)")
    p.add_argument(
        "--validation-fraction",
        type=float,
        default=0.01,
        metavar="F",
        help="share of the documents held out for validation, chosen by their hash (default: %(default)s)",
    )
    p.add_argument("--limit-documents", type=int, metavar="N", help="read only the first N documents")
    return p


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.limit_documents is not None and args.limit_documents < 1:
        raise UserError(f"--limit-documents={args.limit_documents} must be at least 1.")
    out = local_path("--out", args.out)
    source = open_source(SourceConfig(source=args.source, column=args.column))
    if (out / METADATA_FILE).is_file():
        metadata = _check_done(args, source, out)
        print(f"{out} is already prepared from {args.source}; nothing to do.\n{_summary(metadata)}")
        return 0
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out={out} exists and is not prepared data. Choose another directory, or empty it.")
    tokenizer = _tokenizer(args.tokenizer, source)
    metadata = prepare(
        source, args.column, tokenizer, args.tokenizer, out, args.validation_fraction, args.limit_documents
    )
    print(f"Wrote {out}.\n{_summary(metadata)}\nTrain on it with data.prepared={out}")
    return 0


def _tokenizer(specification: str, source: Source) -> Tokenizer:
    size = training_size(specification)
    if size is None:
        return load_tokenizer(specification)
    return train_sentencepiece((encodable(d) for d in source.documents()), size, source.name)


def _check_done(args: argparse.Namespace, source: Source, out: Path) -> Metadata:
    """The metadata of what is there, if it is whole and what was asked for."""
    prepared = open_prepared(out)
    metadata = prepared.metadata
    asked = {
        "source": (args.source, metadata.source),
        "column": (args.column, metadata.column),
        "validation-fraction": (args.validation_fraction, metadata.validation_fraction),
        "limit-documents": (args.limit_documents, metadata.limit_documents),
        "tokenizer": (args.tokenizer, metadata.tokenizer),
    }
    for name, (wanted, found) in asked.items():
        if wanted != found:
            raise UserError(
                f"--out={out} is already prepared with --{name}={found}, not {wanted}. Choose another "
                "directory, or delete it."
            )
    if json.loads(json.dumps(source.identity())) != metadata.identity:
        raise UserError(
            f"--out={out} was prepared from {args.source} when it held other files. Choose another "
            "directory, or delete it."
        )
    if training_size(args.tokenizer) is None:
        fingerprint = load_tokenizer(args.tokenizer).fingerprint
        if fingerprint != metadata.tokenizer_fingerprint:
            raise UserError(
                f"--out={out} was prepared with tokenizer {metadata.tokenizer_fingerprint}; {args.tokenizer} "
                "is now "
                f"{fingerprint}. Choose another directory, or delete it."
            )
    return metadata


def _summary(metadata: Metadata) -> str:
    lines = [
        f"  {split:<12}{metadata.documents[split]:>12,} documents {metadata.tokens[split]:>16,} tokens "
        f"{len(metadata.shards[split]):>5} files"
        for split in metadata.tokens
    ]
    per_token = metadata.characters / max(1, sum(metadata.tokens.values()))
    lines.append(
        f"  tokenizer   {metadata.tokenizer}, {metadata.vocab_size:,} symbols, {per_token:.2f} characters a token"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
