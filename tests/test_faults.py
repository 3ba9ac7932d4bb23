"""Faults of the machine around a run: each has one clear outcome, and most of them end well."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import draw, ingest

from pipeline.config import make_ingest_config, make_parser
from pipeline.ingest import hold_output, prepare_output
from pipeline.verify import verify_dataset
from transforms import files
from transforms.manifest import load_manifest
from transforms.prepare import read_source
from transforms.records import DataError, ImageRef

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--image-size", "48x32", "--split", "train=0.7,test=0.3", "--shards", "6"]
# `tpufeed`, but for the seconds that an image may take, the files that may be open at once, and the
# lines of progress: on a slow machine one would come between those that tests look for.
COMMAND = """
import resource, sys
import pipeline.ingest, pipeline.progress, pipeline.summary
import transforms.decoders
pipeline.progress._LINE_SECONDS = 3600.0
transforms.decoders.prepare_images.__kwdefaults__["longest"] = float(sys.argv[1])
from pipeline.__main__ import run
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
sys.argv[:3] = ["tpufeed"]
run()
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for number in range(60):
        draw(folder / "ab"[number % 2] / f"{number:02d}.jpg", seed=number, size=(900, 600))
    return folder


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    assert ingest(f"{sources}/*/*", output, *FLAGS) == 0
    return output


