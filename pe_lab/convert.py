"""`python -m pe_lab.convert`: imports checkpoints from Hugging Face and GGUF, and exports them to both."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pe_lab import storage
from pe_lab.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean
from pe_lab.storage import AnyPath, check_checkpoints, check_place, new_directory, new_file, write_json
from pe_lab.storage.manifest import manifest_of
from pe_lab.terminal import argument_parser, byte_progress, positive, works_on

if TYPE_CHECKING:
    from pe_lab.checkpoints.checkpoint import Checkpoint
    from pe_lab.checkpoints.hf_export import Export
    from pe_lab.checkpoints.parity import Parity
    from pe_lab.checkpoints.source import CheckpointSource
    from pe_lab.data.tokenizers import Tokenizer
    from pe_lab.model import Model
    from pe_lab.positional import Layer
    from pe_lab.results.records import Record

EXAMPLES = """\
import:
  python -m pe_lab.convert --from=hf:SmolLM-360M --to=runs/smollm_360m           a Hugging Face directory
  python -m pe_lab.convert --from=hf:Qwen/Qwen3-0.6B --to=runs/qwen3             from the hub, if it is reachable
  python -m pe_lab.convert --from=gguf:SmolLM2.Q8_0.gguf --to=runs/smollm2       a GGUF file, or the first of several
export:
  python -m pe_lab.convert --from=runs/drope/recalibrate --to=hf:exports/drope
  python -m pe_lab.convert --from=runs/drope --to=hf:exports/drope --length=16384 --dtype=bfloat16
  python -m pe_lab.convert --from=runs/drope --to=hf:exports/drope --for=transformers,vllm --push=ORG/NAME
  python -m pe_lab.convert --from=runs/drope --to=gguf:drope.gguf                  for llama.cpp, weights as they are
  python -m pe_lab.convert --from=hf:SmolLM-360M --to=gguf:smollm.gguf:q8_0        or f16, bf16, f32

