"""`python -m pe_lab.surgery --from=A --to=B --drop`: writes an edited child of a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pe_lab import storage
from pe_lab.errors import CheckpointError, ConfigError, DataError, UserError, did_you_mean
from pe_lab.storage import check_checkpoints, check_place
from pe_lab.terminal import argument_parser, bounded, positive, works_on

if TYPE_CHECKING:
    from pe_lab.checkpoints.checkpoint import Checkpoint
    from pe_lab.positional import Beta, Layer

FIT_WINDOWS, FIT_LENGTH = 8, 1024  # windows to fit a QK-norm's constants on, and the most tokens of each


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        "surgery",
        "Writes a child of a checkpoint with another positional encoding, another QK-norm, or both. "
        "The source is not changed; a phase can start from the child by init_from.",
    )
    parser.add_argument(
        "--from", dest="source", required=True, help="a run, a phase, a checkpoint, hf:DIR or gguf:FILE"
    )
    parser.add_argument("--to", required=True, help="a new directory for the child")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--drop",
        nargs="?",
        const="encoding",
        choices=("encoding", "all", "auto", "gates"),
        help="remove the positional encoding (DroPE) and keep what a layer has beside it (/with=...), its window and "
        "its logit scale; all: what it has beside it too; auto: of as many layers as --budget pays for, by measured "
        "losses; gates: of the heads whose gates gated_rope has closed",
    )
    what.add_argument(
        "--positional",
        help="another encoding: rope:base=10000; yarn:factor=4 rescales the old one; A+B is a pattern",
    )
    what.add_argument(
        "--search",
        action="store_true",
        help="the divisors of the rotary frequencies that an evolution finds for --length (LongRoPE, LongRoPE2), on "
        "held-out tokens that need a far context; its history is kept beside --to",
    )
    what.add_argument("--mask-heads", metavar="SCORES.json", help="denoise heads by their scores (DoPE)")
    parser.add_argument(
        "--logit-scale",
        metavar="C",
        help="DroPE's beta, 1 + C ln(n / training length), on every layer; `fitted`: the fit of pe_lab.evaluate "
        "--suite=beta",
    )
    parser.add_argument("--layers", help="layers to drop, such as 0,2,8-11; all by default (with --drop)")
    budget = bounded(float, 0.0, 1e6)
    parser.add_argument("--budget", type=budget, metavar="NATS", help="what --drop=auto may add to the loss (0.1)")
    parser.add_argument("--most", type=positive, metavar="N", help="at most so many layers (with --drop=auto)")
    ways, help = ("greedy", "first-order"), "order of --drop=auto: greedy (default), or by each layer's own cost"
    parser.add_argument("--by", choices=ways, help=help)
    parser.add_argument(
        "--sequences", type=positive, metavar="N", help="to measure --drop=auto (32) or --search (4) on"
    )
    parser.add_argument(
        "--length", help="of these sequences, such as 2048 or 2x; for --search the one to extend to (default: 4x)"
    )
    parser.add_argument("--population", type=bounded(int, 8, 2**16), metavar="N", help="candidates of --search (64)")
    parser.add_argument(
        "--iterations", type=bounded(int, 0, 2**16), metavar="N", help="generations after the first (40)"
    )
    help = "tries on the best candidate a start of N unscaled tokens (LongRoPE's; no runtime has it)"
    parser.add_argument("--starts", metavar="N,...", help=help)
    parser.add_argument("--search-seed", type=bounded(int, 0, 2**32 - 1), metavar="N", help="seed of --search (0)")
    parser.add_argument(
        "--objective",
        metavar="NAME,...",
        help="what --search minimizes the mean loss of: long_range, needles, passkeys, text (default: long_range and "
        "needles, or passkeys where the model was trained without)",
    )
    parser.add_argument(
        "--any-order", action="store_true", default=None, help="--search lets a slower pair have a smaller divisor"
    )
    parser.add_argument(
        "--count", type=bounded(int, 1, 2**20), default=1, help="number of heads to denoise (with --mask-heads)"
    )
    parser.add_argument(
        "--order", default="ascending", choices=("ascending", "descending"), help="the lowest scores, or the highest"
    )
    parser.add_argument(
        "--dope",
        default="all-nope",
        help="method for these heads, such as all-uniform or parts-fast (all-nope by default)",
    )
    parser.add_argument(
        "--dope-seed",
        type=bounded(int, 1, 2**32 - 1),
        metavar="N",
        help="seed of --dope=gaussian (0) and gaussian-unit (42)",
    )
    parser.add_argument(
        "--dope-sigma",
        type=bounded(float, 0.0, 1e6),
        metavar="X",
        help="standard deviation of that noise (the other heads'; 1)",
    )
    norm = parser.add_mutually_exclusive_group()
    norm.add_argument(
        "--add-qk-norm",
        nargs="?",
        const="head",
        metavar="KIND",
        help="head (default), flat, query_head or query_flat; its constants are fitted on held-out text",
    )
    norm.add_argument("--remove-qk-norm", action="store_true", help="fold it into the projections, approximately")
    parser.add_argument(
        "--qk-norm-init",
        default="matched",
        choices=("matched", "ones"),
        help="scales of an added QK-norm: fitted to the logits (default), or 1 as in DroPE's code",
    )
    parser.add_argument(
        "--text", help="a text file for --drop=auto or a QK-norm, or a source for --search, instead of held-out text"
    )
    return parser


def edited_layers(parent: Checkpoint, args: argparse.Namespace) -> tuple[Layer, ...]:
    """The parent's layers after the edit of the command line."""
    from pe_lab.checkpoints.checkpoint import weights_digest
    from pe_lab.positional import DOPE, denoise_by, drop, read_scores, read_with
    from pe_lab.positional.codec import numbers_and_ranges

    if args.layers and not args.drop:
        raise UserError("--layers goes with --drop; --positional takes one encoding per layer as a pattern.")
    chosen = {"seed": args.dope_seed, "sigma": args.dope_sigma}
    noise = {key: value for key, value in chosen.items() if value is not None}
    if noise and not (args.mask_heads and args.dope.startswith("gaussian")):
        raise ConfigError("--dope-seed and --dope-sigma go with --mask-heads and --dope=gaussian or gaussian-unit.")
    length = int(parent.metadata["training_length"])
    _check_options(args)
    if args.layers and args.drop in ("auto", "gates"):
        raise ConfigError(f"--layers names the layers, and --drop={args.drop} chooses them: leave one of them out.")
    if args.drop == "gates":
        return gated_layers(parent)
    if args.drop == "auto":
        return drop(chosen_layers(parent, args)).apply(parent.layers)
    if args.drop:
        chosen = numbers_and_ranges(args.layers, "--layers") if args.layers else None
        return drop(chosen, extras=args.drop == "all").apply(parent.layers)
    if args.positional:
        return read_with(args.positional, parent.layers, length)
    if args.search:
        return searched_layers(parent, args)
    if args.mask_heads:
        if args.dope not in DOPE:
            raise ConfigError(f"--dope='{args.dope}' is no method. {did_you_mean(args.dope, list(DOPE))}")
        weights = weights_digest(parent.params)
        scores = read_scores(args.mask_heads, len(parent.layers), parent.model.heads, weights, str(parent.path))
        return denoise_by(args.dope, parent.layers, scores, args.count, args.order, length, **noise)
    return parent.layers


