"""`python -m pe_lab.prepare`: tokenizes a corpus into shards for training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence

from pe_lab import storage
from pe_lab.config import SourceConfig
from pe_lab.data.chat import chat_fingerprint
from pe_lab.data.executors import in_processes, on_ray
from pe_lab.data.filters import REASONS, Filters, text_of
from pe_lab.data.preparation import DROPPED, begun, finish_interrupted, prepare
from pe_lab.data.shards import METADATA_FILE, Metadata, open_prepared
from pe_lab.data.sources import DataSource, open_source
from pe_lab.data.tokenizers import load_tokenizer, train_sentencepiece, training_size
from pe_lab.errors import ConfigError, redacted
from pe_lab.storage import AnyPath, check_place
from pe_lab.terminal import argument_parser, bounded, positive, table, works_on

DESCRIPTION = """\
Tokenizes a corpus and writes it to a directory of token shards, with a metadata.json (source, tokenizer,
filters, counts) and the tokenizer itself. A config reads it with data.prepared=DIR. What was interrupted goes on
where it stopped when the same command is repeated."""

EXAMPLES = """\
sources:
  stdlib               the standard library of this Python
  prose, manuals       English from packages of Debian 12, downloaded once into data/prose or data/manuals
  text:GLOB            files of text, one document each (.gz and .zst too)
  jsonl:GLOB           JSON lines, one document each (.gz and .zst too)
  parquet:GLOB         Parquet files, one document a row; arrow:GLOB the same of Arrow files
  hf:ORG/NAME[:CONFIG][/SPLIT]
                       a dataset of the Hugging Face hub, or of a directory with its layout
  tfds:NAME[/SPLIT]    a TensorFlow dataset prepared as array_record
  --column, --template or --chat say where the text is. A GLOB may be on a store or a server: gs://, s3://, https://.
  Quote it, so that the shell does not expand it. ** matches subdirectories.

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
  python -m pe_lab.prepare --source=jsonl:'web/*.jsonl.gz' --tokenizer=hf:tok.json --out=data/web \\
      --language=en --min-characters=200 --exact-duplicates --near-duplicates=0.8
  sbatch --array=0-15 --wrap "python -m pe_lab.prepare ... --array=slurm"
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argument_parser("prepare", DESCRIPTION, EXAMPLES)
    p.add_argument("--source", required=True, help="the corpus, see below")
    p.add_argument("--tokenizer", required=True, help="the tokenizer, see below")
    p.add_argument("--out", required=True, metavar="DIR", help="directory to write; must not exist, or be empty")
    p.add_argument("--column", default="text", help="the column that holds the text (default: %(default)s)")
    p.add_argument(
        "--template",
        type=lambda given: given.replace("\\n", "\n").replace("\\t", "\t"),  # which a shell leaves as they are
        default="",
        help="the text, of several columns: '{title}\\n\\n{body}'",
    )
    p.add_argument(
        "--chat", default="", help="a column of messages, prompt/completion, or instruction; answers are the targets"
    )
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
    run = p.add_argument_group("who does the work (the files are the same)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS lacks it
    run.add_argument("--workers", type=positive, default=cores, help="processes (default: a core each)")
    run.add_argument("--array", metavar="I/N", help="do share I of N, I from 0; slurm: that of this SLURM array task")
    run.add_argument("--engine", choices=["ray"], help="ray: a Ray cluster, that at RAY_ADDRESS or a local one")
    f = p.add_argument_group("filters (dropped documents are counted, and sampled in dropped/*.jsonl)")
    for unit in ("characters", "tokens"):
        for bound in ("min", "max"):
            f.add_argument(
                f"--{bound}-{unit}", type=positive, default=0, metavar="N", help=f"{bound}imum of a document"
            )
    f.add_argument("--language", default="", metavar="LL[:P]", help="en; at a probability of at least P (default: 0.5)")
    f.add_argument("--exact-duplicates", action="store_true", help="drop documents that are equal to an earlier one")
    f.add_argument(
        "--near-duplicates",
        type=bounded(float, 0.1, 1.0),
        nargs="?",
        const=0.8,
        default=0.0,
        metavar="J",
        help="drop documents whose shingles have Jaccard similarity J with an earlier one's (default: 0.8), by MinHash",
    )
    f.add_argument("--shingle-words", type=bounded(int, 1, 100), default=5, metavar="N", help="(default: %(default)s)")
    f.add_argument(
        "--permutations", type=bounded(int, 8, 4096), default=128, metavar="N", help="(default: %(default)s)"
    )
    return p


@works_on
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    out = storage.path("--out", args.out)
    filters, task = _filters(args), _task(args)
    config = SourceConfig(source=args.source, column=args.column, template=args.template, chat=args.chat)
    source = open_source(config)
    finish_interrupted(out)
    # Before the metadata: another task of an array may put the directory into its place meanwhile.
    filled = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if (out / METADATA_FILE).is_file():
        metadata = _check_done(args, filters, source, out)
        print(f"{out} is already prepared from {redacted(args.source)}; nothing to do.\n{_summary(out, metadata)}")
        return 0
    started = begun(out)
    if started is None and filled:
        raise ConfigError(f"--out={out} exists and is not prepared data. Choose another directory, or empty it.")
    check_place("--out", out)
    size = training_size(args.tokenizer)
    if size is None:
        tokenizer = load_tokenizer(args.tokenizer)
    elif started and started[0] == args.tokenizer:
        tokenizer = load_tokenizer(started[1])
    else:
        tokenizer = train_sentencepiece((text_of(d) for d in source.documents()), size, source.name)
    executor = on_ray if args.engine else in_processes(args.workers)
    metadata = prepare(
        config,
        tokenizer,
        args.tokenizer,
        out,
        args.validation_fraction,
        args.limit_documents,
        filters,
        executor,
        task,
    )
    if metadata is None:
        print(
            f"Task {task[0]} of {task[1]} has done its share of {out}; others have not yet. The last one finishes it. "
            "If all have ended, run them again: they go on with what is left."
        )
        return 0
    print(f"Wrote {out}.\n{_summary(out, metadata)}\nTrain on it with data.prepared={out}")
    return 0


def _filters(args: argparse.Namespace) -> Filters:
    """The filters of a command line."""
    named = {f.name: getattr(args, f.name) for f in dataclasses.fields(Filters) if hasattr(args, f.name)}
    language, _, probability = args.language.partition(":")
    try:
        least = bounded(float, 0.0, 1.0)(probability) if probability else 0.5
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--language={args.language}: {error}.") from None
    return Filters(**{**named, "language": language, "language_probability": least})


def _task(args: argparse.Namespace) -> tuple[int, int]:
    """The number of this task, and of all tasks."""
    if args.array is None:
        return 0, 1
    if args.array == "slurm":
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")
        try:
            number, first, count = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--array=slurm needs {', '.join(names)}, which SLURM sets: start it with sbatch --array."
            ) from None
        if int(os.environ.get("SLURM_ARRAY_TASK_STEP", "1")) != 1:
            raise ConfigError("--array=slurm needs an array without a step: sbatch --array=0-7.")
        return number - first, count
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", args.array)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--array={args.array} is not I/N with I from 0 to N - 1, as in 0/8, nor slurm.")
    return int(found[1]), int(found[2])


