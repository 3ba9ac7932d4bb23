"""End to end: pictures in, records out, read back by TensorFlow; and every way it can go wrong."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.config import make_ingest_config, make_parser
from pipeline.ingest import ingest_images, prepare_output
from transforms.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]
SPEC = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "class": tf.io.FixedLenFeature([], tf.int64),
    "label": tf.io.FixedLenFeature([], tf.string),
    "size": tf.io.FixedLenFeature([2], tf.int64),
    "key": tf.io.FixedLenFeature([], tf.string),
}


def read_back(folder, split, *, classes):
    """The records of a split as TensorFlow alone reads them, by a glob, as users do."""
    spec = {**SPEC, "one_hot_class": tf.io.FixedLenFeature([classes], tf.float32)}
    paths = sorted(tf.io.gfile.glob(f"{folder}/{split}-*"))
    for record in tf.data.TFRecordDataset(paths):
        yield {k: v.numpy() for k, v in tf.io.parse_single_example(record, spec).items()}


def test_what_is_written_is_what_tensorflow_reads(pictures, dataset):
    keys = set()
    for split in ("train", "validation"):
        for record in read_back(dataset, split, classes=3):
            label = record["label"].decode()
            assert record["class"] == ["ash", "birch", "cedar"].index(label)
            assert record["one_hot_class"].tolist() == [
                float(i == record["class"]) for i in range(3)
            ]
            assert record["size"].tolist() == [24, 32]
            picture = tf.io.decode_jpeg(record["image"])
            assert picture.shape == (24, 32, 3)
            key = record["key"].decode()
            assert key.startswith(label + "/") and (pictures / key).is_file()
            assert key not in keys
            keys.add(key)
    assert len(keys) == 60


def test_golden_layout(dataset):
    """By value: this seed, these keys, these shards; a change here moves everybody's data."""
    keys = {}
    for path in sorted(dataset.glob("*.tfrecord")):
        examples = map(
            tf.train.Example.FromString, tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        )
        names = [e.features.feature["key"].bytes_list.value[0].decode() for e in examples]
        keys[path.name] = " ".join(name.split("/")[1].split(".")[0] for name in names)
    assert keys == GOLDEN


def test_the_folder_holds_what_the_contract_says(dataset):
    names = sorted(str(path.relative_to(dataset)) for path in dataset.rglob("*") if path.is_file())
    shards = [f"train-{i:05d}-of-00004" for i in range(4)]
    shards += [f"validation-{i:05d}-of-00002" for i in range(2)]
    assert names == sorted(
        [
            "dataset.json",
            "duplicates.jsonl",
            "rejects.jsonl",
            *(f"{name}.tfrecord" for name in shards),
            *(f"index/{name}.{suffix}" for name in shards for suffix in ("idx", "parquet")),
        ]
    )
    document = json.loads((dataset / "dataset.json").read_text())
    assert list(document) == [
        "format", "tpufeed", "libraries", "config", "schema", "encoding", "channels", "image_size",
        "labels", "label_offset", "features", "splits", "channel_mean", "channel_std", "rejects",
        "skipped", "fingerprint",
    ]  # fmt: skip
    assert document["image_size"] == [24, 32]
    assert document["labels"] == ["ash", "birch", "cedar"]


