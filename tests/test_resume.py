"""--resume: what is believed, what is refused, and what is left alone."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gcs_emulator import serve
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.verify import verify_dataset
from transforms import files, resume
from transforms.manifest import load_manifest, parse_manifest
from transforms.records import DataError, Reject, ShardSummary
from transforms.shards import SplitSize

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
HEX = "0123456789abcdef" * 2


@pytest.fixture
def unfinished(pictures, dataset, tmp_path):
    """A run that ended before its last two shards, and its inputs, which a test may change."""
    folder, output = shutil.copytree(pictures, tmp_path / "in"), tmp_path / "out"
    # One reject more than the rate allows: everything is written but dataset.json.
    (folder / "ash" / "empty.jpg").write_bytes(b"")
    assert ingest(f"{folder}/*/*", output, *FLAGS) == 1
    for name in ("train-00002-of-00004", "validation-00000-of-00002"):
        (output / "_tmp" / f"{name}.done.json").unlink()
    (output / "train-00002-of-00004.tfrecord").unlink()
    return output


def go_on(output, *flags, pattern="*/*"):
    folder = output.parent / "in"
    return ingest(f"{folder}/{pattern}", output, *FLAGS, "--resume", *flags)


def said(capsys) -> list[str]:
    prefix = "tpufeed ingest: error: "
    return [line.removeprefix(prefix) for line in capsys.readouterr().err.splitlines()]


def stamps(output, pattern="*.tfrecord"):
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in output.glob(pattern)}


def undisturbed(output, tmp_path, *flags):
    """The data set of the same inputs, made in one go."""
    there = tmp_path / "undisturbed"
    assert ingest(f"{output.parent}/in/*/*", there, *FLAGS, *flags) == 0
    return there


def check_same(output, other):
    for path in sorted(other.rglob("*")):
        if path.is_file() and path.name != "dataset.json":
            assert (output / path.relative_to(other)).read_bytes() == path.read_bytes(), path
    assert load_manifest(str(output)).fingerprint == load_manifest(str(other)).fingerprint
    assert not (output / "_tmp").exists()
    assert verify_dataset(str(output)) == []


def test_only_what_is_missing_is_written_under_a_higher_rate(unfinished, tmp_path, caplog):
    before = stamps(unfinished)
    assert len(before) == 5
    assert go_on(unfinished, "--max-reject-rate", "0.1") == 0
    assert f"{unfinished}: going on, 4 shard(s) were finished before" in caplog.text
    after = stamps(unfinished)
    kept = {name for name in before if before[name] == after[name]}
    assert kept == set(before) - {"validation-00000-of-00002.tfrecord"}
    check_same(unfinished, undisturbed(unfinished, tmp_path, "--max-reject-rate", "0.1"))


def test_finished_shards_are_not_decoded_again(unfinished):
    """Their sources could not be: only what was listed is still the same."""
    index = unfinished / "index"
    import pyarrow.parquet

    for shard in unfinished.glob("_tmp/*.done.json"):
        table = pyarrow.parquet.read_table(index / shard.name.replace(".done.json", ".parquet"))
        for source in table["source"].to_pylist():
            size = os.path.getsize(source)
            Path(source).write_bytes(b"x" * size)
    assert go_on(unfinished, "--max-reject-rate", "0.1") == 0
    assert load_manifest(str(unfinished)).rejects == {"zero_byte": 1}


def flip(path, at=-20):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def without_first_record(path):
    path.write_bytes(path.read_bytes()[100:])


def change(**fields):
    """Changes a plan or a mark, but not the sha256 in it."""
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_and_seal(**fields):
    def spoil(path):
        change(**fields)(path)
        document = json.loads(path.read_text())
        del document["sha256"]
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        change(sha256=hashlib.sha256(text.encode()).hexdigest())(path)

    return spoil


SPOILT = {
    "the shard is gone": ("train-00001-of-00004.tfrecord", Path.unlink),
    "of another size": ("train-00001-of-00004.tfrecord", without_first_record),
    "of other bytes": ("train-00001-of-00004.tfrecord", flip),
    "the index is gone": ("index/train-00001-of-00004.parquet", Path.unlink),
    "another index": ("index/train-00001-of-00004.parquet", flip),
    "another idx": ("index/train-00001-of-00004.idx", flip),
    "the mark is cut": ("_tmp/train-00001-of-00004.done.json", without_first_record),
    "the mark is empty": ("_tmp/train-00001-of-00004.done.json", lambda p: p.write_bytes(b"")),
    "the mark is of another shard": (
        "_tmp/train-00001-of-00004.done.json",
        lambda p: shutil.copy(p.with_name("train-00000-of-00004.done.json"), p),
    ),
    "the mark is of another plan": (
        "_tmp/train-00001-of-00004.done.json",
        change_and_seal(plan="0" * 64),
    ),
    "the mark is of another format": (
        "_tmp/train-00001-of-00004.done.json",
        change_and_seal(format=1),
    ),
    "the mark has other rejects": (
        "_tmp/train-00001-of-00004.done.json",
        change(rejects=[dict.fromkeys(("key", "path", "label", "reason", "detail"), "a")]),
    ),
    "the mark has other counts": ("_tmp/train-00001-of-00004.done.json", change(summary={})),
    "the mark is a list": ("_tmp/train-00001-of-00004.done.json", lambda p: p.write_text("[]")),
    "the mark is deep": (
        "_tmp/train-00001-of-00004.done.json",
        lambda p: p.write_text('{"format":' * 100_000),
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_mark_is_not_believed(how, unfinished, tmp_path):
    name, spoil = SPOILT[how]
    before = stamps(unfinished)
    spoil(unfinished / name)
    assert go_on(unfinished, "--max-reject-rate", "0.1") == 0
    after = stamps(unfinished)
    assert after["train-00001-of-00004.tfrecord"] != before["train-00001-of-00004.tfrecord"]
    assert after["train-00003-of-00004.tfrecord"] == before["train-00003-of-00004.tfrecord"]
    check_same(unfinished, undisturbed(unfinished, tmp_path, "--max-reject-rate", "0.1"))


OTHERWISE = "the run there was begun otherwise: "
REMEDY = "; go on as it was begun, or begin again with --overwrite"


@pytest.mark.parametrize(
    "flags, difference",
    [
        (["--quality", "80"], "--quality 90 then, 80 now"),
        (["--seed", "4"], "--seed 0 then, 4 now"),
        (["--image-size", "32x26"], "--height 24 then, 26 now"),
        (["--resize-mode", "pad"], '--resize-mode "cover" then, "pad" now'),
        (["--duplicates", "drop"], '--duplicates "keep" then, "drop" now'),
        (
            ["--split", "train=1"],
            '--split {"train": "7/10", "validation": "3/10"} then, {"train": "1"} now',
        ),
        (
            ["--shards", "7", "--label-offset", "1"],
            "--label-offset 0 then, 1 now; --shards 6 then, 7 now",
        ),
    ],
)
def test_other_flags_are_refused_and_named(flags, difference, unfinished, capsys):
    refuses(unfinished, capsys, f"{unfinished}: {OTHERWISE}{difference}{REMEDY}", *flags)


def refuses(output, capsys, message, *flags):
    """And leaves the folder as it was."""
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert go_on(output, "--max-reject-rate", "0.1", *flags) == 1
    assert said(capsys)[-1] == message
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before


def add(folder):
    draw(folder / "ash" / "new.jpg", seed=99)
    return "train/ash: 12 images then, 13 now"


def remove(folder):
    (folder / "birch" / "01.jpg").unlink()
    return "train/birch: 18 images then, 17 now"


def exchange(folder):
    (folder / "ash" / "00.jpg").write_bytes(b"of another size")
    return "{}/ash: {} images, of other names, sizes or contents"


@pytest.mark.parametrize("change", [add, remove, exchange])
def test_other_inputs_are_refused_and_named(change, unfinished, capsys):
    plan = json.loads((unfinished / "_tmp" / "plan.json").read_text())
    before = {tuple(json.loads(name)): size[0] for name, size in plan["images"].items()}
    change(unfinished.parent / "in")
    capsys.readouterr()
    state = {p: p.read_bytes() for p in unfinished.rglob("*") if p.is_file()}
    assert go_on(unfinished, "--max-reject-rate", "0.1") == 1
    message = said(capsys)[-1]
    assert message.startswith(f"{unfinished}: {OTHERWISE}") and message.endswith(REMEDY)
    difference = message.removeprefix(f"{unfinished}: {OTHERWISE}").removesuffix(REMEDY)
    expected = set()
    for (split, label), number in before.items():
        if change is exchange:
            expected.add(f"{split}/{label}: {number} images, of other names, sizes or contents")
        else:
            step = 1 if change is add else -1
            expected.add(f"{split}/{label}: {number} images then, {number + step} now")
    assert difference in expected
    assert {p: p.read_bytes() for p in unfinished.rglob("*") if p.is_file()} == state


def edit_plan(output, **changes):
    change_and_seal(**changes)(output / "_tmp" / "plan.json")


def test_another_version_is_refused_and_named(unfinished, capsys):
    plan = json.loads((unfinished / "_tmp" / "plan.json").read_text())
    older = {**plan["libraries"], "pillow": "9.0"}
    edit_plan(unfinished, libraries=older)
    message = f"{OTHERWISE}pillow 9.0 then, {plan['libraries']['pillow']} now{REMEDY}"
    refuses(unfinished, capsys, f"{unfinished}: {message}")
    edit_plan(unfinished, tpufeed="0.0.1", libraries=plan["libraries"])
    message = f"{OTHERWISE}tpufeed 0.0.1 then, {plan['tpufeed']} now{REMEDY}"
    refuses(unfinished, capsys, f"{unfinished}: {message}")


def test_another_file_of_exclusions_is_refused(unfinished, tmp_path, capsys):
    """Only a content: no key goes, so that only the exclusions themselves tell."""
    (tmp_path / "out.txt").write_text("0" * 64 + "\n")
    shutil.rmtree(unfinished)
    flags = ["--exclude", str(tmp_path / "out.txt")]
    assert ingest(f"{tmp_path}/in/*/*", unfinished, *FLAGS, *flags) == 1
    (tmp_path / "out.txt").write_text("1" * 64 + "\n")
    refuses(
        unfinished, capsys, f"{unfinished}: {OTHERWISE}--exclude: other contents{REMEDY}", *flags
    )


def test_class_names_in_another_order_are_refused(unfinished, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("ash\nbirch\ncedar\n")
    shutil.rmtree(unfinished)
    assert ingest(f"{tmp_path}/in/*/*", unfinished, *FLAGS, "--class-names", str(names)) == 1
    names.write_text("cedar\nbirch\nash\n")
    difference = 'labels ["ash", "birch", "cedar"] then, ["cedar", "birch", "ash"] now'
    message = f"{unfinished}: {OTHERWISE}{difference}{REMEDY}"
    refuses(unfinished, capsys, message, "--class-names", str(names))


def test_a_folder_that_moved_goes_on(unfinished, tmp_path):
    moved = tmp_path / "moved"
    os.rename(unfinished, moved)
    assert go_on(moved, "--max-reject-rate", "0.1") == 0


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"{}", "format is None, this version reads 2"),
        (b'{"format": 99}', "format is 99, this version reads 2"),
        (b'{"format": 2, "config": [1]}', "its sha256 is not that of what it says"),
        (b"[1]", "no JSON object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_plan_that_is_none(data, problem, unfinished, capsys):
    (unfinished / "_tmp" / "plan.json").write_bytes(data)
    capsys.readouterr()
    assert go_on(unfinished) == 1
    assert said(capsys) == [
        f"{unfinished}/_tmp/plan.json: not as this version writes it: {problem}; begin again with "
        "--overwrite"
    ]


def test_shards_of_nobody_knows_whom_are_refused(unfinished, capsys):
    (unfinished / "_tmp" / "plan.json").unlink()
    refuses(
        unfinished,
        capsys,
        f"--resume: {unfinished} has shards but no _tmp/plan.json, so nothing is known of the run "
        "that made them; begin again with --overwrite",
    )


def test_a_complete_set_stays_and_it_is_said(pictures, dataset, tmp_path, capsys, caplog):
    output = shutil.copytree(dataset, tmp_path / "out")
    (output / "_tmp").mkdir()  # killed between dataset.json and the end
    (output / "_tmp" / "plan.json").write_text("{}")
    (output / "_tmp" / "train-00000-of-00004.done.json").write_text("{}")
    before = stamps(output)
    assert ingest(f"{pictures}/*/*", output, *FLAGS, "--resume") == 0
    assert f"{output}: complete already, nothing was done; whether the inputs are" in caplog.text
    assert stamps(output) == before and not (output / "_tmp").exists()
    capsys.readouterr()
    assert ingest(f"{pictures}/*/*", output, *FLAGS, "--resume", "--quality", "50") == 1
    assert said(capsys)[-1] == f"{output}: {OTHERWISE}--quality 90 then, 50 now{REMEDY}"
    assert stamps(output) == before


def test_nothing_there_yet_is_a_beginning(pictures, dataset, tmp_path):
    for output in (tmp_path / "absent", tmp_path / "empty"):
        if output.name == "empty":
            output.mkdir()
        assert ingest(f"{pictures}/*/*", output, *FLAGS, "--resume") == 0
        check_same(output, dataset)


OURS = [
    f"_tmp/train-00000-of-00004.tfrecord.{HEX}",
    f"_tmp/train-00000-of-00004.parquet.{HEX}",
    f"_tmp/validation-00001-of-00002.idx.{HEX}",
    f"_tmp/train-00000-of-00004.done.json.{HEX}",
    f"_tmp/plan.json.{HEX}",
    f"_tmp/dataset.json.{HEX}",
    f"_tmp/rejects.jsonl.{HEX}",
    f".tpufeed-{HEX}",
]
NOT_OURS = [
    "thesis.txt",
    "_tmp/thesis.txt",
    f"_tmp/thesis.txt.{HEX}",
    f"_tmp/train-00000-of-00004.tfrecord.{HEX[:-1]}",
    f"_tmp/train-00000-of-00004.tfrecord.{HEX}.bak",
    f"_tmp/train-0-of-4.tfrecord.{HEX}",
    f"_tmp/deeper/train-00000-of-00004.tfrecord.{HEX}",
    f"index/plan.json.{HEX}",
    f"other/_tmp/plan.json.{HEX}",
    "index/notes.done.json",
]


@pytest.mark.parametrize("again", ["--resume", "--overwrite"])
def test_left_over_temporary_files_go_and_nothing_else(again, unfinished):
    for name in [*OURS, *NOT_OURS]:
        path = unfinished / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    folder = unfinished.parent / "in"
    flags = [*FLAGS, again, "--max-reject-rate", "0.1"]
    assert ingest(f"{folder}/*/*", unfinished, *flags) == 0
    assert not [name for name in OURS if (unfinished / name).exists()]
    assert [name for name in NOT_OURS if (unfinished / name).exists()] == NOT_OURS
    assert verify_dataset(str(unfinished)) == []


def test_an_unfinished_run_is_told_from_other_folders(unfinished, capsys):
    capsys.readouterr()
    assert ingest(f"{unfinished.parent}/in/*/*", unfinished, *FLAGS) == 1
    assert said(capsys)[-1].endswith(
        "give another folder, or --overwrite to replace the data set in it, or --resume to go on "
        "with it"
    )


def test_an_overwrite_that_was_cut_short_is_finished(pictures, dataset, tmp_path):
    """Half of the old set is gone, and nothing says which run the rest is of."""
    output = shutil.copytree(dataset, tmp_path / "out")
    (output / "dataset.json").unlink()
    (output / "train-00001-of-00004.tfrecord").unlink()
    (output / "_tmp").mkdir()
    (output / "_tmp" / "overwriting").touch()
    (output / "thesis.txt").touch()
    flags = [*FLAGS[:-1], "4", "--resume"]
    assert ingest(f"{pictures}/*/*", output, *flags) == 0
    assert len(stamps(output)) == 4 and (output / "thesis.txt").exists()
    assert verify_dataset(str(output)) == []


def test_an_overwrite_that_fails_half_way_says_so_and_is_resumed(
    pictures, dataset, tmp_path, monkeypatch, capsys
):
    output = shutil.copytree(dataset, tmp_path / "out")
    real, removed = os.remove, []

    def remove(path):
        if len(removed) == 5:
            raise OSError(5, "Input/output error")
        removed.append(path)
        real(path)

    monkeypatch.setattr(os, "remove", remove)
    assert ingest(f"{pictures}/*/*", output, *FLAGS, "--overwrite") == 1
    assert said(capsys) == [f"--output {output}: Input/output error"]
    monkeypatch.undo()
    assert removed[0].endswith("dataset.json") and len(stamps(output)) == 6
    assert ingest(f"{pictures}/*/*", output, *FLAGS[:-1], "4", "--resume") == 0
    assert len(stamps(output)) == 4
    assert verify_dataset(str(output)) == []


# Two runs at once.

HOLD = "import sys, time; from transforms import files\n"
HOLD += "with files.hold_folder(sys.argv[1], alone=sys.argv[2] == 'alone'):\n"
HOLD += "    print('held', flush=True); time.sleep(100)"


@pytest.mark.parametrize("how", ["alone", "shared"])
@pytest.mark.parametrize("again", ["--resume", "--overwrite"])
def test_a_second_run_is_refused_while_the_first_lives(how, again, unfinished, capsys):
    """Shared is how workers hold it; both end with their process, however that ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(unfinished), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    before = stamps(unfinished, "**/*")
    flags = [*FLAGS, again, "--max-reject-rate", "0.1"]
    capsys.readouterr()
    assert ingest(f"{unfinished.parent}/in/*/*", unfinished, *flags) == 1
    assert said(capsys)[-1] == (
        f"{unfinished}: another run is writing there: wait for its end, or give another folder"
    )
    assert stamps(unfinished, "**/*") == before
    holder.kill()
    holder.wait()
    assert ingest(f"{unfinished.parent}/in/*/*", unfinished, *flags) == 0