def _check_done(args: argparse.Namespace, filters: Filters, source: DataSource, out: AnyPath) -> Metadata:
    """The metadata of the data in `out`; `UserError` if they are damaged, or prepared with other arguments."""
    opened = open_prepared(out)
    metadata = opened.metadata
    advice = "Choose another directory, or delete it."
    names = ("column", "template", "chat", "validation_fraction", "limit_documents", "tokenizer")
    unset = {f.name: f.default for f in dataclasses.fields(Filters)}
    wanted = {"source": redacted(args.source)} | {name: getattr(args, name) for name in names}
    found = {"source": metadata.source} | {name: getattr(metadata, name) for name in names}
    wanted, found = wanted | unset | filters.settings(), found | unset | metadata.filters
    for name, value in wanted.items():
        if value != found[name]:
            flag = f"--{name.replace('_', '-')}={found[name]}"
            raise ConfigError(f"--out={out} is already prepared with {flag}, not {value}. {advice}")
    if json.loads(json.dumps(source.identity())) != metadata.identity:
        raise ConfigError(f"--out={out} was prepared from other files of {args.source}. {advice}")
    if training_size(args.tokenizer) is None:
        tokenizer = load_tokenizer(args.tokenizer)
        if (fingerprint := tokenizer.fingerprint) != metadata.tokenizer_fingerprint:
            raise ConfigError(
                f"--out={out} was prepared with tokenizer {metadata.tokenizer_fingerprint}; {args.tokenizer} is now "
                f"{fingerprint}. {advice}"
            )
        if args.chat and chat_fingerprint(tokenizer) != chat_fingerprint(opened.tokenizer):
            raise ConfigError(
                f"--out={out} was prepared with another chat template than {args.tokenizer} has. {advice}"
            )
    return metadata


def _summary(out: AnyPath, metadata: Metadata) -> str:
    """What a directory has, and what was dropped."""
    rows = [
        (split, f"{metadata.documents[split]:,}", f"{tokens:,}", f"{len(metadata.shards[split]):,}")
        for split, tokens in metadata.tokens.items()
    ]
    per_token = metadata.characters / max(1, sum(metadata.tokens.values()))
    tokenizer = f"{metadata.tokenizer}, {metadata.vocab_size:,} symbols, {per_token:.2f} characters per token"
    summary = f"{table(('split', 'documents', 'tokens', 'files'), rows)}\ntokenizer: {tokenizer}"
    dropped = ", ".join(f"{reason} {metadata.dropped[reason]:,}" for reason in REASONS if reason in metadata.dropped)
    return f"{summary}\ndropped documents: {dropped}\nsamples of them: {out / DROPPED}" if dropped else summary


if __name__ == "__main__":
    sys.exit(main())