def test_bad_files_are_counted_and_the_rest_goes_on(pictures, tmp_path, capsys):
    folder = shutil.copytree(pictures, tmp_path / "in")
    (folder / "ash" / "empty.jpg").write_bytes(b"")
    (folder / "ash" / "page.jpg").write_text("<html>not found</html>")
    whole = (folder / "ash" / "00.jpg").read_bytes()
    (folder / "birch" / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "birch" / "Thumbs.db").write_bytes(b"junk")
    (folder / "birch" / "copy.jpg").write_bytes(whole)
    output = tmp_path / "out"
    assert ingest(f"{folder}/*/*", output) == 1
    assert capsys.readouterr().err == (
        "tpufeed ingest: error: 3 of 64 inputs were rejected (truncated 1, unidentified 1, "
        f"zero_byte 1), more than --max-reject-rate 0.01: see {output}/rejects.jsonl; mend the "
        "inputs, or raise the rate and go on with --resume\n"
    )
    assert not (output / "dataset.json").exists()
    assert len((output / "rejects.jsonl").read_text().splitlines()) == 3
    assert ingest(f"{folder}/*/*", output, "--overwrite", "--max-reject-rate", "0.05") == 0
    manifest = load_manifest(str(output))
    assert manifest.records == 61
    assert manifest.rejects == {"truncated": 1, "unidentified": 1, "zero_byte": 1}
    assert manifest.skipped == 1
    rejects = [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]
    assert [(r["key"], r["label"], r["reason"]) for r in rejects] == [
        ("ash/empty.jpg", "ash", "zero_byte"),
        ("ash/page.jpg", "ash", "unidentified"),
        ("birch/half.jpg", "birch", "truncated"),
    ]
    assert rejects[0]["path"] == str(folder / "ash" / "empty.jpg")
    (duplicate,) = (output / "duplicates.jsonl").read_text().splitlines()
    duplicate = json.loads(duplicate)
    assert duplicate["keys"] == ["ash/00.jpg", "birch/copy.jpg"]
    assert duplicate["labels"] == ["ash", "birch"]
    assert main(["verify", str(output), "--sources", "100"]) == 0


def test_the_sources_are_left_alone(pictures, dataset, tmp_path):
    def state():
        return {
            path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(pictures.rglob("*"))
            if path.is_file()
        }

    before = state()
    assert ingest(f"{pictures}/*/*", tmp_path / "out") == 0
    assert state() == before


def fails(capsys, *argv: str, code: int = 1) -> str:
    """Runs a command that must fail with one line on stderr; returns it."""
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in out + err
    return err.removesuffix("\n").removeprefix("tpufeed ingest: error: ")


def test_an_output_that_is_not_empty_is_refused(pictures, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("three years of work")
    command = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command) == (
        f"--output {tmp_path}/out: not empty (thesis.txt and 0 more); give another folder, or "
        "--overwrite to replace the data set in it"
    )
    assert main([*command, "--overwrite"]) == 0
    assert (tmp_path / "out" / "thesis.txt").read_text() == "three years of work"
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_overwrite_leaves_no_shard_of_the_old_set(pictures, tmp_path):
    output = tmp_path / "out"
    assert ingest(f"{pictures}/*/*", output, "--shards", "5", "--split", "a=0.5,b=0.5") == 0
    (output / "_tmp").mkdir()
    (output / "_tmp" / f"a-00000-of-00003.tfrecord.{'0' * 32}").write_bytes(b"of a dead run")
    (output / "index" / "mine.txt").write_text("not ours")
    assert ingest(f"{pictures}/*/*", output, "--shards", "3", "--overwrite") == 0
    assert sorted(path.name for path in output.glob("*.tfrecord")) == [
        f"train-{i:05d}-of-00003.tfrecord" for i in range(3)
    ]
    assert not (output / "_tmp").exists()
    assert (output / "index" / "mine.txt").exists()
    assert main(["verify", str(output)]) == 0


def test_overwrite_keeps_the_old_set_where_the_new_one_cannot_begin(pictures, tmp_path, capsys):
    output = str(tmp_path / "out")
    assert ingest(f"{pictures}/*/*", output) == 0
    for flags in (
        ["--input", f"{pictures}/*/*.gif"],
        ["--input", f"{pictures}/*/*", "--class-names", str(tmp_path / "absent.txt")],
        ["--input", f"{pictures}/*/*", "--exclude", str(tmp_path / "absent.txt")],
        ["--input", f"{tmp_path}/absent.csv"],
    ):
        fails(capsys, "ingest", *flags, "--output", output, "--overwrite")
        assert main(["verify", output]) == 0
        capsys.readouterr()


def test_a_foreign_file_that_a_glob_of_shards_would_match(pictures, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-set.txt").write_text("notes")
    command = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command, "--overwrite") == (
        f"--output {tmp_path}/out: train-set.txt is not tpufeed's but a glob of its split would "
        "match it: move it away"
    )


def test_an_output_that_is_a_file(pictures, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    command = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command).startswith(f"--output {tmp_path}/out: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_an_output_that_cannot_be_written_to(pictures, tmp_path, capsys):
    (tmp_path / "out").mkdir(mode=0o500)
    command = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command) == f"--output {tmp_path}/out: Permission denied"


