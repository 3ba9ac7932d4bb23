"""Several labels an input, and none: read, stored, read back by TensorFlow, verified, refused."""

import collections
import copy
import json
import shutil
import struct

import apache_beam as beam
import google_crc32c
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from apache_beam.testing.util import assert_that, equal_to
from helpers import draw, ingest

from pipeline import dataset as reader
from pipeline.__main__ import main
from pipeline.repeat import command_of, plain_reader_of, reader_of
from pipeline.verify import verify_dataset
from transforms import example, manifest
from transforms.globs import list_glob
from transforms.image import PixelPolicy, estimate_bytes
from transforms.labels import ONE_LABEL, Labelling, label_order
from transforms.manifest import load_manifest
from transforms.records import DataError, Exclusions, Grouping, ImageRef, Input, Reject
from transforms.screen import screen_image
from transforms.shards import SplitSize
from transforms.stats import CountImages, DecideLabels, digest_ref
from transforms.tables import list_csv

MANY, NONE = Labelling("many", "|"), Labelling("none")
FLAGS = ["--image-size", "24x16", "--split", "train=0.6,validation=0.4", "--shards", "3"]
CELLS = ("cat", "dog|cat", "bird | dog|dog", "dog")
TRUTH = (("cat",), ("cat", "dog"), ("bird", "dog"), ("dog",))
LABELS = ("bird", "cat", "dog")


def truth_of(key: str) -> tuple[str, ...]:
    return TRUTH[int(key.split(".")[0]) % 4]


# Pure functions.


@pytest.mark.parametrize(
    ("text", "separator", "label"),
    [
        ("cat", "|", "cat"),
        ("dog|cat", "|", "cat|dog"),
        (" dog |\u00a0cat|dog", "|", "cat|dog"),
        ("10|9|x|1", "|", "1|9|10|x"),
        ("a, b,c", ", ", "a, b,c"),
        ("b::a", "::", "a::b"),
        ("Cat|cat", "|", "Cat|cat"),
    ],
)
def test_several_names_are_read_as_a_set(text, separator, label):
    labelling = Labelling("many", separator)
    assert labelling.read(text) == label
    assert labelling.read(label) == label
    assert separator.join(labelling.split(label)) == label


@pytest.mark.parametrize(
    ("text", "separator", "said"),
    [
        ("cat|", "|", "'cat|' has an empty part"),
        ("|cat", "|", "'|cat' has an empty part"),
        ("cat||dog", "|", "'cat||dog' has an empty part"),
        ("cat| |dog", "|", "'cat| |dog' has an empty part"),
        ("", "|", "'' has an empty part"),
        # Sorted and joined, it would come apart as a and |b.
        ("b||a|", "||", "'b||a|' has a part that cannot be told from '||'"),
    ],
)
def test_names_that_cannot_be_told_are_refused(text, separator, said):
    with pytest.raises(ValueError) as caught:
        Labelling("many", separator).read(text)
    assert str(caught.value) == said


def test_one_label_and_none():
    assert ONE_LABEL.read(" dog|cat ") == " dog|cat "
    assert ONE_LABEL.split("dog|cat") == ("dog|cat",)
    assert ONE_LABEL.look_up("dog|cat", {"dog|cat": 3}) == ("dog|cat", 3)
    assert NONE.read("dog") == ""
    assert NONE.split("") == ()
    assert NONE.look_up("", {}) == (None, None)


def test_ids_rise_and_names_follow_them():
    assert MANY.look_up("cat|dog", {"dog": 0, "cat": 4}) == (("dog", "cat"), (0, 4))
    assert MANY.look_up("cat", {"dog": 0, "cat": 4}) == (("cat",), (4,))


def test_the_order_of_labels_knows_whole_numbers_of_any_length():
    labels = ["x", "9" * 5000, "10", "٣", "2", "007", "7", "0", "00"]
    ordered = ["0", "00", "2", "007", "7", "10", "9" * 5000, "x", "٣"]
    assert sorted(labels, key=label_order) == ordered


@pytest.mark.parametrize(
    ("schema", "kind", "names"),
    [
        ("flowers", "many", {"class": "int64", "label": "bytes"}),
        ("imagenet", "many", {"image/class/label": "int64", "image/class/text": "bytes"}),
        ("tfds", "many", {"label": "int64"}),
        ("flowers", "none", {}),
        ("imagenet", "none", {}),
        ("tfds", "none", {}),
    ],
)
def test_features_of_a_schema(schema, kind, names):
    one = {spec.name: spec for spec in example.feature_specs(schema, classes=300)}
    found = {spec.name: spec for spec in example.feature_specs(schema, classes=300, kind=kind)}
    lists = {spec.name: spec.dtype for spec in found.values() if spec.shape == example.ANY_LENGTH}
    assert lists == names
    of_class = {"class", "label", "image/class/label", "image/class/text"}
    kept = {name: spec for name, spec in one.items() if name not in of_class}
    assert {name: spec for name, spec in found.items() if name not in names} == kept


