"""Inputs from end to end: what the command line makes of them, read back by TensorFlow."""

import gzip
import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from helpers import draw
from PIL import Image

from pipeline.__main__ import main

tf = pytest.importorskip("tensorflow")

SMALL = ["--image-size", "8", "--encoding", "png"]
NOTHING = (
    "no image was found: the tables have no rows, or all files are a system's own, as .DS_Store; "
    "see --input"
)
DTYPES = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def ingest(out: Path, *argv: object) -> int:
    return main(["ingest", "--output", str(out), *SMALL, *map(str, argv)])


def fails(capsys, out: Path, *argv: object) -> str:
    """Returns the one line that a failing run prints, its own folder shown as T."""
    assert ingest(out, *argv) == 1
    captured = capsys.readouterr()
    assert not (out / "dataset.json").exists()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.replace(str(out.parent), "T").removesuffix("\n")


def manifest_of(out: Path) -> dict:
    return json.loads((out / "dataset.json").read_bytes())


def read(out: Path) -> dict[str, list[dict]]:
    """Returns the records of each split, parsed with the spec in dataset.json, sorted by key."""
    manifest = manifest_of(out)
    spec = {
        name: tf.io.FixedLenFeature(f["shape"], DTYPES[f["dtype"]], f["default"])
        for name, f in manifest["features"].items()
    }
    found = {}
    for split, facts in manifest["splits"].items():
        paths = [str(out / shard["name"]) for shard in facts["shards"]]
        records = [
            {n: v.numpy() for n, v in tf.io.parse_single_example(record, spec).items()}
            for path in paths
            for record in tf.data.TFRecordDataset(path)
        ]
        assert len(records) == facts["records"]
        found[split] = sorted(records, key=lambda record: record["key"])
    return found


def labelled(out: Path) -> dict[str, tuple[str, str, int]]:
    """Returns key -> (split, label, class id)."""
    return {
        record["key"].decode(): (split, record["label"].decode(), int(record["class"]))
        for split, records in read(out).items()
        for record in records
    }


def lines(out: Path, name="rejects.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def shards(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.tfrecord")
    }


def pictures(folder: Path, *names: str, seed=0) -> None:
    for number, name in enumerate(names, start=seed):
        draw(folder / name, seed=number, size=(12, 9))


# Globs.


def test_glob(tmp_path, out, capsys):
    folder = tmp_path / "in"
    pictures(folder, "2/a.png", "10/b.jpg", "1/c d#[1]%.webp", "x/1/ü?.png")
    assert ingest(out, "--input", f"{folder}/**") == 0
    assert labelled(out) == {
        "2/a.png": ("train", "2", 1),
        "10/b.jpg": ("train", "10", 2),
        "1/c d#[1]%.webp": ("train", "1", 0),
        "x/1/ü?.png": ("train", "1", 0),
    }
    assert manifest_of(out)["labels"] == ["1", "2", "10"]
    captured = capsys.readouterr()
    assert f"{out}: 4 records, 3 classes, 8x8, 3 channel(s), png" in captured.out
    assert captured.err == ""


