"""Work done twice, as runners retry it: the same bytes, no count doubled, nothing left over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ingest

from pipeline.__main__ import main
from transforms.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "5"]

# `tpufeed ingest`, but into a folder in which another attempt has left, or is leaving, its files.
ATTEMPT = """
import contextlib, os, signal, sys
import pipeline.ingest, transforms.write
from pipeline.__main__ import main
pipeline.ingest.prepare_output = lambda config: True
pipeline.ingest.hold_output = lambda config: contextlib.nullcontext(lambda: None)
transforms.write.resume.forget_run = lambda *_: None
if sys.argv[1] == "die":
    # Just after the first shard got its name, before anybody hears of it.
    transforms.write.summarize_rows = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "done":
    # And after it was marked as finished.
    mark = transforms.write.resume.write_done
    transforms.write.resume.write_done = lambda *a, **k: (
        mark(*a, **k), os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main(sys.argv[2:]))
"""


def start(how: str, pictures, output) -> subprocess.Popen:
    words = ["ingest", "--input", f"{pictures}/*/*", "--output", str(output), *FLAGS]
    return subprocess.Popen(
        [sys.executable, "-c", ATTEMPT, how, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(process: subprocess.Popen) -> int:
    said, _ = process.communicate(timeout=200)
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode


@pytest.fixture(scope="module")
def undisturbed(pictures, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert ingest(f"{pictures}/*/*", output, *FLAGS) == 0
    return output


def check(output, undisturbed) -> None:
    mine, theirs = load_manifest(str(output)), load_manifest(str(undisturbed))
    assert mine.fingerprint == theirs.fingerprint
    assert mine.records == theirs.records == 60
    for path in undisturbed.rglob("*"):
        if path.is_file() and path.suffix in (".tfrecord", ".parquet", ".idx", ".jsonl"):
            assert (output / path.relative_to(undisturbed)).read_bytes() == path.read_bytes()
    assert {path.name for path in output.glob("train-*")} == {
        path.name for path in undisturbed.glob("train-*")
    }
    assert not list(output.glob("_tmp/*"))
    assert main(["verify", str(output)]) == 0


def test_two_processes_write_the_same_shards_at_once(pictures, undisturbed, tmp_path):
    attempts = [start("live", pictures, tmp_path / "out") for _ in range(2)]
    assert [finish(attempt) for attempt in attempts] == [0, 0]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *FLAGS, "--resume") == 0
    check(tmp_path / "out", undisturbed)


@pytest.mark.parametrize("moment, marks", [("die", 0), ("done", 1)])
def test_killed_between_the_rename_and_its_acknowledgement(
    moment, marks, pictures, undisturbed, tmp_path
):
    output = tmp_path / "out"
    assert finish(start(moment, pictures, output)) == -signal.SIGKILL
    assert len(list(output.glob("*.tfrecord"))) == 1
    assert len(list(output.glob("_tmp/*.done.json"))) == marks
    assert not (output / "dataset.json").exists()
    assert main(["verify", str(output)]) == 1
    assert ingest(f"{pictures}/*/*", output, *FLAGS, "--resume") == 0
    check(output, undisturbed)


def test_a_bundle_run_twice(pictures, undisturbed, tmp_path):
    flags = [*FLAGS, "--direct_runner_bundle_repeat=2"]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *flags) == 0
    check(tmp_path / "out", undisturbed)
