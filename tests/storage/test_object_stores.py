"""Files on object stores: servers of both protocols, with failures in between."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading

import object_stores
import pytest
from object_stores import bucket, forget_file_systems, free_port, gcs_bucket, s3_bucket, short_pauses, store_servers  # noqa: E501, F401
from tiny_runs import REPOSITORY

from pe_lab import storage
from pe_lab.errors import ConfigError, DataError, StoreError
from pe_lab.storage import logs, paths
from pe_lab.storage.directories import copies_directory
from pe_lab.storage.manifest import crc32c, manifest_of


def slow(*values):
    """A case that takes 2 to 4 s."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def root(bucket):  # noqa: F811
    return storage.path("--workdir", f"{bucket.url}/runs/a")


def test_text_becomes_a_path_of_this_machine_or_of_a_store(bucket, tmp_path):  # noqa: F811
    assert storage.path("--out", str(tmp_path)) == tmp_path
    remote = storage.path("--out", f"{bucket.url}/x/y")
    assert storage.is_remote(remote) and not storage.is_remote(tmp_path)
    assert str(remote / "z") == f"{bucket.url}/x/y/z" and str(storage.absolute(remote)) == str(remote)
    for text in (f"{bucket.url}", f"{bucket.url}/", "ftp://host/file", "gs:///x"):
        with pytest.raises(ConfigError, match="--out"):
            storage.path("--out", text)


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(bucket):  # noqa: F811
    elsewhere = f"{bucket.scheme}://no-such-bucket"
    with pytest.raises(StoreError, match="There is no bucket .*no-such-bucket"):
        storage.path("--workdir", f"{elsewhere}/run")
    with pytest.raises(StoreError, match="no such bucket"):
        storage.write_file(storage.path("--out", f"{bucket.url}/x").__class__(f"{elsewhere}/file"), b"x")


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(paths.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"needs gcsfs.*pip install 'pe-lab\[gcs\]'"):
        storage.path("--workdir", "gs://bucket/run")


def test_files_directories_and_listings(root, bucket):  # noqa: F811
    storage.write_files({root / "a.json": '{"x": 1}', root / "b" / "c": b"\x00"})
    assert storage.read_json(root / "a.json") == {"x": 1}
    with pytest.raises(DataError, match="There is no"):
        storage.read_json(root / "absent.json")
    listed = storage.listing(root)
    assert list(listed) == ["a.json", "b/c"] and listed["b/c"].size == 1
    assert listed["a.json"].md5 == hashlib.md5(b'{"x": 1}').hexdigest()
    assert listed["b/c"].crc32c == ("527d5351" if bucket.scheme == "gs" else None)  # RFC 3720's CRC of one zero byte
    storage.write_file(root / "a.json", "{}")
    assert storage.listing(root)["a.json"].version != listed["a.json"].version
    storage.remove_tree(root)
    storage.remove_tree(root)
    assert bucket.names() == []