def test_what_does_not_come_in(tmp_path, out):
    folder = tmp_path / "in"
    pictures(folder, "cat/a.png", "cat/n\nl.png", "dog/b.png")
    shutil.copy(folder / "cat" / "a.png", os.fsencode(folder) + b"/cat/\xe9.png")
    for name in (".DS_Store", "cat/._a.png", "__MACOSX/cat/a.png", ".x/cat/a.png", "cat/Thumbs.db"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0")
    (folder / "cat" / "broken.png").symlink_to("nowhere")
    (folder / "cat" / "loop.png").symlink_to("loop.png")
    (folder / "cat" / "link.png").symlink_to("../dog/b.png")
    (folder / "dog" / "loop").symlink_to(".")
    (folder / "dog" / "io.png").symlink_to("/proc/self/mem")  # opens, but cannot be read
    os.mkfifo(folder / "dog" / "fifo.png")

    def state():
        return [(str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*")]

    before = state()
    two = ["--input", f"{folder}/**", "--input", f"{folder}/*/*"]  # nearly all of it twice
    assert ingest(out, *two, "--max-reject-rate", "1") == 0
    assert state() == before
    assert labelled(out) == {
        "cat/a.png": ("train", "cat", 0),
        "cat/link.png": ("train", "cat", 0),
        "dog/b.png": ("train", "dog", 1),
    }
    expected = [
        ("cat/broken.png", "missing", "No such file or directory"),
        ("cat/loop.png", "missing", "Too many levels of symbolic links"),
        ("cat/n\nl.png", "bad_name", "the key holds control characters"),
        (os.fsdecode(b"cat/\xe9.png"), "bad_name", "the key is not UTF-8"),
        ("dog/fifo.png", "unreadable", "no regular file"),
        ("dog/io.png", "unreadable", "Input/output error"),
    ]
    assert lines(out) == [
        {"key": k, "path": f"{folder}/{k}", "label": k[:3], "reason": reason, "detail": detail}
        for k, reason, detail in expected
    ]
    manifest = manifest_of(out)
    assert manifest["skipped"] == 5
    assert manifest["rejects"] == {"bad_name": 2, "missing": 2, "unreadable": 2}


def test_root_and_given_splits(tmp_path, out):
    pictures(tmp_path, "in/a/train/cat/1.png", "in/a/test/cat/1.png")
    argv = [
        "--input",
        f"train={tmp_path}/in/a/train/*/*",
        "--input",
        f"test={tmp_path}/in/a/test/**",
    ]
    assert ingest(out, *argv) == 0
    assert labelled(out) == {
        "train/cat/1.png": ("train", "cat", 0),
        "test/cat/1.png": ("test", "cat", 0),
    }
    assert ingest(out, *argv, "--root", tmp_path, "--overwrite") == 0
    assert sorted(labelled(out)) == ["in/a/test/cat/1.png", "in/a/train/cat/1.png"]


def test_more_files_change_no_split(tmp_path, out):
    folder = tmp_path / "in"
    pictures(folder, *(f"c{i % 3}/{i:03d}.png" for i in range(60)))
    argv = ["--input", f"{folder}/*/*", "--split", "train=0.6,validation=0.2,test=0.2"]
    assert ingest(out, *argv) == 0
    before = labelled(out)
    pictures(folder, *(f"c{i % 3}/more{i:03d}.png" for i in range(200)), seed=1000)
    assert ingest(out, *argv, "--overwrite") == 0
    after = labelled(out)
    assert (len(before), len(after)) == (60, 260)
    assert before.items() <= after.items()
    assert {split for split, _, _ in before.values()} == {"train", "validation", "test"}


def test_groups_stay_in_one_split(tmp_path, out):
    folder = tmp_path / "in"
    pictures(folder, *(f"c{i % 2}/patient{i % 10}_{i:02d}.png" for i in range(40)))
    argv = ["--input", f"{folder}/*/*", "--split", "train=0.5,test=0.5"]
    assert ingest(out, *argv, "--split-by", r"group:patient(\d)_") == 0
    splits: dict[str, set] = {}
    for key, (split, _, _) in labelled(out).items():
        splits.setdefault(key[10], set()).add(split)
    assert sorted(splits) == list("0123456789")
    assert {len(found) for found in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "test"}


GLOB_HINT = "wildcards are *, **, ? and [...]; * stops at /, case counts"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "T/in/*/*.gif"], f"--input T/in/*/*.gif: no file matches ({GLOB_HINT})"),
        (["--input", "T/in"], "--input T/in: is a folder; to read below it: 'T/in/*/*'"),
        (
            ["--input", "T/in/*/*", "--root", "T/in/cat"],
            "--root T/in/cat: T/in/Cat/b.png is not below it; keys are paths relative to it",
        ),
        (
            ["--input", "T/in/*/*"],
            "labels 'Cat' and 'cat' differ by case only: rename one folder, or list both in "
            "--class-names",
        ),
        (
            ["--input", "T/in/cat/*", "--split-by", "group:(x.)"],
            "--split-by group:(x.) does not match the key 'a.png': every key needs a group; widen "
            "the expression",
        ),
        (
            ["--input", "train=T/in/cat/*", "--input", "test=T/in/*/*"],
            "two inputs have the key 'cat/a.png': T/in/cat/a.png (label cat, split test) and "
            "T/in/cat/a.png (label cat, split train); keys must be unique: widen --root, or give "
            "a CSV with a column key",
        ),
        (
            ["--input", "T/in/cat/*", "--shards", "2"],
            "--shards 2: more than the 1 images found; allowed: 1 to 1",
        ),
        (["--input", "T/in/cat/*", "--exclude", "T/gone"], "--exclude T/gone: no such file"),
        (
            ["--input", "idx:T/in"],
            "--input idx:T/in: found none of train-images-idx3-ubyte, "
            "train-images-idx3-ubyte.gz, train-images.idx3-ubyte, train-images.idx3-ubyte.gz",
        ),
        (
            ["--input", "T/in/cat/*", "--class-names", "T/gone"],
            "--class-names T/gone: No such file or directory",
        ),
    ],
    ids=range(10),
)
def test_a_failure_is_one_line(tmp_path, out, capsys, argv, message):
    pictures(tmp_path / "in", "cat/a.png", "Cat/b.png")
    argv = [word.replace("T/", f"{tmp_path}/") for word in argv]
    assert fails(capsys, out, *argv) == f"tpufeed ingest: error: {message}"


