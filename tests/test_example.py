"""The records on disk: byte for byte what TensorFlow writes, and what it reads back."""

import random
import re

import numpy as np
import pytest

from transforms.example import (
    FeatureSpec,
    Record,
    check_features,
    encode_example,
    feature_specs,
    make_features,
    parse_example,
    read_record,
)
from transforms.records import Geometry, PreparedImage

tf = pytest.importorskip("tensorflow")

GEOMETRY = Geometry(1, 640, 480, 32, 24, (0.0, 0.0, 640.0, 480.0), (0, 0, 32, 24))
IMAGE = PreparedImage(b"\xff\xd8pixels", "JPEG", 3, GEOMETRY, 768, (1, 2, 3), (4, 5, 6))
GRAY = PreparedImage(b"\x89PNG", "PNG", 1, GEOMETRY, 768, (1,), (4,))

LISTS = {
    bytes: ("bytes_list", tf.train.BytesList),
    float: ("float_list", tf.train.FloatList),
    int: ("int64_list", tf.train.Int64List),
}


def encode_by_tensorflow(features) -> bytes:
    example = tf.train.Example()
    example.features.SetInParent()
    for name, values in features.items():
        field, list_ = LISTS[type(values[0]) if values else bytes]
        example.features.feature[name].CopyFrom(tf.train.Feature(**{field: list_(value=values)}))
    return example.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    "features",
    [
        {},
        {"a": [b""]},
        {"a": []},
        {"": [b"x"]},
        {"a": [0]},
        {"a": [127, 128, 16383, 16384, 2**31, 2**63 - 1]},
        {"a": [-1, -(2**63), -128]},
        {"a": [0.0, -0.0, 1.5, -2.75, 3.4028234663852886e38, 1e-45, 0.1]},
        {"a": [b"\0\xff" * 100, b"", b"x" * 127, b"y" * 128, b"z" * 20_000]},
        {"klasse/größe": ["日本".encode()], "é": [1], "z": [1.0], "Z": [b""]},
        # The order of code points, which UTF-8 keeps and UTF-16 does not.
        {"\U0001f600": [1], "\uffff": [2], "b": [3], "a/b": [4], "a b": [6]},
    ],
    ids=lambda features: ascii(",".join(features)),
)
def test_encoding_is_tensorflows(features):
    assert encode_example(features) == encode_by_tensorflow(features)
    backwards = dict(reversed(features.items()))
    assert encode_example(backwards) == encode_example(features)


def test_encoding_is_tensorflows_for_random_features():
    chance = random.Random(7)
    makers = (
        lambda: chance.randbytes(chance.randint(0, 300)),
        lambda: chance.randint(-(2**63), 2**63 - 1) >> chance.randint(0, 63),
        lambda: chance.uniform(-1e6, 1e6),
    )
    for _ in range(200):
        features = {}
        for _ in range(chance.randint(0, 8)):
            name = "".join(chance.choices("abz/_ é日\U0001f600", k=9))
            maker = chance.choice(makers)
            features[name] = [maker() for _ in range(chance.randint(1, 5))]
        assert encode_example(features) == encode_by_tensorflow(features)


def test_a_name_that_begins_another_comes_first():
    # TensorFlow's own order of these depends on which protobuf it was built with.
    features = {"a": [1], "": [0], "ab": [2]}
    data = encode_example(features)
    assert data.hex(" ") == (
        "0a 24 "
        "0a 09 0a 00 12 05 1a 03 0a 01 00 "
        "0a 0a 0a 01 61 12 05 1a 03 0a 01 01 "
        "0a 0b 0a 02 61 62 12 05 1a 03 0a 01 02"
    )
    assert tf.train.Example.FromString(data) == tf.train.Example.FromString(
        encode_by_tensorflow(features)
    )


