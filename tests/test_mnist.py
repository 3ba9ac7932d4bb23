"""`idx:mnist`: fetched once from a server, checked, kept; every failure is one line."""

import errno
import functools
import gzip
import hashlib
import http.server
import os
import threading
from pathlib import Path

import pytest

from pipeline import mnist
from pipeline.config import IngestConfig
from pipeline.ingest import resolve_config
from pipeline.mnist import CONTENTS, fetch_mnist
from transforms.records import DataError, Input

MNIST = Path(__file__).resolve().parents[2] / "shared" / "data" / "mnist"
FILES = {
    "train-images-idx3-ubyte": b"train images" * 50,
    "train-labels-idx1-ubyte": b"train labels",
    "t10k-images-idx3-ubyte": b"test images" * 20,
    "t10k-labels-idx1-ubyte": b"test labels",
}
STAND_IN = {n: (len(data), hashlib.sha256(data).hexdigest()) for n, data in FILES.items()}
REMEDY = "try again, name a mirror in TPUFEED_MNIST_URL, or put the four files into {} yourself"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; a file named *.short is sent without its end, *.silent never."""

    def do_GET(self):
        self.server.requests.append(self.path)
        path = Path(self.translate_path(self.path))
        if path.with_suffix(".silent").exists():
            self.server.released.wait()
        elif path.with_suffix(".short").exists():
            self.send_response(200)
            self.send_header("Content-Length", "999")
            self.end_headers()
            self.wfile.write(b"\x1f\x8bhalf")
        else:
            super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        running.requests = []
        running.released = threading.Event()
        running.folder = folder
        running.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: gzip.decompress(path.read_bytes()) for path in folder.iterdir()}


EXPECTED = {f"{name}.gz": data for name, data in FILES.items()}
REQUESTS = [f"/{name}.gz" for name in FILES]


def test_fetched_once_then_kept(server, tmp_path, capsys):
    cache = tmp_path / "a cache"
    assert fetch_mnist(str(cache), base_url=server.url, contents=STAND_IN) == str(cache)
    assert contents_of(cache) == EXPECTED
    assert server.requests == REQUESTS
    sizes = {name: (server.folder / f"{name}.gz").stat().st_size for name in FILES}
    captured = capsys.readouterr()
    assert captured.err == "".join(
        f"tpufeed: fetched {name}.gz, {sizes[name]} bytes, into {cache}\n" for name in FILES
    )
    assert captured.out == ""
    # Later without a network, and without a word.
    again = fetch_mnist(str(cache), base_url="http://127.0.0.1:1", contents=STAND_IN)
    assert again == str(cache)
    assert server.requests == REQUESTS
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data[:12] + bytes([data[12] ^ 255]) + data[13:],
        lambda data: b"no gzip",
        lambda data: gzip.compress(b"other content"),
        lambda data: gzip.compress(b"x" * 10**6),
    ],
    ids=["empty", "cut", "flipped", "text", "other", "bomb"],
)
def test_a_damaged_file_is_fetched_anew(server, tmp_path, damage):
    fetch_mnist(str(tmp_path / "cache"), base_url=server.url, contents=STAND_IN)
    path = tmp_path / "cache" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    server.requests.clear()
    fetch_mnist(str(tmp_path / "cache"), base_url=server.url + "/", contents=STAND_IN)
    assert server.requests == ["/t10k-images-idx3-ubyte.gz"]
    assert contents_of(tmp_path / "cache") == EXPECTED


def test_a_server_may_unpack_on_the_way(server, tmp_path):
    for name, data in FILES.items():
        (server.folder / f"{name}.gz").write_bytes(data)
    cache = tmp_path / "cache"
    fetch_mnist(str(cache), base_url=server.url, contents=STAND_IN)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == EXPECTED
    fetch_mnist(str(cache), base_url="http://127.0.0.1:1", contents=STAND_IN)


def refused(tmp_path: Path, **arguments) -> str:
    arguments = {"contents": STAND_IN, **arguments}
    cache = tmp_path / "cache"
    with pytest.raises(DataError) as caught:
        fetch_mnist(str(cache), **arguments)
    assert not cache.exists() or sorted(path.name for path in cache.iterdir()) == []
    return str(caught.value)


def test_missing_on_the_server(server, tmp_path):
    (server.folder / "train-images-idx3-ubyte.gz").unlink()
    assert refused(tmp_path, base_url=server.url) == (
        f"idx:mnist: cannot fetch {server.url}/train-images-idx3-ubyte.gz: HTTP 404 File not "
        f"found; {REMEDY.format(tmp_path / 'cache')}"
    )


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # Port 1 is reserved, and nothing listens there.
    assert refused(tmp_path, base_url="http://127.0.0.1:1") == (
        "idx:mnist: cannot fetch http://127.0.0.1:1/train-images-idx3-ubyte.gz: "
        f"[Errno {errno.ECONNREFUSED}] {os.strerror(errno.ECONNREFUSED)}; "
        f"{REMEDY.format(tmp_path / 'cache')}"
    )


def test_a_server_that_does_not_answer(server, tmp_path):
    (server.folder / "train-images-idx3-ubyte.silent").touch()
    assert refused(tmp_path, base_url=server.url, timeout=0.2) == (
        f"idx:mnist: cannot fetch {server.url}/train-images-idx3-ubyte.gz: timed out; "
        f"{REMEDY.format(tmp_path / 'cache')}"
    )


def test_a_server_that_stops_half_way(server, tmp_path):
    (server.folder / "train-images-idx3-ubyte.short").touch()
    assert refused(tmp_path, base_url=server.url) == (
        f"idx:mnist: {server.url}/train-images-idx3-ubyte.gz: 6 of 999 bytes came; "
        f"{REMEDY.format(tmp_path / 'cache')}"
    )


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            gzip.compress(b"other images" * 50),
            "sha256 of the contents is "
            f"{hashlib.sha256(b'other images' * 50).hexdigest()}, must be "
            f"{STAND_IN['train-images-idx3-ubyte'][1]}",
        ),
        (gzip.compress(b"short"), "holds 5 bytes, must be 600"),
        (gzip.compress(b"x" * 10**7), "holds more than 600 bytes, must be 600"),
        (b"<html>", "holds 6 bytes, must be 600"),
        (
            gzip.compress(b"train images" * 50)[:-9],
            "no whole gzip file: Compressed file ended before the end-of-stream marker was reached",
        ),
    ],
    ids=["content", "short", "bomb", "html", "cut"],
)
def test_wrong_content_is_not_kept(server, tmp_path, data, problem):
    (server.folder / "train-images-idx3-ubyte.gz").write_bytes(data)
    assert refused(tmp_path, base_url=server.url) == (
        f"idx:mnist: {server.url}/train-images-idx3-ubyte.gz: {problem}; "
        f"{REMEDY.format(tmp_path / 'cache')}"
    )


def test_a_base_url_that_is_none(tmp_path):
    assert refused(tmp_path, base_url="mirror") == (
        "idx:mnist: cannot fetch mirror/train-images-idx3-ubyte.gz: unknown url type: "
        f"'mirror/train-images-idx3-ubyte.gz'; {REMEDY.format(tmp_path / 'cache')}"
    )


def test_a_cache_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with pytest.raises(DataError) as caught:
        fetch_mnist(str(cache), base_url=server.url, contents=STAND_IN)
    assert str(caught.value) == (
        f"idx:mnist: cannot write {cache}/train-images-idx3-ubyte.gz: Not a directory; set "
        "XDG_CACHE_HOME to a folder that can be written to"
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("{}/xdg", "{}/xdg/tpufeed/mnist"),
        ("", "{}/home/.cache/tpufeed/mnist"),
        ("relative", "{}/home/.cache/tpufeed/mnist"),
    ],
)
def test_default_folder_and_address_from_the_environment(
    server, tmp_path, monkeypatch, variable, expected
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", variable.format(tmp_path))
    monkeypatch.setenv("TPUFEED_MNIST_URL", server.url)
    found = fetch_mnist(contents=STAND_IN)
    assert found == expected.format(tmp_path)
    assert contents_of(Path(found)) == EXPECTED


def test_the_public_address():
    assert mnist.BASE_URL == "https://storage.googleapis.com/cvdf-datasets/mnist/"


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no MNIST files in {MNIST}")
def test_the_real_files_are_taken_and_found_by_ingest(server, tmp_path, monkeypatch):
    for path in MNIST.iterdir():
        (server.folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TPUFEED_MNIST_URL", server.url)
    config = IngestConfig(inputs=(Input("idx:mnist"),), output=str(tmp_path / "out"))
    resolved = resolve_config(config)
    folder = tmp_path / "xdg" / "tpufeed" / "mnist"
    assert resolved.inputs == (Input(f"idx:{folder}"),)
    assert sorted(os.listdir(folder)) == sorted(f"{name}.gz" for name in CONTENTS)
    assert {path: len(data) for path, data in contents_of(folder).items()} == {
        "train-images-idx3-ubyte.gz": 47_040_016,
        "train-labels-idx1-ubyte.gz": 60_008,
        "t10k-images-idx3-ubyte.gz": 7_840_016,
        "t10k-labels-idx1-ubyte.gz": 10_008,
    }