def _check_options(args: argparse.Namespace) -> None:
    """`ConfigError` for an option of another edit."""
    of_drop, of_search = (
        ("budget", "most", "by"),
        ("population", "iterations", "search_seed", "objective", "any_order", "starts"),
    )
    goes_with = dict.fromkeys(of_drop, "--drop=auto") | dict.fromkeys(of_search, "--search")
    goes_with |= dict.fromkeys(("sequences", "length"), "--drop=auto or --search")
    chosen = {"--drop=auto": args.drop == "auto", "--search": args.search}
    chosen["--drop=auto or --search"] = any(chosen.values())
    for name, edit in goes_with.items():
        if getattr(args, name) is not None and not chosen[edit]:
            raise ConfigError(f"--{name.replace('_', '-')} goes with {edit}.")


def _starts(text: str | None) -> tuple[int, ...]:
    """The numbers of `--starts`."""
    try:
        return tuple(map(int, text.split(","))) if text else ()
    except ValueError:
        raise ConfigError(f"--starts={text}: give numbers of tokens, such as 4,16,64.") from None


def searched_layers(parent: Checkpoint, args: argparse.Namespace) -> tuple[Layer, ...]:
    """The layers with the divisors that `--search` finds; its history is in `TO.search`."""
    from pe_lab.analysis.sequences import data_of
    from pe_lab.checkpoints.checkpoint import is_external
    from pe_lab.evaluation.command_line import parse_length
    from pe_lab.evaluation.session import text_source
    from pe_lab.evaluation.targets import load_subjects, locate
    from pe_lab.lab.extend.search import SearchSettings, search_checkpoint

    target = locate(args.source if is_external(args.source) else str(parent.path))
    (subject,) = load_subjects(target, target.paths[-1:])
    data = text_source(args.text, subject) if args.text else data_of(subject)
    if data is None:
        raise ConfigError(f"A search needs held-out text, and '{parent.path}' names no data; give --text=SOURCE.")
    to = storage.path("--to", args.to)
    given = {"population": args.population, "iterations": args.iterations, "seed": args.search_seed}
    given["starts"] = _starts(args.starts)
    search, _ = search_checkpoint(
        subject,
        data,
        parse_length("--length", args.length or "4x", subject.training_length),
        to.parent / f"{to.name}.search",
        SearchSettings(**{name: value for name, value in given.items() if value is not None}),
        tuple(filter(None, (args.objective or "").split(","))),
        args.sequences or 4,
        not args.any_order,
        functools.partial(print, flush=True),  # minutes pass between lines, also where they go to a file
    )
    return search.space.layers(search.best.genes, parent.layers)