def test_only_system_files(tmp_path, out, capsys):
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / ".DS_Store").touch()
    assert fails(capsys, out, "--input", f"{tmp_path}/in/*/*") == (
        f"tpufeed ingest: error: {NOTHING}"
    )


def test_classes_that_differ_by_case_if_both_are_listed(tmp_path, out):
    pictures(tmp_path / "in", "cat/a.png", "Cat/b.png")
    (tmp_path / "names").write_text("cat\nCat\n")
    assert ingest(out, "--input", f"{tmp_path}/in/*/*", "--class-names", tmp_path / "names") == 0
    assert manifest_of(out)["labels"] == ["cat", "Cat"]


# CSV.


def test_csv_features_ride_along(tmp_path, out):
    folder = tmp_path / "in"
    pictures(folder, "a.png", "b [1]#.png", "é,x.png")
    (folder / "rows.csv").write_bytes(
        "\ufeffpath,label,split,key,age:int,score:float,note\r\n"
        'a.png,cat,train,k1,-3,0.25,"two\nlines, ""q"""\r\n'
        "\r\n"
        f"{folder}/b [1]#.png,dog,test,k2,,,\r\n"
        '"é,x.png",größe,test,k3,9223372036854775807,1e-3,日本\r\n'.encode()
    )
    assert ingest(out, "--input", folder / "rows.csv") == 0
    found = read(out)
    shown = {
        split: [
            (r["key"], r["label"], r["class"], r["age"], float(r["score"]), r["note"])
            for r in records
        ]
        for split, records in found.items()
    }
    assert shown == {
        "test": [
            (b"k2", b"dog", 1, 0, 0.0, b""),
            (b"k3", "größe".encode(), 2, 2**63 - 1, float(np.float32(1e-3)), "日本".encode()),
        ],
        "train": [(b"k1", b"cat", 0, -3, 0.25, b'two\nlines, "q"')],
    }
    features = manifest_of(out)["features"]
    assert {name: features[name] for name in ("age", "score", "note")} == {
        "age": {"dtype": "int64", "shape": [], "default": 0},
        "score": {"dtype": "float", "shape": [], "default": 0.0},
        "note": {"dtype": "bytes", "shape": [], "default": ""},
    }


