"""`python -m pe_lab.generate --from=PATH --prompt=TEXT`: continues a prompt, or many as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pe_lab import storage
from pe_lab.errors import DataError, UnsupportedError
from pe_lab.terminal import any_seed, any_text, argument_parser, bounded, command, natural, positive

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel
    from pe_lab.model import GenerationStatistics


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argument_parser(
        "generate", "Continues a prompt. The continuation is streamed to stdout, the speed is printed to stderr."
    )
    parser.add_argument("--from", dest="source", required=True, help="a run, a checkpoint, hf:DIR or gguf:FILE")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", type=any_text, help="the text to continue")
    what.add_argument("--prompt-file", metavar="FILE", help="a file that holds the text to continue")
    what.add_argument(
        "--prompts", metavar="FILE", help="a file of prompts, one per line, continued together; writes JSON lines"
    )
    parser.add_argument(
        "--batch", type=bounded(int, 1, 2**20), default=16, metavar="N", help="prompts in a batch (default: 16)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="per prompt (default: 128)")
    parser.add_argument(
        "--temperature", type=bounded(float, 0.0, 1e6), default=0.0, help="0, the default, takes the likeliest token"
    )
    parser.add_argument("--top-k", type=natural, default=0, help="draw from the k likeliest tokens; 0: from all")
    parser.add_argument(
        "--top-p", type=bounded(float, 0.0, 1.0), default=1.0, help="draw from the likeliest tokens of this probability"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this; repeatable")
    parser.add_argument("--seed", type=any_seed, default=0, help="seed of the sampling")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    positional = parser.add_mutually_exclusive_group()
    positional.add_argument(
        "--positional", help="another positional encoding for the same weights, such as yarn:factor=2"
    )
    positional.add_argument("--drop", action="store_true", help="no positional encoding")
    parser.add_argument("--attention", metavar="NAME", help="an implementation that python -m pe_lab.attention lists")
    parser.add_argument("--cache-length", type=positive, help="most tokens of a prompt and its continuation")
    parser.add_argument(
        "--refresh",
        type=natural,
        default=1,
        help="for encodings that depend on the length: recompute the KV cache after so many tokens (1, the default, is "
        "exact; 0 never recomputes it)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all processes continue every prompt together, with the KV cache and weights sharded over their devices "
        "(default: each continues prompts of its own)",
    )
    return parser


def read_text(option: str, path: str) -> str:
    """The text of a file, without a byte order mark; `DataError` if it cannot be read."""
    try:
        return storage.read_bytes(storage.path(option, path)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option}: '{path}' cannot be read as text ({error}).") from None


def read_prompts(path: str) -> list[str]:
    """The lines of a file that are not blank."""
    prompts = [line for line in read_text("--prompts", path).splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"--prompts: '{path}' has no line with a prompt.")
    return prompts


def as_chat(lm: LanguageModel, text: str) -> Any:
    """The token ids of a chat whose last message is the user's `text`."""
    tokenizer = lm.tokenizer
    chat, encode = getattr(tokenizer, "chat", None), getattr(tokenizer, "encode_prompt", None)
    if chat is None or encode is None:
        raise UnsupportedError(f"--chat: '{lm.checkpoint.path}' has no chat template. Leave --chat out.")
    # The template has added the special tokens.
    return encode(chat([{"role": "user", "content": text}]), add_special_tokens=False)


def speed(statistics: GenerationStatistics) -> str:
    """Counts of tokens and their speed, in one line."""
    prefill = statistics.prompt_tokens / max(statistics.prefill_seconds, 1e-9)
    parts = [f"prompt {statistics.prompt_tokens} tokens", f"prefill {prefill:.1f} tokens/s"]
    if statistics.decoded_tokens:
        parts.append(f"decode {statistics.decoded_tokens / max(statistics.decode_seconds, 1e-9):.1f} tokens/s")
    parts.append(f"{statistics.new_tokens} new tokens")
    if statistics.refreshes:
        parts.append(f"KV cache recomputed {statistics.refreshes} times")
    return ", ".join(parts) + f" ({statistics.compile_seconds:.1f} s of compiling not counted)"


def show(prompt: str, pieces: Iterator[str]) -> int:
    """Streams pieces to stdout, after the dimmed prompt in a terminal with colours; returns their characters."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and console.color_system and not console.no_color:
        console.print(prompt, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
    characters = 0
    for piece in pieces:
        characters += len(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return characters


def why_empty(new_tokens: int) -> str:
    """Why a continuation has no characters."""
    if new_tokens <= 1:
        return "The continuation is empty: the first token ends the text, or decodes to no character."
    return (
        f"The continuation is empty: of the {new_tokens} tokens that were generated, all decode to no character, or a "
        "stop string comes first."
    )


@command
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    from pe_lab.parallel import is_first, on_first, one_program

    with one_program(args.together):
        prompts = on_first(lambda: given_prompts(args))
        statistics = generate(args, prompts)
    if is_first():
        print(speed(statistics), file=sys.stderr)
    return 0


def given_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line."""
    if args.prompts:
        return read_prompts(args.prompts)
    return [read_text("--prompt-file", args.prompt_file) if args.prompt_file else args.prompt]


def generate(args: argparse.Namespace, prompts: Sequence[str]) -> GenerationStatistics:
    """Prints the continuations of prompts; returns counts and seconds, summed over processes."""
    from pe_lab.evaluation.targets import mesh_for
    from pe_lab.language_model import load
    from pe_lab.model import GenerationStatistics
    from pe_lab.parallel import is_first

    lm = load(args.source, mesh=mesh_for(args.source) if args.together else None)
    if lm.tokenizer is None:
        raise DataError(f"'{args.source}' came without a tokenizer; a prompt cannot be encoded.")
    if args.drop:
        lm = lm.drop_positional()
    if args.positional:
        lm = lm.with_positional(args.positional)
    if args.attention:
        lm = lm.with_attention(args.attention)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "cache_length", "refresh")
    settings: dict[str, Any] = {name: getattr(args, name) for name in names}
    given = [as_chat(lm, prompt) for prompt in prompts] if args.chat else prompts
    statistics = GenerationStatistics()
    if args.prompts:
        print_many(lm, prompts, given, args.batch, settings, statistics)
        return statistics
    characters = show(prompts[0], lm.stream(given[0], statistics=statistics, **settings))
    if not characters and is_first():
        print(why_empty(statistics.new_tokens), file=sys.stderr)
    return statistics


def print_many(
    lm: LanguageModel,
    prompts: Sequence[str],
    given: Sequence[Any],
    batch: int,
    settings: dict[str, Any],
    statistics: GenerationStatistics,
) -> None:
    """Prints the continuations of many prompts as JSON lines. Several processes share the batches.

    Args:
      prompts, given: as they are printed, and as the model reads them.
      batch: prompts in a batch.
      statistics: are added to.
    """
    from pe_lab.parallel import is_first, shared

    def continued(starts: Iterable[int]) -> Iterator[tuple[list[str], GenerationStatistics]]:
        for start in starts:
            # A sequence samples by the seed and its number in the batch.
            drawn, spent = settings | {"seed": settings["seed"] + start}, type(statistics)()
            yield lm.generate(given[start : start + batch], text=True, statistics=spent, **drawn), spent

    starts = range(0, len(given), batch)
    for start, (texts, spent) in zip(starts, shared(starts, continued), strict=True):
        statistics.add(spent)
        for prompt, text in zip(prompts[start : start + batch], texts, strict=True):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
        sys.stdout.flush()
        if sys.stderr.isatty() and is_first():
            print(f"\r{min(start + batch, len(given))} of {len(given)} prompts", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
