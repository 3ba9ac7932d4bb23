"""Worker processes: the same bytes, and a dead one ends the run instead of hanging it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import draw, ingest

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]


@pytest.fixture(scope="module")
def slow_pictures(tmp_path_factory):
    """Few files, many names: 400 pictures of 3 megapixels, some 40 seconds of work."""
    folder = tmp_path_factory.mktemp("slow")
    draw(folder / "one" / "000.png", seed=0, size=(2000, 1500))
    for number in range(1, 400):
        os.link(folder / "one" / "000.png", folder / "one" / f"{number:03d}.png")
    return folder


def wait_for(condition, *, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds} seconds")


def worker_processes(process):
    """The Python processes themselves, not the shells that Beam starts them through."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "apache_beam.runners.worker.sdk_worker_main" in line:
            found.append(child)
    # A decoder that one of them has just begun to start still bears its command line.
    pids = {worker.pid for worker in found}
    return [worker for worker in found if worker.ppid() not in pids]


@pytest.mark.parametrize(("count", "late"), [(2, 0), (1, 3)])
def test_a_worker_killed_in_mid_run_ends_it_within_ten_seconds(
    count, late, slow_pictures, tmp_path
):
    """Also where a busy machine tells of its connection, which fails the run, before its death."""
    (tmp_path / "sitecustomize.py").write_text(
        "import subprocess, time\n"
        "wait = subprocess.Popen.wait\n"
        "def wait_late(*args, **kwargs):\n"
        "    code = wait(*args, **kwargs)\n"
        f"    time.sleep({late} if code < 0 else 0)\n"
        "    return code\n"
        "subprocess.Popen.wait = wait_late\n"
    )
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    output = tmp_path / "out"
    command = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{slow_pictures}/*/*"]
    command += ["--output", str(output), "--shards", "8", "--quiet", *WORKERS]
    command += [f"--direct_num_workers={count}"]
    process = subprocess.Popen(command, cwd=ROOT, env=path, stderr=subprocess.PIPE, text=True)
    # A shard under construction: the processes are up and at work.
    wait_for(lambda: list(output.glob("_tmp/*.tfrecord.*")), seconds=120)
    workers = worker_processes(process)
    assert len(workers) == count
    workers[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1
    assert errors.splitlines() == [
        "tpufeed ingest: error: a worker process died (Worker subprocess exited with return code "
        "-9): run again with --resume, without worker processes if it was short of memory"
    ]
    assert not (output / "dataset.json").exists()
    wait_for(lambda: not any(worker.is_running() for worker in workers), seconds=10)


def test_what_a_dying_worker_said_is_told(pictures, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('sdk_worker_main' in word for word in sys.orig_argv):\n"
        "    print('one thing\\n' * 10_000 + 'no such library\\n', file=sys.stderr, flush=True)\n"
        "    os._exit(9)\n"
    )
    command = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{pictures}/*/*"]
    command += ["--output", str(tmp_path / "out"), *WORKERS]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "tpufeed ingest: error: a worker process died (Worker subprocess exited with return code 9;"
        " it said: no such library): run again with --resume, without worker processes if it was "
        "short of memory"
    )


@pytest.mark.skipif(not shutil.which("setpriv"), reason="nothing ties workers to the launcher")
def test_workers_end_with_a_launcher_that_is_killed(slow_pictures, tmp_path):
    """And do not go on writing into a folder that is free for the next run."""
    output = tmp_path / "out"
    command = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{slow_pictures}/*/*"]
    command += ["--output", str(output), "--shards", "2", *WORKERS]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(output.glob("_tmp/*.tfrecord.*")), seconds=120)
    workers = worker_processes(process)
    assert len(workers) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(worker.is_running() for worker in workers), seconds=3)


def test_a_worker_processs_own_error_comes_out_as_one_line(pictures, tmp_path, capfd):
    flags = ["--split-by", "group:(nothing like it)", *WORKERS]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *flags) == 1
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    assert "--split-by group:(nothing like it) does not match the key" in errors


def fingerprint(folder):
    document = json.loads((folder / "dataset.json").read_text())
    shards = [s["sha256"] for split in document["splits"].values() for s in split["shards"]]
    return document["fingerprint"], shards


RUNS = {
    "once more": [],
    "one worker": ["--direct_num_workers=1"],
    "two workers": ["--direct_num_workers=2"],
    "threads of Beam": ["--direct_num_workers=2", "--direct_running_mode=multi_threading"],
    "processes": WORKERS,
    "one process": ["--direct_num_workers=1", "--direct_running_mode=multi_processing"],
    "bundles repeated": ["--direct_runner_bundle_repeat=2"],
    "DirectRunner by name": ["--runner=DirectRunner"],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bytes(name, pictures, dataset, tmp_path):
    flags = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *flags, *RUNS[name]) == 0
    assert fingerprint(tmp_path / "out") == fingerprint(dataset)
