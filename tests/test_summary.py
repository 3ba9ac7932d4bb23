"""`tpufeed inspect`: the summary, and one record by random access."""

import io
import json

import pytest
import tensorflow as tf
from helpers import draw, ingest
from PIL import Image

from pipeline.__main__ import main
from pipeline.summary import locate
from transforms.manifest import load_manifest


def records_of(folder, split):
    paths = sorted(map(str, folder.glob(f"{split}-*")))
    for record in tf.data.TFRecordDataset(paths).as_numpy_iterator():
        yield tf.train.Example.FromString(record).features.feature


def test_the_summary_counts_what_is_there(dataset, capsys):
    assert main(["inspect", str(dataset), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["records"] == 60
    assert summary["labels"] == ["ash", "birch", "cedar"]
    for split in ("train", "validation"):
        labels = [f["label"].bytes_list.value[0].decode() for f in records_of(dataset, split)]
        assert summary["splits"][split]["records"] == len(labels)
        counts = {label: labels.count(label) for label in summary["labels"]}
        assert summary["splits"][split]["classes"] == counts
    assert main(["inspect", str(dataset)]) == 0
    text = capsys.readouterr().out
    assert "60 records, 3 classes, 32x24, 3 channel(s), jpeg, schema flowers" in text
    assert "contents under several keys: 0, with several labels: 0" in text


def test_one_split_lists_its_shards(dataset, capsys):
    assert main(["inspect", str(dataset), "--split", "validation"]) == 0
    out = capsys.readouterr().out
    assert "  validation-00001-of-00002.tfrecord: 11 records, " in out
    assert "train-00000" not in out


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_record_is_reached_by_its_number(dataset, split, capsys, tmp_path):
    for number, feature in enumerate(records_of(dataset, split)):
        saved = tmp_path / "picture"
        command = ["inspect", str(dataset), "--split", split, "--record", str(number), "--json"]
        assert main([*command, "--save", str(saved)]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["key"] == feature["key"].bytes_list.value[0].decode()
        assert facts["label"] == feature["label"].bytes_list.value[0].decode()
        assert facts["features"]["size"] == [24, 32]
        assert saved.read_bytes() == feature["image"].bytes_list.value[0]


def test_raw_pixels_are_saved_as_a_picture(pictures, tmp_path, capsys):
    output = tmp_path / "out"
    flags = ["--encoding", "raw", "--image-size", "8x6"]
    assert ingest(f"{pictures}/*/*", output, *flags) == 0
    saved = tmp_path / "picture.png"
    assert main(["inspect", str(output), "--record", "0", "--save", str(saved)]) == 0
    first = next(records_of(output, "train"))
    picture = Image.open(io.BytesIO(saved.read_bytes()))
    assert picture.size == (8, 6)
    assert picture.tobytes() == first["image"].bytes_list.value[0]


def test_names_cannot_drive_the_terminal(tmp_path, capsys):
    draw(tmp_path / "in" / "a\u202eb" / "1.jpg", seed=1)
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out") == 0
    assert main(["inspect", str(tmp_path / "out"), "--record", "0"]) == 0
    out = capsys.readouterr().out
    assert "\u202e" not in out and "a\\u202eb" in out


@pytest.mark.parametrize(
    "flags, code, message",
    [
        (["--record", "999"], 1, "--record 999: split 'train' has records 0 to "),
        (["--record", "-1"], 1, "--record -1: split 'train' has records 0 to "),
        (["--split", "test"], 1, "--split test: "),
        (["--save", "x.jpg"], 2, "--save: needs --record, whose picture is saved"),
    ],
)
def test_errors(dataset, flags, code, message, capsys):
    assert main(["inspect", str(dataset), *flags]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"tpufeed inspect: error: {message}") and err.count("\n") == 1


def test_no_data_set(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"tpufeed inspect: error: {tmp_path}: no dataset.json, so this is no complete data set: "
        "run tpufeed ingest\n"
    )


def test_locate_skips_empty_shards(dataset):
    manifest = load_manifest(str(dataset))
    seen = [locate(manifest, split="train", record=i) for i in range(46 - 2)]
    assert [shard.name for shard, _ in seen] == sorted(shard.name for shard, _ in seen)
    with pytest.raises(ValueError, match="has records 0 to "):
        locate(manifest, split="train", record=60)