def test_two_real_runs_at_once(pictures, dataset, tmp_path):
    output = tmp_path / "out"
    words = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{pictures}/*/*"]
    words += ["--output", str(output), *FLAGS, "--resume"]
    runs = [
        subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(3)
    ]
    ends = []
    for process in runs:
        _, errors = process.communicate(timeout=200)
        ends.append((process.returncode, errors.decode()))
    refused = [text for code, text in ends if code == 1]
    assert 0 in [code for code, _ in ends] and {code for code, _ in ends} <= {0, 1}
    assert all("another run is writing there" in text for text in refused)
    check_same(output, dataset)


def test_a_worker_that_outlived_its_run_writes_no_more(unfinished):
    """As where a bucket, which has no lock, is given to two runs."""
    digest = resume.digest_plan(resume.read_plan(str(unfinished)))
    resume.check_still(str(unfinished), digest)
    for change in (
        lambda: edit_plan(unfinished, labels=["x"]),
        (unfinished / "_tmp" / "plan.json").unlink,
    ):
        change()
        with pytest.raises(DataError) as caught:
            resume.check_still(str(unfinished), digest)
        assert str(caught.value) == (
            f"{unfinished}: another run has taken the folder over: this one ends"
        )


def test_a_shared_hold_lets_others_in_and_nobody_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    with files.hold_folder(str(tmp_path)), files.hold_folder(str(tmp_path)):
        with pytest.raises(DataError), files.hold_folder(str(tmp_path), alone=True):
            pass
    with files.hold_folder(str(tmp_path), alone=True) as share:
        began = time.monotonic()
        with pytest.raises(DataError), files.hold_folder(str(tmp_path)):
            pass
        assert time.monotonic() - began < 5
        share()
        with files.hold_folder(str(tmp_path)):
            pass
    with files.hold_folder(str(tmp_path), alone=True):
        pass


# A bucket.


@pytest.fixture
def store(monkeypatch, tmp_path):
    from apache_beam.internal.gcp import auth

    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nobody"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)
    monkeypatch.setattr(auth._Credentials, "_credentials", None)
    with serve("records") as service:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", service.address)
        yield service


def test_a_run_into_a_bucket_goes_on(pictures, dataset, store, caplog):
    forbidden = "validation-00001-of-00002.tfrecord"
    store.fault = lambda number, method, path: 403 if forbidden in path else None
    flags = [f"{pictures}/*/*", "gs://records/out", *FLAGS]
    assert ingest(*flags) == 1
    store.fault = lambda *request: None
    marks = [name for name in store.names("gs://records/") if name.endswith(".done.json")]
    assert marks and "out/dataset.json" not in store.names("gs://records/")
    store.put(f"gs://records/out/_tmp/train-00000-of-00004.tfrecord.{HEX}", b"of a dead run")
    store.put("gs://records/out/thesis.txt", b"three years")
    before = len(store.requests)
    assert ingest(*flags, "--resume") == 0
    uploads = [path for method, path in store.requests[before:] if "uploadType" in path]
    assert len([path for path in uploads if "tfrecord" in path]) == 6 - len(marks)
    assert f"gs://records/out: going on, {len(marks)} shard(s) were finished" in caplog.text
    there = parse_manifest(store.get("gs://records/out/dataset.json"), path="x")
    assert there.fingerprint == load_manifest(str(dataset)).fingerprint
    local = {p.relative_to(dataset).as_posix() for p in dataset.rglob("*") if p.is_file()}
    names = {name.removeprefix("out/") for name in store.names("gs://records/out/")}
    assert names == local | {"thesis.txt"}
    assert main(["verify", "gs://records/out"]) == 0
    assert ingest(*flags, "--resume") == 0 and "complete already" in caplog.text