@pytest.mark.parametrize("schema", ["imagenet", "tfds"])
def test_csv_features_ride_along_in_every_schema(tmp_path, out, schema):
    pictures(tmp_path, "a.png")
    (tmp_path / "rows.csv").write_text("path,label,age:int\na.png,cat,7\n")
    assert ingest(out, "--input", tmp_path / "rows.csv", "--schema", schema) == 0
    (record,) = tf.data.TFRecordDataset(str(out / "train-00000-of-00001.tfrecord"))
    features = tf.train.Example.FromString(record.numpy()).features.feature
    assert features["age"].int64_list.value == [7]
    name = {"imagenet": "image/filename", "tfds": "file_name"}[schema]
    assert features[name].bytes_list.value == [b"a.png"]


def test_csv_and_glob_give_the_same_shards(tmp_path, out):
    folder = tmp_path / "in"
    names = [f"{label}/{i:02d}.png" for label in ("cat", "dog") for i in range(20)]
    pictures(folder, *names)
    rows = [f"../in/{name},{name.split('/')[0]},{name}" for name in names]
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "rows.csv").write_text("\n".join(["path,label,key", *reversed(rows)]))
    argv = ["--split", "train=0.7,test=0.3", "--shards", "5"]
    assert ingest(tmp_path / "1", "--input", f"{folder}/*/*", *argv) == 0
    assert ingest(tmp_path / "2", "--input", tmp_path / "lists" / "rows.csv", *argv) == 0
    # Both at once name every file twice.
    both = ["--input", f"{folder}/*/*", "--input", tmp_path / "lists" / "rows.csv"]
    assert ingest(tmp_path / "3", *both, *argv) == 0
    assert len(shards(tmp_path / "1")) == 5
    assert shards(tmp_path / "1") == shards(tmp_path / "2") == shards(tmp_path / "3")
    prints = {manifest_of(tmp_path / number)["fingerprint"] for number in "123"}
    assert len(prints) == 1


def test_csv_that_names_what_is_not_there(tmp_path, out):
    pictures(tmp_path, "a.png")
    (tmp_path / "rows.csv").write_text("path,label\na.png,cat\ngone.png,cat\n.,cat\na.png/x,dog\n")
    assert ingest(out, "--input", tmp_path / "rows.csv", "--max-reject-rate", "1") == 0
    assert sorted(labelled(out)) == ["a.png"]
    assert [(r["key"], r["path"], r["reason"], r["detail"]) for r in lines(out)] == [
        (".", str(tmp_path), "unreadable", "no regular file"),
        ("a.png/x", f"{tmp_path}/a.png/x", "missing", "Not a directory"),
        ("gone.png", f"{tmp_path}/gone.png", "missing", "No such file or directory"),
    ]


def test_csv_split_by_column(tmp_path, out):
    names = [f"{i:02d}.png" for i in range(30)]
    pictures(tmp_path, *names)
    rows = [f"{name},cat,{i % 8}" for i, name in enumerate(names)]
    (tmp_path / "rows.csv").write_text("\n".join(["path,label,patient:int", *rows]))
    argv = ["--input", tmp_path / "rows.csv", "--split", "train=0.5,test=0.5"]
    assert ingest(out, *argv, "--split-by", "column:patient") == 0
    splits: dict[int, set] = {}
    for split, records in read(out).items():
        for record in records:
            splits.setdefault(int(record["patient"]), set()).add(split)
    assert sorted(splits) == list(range(8))
    assert {len(found) for found in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "test"}


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        (
            "path,label,split\na.png,cat,train\n",
            ["--split", "train=1"],
            "--split: 'a.png' already has the split 'train' from its source; drop --split, or the "
            "splits of the source",
        ),
        (
            "path,label,key\na.png,cat,k\nb.png,cat,k\n",
            [],
            "two inputs have the key 'k': T/a.png (label cat) and T/b.png (label cat); keys must "
            "be unique: widen --root, or give a CSV with a column key",
        ),
        (
            "path,label,age:int\na.png,cat,1\nb.png,cat,old\n",
            [],
            "T/rows.csv, line 3: age is 'old', must be a whole number of 64 bits or empty",
        ),
        (
            "path,label,one_hot_class\na.png,cat,1\n",
            [],
            "T/rows.csv: the schema has a feature 'one_hot_class': rename the column",
        ),
        (
            "path,label\na.png,cat\n",
            ["--input", "T/other.csv"],
            "T/other.csv and T/rows.csv differ in their extra columns: give every file the same "
            "header",
        ),
        ("path,label\n", [], NOTHING),
        (
            "",
            [],
            "T/rows.csv: no column 'path' in the header ''; needed is "
            "path,label[,split][,key][,more]",
        ),
    ],
    ids=range(7),
)
def test_csv_failures(tmp_path, out, capsys, text, argv, message):
    pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "rows.csv").write_text(text)
    (tmp_path / "other.csv").write_text("path,label,x\nb.png,cat,1\n")
    argv = [word.replace("T/", f"{tmp_path}/") for word in argv]
    found = fails(capsys, out, "--input", tmp_path / "rows.csv", *argv)
    assert found == f"tpufeed ingest: error: {message}"


