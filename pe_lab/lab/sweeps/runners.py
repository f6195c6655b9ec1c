"""Where cells run, from a command line: `--on`, `--jobs`, and the options of SLURM and Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pe_lab.errors import ConfigError, did_you_mean
from pe_lab.lab.sweeps.local import Local
from pe_lab.lab.sweeps.ray import Ray
from pe_lab.lab.sweeps.running import Runner
from pe_lab.lab.sweeps.slurm import Slurm

PASSED_ON = ("evaluate.", "slurm-", "ray-")  # --evaluate.lengths=1x,2x is --lengths=1x,2x of pe_lab.evaluate


def split_passed_on(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Splits a command line into the other arguments and the options of pe_lab.evaluate, SLURM and Ray.

    Raises:
      ConfigError: an option has no value.
    """
    rest: list[str] = []
    found: dict[str, dict[str, str]] = {prefix: {} for prefix in PASSED_ON}
    for item in argv:
        prefix = next((one for one in PASSED_ON if item.startswith(f"--{one}")), None)
        if prefix is None:
            rest.append(item)
            continue
        name, equals, value = item.removeprefix(f"--{prefix}").partition("=")
        if not name or (not value and (equals or prefix != "evaluate.")):
            raise ConfigError(f"{item}: give a value, as in --{prefix}{name or 'NAME'}=VALUE.")
        found[prefix][name] = value
    return rest, found


def make_runner(on: str, jobs: int | None, passed_on: Mapping[str, dict[str, str]]) -> Runner:
    """The runner of `--on`: this machine, SLURM or Ray, with the options of the command line.

    Raises:
      ConfigError: there is no such place, or an option is another one's.
    """
    kinds = {"local": "", "slurm": "slurm-", "ray": "ray-"}
    if on not in kinds:
        raise ConfigError(f"--on='{on}': there is no such place. {did_you_mean(on, [*kinds])}")
    for prefix in ("slurm-", "ray-"):
        if passed_on[prefix] and kinds[on] != prefix:
            raise ConfigError(f"--{prefix}{next(iter(passed_on[prefix]))} is an option of --on={prefix[:-1]}.")
    if on == "slurm":
        return Slurm(passed_on["slurm-"], jobs)
    return Ray(passed_on["ray-"], jobs) if on == "ray" else Local(jobs)
