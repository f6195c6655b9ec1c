"""Buckets of real protocol servers on loopback, behind a proxy that injects failures.

    from object_stores import bucket, gcs_bucket, s3_bucket  # noqa: F401

`gcs_bucket` is one of gcp-storage-emulator, `s3_bucket` one of moto, `bucket` each of them in turn. Programs of this
process find them at `bucket.url`, child processes with `bucket.environment`. The GCS emulator ignores preconditions and
tells no generations with an object's content: the proxy does both. It fails at media uploads of no bytes, which are
mended in its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

SERVERS = """
import sys, threading
from gcp_storage_emulator import server
from moto.server import ThreadedMotoServer
read, nothing = server._read_data, {"media": b""}
server._read_data = lambda handler, query: read(handler, query) or nothing.get(query.get("uploadType", [""])[0])
gcs, s3 = int(sys.argv[1]), int(sys.argv[2])
server.create_server("127.0.0.1", gcs, in_memory=True).start()
ThreadedMotoServer("127.0.0.1", s3, verbose=False).start()
print("ready", flush=True)
sys.stdin.read()  # until the tests end, or are killed
import os; os._exit(0)
"""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "tests",  # of tensorstore
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator has no gRPC service that tells a bucket's layout
    "NO_GCE_CHECK": "true",
}


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD /path?query NAME` matches `pattern`, after `skip` others.

    NAME is that of the object which a body names; `cut` does not look at it.

    Kinds: `503`; `403`; `cut`, the connection is closed in the middle of the request's body; `lost`, the request is
    served and its answer is not sent; `stall`, nothing is answered for `seconds`; `lag`, a listing lacks the names
    `hidden`.
    """

    kind: str
    pattern: str
    times: int = 1
    skip: int = 0
    seconds: float = 0.0
    hidden: frozenset[str] = frozenset()  # names that a lagging listing does not have
    met: int = 0


@dataclass
class Bucket:
    """A bucket, the servers' addresses, and the faults between."""

    scheme: str
    name: str
    server: int
    proxy: Proxy
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def inject(self, kind: str, pattern: str = ".", **more: object) -> Fault:
        """Adds a fault; returns it, and counts in `met` what it has met."""
        self.proxy.faults.append(Fault(kind, pattern, **more))
        return self.proxy.faults[-1]

    def names(self, prefix: str = "") -> list[str]:
        """The keys of the objects that the server has, past the proxy."""
        if self.scheme == "gs":
            listed = json.loads(self._ask("GET", f"/storage/v1/b/{self.name}/o?prefix={prefix}"))
            return sorted(item["name"] for item in listed.get("items", ()))
        listed = self._ask("GET", f"/{self.name}?list-type=2&max-keys=1000&prefix={prefix}").decode()
        return sorted(re.findall("<Key>(.*?)</Key>", listed))

    def _ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        return ask(self.server, method, target, body)


