"""dataset.json: there and back, its fingerprint, its statistics, and what it refuses."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from transforms.example import FeatureSpec, feature_specs
from transforms.manifest import (
    Manifest,
    Shard,
    Split,
    channel_moments,
    describe_features,
    dump_manifest,
    fingerprint,
    load_manifest,
    moments_of_training,
    parse_manifest,
    summarize_splits,
)
from transforms.records import ShardSummary

SPECS = feature_specs(
    "flowers",
    classes=2,
    extra=[FeatureSpec("note", "bytes", (), b""), FeatureSpec("x", "int64", (), 0)],
)
MANIFEST = Manifest(
    tpufeed="1.0",
    libraries={"pillow": "12"},
    config={"seed": 0, "output": "/out"},
    schema="flowers",
    encoding="jpeg",
    channels=3,
    image_size=(24, 32),
    labels=("größe", "hund"),
    label_offset=1,
    features=describe_features(SPECS),
    splits={
        "test": Split(0, {"größe": 0, "hund": 0}, ()),
        "train": Split(
            3, {"größe": 1, "hund": 2}, (Shard("train-00000-of-00001.tfrecord", 3, 99, "ab"),)
        ),
    },
    channel_mean=(0.5, 0.25, 0.1),
    channel_std=(0.1, 0.2, 0.3),
    rejects={"missing": 1},
    skipped=2,
)
DUMP = """\
{
 "format": 1,
 "tpufeed": "1.0",
 "libraries": {
  "pillow": "12"
 },
 "config": {
  "seed": 0,
  "output": "/out"
 },
 "schema": "tfds",
 "encoding": "png",
 "channels": 1,
 "image_size": null,
 "labels": [
  "größe"
 ],
 "label_offset": 0,
 "features": {
  "file_name": {
   "dtype": "bytes",
   "shape": [],
   "default": null
  }
 },
 "splits": {
  "train": {
   "records": 1,
   "classes": {
    "größe": 1
   },
   "shards": [
    {
     "name": "train-00000-of-00001.tfrecord",
     "records": 1,
     "bytes": 99,
     "sha256": "ab"
    }
   ]
  }
 },
 "channel_mean": null,
 "channel_std": null,
 "rejects": {},
 "skipped": 0,
 "fingerprint": "FINGERPRINT"
}
"""


def summary(split: str, index: int = 0, **fields) -> ShardSummary:
    values = dict(
        split=split,
        index=index,
        name=f"{split}-{index:05d}-of-00002",
        records=1,
        bytes=10,
        sha256="00",
        classes=(("b", 1),),
        pixels=4,
        channel_sum=(510,),
        channel_sum_of_squares=(65025 * 2,),
    )
    return ShardSummary(**{**values, **fields})


def test_dump_golden():
    manifest = dataclasses.replace(
        MANIFEST,
        schema="tfds",
        encoding="png",
        channels=1,
        image_size=None,
        labels=("größe",),
        label_offset=0,
        features=describe_features([FeatureSpec("file_name", "bytes")]),
        splits={
            "train": Split(1, {"größe": 1}, (Shard("train-00000-of-00001.tfrecord", 1, 99, "ab"),))
        },
        channel_mean=None,
        channel_std=None,
        rejects={},
        skipped=0,
    )
    canonical = (
        '{"channel_mean":null,"channel_std":null,"channels":1,"encoding":"png",'
        '"features":{"file_name":{"default":null,"dtype":"bytes","shape":[]}},"format":1,'
        '"image_size":null,"label_offset":0,"labels":["gr\\u00f6\\u00dfe"],"rejects":{},'
        '"schema":"tfds","skipped":0,"splits":{"train":{"classes":{"gr\\u00f6\\u00dfe":1},'
        '"records":1,"shards":[{"bytes":99,"name":"train-00000-of-00001.tfrecord","records":1,'
        '"sha256":"ab"}]}}}'
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    assert dump_manifest(manifest).decode() == DUMP.replace("FINGERPRINT", digest)


def test_round_trip():
    again = parse_manifest(dump_manifest(MANIFEST), path="dataset.json")
    assert again == MANIFEST
    assert again.specs == SPECS
    assert again.records == 3
    assert dump_manifest(again) == dump_manifest(MANIFEST)


@pytest.mark.parametrize(
    "change",
    [
        {"tpufeed": "2.0"},
        {"libraries": {"pillow": "13"}},
        {"config": {"seed": 0, "output": "/elsewhere"}},
    ],
)
def test_fingerprint_does_not_depend_on_how_it_was_made(change):
    assert dataclasses.replace(MANIFEST, **change).fingerprint == MANIFEST.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "tfds"},
        {"encoding": "png"},
        {"channels": 1},
        {"image_size": (32, 24)},
        {"image_size": None},
        {"labels": ("hund", "größe")},
        {"label_offset": 0},
        {"features": {}},
        {"splits": {}},
        {"channel_mean": None},
        {"channel_std": (0.1, 0.2, 0.30000000000000004)},
        {"rejects": {}},
        {"skipped": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_depends_on_the_data(change):
    assert dataclasses.replace(MANIFEST, **change).fingerprint != MANIFEST.fingerprint


def test_fingerprint_does_not_depend_on_the_order_of_fields():
    document = json.loads(dump_manifest(MANIFEST))
    backwards = dict(reversed(document.items()))
    assert fingerprint(backwards) == fingerprint(document) == document["fingerprint"]


def edited(**changes) -> bytes:
    document = json.loads(dump_manifest(MANIFEST))
    for name, value in changes.items():
        if value is None:
            del document[name]
        else:
            document[name] = value
    if "fingerprint" not in changes:
        document["fingerprint"] = fingerprint(document)
    return json.dumps(document).encode()


SHARD = {"name": "train-00000-of-00001.tfrecord", "records": 1, "bytes": 1, "sha256": ""}


def with_shard(shard):
    return {"train": {"records": 1, "classes": {}, "shards": [shard]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "d.json: no JSON object: Expecting value: line 1 column 1 (char 0)"),
        (
            dump_manifest(MANIFEST)[:30],
            "d.json: no JSON object: Unterminated string starting at: line 3 column 13 (char 28)",
        ),
        (b"[]", "d.json: no JSON object: 'list' object has no attribute 'get'"),
        (b"{}", "d.json: format is None, this version reads 1"),
        (edited(format=2), "d.json: format is 2, this version reads 1"),
        (edited(format="1"), "d.json: format is '1', this version reads 1"),
        (edited(labels=None), "d.json: labels missing: the file was edited or cut"),
        (
            edited(skipped=None, labels=None),
            "d.json: labels, skipped missing: the file was edited or cut",
        ),
        (edited(extra=1), "d.json: unknown field 'extra': the file was edited"),
        *(
            (edited(**{name: value}), f"d.json: {what}: not as tpufeed writes it")
            for name, value, what in (
                ("labels", 5, "labels is 5"),
                ("labels", ["a", "a"], "labels is ['a', 'a']"),
                ("labels", "ab", "labels is 'ab'"),
                ("labels", ["\ud800"], "a text holds half a surrogate pair"),
                ("config", [], "config is []"),
                ("schema", ["flowers"], "schema is ['flowers']"),
                ("channels", True, "channels is True"),
                ("channels", 4, "channels is 4"),
                ("image_size", [1.5, 2], "image_size is [1.5, 2]"),
                ("label_offset", -1, "label_offset is -1"),
                ("skipped", 2**63, "skipped is 9223372036854775808"),
                ("channel_mean", [float("nan")], "channel_mean is [nan]"),
                ("channel_std", [10**400], f"channel_std is [1{'0' * 75}..."),
                ("rejects", {"corrupt": "1"}, "rejects is {'corrupt': '1'}"),
                ("features", 1, "features is 1"),
                ("features", {"a": {"dtype": "int64"}}, "features.'a' is {'dtype': 'int64'}"),
                (
                    "features",
                    {"a": {"dtype": "int64", "shape": [], "default": "0"}},
                    "features.'a' is {'dtype': 'int64', 'shape': [], 'default': '0'}",
                ),
                ("splits", [], "splits is []"),
                ("splits", {"a/../b": {}}, "the name of a split is 'a/../b'"),
                (
                    "splits",
                    {"train": {"records": 1, "classes": {}}},
                    "splits.train is {'records': 1, 'classes': {}}",
                ),
                ("splits", with_shard({"name": "x"}), "splits.train.shards[0] is {'name': 'x'}"),
            )
        ),
        (
            b"[" * 100_000,
            "d.json: no JSON object: maximum recursion depth exceeded while decoding"
            " a JSON array from a unicode string",
        ),
    ],
)
def test_parse_refuses(data, message):
    with pytest.raises(ValueError) as caught:
        parse_manifest(data, path="d.json")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name",
    [
        "../train-00000-of-00001.tfrecord",
        "/etc/train-00000-of-00001.tfrecord",
        "train-00000-of-00001.tfrecord/a",
        "test-00000-of-00001.tfrecord",
        "train-00000-of-00001.tfrecord\n",
        "train-00000-of-00001.tfrecord.gz",
        "train-00000-of-00001",
    ],
)
def test_a_shard_is_named_as_shards_are(name):
    """What reads, or removes, the files of a data set goes by these names."""
    assert parse_manifest(edited(splits=with_shard(SHARD)), path="d.json")
    with pytest.raises(ValueError, match=r"d\.json: splits\.train\.shards\[0\] is \{'name': '"):
        parse_manifest(edited(splits=with_shard({**SHARD, "name": name})), path="d.json")


def test_edits_are_noticed():
    data = dump_manifest(MANIFEST).replace(b'"skipped": 2', b'"skipped": 4')
    changed = dataclasses.replace(MANIFEST, skipped=4)
    with pytest.raises(ValueError) as caught:
        parse_manifest(data, path="d.json")
    assert str(caught.value) == (
        f"d.json: fingerprint is {MANIFEST.fingerprint}, the contents give {changed.fingerprint}: "
        "the file was edited"
    )
    assert parse_manifest(data, path="d.json", check_fingerprint=False) == changed


def test_load_manifest(tmp_path):
    with pytest.raises(ValueError) as caught:
        load_manifest(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: no dataset.json, so this is no complete data set: run tpufeed ingest"
    )
    (tmp_path / "dataset.json").write_bytes(dump_manifest(MANIFEST))
    assert load_manifest(str(tmp_path)) == MANIFEST


def test_summarize_splits():
    found = summarize_splits(
        [
            summary("train", 1, records=2, classes=(("a", 1), ("b", 1)), sha256="11", bytes=20),
            summary("test"),
            summary("train", 0, records=1, classes=(("a", 1),)),
        ],
        splits=["validation", "train"],
        labels=["b", "a"],
    )
    assert found == {
        "test": Split(1, {"b": 1, "a": 0}, (Shard("test-00000-of-00002.tfrecord", 1, 10, "00"),)),
        "train": Split(
            3,
            {"b": 1, "a": 2},
            (
                Shard("train-00000-of-00002.tfrecord", 1, 10, "00"),
                Shard("train-00001-of-00002.tfrecord", 2, 20, "11"),
            ),
        ),
        "validation": Split(0, {"b": 0, "a": 0}, ()),
    }
    assert list(found) == ["test", "train", "validation"]
    assert list(found["train"].classes) == ["b", "a"]  # in the order of the ids


@pytest.mark.parametrize("shape", [(1, 1, 3), (50, 40, 3), (300, 200, 1)])
def test_channel_moments_are_numpys(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    flat = pixels.reshape(-1, shape[2]).astype(np.int64)
    means, stds = channel_moments(
        pixels=len(flat),
        sums=flat.sum(axis=0).tolist(),
        squares=(flat * flat).sum(axis=0).tolist(),
    )
    scaled = flat.astype(np.float64) / 255
    np.testing.assert_allclose(means, scaled.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stds, scaled.std(axis=0), rtol=1e-9, atol=1e-12)


def test_channel_moments_of_one_colour_and_of_very_many_pixels():
    assert channel_moments(pixels=10, sums=[2550], squares=[650250]) == ((1.0,), (0.0,))
    # 10^15 pixels, all 100 but one, which is 101: in floating point the variance would be lost.
    many = 10**15
    means, stds = channel_moments(pixels=many, sums=[100 * many + 1], squares=[10_000 * many + 201])
    assert means == (100 / 255,)
    assert stds[0] == pytest.approx(1 / 255 / many**0.5, rel=1e-12)


def test_moments_are_those_of_the_training_split():
    train = [
        summary("train", 0),
        summary("train", 1, channel_sum=(0,), channel_sum_of_squares=(0,)),
    ]
    other = summary("test", channel_sum=(1020,), channel_sum_of_squares=(4 * 65025,))
    assert moments_of_training([*train, other]) == ((0.25,), (0.4330127018922193,))
    assert moments_of_training([other]) == ((1.0,), (0.0,))
    assert moments_of_training([]) == (None, None)
    empty = summary("train", records=0, pixels=0, channel_sum=(0,), channel_sum_of_squares=(0,))
    assert moments_of_training([empty]) == (None, None)
    assert moments_of_training([empty, train[0]]) == ((0.5,), (0.5,))
