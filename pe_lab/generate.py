"""`python -m pe_lab.generate --from=PATH --prompt=TEXT`: continues a text, as it comes; or many, as JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pe_lab.errors import UserError
from pe_lab.terminal import command

if TYPE_CHECKING:
    from pe_lab.language_model import LanguageModel
    from pe_lab.model import Statistics


def parser() -> argparse.ArgumentParser:
    """The command line of this verb."""
    parser = argparse.ArgumentParser(
        prog="python -m pe_lab.generate",
        description="Continues a text with a model. The continuation goes to stdout as it comes, how fast it came to "
        "stderr.",
    )
    parser.add_argument("--from", dest="source", required=True, help="what pe_lab.load reads: a run, a checkpoint, ...")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="the text to continue")
    what.add_argument("--prompt-file", metavar="FILE", help="a file that holds the text to continue")
    what.add_argument(
        "--prompts", metavar="FILE", help="a file of prompts, one per line, continued together; writes JSON lines"
    )
    parser.add_argument("--batch", type=int, default=16, metavar="N", help="so many of --prompts at once (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0: from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this probability")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    positional = parser.add_mutually_exclusive_group()
    positional.add_argument(
        "--positional", help="read the weights under another encoding, such as yarn:factor=2 (of what is there)"
    )
    positional.add_argument("--drop", action="store_true", help="read the weights without positional encoding")
    parser.add_argument("--attention", metavar="NAME", help="how to attend: a name python -m pe_lab.attention lists")
    parser.add_argument("--cache-length", type=int, help="most tokens of a prompt and its continuation")
    parser.add_argument(
        "--refresh",
        type=int,
        default=1,
        help="for encodings that follow the length: read the text again after so many tokens of another schedule (1, "
        "the default, is exact; 0 never does, and is fast)",
    )
    return parser


def read_text(option: str, path: str) -> str:
    """The text of a file; `UserError` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: '{path}' cannot be read as text ({error}).") from None


def read_prompts(path: str) -> list[str]:
    """The lines of a file that are not blank."""
    prompts = [line for line in read_text("--prompts", path).splitlines() if line.strip()]
    if not prompts:
        raise UserError(f"--prompts: '{path}' has no line with a prompt.")
    return prompts


def as_chat(lm: LanguageModel, text: str) -> Any:
    """The ids of a chat in which the user has said `text`, and the model is to answer."""
    tokenizer = lm.tokenizer
    chat, encode = getattr(tokenizer, "chat", None), getattr(tokenizer, "encode_prompt", None)
    if chat is None or encode is None:
        raise UserError(f"--chat: the tokenizer of '{lm.checkpoint.path}' has no chat template. Leave --chat out.")
    # The template has written what begins a text already.
    return encode(chat([{"role": "user", "content": text}]), add_special_tokens=False)


def speed(statistics: Statistics) -> str:
    """One line: how much was read and written, and how fast."""
    prefill = statistics.prompt_tokens / max(statistics.prefill_seconds, 1e-9)
    parts = [f"prompt {statistics.prompt_tokens} tokens", f"prefill {prefill:.1f} tokens/s"]
    if statistics.decoded_tokens:
        parts.append(f"decode {statistics.decoded_tokens / max(statistics.decode_seconds, 1e-9):.1f} tokens/s")
    parts.append(f"{statistics.new_tokens} new tokens")
    if statistics.refreshes:
        parts.append(f"text read again {statistics.refreshes} times")
    return ", ".join(parts) + f" ({statistics.compile_seconds:.1f} s of compiling not counted)"


def show(prompt: str, pieces: Iterator[str]) -> None:
    """Pieces to stdout as they come; a terminal with colours shows the prompt before them, dimmed."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and console.color_system and not console.no_color:
        console.print(prompt, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the verb."""
    args = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.batch < 1:
        raise UserError(f"--batch is {args.batch}; continue at least one prompt at a time.")
    if args.prompts:
        prompts = read_prompts(args.prompts)
    else:
        prompts = [read_text("--prompt-file", args.prompt_file) if args.prompt_file else args.prompt]

    from pe_lab.language_model import load
    from pe_lab.model import Statistics

    lm = load(args.source)
    if lm.tokenizer is None:
        raise UserError(f"'{args.source}' came without a tokenizer; text cannot be continued.")
    if args.drop:
        lm = lm.drop_positional()
    if args.positional:
        items = args.positional.split("+")
        lm = lm.with_positional(items if len(items) > 1 else items[0])
    if args.attention:
        lm = lm.with_attention(args.attention)
    statistics = Statistics()
    settings: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "stop": args.stop,
        "seed": args.seed,
        "cache_length": args.cache_length,
        "refresh": args.refresh,
        "statistics": statistics,
    }
    given = [as_chat(lm, prompt) for prompt in prompts] if args.chat else prompts
    try:
        if args.prompts:
            for start in range(0, len(given), args.batch):
                some = slice(start, start + args.batch)
                # Rows of a batch draw for themselves by their number in it; so do batches.
                settings["seed"] = args.seed + start
                for prompt, text in zip(prompts[some], lm.generate(given[some], text=True, **settings), strict=True):
                    print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
                sys.stdout.flush()
                if sys.stderr.isatty():
                    print(f"\r{min(start + args.batch, len(given))} of {len(given)} prompts", end="", file=sys.stderr)
        else:
            show(prompts[0], lm.stream(given[0], **settings))
    except BrokenPipeError:
        # Whoever was reading has enough. Nothing is left to write, at the interpreter's end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(speed(statistics), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