Weights keep their dtype; training and evaluation use float32. If transformers and torch are installed (or
--parity-python names an interpreter that has them), the parity check compares the logits of a fixed batch, and a result
that differs is removed; a GGUF file is compared with llama.cpp, by the package llama-cpp-python. docs/checkpoints.md
lists the families, and the edits that each can express.
"""


def parser() -> argparse.ArgumentParser:
    description = "Imports a checkpoint from Hugging Face or GGUF, or exports one to them."
    p = argument_parser("convert", description, EXAMPLES)
    p.add_argument(
        "--from", dest="source", required=True, help="hf:DIR, hf:ORG/NAME, gguf:FILE, or a checkpoint of pe_lab"
    )
    p.add_argument("--to", required=True, help="a new directory; hf:DIR or gguf:FILE[:q8_0|f16|bf16|f32] to export")
    p.add_argument(
        "--family",
        default="auto",
        help="the architecture of an export, such as llama (default auto: the one that most runtimes read right)",
    )
    p.add_argument(
        "--for",
        dest="runtimes",
        type=_runtimes,
        default=(),
        metavar="RUNTIMES",
        help="transformers,vllm,sglang,llama.cpp, or some of them, which must compute an export right; it is "
        "refused where no form is right in all (default: the form that is right in most)",
    )
    p.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="also send an export to a repository of the Hugging Face hub that has no model, or no such GGUF file "
        "(token: `hf auth login`, or HF_TOKEN)",
    )
    p.add_argument("--dtype", help="of weights exported to hf:DIR: float32, bfloat16 or float16 (default: unchanged)")
    p.add_argument("--tokenizer", choices=("none",), help="none: leave the tokenizer out")
    p.add_argument(
        "--length",
        type=positive,
        metavar="TOKENS",
        help="fix encodings that depend on the length (beta, dynamic YaRN) at this one",
    )
    p.add_argument(
        "--max-length",
        type=positive,
        metavar="TOKENS",
        help="the longest sequence that an export declares, for servers (default: the training length times the factor "
        "of the scaling)",
    )
    p.add_argument(
        "--parity",
        default="auto",
        choices=("auto", "require", "off"),
        help="compare logits with transformers (of gguf:FILE, llama.cpp): if possible (auto), always, or never",
    )
    p.add_argument("--parity-python", metavar="PYTHON", help="an interpreter with transformers and torch, or llama_cpp")
    return p


@works_on
def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)

    from pe_lab.checkpoints.checkpoint import open_source  # these load JAX
    from pe_lab.checkpoints.gguf.export import split_kind
    from pe_lab.checkpoints.locating import DIRECTORY
    from pe_lab.checkpoints.parity import find_python
    from pe_lab.data.tokenizers import check_vocabulary, load_tokenizer
    from pe_lab.parallel import hide_absent_tpu

    form = next((form for form in ("hf", "gguf") if args.to.startswith(f"{form}:")), "")
    given, kind = split_kind(args.to.removeprefix("gguf:")) if form == "gguf" else (args.to.removeprefix("hf:"), None)
    to = storage.path("--to", given)
    if not form:
        check_checkpoints("--to", to / DIRECTORY)
    if form == "gguf":
        _check_gguf(to, args)
    else:
        check_place("--to", to, new=True)
    hide_absent_tpu()
    source = open_source(args.source)
    needs = ("transformers", "torch", *(("gguf",) if source.path.suffix == ".gguf" else ()))
    needs = ("llama_cpp",) if form == "gguf" else needs
    python = None if args.parity == "off" else find_python(args.parity_python, needs)
    if args.parity == "require" and python is None:
        raise UnsupportedError(
            f"--parity=require: {' and '.join(needs)} are not installed; give --parity-python=PYTHON."
        )
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer and not args.tokenizer else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, source.model.vocab_size, source.display_name)
    if form == "gguf":
        export_gguf(source, tokenizer, to, kind, args, python)
    else:
        (export_checkpoint if form else import_checkpoint)(source, tokenizer, to, args, python)
    return 0


def import_checkpoint(
    source: CheckpointSource, tokenizer: Tokenizer | None, to: AnyPath, args: argparse.Namespace, python: str | None
) -> None:
    """Writes an external checkpoint as a native one."""
    from pe_lab.checkpoints.checkpoint import is_external, open_checkpoint
    from pe_lab.checkpoints.native import write_checkpoint
    from pe_lab.checkpoints.parity import compare
    from pe_lab.data.tokenizers import save_tokenizer
    from pe_lab.model import Model, model_schedule
    from pe_lab.positional import describe, layer_hooks

    if not is_external(args.source):
        raise ConfigError(
            f"--from '{args.source}' is a checkpoint of pe_lab already. Edit it with pe_lab.surgery, or export it with "
            "--to=hf:DIR or --to=gguf:FILE."
        )
    given = {"--family": args.family != "auto", "--for": args.runtimes, "--push": args.push, "--dtype": args.dtype}
    for option, value in (given | {"--length": args.length, "--max-length": args.max_length}).items():
        if value:
            raise ConfigError(f"{option} goes with --to=hf:DIR or gguf:FILE; an import changes nothing.")
    model = Model(source.model, hooks=layer_hooks(source.layers, source.model.heads))
    size = model.num_parameters * source.dtype.itemsize
    trained = f"trained on {source.training_length:,} tokens"
    print(f"{source.display_name}: {model.num_parameters:,} parameters, {source.dtype}, {trained}")
    if source.note:
        print(source.note)
    schedule = model_schedule(model.config, source.layers)
    print(describe(schedule, source.layers))
    with new_directory(to, "--to") as temporary:
        metadata = {} if tokenizer is None else {"tokenizer": tokenizer.fingerprint}
        with byte_progress("converting", size) as done:
            where = write_checkpoint(source, temporary, to, metadata, done)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary / "tokenizer")
        gguf_file = source.path.name if source.path.is_file() else None
        external = source.path.parent if gguf_file else source.path
        family = getattr(source, "family", None)
        if family is not None and not family.stock and args.parity != "require":
            print(f"Logits not compared: transformers has no {family.architecture} without remote code.")
        elif gguf_file and args.parity != "require" and family.model_type != "llama":
            print(f"Logits not compared: transformers may read a GGUF file of {family.model_type} otherwise.")
        elif gguf_file and args.parity != "require" and "-00001-of-" in gguf_file:
            print("Logits not compared: transformers reads no split GGUF files.")
        elif gguf_file and args.parity != "require" and not all(map(_plain, source.layers)):
            print("Logits not compared: transformers ignores the rope scaling of a GGUF file.")
        else:
            _check_parity(args, python, model, lambda p: compare(open_checkpoint(where), external, p, gguf_file))
    note = "" if tokenizer else " It has no tokenizer."
    print(f"{to}: converted from {source.display_name}.{note}")


def _plain(layer: Layer) -> bool:
    from pe_lab.positional import Rope

    return isinstance(layer.encoding, Rope) and layer.encoding.scaling is None


def export_checkpoint(
    source: CheckpointSource, tokenizer: Tokenizer | None, to: AnyPath, args: argparse.Namespace, python: str | None
) -> None:
    """Writes any checkpoint as a Hugging Face directory."""
    from pe_lab.checkpoints.hf_export import plan_export, write_huggingface
    from pe_lab.checkpoints.hub import check_push, push
    from pe_lab.checkpoints.parity import compare
    from pe_lab.checkpoints.runtimes import report
    from pe_lab.model import Model
    from pe_lab.positional import layer_hooks
    from pe_lab.results.model_card import CARD, model_card

    family = None if args.family == "auto" else args.family
    export = plan_export(source, family, args.dtype, args.length, args.max_length, args.runtimes)
    if args.push:
        check_push(args.push)
    if tokenizer is not None:
        export = dataclasses.replace(export, config={**export.config, **_token_ids(tokenizer, export.config)})
    print(f"{source.display_name}: as {export.family.architecture}, {export.dtype}, {export.size / 1e9:.2f} GB")
    for note in export.notes:
        print(note)
    if export.family.model_type == "qwen2" and tokenizer is not None and tokenizer.kind != "hf":
        print(
            "transformers 5 loads every tokenizer of a qwen2 model as Qwen's, with other ids: load this one with "
            "PreTrainedTokenizerFast."
        )
    if not export.family.stock:
        print(f"transformers has no {export.family.architecture}: the family's own code reads this.")
    else:
        print(report(export.config))
    with new_directory(to, "--to") as temporary:
        with byte_progress("converting", export.size) as done:
            write_huggingface(source, export, temporary, done)
        _write_generation(export.config, tokenizer, temporary)
        card = model_card(source, export, args.push or to.name, _results(args.source, source))
        (temporary / CARD).write_text(card, encoding="utf-8")
        if export.family.stock:
            model = Model(source.model, hooks=layer_hooks(source.layers, source.model.heads))
            _check_parity(args, python, model, lambda p: compare(_as_exported(args, export), temporary, p))
        manifest_of(temporary, {"kind": "export"}).write(temporary)
    note = "" if tokenizer else " The checkpoint has no tokenizer."
    print(f"{to}: written from {source.display_name}.{note}")
    if args.push:
        directory = storage.local_copy(to)
        files = {str(file.relative_to(directory)): file for file in sorted(directory.rglob("*")) if file.is_file()}
        print(f"{push(directory, files, args.push)}: sent.")


def _runtimes(text: str) -> tuple[str, ...]:
    """Names of runtimes, in any case, with commas between them."""
    from pe_lab.checkpoints.runtimes import RUNTIMES

    known = {name.lower(): name for name in RUNTIMES}
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is not known. {did_you_mean(unknown[0], list(known))}")
    if not names:
        raise argparse.ArgumentTypeError(f"it names no runtime of {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _results(given: str, source: CheckpointSource) -> list[Record]:
    """What was measured of the checkpoint, where its run has results."""
    from pe_lab.evaluation.targets import locate
    from pe_lab.results.runs import NoRun, read_run

    if not (own := source.metadata.get("id")):
        return []
    try:
        evaluation = read_run(locate(given).root).evaluation
    except NoRun:
        return []
    return [record for records in evaluation.values() for record in records if record.get("checkpoint_id") == own]


def _check_gguf(to: AnyPath, args: argparse.Namespace) -> None:
    """`ConfigError` for a GGUF file that cannot be written; `UnsupportedError` without the gguf package."""
    if args.dtype is not None:
        raise ConfigError("--dtype goes with --to=hf:DIR; of a GGUF file it is a suffix, such as --to=gguf:FILE:q8_0.")
    if args.runtimes:
        raise ConfigError("--for goes with --to=hf:DIR; a GGUF file is for llama.cpp.")
    if storage.is_remote(to):
        raise ConfigError(f"--to=gguf:{to} is on an object store; write the file on a disk, and copy it there.")
    if storage.exists(to):
        raise ConfigError(f"--to=gguf:{to} exists. Remove it, or give another name.")
    check_place("--to", to, file=True)
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(f"--to=gguf:{to} needs the gguf package: pip install gguf.")


def export_gguf(
    source: CheckpointSource,
    tokenizer: Tokenizer | None,
    to: Path,
    kind: str | None,
    args: argparse.Namespace,
    python: str | None,
) -> None:
    """Writes any checkpoint as a GGUF file; `kind` is one of `gguf.export.KINDS`, or None for the weights' own."""
    from pe_lab.checkpoints.gguf.export import check_written, plan_gguf, write_gguf
    from pe_lab.checkpoints.hub import check_push, push
    from pe_lab.checkpoints.parity import compare_with_llama_cpp
    from pe_lab.data.tokenizers.to_gguf import gguf_metadata
    from pe_lab.model import Model
    from pe_lab.positional import layer_hooks
    from pe_lab.results.model_card import CARD, gguf_card

    family = None if args.family == "auto" else args.family
    export = plan_gguf(source, kind, family, args.length, args.max_length)
    there = check_push(args.push, to.name) if args.push else []
    vocabulary, notes = {"tokenizer.ggml.model": "none"}, ()
    if tokenizer is not None:
        vocabulary, notes = gguf_metadata(tokenizer, source.model.vocab_size, to.stem)
    numbers = ", ".join(dict.fromkeys(one.lower() for one in export.kinds))
    declared = f"declared for {export.plan.config['context_length']:,} tokens"
    architecture = export.plan.family.model_type
    print(f"{source.display_name}: as llama.cpp's {architecture}, {numbers}, {export.size / 1e9:.2f} GB, {declared}")
    for note in (*export.notes, *notes):
        print(note)
    with new_file(to, "--to") as temporary:
        with byte_progress("converting", export.size) as done:
            write_gguf(source, export, temporary, to.stem, vocabulary, done)
        check_written(temporary, export)
        model = Model(source.model, hooks=layer_hooks(source.layers, source.model.heads))
        _check_parity(args, python, model, lambda p: [compare_with_llama_cpp(temporary, p)], "llama.cpp")
    card = to.with_name(f"{to.name}.md")
    text = gguf_card(source, export, to.name, args.push, (*export.notes, *notes), _results(args.source, source))
    storage.write_file(card, text.encode())
    note = "" if tokenizer else " It has no tokenizer: programs that read text need one."
    print(f"{to}: written from {source.display_name}, with its model card {card.name}.{note}")
    if args.push:
        files = {to.name: to} | ({} if CARD in there else {CARD: card})
        print(f"{push(to, files, args.push)}: sent.")