def test_flowers_golden():
    features = make_features(
        IMAGE, key="cats/é.jpg", label="cats", class_id=1, schema="flowers", classes=3
    )
    assert features == {
        "image": [b"\xff\xd8pixels"],
        "class": [1],
        "label": [b"cats"],
        "size": [24, 32],
        "key": [b"cats/\xc3\xa9.jpg"],
        "one_hot_class": [0.0, 1.0, 0.0],
    }
    assert encode_example(features) == (
        b"\n\x85\x01"
        b"\n\x0e\n\x05class\x12\x05\x1a\x03\n\x01\x01"
        b"\n\x15\n\x05image\x12\x0c\n\n\n\x08\xff\xd8pixels"
        b"\n\x16\n\x03key\x12\x0f\n\r\n\x0bcats/\xc3\xa9.jpg"
        b"\n\x11\n\x05label\x12\x08\n\x06\n\x04cats"
        b"\n!\n\rone_hot_class\x12\x10\x12\x0e\n\x0c\0\0\0\0\0\0\x80?\0\0\0\0"
        b"\n\x0e\n\x04size\x12\x06\x1a\x04\n\x02\x18 "
    )
    assert encode_example(features) == encode_by_tensorflow(features)


def test_label_offset_moves_the_id_but_not_the_one_hot():
    features = make_features(
        IMAGE, key="k", label="c", class_id=0, schema="flowers", classes=2, label_offset=1
    )
    assert (features["class"], features["one_hot_class"]) == ([1], [1.0, 0.0])


def test_imagenet_golden():
    features = make_features(
        GRAY,
        key="n01/a.JPEG",
        label="n01",
        class_id=7,
        schema="imagenet",
        classes=1000,
        label_offset=1,
        extra=[("age", 3), ("score", 0.5), ("note", b"")],
    )
    assert features == {
        "image/encoded": [b"\x89PNG"],
        "image/format": [b"PNG"],
        "image/height": [24],
        "image/width": [32],
        "image/channels": [1],
        "image/colorspace": [b"Grayscale"],
        "image/filename": [b"n01/a.JPEG"],
        "image/class/label": [8],
        "image/class/text": [b"n01"],
        "age": [3],
        "score": [0.5],
        "note": [b""],
    }
    colour = make_features(IMAGE, key="k", label="n", class_id=0, schema="imagenet", classes=1)
    assert (colour["image/colorspace"], colour["image/channels"]) == ([b"RGB"], [3])


def test_tfds_golden():
    features = make_features(IMAGE, key="a.jpg", label="x", class_id=2, schema="tfds", classes=3)
    assert features == {"image": [b"\xff\xd8pixels"], "label": [2], "file_name": [b"a.jpg"]}


def test_specs_golden():
    def shown(schema, classes):
        return [
            (s.name, s.dtype, s.shape, s.default) for s in feature_specs(schema, classes=classes)
        ]

    assert shown("flowers", 5) == [
        ("class", "int64", (), None),
        ("image", "bytes", (), None),
        ("key", "bytes", (), None),
        ("label", "bytes", (), None),
        ("one_hot_class", "float", (5,), None),
        ("size", "int64", (2,), None),
    ]
    assert shown("imagenet", 5) == [
        ("image/channels", "int64", (), None),
        ("image/class/label", "int64", (), None),
        ("image/class/text", "bytes", (), None),
        ("image/colorspace", "bytes", (), None),
        ("image/encoded", "bytes", (), None),
        ("image/filename", "bytes", (), None),
        ("image/format", "bytes", (), None),
        ("image/height", "int64", (), None),
        ("image/width", "int64", (), None),
    ]
    assert shown("tfds", 5) == [
        ("file_name", "bytes", (), None),
        ("image", "bytes", (), None),
        ("label", "int64", (), None),
    ]


@pytest.mark.parametrize(("classes", "has"), [(1, True), (256, True), (257, False), (300, False)])
def test_one_hot_is_left_out_above_256_classes(classes, has):
    features = make_features(
        IMAGE, key="k", label="l", class_id=classes - 1, schema="flowers", classes=classes
    )
    specs = {spec.name: spec for spec in feature_specs("flowers", classes=classes)}
    assert ("one_hot_class" in features) is has
    assert ("one_hot_class" in specs) is has
    if has:
        assert len(features["one_hot_class"]) == classes
        assert specs["one_hot_class"].shape == (classes,)