def test_a_list_of_any_length_holds_one_value_or_more():
    spec = example.FeatureSpec("class", "int64", example.ANY_LENGTH)
    for count in (1, 3):
        example.check_features({"class": ("int64", [0] * count)}, specs=[spec])
    for found, said in (
        (("int64", []), "holds 0 x int64, must be 1 or more x int64"),
        (("bytes", [b""]), "holds 1 x bytes, must be 1 or more x int64"),
    ):
        with pytest.raises(ValueError, match=said):
            example.check_features({"class": found}, specs=[spec])


@pytest.mark.parametrize(
    ("label", "known", "detail"),
    [
        ("cat|dog", {"cat", "dog", "yew"}, None),
        ("cat|dog", {"cat"}, "'dog': not in --class-names"),
        ("ant|cat|dog", {"cat"}, "'ant', 'dog': not in --class-names"),
        ("cat|dog", None, None),
    ],
)
def test_an_input_with_any_unknown_label_is_rejected(label, known, detail):
    ref = ImageRef("k", "/k", label)
    found = screen_image(ref, Exclusions(), known=known and frozenset(known), labelling=MANY)
    assert found == (Reject("k", "/k", label, "unknown_label", detail) if detail else ref)


# The listing, and what is counted before any shard is written.


def test_folders_name_several_labels_or_none(tmp_path):
    for name in ("dog|cat/1.png", "cat|/2.png", "ash/deep/er/3.png", "4.png"):
        draw(tmp_path / name, seed=1, size=(8, 8))
    source = Input(f"{tmp_path}/**.png")

    def listed(labelling):
        found = list_glob(source, root=str(tmp_path), grouping=Grouping(), labelling=labelling)
        return {item.key: item for item in found}

    many = listed(MANY)
    assert many["dog|cat/1.png"].label == "cat|dog"
    assert many["ash/deep/er/3.png"].label == "er"
    bad = many["cat|/2.png"]
    assert (bad.reason, bad.label) == ("bad_name", "cat|")
    assert bad.detail == "the label 'cat|' has an empty part"
    none = listed(NONE)
    assert sorted(none) == ["4.png", "ash/deep/er/3.png", "cat|/2.png", "dog|cat/1.png"]
    assert {(type(item), item.label) for item in none.values()} == {(ImageRef, "")}


def read_csv(path, text, labelling):
    path.write_text(text)
    return list(
        list_csv(Input(str(path)), grouping=Grouping(), reserved=("class",), labelling=labelling)
    )


def test_a_csv_of_several_labels_or_none(tmp_path):
    path = tmp_path / "t.csv"
    _, first, second = read_csv(path, 'path,label\na.png,"dog | cat"\nb.png,|\n', MANY)
    assert first == ImageRef("a.png", f"{tmp_path}/a.png", "cat|dog")
    assert second.detail == "the label '|' has an empty part"
    columns, ref = read_csv(path, "path,age:int\na.png,4\n", NONE)
    assert [spec.name for spec in columns.specs] == ["age"]
    assert ref == ImageRef("a.png", f"{tmp_path}/a.png", "", features=(("age", 4),))


@pytest.mark.parametrize(
    ("text", "labelling", "said"),
    [
        ("path,label\na,b\n", NONE, "--unlabelled: {} has a column label: drop the column, or the"),
        ("key\na\n", NONE, "{}: no column 'path' in the header 'key'; needed is path[,split]"),
        ("path\na\n", MANY, "{}: no column 'label' in the header 'path'; needed is path,label["),
        ("path,label\na,\n", MANY, "{}, line 2: the cell label is empty, every row needs one"),
        ("path,class\na,1\n", NONE, "{}: the schema has a feature 'class': rename the column"),
    ],
)
def test_a_csv_that_does_not_fit(tmp_path, text, labelling, said):
    path = tmp_path / "t.csv"
    with pytest.raises(DataError) as caught:
        read_csv(path, text, labelling)
    assert str(caught.value).startswith(said.format(path))


def test_images_count_once_and_labels_each():
    policy = PixelPolicy(width=8, height=8)
    refs = [ImageRef("1", "/1", "cat|dog", "a"), ImageRef("2", "/2", "dog", "a")]
    total = SplitSize(2, 2 * estimate_bytes(-1, policy=policy), sum(map(digest_ref, refs)) % 2**128)
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        sizes = pipeline | beam.Create(refs) | CountImages(policy, labelling=MANY)
        nothing = SplitSize(0, 0)
        expected = {("a", ""): total, ("a", "cat"): nothing, ("a", "dog"): nothing}
        assert_that(sizes, equal_to([expected]))
        labels = sizes | DecideLabels(("dog", "yew"))
        assert_that(labels, equal_to([("dog", "yew", "cat")]), label="Labels")