def kept(layers: Sequence[Layer]) -> str:
    """What the layers without encoding still have beside it, such as `with=t5 on layers 0-3`; "" for nothing."""
    from pe_lab.positional import NoPE
    from pe_lab.positional.codec import ranges
    from pe_lab.positional.registry import registered_name

    places: dict[str, list[int]] = {}
    for n, layer in enumerate(layers):
        if layer.encoding != NoPE():
            continue
        found = [f"with={registered_name(extra)}" for extra in layer.extras]
        found += [f"window={layer.window}"] if layer.window else []
        found += ["a logit scale"] if layer.logit_scale != 1.0 else []
        for one in found:
            places.setdefault(one, []).append(n)
    return ", ".join(f"{one} on layer{'s' * (len(at) > 1)} {ranges(at)}" for one, at in places.items())


def gated_layers(parent: Checkpoint) -> tuple[Layer, ...]:
    """The layers of a model with gates: RoPE on heads whose gate is open, at least 0.5, and nothing on the others."""
    from pe_lab.model.learned import learned_encodings
    from pe_lab.positional import HeadEdit, NoPE, Rope, layer_hooks
    from pe_lab.positional.schemes.rotations import GatedRope, gates

    found = list(parent.layers)
    hooks = layer_hooks(parent.layers, parent.model.heads)
    for name, (encoding, at) in learned_encodings(hooks).items():
        if isinstance(encoding, GatedRope):
            values = np.asarray(gates(np.asarray(parent.params["layers"]["positional"][name]["gate"])))
            for n, of_layer in zip(at, values, strict=True):
                if found[n].encoding != encoding:  # beside another encoding, a closed gate takes nothing away
                    continue
                closed = tuple(int(h) for h in np.flatnonzero(of_layer < 0.5))
                kept = dataclasses.replace(found[n], encoding=Rope(base=encoding.base))
                if len(closed) == len(of_layer):
                    kept = dataclasses.replace(kept, encoding=NoPE())
                elif closed:
                    kept = dataclasses.replace(kept, heads=(*kept.heads, HeadEdit(closed, NoPE())))
                found[n] = kept
                print(f"layer {n}: gates {', '.join(f'{g:.2f}' for g in of_layer)}")
    if tuple(found) == parent.layers:
        raise ConfigError(f"'{parent.path}' has no gates: train it with --positional=gated_rope first.")
    return tuple(found)


def chosen_layers(parent: Checkpoint, args: argparse.Namespace) -> list[int]:
    """The layers that `--drop=auto` drops; what is measured is kept beside `--to`, until the child is written."""
    from pe_lab.analysis.drop_choice import SEQUENCES, choose_layers, session_of
    from pe_lab.checkpoints.checkpoint import is_external

    to = storage.path("--to", args.to)
    budget = 0.1 if args.budget is None else args.budget
    # A run is all its phases to an analysis, and its last checkpoint to surgery.
    source = args.source if is_external(args.source) else str(parent.path)
    session = session_of(source, args.text, args.length, args.sequences or SEQUENCES, measured_at(to))
    show = functools.partial(print, flush=True)  # minutes pass between lines, also where they go to a file
    found = choose_layers(session, budget, args.by or "greedy", args.most, show)
    if not found.layers:
        raise ConfigError(f"No layer can be dropped for {budget:g} nats: the cheapest costs {found.costs[0][0]:.3g}.")
    return sorted(found.layers)


def measured_at(to: storage.AnyPath) -> storage.AnyPath:
    """Where --drop=auto keeps what it measures."""
    return to.parent / f".{to.name}.sensitivity"


def logit_scale(parent: Checkpoint, text: str) -> Beta:
    """The value of `--logit-scale` for this checkpoint."""
    from pe_lab.checkpoints.checkpoint import how_to_fit, read_logit_scale
    from pe_lab.positional import Beta

    if text != "fitted":
        try:
            return Beta(float(text), int(parent.metadata["training_length"]))
        except ValueError:
            raise ConfigError(f"--logit-scale='{text}' is no number. Give C, such as 0.103, or fitted.") from None
    scale = read_logit_scale(parent)
    if scale is None:
        raise ConfigError(f"--logit-scale=fitted: {how_to_fit(parent)}")
    return scale


