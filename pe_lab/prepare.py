"""`python -m pe_lab.prepare`: tokenizes a corpus into shards for training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.config import SourceConfig
from pe_lab.data.preparation import prepare
from pe_lab.data.shards import METADATA_FILE, Metadata, open_prepared
from pe_lab.data.sources import Source, open_source
from pe_lab.data.tokenizers import encodable, load_tokenizer, train_sentencepiece, training_size
from pe_lab.errors import ConfigError
from pe_lab.storage import AnyPath
from pe_lab.terminal import argument_parser, bounded, command, table

DESCRIPTION = """\
Tokenizes a corpus and writes it to a directory of ArrayRecord shards, with a metadata.json (source,
tokenizer, counts) and the tokenizer itself. A config reads it with data.prepared=DIR."""

EXAMPLES = """\
sources:
  stdlib               the standard library of this Python
  text:GLOB            files of text, one document each (.gz too)
  jsonl:GLOB           JSON lines, one document each (.gz too); --column names the text
  parquet:GLOB         Parquet files, one document a row; --column names the text
  tfds:NAME[/SPLIT]    a TensorFlow dataset prepared as array_record; --column names the text
  Quote a GLOB, so that the shell does not expand it. ** matches subdirectories.

tokenizers:
  bytes                     UTF-8 bytes
  hf:PATH/tokenizer.json    a Hugging Face tokenizer; or hf:DIR
  gguf:FILE                 the tokenizer of a GGUF file
  saved:DIR                 the tokenizer of a checkpoint: saved:runs/NAME/tokenizer
  sentencepiece:PATH.model  a SentencePiece model
  sentencepiece:train:SIZE  a SentencePiece model of SIZE pieces, trained on this corpus

examples:
  python -m pe_lab.prepare --source=stdlib --tokenizer=sentencepiece:train:4096 --out=data/stdlib
  python -m pe_lab.prepare --source=parquet:'fineweb/*.parquet' --tokenizer=hf:tok.json --out=data/fineweb
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argument_parser("prepare", DESCRIPTION, EXAMPLES)
    p.add_argument("--source", required=True, help="the corpus, see below")
    p.add_argument("--tokenizer", required=True, help="the tokenizer, see below")
    p.add_argument("--out", required=True, metavar="DIR", help="directory to write; must not exist, or be empty")
    p.add_argument("--column", default="text", help="the column that holds the text (default: %(default)s)")
    p.add_argument(
        "--validation-fraction",
        type=bounded(float, 0.0, 1.0),
        default=0.01,
        metavar="F",
        help="share of the documents held out for validation, chosen by their hash (default: %(default)s)",
    )
    p.add_argument(
        "--limit-documents", type=bounded(int, 1, 10**12), metavar="N", help="read only the first N documents"
    )
    return p


@command
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    out = storage.path("--out", args.out)
    source = open_source(SourceConfig(source=args.source, column=args.column))
    if (out / METADATA_FILE).is_file():
        metadata = _check_done(args, source, out)
        print(f"{out} is already prepared from {args.source}; nothing to do.\n{_summary(metadata)}")
        return 0
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={out} exists and is not prepared data. Choose another directory, or empty it.")
    size = training_size(args.tokenizer)
    if size is None:
        tokenizer = load_tokenizer(args.tokenizer)
    else:
        tokenizer = train_sentencepiece((encodable(d.text) for d in source.documents()), size, source.name)
    metadata = prepare(
        source, args.column, tokenizer, args.tokenizer, out, args.validation_fraction, args.limit_documents
    )
    print(f"Wrote {out}.\n{_summary(metadata)}\nTrain on it with data.prepared={out}")
    return 0


def _check_done(args: argparse.Namespace, source: Source, out: AnyPath) -> Metadata:
    """The metadata of the data in `out`; `UserError` if they are damaged, or prepared with other arguments."""
    metadata = open_prepared(out).metadata
    advice = "Choose another directory, or delete it."
    arguments = {
        "source": (args.source, metadata.source),
        "column": (args.column, metadata.column),
        "validation-fraction": (args.validation_fraction, metadata.validation_fraction),
        "limit-documents": (args.limit_documents, metadata.limit_documents),
        "tokenizer": (args.tokenizer, metadata.tokenizer),
    }
    for name, (wanted, found) in arguments.items():
        if wanted != found:
            raise ConfigError(f"--out={out} is already prepared with --{name}={found}, not {wanted}. {advice}")
    if json.loads(json.dumps(source.identity())) != metadata.identity:
        raise ConfigError(f"--out={out} was prepared from other files of {args.source}. {advice}")
    if training_size(args.tokenizer) is None:
        fingerprint = load_tokenizer(args.tokenizer).fingerprint
        if fingerprint != metadata.tokenizer_fingerprint:
            raise ConfigError(
                f"--out={out} was prepared with tokenizer {metadata.tokenizer_fingerprint}; {args.tokenizer} is now "
                f"{fingerprint}. {advice}"
            )
    return metadata


def _summary(metadata: Metadata) -> str:
    rows = [
        (split, f"{metadata.documents[split]:,}", f"{tokens:,}", f"{len(metadata.shards[split]):,}")
        for split, tokens in metadata.tokens.items()
    ]
    per_token = metadata.characters / max(1, sum(metadata.tokens.values()))
    tokenizer = f"{metadata.tokenizer}, {metadata.vocab_size:,} symbols, {per_token:.2f} characters per token"
    return f"{table(('split', 'documents', 'tokens', 'files'), rows)}\ntokenizer: {tokenizer}"


if __name__ == "__main__":
    sys.exit(main())