def test_an_upload_whose_process_is_killed_leaves_no_object(s3_bucket):  # noqa: F811
    with socket.create_connection(s3_bucket.proxy.server_address) as client:
        client.sendall(f"PUT /{s3_bucket.name}/x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert s3_bucket.names() == []


def test_a_manifest_has_another_hash_than_the_crc_that_a_store_lists(root, bucket, tmp_path):  # noqa: F811
    """A content with its own CRC-32C behind it has the same CRC-32C as any other such one."""
    one, other = (text + int(crc32c(text), 16).to_bytes(4, "little") for text in (b"content", b"another"))
    assert crc32c(one) == crc32c(other)
    storage.write_files({root / "node": one})
    manifest = manifest_of(root)
    assert manifest.files["node"].hash.startswith("md5:" if bucket.scheme == "gs" else "xxh3:")
    assert manifest.damage(root) == manifest.damage(root, lambda name, digest: False) == []
    storage.write_files({root / "node": other, tmp_path / "node": other})
    for place in (root, tmp_path):
        (damage,) = manifest.damage(place)
        assert str(damage).startswith("node has changed: its hash is")
    assert len(manifest.damage(root, lambda name, digest: False)) == (bucket.scheme == "gs")


def test_a_tree_is_removed_mark_first(root, bucket):  # noqa: F811
    storage.write_files({root / name: b"x" for name in ("commit", "a", "b/c")})
    bucket.inject("403", "^DELETE|^POST .*(batch|delete)", times=100, skip=1)
    with pytest.raises(StoreError):
        storage.remove_tree(root, first="commit")
    assert bucket.names() == ["runs/a/a", "runs/a/b/c"]


def test_a_directory_with_a_marker_is_put_marker_last(root, bucket):  # noqa: F811
    storage.write_file(root / "left", b"of a killed process")
    with storage.new_directory(root, marker="done") as building:
        (building / "done").write_text("")
        (building / "z").mkdir()
        (building / "z" / "file").write_text("x")
        assert bucket.names() == ["runs/a/left"]
        refused = bucket.inject("403", "z(/|%2F)file", times=100)
        with pytest.raises(StoreError), storage.new_directory(root, marker="done") as other:
            (other / "z").mkdir()
            (other / "z" / "file").write_text("y")
            (other / "done").write_text("")
        assert refused.met and "runs/a/done" not in bucket.names()
        refused.times = 0
    assert bucket.names() == ["runs/a/done", "runs/a/z/file"]
    with storage.new_directory(root, marker="done") as late:  # another process has finished
        (late / "done").write_text("late")
    assert storage.read_bytes(root / "done") == b""


def test_a_directory_without_a_marker_is_refused_once_it_is_whole(root, bucket):  # noqa: F811
    bucket.inject("403", "(a/|a%2F)file", times=100)
    with pytest.raises(StoreError), storage.new_directory(root, "--to") as building:
        (building / "file").write_text("x")
    assert bucket.names() == ["runs/a/.incomplete"]
    bucket.proxy.faults.clear()
    with storage.new_directory(root, "--to") as building:
        (building / "file").write_text("x")
    assert bucket.names() == ["runs/a/file"]
    with pytest.raises(ConfigError, match="--to '.*' exists and is not empty"), storage.new_directory(root, "--to"):
        pass


WRITER = """
import sys
from pe_lab import storage
with storage.new_directory(storage.path("--to", sys.argv[1]), "--to", marker=sys.argv[2] or None) as building:
    for name in ("common", "of the first", sys.argv[2] or "more"):
        (building / name).write_text("first")
"""


@pytest.mark.slow
@pytest.mark.parametrize("marker", [None, "done"])
def test_two_writers_of_one_directory_do_not_mix(root, bucket, marker):  # noqa: F811
    """The second is refused while the first puts its files, or waits for it where the directory has a marker. 5 s."""
    stalled = bucket.inject("stall", "^(PUT|POST) .*common", times=1, seconds=2.0)
    environment = {**os.environ, **bucket.environment, "PYTHONPATH": str(REPOSITORY)}
    names = ("common", "of the first", marker or "more")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root), marker or ""], env=environment) as first:
        while not stalled.met:
            assert first.poll() is None
        try:
            with storage.new_directory(root, "--to", marker=marker) as building:
                for name in ("common", "of the second", marker or "more"):
                    (building / name).write_text("second")
        except ConfigError as refused:
            assert not marker and str(refused).startswith(f"--to '{root}': process {first.pid} on ")
        else:
            assert marker
        assert first.wait() == 0
    assert {name: storage.read_bytes(root / name) for name in storage.listing(root)} == dict.fromkeys(names, b"first")


def test_no_byte_of_a_content_is_lost(root):
    """Requests in MIME parts would lose the end of line before a boundary, and what follows a boundary."""
    ends = (b"", b"\r", b"\n", b"\r\n", b"\n\r", b"\n--==0==--", b"\r\n--==0==--\r\n")
    contents = {f"{n}": b"content" + end for n, end in enumerate(ends)} | {"empty": b""}
    storage.write_files({root / "put" / name: content for name, content in contents.items()})
    with storage.new_directory(root / "directory") as building:
        for name, content in contents.items():
            (building / name).write_bytes(content)
    for kind in ("put", "directory"):
        assert {name: storage.read_bytes(root / kind / name) for name in contents} == contents
    for path in (root / "created", root / "replaced"):
        storage.write_file(root / "replaced", b"other")
        assert storage.create_file(path, b"\r") or storage.replace_file(path, b"\r", expected=b"other")
        assert storage.read_bytes(path) == b"\r"


