"""Vocabulary and moments by tensorflow-transform, and what training makes of them."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest
from helpers import draw, ingest

pytest.importorskip("tensorflow_transform", reason="tensorflow-transform is not installed")

from pipeline.__main__ import main
from pipeline.analyze import summarize_index
from pipeline.config import TrainConfig
from pipeline.train import make_plan
from pipeline.transform_fn import load_transform, moments
from transforms.manifest import load_manifest
from transforms.records import DataError


def analyze(output, *folders, flags=()) -> int:
    data = [word for folder in folders for word in ("--data", str(folder))]
    return main(["analyze", *data, "--output", str(output), *flags])


@pytest.fixture(scope="module")
def ordered(tmp_path_factory):
    """A data set whose class ids follow neither the alphabet nor the classes' sizes."""
    folder = tmp_path_factory.mktemp("ordered")
    for label, count in (("ash", 6), ("birch tree", 10), ("cédre", 3)):
        for number in range(count):
            draw(folder / "in" / label / f"{number}.png", seed=len(label) * 100 + number)
    (folder / "names.txt").write_text("cédre\nyew\nash\nbirch tree\n", encoding="utf-8")
    flags = ["--class-names", str(folder / "names.txt"), "--image-size", "20x16"]
    output = folder / "records"
    assert ingest(f"{folder}/in/*/*", output, *flags, "--split", "train=0.6,validation=0.4") == 0
    return output


@pytest.fixture(scope="module")
def transform(ordered, tmp_path_factory):
    output = tmp_path_factory.mktemp("transform") / "out"
    assert analyze(output, ordered) == 0
    return output


def index_of(folder, split) -> list[dict]:
    paths = sorted((folder / "index").glob(f"{split}-*.parquet"))
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


# Loaded where neither Beam nor tensorflow-transform is: an image for TPUs has neither.
PLAIN = """
import json, sys
sys.modules["tensorflow_transform"] = sys.modules["apache_beam"] = sys.modules["tfx_bsl"] = None
import tensorflow as tf
module = tf.saved_model.load(sys.argv[1])
labels = json.loads(sys.argv[2])
n = len(labels)
rows = {"label": tf.constant(labels), "training": tf.zeros([n], tf.int64),
        "pixels": tf.zeros([n], tf.int64), "channel_sum": tf.zeros([n, 3], tf.int64),
        "channel_squares": tf.zeros([n, 3], tf.int64)}
print(json.dumps({k: v.numpy().tolist() for k, v in module.transform_fn(rows).items()}))
"""


