"""A DataFrame in: the same fingerprint as the CSV with its cells, and what no CSV could say."""

import csv
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import draw, ingest

from pipeline.__main__ import main
from pipeline.frames import dump_frame, from_dataframe
from pipeline.ingest import ingest_images
from transforms.image import PixelPolicy
from transforms.manifest import load_manifest
from transforms.records import DataError

pandas = pytest.importorskip("pandas", reason="no pandas, whose frames these are")

SMALL = PixelPolicy(width=16, height=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve pictures, rows.csv with every kind of column, and the same as a frame."""
    folder = tmp_path_factory.mktemp("frames")
    rows = [["path", "label", "note", "age:int", "weight:float"]]
    for number in range(12):
        name = f"p{number}.jpg"
        draw(folder / "sub" / name, seed=number)
        note = ("", 'a "quoted", one', "two\nlines", "\u6771")[number % 4]
        rows.append([f"sub/{name}", f"l{number % 3}", note, str(number - 5), str(number / 8)])
    rows[3][3] = rows[4][4] = ""
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return folder


def frame_of(folder):
    frame = pandas.read_csv(folder / "rows.csv", keep_default_na=False, dtype=str)
    frame.columns = [name.partition(":")[0] for name in frame.columns]
    frame["age"] = pandas.array([int(v) if v else None for v in frame["age"]], dtype="Int64")
    frame["weight"] = [float(v) if v else np.nan for v in frame["weight"]]
    return frame


def test_the_same_data_set_as_the_csv(folder, tmp_path):
    assert ingest(folder / "rows.csv", tmp_path / "csv", "--image-size", "16") == 0
    expected = load_manifest(str(tmp_path / "csv"))
    config = from_dataframe(
        frame_of(folder), output=tmp_path / "frame", folder=folder, pixels=SMALL
    )
    manifest = ingest_images(config)
    assert manifest.fingerprint == expected.fingerprint
    assert manifest.features == expected.features and manifest.records == 12
    spec = {
        "key": tf.io.FixedLenFeature([], tf.string),
        "note": tf.io.FixedLenFeature([], tf.string),
        "age": tf.io.FixedLenFeature([], tf.int64),
        "weight": tf.io.FixedLenFeature([], tf.float32),
    }
    seen = {}
    for record in tf.data.TFRecordDataset(sorted(map(str, (tmp_path / "frame").glob("train-*")))):
        found = {k: v.numpy() for k, v in tf.io.parse_single_example(record, spec).items()}
        seen[found.pop("key").decode()] = found
    assert seen["sub/p5.jpg"] == {"note": b'a "quoted", one', "age": 0, "weight": 0.625}
    assert seen["sub/p2.jpg"] == {"note": b"two\nlines", "age": 0, "weight": 0.25}
    assert main(["verify", str(tmp_path / "frame"), "--sources", "12"]) == 0


def test_the_table_stays_and_makes_the_set_again(folder, tmp_path):
    output = tmp_path / "out"
    manifest = ingest_images(from_dataframe(frame_of(folder), output=output, folder=folder))
    (table,) = tmp_path.glob("*.csv")
    assert re.fullmatch("out-[0-9a-f]{12}.csv", table.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", table.name])
    assert manifest.config["inputs"][0]["pattern"] == str(table)
    assert ingest(table, tmp_path / "again") == 0
    assert load_manifest(str(tmp_path / "again")).fingerprint == manifest.fingerprint
    resumed = from_dataframe(frame_of(folder), output=output, folder=folder, resume=True)
    assert ingest_images(resumed) == manifest


def test_relative_paths_are_of_the_current_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    config = from_dataframe(frame_of(folder), output=tmp_path / "out", table=tmp_path / "t.csv")
    assert config.inputs[0].pattern == str(tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert first["path"] == str(folder / "sub" / "p0.jpg") and first["key"] == "sub/p0.jpg"


def test_columns_split_and_key_and_paths_of_pathlib(folder, tmp_path):
    frame = pandas.DataFrame(
        {
            "path": [folder / "sub" / f"p{n}.jpg" for n in range(4)],
            "label": [3, 10, 3, 10],
            "split": ["train", "train", "test", "test"],
            "key": list("abcd"),
        }
    )
    manifest = ingest_images(from_dataframe(frame, output=tmp_path / "out", pixels=SMALL))
    assert manifest.labels == ("3", "10")
    assert {name: split.records for name, split in manifest.splits.items()} == {
        "test": 2,
        "train": 2,
    }
    weights = (("train", Fraction(1, 2)), ("test", Fraction(1, 2)))
    contradiction = from_dataframe(frame, output=tmp_path / "both", weights=weights)
    with pytest.raises(DataError, match="--split: 'a' already has the split 'train' from its sou"):
        ingest_images(contradiction)


def test_files_in_a_store():
    frame = pandas.DataFrame({"path": ["a/1.jpg", "/x/2.jpg", "gs://c/3.jpg"], "label": "x"})
    assert dump_frame(frame, folder="gs://b/d").decode().splitlines()[1:] == [
        '"gs://b/d/a/1.jpg","x","a/1.jpg"',
        '"/x/2.jpg","x","/x/2.jpg"',
        '"gs://c/3.jpg","x","gs://c/3.jpg"',
    ]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"file": ["a"], "label": ["x"]}, "frame: no column 'path' among file, label"),
        (
            {"path": ["a", "b"], "label": [1, np.nan]},
            "frame: column 'label' is float64, must be text or whole numbers: "
            "frame['label'].astype('Int64').astype(str), for instance",
        ),
        (
            {"path": ["a"], "label": ["x"], "old": [True]},
            "frame: column 'old' is bool, must be text, whole numbers or floats: drop it, or use "
            "frame['old'].astype(int), for instance",
        ),
        (
            {"path": ["a", "b"], "label": ["x", 5]},
            "frame: column 'label', row 1: is 5, the column must be text throughout: "
            "frame['label'].astype(str), for instance",
        ),
        (
            {"path": ["a"], "label": ["\udcff"]},
            "frame: '\\udcff' in a cell is no character of UTF-8; such a name cannot stand in a "
            "CSV",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_frames_that_are_refused(columns, message):
    frame = pandas.DataFrame(
        {
            # As older versions have all text, and this one what its own type cannot hold.
            name: pandas.Series(values, dtype=object if isinstance(values[0], str) else None)
            for name, values in columns.items()
        }
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dump_frame(frame, folder="/")


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"label": ["x", None]}, "line 3: the cell label is empty, every row needs one"),
        ({"label": ["x", "y"], "n": [1.5, np.inf]}, "line 3: n is 'inf', must be a finite number"),
        ({"label": ["x", "y"], "key": ["k", "k"]}, "two inputs have the key 'k': "),
        ({"label": ["x", "y"], "size": [1, 2]}, "the schema has a feature 'size': rename"),
    ],
    ids=str,
)
def test_rows_are_held_to_what_a_csv_is_held_to(folder, tmp_path, columns, message):
    frame = pandas.DataFrame({"path": ["sub/p0.jpg", "sub/p1.jpg"], **columns})
    config = from_dataframe(frame, output=tmp_path / "out", folder=folder)
    with pytest.raises(DataError, match=re.escape(message)):
        ingest_images(config)


def test_a_table_that_is_there_with_other_rows_is_left_alone(folder, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("mine")
    with pytest.raises(DataError, match=f"^table {table}: is there already and holds other rows"):
        from_dataframe(frame_of(folder), output=tmp_path / "out", folder=folder, table=table)
    assert table.read_text() == "mine"
    for name in ("t.txt", "a[1].csv", "*.csv"):
        with pytest.raises(ValueError, match=f"^table {re.escape(str(tmp_path / name))}: "):
            from_dataframe(frame_of(folder), output=tmp_path / "out", table=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_an_option_that_there_is_not(folder, tmp_path):
    with pytest.raises(TypeError, match="image_size"):
        from_dataframe(frame_of(folder), output=tmp_path / "out", image_size=3)
    assert list(tmp_path.iterdir()) == []


def test_a_frame_in_one_process_needs_no_pandas_of_ours():
    text = Path(__file__).parents[1].joinpath("pipeline", "frames.py").read_text()
    assert not re.search(r"^\s*(import|from) pandas", text, re.MULTILINE)