def _token_ids(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[str, Any]:
    """The ids that begin, end and pad a sequence, by their keys in `config.json` and `generation_config.json`."""
    vocabulary = config["vocab_size"]
    ends = [id for id in tokenizer.stop_ids if id < vocabulary]
    name = tokenizer.companions.named.get("pad_token", "")
    pad = tokenizer.encode_prompt(name, add_special_tokens=False)
    # One that is not in the vocabulary may have the id of unknown characters.
    known = len(pad) == 1 and pad[0] < vocabulary and tokenizer.decode(pad, skip_special_tokens=False) == name
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": int(pad[0]) if known else None,
    }


def _write_generation(config: dict[str, Any], tokenizer: Tokenizer | None, directory: Path) -> None:
    """Writes the tokenizer's files and generation_config.json, which agree with `config.json` in ids and length.

    Settings of sampling are those of the generation_config.json that came with the tokenizer, or else greedy.
    """
    from pe_lab.checkpoints.rope_parameters import declared_length
    from pe_lab.data.tokenizers import export_tokenizer
    from pe_lab.data.tokenizers.companions import CONFIGURATION, GENERATION

    if tokenizer is not None:
        export_tokenizer(tokenizer, directory)
        settings = json.loads((directory / CONFIGURATION).read_bytes())
        write_json(directory / CONFIGURATION, {**settings, "model_max_length": declared_length(config)})
    given = directory / GENERATION
    sampling = json.loads(given.read_bytes()) if given.exists() else {"do_sample": False}
    write_json(given, {**sampling, **{key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}})