# Classes.


@pytest.fixture
def three_classes(tmp_path) -> Path:
    pictures(tmp_path / "in", "cat/a.png", "dog/b.png", "fox/c.png", "ant/d.png")
    return tmp_path / "in"


def test_class_names_give_the_ids(tmp_path, out, three_classes):
    (tmp_path / "names.txt").write_bytes("\ufefffox\r\nbear\r\ncat\r\ndog\r\nant".encode())
    argv = ["--input", f"{three_classes}/*/*", "--class-names", tmp_path / "names.txt"]
    assert ingest(out, *argv, "--label-offset", "1") == 0
    manifest = manifest_of(out)
    assert manifest["labels"] == ["fox", "bear", "cat", "dog", "ant"]
    assert manifest["splits"]["train"]["classes"] == {
        "fox": 1,
        "bear": 0,
        "cat": 1,
        "dog": 1,
        "ant": 1,
    }
    ids = {label: number for _, label, number in labelled(out).values()}
    assert ids == {"fox": 1, "cat": 3, "dog": 4, "ant": 5}


def test_labels_outside_are_rejected_or_appended(tmp_path, out, three_classes):
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    argv = ["--input", f"{three_classes}/*/*", "--class-names", tmp_path / "names.txt"]
    assert ingest(out, *argv, "--max-reject-rate", "1") == 0
    assert manifest_of(out)["labels"] == ["dog", "cat"]
    assert lines(out) == [
        {
            "key": key,
            "path": f"{three_classes}/{key}",
            "label": key[:3],
            "reason": "unknown_label",
            "detail": "not in --class-names",
        }
        for key in ("ant/d.png", "fox/c.png")
    ]
    # Another data set's file keeps its ids, and new classes come after them.
    first = tmp_path / "first"
    shutil.copytree(out, first)
    argv = ["--input", f"{three_classes}/*/*", "--class-names", first / "dataset.json"]
    assert ingest(out, *argv, "--new-classes", "append", "--overwrite") == 0
    assert manifest_of(out)["labels"] == ["dog", "cat", "ant", "fox"]
    ids = {label: number for _, label, number in labelled(out).values()}
    assert ids == {"dog": 0, "cat": 1, "ant": 2, "fox": 3}
    assert lines(out) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "names no class"),
        (b"cat\n\ndog\n", "line 2: empty; every line is a class"),
        (b"cat\ndog\n\n", "line 3: empty; every line is a class"),
        (b"cat\n \ndog\n", "line 2: empty; every line is a class"),
        (b"cat\ndog\ncat\n", "line 3: 'cat' is named twice"),
        (
            b"caf\xe9\n",
            "'utf-8' codec can't decode byte 0xe9 in position 3: invalid continuation byte",
        ),
    ],
)
def test_class_names_faults(tmp_path, out, capsys, three_classes, data, message):
    (tmp_path / "names").write_bytes(data)
    found = fails(
        capsys, out, "--input", f"{three_classes}/*/*", "--class-names", tmp_path / "names"
    )
    separator = ", " if message.startswith("line") else ": "
    assert found == f"tpufeed ingest: error: --class-names T/names{separator}{message}"