# From end to end.


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """40 pictures; a table of their labels, one of which has an empty part, and one of none."""
    folder = tmp_path_factory.mktemp("inputs")
    for number in range(41):
        draw(folder / f"{number}.png", seed=number, size=(48, 32))
    rows = [f"{n}.png,{CELLS[n % 4]}" for n in range(40)]
    (folder / "many.csv").write_text("\n".join(["path,label", *rows, "40.png,cat||dog", ""]))
    rows = [f"{n}.png,{n}" for n in range(40)]
    (folder / "none.csv").write_text("\n".join(["path,age:int", *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def many(inputs, tmp_path_factory):
    """The set of several labels in each schema, with --label-offset 1."""
    folder = tmp_path_factory.mktemp("many")
    flags = ["--label-separator", "|", "--label-offset", "1", "--max-reject-rate", "0.05"]
    for schema in example.SCHEMAS:
        output = folder / schema
        assert ingest(inputs / "many.csv", output, *FLAGS, *flags, "--schema", schema) == 0
    return folder


@pytest.fixture(scope="module")
def none(inputs, tmp_path_factory):
    """The set without labels in each schema."""
    folder = tmp_path_factory.mktemp("none")
    for schema in example.SCHEMAS:
        flags = ["--unlabelled", "--schema", schema]
        assert ingest(inputs / "none.csv", folder / schema, *FLAGS, *flags) == 0
    return folder


def records_of(folder, spec, split="*"):
    """Parsed by TensorFlow alone."""
    paths = sorted(tf.io.gfile.glob(f"{folder}/{split}-*.tfrecord"))
    for record in tf.data.TFRecordDataset(paths):
        yield tf.io.parse_single_example(record, spec)


def rows_of(folder):
    for path in sorted((folder / "index").glob("*.parquet")):
        yield from pyarrow.parquet.read_table(path).to_pylist()


NAMES = {
    "flowers": ("key", "class", "label"),
    "imagenet": ("image/filename", "image/class/label", "image/class/text"),
    "tfds": ("file_name", "label", None),
}


@pytest.mark.parametrize("schema", example.SCHEMAS)
def test_several_labels_are_what_tensorflow_reads(many, schema):
    key, ids, texts = NAMES[schema]
    spec = {
        key: tf.io.FixedLenFeature([], tf.string),
        ids: tf.io.RaggedFeature(tf.int64),
    }
    if texts:
        spec[texts] = tf.io.VarLenFeature(tf.string)
    if schema == "flowers":
        spec["one_hot_class"] = tf.io.FixedLenFeature([3], tf.float32)
    seen = set()
    for record in records_of(many / schema, spec):
        name = record[key].numpy().decode()
        right = truth_of(name)
        assert record[ids].numpy().tolist() == [LABELS.index(label) + 1 for label in right]
        if texts:
            found = record[texts].values.numpy().tolist()
            assert [text.decode() for text in found] == list(right)
        if schema == "flowers":
            hot = [float(label in right) for label in LABELS]
            assert record["one_hot_class"].numpy().tolist() == hot
        seen.add(name)
    assert seen == {f"{number}.png" for number in range(40)}


@pytest.mark.parametrize("schema", example.SCHEMAS)
def test_without_labels_no_feature_speaks_of_them(none, schema):
    names = {spec.name for spec in example.feature_specs(schema, classes=0, kind="none")}
    assert not names & {"class", "label", "one_hot_class", "image/class/label", "image/class/text"}
    paths = sorted(map(str, (none / schema).glob("*.tfrecord")))
    ages = set()
    for record in tf.data.TFRecordDataset(paths).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        assert set(features) == names | {"age"}
        ages.add(features["age"].int64_list.value[0])
    assert ages == set(range(40))


def test_index_rejects_and_dataset_json_of_several_labels(many):
    folder = many / "flowers"
    for row in rows_of(folder):
        right = truth_of(row["key"])
        assert row["label"] == "|".join(right)
        assert row["class"] == [LABELS.index(label) for label in right]
    (reject,) = map(json.loads, (folder / "rejects.jsonl").read_text().splitlines())
    assert (reject["key"], reject["label"], reject["reason"]) == ("40.png", "cat||dog", "bad_name")
    contents = load_manifest(str(folder))
    assert contents.labels == LABELS
    assert (contents.label_kind, contents.labelling) == ("many", MANY)
    assert contents.config["label_separator"] == "|"
    assert contents.features["class"] == {"dtype": "int64", "shape": [-1], "default": None}
    assert contents.features["label"] == {"dtype": "bytes", "shape": [-1], "default": None}
    assert contents.features["one_hot_class"]["shape"] == [3]
    counts = collections.Counter()
    for split in contents.splits.values():
        assert list(split.classes) == list(LABELS)
        counts.update(split.classes)
    assert counts == {"bird": 10, "cat": 20, "dog": 30}


def test_index_and_dataset_json_without_labels(none):
    folder = none / "flowers"
    assert {(row["label"], row["class"]) for row in rows_of(folder)} == {("", -1)}
    contents = load_manifest(str(folder))
    assert (contents.labels, contents.label_kind) == ((), "none")
    assert contents.config["unlabelled"] is True
    assert {tuple(split.classes) for split in contents.splits.values()} == {()}
    assert set(contents.features) == {"image", "key", "size", "age"}


def test_a_set_of_one_label_says_nothing_of_either(dataset):
    document = json.loads((dataset / "dataset.json").read_text())
    assert not {"label_separator", "unlabelled"} & set(document["config"])
    contents = load_manifest(str(dataset))
    assert (contents.label_kind, contents.labelling) == ("one", ONE_LABEL)


def test_the_order_of_cells_and_rows_changes_no_byte(many, inputs, tmp_path):
    rows = (inputs / "many.csv").read_text().splitlines()
    turned = [
        f"{p},{'|'.join(reversed(c.split('|')))}" for p, c in (r.split(",") for r in rows[1:])
    ]
    (inputs / "turned.csv").write_text("\n".join([rows[0], *reversed(turned), ""]))
    flags = ["--label-separator", "|", "--label-offset", "1", "--max-reject-rate", "0.05"]
    engine = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    assert ingest(inputs / "turned.csv", tmp_path / "out", *FLAGS, *flags, *engine) == 0
    mine, other = (load_manifest(str(path)) for path in (many / "flowers", tmp_path / "out"))
    assert mine.fingerprint == other.fingerprint


def test_class_names_reject_or_append(inputs, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("dog\nyew\ncat\n")
    flags = ["--label-separator", "|", "--class-names", str(names), "--max-reject-rate", "0.5"]
    assert ingest(inputs / "many.csv", tmp_path / "reject", *FLAGS, *flags) == 0
    contents = load_manifest(str(tmp_path / "reject"))
    assert contents.labels == ("dog", "yew", "cat")
    assert contents.rejects == {"bad_name": 1, "unknown_label": 10}
    lines = map(json.loads, (tmp_path / "reject" / "rejects.jsonl").read_text().splitlines())
    details = {line["detail"] for line in lines if line["reason"] == "unknown_label"}
    assert details == {"'bird': not in --class-names"}
    # In the order of the ids, which is not that of the names.
    assert {tuple(row["class"]) for row in rows_of(tmp_path / "reject")} == {(2,), (0, 2), (0,)}
    append = [*flags, "--new-classes", "append"]
    assert ingest(inputs / "many.csv", tmp_path / "append", *FLAGS, *append) == 0
    assert load_manifest(str(tmp_path / "append")).labels == ("dog", "yew", "cat", "bird")
    for folder in ("reject", "append"):
        assert verify_dataset(str(tmp_path / folder), depth="deep", sources=40) == []


def test_resume_knows_the_separator(many, inputs, tmp_path, capsys):
    copied = shutil.copytree(many / "flowers", tmp_path / "copy")
    flags = [*FLAGS, "--label-offset", "1", "--max-reject-rate", "0.05", "--resume"]
    assert ingest(inputs / "many.csv", copied, *flags, "--label-separator", "|") == 0
    assert ingest(inputs / "many.csv", copied, *flags, "--label-separator", "+") == 1
    assert '--label-separator "|" then, "+" now' in capsys.readouterr().err
    assert ingest(inputs / "none.csv", copied, *FLAGS, "--resume", "--unlabelled") == 1
    assert '--label-separator "|" then, null now' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a|b", " a"])
def test_class_names_that_no_input_can_have_are_refused(inputs, tmp_path, capsys, name):
    (tmp_path / "names.txt").write_text(f"cat\n{name}\n")
    flags = ["--label-separator", "|", "--class-names", str(tmp_path / "names.txt")]
    assert ingest(inputs / "many.csv", tmp_path / "out", *FLAGS, *flags) == 1
    said = capsys.readouterr().err
    assert f"--class-names {tmp_path}/names.txt, line 2: {name!r} holds --label-separator |" in said


def test_copies_with_equal_sets_of_labels_are_no_conflict(tmp_path, capsys):
    draw(tmp_path / "in" / "a.png", seed=1)
    for name in "bc":
        shutil.copy(tmp_path / "in" / "a.png", tmp_path / "in" / f"{name}.png")
    draw(tmp_path / "in" / "d.png", seed=2)
    table = tmp_path / "in" / "t.csv"
    flags = ["--label-separator", "|", "--image-size", "16", "--duplicates", "drop"]
    for number, third, conflicts in ((1, "dog|cat|dog", 0), (2, "cat", 1)):
        table.write_text(f"path,label\na.png,cat|dog\nb.png,dog|cat\nc.png,{third}\nd.png,x\n")
        output = tmp_path / f"out{number}"
        assert ingest(table, output, *flags) == 0
        assert f"under several keys: 1, with several labels: {conflicts}" in capsys.readouterr().out
        (line,) = map(json.loads, (output / "duplicates.jsonl").read_text().splitlines())
        third = "cat" if conflicts else "cat|dog"
        assert line["labels"] == ["cat|dog", "cat|dog", third]
        assert verify_dataset(str(output), depth="deep", sources=4, leakage=True) == []


def test_unlabelled_pictures_lie_at_any_depth(tmp_path, capsys):
    names = ["1.png", "a/2.png", "a/b/c/3.png"]
    for number, name in enumerate(names):
        draw(tmp_path / "in" / name, seed=number)
    shutil.copy(tmp_path / "in" / "1.png", tmp_path / "in" / "z.png")
    flags = ["--image-size", "16", "--unlabelled", "--duplicates", "together"]
    assert ingest(f"{tmp_path}/in/**.png", tmp_path / "out", *flags) == 0
    assert "under several keys: 1, with several labels: 0" in capsys.readouterr().out
    assert sorted(row["key"] for row in rows_of(tmp_path / "out")) == [*names, "z.png"]
    assert main(["verify", str(tmp_path / "out"), "--deep", "--sources", "4", "--leakage"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--unlabelled", "--label-separator", "|"], "--unlabelled, --label-separator |: without"),
        (["--unlabelled", "--class-names", "f"], "--unlabelled, --class-names f: without labels"),
        (["--unlabelled", "--label-offset", "1"], "--unlabelled, --label-offset 1: without labels"),
        (["--unlabelled", "--input", "idx:mnist"], "--unlabelled: IDX files have one label"),
        (["--label-separator", "|", "--input", "idx:d"], "--label-separator: IDX files have one"),
        (["--label-separator", ""], "--label-separator '': must be one or more printable"),
        (["--label-separator", "\t"], "--label-separator '\\t': must be one or more printable"),
        (["--label-separator", "/"], "--label-separator /: no folder's name holds a /, so no"),
    ],
)
def test_flags_that_contradict_each_other(tmp_path, capsys, flags, said):
    assert main(["ingest", "--input", f"{tmp_path}/*", "--output", f"{tmp_path}/o", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tpufeed ingest: error: {said}") and error.count("\n") == 1


# verify.


@pytest.mark.parametrize("schema", example.SCHEMAS)
def test_verify_finds_nothing_and_reads_every_source_again(many, none, schema):
    for folder in (many / schema, none / schema):
        assert main(["verify", str(folder), "--deep", "--sources", "50", "--leakage"]) == 0


def first_shard(folder):
    shards = json.loads((folder / "dataset.json").read_text())["splits"]["train"]["shards"]
    return folder / next(shard["name"] for shard in shards if shard["records"] >= 3)


def test_any_byte_flipped_in_a_shard_of_lists_is_found(many, tmp_path):
    copied = shutil.copytree(many / "flowers", tmp_path / "copy")
    shard = first_shard(copied)
    whole = shard.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 40).tolist():
        broken = bytearray(whole)
        broken[place] ^= 1 << (place % 8)
        shard.write_bytes(broken)
        assert "checksum does not match" in verify_dataset(str(copied))[0]


def rewrite_first(shard, change) -> None:
    """Changes the first record's features, keeps its length, and makes its checksum right."""
    whole = bytearray(shard.read_bytes())
    (length,) = struct.unpack_from("<Q", whole)
    message = tf.train.Example.FromString(bytes(whole[12 : 12 + length]))
    change(message.features.feature)
    features = {}
    for name, feature in message.features.feature.items():
        features[name] = list(getattr(feature, feature.WhichOneof("kind")).value)
    data = example.encode_example(features)
    assert len(data) == length, "the change must keep the length"
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    whole[12 : 16 + length] = data + struct.pack("<I", masked)
    shard.write_bytes(whole)


def rename(features, old, new):
    features[new].CopyFrom(features[old])
    del features[old]


def swap(values):
    values[:] = list(reversed(values))


RECORD_CHANGES = {
    "another class": (lambda f: f["class"].int64_list.value.__setitem__(1, 2), "classes is "),
    "an unknown class": (lambda f: f["class"].int64_list.value.__setitem__(0, 9), "class 9 with"),
    "another text": (
        lambda f: f["label"].bytes_list.value.__setitem__(0, b"owl"),
        "labels in the order of its classes is ",
    ),
    "another multi-hot": (
        lambda f: swap(f["one_hot_class"].float_list.value),
        "one_hot_class is ",
    ),
    "no class": (lambda f: rename(f, "class", "klass"), "feature 'class' is missing"),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Three records of cat and dog, one of owl, in one shard; read only."""
    folder = tmp_path_factory.mktemp("four")
    for number in range(4):
        draw(folder / "in" / f"{number}.png", seed=number, size=(16, 16))
    rows = [f"{number}.png,cat|dog" for number in range(3)]
    (folder / "in" / "t.csv").write_text("\n".join(["path,label", *rows, "3.png,owl", ""]))
    flags = ["--label-separator", "|", "--image-size", "16", "--shards", "1", "--class-names"]
    (folder / "names").write_text("cat\ndog\nowl\n")
    assert ingest(folder / "in" / "t.csv", folder / "out", *flags, str(folder / "names")) == 0
    return folder


@pytest.fixture
def pure(four, tmp_path):
    return shutil.copytree(four / "out", tmp_path / "pure")


@pytest.fixture
def pair_first(pure):
    """The shard, whose first record is one of two labels."""
    assert next(rows_of(pure))["label"] == "cat|dog"
    return first_shard(pure)


@pytest.mark.parametrize("name", RECORD_CHANGES)
def test_a_record_of_other_labels_is_found(pair_first, name):
    change, said = RECORD_CHANGES[name]
    rewrite_first(pair_first, change)
    findings = verify_dataset(str(pair_first.parent))
    assert findings[0].startswith(f"{pair_first.name}: record 0: {said}"), findings


def test_a_record_whose_classes_do_not_rise_is_found(pair_first):
    rewrite_first(pair_first, lambda f: swap(f["class"].int64_list.value))
    (finding, *_) = verify_dataset(str(pair_first.parent))
    assert finding == f"{pair_first.name}: record 0: classes [1, 0] do not rise, each once"


def rewrite_index(folder, change):
    path = next((folder / "index").glob("*.parquet"))
    table = pyarrow.parquet.read_table(path)
    rows = copy.deepcopy(table.to_pylist())
    change(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "cat"}, "labels of its classes is ['cat', 'dog'], index/ says ['cat']"),
        (
            {"label": "dog|owl"},
            "labels of its classes is ['cat', 'dog'], index/ says ['dog', 'owl'",
        ),
        ({"class": [0]}, "classes is [0, 1], index/ says [0]"),
        ({"class": []}, "classes is [0, 1], index/ says []"),
        ({"class": [1, 0]}, "classes is [0, 1], index/ says [1, 0]"),
    ],
)
def test_an_index_of_other_labels_is_found(pair_first, change, said):
    rewrite_index(pair_first.parent, lambda rows: rows[0].update(change))
    (finding, *_) = verify_dataset(str(pair_first.parent))
    assert finding.startswith(f"{pair_first.name}: record 0: {said}")


def edit(folder, change):
    path = folder / "dataset.json"
    document = json.loads(path.read_text())
    change(document)
    document["fingerprint"] = manifest.fingerprint(document)
    path.write_text(json.dumps(document))


def shape_one(document):
    for name in ("class", "label"):
        document["features"][name]["shape"] = []


MANIFEST_CHANGES = {
    "count": (lambda d: d["splits"]["train"]["classes"].update(cat=2), "splits.train.classes is"),
    "more than records": (
        lambda d: d["splits"]["train"]["classes"].update(cat=9),
        "splits.train.classes are ",
    ),
    "separator": (lambda d: d["config"].update(label_separator="+"), ""),
    "no separator": (
        lambda d: d["config"].pop("label_separator"),
        "config.label_separator is None",
    ),
    "one label": (shape_one, ""),
    "no labels": (lambda d: [d["features"].pop(n) for n in ("class", "label")], ""),
}


@pytest.mark.parametrize("name", MANIFEST_CHANGES)
def test_any_change_of_dataset_json_is_found(pure, name):
    change, said = MANIFEST_CHANGES[name]
    edit(pure, change)
    findings = verify_dataset(str(pure))
    assert findings and any(said in finding for finding in findings), findings


def test_a_source_of_other_labels_is_found(pure, four):
    table = (four / "in" / "t.csv").read_text()
    (four / "in" / "u.csv").write_text(table.replace("1.png,cat|dog", "1.png,dog|owl"))
    edit(pure, lambda d: d["config"]["inputs"][0].update(pattern=f"{four}/in/u.csv"))
    findings = verify_dataset(str(pure), sources=4)
    assert f"{f'{four}/in/1.png'!r}: its label is 'dog|owl', index/ says 'cat|dog'" in findings
    assert any("record '1.png': class [0, 1], but " in finding for finding in findings), findings


def test_a_class_where_there_are_no_labels_is_found(none, tmp_path):
    copied = shutil.copytree(none / "tfds", tmp_path / "copy")
    shard = first_shard(copied)

    def change(features):
        features["label"].int64_list.value.append(1)
        # As many bytes less as the feature takes more.
        picture = features["image"].bytes_list
        picture.value[0] = picture.value[0][: -len(example.encode_example({"label": [1]})) + 2]

    rewrite_first(shard, change)
    findings = verify_dataset(str(copied))
    assert "feature 'label', but by dataset.json there are no labels" in findings[0]


# The reader.


@pytest.mark.parametrize("schema", example.SCHEMAS)
@pytest.mark.parametrize("training", [True, False])
def test_the_reader_gives_several_labels_as_ones(many, schema, training):
    key = NAMES[schema][0]
    options = {"repeat": False, "drop_remainder": False} if training else {}
    data = reader.open_dataset(
        many / schema, batch_size=7, training=training, features=[key], **options
    )
    first, label, *weights = data.element_spec
    assert (label.dtype, label.shape[1:]) == (tf.float32, [3])
    assert first["image"].dtype == tf.uint8
    seen = collections.Counter()
    for batch in data:
        weight = batch[2].numpy() if weights else np.ones(len(batch[1]))
        for name, hot, counts in zip(batch[0][key].numpy(), batch[1].numpy(), weight, strict=True):
            if not counts:
                assert not hot.any()
                continue
            assert hot.tolist() == [float(x in truth_of(name.decode())) for x in LABELS]
            seen[name] += 1
    assert set(seen.values()) == {1}
    assert len(seen) == load_manifest(str(many / schema)).splits["train"].records


def test_the_reader_gives_what_has_no_labels_alone(none):
    images = 0
    data = reader.open_dataset(none / "flowers", batch_size=5, repeat=False)
    assert data.element_spec == tf.TensorSpec([5, 16, 24, 3], tf.uint8)
    for image in data:
        images += len(image)
    records = load_manifest(str(none / "flowers")).splits["train"].records
    assert images == records // 5 * 5
    data = reader.open_dataset(none / "flowers", batch_size=7, training=False, features=["age"])
    ages = []
    for first, weight in data:
        assert first["image"].shape == (7, 16, 24, 3)
        ages += first["age"].numpy()[weight.numpy() > 0].tolist()
    assert len(set(ages)) == len(ages) == records


@pytest.mark.parametrize("cache", ["memory", "folder"])
def test_caches_hold_several_labels_and_none(many, none, tmp_path, cache):
    for folder, parts in ((many / "tfds", 2), (none / "tfds", 1)):
        path = cache if cache == "memory" else tmp_path
        data = reader.open_dataset(folder, batch_size=4, repeat=False, cache=path)
        for _ in range(2):
            batches = list(data)
            assert batches and all(
                (len(b) if isinstance(b, tuple) else 1) == parts for b in batches
            )


def test_a_list_makes_no_batch(many):
    for name in ("class", "label"):
        with pytest.raises(ValueError, match=f"features {name!r}: a list of another length in"):
            reader.open_dataset(many / "flowers", features=[name])
    data = reader.open_dataset(many / "flowers", batch_size=4, features=["one_hot_class"])
    first, label = next(iter(data))
    assert first["one_hot_class"].numpy().tolist() == label.numpy().tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f["class"].int64_list.value.__setitem__(0, 9),
            "a record has no class, or one that is none of the 3 that dataset.json names",
        ),
        (
            lambda f: rename(f, "class", "klass"),
            "a record has no class, or one that is none of the 3 that dataset.json names",
        ),
        (
            lambda f: (
                rename(f, "class", "klass"),
                rename(f, "label", "class"),
                rename(f, "klass", "label"),
            ),
            "a record has no feature 'class' of type int64[...]",
        ),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_record_that_cannot_be_read_names_the_file(pair_first, change, said, training):
    rewrite_first(pair_first, change)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(reader.open_dataset(pair_first.parent, batch_size=2, training=training).take(9))
    assert (
        reader.find_fault(caught.value) == f"{pair_first}: {said}: run tpufeed verify on its folder"
    )


@pytest.mark.parametrize("ids", [[[0, 2], [1]], [[2], [0, 1, 2]]])
def test_multi_hot_eagerly_and_in_a_map(ids):
    sparse = tf.ragged.constant(ids, tf.int64).to_sparse()
    expected = [[i in row for i in range(3)] for row in ids]
    assert reader.multi_hot(sparse, classes=3).numpy().tolist() == expected
    data = tf.data.Dataset.from_tensors(sparse).map(lambda s: reader.multi_hot(s, classes=3))
    assert data.get_single_element().numpy().tolist() == expected


@pytest.mark.parametrize("ids", [[[0], []], [[3]], [[-1, 0]]])
def test_multi_hot_refuses_what_is_no_class(ids):
    with pytest.raises(tf.errors.InvalidArgumentError):
        reader.multi_hot(tf.ragged.constant(ids, tf.int64, 1).to_sparse(), classes=3)


def test_keras_learns_several_labels_by_sigmoid_cross_entropy(many):
    """As docs/labels.md shows it."""
    data = reader.open_dataset(many / "flowers", batch_size=8, image_dtype=tf.float32)
    model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("adam", loss, weighted_metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.0)])
    evaluation = reader.open_dataset(
        many / "flowers",
        split="validation",
        batch_size=8,
        training=False,
        image_dtype=tf.float32,
    )
    history = model.fit(data, steps_per_epoch=2, validation_data=evaluation, verbose=0)
    assert np.isfinite(history.history["val_loss"]).all()


def test_sets_of_another_kind_are_not_read_as_one(many, none):
    with pytest.raises(ValueError, match="label_kind is 'many' in .* and 'none' in "):
        reader.open_dataset([many / "flowers", none / "flowers"])


# The other commands.


def test_train_launch_and_analyze_refuse_by_name(many, none, tmp_path, capsys):
    for folder, have in (
        (many / "flowers", "several labels each"),
        (none / "flowers", "no labels"),
    ):
        said = f"--data {folder}: the records have {have}, and tpufeed train learns one class for"
        flags = ["--model", "lenet5"]
        assert main(["train", "--data", str(folder), *flags]) == 1
        assert said in capsys.readouterr().err
        words = ["launch", "--data", str(folder), "--backend", "local", "--output"]
        assert main([*words, str(tmp_path / "run"), "--", *flags]) == 1
        assert said in capsys.readouterr().err
    folder = none / "flowers"
    assert main(["analyze", "--data", str(folder), "--output", str(tmp_path / "a")]) == 1
    assert f"{folder}: the records have no labels (--unlabelled)" in capsys.readouterr().err


def test_analyze_counts_pixels_once_and_finds_every_label(many, tmp_path):
    pytest.importorskip("tensorflow_transform", reason="tensorflow-transform is not installed")
    from pipeline.transform_fn import load_transform

    assert main(["analyze", "--data", str(many / "imagenet"), "--output", str(tmp_path / "a")]) == 0
    contents = load_manifest(str(many / "imagenet"))
    transform = load_transform(str(tmp_path / "a"), manifest=contents)
    assert transform.mean == pytest.approx(contents.channel_mean, abs=1e-9)


def test_inspect_shows_several_labels_and_none(many, none, capsys):
    assert main(["inspect", str(many / "flowers")]) == 0
    assert "40 records, 3 classes, several a record, 24x16" in capsys.readouterr().out
    assert main(["inspect", str(many / "flowers"), "--record", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    right = list(truth_of(facts["key"]))
    assert (facts["label"], facts["features"]["label"]) == ("|".join(right), right)
    assert facts["features"]["class"] == [number + 1 for number in facts["class"]]
    assert main(["inspect", str(none / "flowers")]) == 0
    assert "40 records, no labels, 24x16" in capsys.readouterr().out
    assert main(["inspect", str(none / "imagenet"), "--record", "0", "--json"]) == 0
    assert not {"label", "class"} & set(json.loads(capsys.readouterr().out))
    assert main(["inspect", str(none / "flowers"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["labels"], facts["label_kind"]) == ([], "none")


def test_diff_of_several_labels(many, inputs, tmp_path, capsys):
    flags = ["--label-separator", "|", "--label-offset", "1", "--max-reject-rate", "0.05"]
    rows = (inputs / "many.csv").read_text().replace("0.png,cat\n", "0.png,cat|bird\n", 1)
    (inputs / "changed.csv").write_text(rows)
    assert ingest(inputs / "changed.csv", tmp_path / "new", *FLAGS, *flags) == 0
    capsys.readouterr()
    assert main(["diff", str(many / "flowers"), str(tmp_path / "new")]) == 1
    assert "label changed: 1\n  0.png: cat -> bird|cat" in capsys.readouterr().out
    assert main(["diff", str(many / "flowers"), str(many / "flowers")]) == 0


def test_report_of_several_labels_and_none(many, none, tmp_path):
    pytest.importorskip("matplotlib", reason="the report's libraries are not installed: .[report]")
    from pipeline.report import write_report
    from pipeline.survey import NO_CLASS, read_contents, survey_index

    copied = shutil.copytree(many / "flowers", tmp_path / "many")
    page = open(write_report(str(copied)), encoding="utf-8").read()
    assert "A record counts for each of its classes." in page
    contents = load_manifest(str(copied))
    survey = survey_index(str(copied), contents, contents=(), most_picks=60)
    for pick in survey.picks:
        assert LABELS[pick.class_id] in truth_of(pick.key)
    # One with two classes is shown for both.
    assert len({pick.key for pick in survey.picks}) < len(survey.picks)
    copied = shutil.copytree(none / "flowers", tmp_path / "none")
    page = open(write_report(str(copied)), encoding="utf-8").read()
    assert "The records have no labels" in page and "There is one class only" not in page
    assert page.count("<img ") == sum(
        min(12, split.records) for split in load_manifest(str(copied)).splits.values()
    )
    survey = survey_index(
        str(copied), load_manifest(str(copied)), contents=read_contents(str(copied)), most_picks=9
    )
    assert {pick.class_id for pick in survey.picks} == {NO_CLASS}


@pytest.mark.parametrize("schema", example.SCHEMAS)
def test_the_report_repeats_flags_and_its_programs_run(many, none, schema, capsys):
    for folder, flag in ((many / schema, "--label-separator '|'"), (none / schema, "--unlabelled")):
        contents = load_manifest(str(folder))
        assert flag in command_of(contents.config)
        for program in (reader_of, plain_reader_of):
            code = program(contents, directory=str(folder), split="train")
            code = code.replace("batch_size=32", "batch_size=8")
            exec(compile(code, "program", "exec"), {})
            assert "16, 24, 3)" in capsys.readouterr().out