@pytest.mark.parametrize("schema", ["flowers", "imagenet", "tfds"])
@pytest.mark.parametrize("classes", [2, 300])
def test_tensorflow_parses_with_the_specs(schema, classes):
    extra = [("age", -3), ("note", "größe".encode()), ("score", 0.25)]
    columns = [
        FeatureSpec("age", "int64", (), 0),
        FeatureSpec("note", "bytes", (), b""),
        FeatureSpec("score", "float", (), 0.0),
        FeatureSpec("unset", "int64", (), 0),
    ]
    features = make_features(
        IMAGE, key="k.jpg", label="cats", class_id=1, schema=schema, classes=classes, extra=extra
    )
    data = encode_example(features)
    specs = feature_specs(schema, classes=classes, extra=columns)
    dtypes = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}
    parsed = tf.io.parse_single_example(
        data,
        {s.name: tf.io.FixedLenFeature(s.shape, dtypes[s.dtype], s.default) for s in specs},
    )
    found = {name: np.asarray(v).tolist() for name, v in parsed.items()}
    expected = {name: v if len(v) > 1 else v[0] for name, v in features.items()}
    assert found == {**expected, "unset": 0}
    check_features(parse_example(data), specs=specs)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("flowers", Record(b"\xff\xd8pixels", 2, "é/k.jpg", "cats", (24, 32))),
        ("imagenet", Record(b"\xff\xd8pixels", 2, "é/k.jpg", "cats", (24, 32))),
        ("tfds", Record(b"\xff\xd8pixels", 2, "é/k.jpg", None, None)),
    ],
)
def test_read_record(schema, expected):
    features = make_features(
        IMAGE, key="é/k.jpg", label="cats", class_id=1, schema=schema, classes=2, label_offset=1
    )
    assert read_record(parse_example(encode_example(features)), schema=schema) == expected


def test_parse_reads_what_tensorflow_writes():
    features = {"b": [b"x", b""], "i": [-1, 2**62], "f": [0.5, -1.0], "none": []}
    assert parse_example(encode_by_tensorflow(features)) == {
        "b": ("bytes", [b"x", b""]),
        "i": ("int64", [-1, 2**62]),
        "f": ("float", [0.5, -1.0]),
        "none": ("bytes", []),
    }
    unset = tf.train.Example()
    unset.features.feature["unset"].CopyFrom(tf.train.Feature())
    assert parse_example(unset.SerializeToString()) == {}


def test_parse_reads_unpacked_numbers():
    # Field 1 of Int64List, twice, each as a varint of its own: what old writers left.
    feature = bytes.fromhex("1a0408050806")
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features) == {"a": ("int64", [5, 6])}


def test_parse_refuses_what_is_no_example():
    with pytest.raises(ValueError, match=re.escape("no tf.train.Example: ")):
        parse_example(b"\xff\xff\xff")
    data = encode_example({"a": [b"x" * 100]})
    with pytest.raises(ValueError, match=re.escape("no tf.train.Example: ")):
        parse_example(data[:-1])


SPECS = [
    FeatureSpec("n", "int64"),
    FeatureSpec("v", "float", (2,)),
    FeatureSpec("o", "bytes", (), b""),
]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"v": ("float", [1.0, 2.0])}, "feature 'n' is missing, required int64"),
        (
            {"n": ("int64", [1]), "v": ("float", [1.0])},
            "feature 'v' holds 1 x float, must be 2 x float",
        ),
        (
            {"n": ("bytes", [b"1"]), "v": ("float", [1.0, 2.0])},
            "feature 'n' holds 1 x bytes, must be 1 x int64",
        ),
        (
            {"n": ("int64", []), "v": ("float", [1.0, 2.0])},
            "feature 'n' holds 0 x int64, must be 1 x int64",
        ),
        (
            {"n": ("int64", [1]), "v": ("float", [1.0, 2.0]), "o": ("int64", [1])},
            "feature 'o' holds 1 x int64, must be 1 x bytes",
        ),
    ],
)
def test_check_features_refuses(features, message):
    with pytest.raises(ValueError) as caught:
        check_features(features, specs=SPECS)
    assert str(caught.value) == message


def test_check_features_lets_an_optional_one_be_absent():
    check_features({"n": ("int64", [1]), "v": ("float", [1.0, 2.0])}, specs=SPECS)
