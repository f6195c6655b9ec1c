"""Recipes: Python files that build an `ml_collections.ConfigDict`, and how a run's `Config` is made of one.

`read_recipe` gives the tree of the keys that are set, on the command line too. `inherit` completes it from the
checkpoints that phases start from, `with_prolonged` from the run that it continues; `from_dict` checks it. No other
module sees a ConfigDict, except the recipes.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from pe_lab import storage
from pe_lab.config import Config, ModelConfig, PhaseConfig, check_key, check_name, from_dict, to_json
from pe_lab.errors import ConfigError, UserError, did_you_mean
from pe_lab.identity import saved_config
from pe_lab.storage import AnyPath, absolute, exists
from pe_lab.terminal import command

if TYPE_CHECKING:
    from pe_lab.checkpoints.source import CheckpointSource

Recipe = str | Config | ConfigDict | Mapping[Any, Any]  # a file, or what `get_config` of one returns


def load_config(
    reference: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    inherits: bool = False,
    workdir: AnyPath | None = None,
) -> Config:
    """The config of a recipe: `configs/x.py`, or `configs/x.py:ARG` to pass ARG to its `get_config`.

    Args:
      reference, overrides: as for `read_recipe`.
      inherits: whether phases with `init_from` take what is not set from that checkpoint, see `inherit`; otherwise the
        defaults are in its place.
      workdir: of the run, if it may have begun.

    Raises:
      ConfigError: as `read_recipe` and `inherit`; or a key is unknown, a value has another type or is out of bounds.
    """
    tree = read_recipe(reference, overrides)
    return from_dict(Config, inherit(tree, workdir) if inherits else tree)


def read_recipe(recipe: Recipe, overrides: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """The keys that a recipe sets, as nested dicts and lists.

    Args:
      recipe: a file, with its argument after a colon. Where there is no such file, `configs/x.py` and
        `pe_lab/configs/x.py` are the recipe x of this installation. Or what its `get_config` returns, or a `Config`.
      overrides: `{"model.layers": 4, "phases.0.steps": "10"}`; a text is read as a Python literal, if it is one.

    Raises:
      ConfigError: there is no such file or no `get_config` in it, or its code raises anything.
    """
    if isinstance(recipe, Config):
        tree = to_json(recipe)
    elif isinstance(recipe, str):
        name, arg = split_reference(recipe)
        with explained(name):
            module = load_module(_find_recipe(Path(name)))
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError(f"--config: '{name}' defines no get_config(arg).")
        with explained(name):
            tree = _plain(get_config(arg))
        if not isinstance(tree, dict):
            raise ConfigError(f"--config: get_config of '{name}' returns {tree!r}; it must return a ConfigDict.")
    else:
        tree = _plain(recipe)
    for key, value in (overrides or {}).items():
        _override(tree, key, value)
    return tree


def split_reference(reference: str) -> tuple[str, str]:
    """(the file, its argument) of `configs/x.py:ARG`; the name of a file that exists may have colons."""
    name, _, arg = reference.partition(":")
    ends = [place for place, sign in enumerate(f"{reference}:") if sign == ":"]
    for end in reversed(ends):
        with contextlib.suppress(OSError, ValueError):
            if Path(reference[:end]).is_file():
                return reference[:end], reference[end + 1 :]
    return name, arg


@contextlib.contextmanager
def explained(name: str, option: str = "--config") -> Iterator[None]:
    """Makes whatever the code of a recipe or a claim raises a `ConfigError` with the line that raised it.

    `name` is its file as the user gave it by `option`.
    """
    try:
        yield
    except ValueError as error:  # a recipe refuses its argument; `ConfigError` is one
        raise ConfigError(f"{option}: '{name}': {error}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, AttributeError) and "'dict' object" in str(error):
            raise ConfigError(
                f"{option}: '{name}' sets an attribute of a dict ({error}). Make phases with "
                "pe_lab.recipes.phase(...), or write config.phases[0]['steps'] = ..."
            ) from error
        directory = str(Path(name).parent.resolve())
        frames = traceback.extract_tb(error.__traceback__)
        at = next((frame for frame in reversed(frames) if frame.filename.startswith(directory)), None)
        located = isinstance(error, SyntaxError) and error.filename is not None  # not of a binary file
        where = f"{error.filename}, line {error.lineno}: " if located else ""
        where = where or (f"{at.filename}, line {at.lineno}: " if at else "")
        reason = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ConfigError(f"{option}: {where or repr(name) + ': '}{type(error).__name__}: {reason}") from error


def installed_recipes() -> Path:
    """The directory of the recipes: inside the package where a wheel installed it, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _find_recipe(path: Path) -> Path:
    """The file that a path means: itself, or else the installed recipe of that name."""
    if path.is_file():
        return path
    directory = installed_recipes()
    if path.parts[:-1] in (("configs",), ("pe_lab", "configs")) and (directory / path.name).is_file():
        return directory / path.name
    names = ", ".join(sorted(recipe.stem for recipe in directory.glob("*.py")))
    raise ConfigError(
        f"--config: there is no file '{path}'. configs/NAME.py is a recipe of pe_lab, with NAME of {names}."
    )


