"""The same graph on engines that are other processes: portable, byte for byte.

Beam's own job service and a pool of workers need nothing more. Prism is built by Go, so it runs
only where TPUFEED_PRISM names its program, or TPUFEED_ENGINES=1 allows to build it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import apache_beam
import pytest
from helpers import draw, ingest

from pipeline.__main__ import main
from transforms.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "5"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen) -> None:
    for _ in range(300):
        assert process.poll() is None, "ended before it listened"
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {port}")


@contextlib.contextmanager
def running(words, port):
    # From another folder, with the packages on the path as where they are installed. The pool
    # starts each worker as `python`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    process = subprocess.Popen(
        words, cwd="/", env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port, process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def workers():
    """The port of a pool of workers in a process of its own."""
    port = free_port()
    words = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main"]
    with running([*words, f"--service_port={port}"], port):
        yield port


@pytest.fixture(scope="module")
def job_service():
    """The port of Beam's own job service, in a process of its own."""
    port = free_port()
    words = [sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main"]
    with running([*words, f"--port={port}"], port):
        yield port


@pytest.fixture(scope="module")
def prism():
    """The port of Prism's job service."""
    program = os.environ.get("TPUFEED_PRISM") or build_prism()
    port = free_port()
    words = [program, f"--job_port={port}", "--serve_http=false"]
    with running(words, port):
        yield port


def build_prism() -> str:
    if os.environ.get("TPUFEED_ENGINES") != "1":
        pytest.skip("Prism: neither TPUFEED_PRISM=/path nor TPUFEED_ENGINES=1, which builds it")
    if not shutil.which("go"):
        pytest.skip("Prism: no Go to build it with")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tpufeed" / f"prism-{apache_beam.__version__}"
    if not (folder / "prism").exists():
        module = "github.com/apache/beam/sdks/v2/go/cmd/prism"
        try:
            done = subprocess.run(
                ["go", "install", f"{module}@v{apache_beam.__version__}"],
                env={**os.environ, "GOBIN": str(folder)},
                capture_output=True,
                text=True,
                timeout=900,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("Prism: go install took longer than 900 s")
        if done.returncode:
            pytest.skip(f"Prism: go install: {done.stderr.strip().splitlines()[-1][:200]}")
    return str(folder / "prism")


def portable(job_port: int, worker_port: int) -> list[str]:
    return [
        "--runner=PortableRunner",
        f"--job_endpoint=localhost:{job_port}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{worker_port}",
    ]


@pytest.fixture(scope="module")
def expected(pictures, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "local"
    assert ingest(f"{pictures}/*/*", output, *FLAGS) == 0
    return output


def check(output, expected) -> None:
    assert load_manifest(str(output)).fingerprint == load_manifest(str(expected)).fingerprint
    for path in expected.glob("*.tfrecord"):
        assert (output / path.name).read_bytes() == path.read_bytes()
    assert main(["verify", str(output)]) == 0


@pytest.mark.parametrize("engine", ["job_service", "prism"])
def test_the_same_bytes(engine, workers, pictures, expected, tmp_path, request):
    flags = portable(request.getfixturevalue(engine), workers)
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *FLAGS, *flags) == 0
    check(tmp_path / "out", expected)


@pytest.mark.parametrize("engine", ["job_service", "prism"])
def test_an_error_far_away_is_one_line(engine, workers, tmp_path, request, capsys):
    flags = portable(request.getfixturevalue(engine), workers)
    draw(tmp_path / "in" / "cat" / "a.png", seed=1)
    (tmp_path / "in" / "cat" / "b.png").write_bytes(b"no picture")
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("tpufeed ingest: error: ")
    if engine == "job_service":  # Prism tells at times only that a bundle failed
        assert "1 of 2 inputs were rejected (unidentified 1), more than" in line
    assert not (tmp_path / "out" / "dataset.json").exists()


@pytest.mark.parametrize("engine", ["job_service", "prism"])
def test_bad_files_csv_and_two_patterns(engine, workers, tmp_path, request):
    flags = portable(request.getfixturevalue(engine), workers)
    for number in range(6):
        draw(tmp_path / "in" / "ab"[number % 2] / f"{number}.png", seed=number)
    (tmp_path / "in" / "a" / "bad.png").write_bytes(b"no picture")
    (tmp_path / "out.txt").write_text("b/5.png\n")
    words = [f"{tmp_path}/in/*/*", "--input", f"{tmp_path}/in/a/*", "--image-size", "16"]
    words += ["--max-reject-rate", "0.5", "--exclude", str(tmp_path / "out.txt")]
    manifests = []
    for name, more in (("local", []), ("far", flags)):
        pattern, *rest = words
        assert ingest(pattern, tmp_path / name, *rest, *more) == 0
        manifests.append(load_manifest(str(tmp_path / name)))
    assert manifests[0].fingerprint == manifests[1].fingerprint
    assert manifests[1].records == 5
    assert manifests[1].rejects == {"excluded": 1, "unidentified": 1}


@pytest.mark.parametrize("engine", ["job_service", "prism"])
def test_the_flowers(engine, workers, shared, tmp_path, request):
    flags = portable(request.getfixturevalue(engine), workers)
    words = [f"{shared}/data/flowers/*/*.jpg", "--image-size", "192", "--shards", "16"]
    words += ["--split", "train=0.8,validation=0.2"]
    for name, more in (("local", []), ("far", flags)):
        pattern, *rest = words
        assert ingest(pattern, tmp_path / name, *rest, *more) == 0
    check(tmp_path / "far", tmp_path / "local")


@pytest.mark.parametrize("engine", ["job_service", "prism"])
def test_a_run_goes_on_and_copies_are_dropped(engine, workers, pictures, tmp_path, request):
    """Begun far away, finished far away: the marks are written and believed by the workers."""
    flags = portable(request.getfixturevalue(engine), workers)
    folder = shutil.copytree(pictures, tmp_path / "in")
    shutil.copy(folder / "ash" / "00.jpg", folder / "birch" / "copy.jpg")
    (folder / "ash" / "empty.jpg").write_bytes(b"")
    words = [f"{folder}/*/*", tmp_path / "out", *FLAGS, "--duplicates", "drop"]
    assert ingest(*words, *flags) == 1  # the rate
    shards = {path: path.stat().st_ino for path in (tmp_path / "out").glob("*.tfrecord")}
    assert len(shards) == 5
    min(shards).unlink()
    assert ingest(*words, *flags, "--resume", "--max-reject-rate", "0.1") == 0
    words[1] = tmp_path / "local"
    assert ingest(*words, "--max-reject-rate", "0.1") == 0
    check(tmp_path / "out", tmp_path / "local")
    assert not (tmp_path / "out" / "_tmp").exists()
    manifest = load_manifest(str(tmp_path / "out"))
    assert (manifest.records, manifest.rejects) == (60, {"duplicate": 1, "zero_byte": 1})
    assert sum(path.stat().st_ino == shards[path] for path in shards) >= 4