def test_class_names_from_a_data_set_that_was_edited(tmp_path, out, capsys, three_classes):
    (tmp_path / "d.json").write_text('{"format": 7}')
    found = fails(
        capsys, out, "--input", f"{three_classes}/*/*", "--class-names", tmp_path / "d.json"
    )
    assert found == (
        "tpufeed ingest: error: --class-names T/d.json: T/d.json: format is 7, this version reads 1"
    )


def test_three_hundred_classes_have_no_one_hot(tmp_path, out):
    draw(tmp_path / "a.png", seed=0, size=(12, 9))
    rows = [f"a.png,{i:03d},k{i}" for i in range(300)]
    (tmp_path / "rows.csv").write_text("\n".join(["path,label,key", *rows]))
    assert ingest(out, "--input", tmp_path / "rows.csv") == 0
    assert "one_hot_class" not in manifest_of(out)["features"]
    assert labelled(out) == {f"k{i}": ("train", f"{i:03d}", i) for i in range(300)}


# Exclusions.


def everything_in(out: Path) -> dict[str, bytes]:
    """Returns the bytes of every file, and those of an index also decoded."""
    found = {}
    for path in out.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(out))] = path.read_bytes()
            if path.suffix == ".parquet":
                rows = pyarrow.parquet.read_table(path).to_pylist()
                found[f"{path.name} decoded"] = json.dumps(rows, ensure_ascii=False).encode()
    return found


@pytest.mark.parametrize("by", ["key", "content", "upper case content"])
def test_what_is_excluded_leaves_nothing_behind(tmp_path, out, by):
    folder = tmp_path / "in"
    pictures(folder, "cat/a.png", "dog/b.png", "cat/c.png")
    secret = folder / "cat" / "Jane Doe é.png"
    # One colour, so that neither resizing nor a lossless encoding hides its pixels.
    Image.new("RGB", (12, 9), (201, 37, 143)).save(secret)
    data = secret.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    copies = [
        "dog/J Doe copy.png",
        "cat/another JDoe.png",
        "fox/JDoe unknown.png",
        "cat/JDoe\n.png",
    ]
    for name in copies:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    key = "cat/Jane Doe é.png"
    line = {"key": key, "content": digest, "upper case content": digest.upper()}[by]
    (tmp_path / "exclude").write_bytes(f"\ufeff{line}\r\nnot/here.png\r\n".encode())
    (tmp_path / "names").write_text("cat\ndog\n")
    argv = ["--input", f"{folder}/*/*", "--class-names", tmp_path / "names"]
    argv += ["--encoding", "raw", "--exclude", tmp_path / "exclude"]
    assert ingest(out, *argv) == 0
    assert sorted(labelled(out)) == ["cat/a.png", "cat/c.png", "dog/b.png"]
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in [key, *copies]]
    assert lines(out) == [
        {
            "key": f"sha256:{name}",
            "path": "",
            "label": "",
            "reason": "excluded",
            "detail": "by --exclude",
        }
        for name in sorted(hashes)
    ]
    assert manifest_of(out)["rejects"] == {"excluded": 5}
    pixels = bytes((201, 37, 143)) * 8 * 8
    for name, found in everything_in(out).items():
        for trace in (b"Doe", b"JDoe", digest.encode(), data, data[-40:], pixels, pixels[:12]):
            assert trace not in found, (name, trace)
    assert lines(out, "duplicates.jsonl") == []


def test_without_exclusion_the_traces_are_there(tmp_path, out):
    # That the search above can find something.
    Image.new("RGB", (12, 9), (201, 37, 143)).save(tmp_path / "Jane.png")
    assert ingest(out, "--input", tmp_path / "Jane.png", "--encoding", "raw") == 0
    files = everything_in(out)
    assert b"Jane" in files["train-00000-of-00001.tfrecord"]
    assert bytes((201, 37, 143)) * 64 in files["train-00000-of-00001.tfrecord"]
    assert b"Jane" in files["train-00000-of-00001.parquet decoded"]


