"""The reader, on data sets that the command line made of pictures drawn here."""

import collections
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from helpers import draw, ingest
from PIL import Image

tf = pytest.importorskip("tensorflow")

from pipeline import dataset as reader  # noqa: E402
from pipeline.dataset import open_dataset, parse_record, steps_per_epoch  # noqa: E402
from transforms import manifest as manifests  # noqa: E402
from transforms.example import (  # noqa: E402
    FeatureSpec,
    encode_example,
    parse_example,
    read_record,
)

CLASSES = ("ash", "birch", "cedar")
KEY = {"flowers": "key", "imagenet": "image/filename", "tfds": "file_name"}
HEIGHT, WIDTH = 16, 24
FLAGS = ["--image-size", f"{WIDTH}x{HEIGHT}", "--split", "train=0.7,validation=0.3"]
# Every schema, encoding, offset and number of channels; what the others leave out.
FORMS = {
    "flowers_png": [],
    "flowers_jpeg": ["--encoding", "jpeg", "--label-offset", "1"],
    "flowers_raw": ["--encoding", "raw"],
    "flowers_original": ["--encoding", "original"],
    "flowers_raw_gray": ["--encoding", "raw", "--channels", "1", "--label-offset", "1"],
    "imagenet": ["--schema", "imagenet", "--encoding", "jpeg", "--label-offset", "1"],
    "imagenet_png": ["--schema", "imagenet"],
    "tfds": ["--schema", "tfds", "--label-offset", "1"],
    "tfds_gray": ["--schema", "tfds", "--channels", "1"],
}


def draw_pictures(folder: Path, *, count: int, first: int = 0, classes=CLASSES) -> Path:
    for number in range(first, first + count):
        label = classes[number % len(classes)]
        size = (48, 32) if number % 2 else (32, 48)
        draw(folder / label / f"{number:03d}.png", seed=number, size=size)
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("drawn"), count=50)


@pytest.fixture(scope="session")
def make(tmp_path_factory):
    def run(pattern, *flags: str) -> Path:
        output = tmp_path_factory.mktemp("made") / "records"
        assert ingest(pattern, output, *flags) == 0
        return output

    return run


@pytest.fixture(scope="session")
def base(drawn, make) -> Path:
    """PNG in the flowers schema, 7 shards of training and 3 of validation; read only."""
    return make(f"{drawn}/*/*", *FLAGS, "--encoding", "png", "--shards", "10")


@pytest.fixture(scope="session")
def second(tmp_path_factory, make) -> Path:
    """The pictures of another day, like `base`, with classes stored from 1."""
    pictures = draw_pictures(tmp_path_factory.mktemp("day"), count=20, first=100)
    flags = ["--encoding", "png", "--shards", "4", "--label-offset", "1"]
    return make(f"{pictures}/*/*", *FLAGS, *flags)