def ask(port: int, method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    """The body of an answer of a server on loopback; fails unless its status is 2xx."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (answer.status, content)
        return content
    finally:
        connection.close()


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards every request to a server, unless a fault says otherwise."""

    daemon_threads = True

    def __init__(self, server: int):
        super().__init__(("127.0.0.1", 0), Handler)
        self.server, self.faults, self.lock = server, [], threading.Lock()
        self.conditional = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def fault(self, request: str, cut: bool = False) -> Fault | None:
        """The fault that a request meets; `cut` looks for those of that kind, and otherwise for the others."""
        with self.lock:
            for fault in self.faults:
                if (fault.kind == "cut") == cut and re.search(fault.pattern, request):
                    fault.skip -= 1
                    if fault.skip < 0 and fault.times > 0:
                        fault.times -= 1
                        fault.met += 1
                        return fault
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that clients close are their matter."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args: object) -> None:
        pass

    def _serve(self) -> None:
        if self.server.fault(f"{self.command} {self.path}", cut=True):
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self._close()
            return
        if (body := self._body()) is None:  # a store keeps no part of an object
            self._close()
            return
        named = re.search(rb'"name": ?"(.*?)"', body[:4096])
        fault = self.server.fault(f"{self.command} {self.path} {named[1].decode() if named else ''}")
        kind = fault.kind if fault else ""
        if kind == "stall":
            time.sleep(fault.seconds)
            self._close()
            return
        if kind in ("503", "403"):
            self._answer(int(kind), [("Content-Type", "text/plain")], b"injected")
            return
        # A condition and what depends on it are one operation of a store.
        with self.server.conditional if "ifGenerationMatch" in self.path else contextlib.nullcontext():
            failed = self._precondition(body)
            status, found, content = (failed, [], b"") if failed else self._forward(body)
        if failed:
            content = b"" if failed == 304 else b'{"error": {"message": "precondition"}}'
            self._answer(failed, [("Content-Type", "application/json")], content)
            return
        if "alt=media" in self.path and (generation := self._generation(body)):
            found = [*found, ("x-goog-generation", generation)]  # without which tensorstore cannot read twice
        if kind == "lost":
            self._close()
            return
        if kind == "lag":
            content = without(content, fault.hidden)
        self._answer(status, found, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's status, headers and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server, timeout=300)
        try:
            headers = {k: v for k, v in self.headers.items() if k not in ("Transfer-Encoding", "Expect", "Connection")}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _body(self) -> bytes | None:
        """The body of the request; None if the client ended before its end."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(size)
            return body if len(body) == size else None
        parts = []
        while line := self.rfile.readline():
            if not (size := int(line.split(b";")[0], 16)):
                self.rfile.readline()
                return b"".join(parts)
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        return None

    def _generation(self, body: bytes) -> str | None:
        """The generation of the object that a request of GCS is about, "0" if there is none; None if it names none."""
        address = urllib.parse.urlparse(self.path)
        media = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)", address.path)
        upload = re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", address.path)
        if media:
            bucket, name = media[1], urllib.parse.unquote(media[2])
        elif upload:
            in_body = re.search(rb'"name": ?"(.*?)"', body[:4096])
            in_query = urllib.parse.parse_qs(address.query).get("name")
            bucket, name = upload[1], in_query[0] if in_query else in_body[1].decode() if in_body else ""
        else:
            return None
        try:
            target = f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"
            return json.loads(ask(self.server.server, "GET", target))["generation"]
        except AssertionError:
            return "0"

    def _precondition(self, body: bytes) -> int:
        """The status of a request whose precondition fails, as GCS says it; 0 if there is none or it holds."""
        query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
        if "ifGenerationMatch" in query and self.command == "POST":
            return 0 if self._generation(body) == query["ifGenerationMatch"][0] else 412
        if "ifGenerationNotMatch" in query and self.command == "GET":
            return 304 if self._generation(body) == query["ifGenerationNotMatch"][0] else 0
        return 0

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        length = next((v for k, v in headers if k.lower() == "content-length"), "0")
        for key, value in headers:
            if key.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(key, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def without(listing: bytes, hidden: frozenset[str]) -> bytes:
    """A listing of GCS or S3 without the objects of some names."""
    if listing.startswith(b"{"):
        found = json.loads(listing)
        found["items"] = [item for item in found.get("items", ()) if item["name"] not in hidden]
        return json.dumps(found).encode()
    for name in hidden:
        listing = re.sub(rf"<Contents>\s*<Key>{re.escape(name)}</Key>.*?</Contents>".encode(), b"", listing, flags=re.S)
    return listing


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="session")
def store_servers() -> Iterator[dict[str, int]]:
    """The ports of both servers, in a process of their own."""
    ports = {"gs": free_port(), "s3": free_port()}
    command = [sys.executable, "-c", SERVERS, *map(str, ports.values())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        yield ports
        process.stdin.close()


def new_bucket(scheme: str, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new bucket, which this process reaches until the iterator ends."""
    name, port = f"tests-{uuid.uuid4().hex[:8]}", ports[scheme]
    if scheme == "gs":
        ask(port, "POST", "/storage/v1/b", json.dumps({"name": name}).encode(), **{"Content-Type": "application/json"})
    else:
        ask(port, "PUT", f"/{name}")
    proxy = Proxy(port)
    address = f"http://127.0.0.1:{proxy.server_address[1]}"
    named = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL") if scheme == "gs" else ("AWS_ENDPOINT_URL",)
    environment = {**CREDENTIALS, **{variable: address for variable in named}}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    forget_file_systems()
    try:
        yield Bucket(scheme, name, port, proxy, environment)
    finally:
        forget_file_systems()
        proxy.shutdown()
        proxy.server_close()


def forget_file_systems() -> None:
    """fsspec and epath keep file systems, with the address that they had when they were made."""
    import gcsfs
    import s3fs
    from etils.epath import backend

    for kind in (gcsfs.GCSFileSystem, s3fs.S3FileSystem):
        kind.clear_instance_cache()
    type(backend.fsspec_backend)._get_filesystem.cache_clear()


@pytest.fixture
def gcs_bucket(store_servers: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    yield from new_bucket("gs", store_servers, monkeypatch)


@pytest.fixture
def s3_bucket(store_servers: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    yield from new_bucket("s3", store_servers, monkeypatch)


# Fast tests ask one protocol. The slow ones, about 60 s, ask the other the same.
@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.slow)])
def bucket(
    request: pytest.FixtureRequest, store_servers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    yield from new_bucket(request.param, store_servers, monkeypatch)


class ShortPauses:
    """asyncio, whose `sleep` lasts a hundredth, and is recorded."""

    def __init__(self, pauses: list[float]):
        self.pauses = pauses

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float, *rest: Any) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(seconds / 100)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between the attempts of the stores' libraries last a hundredth of what they do; their seconds."""
    pauses: list[float] = []
    import aiobotocore.endpoint
    import gcsfs.retry
    import s3fs.core

    for module in (gcsfs.retry, s3fs.core, aiobotocore.endpoint):
        monkeypatch.setattr(module, "asyncio", ShortPauses(pauses))
    return pauses