@pytest.mark.slow  # 5 s
def test_large_contents_are_sent_in_several_requests(gcs_bucket, tmp_path):  # noqa: F811
    content = os.urandom(paths.IN_PARTS + 1000) + b"\r"
    (tmp_path / "file").write_bytes(content)
    path = storage.path("--out", f"{gcs_bucket.url}/x/file")
    for write in (lambda: storage.write_file(path, content), lambda: paths.put_file(path, tmp_path / "file")):
        parts = gcs_bucket.inject("503", "^(PUT|POST) .*upload_id", times=1)
        write()
        assert storage.read_bytes(path) == content and parts.met == 1
        storage.write_file(path, b"")


def test_an_object_that_has_other_bytes_than_were_sent_is_an_error(gcs_bucket, monkeypatch):  # noqa: F811
    path = storage.path("--out", f"{gcs_bucket.url}/x/file")
    forward = object_stores.Handler._forward
    monkeypatch.setattr(object_stores.Handler, "_forward", lambda self, body: forward(self, body.replace(b"1", b"2")))
    with pytest.raises(StoreError, match="'gs://.*/x/file': the store has other bytes than were sent"):
        storage.write_file(path, b"1")


@pytest.mark.parametrize(
    "kind", ["cut", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("503", "lost", "stall"))]
)
def test_what_passes_is_tried_again(root, bucket, kind, short_pauses, monkeypatch):  # noqa: F811
    monkeypatch.setattr(paths, "STALL_SECONDS", 0.3)
    content = os.urandom(100_000)
    fault = bucket.inject(kind, "^(PUT|POST) ", times=2, seconds=1.0)
    storage.write_file(root / "file", content)
    assert fault.met == 2 and storage.read_bytes(root / "file") == content
    fault = bucket.inject("503", "^GET .*file", times=2)
    assert storage.read_bytes(root / "file") == content and fault.met == 2


@pytest.mark.parametrize(
    "kind, message", [("403", "refuses this account"), slow("503", "does not answer as it should")]
)
def test_what_does_not_pass_is_one_message(root, bucket, kind, message, short_pauses, caplog):  # noqa: F811
    storage.write_file(root / "file", b"before")
    bucket.inject(kind, ".", times=1000)
    with pytest.raises(StoreError, match=f"^'{root}/file': .*{message}"):
        storage.write_file(root / "file", b"after")
    with pytest.raises(StoreError, match=message):
        storage.read_bytes(root / "file")
    paths._answered.clear()
    with pytest.raises(StoreError, match=f"^'{bucket.url}': .*{message}"):
        storage.path("--workdir", str(root))
    assert not caplog.records
    bucket.proxy.faults.clear()
    assert storage.read_bytes(root / "file") == b"before"