@pytest.mark.parametrize(
    ("pack", "line"),
    [
        (lambda text: text.encode("utf-16"), 1),
        (lambda text: text.encode("utf-16-be"), 1),
        (lambda text: gzip.compress(text.encode(), mtime=0), 1),
        (lambda text: text.encode() + b"\0" * 9, 2),
    ],
    ids=["utf-16", "utf-16-be", "gzip", "damaged"],
)
def test_exclusions_that_would_exclude_nothing_are_refused(tmp_path, out, capsys, pack, line):
    draw(tmp_path / "in" / "cat" / "1.png", seed=1)
    (tmp_path / "exclude").write_bytes(pack("cat/1.png\n"))
    assert fails(
        capsys, out, "--input", f"{tmp_path}/in/*/*", "--exclude", tmp_path / "exclude"
    ) == (
        f"tpufeed ingest: error: --exclude T/exclude, line {line}: holds a NUL byte: the file is "
        "damaged, packed or UTF-16; save it as UTF-8"
    )


def test_an_excluded_file_that_would_be_rejected_keeps_its_name_hidden(tmp_path, out):
    pictures(tmp_path / "in", "cat/a.png")
    (tmp_path / "in" / "cat" / "Jane.png").symlink_to("nowhere")
    (tmp_path / "in" / "cat" / "Joe.png").write_bytes(b"no picture")
    (tmp_path / "exclude").write_text("cat/Jane.png\ncat/Joe.png\n")
    argv = ["--input", f"{tmp_path}/in/*/*", "--exclude", tmp_path / "exclude"]
    assert ingest(out, *argv) == 0
    assert [line["reason"] for line in lines(out)] == ["excluded", "excluded"]
    for name, found in everything_in(out).items():
        assert b"Jane" not in found and b"Joe" not in found, name


# IDX.


def idx(values: bytes, *shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path, out, packed):
    chance = np.random.default_rng(0)
    images = {
        s: chance.integers(0, 256, (n, 28, 28), np.uint8) for s, n in (("train", 20), ("test", 5))
    }
    labels = {"train": [1, 10, 2, 2] * 5, "test": [10, 1, 1, 1, 1]}
    (tmp_path / "idx").mkdir()
    pack = gzip.compress if packed else bytes
    for split, stem in (("train", "train"), ("test", "t10k")):
        end = "ubyte.gz" if packed else "ubyte"
        data = idx(images[split].tobytes(), *images[split].shape)
        (tmp_path / "idx" / f"{stem}-images-idx3-{end}").write_bytes(pack(data))
        data = idx(bytes(labels[split]), len(labels[split]))
        (tmp_path / "idx" / f"{stem}-labels-idx1-{end}").write_bytes(pack(data))
    assert main(["ingest", "--input", f"idx:{tmp_path}/idx", "--output", str(out)]) == 0
    manifest = manifest_of(out)
    assert (manifest["labels"], manifest["image_size"]) == (["1", "2", "10"], [28, 28])
    assert (manifest["channels"], manifest["encoding"]) == (1, "png")
    found = read(out)
    assert list(found) == ["test", "train"]
    for split, records in found.items():
        assert [r["key"].decode() for r in records] == [
            f"{split}/{i:08d}" for i in range(len(records))
        ]
        assert [int(r["label"]) for r in records] == labels[split]
        assert [int(r["class"]) for r in records] == [[1, 2, 10].index(n) for n in labels[split]]
        pixels = np.stack([tf.io.decode_png(r["image"]).numpy() for r in records])
        np.testing.assert_array_equal(pixels, images[split][..., None])


def test_two_idx_folders_have_the_same_keys(tmp_path, out, capsys):
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
        for stem in ("train", "t10k"):
            (tmp_path / folder / f"{stem}-images-idx3-ubyte").write_bytes(idx(bytes(1), 1, 1, 1))
            (tmp_path / folder / f"{stem}-labels-idx1-ubyte").write_bytes(idx(bytes(1), 1))
    found = fails(capsys, out, "--input", f"idx:{tmp_path}/1", "--input", f"idx:{tmp_path}/2")
    split, stem = ("test", "t10k") if "'test/" in found else ("train", "train")
    assert found == (
        f"tpufeed ingest: error: two inputs have the key '{split}/00000000': "
        f"T/1/{stem}-images-idx3-ubyte#0 (label 0) and T/2/{stem}-images-idx3-ubyte#0 (label 0); "
        "keys must be unique: widen --root, or give a CSV with a column key"
    ).replace("(label 0)", f"(label 0, split {split})")


