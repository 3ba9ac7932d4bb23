"""Runs that are killed at random moments, then resumed: the same data set, and never half of one.

Each seed is one kill. Five of them run always, one of each kind; TPUFEED_LONG=1 runs fifty:

    TPUFEED_LONG=1 ./run_tests.sh tests/test_kills.py
"""

import collections
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers import draw

from pipeline.verify import verify_dataset
from transforms.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]
SEEDS = range(50 if os.environ.get("TPUFEED_LONG") == "1" else 5)
KINDS = ("in process", "twice", "--overwrite", "a worker", "the launcher of workers")
FLAGS = ["--image-size", "96x64", "--split", "train=0.7,test=0.3", "--shards", "12"]
OLD_FLAGS = ["--image-size", "16", "--shards", "15", "--seed", "3"]
WORKERS = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
TALLY: collections.Counter = collections.Counter()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """240 pictures, a copy and a broken file among them."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(240):
        draw(folder / "abc"[number % 3] / f"{number:03d}.jpg", seed=number, size=(1200, 900))
    (folder / "b" / "copy.jpg").write_bytes((folder / "a" / "000.jpg").read_bytes())
    (folder / "c" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing more")
    return folder


def command(many, output, *flags):
    words = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{many}/*/*"]
    return [*words, "--output", str(output), "--quiet", *flags]


def run(many, output, *flags):
    done = subprocess.run(
        command(many, output, *flags), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stderr.count("\n") <= 1, done.stderr
    return done


@pytest.fixture(scope="module")
def undisturbed(many, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert run(many, output, *FLAGS).returncode == 0
    return output


@pytest.fixture(scope="module")
def pace(many, tmp_path_factory):
    """Seconds from each of MOMENTS to the end: {whether with worker processes: [seconds]}."""
    paces = {}
    for workers in (False, True):
        output = tmp_path_factory.mktemp("pace") / "out"
        words = command(many, output, *FLAGS, *(WORKERS if workers else []))
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
        times = [wait_for(moment, output, process) for moment in MOMENTS]
        assert process.wait(timeout=300) == 0
        paces[workers] = [time.monotonic() - since for since in times]
    return paces


@pytest.fixture(scope="module")
def old(many, tmp_path_factory):
    """What --overwrite finds: another data set."""
    output = tmp_path_factory.mktemp("old") / "out"
    assert run(many, output, *OLD_FLAGS).returncode == 0
    return output


@pytest.fixture(scope="module", autouse=True)
def tally(request):
    yield
    plugins = request.config.pluginmanager
    reporter, capture = map(plugins.getplugin, ("terminalreporter", "capturemanager"))
    if TALLY and reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line("")
            for (kind, state), number in sorted(TALLY.items()):
                reporter.write_line(f"killed {kind}: {state}: {number}")


def folder_touched(output):
    return stamp(output)


def plan_written(output):
    return stamp(output / "_tmp" / "plan.json")


MOMENTS = (folder_touched, plan_written)


def stamp(path):
    try:
        return path.stat().st_mtime_ns, path.stat().st_ino
    except FileNotFoundError:
        return None


def wait_for(moment, output, process, *, before=None):
    """Waits until the moment is another one than before, or the process ends."""
    deadline = time.monotonic() + 120
    while moment(output) == before and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return time.monotonic()


def start_and_kill(words, output, *, chance, kind, pace, resumed):
    """Kills at a random moment after the run began, or began to write; returns the exit code."""
    which = 0 if resumed else chance.randrange(len(MOMENTS))
    before = MOMENTS[which](output)
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(MOMENTS[which], output, process, before=before)
        time.sleep(chance.uniform(0, pace[which]))
        target = process.pid
        if kind == "a worker":
            target = chance.choice(worker_processes(process.pid) or [target])
        if process.poll() is None:
            os.kill(target, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert errors.count("\n") <= 1, errors
    return process.returncode


def worker_processes(pid):
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if "apache_beam.runners.worker.sdk_worker_main" in child.cmdline():
                found.append(child.pid)
        except psutil.Error:
            continue
    return sorted(found)


def state_of(output, *fingerprints):
    """What a kill left; a dataset.json is that of a whole set, whenever one is there."""
    if (output / "dataset.json").exists():
        manifest = load_manifest(str(output))
        assert manifest.fingerprint in fingerprints
        assert verify_dataset(str(output)) == []
        return "old set" if manifest.fingerprint != fingerprints[0] else "complete"
    if (output / "_tmp" / "overwriting").exists():
        return "old set half removed"
    done = len(list(output.glob("_tmp/*.done.json")))
    if not (output / "_tmp" / "plan.json").exists():
        return "no plan"
    return f"{done // 4 * 4} to {done // 4 * 4 + 3} shards"


def check(output, undisturbed):
    assert load_manifest(str(output)).fingerprint == load_manifest(str(undisturbed)).fingerprint
    names = {path.relative_to(output) for path in output.rglob("*") if path.is_file()}
    assert names == {p.relative_to(undisturbed) for p in undisturbed.rglob("*") if p.is_file()}
    for name in names - {Path("dataset.json")}:  # which names the folder
        assert (output / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert verify_dataset(str(output)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_then_resumed(seed, many, undisturbed, old, pace, tmp_path):
    kind, chance, output = KINDS[seed % len(KINDS)], random.Random(seed), tmp_path / "out"
    workers = WORKERS if "worker" in kind else []
    words = command(many, output, *FLAGS, *workers)
    fingerprints = [load_manifest(str(path)).fingerprint for path in (undisturbed, old)]
    if kind == "--overwrite":
        subprocess.run(["cp", "-r", str(old), str(output)], check=True)
        words.append("--overwrite")
    for turn in range(2 if kind == "twice" else 1):
        again = ["--resume"] if turn else []
        code = start_and_kill(
            [*words, *again],
            output,
            chance=chance,
            kind=kind,
            pace=pace[bool(workers)],
            resumed=bool(turn),
        )
        assert code in (-signal.SIGKILL, 0, 1 if kind == "a worker" else 0)
        TALLY[kind, state_of(output, *fingerprints)] += 1
    done = run(many, output, *FLAGS, "--resume")
    if done.returncode and kind == "--overwrite":  # killed before anything was removed
        assert "the run there was begun otherwise" in done.stderr
        assert state_of(output, *fingerprints) == "old set"
        done = run(many, output, *FLAGS, "--overwrite")
    assert done.returncode == 0, done.stderr
    check(output, undisturbed)


# `tpufeed ingest --overwrite`, killed before it removes its n-th file.
REMOVING = """
import os, signal, sys
from pipeline.__main__ import main
real, left = os.remove, [int(sys.argv[1])]
def remove(path):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(path)
os.remove = remove
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [0, 1, 2, 30, 45])
def test_killed_while_the_old_set_is_removed(number, many, undisturbed, old, tmp_path):
    output = tmp_path / "out"
    subprocess.run(["cp", "-r", str(old), str(output)], check=True)
    (output / "thesis.txt").touch()
    words = [*command(many, output, *FLAGS)[3:], "--overwrite"]
    done = subprocess.run([sys.executable, "-c", REMOVING, str(number), *words], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    fingerprints = [load_manifest(str(path)).fingerprint for path in (undisturbed, old)]
    state = state_of(output, *fingerprints)
    assert state == ("old set" if number == 0 else "old set half removed")
    assert (len(list(output.glob("*.tfrecord"))) < 15) == (number == 45)
    assert run(many, output, *FLAGS, "--resume").returncode == 0
    (output / "thesis.txt").unlink()
    check(output, undisturbed)