# The marks themselves.


def test_a_mark_holds_all_that_was_handed_on(tmp_path):
    folder = str(tmp_path)
    from transforms.write import write_index

    row = {"key": "a", "label": "x", "source_sha256": "ab" * 32, "offset": 0, "size": 3}
    write_index(folder, "train-00000-of-00001", [row])
    (tmp_path / "train-00000-of-00001.tfrecord").write_bytes(b"abc")
    digest = files.hash_file(f"{folder}/train-00000-of-00001.tfrecord")
    summary = ShardSummary(
        "train", 0, "train-00000-of-00001", 1, 3, digest, (("x", 1),), 7, (1, 2, 3), (4, 5, 6)
    )
    rejects = (
        Reject("b\udce9", "/b\udce9", "", "bad_name", "\x1b"),
        Reject("c", "/c", "y", "duplicate", "same bytes as a"),
    )
    content = bytes.fromhex("ab" * 32)
    done = resume.DoneShard(summary, rejects, ((content, ("a", "x")), (content, ("c", "y"))))
    resume.write_done(folder, done, plan="p")
    assert resume.read_done(folder, summary.name, plan="p") == done
    assert resume.read_done(folder, summary.name, plan="q") is None
    assert resume.read_done(folder, "train-00001-of-00002", plan="p") is None
    resume.forget_run(folder, [summary.name])
    assert not (tmp_path / "_tmp").exists()