def plain_idx(path: Path, start: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress(path.read_bytes())[start:], np.uint8)


def test_mnist_whole(shared, out):
    """All 70,000, some 30 s: they must come out as a plain reader sees them."""
    folder = shared / "data" / "mnist"
    assert main(["ingest", "--input", f"idx:{folder}", "--output", str(out)]) == 0
    manifest = manifest_of(out)
    assert {s: f["records"] for s, f in manifest["splits"].items()} == {
        "test": 10_000,
        "train": 60_000,
    }
    assert manifest["labels"] == [str(digit) for digit in range(10)]
    spec = {
        n: tf.io.FixedLenFeature([], t)
        for n, t in (("image", tf.string), ("key", tf.string), ("class", tf.int64))
    }

    def parse(records):
        parsed = tf.io.parse_example(records, spec)
        decode = tf.map_fn(tf.io.decode_png, parsed["image"], fn_output_signature=tf.uint8)
        return decode, parsed["key"], parsed["class"]

    for split, stem in (("train", "train"), ("test", "t10k")):
        images = plain_idx(folder / f"{stem}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1)
        labels = plain_idx(folder / f"{stem}-labels-idx1-ubyte.gz", 8)
        seen = np.zeros(len(labels), bool)
        paths = [str(out / shard["name"]) for shard in manifest["splits"][split]["shards"]]
        for pixels, keys, classes in tf.data.TFRecordDataset(paths).batch(1000).map(parse):
            items = [int(key.decode().removeprefix(f"{split}/")) for key in keys.numpy()]
            np.testing.assert_array_equal(pixels.numpy(), images[items])
            np.testing.assert_array_equal(classes.numpy(), labels[items])
            seen[items] = True
        assert seen.all()


@pytest.mark.parametrize(
    ("pattern", "below", "name"),
    [
        ("**", "rec", "dataset.json"),
        ("*/*", "rec", "dataset.json"),
        ("*/*.tfrecord", "rec", "train-00000-of-00001.tfrecord"),
        ("**/*.idx", "a/rec", "index/train-00000-of-00001.idx"),
        ("a/rec/_tmp/p*", "a/rec", "_tmp/plan.json"),
        ("**", ".", "dataset.json"),
        ("*/*", "link", "dataset.json"),
    ],
)
def test_an_output_that_the_pattern_would_read_is_refused(tmp_path, pattern, below, name, capsys):
    """A run that goes on would find its own files among its inputs."""
    folder = tmp_path / "in"
    draw(folder / "a" / "1.png", seed=1)
    (tmp_path / "link").symlink_to("in/rec")
    output = tmp_path / "link" if below == "link" else folder / below
    assert ingest(output, "--input", f"{folder}/{pattern}") == 2
    assert capsys.readouterr().err == (
        f"tpufeed ingest: error: --output {output}: --input {folder}/{pattern} would take {name} "
        "there for an image; give a folder elsewhere, or a narrower pattern, as in '**/*.jpg'\n"
    )
    assert [path.name for path in folder.rglob("*")] == ["a", "1.png"]


@pytest.mark.parametrize(
    ("pattern", "below"), [("**/*.png", "rec"), ("*/1.*", "rec"), ("*/*", "../rec"), ("a/*", ".")]
)
def test_an_output_below_the_pattern_that_it_does_not_match(tmp_path, pattern, below):
    folder = tmp_path / "in"
    draw(folder / "a" / "1.png", seed=1)
    out = Path(os.path.normpath(folder / below))
    resume = ["--resume"] if below == "." else []  # into a folder that is not empty
    assert ingest(out, "--input", f"{folder}/{pattern}", *resume) == 0
    key = "1.png" if below == "." else "a/1.png"
    assert labelled(out) == {key: ("train", "a", 0)}