def load_module(path: Path) -> types.ModuleType:
    """The module of a recipe or a claim, which may import others of its directory: `from .table1 import get_config`."""
    package = types.ModuleType(f"pe_lab_recipes_{hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:8]}")
    package.__path__ = [str(path.parent.resolve())]
    sys.modules.setdefault(package.__name__, package)
    spec = importlib.util.spec_from_file_location(f"{package.__name__}.{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file. Recipes are, such as configs/drope_laptop.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# Settings of a model that follow from the devices; `accumulate` is that of a phase.
AUTO = {"remat": "auto", "scan": "auto", "loss_chunks": "auto"}


def phase(**keys: Any) -> ConfigDict:
    """A phase of a recipe. Its keys can be set later: `config.phases[0].positional = NoPE()`."""
    return ConfigDict(keys, type_safe=False)


def _plain(value: Any) -> Any:
    """The value with dicts for ConfigDicts, and lists for tuples."""
    if isinstance(value, ConfigDict | Mapping):
        return {key: _plain(value[key]) for key in value}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _override(tree: Any, key: str, value: Any) -> None:
    """Sets one dotted key of a recipe's tree; items of lists by number. `from_dict` checks the names."""
    *path, last = key.split(".")

    def index(items: list[Any] | dict[str, Any], name: str) -> Any:
        if isinstance(items, dict):
            return name
        if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= len(items):
            raise ConfigError(f"--config.{key}: '{name}' is not one of the {len(items)} items, numbered from 0.")
        return int(name)

    for name in path:
        if isinstance(tree, dict):
            tree.setdefault(name, {})
        tree = tree[index(tree, name)]
        if not isinstance(tree, dict | list):
            raise ConfigError(f"--config.{key}: '{name}' is a single value and has nothing inside.")
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two: brackets nested too deep
            value = {"true": True, "false": False}.get(value.lower(), value)
    tree[index(tree, last)] = _plain(value)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits a command line into the other arguments and `{"a.b": "value"}`, given as `--config.a.b=value`.

    Raises:
      ConfigError: no config has such a key, or its value is missing.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    items = iter(argv)
    for item in items:
        if not item.startswith("--config."):
            rest.append(item)
            continue
        key, equals, text = item.removeprefix("--config.").partition("=")
        if not equals:
            text = next(items, "")
            if not text or text.startswith("--"):
                raise ConfigError(f"{item}: give a value, as in {item}=VALUE.")
        check_key(Config, key)
        overrides[key] = text
    return rest, overrides


def refuse_misspelt_keys() -> None:
    """Ends the process where its command line has a key that no config has: for a command, before its slow imports."""
    if status := command(lambda argv: split_overrides(argv) and 0)():
        sys.exit(status)


def recipe_arguments(arg: str, **allowed: str | Sequence[str]) -> dict[str, str]:
    """The values of a recipe's argument `key=value,key=value`, completed with defaults.

    Args:
      arg: the argument. A value with a comma is in quotes: `data='text:{a,b}/*.md'`.
      **allowed: for each key its choices, of which the first is the default ("": the recipe has to choose), or a text,
        the default of a key that takes any value.

    Raises:
      ConfigError: a key or a value is not allowed.
    """
    listed = {key: [c for c in choices if c] for key, choices in allowed.items() if not isinstance(choices, str)}
    found = {key: choices if isinstance(choices, str) else choices[0] for key, choices in allowed.items()}
    usage = ", ".join(f"{key}={'|'.join(listed.get(key, ['TEXT']))}" for key in allowed)
    for item in re.findall(r"""(?:[^,"']|"[^"]*"|'[^']*'|["'])+""", arg):
        key, _, value = item.partition("=")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if key not in allowed or not value or value not in listed.get(key, [value]):
            near = did_you_mean(value, listed[key]) if key in listed else did_you_mean(key, list(allowed))
            raise ConfigError(f"'{item}' is no argument of this recipe. {near} It takes {usage}.")
        found[key] = value
    return found


def number(arguments: Mapping[str, str], key: str, kind: type = float) -> Any:
    """An argument of a recipe as a number of this kind; `ConfigError` if it is none."""
    try:
        return kind(arguments[key])
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{key}={arguments[key]} is not {what}.") from None


def name_of(checkpoint: str) -> str:
    """The last part of a checkpoint's path as a part of a run's name: `hf:models/SmolLM-360M` is SmolLM_360M."""
    return re.sub(r"\W+", "_", checkpoint.rstrip("/").rpartition("/")[2]).strip("_") or "run"


def corpus(source: str, **options: Any) -> dict[str, Any]:
    """`config.data` of an argument: a directory of pe_lab.prepare, or one source, such as prose or text:GLOB.

    `options` are those of the source, such as `chat`.
    """
    if source in ("stdlib", "prose", "manuals") or ":" in source:
        return dict(sources=[dict(source=source, **options)])
    return dict(prepared=source, **(dict(sources=[options]) if options else {}))


def data_of_checkpoint(checkpoint: str) -> dict[str, Any]:
    """`config.data` of the run that made a checkpoint, without its tokenizer, which a phase takes from the checkpoint.

    Raises:
      ConfigError: the checkpoint cannot be read, or does not tell its data.
    """
    from pe_lab.checkpoints.checkpoint import open_source  # loads JAX

    try:
        data = (open_source(checkpoint).metadata.get("config") or {}).get("data")
    except UserError as error:
        raise ConfigError(f"The data of '{checkpoint}' cannot be read: {error}") from None
    if not data:
        raise ConfigError(f"'{checkpoint}' does not tell its data: name a source.")
    return {key: value for key, value in data.items() if key != "tokenizer"}


def with_long_documents(data: Mapping[str, Any], share: float, length: int) -> dict[str, Any]:
    """`config.data` with a share of the text's windows from documents of at least `length` tokens, packed whole."""
    sources = [dict(one) for one in data.get("sources") or [{}]]
    if data.get("prepared"):
        text = [one for one in sources if one.get("source") != "needles"][:1] or [{}]
        needles = [one for one in sources if one.get("source") == "needles"]
        sources = [{**text[0], "source": f"prepared:{data['prepared']}", "options": {}}, *needles]
    found = []
    for n, one in enumerate(sources):
        if one.get("source") == "needles" or not share:
            found.append(one)
            continue
        weight = one.get("weight", 1.0)
        name = f"{one.get('name') or f'source {n}'}, long documents"
        found.append({**one, "weight": weight * (1 - share)})
        found.append({**one, "weight": weight * share, "min_tokens": length, "name": name})
    return {**data, "sources": found, "prepared": "", "packing": "best_fit", "segments": True}


# ---------------------------------------------------------------------------------------------------------------------
# What a recipe does not set


# Without these, the defaults of the config would be another model; recipes of a published shape set them.
NEEDED = ("layers", "d_model", "d_ff", "heads", "kv_heads")


def _shape() -> list[str]:
    """The fields of `model` that the weights of a checkpoint determine."""
    from pe_lab.checkpoints.surgery import FREE_FIELDS  # loads JAX, as below

    return [field.name for field in dataclasses.fields(ModelConfig) if field.name not in FREE_FIELDS]


def workdir_of(tree: Mapping[Any, Any], given: str | AnyPath | None) -> AnyPath:
    """The directory of a run: --workdir, or runs/NAME.

    Raises:
      ConfigError: the name is none of a directory in runs.
    """
    name = str(tree.get("name", "run"))
    check_name("config.name", name)
    return storage.path("--workdir", given) if given else Path("runs") / name


def inherit(tree: dict[Any, Any], workdir: AnyPath | None = None) -> dict[Any, Any]:
    """The tree of a recipe, completed by what its phases with `init_from` do not set.

    From the checkpoint come the fields of `model` that its weights determine, the tokenizer (unless the data are
    prepared), and the phase's `sequence_length` and `positional`. A run that has begun in `workdir` has these values in
    its run.json, and does not need the checkpoint any more.

    Raises:
      ConfigError: the checkpoint cannot be read, and the recipe does not do without it.
    """
    phases = tree.get("phases")
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        return tree  # `from_dict` has the message
    tree = {**tree, "phases": [dict(phase) for phase in phases]}
    saved, first = saved_config(workdir) if workdir is not None else None, True
    for index, phase in enumerate(tree["phases"]):
        path = phase.get("init_from")
        if not isinstance(path, str) or path in ("", "random") or _inside(path, workdir):
            continue
        wanted, first = _unset(tree, phase, first), False
        if not wanted:
            continue
        values = _saved(saved, index, path, workdir)
        if values is None:
            values = _of_checkpoint(index, path, wanted)
        for part, key in wanted:
            if (part, key) in values:
                target = phase if part == "phase" else tree.setdefault(part, {})
                target[key] = values[part, key]
    return tree


def _inside(path: str, workdir: AnyPath | None) -> bool:
    """Whether a checkpoint is one of the run itself, whose shape the config gives."""
    if workdir is None or path.startswith(("hf:", "gguf:")):
        return False
    return absolute(storage.path("init_from", path)).is_relative_to(absolute(workdir))


def _unset(tree: dict[Any, Any], phase: Mapping[Any, Any], first: bool) -> list[tuple[str, str]]:
    """What a recipe leaves to the checkpoint, as (model, data or phase; key)."""
    wanted = [("phase", key) for key in ("sequence_length", "positional") if key not in phase]
    if not first:  # one model and one tokenizer for all phases
        return wanted
    model, data = (tree.get(part) or {} for part in ("model", "data"))
    if isinstance(model, dict):
        tree["model"] = dict(model)
        wanted += [("model", key) for key in _shape() if key not in model]
    if isinstance(data, dict) and "tokenizer" not in data and not data.get("prepared"):
        sources = data.get("sources") or []
        names = [str(source.get("source", "")) for source in sources if isinstance(source, dict)]
        if not any(name.startswith("prepared:") for name in names):
            tree["data"] = dict(data)
            wanted.append(("data", "tokenizer"))
    return wanted


def _saved(
    saved: Mapping[str, Any] | None, index: int, path: str, workdir: AnyPath | None
) -> dict[tuple[str, str], Any] | None:
    """The values of the run that has begun; None if there is none that starts from `path`."""
    from pe_lab.data.tokenizers import KIND_FILE

    try:
        phase, model, data = saved["phases"][index], saved["model"], saved["data"]
        if phase["init_from"] != path:
            return None
        values = {("model", key): model[key] for key in _shape() if key in model}
        values |= {("phase", key): phase[key] for key in ("sequence_length", "positional")}
        tokenizer = data["tokenizer"]
        kept = workdir / "tokenizer"
        if not exists(storage.path("the tokenizer", tokenizer.partition(":")[2] or ".")) and exists(kept / KIND_FILE):
            tokenizer = f"saved:{kept}"  # the run's own copy
        return {**values, ("data", "tokenizer"): tokenizer}
    except (AttributeError, TypeError, LookupError):
        return None


def _of_checkpoint(index: int, path: str, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """The values of a checkpoint."""
    from pe_lab.checkpoints.checkpoint import open_source

    needed = [key for part, key in wanted if part != "model" or key in NEEDED]
    try:
        source = open_source(path)
    except UserError as error:
        if not needed:
            return {}  # the recipe says all; training says what is wrong with the checkpoint
        raise ConfigError(
            f"config.phases[{index}] takes {', '.join(needed)} from its init_from '{path}', which cannot be read: "
            f"{error} Make that checkpoint first (pe_lab.convert imports one), or set these keys."
        ) from None
    values = {("model", key): getattr(source.model, key) for key in _shape()}
    values |= {("phase", "sequence_length"): source.training_length, ("phase", "positional"): _described(source)}
    if ("data", "tokenizer") in wanted:
        if not source.tokenizer:
            raise ConfigError(f"The checkpoint '{source.display_name}' has no tokenizer: set config.data.tokenizer.")
        values["data", "tokenizer"] = source.tokenizer
    return values


def _described(source: CheckpointSource) -> Any:
    """The layers of a checkpoint for `positional`: one encoding if all layers have it, and nothing else."""
    from pe_lab.positional import Layer

    first = source.layers[0]
    same = all(layer == first for layer in source.layers)
    return first.encoding if same and first == Layer(first.encoding) else [first] if same else list(source.layers)


def with_prolonged(tree: dict[Any, Any], saved: Mapping[str, Any] | None) -> dict[Any, Any]:
    """The tree of a recipe with the steps that `train --until` has added to the run, whose config so far is `saved`.

    A phase of `epochs` gets the steps that its run found for them: the added ones come after these.

    Raises:
      ConfigError: the recipe has another number of steps than the run had before it was made longer, and has now.
    """
    phases, before = tree.get("phases"), (saved or {}).get("phases")
    if not isinstance(phases, list) or not isinstance(before, list):
        return tree
    known = {phase.get("name"): phase for phase in before if isinstance(phase, dict)}
    phases = list(phases)
    for index, phase in enumerate(phases):
        if not isinstance(phase, dict) or phase.get("prolonged"):
            continue
        name, epochs = phase.get("name", PhaseConfig.name), phase.get("epochs")
        was = known.get(name, {}) if isinstance(name, str) else {}
        prolonged, now = was.get("prolonged", []), phase.get("steps", PhaseConfig.steps)
        if not prolonged and not (epochs and was):
            continue
        try:
            was = from_dict(PhaseConfig, {"name": name, "steps": was["steps"], "prolonged": prolonged})
        except (UserError, LookupError):
            continue  # damaged
        if not epochs and now not in (was.steps, *(one.steps for one in was.prolonged)):
            planned = was.prolonged[0].steps
            raise ConfigError(
                f"config.phases[{index}] ('{name}').steps is {now}, and the run was made longer, from {planned} to "
                f"{was.steps} steps. Leave the recipe at {planned}, and give --until=STEPS for more."
            )
        phases[index] = {**phase, "steps": was.steps, "prolonged": list(was.prolonged)}
    return {**tree, "phases": phases}
