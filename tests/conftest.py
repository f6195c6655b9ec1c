"""Before JAX starts: eight virtual CPU devices, quick compilation, annotations checked at run time."""

import gc
import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if not importlib.metadata.version("jaxlib").startswith("0.10."):
    # Interpreted, each warpgroup of a GPU kernel that waits for a barrier keeps one of XLA's threads.
    os.environ.setdefault("NPROC", "8")
elif "PYTEST_XDIST_WORKER" in os.environ:
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

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# No example has a deadline, and none is drawn too slowly: a busy machine fails no test.
hypothesis.settings.register_profile("pe_lab", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("pe_lab")

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

import type_checks  # noqa: E402

type_checks.install(["pe_lab"])

from pe_lab.attention.key_block import AttentionInputs  # noqa: E402
from pe_lab.attention.layer_encoding import LayerEncoding  # noqa: E402
from pe_lab.model.cache import Cache  # noqa: E402
from pe_lab.model.loss import Head  # noqa: E402
from pe_lab.positional import Schedule  # noqa: E402

# JAX rebuilds a pytree around whatever it carries (shardings, shapes, flags): its fields are arrays where a function
# takes them, not at every construction.
for pytree in (AttentionInputs, Cache, Head, LayerEncoding, Schedule):
    pytree.__init__ = pytree.__init__.__wrapped__


def pytest_configure(config):
    # Of Flax's own annotations.
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")


@pytest.fixture
def as_users_run_it():
    """Without the checks of annotations, which would speak before our own messages."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def pytest_unconfigure():
    # pytest looks for cycles five times at its end: in a heap of this size, for a second each.
    gc.freeze()