def _as_exported(args: argparse.Namespace, export: Export) -> Checkpoint:
    """The model that the export should equal: with logit scales as such in float32, else folded and rounded."""
    from pe_lab.checkpoints.checkpoint import open_checkpoint
    from pe_lab.checkpoints.families import block_leaf, leaf_paths, leaf_shapes
    from pe_lab.checkpoints.hf_export import scaled
    from pe_lab.checkpoints.source import nested

    checkpoint = open_checkpoint(args.source)
    if export.dtype == "float32":
        pairs = zip(export.layers, export.scales, strict=True)
        return dataclasses.replace(
            checkpoint, layers=tuple(dataclasses.replace(layer, logit_scale=scale) for layer, scale in pairs)
        )
    leaves, shapes = leaf_paths(checkpoint.params), leaf_shapes(checkpoint.model, checkpoint.layers)
    for path, leaf in leaves.items():
        if (at := shapes[path].layers) is not None and block_leaf(path) in export.folded:
            rows = zip(np.asarray(leaf), at, strict=True)
            leaf = np.stack([scaled(row, export.scales[layer], export.plus_one) for row, layer in rows])
        leaves[path] = leaf.astype(export.dtype).astype(np.float32)
    return dataclasses.replace(checkpoint, params=nested(leaves), layers=export.layers)


