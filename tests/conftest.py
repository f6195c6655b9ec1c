"""Before JAX starts: eight virtual CPU devices, quick compilation, annotations checked at run time."""

import gc
import importlib.metadata
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" in os.environ:
    # There are as many workers as cores: one thread of XLA's own in each is enough.
    os.environ.setdefault("NPROC", "1")

_flags_before = os.environ.get("XLA_FLAGS")
_flags = {
    "--xla_force_host_platform_device_count": "8",
    # Tests compile much and compute little. The HLO is optimized as ever; LLVM takes a third of its time.
    "--xla_backend_optimization_level": "0",
}
if "PYTEST_XDIST_WORKER" in os.environ:
    # Nor is anything won by cutting a program into 32 parts, to be compiled beside each other.
    _flags["--xla_cpu_parallel_codegen_split_count"] = "1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # The older way of emitting fused loops compiles in two thirds of the time. JAX 0.12 has only the newer one,
    # so under Python 3.12 the tests run with that.
    _flags["--xla_cpu_use_fusion_emitters"] = "false"
_missing = [f"{name}={value}" for name, value in _flags.items() if name not in (_flags_before or "")]
os.environ["XLA_FLAGS"] = " ".join([*filter(None, [_flags_before]), *_missing])

import jax  # noqa: E402
import jaxtyping  # noqa: E402

# XLA has read its flags once something is compiled. Then they go, so that a command which a test starts finds
# the machine as its user would.
jax.jit(lambda x: x + 1)(0)
if _flags_before is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = _flags_before

# Tracing makes objects by the million and next to no cycles: looking for them as often as by default takes a few
# per cent of the time.
gc.freeze()
gc.set_threshold(200_000, 20, 100)

PACKAGE = pathlib.Path(__file__).parent.parent / "pe_lab"
# A page calls one function of three lines thousands of times: checking its annotations took three quarters of the time
# of the page's tests. Of `analysis`, modules with arrays are checked.
packages = [path.stem for path in PACKAGE.iterdir() if path.stem not in ("__init__", "__pycache__", "analysis", "page")]
arrays = [path for path in (PACKAGE / "analysis").rglob("*.py") if "jaxtyping" in path.read_text("utf-8")]
checked = [f"pe_lab.{name}" for name in packages]
checked += [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in arrays]
jaxtyping.install_import_hook(checked, "type_checks.check")

from pe_lab.attention.key_block import AttentionInputs  # noqa: E402
from pe_lab.model.cache import Cache  # noqa: E402
from pe_lab.positional import Schedule  # noqa: E402

# JAX rebuilds a pytree around whatever it carries (shardings, shapes, flags): its fields are arrays where a function
# takes them, not at every construction.
for pytree in (AttentionInputs, Cache, Schedule):
    pytree.__init__ = pytree.__init__.__wrapped__


def pytest_configure(config):
    # Of Flax's own annotations.
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")