@pytest.fixture(scope="session")
def forms(drawn, make):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            encoding = [] if "--encoding" in FORMS[name] else ["--encoding", "png"]
            made[name] = make(f"{drawn}/*/*", *FLAGS, *encoding, *FORMS[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def varying(drawn, make):
    """Pictures of two sizes, encoded as asked."""
    return lambda encoding: make(
        f"{drawn}/*/*", "--resize-mode", "none", "--encoding", encoding, "--shards", "2"
    )


def load(folder: Path) -> manifests.Manifest:
    return manifests.load_manifest(str(folder))


def stored_records(folder: Path, split: str) -> dict[str, object]:
    """What the shards hold, in file order, read without the code under test."""
    contents, records = load(folder), {}
    for shard in contents.splits[split].shards:
        for data in tf.data.TFRecordDataset(str(folder / shard.name)).as_numpy_iterator():
            record = read_record(parse_example(data), schema=contents.schema)
            records[record.key] = record
    return records


def keys_of(dataset, name: str = "key") -> list[str]:
    """The keys in order, padding left out."""
    keys = []
    for first, _, *weights in dataset.as_numpy_iterator():
        real = weights[0] > 0 if weights else slice(None)
        keys += [key.decode() for key in first[name][real]]
    return keys


def one_epoch(folders, **options):
    """Every record once, singly: the least that hides nothing."""
    options = {"batch_size": 1, "repeat": False, "features": ["key"], **options}
    return open_dataset(folders, **options)


# Epochs: every record exactly once


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_an_epoch_has_every_record_once(base, tmp_path, cache, deterministic):
    cache = tmp_path / "cache" if cache == "folder" else cache
    dataset = one_epoch(base, deterministic=deterministic, cache=cache)
    expected = sorted(stored_records(base, "train"))
    for _ in range(2):
        assert sorted(keys_of(dataset)) == expected


def test_a_repeated_stream_is_whole_epochs_one_after_the_other(base):
    expected = sorted(stored_records(base, "train"))
    count = len(expected)
    keys = keys_of(one_epoch(base, repeat=True).take(3 * count))
    for epoch in range(3):
        assert sorted(keys[epoch * count : (epoch + 1) * count]) == expected


def test_training_and_validation_are_disjoint(base):
    train, validation = keys_of(one_epoch(base)), keys_of(one_epoch(base, split="validation"))
    assert train and validation
    assert not set(train) & set(validation)


@pytest.mark.parametrize("training", [True, False])
def test_three_hosts_share_every_record(base, training):
    options = {"training": training, "repeat": False if training else None}
    if training:
        options["drop_remainder"] = False
    hosts = [
        keys_of(one_epoch(base, shard_index=index, shard_count=3, batch_size=4, **options))
        for index in range(3)
    ]
    assert all(hosts)
    assert sorted(sum(hosts, [])) == sorted(stored_records(base, "train"))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_hosts_have_equally_many_steps(base, training, batch_size):
    steps = []
    for index in range(3):
        dataset = open_dataset(
            base,
            training=training,
            repeat=False,
            batch_size=batch_size,
            shard_index=index,
            shard_count=3,
        )
        steps.append(sum(1 for _ in dataset))
        assert steps[-1] == dataset.cardinality()
    expected = steps_per_epoch(base, batch_size=batch_size, training=training, shard_count=3)
    assert steps == [expected] * 3


def test_hosts_with_a_cache_fill_it(base, tmp_path):
    for index in range(3):
        dataset = open_dataset(
            base,
            repeat=False,
            batch_size=2,
            cache=tmp_path,
            shuffle_buffer=1,
            shard_index=index,
            shard_count=3,
        )
        for _ in dataset:
            pass
    assert len(list(tmp_path.glob("*/records.index"))) == 3


def test_shares_of_the_hosts_are_even():
    shards = [reader.ShardFile(str(n), records, 1, 0) for n, records in enumerate([9, 1, 1, 8, 2])]
    hosts = reader.share_shards(shards, count=2)
    assert [[shard.records for shard in mine] for mine in hosts] == [[9, 1, 1], [8, 2]]
    equal = [reader.ShardFile(str(n), 5, 1, 0) for n in range(7)]
    assert [len(mine) for mine in reader.share_shards(equal, count=3)] == [3, 2, 2]


def test_a_host_whose_shards_are_empty(tmp_path, make):
    pictures = draw_pictures(tmp_path, count=8)
    folder = make(f"{pictures}/*/*", "--image-size", "8", "--shards", "8")
    sizes = [shard.records for shard in load(folder).splits["train"].shards]
    assert 0 in sizes  # eight keys in eight ranges of the hash
    keys, lengths = [], set()
    for index in range(8):
        host = {"shard_index": index, "shard_count": 8, "batch_size": 2}
        keys += keys_of(one_epoch(folder, training=False, repeat=None, **host))
        lengths.add(sum(1 for _ in open_dataset(folder, training=False, **host)))
    assert sorted(keys) == sorted(stored_records(folder, "train"))
    assert len(lengths) == 1
    assert refusal(folder, shard_count=8, batch_size=1) == (
        "shard_count 8: one of the hosts has only empty shards of split 'train'; ingest with "
        "fewer, larger shards, or use fewer hosts"
    )


@pytest.mark.parametrize("training", [True, False])
def test_two_folders_are_one_set(base, second, training):
    options = {} if training else {"training": False, "repeat": None}
    keys = keys_of(one_epoch([base, second], **options))
    mine, theirs = stored_records(base, "train"), stored_records(second, "train")
    assert sorted(keys) == sorted([*mine, *theirs])
    if training:
        first_half = set(keys[: len(keys) // 2])
        assert first_half & set(mine) and first_half & set(theirs)
    else:
        assert keys == [*mine, *theirs]


def test_labels_of_folders_with_different_offsets_agree(base, second):
    for first, label in one_epoch([base, second]).as_numpy_iterator():
        assert CLASSES[label[0]] == first["key"][0].decode().split("/")[0]


# Order


@pytest.mark.parametrize("cache", [None, "memory"])
def test_epochs_differ_in_order(base, cache):
    dataset = one_epoch(base, cache=cache, deterministic=True, seed=1)
    epochs = [keys_of(dataset) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    count = len(epochs[0])
    stream = keys_of(
        one_epoch(base, cache=cache, deterministic=True, seed=1, repeat=True).take(2 * count)
    )
    assert stream[:count] != stream[count:]


def test_equal_seeds_give_equal_orders(base):
    def epochs(seed):
        dataset = one_epoch(base, deterministic=True, seed=seed)
        return [keys_of(dataset), keys_of(dataset)]

    assert epochs(5) == epochs(5)
    assert epochs(5) != epochs(6)


def test_shuffled_beyond_the_buffer_and_beyond_the_shards(base):
    in_files = list(stored_records(base, "train"))
    dataset = one_epoch(base, deterministic=True, seed=1, shuffle_buffer=1)
    by_shards, next_epoch = keys_of(dataset), keys_of(dataset)
    assert by_shards != next_epoch
    whole = keys_of(one_epoch(base, deterministic=True, seed=1))
    assert len({tuple(in_files), tuple(by_shards), tuple(whole)}) == 3
    assert len({tuple(sorted(keys)) for keys in (in_files, by_shards, whole)}) == 1


def test_batches_have_several_classes(base):
    """What is one class after another in the input is not in the batches."""
    for _, label in open_dataset(base, batch_size=16, seed=1, deterministic=True).take(6):
        assert len(set(label.numpy())) == len(CLASSES)


# Evaluation


@pytest.mark.parametrize("batch_size", [1, 4, 7, 200])
def test_evaluation_has_every_record_once_in_file_order(base, batch_size):
    stored = stored_records(base, "validation")
    dataset = one_epoch(
        base, split="validation", training=False, repeat=None, batch_size=batch_size
    )
    assert keys_of(dataset) == list(stored)
    weights = np.concatenate([weight for _, _, weight in dataset.as_numpy_iterator()])
    assert weights.dtype == np.float32
    assert weights.tolist() == [1.0] * len(stored) + [0.0] * (-len(stored) % batch_size)
    steps = steps_per_epoch(base, split="validation", batch_size=batch_size, training=False)
    assert len(weights) == steps * batch_size


def test_padding_is_zero(base):
    dataset = one_epoch(base, split="validation", training=False, repeat=None, batch_size=200)
    first, label, weight = next(dataset.as_numpy_iterator())
    padding = weight == 0
    assert padding.any()
    assert not first["image"][padding].any() and not label[padding].any()
    assert set(first["key"][padding]) == {b""}


# Records: labels, pixels, features


@pytest.mark.parametrize("name", FORMS)
def test_labels_count_from_zero(forms, name):
    folder = forms(name)
    contents = load(folder)
    key = KEY[contents.schema]
    seen = collections.Counter()
    for first, label in one_epoch(folder, features=[key]).as_numpy_iterator():
        assert CLASSES[label[0]] == first[key][0].decode().split("/")[0]
        seen[CLASSES[label[0]]] += 1
    assert seen == {k: n for k, n in contents.splits["train"].classes.items() if n}
    assert set(seen) == set(CLASSES)


@pytest.mark.parametrize("name", FORMS)
def test_pixels_are_those_of_pillow(forms, name):
    folder = forms(name)
    contents = load(folder)
    key, stored = KEY[contents.schema], stored_records(folder, "train")
    shape = (HEIGHT, WIDTH, contents.channels)
    for first, _ in one_epoch(folder, features=[key]).as_numpy_iterator():
        record, image = stored[first[key][0].decode()], first["image"][0]
        assert image.shape == shape and image.dtype == np.uint8
        if contents.encoding == "raw":
            expected = np.frombuffer(record.image, np.uint8).reshape(shape)
        else:
            expected = np.asarray(Image.open(io.BytesIO(record.image))).reshape(shape)
        # JPEG too: both use libjpeg-turbo, here with the accurate transform.
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("name", ["flowers_png", "flowers_raw", "imagenet", "tfds_gray"])
@pytest.mark.parametrize("together", [1, 2, 8])
def test_batches_are_the_same_however_many_are_decoded_together(forms, monkeypatch, name, together):
    folder = forms(name)
    contents = load(folder)
    pixels = HEIGHT * WIDTH * contents.channels
    monkeypatch.setattr(reader, "_DECODED_BYTES", together * pixels + pixels // 2)
    wanted = [KEY[contents.schema]] + ["size", "one_hot_class"] * (contents.schema == "flowers")
    options = {"batch_size": 8, "repeat": False, "seed": 3, "deterministic": True}
    options["features"] = wanted
    blocks = list(open_dataset(folder, **options).as_numpy_iterator())
    # A last, short batch is asked for: decoded one by one.
    singly = list(open_dataset(folder, drop_remainder=False, **options).as_numpy_iterator())
    assert len(blocks) == contents.splits["train"].records // 8
    for block, single in zip(blocks, singly, strict=False):
        for one, other in zip(tf.nest.flatten(block), tf.nest.flatten(single), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_raw_picture_of_another_size_is_refused(tmp_path, forms):
    folder = shutil.copytree(forms("flowers_raw"), tmp_path / "turned")
    shard = next(shard for shard in load(folder).splits["train"].shards if shard.records)
    path = str(folder / shard.name)
    records = [parse_example(data.numpy()) for data in tf.data.TFRecordDataset(path)]
    with tf.io.TFRecordWriter(path) as out:
        for record in records:
            features = {name: values for name, (_, values) in record.items()}
            features["size"] = features["size"][::-1]
            out.write(encode_example(features))
    with pytest.raises(tf.errors.InvalidArgumentError):
        list(open_dataset(folder, batch_size=8, repeat=False))


def test_element_spec_is_static(base):
    image = tf.TensorSpec((8, HEIGHT, WIDTH, 3), tf.uint8)
    label = tf.TensorSpec((8,), tf.int64)
    assert open_dataset(base, batch_size=8).element_spec == (image, label)
    evaluation = open_dataset(base, batch_size=8, training=False)
    assert evaluation.element_spec == (image, label, tf.TensorSpec((8,), tf.float32))
    wanted = ["key", "size", "one_hot_class"]
    first, _ = open_dataset(base, batch_size=8, features=wanted).element_spec
    assert first == {
        "image": image,
        "key": tf.TensorSpec((8,), tf.string),
        "size": tf.TensorSpec((8, 2), tf.int64),
        "one_hot_class": tf.TensorSpec((8, 3), tf.float32),
    }
    short = open_dataset(base, batch_size=8, repeat=False, drop_remainder=False).element_spec
    assert short[0].shape.as_list() == [None, HEIGHT, WIDTH, 3]


def test_features_belong_to_their_pictures(base):
    stored = stored_records(base, "train")
    dataset = open_dataset(base, batch_size=8, features=["key", "size", "one_hot_class"])
    for first, label in dataset.take(3).as_numpy_iterator():
        np.testing.assert_array_equal(first["one_hot_class"], np.eye(3)[label])
        np.testing.assert_array_equal(first["size"], [[HEIGHT, WIDTH]] * 8)
        for key, image in zip(first["key"], first["image"], strict=True):
            expected = np.asarray(Image.open(io.BytesIO(stored[key.decode()].image)))
            np.testing.assert_array_equal(image, expected)


def test_extra_columns_and_their_defaults(drawn, make, tmp_path):
    table = tmp_path / "table.csv"
    lines = ["path,label,camera,iso:int,focus:float"]
    for number, path in enumerate(sorted(drawn.glob("*/*.png"))[:12]):
        given = f"cam{number},{number},{number / 2}" if number % 2 else ",,"
        lines.append(f"{path},{path.parent.name},{given}")
    table.write_text("\n".join(lines) + "\n")
    folder = make(table, "--image-size", "8", "--encoding", "png")
    wanted = ["camera", "iso", "focus"]
    rows = set()
    for first, _ in one_epoch(folder, features=wanted).as_numpy_iterator():
        rows.add((first["camera"][0], int(first["iso"][0]), float(first["focus"][0])))
    expected = {(f"cam{n}".encode(), n, n / 2) for n in range(1, 12, 2)}
    assert rows == expected | {(b"", 0, 0.0)}


@pytest.mark.parametrize("dtype", [tf.float32, "float32", tf.bfloat16, tf.float16])
def test_floats_run_from_zero_to_one(base, dtype):
    whole = open_dataset(base, split="validation", training=False, batch_size=4)
    scaled = open_dataset(base, split="validation", training=False, batch_size=4, image_dtype=dtype)
    assert scaled.element_spec[0].dtype == dtype
    for (image, *_), (levels, *_) in zip(scaled, whole, strict=True):
        exact = tf.cast(tf.cast(levels, tf.float32) * (1 / 255), dtype)
        np.testing.assert_array_equal(image.numpy(), exact.numpy())


# Functions, eagerly and inside Dataset.map


def both_ways(function, *inputs):
    """The results of a function called eagerly and in a graph."""
    yield function(*inputs)
    tensors = tf.data.Dataset.from_tensors(inputs)
    yield next(iter(tensors.map(function)))


@pytest.mark.parametrize("dtype", reader.IMAGE_DTYPES)
def test_convert_image(dtype):
    levels = tf.range(256)[:, None, None]
    for result in both_ways(
        lambda image: reader.convert_image(image, dtype=dtype), tf.cast(levels, tf.uint8)
    ):
        assert result.dtype == dtype
        if dtype == tf.uint8:
            assert result.numpy().ravel().tolist() == list(range(256))
        else:
            expected = tf.cast(np.arange(256, dtype=np.float32) * np.float32(1 / 255), dtype)
            np.testing.assert_array_equal(result.numpy().ravel(), expected.numpy())
            assert float(result[0, 0, 0]) == 0.0 and float(result[-1, 0, 0]) == 1.0


def test_convert_image_takes_floats_of_an_augmentation():
    image = tf.constant([[[0.0], [0.5], [1.5]]])
    assert reader.convert_image(image, dtype=tf.uint8).numpy().ravel().tolist() == [0, 127, 255]
    np.testing.assert_array_equal(
        reader.convert_image(image, dtype=tf.bfloat16).numpy().ravel(), [0.0, 0.5, 1.5]
    )


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("encoding", ["jpeg", "original", "png", "raw"])
def test_decode_image(encoding, channels):
    levels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    picture, buffer = Image.fromarray(levels.squeeze()), io.BytesIO()
    if encoding == "raw":
        data = levels.tobytes()
    else:
        picture.save(buffer, "PNG" if encoding == "png" else "JPEG", quality=95, subsampling=0)
        data = buffer.getvalue()
        levels = np.asarray(Image.open(buffer)).reshape(levels.shape)
    for result in both_ways(
        lambda data, size: reader.decode_image(
            data, encoding=encoding, channels=channels, size=size
        ),
        tf.constant(data),
        tf.constant([5, 7], tf.int64),
    ):
        np.testing.assert_array_equal(result.numpy(), levels)


def test_resize_image_is_pillows_to_a_level():
    levels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    picture = Image.fromarray(levels).resize((60, 40), Image.Resampling.BICUBIC)
    expected = np.asarray(picture.resize((20, 10), Image.Resampling.BILINEAR)).astype(int)
    for result in both_ways(
        lambda image: reader.resize_image(image, size=(10, 20)), tf.constant(np.asarray(picture))
    ):
        assert result.dtype == tf.uint8 and result.shape == (10, 20, 3)
        assert np.abs(result.numpy().astype(int) - expected).max() <= 1


QUICK_REFERENCE = [
    # dtype, shape, default, what is stored (None: nothing), what is read
    ("bytes", (), None, [b"a"], b"a"),
    ("int64", (), None, [-3], -3),
    ("float", (), None, [0.5], 0.5),
    ("bytes", (2,), None, [b"a", b"bc"], [b"a", b"bc"]),
    ("int64", (3,), None, [1, 2, 3], [1, 2, 3]),
    ("float", (2,), None, [0.5, 2.0], [0.5, 2.0]),
    ("bytes", (-1,), None, [b"a", b"bc", b""], [b"a", b"bc", b""]),
    ("int64", (-1,), None, [1, 2, 3, 4], [1, 2, 3, 4]),
    ("float", (-1,), None, [0.5], [0.5]),
    ("bytes", (), b"none", None, b"none"),
    ("int64", (), 7, None, 7),
    ("float", (2,), 1.5, None, [1.5, 1.5]),
    ("int64", (), 7, [8], 8),
    ("bytes", (-1,), None, None, []),
    ("int64", (-1,), None, None, []),
    ("float", (-1,), None, None, []),
]


@pytest.mark.parametrize("dtype, shape, default, stored, expected", QUICK_REFERENCE)
def test_parse_record_by_the_quick_reference(dtype, shape, default, stored, expected):
    specs = [FeatureSpec("field", dtype, shape, default), FeatureSpec("other", "int64")]
    values = {"other": [1]} | ({} if stored is None else {"field": stored})
    for parsed in both_ways(
        lambda data: parse_record(data, specs=specs), tf.constant(encode_example(values))
    ):
        assert parsed["field"].dtype == {"bytes": tf.string, "int64": tf.int64}.get(
            dtype, tf.float32
        )
        assert (
            parsed["field"].numpy().tolist() == expected
            if shape
            else (parsed["field"].numpy() == expected)
        )


def test_parse_record_of_a_batch():
    data = [encode_example({"field": list(range(n))} if n else {}) for n in range(3)]
    for parsed in both_ways(
        lambda data: parse_record(data, specs=[FeatureSpec("field", "int64", (-1,))]),
        tf.constant(data),
    ):
        assert parsed["field"].numpy().tolist() == [[0, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize("dtype, shape", [("bytes", ()), ("int64", (2,)), ("float", ())])
def test_parse_record_names_the_missing_field(dtype, shape):
    data = tf.constant(encode_example({"other": [1]}))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature: field .* is required"):
        parse_record(data, specs=[FeatureSpec("field", dtype, shape)])


# Several sizes


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_varying_pictures_are_resized(varying, encoding):
    folder = varying(encoding)
    assert load(folder).image_size is None
    stored = stored_records(folder, "train")
    for first, _ in one_epoch(folder, resize=(10, 12)).as_numpy_iterator():
        record = stored[first["key"][0].decode()]
        if encoding == "raw":
            picture = Image.frombytes("RGB", record.size[::-1], record.image)
        else:
            picture = Image.open(io.BytesIO(record.image))
        expected = np.asarray(picture.resize((12, 10), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(first["image"][0].astype(int) - expected).max() <= 1


def test_varying_pictures_need_resize(varying):
    folder = varying("png")
    message = (
        f"resize: none given, but the pictures of {folder} vary in size (image_size is null); "
        "give resize=(height, width)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        open_dataset(folder)


# Augmentation and caches


def flip(image, seed):
    return tf.image.stateless_random_flip_left_right(image, seed)


def flips(dataset, stored) -> list[bool]:
    """For each picture, by key, whether it came out mirrored."""
    result = {}
    for first, _ in dataset.as_numpy_iterator():
        for key, image in zip(first["key"], first["image"], strict=True):
            expected = np.asarray(Image.open(io.BytesIO(stored[key.decode()].image)))
            result[key] = not np.array_equal(image, expected)
            assert not result[key] or np.array_equal(image, expected[:, ::-1])
    return [result[key] for key in sorted(result)]


@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_epochs_differ_in_augmentation(base, tmp_path, cache):
    cache = tmp_path / "cache" if cache == "folder" else cache
    dataset = one_epoch(base, augment=flip, cache=cache, seed=1)
    stored = stored_records(base, "train")
    first, second = flips(dataset, stored), flips(dataset, stored)
    assert first != second
    assert 0.2 < np.mean(first) < 0.8


def test_epochs_differ_in_augmentation_where_their_order_is_equal(drawn, make):
    folder = make(f"{drawn}/*/*", "--image-size", "8", "--encoding", "png", "--shards", "1")
    dataset = one_epoch(folder, augment=flip, seed=1, deterministic=True, shuffle_buffer=1)
    assert keys_of(dataset) == keys_of(dataset)
    stored = stored_records(folder, "train")
    assert flips(dataset, stored) != flips(dataset, stored)


def test_equal_seeds_augment_equally(base):
    stored = stored_records(base, "train")

    def epochs(seed):
        dataset = one_epoch(base, augment=flip, seed=seed, deterministic=True)
        return [flips(dataset, stored), flips(dataset, stored)]

    assert epochs(2) == epochs(2)
    assert epochs(2) != epochs(3)


def test_a_seed_by_name(base):
    """Of what partial() gives by name, all that follows is by name, too."""
    brighter = functools.partial(tf.image.stateless_random_brightness, max_delta=0.4)

    def same(image, seed):
        return tf.image.stateless_random_brightness(image, 0.4, seed)

    plain, first, second = (
        [x["image"] for x, _ in one_epoch(base, augment=augment, seed=1, deterministic=True)]
        for augment in (None, brighter, same)
    )
    assert np.array_equal(first, second)
    assert not np.array_equal(first, plain)


def test_augmentation_without_a_seed_and_of_another_size(base):
    def augment(image):
        return tf.image.convert_image_dtype(image, tf.float32)[2:10, 3:9] * 0.5

    dataset = open_dataset(base, batch_size=4, augment=augment, image_dtype=tf.float32)
    assert dataset.element_spec[0] == tf.TensorSpec((4, 8, 6, 3), tf.float32)
    image, _ = next(iter(dataset))
    assert 0.0 < float(tf.reduce_max(image)) <= 0.5


def test_a_cache_is_read_instead_of_the_shards(base, tmp_path):
    copy = tmp_path / "records"
    shutil.copytree(base, copy)
    dataset = one_epoch(copy, cache=tmp_path / "cache")
    before = sorted(keys_of(dataset))
    contents = load(copy)
    for shard in contents.splits["train"].shards:
        (copy / shard.name).write_bytes(bytes(shard.bytes))
    assert sorted(keys_of(dataset)) == before
    assert sorted(keys_of(one_epoch(copy, cache=tmp_path / "cache"))) == before
    with pytest.raises(tf.errors.InvalidArgumentError):
        keys_of(one_epoch(copy))


def test_caches_never_meet(base, second, forms, tmp_path):
    """Another data set, split, preprocessing, host or order has a cache of its own."""
    cases = [
        (base, {}),
        (second, {}),
        ([base, second], {}),
        (base, {"split": "validation"}),
        (base, {"resize": (8, 8)}),
        (base, {"features": []}),
        (base, {"shard_index": 1, "shard_count": 2}),
        (base, {"training": False, "repeat": None}),
        (base, {"deterministic": True}),
    ]
    for number, (folders, options) in enumerate(cases):
        expected = sum(1 for _ in one_epoch(folders, **options))
        found = sum(1 for _ in one_epoch(folders, cache=tmp_path, **options))
        assert found == expected
        assert len(list(tmp_path.iterdir())) == number + 1
    names = sorted(path.name for path in tmp_path.iterdir())
    prefix = f"train-{load(base).fingerprint[:16]}-"
    assert sum(name.startswith(prefix) for name in names) == 6
    # What does not touch the cached pictures shares them.
    for options in ({"batch_size": 4}, {"seed": 1}, {"image_dtype": tf.float32}):
        one_epoch(base, cache=tmp_path, **options)
    one_epoch(base, cache=tmp_path, augment=flip)
    assert len(list(tmp_path.iterdir())) == len(cases)


def test_an_evaluation_cache_keeps_file_order(base, tmp_path):
    for _ in one_epoch(base, cache=tmp_path):
        pass
    dataset = one_epoch(base, cache=tmp_path, training=False, repeat=None)
    expected = list(stored_records(base, "train"))
    assert keys_of(dataset) == expected
    assert keys_of(dataset) == expected


def test_a_half_filled_cache_is_refused(base, tmp_path):
    one_epoch(base, cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "records_0.lockfile").touch()
    message = (
        f"cache {tmp_path}: {folder} is being filled by another process, or one was stopped while "
        "it filled it (records_0.lockfile); wait for it, or delete that folder"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        one_epoch(base, cache=tmp_path)


def test_a_cache_that_cannot_be_made_is_refused(base, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^cache {re.escape(str(tmp_path))}/file: cannot be used"):
        one_epoch(base, cache=tmp_path / "file")


# Steps, cardinality, options


def test_cardinality_and_steps(base):
    records = load(base).splits["train"].records
    assert open_dataset(base, batch_size=4).cardinality() == tf.data.INFINITE_CARDINALITY
    for options, expected in (
        ({}, records // 4),
        ({"drop_remainder": False}, -(-records // 4)),
    ):
        dataset = open_dataset(base, batch_size=4, repeat=False, **options)
        assert dataset.cardinality() == expected == sum(1 for _ in dataset)
    assert steps_per_epoch(base, batch_size=4) == records // 4
    with pytest.raises(ValueError, match="^batch_size '8': must be a whole number$"):
        steps_per_epoch(base, batch_size="8")
    assert steps_per_epoch(base, batch_size=4, training=False) == -(-records // 4)


def test_options(base):
    policy = tf.data.experimental.AutoShardPolicy
    options = open_dataset(base, batch_size=4, ram_budget=10**8).options()
    assert options.deterministic is False
    assert options.autotune.ram_budget == 10**8
    assert options.autotune.enabled is not False
    assert options.experimental_distribute.auto_shard_policy == policy.DATA
    options = open_dataset(base, batch_size=4, shard_count=2, deterministic=True).options()
    assert options.deterministic is True
    assert options.experimental_distribute.auto_shard_policy == policy.OFF
    assert open_dataset(base, batch_size=4, training=False).options().deterministic is True


@pytest.mark.parametrize("calls", [1, 3])
def test_parallelism_can_be_fixed(base, calls):
    keys = keys_of(one_epoch(base, parallel_calls=calls))
    assert sorted(keys) == sorted(stored_records(base, "train"))


def test_end_on_time_changes_nothing_else(base):
    plain = tf.data.Dataset.range(5)
    wrapped = reader.end_on_time(plain)
    assert wrapped.element_spec == plain.element_spec and wrapped.cardinality() == 5
    assert [list(wrapped.as_numpy_iterator()) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    assert list(wrapped.map(lambda n: 2 * n).as_numpy_iterator()) == [0, 2, 4, 6, 8]

    @tf.function
    def total(data):
        result = tf.constant(0, tf.int64)
        for number in data:
            result += number
        return result

    assert total(wrapped) == 10


def test_an_iterator_is_taken_down_by_another_thread(monkeypatch):
    started = []
    monkeypatch.setattr(
        reader._thread, "start_new_thread", lambda function, args: started.append(function)
    )
    for _ in reader.end_on_time(tf.data.Dataset.range(3)):
        assert not started
    assert len(started) == 1
    held = started[0].__self__
    assert len(held) == 1 and held[0].dtype == tf.resource


def test_without_tensorflows_private_parts_a_data_set_stays_as_it_is(monkeypatch):
    plain = tf.data.Dataset.range(3)
    with monkeypatch.context() as patch:
        patch.delattr(tf.data.Dataset, "_variant_tensor")
        assert reader.end_on_time(plain) is plain
    assert reader.end_on_time(plain) is not plain


# Damage


@pytest.fixture
def damaged(base, tmp_path):
    """A copy of `base`, and how to change record 2 of one of its shards."""
    folder = tmp_path / "records"
    shutil.copytree(base, folder)
    shards = load(folder).splits["train"].shards
    path = folder / max(shards, key=lambda shard: shard.records).name

    def rewrite(change=None) -> Path:
        if change:
            features = []
            for data in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                parsed = {name: values for name, (_, values) in parse_example(data).items()}
                if len(features) == 2:
                    change(parsed)
                features.append(parsed)
            with tf.io.TFRecordWriter(str(path)) as writer:
                for values in features:
                    writer.write(encode_example(values))
        restate(folder, path)
        return path

    return folder, path, rewrite


def restate(folder: Path, path: Path) -> None:
    """Makes dataset.json agree with a shard's size, so that only reading can find out."""
    contents = load(folder)
    train = contents.splits["train"]
    shards = tuple(
        dataclasses.replace(s, bytes=path.stat().st_size) if s.name == path.name else s
        for s in train.shards
    )
    splits = {**contents.splits, "train": dataclasses.replace(train, shards=shards)}
    contents = dataclasses.replace(contents, splits=splits)
    (folder / manifests.MANIFEST).write_bytes(manifests.dump_manifest(contents))


def fault_of(folder, **options) -> str:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        for _ in one_epoch(folder, **{"features": None, **options}):
            pass
    return reader.find_fault(caught.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"repeat": True}, {"training": False, "repeat": None}, {"deterministic": True}],
    ids=str,
)
def test_a_flipped_bit_names_the_file(damaged, options):
    folder, path, _ = damaged
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    expected = f"{path}: a record is damaged, or the file was cut: run tpufeed verify on its folder"
    assert fault_of(folder, **options) == expected


def test_a_file_cut_between_records_names_the_file(damaged):
    folder, path, rewrite = damaged
    lines = (folder / "index" / path.name).with_suffix(".idx").read_text().splitlines()
    path.write_bytes(path.read_bytes()[: int(lines[-1].split()[0])])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: [0-9]+ bytes, dataset.json"):
        one_epoch(folder)
    rewrite()
    expected = f"{path}: a record is damaged, or the file was cut: run tpufeed verify on its folder"
    assert fault_of(folder) == expected


def as_float(parsed):
    parsed["class"] = [1.0]


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda parsed: parsed.pop("image"), "a record has no feature 'image' of type bytes"),
        (lambda parsed: parsed.pop("class"), "a record has no feature 'class' of type int64"),
        (as_float, "a record has no feature 'class' of type int64"),
        (
            lambda parsed: parsed.update({"size": [1]}),
            "a record has no feature 'size' of type int64[2]",
        ),
        (
            lambda parsed: parsed.update({"class": [3]}),
            "a record's class is none of the 3 that dataset.json names",
        ),
        (
            lambda parsed: parsed.update({"class": [-1]}),
            "a record's class is none of the 3 that dataset.json names",
        ),
    ],
)
def test_a_wrong_record_names_field_and_file(damaged, change, problem):
    folder, path, rewrite = damaged
    rewrite(change)
    expected = f"{path}: {problem}: run tpufeed verify on its folder"
    assert fault_of(folder, features=["size"]) == expected


def test_a_file_that_is_whole_when_looked_at_again(base):
    """What fails for a moment, as a store can, is not blamed on the records."""
    shard = load(base).splits["train"].shards[0]
    sources = reader.load_sources(base)
    fault = reader._explain_fault(
        tf.constant(str(base / shard.name)),
        tf.constant(0, tf.int64),
        tf.constant(shard.records, tf.int64),
        tf.constant(0, tf.int64),
        plan=reader._plan_pictures(sources, features=(), resize=None),
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="could not be read at first, and th"):
        next(iter(fault))


def test_a_field_that_nobody_asked_for_may_be_absent(damaged):
    folder, _, rewrite = damaged
    rewrite(lambda parsed: parsed.pop("size"))
    assert sorted(keys_of(one_epoch(folder))) == sorted(keys_of(one_epoch(folder)))


def test_find_fault_knows_its_own():
    assert reader.find_fault(ValueError("assertion failed: [something else]")) == ""


@pytest.mark.parametrize(
    "spoil, message",
    [
        (Path.unlink, "missing, but dataset.json names it: copy the data set again"),
        (
            lambda path: path.write_bytes(b"12345"),
            "5 bytes, dataset.json says {bytes}: copy the data set again, or run tpufeed verify",
        ),
    ],
)
def test_a_shard_that_is_not_as_named_is_refused(damaged, spoil, message):
    folder, path, _ = damaged
    message = f"{path}: {message.format(bytes=path.stat().st_size)}"
    spoil(path)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        open_dataset(folder, batch_size=1)


# Slices


SLICES = ["train[:30%]", "train[30%:50%]", "train[50%:-7]", "train[-7:]"]


def in_file_order(folders, split, **options):
    return keys_of(one_epoch(folders, split=split, training=False, repeat=None, **options))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_slices_that_meet_are_the_split(base, batch_size):
    stored = list(stored_records(base, "train"))
    parts = [in_file_order(base, split, batch_size=batch_size) for split in SLICES]
    assert all(parts) and sum(parts, []) == stored
    assert in_file_order(base, "+".join(SLICES)) == stored
    cut = round(len(stored) * 0.3)
    assert parts[0] == stored[:cut] and parts[3] == stored[-7:]


def test_a_slice_in_training_has_its_records_once_and_its_steps(base):
    stored = list(stored_records(base, "train"))
    for split, expected in (("train[3:20]", stored[3:20]), ("train[-50%:]", stored[18:])):
        dataset = one_epoch(base, split=split, seed=1)
        assert sorted(keys_of(dataset)) == sorted(expected)
        assert dataset.cardinality() == len(expected)
        assert steps_per_epoch(base, split=split, batch_size=4) == len(expected) // 4
        assert len(list(one_epoch(base, split=split, batch_size=4))) == len(expected) // 4
        assert steps_per_epoch(base, split=split, batch_size=4, training=False) == 5


def test_a_sum_of_splits(base):
    both = [*stored_records(base, "validation"), *list(stored_records(base, "train"))[:5]]
    assert in_file_order(base, "validation+train[:5]") == both
    assert sorted(keys_of(one_epoch(base, split="validation+train[:5]"))) == sorted(both)


def test_a_slice_of_two_folders_counts_over_both(base, second):
    stored = [*stored_records(base, "train"), *stored_records(second, "train")]
    cut = -(-len(stored) * 9 // 10)
    assert in_file_order([base, second], f"train[:{cut}]") == stored[:cut]
    assert in_file_order([base, second], f"train[{cut}:]") == stored[cut:]


def test_hosts_share_a_slice(base):
    stored = list(stored_records(base, "train"))[5:30]
    hosts = [
        in_file_order(base, "train[5:30]", shard_index=index, shard_count=2) for index in range(2)
    ]
    assert all(hosts) and sorted(sum(hosts, [])) == sorted(stored)


def test_only_the_files_that_hold_a_slice_are_read(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "records")
    first, *others = load(folder).splits["train"].shards
    for shard in others:
        (folder / shard.name).unlink()
    stored = list(stored_records(base, "train"))[: first.records]
    assert in_file_order(folder, f"train[:{first.records}]") == stored
    assert refusal(folder, split=f"train[:{first.records + 1}]").startswith(str(folder))


@pytest.mark.parametrize("cache", ["memory", "folder"])
def test_a_slice_never_meets_the_cache_of_another(drawn, make, tmp_path, cache):
    folder = make(f"{drawn}/*/*", "--image-size", "8", "--shards", "1")
    cache = tmp_path if cache == "folder" else cache
    for split in ("train[:10]", "train[10:]", "train", "train[:10]"):
        expected = sorted(in_file_order(folder, split))
        for _ in range(2):
            assert sorted(keys_of(one_epoch(folder, split=split, cache=cache))) == expected
    if cache == tmp_path:
        assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "split, byte, found",
    [
        ("train[{0}:{1}]", 20, True),
        ("train[{3}:{1}]", 8, True),  # of its frame, without which the next is not found
        ("train[{3}:{1}]", 20, False),
        ("train[{0}:{2}]", 8, False),
    ],
)
def test_damage_in_a_slice_or_on_the_way_to_it_names_the_file(damaged, split, byte, found):
    """Record 2 of the file is damaged."""
    folder, path, _ = damaged
    contents = load(folder)
    start = 0
    for shard in contents.splits["train"].shards:
        if shard.name == path.name:
            break
        start += shard.records
    n = shard.records
    lines = (folder / "index" / path.name).with_suffix(".idx").read_text().splitlines()
    data = bytearray(path.read_bytes())
    data[int(lines[2].split()[0]) + byte] ^= 1
    expected = in_file_order(folder, split := split.format(start, start + n, start + 2, start + 3))
    path.write_bytes(data)
    if found:
        assert fault_of(folder, split=split) == (
            f"{path}: a record is damaged, or the file was cut: run tpufeed verify on its folder"
        )
    else:
        assert in_file_order(folder, split) == expected


@pytest.mark.parametrize(
    "split, message",
    [
        ("train[:200]", "split 'train[:200]': 200 is out of range, 'train' has 36 records; "),
        ("train[5:5]", "split 'train[5:5]': none of the 36 records of 'train' lies from 5 to 5; "),
        ("train[5]", "split 'train[5]': allowed are a split's name, NAME[FROM:TO] with whole "),
        ("val[:5]", "split 'val[:5]': {0} has no such split; allowed are train, validation"),
        (
            "train[:50%]+train[40%:]",
            "split 'train[:50%]+train[40%:]': two of its parts hold the same records, which would "
            "count twice; let the parts not overlap",
        ),
        ("train+train", "split 'train+train': two of its parts hold the same records, "),
    ],
)
def test_slices_that_are_refused(base, split, message):
    assert refusal(base, split=split).startswith(message.format(base))
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(base))}"):
        steps_per_epoch(base, split=split)


# Refusals


def refusal(folders, **options) -> str:
    with pytest.raises(ValueError) as caught:
        open_dataset(folders, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def py(image):
    return tf.py_function(lambda x: x, [image], tf.uint8)


def nested_numpy(image):
    return tf.map_fn(lambda row: tf.numpy_function(lambda x: x, [row], tf.uint8), image)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size 0: must be 1 or more"),
        ({"batch_size": 2.5}, "batch_size 2.5: must be a whole number"),
        ({"batch_size": "8"}, "batch_size '8': must be a whole number"),
        ({"shard_index": "0"}, "shard_index '0': must be a whole number"),
        ({"parallel_calls": "2"}, "parallel_calls '2': must be a whole number"),
        ({"shuffle_buffer": 0.5}, "shuffle_buffer 0.5: must be a whole number"),
        ({"shuffle_bytes": 0}, "shuffle_bytes 0: must be 1 or more"),
        ({"shuffle_bytes": -1}, "shuffle_bytes -1: must be 1 or more"),
        (
            {"augment": tf.image.stateless_random_brightness},
            "augment: requires image, max_delta, seed; a picture and a seed are all that it is "
            "called with: give the others with functools.partial",
        ),
        (
            {"augment": lambda image, *, strength: image},
            "augment: requires image, strength; a picture and a seed are all that it is called "
            "with: give the others with functools.partial",
        ),
        (
            {"image_dtype": tf.int32},
            "image_dtype int32: allowed are uint8, float32, bfloat16, float16",
        ),
        (
            {"image_dtype": "half"},
            "image_dtype half: allowed are uint8, float32, bfloat16, float16",
        ),
        ({"parallel_calls": 0}, "parallel_calls 0: must be 1 or more"),
        ({"shuffle_buffer": 0}, "shuffle_buffer 0: must be 1 or more"),
        ({"resize": 8}, "resize 8: must be (height, width), each 1 or more"),
        ({"resize": (0, 8)}, "resize (0, 8): must be (height, width), each 1 or more"),
        ({"features": "key"}, "features 'key': must be a list, as in ['key']"),
        ({"features": ["image"]}, "features 'image': the picture is always there, as 'image'"),
        ({"shard_count": 0}, "shard_count 0: must be 1 or more"),
        (
            {"shard_count": 2, "shard_index": 2},
            "shard_index 2: allowed are 0 to 1, since shard_count is 2",
        ),
        (
            {"shard_count": 8},
            "shard_count 8: each host reads files of its own, and there are 7; allowed are 1 to 7: "
            "ingest with --shards 8 or more for this split, or use fewer hosts",
        ),
        (
            {"repeat": True, "drop_remainder": False},
            "drop_remainder False: needs repeat=False; else no batch is the last",
        ),
        (
            {"training": False, "repeat": True},
            "repeat True: not with training=False, which gives every record once, as it is, in "
            "file order; leave it out, or give training=True",
        ),
        (
            {"training": False, "drop_remainder": True},
            "drop_remainder True: not with training=False, which gives every record once, as it "
            "is, in file order; leave it out, or give training=True",
        ),
        (
            {"training": False, "deterministic": False},
            "deterministic False: not with training=False, which gives every record once, as it "
            "is, in file order; leave it out, or give training=True",
        ),
        (
            {"augment": py},
            "augment: calls Python from the graph (op EagerPyFunc, node EagerPyFunc), which holds "
            "up every thread and fails on a remote TPU; use TensorFlow operations only",
        ),
        (
            {"augment": lambda image: image[: tf.random.uniform([], 1, 8, tf.int32)]},
            "augment: returns uint8 (None, 24, 3), must be uint8 or float of a static shape "
            "[height, width, channels]; end it with tf.ensure_shape",
        ),
        (
            {"augment": lambda image: tf.cast(image, tf.int32)},
            "augment: returns int32 (16, 24, 3), must be uint8 or float of a static shape "
            "[height, width, channels]; end it with tf.ensure_shape",
        ),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_wrong_arguments(base, options, message):
    assert refusal(base, **{"batch_size": 1, **options}) == message


def test_python_is_found_in_inner_functions(base):
    assert refusal(base, augment=nested_numpy).startswith("augment: calls Python from the graph")


def test_augment_must_return_a_picture(base):
    assert refusal(base, augment=lambda image: (image, image)).startswith("augment: returns (")


def test_unknown_and_empty_splits(base, drawn, make):
    assert refusal(base, split="val") == (
        f"split 'val': {base} has no such split; allowed are train, validation"
    )
    folder = make(f"{drawn}/*/00*", "--image-size", "8", "--split", "train=0.999,test=0.001")
    assert load(folder).splits["test"].records == 0
    assert refusal(folder, split="test") == (
        f"split 'test': no record in {folder}; choose another split, or ingest with a larger "
        "share for it"
    )


def test_a_batch_larger_than_the_split(base):
    records = load(base).splits["train"].records
    expected = (
        f"batch_size 1000: more than the {records} records of split 'train', so training has no "
        f"whole batch; allowed are 1 to {records}"
    )
    assert refusal(base, batch_size=1000) == expected
    with pytest.raises(ValueError, match=re.escape(expected)):
        steps_per_epoch(base, batch_size=1000)
    assert "records of split 'train' that one of 2 hosts reads" in refusal(
        base, batch_size=1000, shard_count=2
    )


def test_unknown_features(base):
    assert refusal(base, features=["keys"]) == (
        f"features 'keys': {base} has no such feature; allowed are class, key, label, "
        "one_hot_class, size"
    )


def test_a_buffer_larger_than_its_budget(base):
    text = refusal(base, batch_size=1, shuffle_buffer=20, shuffle_bytes=5000)
    assert re.fullmatch(
        r"shuffle_buffer 20: takes some 0\.0 MB, more than the 0\.0 MB of shuffle_bytes; give \d+ "
        r"or less, or raise shuffle_bytes",
        text,
    )
    allowed = int(re.search(r"give (\d+)", text)[1])
    one_epoch(base, shuffle_buffer=allowed, shuffle_bytes=5000)
    assert refusal(base, batch_size=1, shuffle_buffer=allowed + 1, shuffle_bytes=5000)


def test_folders_that_are_none(base, tmp_path):
    assert refusal([]) == "folders: none given; give the folder of a data set, or several"
    assert refusal([base, base]) == f"folders: {base} is given twice; its records would count twice"
    for same in (f"{base}/", os.path.relpath(base), f"{base.parent}/./{base.name}"):
        assert refusal([base, same]) == (
            f"folders: {same} is given twice (as {base}); its records would count twice"
        )
    assert refusal(["gs://b/r", "gs://b/r/"]) == (
        "folders: gs://b/r/ is given twice (as gs://b/r); its records would count twice"
    )
    assert refusal(tmp_path) == (
        f"{tmp_path}: no dataset.json, so this is no complete data set: run tpufeed ingest"
    )


@pytest.mark.parametrize(
    "form, field", [("tfds", "schema"), ("flowers_raw", "encoding"), ("flowers_gray", "channels")]
)
def test_unlike_folders(base, forms, drawn, make, form, field):
    if form == "flowers_gray":
        other = make(f"{drawn}/*/*", *FLAGS, "--encoding", "png", "--channels", "1")
    else:
        other = forms(form)
    mine, theirs = getattr(load(base), field), getattr(load(other), field)
    assert refusal([base, other]) == (
        f"folders: {field} is {mine!r} in {base} and {theirs!r} in {other}; only like data sets "
        "are read as one: ingest one of them again"
    )


def test_folders_of_other_classes_and_sizes(base, drawn, make, tmp_path):
    pictures = draw_pictures(tmp_path / "pictures", count=6, first=200, classes=("ash", "yew"))
    flags = ["--split", "train=0.7,validation=0.3", "--encoding", "png"]
    other = make(f"{pictures}/*/*", *flags, "--image-size", f"{WIDTH}x{HEIGHT}")
    assert refusal([base, other]) == (
        f"folders: labels is ['ash', 'birch', 'cedar'] in {base} and ['ash', 'yew'] in {other}; "
        "only like data sets are read as one: ingest one of them again"
    )
    other = make(f"{drawn}/*/*", *flags, "--image-size", "8")
    assert refusal([base, other]) == (
        f"folders: image_size is [16, 24] in {base} and [8, 8] in {other}; only like data sets "
        "are read as one: ingest one of them again"
    )


def test_a_key_in_two_folders(base, drawn, make, tmp_path):
    """Also where it is a training record here and one to validate on there."""
    shared = next(iter(stored_records(base, "validation")))
    copied = tmp_path / "pictures"
    draw_pictures(copied, count=9, first=300)
    shutil.copy(drawn / shared, copied / shared)
    other = make(f"{copied}/*/*", "--image-size", f"{WIDTH}x{HEIGHT}", "--encoding", "png")
    assert refusal([base, other]) == (
        f"folders: key {shared!r} stands in {base} and in {other} (1 such keys): its record would "
        "count twice; leave one out with tpufeed ingest --exclude, or, where they are different "
        "pictures, ingest with --root at a folder above both"
    )


def test_an_index_without_keys_is_named(base, second, tmp_path):
    copy = tmp_path / "records"
    shutil.copytree(second, copy)
    path = sorted((copy / "index").glob("*.parquet"))[0]
    said = f"{path}: needed to compare the keys of several folders, cannot be read: "
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["key"]), path)
    assert refusal([base, copy], batch_size=1) == f"{said}no column 'key'"
    path.unlink()
    assert refusal([base, copy], batch_size=1).startswith(said)
    open_dataset(copy, batch_size=1)


def test_keras_fits_evaluates_and_predicts(base):
    keras = pytest.importorskip("keras")
    layers = [keras.Input((HEIGHT, WIDTH, 3)), keras.layers.Rescaling(1 / 255)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    steps = steps_per_epoch(base, batch_size=4)
    validation = open_dataset(base, split="validation", batch_size=4, training=False)
    history = model.fit(
        open_dataset(base, batch_size=4),
        steps_per_epoch=steps,
        epochs=2,
        validation_data=validation,
        shuffle=False,
        verbose=0,
    )
    assert model.optimizer.iterations == 2 * steps and len(history.history["val_loss"]) == 2
    _, accuracy = model.evaluate(validation, verbose=0)
    predicted = model.predict(validation, verbose=0).argmax(axis=1)
    labels, weights = (np.concatenate([b[i] for b in validation]) for i in (1, 2))
    assert len(predicted) == len(labels) and 0 in weights
    assert accuracy == pytest.approx(np.mean((predicted == labels)[weights > 0]))


# In a process of its own: what is imported, and several devices

SCRIPT = """
import json, sys
import tensorflow as tf
from pipeline.dataset import open_dataset
folder = sys.argv[1]
cpus = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def local(value):
    return strategy.experimental_local_results(value)

evaluation = open_dataset(folder, batch_size=8, training=False, features=["key"])
keys = []
for first, label, weight in strategy.experimental_distribute_dataset(evaluation):
    for key, part in zip(local(first["key"]), local(weight)):
        keys += [k.decode() for k, w in zip(key.numpy(), part.numpy()) if w]
of_context = strategy.distribute_datasets_from_function(
    lambda context: open_dataset(
        folder,
        batch_size=context.get_per_replica_batch_size(8),
        shard_index=context.input_pipeline_id,
        shard_count=context.num_input_pipelines,
    )
)
shapes = [part.shape.as_list() for part in local(next(iter(of_context))[0])]
unwanted = sorted({name.split(".")[0] for name in sys.modules} & {"apache_beam"})
print(json.dumps({"keys": keys, "shapes": shapes, "unwanted": unwanted}))
"""


def test_two_devices_and_no_beam(base):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(base)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "keys": list(stored_records(base, "train")),
        "shapes": [[4, HEIGHT, WIDTH, 3]] * 2,
        "unwanted": [],
    }