def _check_parity(
    args: argparse.Namespace,
    python: str | None,
    model: Model,
    judge: Callable[[str], Sequence[Parity]],
    runtime: str = "transformers",
) -> None:
    """Prints the verdict of the parity check, or why it was not made; `CheckpointError` if the logits differ."""
    from pe_lab.checkpoints.parity import LAST_POSITION, fits_twice

    if args.parity == "off":
        print("Logits not compared: --parity=off.")
        return
    if python is None:
        packages = "llama-cpp-python is" if runtime == "llama.cpp" else "transformers and torch are"
        print(f"Logits not compared: {packages} not installed here (--parity-python=PYTHON names another).")
        return
    if args.parity == "auto" and not fits_twice(4 * model.num_parameters):
        print("Logits not compared: memory cannot hold the model twice (--parity=require tries nevertheless).")
        return
    started = time.monotonic()
    verdicts, theirs = judge(python), f"{runtime}'" if runtime.endswith("s") else f"{runtime}'s"
    for verdict in verdicts:
        if not verdict.passed:
            raise CheckpointError(
                f"The logits differ from {theirs}: {verdict}. The result was removed. The cause is the conversion "
                "or the checkpoint, not rounding; please report it (--parity=off keeps the result)."
            )
    listed = "; ".join(map(str, verdicts))
    print(f"Logits compared with {theirs}: {listed}; {time.monotonic() - started:.0f} s.")
    if verdicts[-1].last == LAST_POSITION:
        print(f"Not compared: positions beyond {LAST_POSITION:,}, where transformers' rounding of angles hides more.")


if __name__ == "__main__":
    sys.exit(main())