def test_a_full_disk_ends_the_run_with_one_line(tmp_path):
    """A limit on the size of files stands for the disk's: the same errors from the same calls."""
    folder = tmp_path / "in"
    for number in range(40):
        draw(folder / "one" / f"{number}.jpg", seed=number, size=(300, 200))
    output = tmp_path / "out"
    command = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{folder}/*/*"]
    done = subprocess.run(
        [*command, "--output", str(output), "--shards", "1", "--encoding", "png", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"tpufeed ingest: error: cannot write to {output}: File too large; mend it, then run again "
        "with --resume\n"
    )
    assert not (output / "dataset.json").exists()
    assert not list(output.glob("*.tfrecord"))


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--shards", "61"],
            "--shards 61: more than the 60 images found; allowed: 1 to 60",
        ),
        (
            ["--shards", "1", "--split", "a=0.5,b=0.5"],
            "--shards 1: fewer than the 2 splits (a, b); allowed: 2 to 60",
        ),
        (["--max-pixels", "10", "--max-reject-rate", "1"], "no input became a record (too_large"),
    ],
)
def test_what_only_the_data_can_tell(flags, message, pictures, tmp_path, capsys):
    command = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command, *flags).startswith(message)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_an_error_of_ours_shows_its_traceback_only_on_request(pictures, tmp_path, capsys):
    command = ["ingest", "--input", f"{pictures}/*/*.gif", "--output", str(tmp_path / "out")]
    fails(capsys, *command)
    assert main([*command, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_labels_that_differ_by_case(pictures, tmp_path, capsys):
    folder = shutil.copytree(pictures, tmp_path / "in")
    if (folder / "ASH").exists():
        pytest.skip("this file system does not tell case apart")
    draw(folder / "Ash" / "other.jpg", seed=70)
    command = ["ingest", "--input", f"{folder}/*/*", "--output", str(tmp_path / "out")]
    assert fails(capsys, *command) == (
        "labels 'Ash' and 'ash' differ by case only: rename one folder, or list both in "
        "--class-names"
    )
    (tmp_path / "names.txt").write_text("Ash\nash\nbirch\ncedar\n")
    command = [*command, "--class-names", str(tmp_path / "names.txt"), "--overwrite"]
    assert main(command) == 0
    assert load_manifest(str(tmp_path / "out")).labels == ("Ash", "ash", "birch", "cedar")


def test_an_empty_shard_is_written_verified_and_read(tmp_path):
    for number in range(8):
        draw(tmp_path / "in" / "one" / f"{number}.jpg", seed=number)
    output = tmp_path / "out"
    assert ingest(f"{tmp_path}/in/*/*", output, "--shards", "8") == 0
    sizes = [shard.records for shard in load_manifest(str(output)).splits["train"].shards]
    assert sum(sizes) == 8 and 0 in sizes  # eight keys in eight ranges of the hash, by chance
    assert main(["verify", str(output), "--deep"]) == 0
    assert len(list(tf.data.TFRecordDataset(sorted(map(str, output.glob("train-*")))))) == 8


def test_a_split_that_gets_nothing_is_there_and_empty(tmp_path):
    draw(tmp_path / "in" / "one" / "1.jpg", seed=1)
    output = tmp_path / "out"
    assert ingest(f"{tmp_path}/in/*/*", output, "--split", "train=0.5,test=0.5") == 0
    splits = load_manifest(str(output)).splits
    assert sorted(splits) == ["test", "train"]
    assert sorted(split.records for split in splits.values()) == [0, 1]
    assert sorted(len(split.shards) for split in splits.values()) == [0, 1]
    assert main(["verify", str(output)]) == 0


def test_the_python_call_returns_the_manifest(pictures, tmp_path):
    argv = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    config = make_ingest_config(make_parser().parse_args(argv))
    manifest = ingest_images(config)
    assert manifest == load_manifest(str(tmp_path / "out"))
    assert manifest.records == 60


def test_prepare_output_removes_the_manifest_first(pictures, tmp_path, monkeypatch):
    output = tmp_path / "out"
    assert ingest(f"{pictures}/*/*", output) == 0
    removed = []
    real = os.remove
    monkeypatch.setattr(os, "remove", lambda path: (removed.append(Path(path).name), real(path)))
    argv = ["ingest", "--input", "x", "--output", str(output), "--overwrite"]
    prepare_output(make_ingest_config(make_parser().parse_args(argv)))
    assert removed[0] == "dataset.json" and len(removed) > 4


def test_adding_files_moves_none_to_another_split(pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "in")
    flags = ["--split", "train=0.6,validation=0.3,test=0.1"]
    assert ingest(f"{folder}/*/*", tmp_path / "before", *flags) == 0
    for number in range(200):
        draw(folder / "ash" / f"new-{number}.png", seed=number, size=(8, 8))
    assert ingest(f"{folder}/*/*", tmp_path / "after", *flags) == 0

    def split_of_key(output):
        return {
            record["key"]: split
            for split in load_manifest(str(output)).splits
            for record in read_back(output, split, classes=3)
        }

    before, after = split_of_key(tmp_path / "before"), split_of_key(tmp_path / "after")
    assert len(before) == 60 and len(after) == 260
    assert {key: after[key] for key in before} == before


def test_a_moved_folder_and_two_patterns_give_the_same_bytes(pictures, dataset, tmp_path):
    moved = shutil.copytree(pictures, tmp_path / "elsewhere")
    flags = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
    more = ["--input", f"{moved}/*/*", "--input", f"{moved}/**"]
    assert ingest(f"{moved}/*/*.jpg", tmp_path / "out", *more, *flags) == 0
    mine, theirs = load_manifest(str(tmp_path / "out")), load_manifest(str(dataset))
    assert mine.fingerprint == theirs.fingerprint


def test_a_shuffled_listing_gives_the_same_bytes(pictures, dataset, tmp_path, monkeypatch):
    real = os.walk

    def reversed_walk(*args, **kwargs):
        for parent, folders, names in real(*args, **kwargs):
            folders.sort(reverse=True)
            yield parent, folders, sorted(names, key=lambda name: name[::-1], reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)
    flags = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
    assert ingest(f"{pictures}/*/*", tmp_path / "out", *flags) == 0
    assert load_manifest(str(tmp_path / "out")).fingerprint == (
        load_manifest(str(dataset)).fingerprint
    )


def test_the_flowers(shared, tmp_path):
    """Real photographs, at the size of the lab; read by TensorFlow's own reader."""
    output = tmp_path / "out"
    flags = ["--image-size", "192", "--split", "train=0.8,validation=0.2", "--shards", "16"]
    assert ingest(f"{shared}/data/flowers/*/*.jpg", output, *flags) == 0
    manifest = load_manifest(str(output))
    assert manifest.records == 1000 and manifest.rejects == {}
    mean = 1000 / 16
    for split in manifest.splits.values():
        for shard in split.shards:
            assert abs(shard.records - mean) <= 4 * math.sqrt(mean)
    assert main(["verify", str(output)]) == 0
    names = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]
    keys = set()
    for split in ("train", "validation"):
        for record in read_back(output, split, classes=5):
            assert tf.io.decode_jpeg(record["image"]).shape == (192, 192, 3)
            assert names[record["class"]] == record["label"].decode()
            assert record["key"].decode().split("/")[0] == record["label"].decode()
            keys.add(record["key"])
    assert len(keys) == 1000
    (line,) = (output / "duplicates.jsonl").read_text().splitlines()
    assert json.loads(line)["labels"] == ["roses", "tulips"]


GOLDEN = {
    "train-00000-of-00004.tfrecord": "13 11 04 19 55 24",
    "train-00001-of-00004.tfrecord": "32 44 56 23 58 02 25 16 46 30 05 14 01 00",
    "train-00002-of-00004.tfrecord": "57 49 20 40 31 27 42 29 51 54 21 43",
    "train-00003-of-00004.tfrecord": "45 06 38 07 59 52 34 28 18 50 37 26",
    "validation-00000-of-00002.tfrecord": "39 35 09 08 48",
    "validation-00001-of-00002.tfrecord": "22 41 47 53 33 36 17 10 15 03 12",
}