def start(pattern, output, *flags, seconds=300.0, handles=1024, **options):
    words = ["ingest", "--input", str(pattern), "--output", str(output), *FLAGS, *flags]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(seconds), str(handles), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for(condition, *, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def said(capsys) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return err.removeprefix("tpufeed ingest: error: ").rstrip("\n")


def check_resumed(sources, output, undisturbed, *flags):
    assert ingest(f"{sources}/*/*", output, *FLAGS, "--resume", *flags) == 0
    assert load_manifest(str(output)).fingerprint == load_manifest(str(undisturbed)).fingerprint
    assert not (output / "_tmp").exists()
    assert verify_dataset(str(output)) == []


def rejects_of(output):
    lines = (output / "rejects.jsonl").read_text().splitlines()
    return {r["key"]: (r["reason"], r["detail"]) for r in map(json.loads, lines)}


# The run is told to end.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("workers", [False, True], ids=["in process", "worker processes"])
def test_a_signal_ends_the_run_and_its_workers(sources, undisturbed, tmp_path, number, workers):
    output = tmp_path / "out"
    flags = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    process = start(f"{sources}/*/*", output, *(flags if workers else []))
    wait_for(lambda: list(output.glob("_tmp/*.tfrecord.*")))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number
    assert not (output / "dataset.json").exists()
    check_resumed(sources, output, undisturbed)  # so nobody holds the folder any more


# No room, no right to write.


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own; `resize(kilobytes)` sets its size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small file system")
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tpufeed-test", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")

    def resize(kilobytes, *, more="rw"):
        options = f"remount,size={kilobytes}k,{more}"
        subprocess.run(["mount", "-o", options, str(folder)], check=True)

    yield folder, resize
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_at_any_moment_then_resumed(sources, undisturbed, small_disk, capsys):
    folder, resize = small_disk
    output = folder / "out"
    paths = [path for path in undisturbed.rglob("*") if path.is_file()]
    needed = sum(-(-path.stat().st_size // 4096) * 4 for path in paths)
    resumed, finished = [], set()
    for kilobytes in range(8, needed + 200, 36):
        resize(kilobytes)
        again = ["--direct_num_workers=1", *(["--resume"] if output.exists() else [])]
        capsys.readouterr()
        if ingest(f"{sources}/*/*", output, *FLAGS, *again) == 0:
            break
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].endswith(
            "No space left on device; mend it, then run again with --resume"
        ) or lines[-1].endswith(f"--output {output}: No space left on device"), lines
        assert f"{output}: " in lines[-1]
        assert not (output / "dataset.json").exists()
        now = {path.name for path in output.glob("_tmp/*.done.json")}
        assert finished <= now  # what was finished is never lost
        resumed.append(len(now))
        finished = now
    assert resumed[0] == 0 and len(set(resumed)) > 3
    assert load_manifest(str(output)).fingerprint == load_manifest(str(undisturbed)).fingerprint
    assert verify_dataset(str(output)) == []


def test_worker_processes_on_a_full_disk_that_is_the_temporary_one_too(
    sources, undisturbed, small_disk
):
    """What a worker prints of it needs no room: one that fails to print answers nothing."""
    folder, resize = small_disk
    output = folder / "out"
    flags = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    process = start(f"{sources}/*/*", output, *flags, env={**os.environ, "TMPDIR": str(folder)})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.splitlines() == [
        f"tpufeed ingest: error: cannot write to {output}: No space left on device; mend it, then "
        "run again with --resume"
    ]
    resize(10_000)
    check_resumed(sources, output, undisturbed, *flags)


def test_a_disk_that_turns_read_only(sources, undisturbed, small_disk, capsys):
    folder, resize = small_disk
    resize(4096)
    output = folder / "out"
    process = start(f"{sources}/*/*", output, "--direct_num_workers=1")
    wait_for(lambda: list(output.glob("_tmp/*.done.json")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    resize(4096, more="ro")
    assert ingest(f"{sources}/*/*", output, *FLAGS, "--resume") == 1
    assert said(capsys).endswith("Read-only file system")
    resize(4096)
    check_resumed(sources, output, undisturbed)


def test_a_folder_that_may_not_be_written_to(tmp_path):
    """In this process alone: nobody else may run root's Python."""
    for parent in [tmp_path, *list(tmp_path.parents)[:3]]:  # with a folder for each process
        if os.geteuid() == 0:
            os.chmod(parent, 0o755)
    output = tmp_path / "out"
    output.mkdir(mode=0o555)
    words = ["ingest", "--input", "/in/*", "--output", str(output)]
    config = make_ingest_config(make_parser().parse_args(words))
    with ordinary_user(), hold_output(config), pytest.raises(DataError) as refused:
        prepare_output(config)
    assert str(refused.value) == f"--output {output}: Permission denied"
    os.chmod(output, 0o777)
    (output / "index").mkdir(mode=0o555)
    with ordinary_user(), pytest.raises(PermissionError) as denied:
        files.write_file(str(output), "index/train-00000-of-00001.idx", b"")
    assert denied.value.strerror == "Permission denied"  # what the run's one line says


class ordinary_user:
    """Root may do everything, so become nobody for a while."""

    def __enter__(self):
        self.root = os.geteuid() == 0
        if self.root:
            os.seteuid(65534)

    def __exit__(self, *_):
        if self.root:
            os.seteuid(0)


def test_out_of_file_handles_loses_no_picture(sources, undisturbed, tmp_path):
    """A limit of ours is not the pictures' fault: they must not become rejects."""
    output = tmp_path / "out"
    outcomes = []
    for handles in (5, 8, 11, 14):
        flags = ["--resume", "--max-reject-rate=1", "--direct_num_workers=1"]
        process = start(f"{sources}/*/*", output, *flags, handles=handles)
        _, errors = process.communicate(timeout=100)
        if process.returncode == 0:
            break
        assert process.returncode == 1 and not (output / "dataset.json").exists(), errors
        line = errors.splitlines()[-1]
        assert "Too many open files" in line or "a decoder process did not start" in line, errors
        outcomes.append(line)
    assert outcomes
    check_resumed(sources, output, undisturbed, "--max-reject-rate=1")
    assert rejects_of(output) == {}


def test_a_source_that_cannot_be_opened_for_want_of_handles_is_no_reject(sources):
    path = str(sources / "a" / "00.jpg")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(DataError) as caught:
            read_source(ImageRef("a/00.jpg", path, "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert str(caught.value) == (
        f"{path}: Too many open files: a limit of this process, no fault of the file: raise it "
        "(ulimit), then run again with --resume"
    )


# The sources change while they are read.


def change_to(kind, path: Path) -> None:
    if kind == "vanishes":
        path.unlink()
    elif kind == "grows":
        with open(path, "ab") as file:
            file.write(b"more" * 1000)
    elif kind == "shrinks to nothing":
        os.truncate(path, 0)
    elif kind == "is replaced":
        new = path.with_suffix(".new")
        draw(new, seed=1000, size=(300, 200), format="JPEG")
        os.rename(new, path)


@pytest.mark.parametrize("kind", ["vanishes", "grows", "shrinks to nothing", "is replaced"])
def test_a_source_that_changes_after_it_was_listed(kind, sources, tmp_path):
    folder, output = shutil.copytree(sources, tmp_path / "in"), tmp_path / "out"
    paths = sorted(folder.glob("*/*.jpg"))
    before = {str(path): path.read_bytes() for path in paths}
    late = []

    def change():
        wait_for(lambda: list(output.glob("_tmp/*.done.json")))  # listed, and the first shard read
        for path in paths:
            change_to(kind, path)
        late.append(not (output / "dataset.json").exists())

    thread = threading.Thread(target=change)
    thread.start()
    code = ingest(f"{folder}/*/*", output, *FLAGS, "--max-reject-rate=1", "--direct_num_workers=1")
    thread.join()
    assert code == 0 and late == [True]
    manifest = load_manifest(str(output))
    assert manifest.records + sum(manifest.rejects.values()) == 60
    assert verify_dataset(str(output), depth="deep") == []
    reasons = {"vanishes": {"missing"}, "shrinks to nothing": {"zero_byte"}}.get(kind, set())
    assert set(manifest.rejects) <= reasons | {"truncated"}  # read while it was cut
    if reasons:
        assert manifest.rejects[min(reasons)] > 5
    check_contents(output, before, kind)


def check_contents(output, before, kind):
    """Every record is of one content, whole, the one listed or the one after."""
    import hashlib

    import pyarrow.parquet

    seen = set()
    for path in output.glob("index/*.parquet"):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            was = hashlib.sha256(before[row["source"]]).hexdigest()
            seen.add(row["source_sha256"] == was)
            if row["source_sha256"] != was:
                now = Path(row["source"]).read_bytes()
                assert row["source_sha256"] == hashlib.sha256(now).hexdigest()
                assert row["source_bytes"] == len(now)
    assert seen == ({True, False} if kind in ("grows", "is replaced") else {True})


def test_a_file_listed_with_nothing_in_it_is_read_as_it_then_is(sources, tmp_path):
    """Files of /proc are listed with 0 bytes, as are those that are just being written."""
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for number in range(3):
        shutil.copy(sources / "a" / f"{2 * number:02d}.jpg", folder)
    (folder / "nothing.jpg").write_bytes(b"")
    (folder / "version.jpg").symlink_to("/proc/version")
    flags = ["--image-size", "16", "--max-reject-rate=1"]
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    assert rejects_of(tmp_path / "out") == {
        "a/nothing.jpg": ("zero_byte", "the file is empty"),
        "a/version.jpg": ("unidentified", rejects_of(tmp_path / "out")["a/version.jpg"][1]),
    }


# Reads and renames that fail.


def test_the_kernels_own_input_output_error_is_a_reject(sources, tmp_path):
    """/proc/self/mem is a regular file whose first page cannot be read: EIO, without a trick."""
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    shutil.copy(sources / "a" / "00.jpg", folder)
    (folder / "bad.jpg").symlink_to("/proc/self/mem")
    flags = ["--image-size", "16", "--max-reject-rate=1"]
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    assert rejects_of(tmp_path / "out") == {"a/bad.jpg": ("unreadable", "Input/output error")}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Environment in which the C library is faulty_files.c first."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler to make reads fail with")
    library = tmp_path_factory.mktemp("faulty") / "faulty_files.so"
    source = Path(__file__).with_name("faulty_files.c")
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(words, check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def test_slow_hanging_and_broken_reads(sources, faulty, tmp_path):
    folder = shutil.copytree(sources, tmp_path / "in")
    for number, name in enumerate(("HANG1", "HANG2", "SLOW1", "SLOW2", "EIO1", "EIO2")):
        os.rename(folder / "a" / f"{2 * number:02d}.jpg", folder / "a" / f"{name}.jpg")
    output = tmp_path / "out"
    process = start(f"{folder}/*/*", output, "--max-reject-rate=0.1", env=faulty, seconds=4.0)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    late = ("timeout", "not done after 4 s")
    assert rejects_of(output) == {
        "a/HANG1.jpg": late,
        "a/HANG2.jpg": late,
        "a/EIO1.jpg": ("unreadable", "Input/output error"),
        "a/EIO2.jpg": ("unreadable", "Input/output error"),
    }
    assert load_manifest(str(output)).records == 56
    assert verify_dataset(str(output)) == []


def test_a_rename_that_fails(sources, undisturbed, faulty, tmp_path):
    output = tmp_path / "out"
    process = start(f"{sources}/*/*", output, env={**faulty, "FAIL_RENAME": "1"})
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert errors.startswith(f"tpufeed ingest: error: cannot write to {output}: ")
    assert errors.endswith("; mend it, then run again with --resume\n") and errors.count("\n") == 1
    assert "Input/output error" in errors
    assert not list(output.glob("*.tfrecord")) and not list(output.glob("_tmp/*.done.json"))
    check_resumed(sources, output, undisturbed)
