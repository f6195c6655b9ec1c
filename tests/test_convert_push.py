"""`pe_lab.convert --push`: exports sent to a hub that speaks the protocol on loopback. 40 seconds: eight processes."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HF = Path(__file__).parent / "data" / "hf"
TOKEN = "hf_of_this_test"


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]], refuses: str = ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.refuses = files, refuses  # files by repository; a part of the paths that get a 500


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(/.*)?", path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid token"}, 401)
        elif path == "/api/whoami-v2":
            self.answer({"name": "org", "type": "user"})
        elif found and found[1] in self.server.files and (found[2] or "").startswith("/tree/"):
            files = self.server.files[found[1]]
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files.items()])
        elif found and found[1] in self.server.files:
            names = [{"rfilename": name} for name in self.server.files[found[1]]]
            self.answer({"id": found[1], "siblings": names, "sha": "0" * 40})
        else:
            self.answer({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses and self.server.refuses in self.path:
            self.answer({"error": "out of order"}, 400)
        elif self.path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made['organization']}/{made['name']}"
            self.server.files.setdefault(name, {})
            self.answer({"url": f"http://127.0.0.1:{self.server.server_address[1]}/{name}"})
        elif "/preupload/" in self.path:
            wanted = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted]}
            )
        elif "/commit/" in self.path:
            name = re.match(r"/api/models/([\w-]+/[\w-]+)/", self.path)[1]
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    content = entry["value"]
                    self.server.files[name][content["path"]] = base64.b64decode(content["content"])
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"http://127.0.0.1/{name}/commit/1"})
        else:
            self.answer({})

    def answer(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def hub(files: dict[str, dict[str, bytes]], refuses: str = "") -> Iterator[Hub]:
    server = Hub(files, refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def push(server: Hub, out: Path, name: str, token: str = TOKEN, form: str = "hf") -> subprocess.CompletedProcess:
    """`pe_lab.convert` in a process of its own: the address of the hub is read once."""
    command = [
        sys.executable,
        "-m",
        "pe_lab.convert",
        f"--from=hf:{HF / 'llama'}",
        f"--to={form}:{out}",
        "--parity=off",
    ]
    given = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    address = f"http://127.0.0.1:{server.server_address[1]}"
    env = given | {"HF_ENDPOINT": address, "HF_HOME": str(out.parent / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    return subprocess.run([*command, f"--push={name}"], env=env, capture_output=True, text=True, timeout=300)


def test_an_export_is_sent_with_its_card(tmp_path: Path) -> None:
    with hub({"org/other": {}}) as server:
        sent = push(server, tmp_path / "out", "org/new")
        assert sent.returncode == 0, sent.stderr
        assert sent.stdout.rstrip().endswith("/org/new: sent.")
        files = server.files["org/new"]
    local = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert local.keys() == files.keys() | {".gitattributes"} & local.keys() and files["README.md"] == local["README.md"]
    assert files["model.safetensors"] == local["model.safetensors"]
    assert b'from_pretrained("org/new")' in files["README.md"]


def test_a_repository_with_a_model_is_left_alone(tmp_path: Path) -> None:
    with hub({"org/taken": {"model.safetensors": b"x"}}) as server:
        refused = push(server, tmp_path / "out", "org/taken")
    assert refused.returncode == 2 and not (tmp_path / "out").exists()
    assert "the repository has a model already (model.safetensors)" in refused.stderr


def test_gguf_files_of_a_model_are_sent_to_one_repository(tmp_path: Path) -> None:
    with hub({"org/both": {"model.safetensors": b"x"}}) as server:
        sent = push(server, tmp_path / "one.gguf", "org/both", form="gguf")
        assert sent.returncode == 0, sent.stderr
        files = server.files["org/both"]
        assert files["one.gguf"] == (tmp_path / "one.gguf").read_bytes()
        card = files["README.md"]
        assert card == (tmp_path / "one.gguf.md").read_bytes() and b"--hf-repo org/both --hf-file one.gguf" in card
        sent = push(server, tmp_path / "two.gguf", "org/both", form="gguf")
        assert sent.returncode == 0, sent.stderr
        assert "two.gguf" in files and files["README.md"] == card
        (tmp_path / "one.gguf").unlink()
        refused = push(server, tmp_path / "one.gguf", "org/both", form="gguf")
    assert refused.returncode == 2 and "the repository has a model already (one.gguf)" in refused.stderr
    assert not (tmp_path / "one.gguf").exists()


def test_without_a_token_nothing_is_written(tmp_path: Path) -> None:
    with hub({}) as server:
        refused = push(server, tmp_path / "out", "org/new", token="")
        assert refused.returncode == 2 and "hf auth login" in refused.stderr
        refused = push(server, tmp_path / "out", "org/new", token="hf_wrong")
        assert refused.returncode == 2 and "the hub does not answer, or refuses" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_what_the_hub_refuses_stays_on_disk(tmp_path: Path) -> None:
    with hub({}, refuses="/commit/") as server:
        failed = push(server, tmp_path / "out", "org/new")
    assert failed.returncode == 2 and f"hf upload org/new {tmp_path / 'out'}" in failed.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
