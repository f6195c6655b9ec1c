"""The start of several processes: from the environment, from a TPU VM's metadata, by hand."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import pytest
from tiny_runs import REPOSITORY

from pe_lab.errors import ConfigError
from pe_lab.parallel import processes, start_processes

VARIABLES = (
    "COORDINATOR_ADDRESS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_WORKER_HOSTNAMES",
    "SLURM_STEP_TASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "JAX_LOCAL_DEVICE_IDS",
)


@pytest.fixture
def joined(monkeypatch):
    """The arguments of every `jax.distributed.initialize`, in an environment that names no other process."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *address, **given: calls.append((*address, given)))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def metadata():
    """Starts metadata servers: attributes -> host:port."""
    servers = []

    def serve(**attributes: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2].replace("-", "_")
                known = name in attributes and self.headers["Metadata-Flavor"] == "Google"
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(attributes.get(name, "").encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def tpu_vm(tmp_path, monkeypatch):
    """Gives this host the device file of a TPU."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(processes, "_TPU_DEVICES", (str(tmp_path / "accel0"),))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)  # JAX sets it where it finds no chip


def test_one_process_starts_alone(joined, monkeypatch):
    start_processes()
    for name in VARIABLES[1:4]:
        monkeypatch.setenv(name, "1")
    start_processes()
    assert joined == []


@pytest.mark.parametrize("name", VARIABLES[1:4])
def test_a_launcher_that_counts_several_processes(joined, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    start_processes()
    assert joined == [({},)]


@pytest.mark.parametrize(
    ("name", "tasks", "alone"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)", True),
        ("SLURM_STEP_TASKS_PER_NODE", "1", True),
        ("SLURM_STEP_TASKS_PER_NODE", "8(x4)", False),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x3),2", False),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1", True),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2", False),
    ],
)
def test_a_process_alone_on_its_node_gets_all_devices(joined, monkeypatch, name, tasks, alone):
    """JAX would give it one: it expects a process per device under SLURM."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv(name, tasks)
    start_processes()
    assert joined == [({"local_device_ids": []} if alone else {},)]
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1")  # the user has divided them
    start_processes()
    assert joined[1] == ({},)


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_processes_on_cpus_communicate_by_gloo(joined, monkeypatch, platform):
    """Under SLURM too, where JAX finds the addresses."""
    monkeypatch.setattr(processes, "_TPU_DEVICES", ())
    monkeypatch.setattr(processes, "_GPU_DEVICES", ())
    settings = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: settings.append((name, value)))
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    start_processes()
    assert ("jax_cpu_collectives_implementation", "gloo") in settings and joined == [({},)]


def test_jax_gets_nine_tenths_of_a_gpu_unless_told_otherwise(joined, monkeypatch, tmp_path):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setattr(processes, "_TPU_DEVICES", ())
    for device, given, wanted in ((tmp_path / "none", None, None), (tmp_path, None, "0.9"), (tmp_path, "0.5", "0.5")):
        monkeypatch.setattr(processes, "_GPU_DEVICES", (str(device),))
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
        start_processes()
        assert os.environ.get(name) == wanted
    monkeypatch.delenv(name)


@pytest.mark.parametrize("name", VARIABLES[4:6])
def test_hosts_listed_in_the_environment(joined, tpu_vm, monkeypatch, name):
    monkeypatch.setenv(name, "localhost")  # as on a notebook's TPU, which has one host and no metadata
    start_processes()
    assert joined == []
    monkeypatch.setenv(name, "host-0,host-1")
    start_processes()
    assert joined == [({},)]


@pytest.mark.parametrize(
    ("attributes", "several"),
    [
        ({"worker_network_endpoints": "unknown:0:10.0.0.2,unknown:1:10.0.0.3"}, True),
        ({"worker_network_endpoints": "10.0.0.2"}, False),
        ({"worker_network_endpoints": "10.0.0.2", "tpu_env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\n"}, True),
        ({"worker_network_endpoints": "10.0.0.2", "tpu_env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '1'\n"}, False),
        ({}, False),
    ],
)
def test_a_tpu_vm_asks_its_metadata(joined, tpu_vm, metadata, monkeypatch, attributes, several):
    monkeypatch.setenv("GCE_METADATA_IP", metadata(**attributes))
    start_processes()
    assert bool(joined) == several


def test_a_tpu_without_a_metadata_server_is_one_process(joined, tpu_vm, metadata, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")  # no server listens there
    start_processes()
    assert joined == []


def test_without_a_tpu_no_metadata_is_queried(joined, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("queried the metadata server")

    monkeypatch.setattr(processes.urllib.request, "urlopen", refuse)
    start_processes()


JOIN = """
import os, sys
import jax
os.environ.pop("TPU_SKIP_MDS_QUERY")  # set by JAX where it finds no chip
from pe_lab.parallel import processes
processes._TPU_DEVICES = (sys.argv[1],)
jax.config.update("jax_platforms", "cpu")
processes.start_processes()
print(jax.process_count(), jax.process_index(), jax.device_count())
"""


@pytest.mark.slow
def test_two_hosts_of_a_slice_join_through_jaxs_own_detection(tmp_path, metadata):
    """Two processes with a metadata server each, as the hosts of a Compute Engine slice have."""
    (tmp_path / "accel0").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for worker in ("0", "1"):
        server = metadata(
            worker_network_endpoints="127.0.0.1,127.0.0.1", agent_worker_number=worker, tpu_env="ZONE: 'nowhere'"
        )
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(REPOSITORY),
            "GCE_METADATA_IP": server,
            "JAX_FORCE_TPU_INIT": "1",
            "JAX_COORDINATOR_PORT": str(port),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", JOIN, str(tmp_path / "accel0")],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    printed = [process.communicate(timeout=300) for process in started]
    assert [out for out, _ in printed] == ["2 0 2\n", "2 1 2\n"], printed


def test_processes_join_by_hand(monkeypatch):
    joined = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda address, **given: joined.append((address, given)))
    monkeypatch.setattr(jax.config, "update", lambda name, value: joined.append((name, value)))
    monkeypatch.setenv("COORDINATOR_ADDRESS", "host-0:1234")
    monkeypatch.setenv("PROCESS_COUNT", "2")
    monkeypatch.setenv("PROCESS_INDEX", "1")
    start_processes()
    assert joined[-1] == ("host-0:1234", {"num_processes": 2, "process_id": 1})
    assert ("jax_cpu_collectives_implementation", "gloo") in joined
    monkeypatch.setenv("HEARTBEAT_SECONDS", "30")
    start_processes()
    assert joined[-1][1]["heartbeat_timeout_seconds"] == 30
    monkeypatch.setenv("HEARTBEAT_SECONDS", "often")
    with pytest.raises(ConfigError, match="HEARTBEAT_SECONDS is 'often'"):
        start_processes()


def test_processes_joined_by_hand_need_their_number(monkeypatch):
    monkeypatch.setenv("COORDINATOR_ADDRESS", "host-0:1234")
    monkeypatch.delenv("PROCESS_COUNT", raising=False)
    monkeypatch.setenv("PROCESS_INDEX", "one")
    with pytest.raises(ConfigError, match="PROCESS_COUNT is '' and PROCESS_INDEX 'one'"):
        start_processes()
