"""A server of the Hugging Face hub's protocol on loopback, as far as reading a dataset needs it.

    with hub_server({"org/open": Dataset({"README.md": b"...", "data/a.parquet": b"..."})}) as hub: ...

Programs find it with `HF_ENDPOINT` set to `hub.url`; its files are at `hub.file_url(dataset, path)`, too.
A dataset with `status` answers every request with it: 401 and 403 as for a gated dataset. Files are served in parts, as
the hub does, unless `parts` is False. The next `hub.failures` requests get a 503.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Dataset:
    """Files by their paths; or the status of every answer, and the token that is let in all the same."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    status: int = 200
    token: str = ""
    parts: bool = True


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, datasets: Mapping[str, Dataset]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.datasets, self.requests, self.failures = datasets, [], 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def file_url(self, dataset: str, path: str) -> str:
        return f"{self.url}/datasets/{dataset}/resolve/main/{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which waits 40 ms with the body of a small answer
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        match = re.fullmatch(r"(/api)?/datasets/([\w.-]+/[\w.-]+)/?(.*)", path)
        dataset = self.server.datasets.get(match[2]) if match else None
        if self.server.failures:
            self.server.failures -= 1
            self.answer(503, b"")
        elif dataset is None:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif dataset.status != 200 and self.headers.get("Authorization") != f"Bearer {dataset.token}":
            self.answer(dataset.status, b"{}", {"X-Error-Code": "GatedRepo"})
        elif match[1]:
            self.api(match[2], dataset.files, match[3], urllib.parse.parse_qs(body.decode()), body)
        else:
            self.file(dataset, match[3].split("/", 2)[-1])

    do_HEAD = do_POST = do_GET

    def api(self, name: str, files: Mapping[str, bytes], what: str, form: dict[str, list[str]], body: bytes) -> None:
        entries = [{"type": "file", "path": p, "size": len(c), "oid": oid(c)} for p, c in files.items()]
        if what.startswith("paths-info"):
            asked = json.loads(body)["paths"] if body.startswith(b"{") else form["paths"]
            folders = [
                {"type": "directory", "path": p, "oid": "0"} for p in asked if any(f.startswith(p + "/") for f in files)
            ]
            found = [entry for entry in entries if entry["path"] in asked] + folders
        elif what.startswith("tree"):
            under = what.split("/", 2)[2] if what.count("/") > 1 else ""
            found = [entry for entry in entries if entry["path"].startswith(under)]
            folders = {p.rpartition("/")[0] for p in files if "/" in p} - {under}
            found += [{"type": "directory", "path": p, "oid": "0"} for p in folders if p.startswith(under)]
        else:
            siblings = [{"rfilename": path} for path in files]
            found = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False, "tags": []}
        self.answer(200, json.dumps(found).encode())

    def file(self, dataset: Dataset, path: str) -> None:
        content = dataset.files.get(path)
        if content is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{oid(content)}"'}
        if dataset.parts and not content and "Range" in self.headers:
            self.answer(416, b"", {**headers, "Content-Range": "bytes */0"})
        elif dataset.parts and (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], headers)
        else:
            self.answer(200, content, headers)

    def answer(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def hub_server(datasets: Mapping[str, Dataset]) -> Iterator[Hub]:
    with Hub(datasets) as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield hub
        hub.shutdown()