def fitting_batch(parent: Checkpoint, text: str | None) -> Mapping[str, np.ndarray]:
    """A batch of windows of at most `FIT_LENGTH` tokens, from a text file or from the checkpoint's held-out data."""
    from pe_lab.config import DataConfig, from_dict
    from pe_lab.data.held_out import validation_batches
    from pe_lab.data.tokenizers import load_tokenizer

    length = min(int(parent.metadata["training_length"]), FIT_LENGTH)
    if text:
        if not parent.tokenizer:
            raise CheckpointError(f"'{parent.path}' has no tokenizer; --text cannot be used.")
        try:
            ids = load_tokenizer(parent.tokenizer).encode(Path(text).read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--text: '{text}' cannot be read ({error}).") from None
        count = min(FIT_WINDOWS, (len(ids) - 1) // length)
        if count < 1:
            raise DataError(f"--text: '{text}' has {len(ids)} tokens; one window needs {length + 1}.")
        windows = np.asarray(ids[: count * length + 1], np.int32)
        tokens, targets = windows[:-1].reshape(count, length), windows[1:].reshape(count, length)
        return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    if parent.converted:
        raise ConfigError(f"A QK-norm is fitted on text, and '{parent.path}' names no data; give --text=FILE.")
    data = from_dict(DataConfig, parent.metadata["config"]["data"], f"{parent.path}: config.data")
    try:
        found = validation_batches(
            data, sequence_length=length, batch_size=FIT_WINDOWS, count=1, vocab_size=parent.model.vocab_size
        )
    except UserError as error:
        raise DataError(
            f"A QK-norm is fitted on text, and the data of '{parent.path}' cannot be read: {error} Or give --text=FILE."
        ) from None
    batch = next((batches[0] for batches in found.values() if batches), None)
    if batch is None:
        raise DataError(f"The data of '{parent.path}' has no held-out text to fit a QK-norm on; give --text=FILE.")
    return batch


@works_on
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    from pe_lab.checkpoints.checkpoint import open_checkpoint  # these load JAX
    from pe_lab.checkpoints.locating import DIRECTORY
    from pe_lab.checkpoints.surgery import NOTHING, carried_parameters, change, change_qk_norm, write_child
    from pe_lab.data.tokenizers import load_tokenizer, save_tokenizer
    from pe_lab.model import model_schedule
    from pe_lab.model.learned import split_layers
    from pe_lab.parallel import start_processes
    from pe_lab.positional import describe

    kind = "none" if args.remove_qk_norm else args.add_qk_norm
    if not (args.drop or args.positional or args.search or args.mask_heads or args.logit_scale or kind):
        raise ConfigError(
            "Nothing to do: give --drop, --positional, --search, --mask-heads, --logit-scale, --add-qk-norm or "
            "--remove-qk-norm (see --help)."
        )
    if args.qk_norm_init == "ones" and not args.add_qk_norm:
        raise ConfigError("--qk-norm-init=ones goes with --add-qk-norm.")
    to = storage.path("--to", args.to)
    check_checkpoints("--to", to / DIRECTORY)
    check_place("--to", to, new=True)
    start_processes()
    parent = open_checkpoint(args.source)
    after, model = edited_layers(parent, args), parent.model
    if args.logit_scale:
        scale = logit_scale(parent, args.logit_scale)
        after = tuple(dataclasses.replace(layer, logit_scale=scale) for layer in after)
    what = change(parent.layers, after)
    if what == NOTHING and not kind:
        raise ConfigError(f"'{parent.path}' already has these encodings; there is nothing to change.")
    schedule = model_schedule(model, after)
    if kind:
        batch = fitting_batch(parent, args.text)
        model, params, effect = change_qk_norm(model, parent.params, kind, schedule, batch, init=args.qk_norm_init)
        what = str(effect) if what == NOTHING else f"{what}; {effect}"
        parent = dataclasses.replace(parent, model=model, params=params)
    tokenizer = load_tokenizer(parent.tokenizer) if parent.tokenizer else None
    saved = None if tokenizer is None else functools.partial(save_tokenizer, tokenizer)
    where = write_child(parent, after, to, what, saved)
    storage.remove_tree(measured_at(to))
    print(describe(schedule, after, split_layers(carried_parameters(parent, after)[0]["layers"])[1]))
    if args.drop and (rest := kept(after)):
        more = args.drop == "encoding" and "with=" in rest
        advice = "; --drop=all leaves out what stands after with=" if more else ""
        print(f"Kept in the layers without encoding: {rest}{advice}.")
    print(f"{where}: child of {parent.path}: {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