def test_any_tensorflow_reads_vocabulary_and_totals(ordered, transform):
    labels = ["cédre", "yew", "ash", "birch tree", "Ash", ""]
    words = [sys.executable, "-c", PLAIN, str(transform / "transform_fn"), json.dumps(labels)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["class"] == [0, 1, 2, 3, -1, -1]
    assert told["classes"] == [4] * 6
    rows = index_of(ordered, "train")
    assert len(rows) > 5
    assert told["pixels"] == [sum(row["pixels"] for row in rows)] * 6
    for name, column in (
        ("channel_sum", "channel_sum"),
        ("channel_squares", "channel_sum_of_squares"),
    ):
        expected = np.sum([row[column] for row in rows], axis=0).tolist()
        assert told[name] == [expected] * 6


def test_moments_are_those_of_dataset_json(ordered, transform):
    manifest = load_manifest(str(ordered))
    loaded = load_transform(str(transform), manifest=manifest)
    assert loaded.mean == pytest.approx(manifest.channel_mean, abs=1e-9)
    assert loaded.std == pytest.approx(manifest.channel_std, abs=1e-9)


def test_two_folders_are_analyzed_as_one(ordered, tmp_path, capsys):
    other = tmp_path / "other"
    for number in range(5):
        draw(tmp_path / "in" / "ash" / f"{number}.png", seed=900 + number)
    flags = ["--class-names", str(ordered / "dataset.json"), "--image-size", "20x16"]
    assert ingest(f"{tmp_path}/in/*/*", other, *flags) == 0
    assert analyze(tmp_path / "out", ordered, other) == 0
    rows = index_of(ordered, "train") + index_of(other, "train")
    count = sum(row["pixels"] for row in rows)
    sums = np.sum([row["channel_sum"] for row in rows], axis=0)
    squares = np.sum([row["channel_sum_of_squares"] for row in rows], axis=0)
    loaded = load_transform(str(tmp_path / "out"), manifest=load_manifest(str(other)))
    assert loaded.mean == pytest.approx((sums / count / 255).tolist(), abs=1e-9)
    std = np.sqrt(squares / count - (sums / count) ** 2) / 255
    assert loaded.std == pytest.approx(std.tolist(), abs=1e-6)


def test_moments_by_hand():
    # Levels 0 and 255; then 10, 10.
    assert moments(2, [255, 20], [255**2, 200]) == (
        pytest.approx((0.5, 10 / 255)),
        pytest.approx((0.5, 0.0)),
    )


def parquet(**columns) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def test_summarize_index_adds_up_label_by_label():
    data = parquet(
        key=["1", "2", "3"],
        label=["b", "a", "b"],
        pixels=[2, 3, 5],
        channel_sum=[[1, 2], [3, 4], [10, 20]],
        channel_sum_of_squares=[[5, 6], [7, 8], [50, 60]],
    )
    assert list(summarize_index(data, training=True, path="x")) == [
        {"label": "b", "training": 1, "pixels": 7, "channel_sum": [11, 22],
         "channel_squares": [55, 66]},
        {"label": "a", "training": 1, "pixels": 3, "channel_sum": [3, 4],
         "channel_squares": [7, 8]},
    ]  # fmt: skip
    with pytest.raises(DataError, match="^x: no index of tpufeed ingest: "):
        list(summarize_index(b"PAR1 not", training=True, path="x"))
    with pytest.raises(DataError, match="^x: no index of tpufeed ingest: no column 'channel_sum'$"):
        list(summarize_index(parquet(label=["a"], pixels=[1]), training=True, path="x"))


def said(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1] if lines else ""


def test_a_changed_index_is_noticed(ordered, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(ordered, copy)
    path = sorted((copy / "index").glob("train-*.parquet"))[0]
    table = pyarrow.parquet.read_table(path).to_pydict()
    table["channel_sum"][0][0] += 5000
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert analyze(tmp_path / "out", copy) == 1
    assert said(capsys).startswith(f"tpufeed analyze: error: {copy}: channel_mean is (")
    table["channel_sum"][0][0] -= 5000
    table["label"][0] = "oak"
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    assert analyze(tmp_path / "out2", copy) == 1
    assert said(capsys) == (
        f"tpufeed analyze: error: {copy}: label 'oak' is in index/ only: run tpufeed verify"
    )
    path.unlink()
    assert analyze(tmp_path / "out3", copy) == 1
    assert said(capsys) == (
        f"tpufeed analyze: error: {path}: No such file or directory: run tpufeed verify"
    )


def test_wrong_folders_are_one_line(ordered, transform, tmp_path, capsys):
    assert analyze(transform, ordered) == 1
    assert said(capsys) == (
        f"tpufeed analyze: error: --output {transform}: is not empty: give a new folder"
    )
    assert analyze(tmp_path / "x", tmp_path) == 1
    assert "dataset.json" in said(capsys)
    assert analyze("", ordered) == 2
    assert said(capsys) == "tpufeed analyze: error: --output '': is empty; give a new folder"


def test_training_takes_the_moments_and_refuses_other_classes(
    ordered, transform, dataset, tmp_path, capsys
):
    manifest = load_manifest(str(ordered))
    config = TrainConfig(
        data=(str(ordered),), model="convnet", transform=str(transform), batch_size=2
    )
    changed = manifest.__class__(**{**vars(manifest), "channel_mean": (0.1, 0.1, 0.1)})
    plan = make_plan(config, [changed], replicas=1)
    assert plan.mean == pytest.approx(manifest.channel_mean, abs=1e-9)
    assert plan.std == pytest.approx(manifest.channel_std, abs=1e-9)
    words = ["train", "--data", str(dataset), "--model", "convnet", "--epochs", "1"]
    assert main([*words, "--batch-size", "8", "--transform", str(transform)]) == 1
    assert said(capsys) == (
        f"tpufeed train: error: --transform {transform}: 'ash' is class 2 in its vocabulary, "
        "class 0 in dataset.json: run tpufeed analyze on this data set"
    )
    assert main([*words, "--batch-size", "8", "--transform", str(tmp_path)]) == 1
    assert f"--transform {tmp_path}: holds no transform_fn of tpufeed analyze" in said(capsys)


def test_more_classes_and_other_channels_are_refused(ordered, transform):
    manifest = load_manifest(str(ordered))

    def load(**changes):
        other = manifest.__class__(**{**vars(manifest), **changes})
        with pytest.raises(ValueError) as caught:
            load_transform(str(transform), manifest=other)
        return str(caught.value).removeprefix(f"--transform {transform}: ")

    assert load(labels=manifest.labels[:3]) == (
        "its vocabulary has 4 classes, dataset.json 3: run tpufeed analyze on this data set"
    )
    assert load(labels=(*manifest.labels, "oak")) == (
        "'oak' is no class in its vocabulary, class 4 in dataset.json: run tpufeed analyze on this "
        "data set"
    )
    assert load(channels=1) == (
        "is of pictures with 3 channel(s), the data set's have 1: run tpufeed analyze on it"
    )