def test_of_two_that_create_or_replace_a_file_one_succeeds(root, tmp_path):
    for directory in (root, tmp_path):
        lease, barrier, won = directory / "lease", threading.Barrier(8), []

        def attempt(name, lease=lease, barrier=barrier, won=won):
            barrier.wait()
            if storage.create_file(lease, name):
                won.append(name)

        names = [f"process {n}".encode() for n in range(8)]
        threads = [threading.Thread(target=attempt, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [storage.read_bytes(lease)]
        storage.write_file(lease, b"first")
        assert not storage.create_file(lease, b"second")
        assert storage.replace_file(lease, b"second", expected=b"first")
        assert not storage.replace_file(lease, b"third", expected=b"first")
        assert storage.replace_file(lease, b"second", expected=b"first")  # what an earlier attempt has done
        assert storage.read_bytes(lease) == b"second"
        assert not storage.replace_file(directory / "absent", b"x", expected=b"y")


def test_an_answer_that_is_lost_does_not_lose_the_file(root, bucket, short_pauses):  # noqa: F811
    bucket.inject("lost", "^(PUT|POST) ")
    assert storage.create_file(root / "lease", b"mine")
    bucket.inject("lost", "^(PUT|POST) ")
    assert storage.replace_file(root / "lease", b"again mine", expected=b"mine")
    assert storage.read_bytes(root / "lease") == b"again mine"


def test_a_copy_is_made_once_for_each_content_and_is_whole(root, bucket, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("PE_LAB_CACHE", str(tmp_path))
    storage.write_files({root / "d" / "x": b"1", root / "d" / "y" / "z": b"2"})
    copy = storage.local_copy(root / "d")
    assert (copy / "x").read_bytes() == b"1" and (copy / "y" / "z").read_bytes() == b"2"
    fetched = bucket.inject("503", "GET .*(alt=media|/x$)", times=0, skip=10**6)
    assert storage.local_copy(root / "d") == copy and fetched.skip == 10**6
    storage.write_file(root / "d" / "x", b"3")
    assert (storage.local_copy(root / "d") / "x").read_bytes() == b"3" and (copy / "x").read_bytes() == b"1"

    def refuse(copied):
        raise DataError(f"{copied.name} is damaged")

    before = set(copies_directory().iterdir())
    storage.write_file(root / "file", b"whole")
    with pytest.raises(DataError, match="file is damaged"):
        storage.local_copy(root / "file", refuse)
    assert set(copies_directory().iterdir()) == before
    assert storage.local_copy(root / "file").read_bytes() == b"whole"
    assert storage.local_copy(tmp_path) == tmp_path
    with pytest.raises(DataError, match="There is no"):
        storage.local_copy(root / "absent")
    monkeypatch.setattr("pe_lab.storage.directories.RESERVED_BYTES", 2**60)
    storage.write_file(root / "file", b"other")
    with pytest.raises(DataError, match="GB free. Free space"):
        storage.local_copy(root / "file")


# ---------------------------------------------------------------------------------------------------------------------
# Logs


def read(path):
    return [record["n"] for record in storage.read_records(path, partial=True)]


def test_a_log_is_what_was_appended_and_kept(root, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 25)
    for path in (root / "log.jsonl", tmp_path / "runs" / "log.jsonl"):
        assert read(path) == []
        with storage.AppendedLog(path) as log:
            for n in range(8):
                log.append({"n": n})
                if n % 3 == 0:
                    log.flush()
                    assert read(path) == list(range(n + 1))
        assert read(path) == list(range(8))
        with storage.AppendedLog(path) as log:
            log.append({"n": 8}, {"n": 9})
        assert read(path) == list(range(10))
        with storage.AppendedLog(path, [{"n": 7}]) as log:
            log.append({"n": 8})
        assert read(path) == [7, 8]
    assert len(storage.listing(root)) == 1  # earlier sessions are gone
    path = root / "copied.jsonl"
    storage.write_records(path, [{"n": 1}])
    with storage.AppendedLog(path) as log:
        log.append({"n": 2})
    assert read(path) == [1, 2] and all(".segments/" in name for name in storage.listing(root))


def test_a_lagging_listing_loses_no_record(root, bucket, monkeypatch):  # noqa: F811
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 1)
    path = root / "log.jsonl"
    with storage.AppendedLog(path) as log:
        for n in range(4):
            log.append({"n": n})
            log.flush()
    names = bucket.names()
    late = bucket.inject("lag", "prefix=", times=1, hidden=frozenset(names[2:]))
    assert read(path) == [0, 1, 2, 3] and late.met == 1
    # A listing of the time before a new session, whose segments are deleted by now.
    old = frozenset(names)
    with storage.AppendedLog(path) as log:
        log.append({"n": 4})
    assert not old & set(bucket.names())
    bucket.inject("lag", "prefix=", times=1, hidden=frozenset(bucket.names()))
    assert read(path) in ([], [0, 1, 2, 3, 4])


def test_records_wait_for_a_store_that_does_not_answer(root, bucket, short_pauses, monkeypatch):  # noqa: F811
    monkeypatch.setattr("pe_lab.storage.logs.FLUSH_SECONDS", 0.05)
    path = root / "log.jsonl"
    log = storage.AppendedLog(path)
    down = bucket.inject("503", "^(PUT|POST) ", times=10**6)
    log.append({"n": 0})
    with pytest.raises(StoreError):
        log.flush()
    log.append({"n": 1})  # neither waits nor raises
    down.times = 0
    log.append({"n": 2})
    for _ in range(100):
        if read(path) == [0, 1, 2]:
            break
        threading.Event().wait(0.05)
    assert read(path) == [0, 1, 2]  # which the thread has sent
    log.close()
    assert read(path) == [0, 1, 2]


KILLED = """
import sys
from pe_lab import storage
from pe_lab.storage import logs
logs.SEGMENT_BYTES = 200
path = storage.path("--out", sys.argv[1])
kept = list(storage.read_records(path))
print("opening", flush=True)
with storage.AppendedLog(path, kept) as log:
    for n in range(len(kept), 10**6):
        log.append({"n": n})
        log.flush()
        print(n, flush=True)
"""


@pytest.mark.slow
def test_after_any_kill_a_log_is_a_prefix_with_all_that_was_flushed(bucket):  # noqa: F811
    """Twelve processes killed at different moments, a quarter of them while they open the log; 20 s for a store."""
    address = f"{bucket.url}/runs/log.jsonl"
    path, flushed = storage.path("--out", address), -1
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **bucket.environment}
    for attempt in range(12):
        command = [sys.executable, "-c", KILLED, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout.readline() == "opening\n"
            if attempt % 4 != 3:
                for _ in range(attempt):
                    flushed = int(process.stdout.readline())
            threading.Event().wait(0.013 * (attempt % 4))
            process.kill()
        found = read(path)
        assert found == list(range(len(found))) and len(found) > flushed
        flushed = max(flushed, len(found) - 1)
    assert flushed > 30


STORES = pytest.mark.parametrize("store", ["gcs_bucket", "s3_bucket"])


@STORES
@pytest.mark.parametrize("pattern", ["^(PUT|POST) ", pytest.param("^(GET|HEAD) ", marks=pytest.mark.slow)])
def test_a_store_that_answers_503_is_asked_for_half_a_minute(store, pattern, request, short_pauses):  # noqa: F811
    found = request.getfixturevalue(store)
    path = storage.path("--workdir", f"{found.url}/runs") / "file"
    storage.write_file(path, b"1")
    short_pauses.clear()
    fault = found.inject("503", pattern, times=10**6)
    with pytest.raises(StoreError, match="does not answer as it should, also after several attempts"):
        storage.write_file(path, b"2") if "PUT" in pattern else storage.read_bytes(path)
    assert 20 < sum(short_pauses) < 45 and fault.met > 5
    fault.times, fault.met = 4, 0
    storage.write_file(path, b"3")
    assert storage.read_bytes(path) == b"3" and fault.met == 4


def first_answer(store, request, monkeypatch, address):
    """Asks a bucket for its first answer, at an address where there is no store."""
    found = request.getfixturevalue(store)
    forget_file_systems()
    for variable in found.environment.keys() & {"STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"}:
        monkeypatch.setenv(variable, address)
    return storage.path("--workdir", f"{found.url}/runs")


@STORES
def test_a_store_that_cannot_be_reached_is_told_after_half_a_minute(store, request, monkeypatch, short_pauses):  # noqa: F811
    with pytest.raises(StoreError, match="does not answer as it should"):
        first_answer(store, request, monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert 20 < sum(short_pauses) < 45


@STORES
def test_a_store_that_never_answers_is_told_in_time(store, request, monkeypatch):
    monkeypatch.setattr("pe_lab.storage.paths.FIRST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(StoreError, match="the store has not answered for 0 s. Check the address and the network"):
            first_answer(store, request, monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        forget_file_systems()


COMMAND = """
import sys
from pe_lab.terminal import command
from pe_lab import storage
@command
def main(argv):
    (storage.path("--workdir", argv[0]) / "x").read_bytes()
    return 0
sys.exit(main())
"""


@pytest.mark.parametrize("missing", ["object", slow("credentials"), slow("bucket")])
def test_a_command_says_in_one_message_what_is_missing(s3_bucket, missing):  # noqa: F811
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **s3_bucket.environment}
    url = "s3://no-such-bucket/run" if missing == "bucket" else f"{s3_bucket.url}/run"
    if missing == "credentials":
        environment = {k: v for k, v in environment.items() if not k.startswith("AWS_") or "METADATA" in k}
        environment |= {"AWS_ENDPOINT_URL": s3_bucket.environment["AWS_ENDPOINT_URL"], "HOME": "/nonexistent"}
    run = subprocess.run([sys.executable, "-c", COMMAND, url], env=environment, capture_output=True, text=True)
    lines = run.stderr.strip().splitlines()
    assert run.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), run.stderr
    expected = {"credentials": "AWS_ACCESS_KEY_ID", "bucket": "no-such-bucket", "object": "no such bucket or object"}
    assert expected[missing] in lines[0] and json.dumps(lines[0])