def plan(**changes):
    fields = {
        "tpufeed": "1",
        "libraries": {"pillow": "1"},
        "config": {"seed": 0, "pixels": {"width": 3}, "output": "a", "max_reject_rate": 0.1},
        "labels": ("a", "b"),
        "sizes": {("train", "a"): SplitSize(1, 2, 3), ("train", "b"): SplitSize(1, 2, 3)},
        "exclusions": ("ab",),
        "shards": {"train": 1},
    }
    return resume.describe_plan(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes, differences",
    [
        ({}, []),
        ({"config": {"seed": 0, "pixels": {"width": 3}, "output": "b"}}, []),
        ({"config": {"seed": 1, "pixels": {"width": 3}}}, ["--seed 0 then, 1 now"]),
        ({"config": {"pixels": {"width": 3}}}, ["--seed 0 then, null now"]),
        ({"tpufeed": "2"}, ["tpufeed 1 then, 2 now"]),
        ({"libraries": {"pillow": "2"}}, ["pillow 1 then, 2 now"]),
        ({"libraries": {}}, ["pillow 1 then, None now"]),
        ({"exclusions": ()}, ["--exclude: other contents"]),
        ({"labels": ("b", "a")}, ['labels ["a", "b"] then, ["b", "a"] now']),
        ({"shards": {"train": 2}}, ['shards {"train": 1} then, {"train": 2} now']),
        (
            {"sizes": {("train", "b"): SplitSize(1, 2, 4), ("test", "c"): SplitSize(9, 9, 9)}},
            [
                "test/c: 0 images then, 9 now",
                "train/a: 1 images then, 0 now",
                "train/b: 1 images, of other names, sizes or contents",
            ],
        ),
    ],
)
def test_every_difference_between_plans_is_named(changes, differences):
    before, now = plan(), plan(**changes)
    assert resume.find_differences(json.loads(json.dumps(before)), now) == differences
    assert (resume.digest_plan(before) == resume.digest_plan(now)) == (not differences)
    assert dataclasses.is_dataclass(resume.DoneShard)
