"""The on-disk contract: what a record holds, encoded to and parsed from tf.train.Example.

The encoder writes the wire format by hand, features in the order of their names, so that equal
inputs give equal bytes under any version of protobuf. The parser is protobuf's own: what checks
the records is not what wrote them. Messages and field numbers:
tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from transforms.records import PreparedImage

SCHEMAS = ("flowers", "imagenet", "tfds")
MOST_ONE_HOT_CLASSES = 256
# What an empty cell of an extra column reads as.
DEFAULTS: dict[str, bytes | int | float] = {"bytes": b"", "int64": 0, "float": 0.0}

Value = bytes | int | float
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """One feature of a record.

    Attributes:
      name: key in the Example.
      dtype: "bytes", "int64" or "float".
      shape: () for a scalar, else the fixed shape.
      default: what a reader takes where the feature is absent; None for a required one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    default: Value | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """The parts of a record that every schema has.

    Attributes:
      image: the encoded picture.
      class_id: as stored, with the label offset in it.
      key: the record's key.
      label: class name, None where the schema has no place for it (tfds).
      size: (height, width), None where the schema has no place for it (tfds).
    """

    image: bytes
    class_id: int
    key: str
    label: str | None
    size: tuple[int, int] | None


def feature_specs(
    schema: str, *, classes: int, extra: Iterable[FeatureSpec] = ()
) -> tuple[FeatureSpec, ...]:
    """Returns the features of every record, sorted by name.

    Args:
      schema: one of SCHEMAS.
      classes: number of classes, for the length of one_hot_class.
      extra: what the extra columns of a CSV add.
    """
    if schema == "flowers":
        specs = [
            FeatureSpec("image", "bytes"),
            FeatureSpec("class", "int64"),
            FeatureSpec("label", "bytes"),
            FeatureSpec("size", "int64", (2,)),
            FeatureSpec("key", "bytes"),
        ]
        if classes <= MOST_ONE_HOT_CLASSES:
            specs.append(FeatureSpec("one_hot_class", "float", (classes,)))
    elif schema == "imagenet":
        texts = ("encoded", "format", "colorspace", "filename", "class/text")
        numbers = ("height", "width", "channels", "class/label")
        specs = [FeatureSpec(f"image/{name}", "bytes") for name in texts]
        specs += [FeatureSpec(f"image/{name}", "int64") for name in numbers]
    else:
        assert schema == "tfds", schema
        specs = [
            FeatureSpec("image", "bytes"),
            FeatureSpec("label", "int64"),
            FeatureSpec("file_name", "bytes"),
        ]
    return tuple(sorted([*specs, *extra], key=lambda spec: spec.name))


def make_features(
    image: PreparedImage,
    *,
    key: str,
    label: str,
    class_id: int,
    schema: str,
    classes: int,
    label_offset: int = 0,
    extra: Iterable[tuple[str, Value]] = (),
) -> dict[str, list[Any]]:
    """Returns the values of one record by feature name.

    Args:
      image: the picture and its facts.
      key: the record's key; UTF-8.
      label: class name.
      class_id: from 0; `label_offset` is added to what is stored.
      schema: one of SCHEMAS.
      classes: number of classes.
      label_offset: 1 leaves room for a background class.
      extra: further features, one value each.
    """
    height, width = image.geometry.height, image.geometry.width
    stored, name = class_id + label_offset, key.encode()
    if schema == "flowers":
        features: dict[str, list[Any]] = {
            "image": [image.data],
            "class": [stored],
            "label": [label.encode()],
            "size": [height, width],
            "key": [name],
        }
        if classes <= MOST_ONE_HOT_CLASSES:
            features["one_hot_class"] = [float(i == class_id) for i in range(classes)]
    elif schema == "imagenet":
        features = {
            "image/encoded": [image.data],
            "image/format": [image.format.encode()],
            "image/height": [height],
            "image/width": [width],
            "image/channels": [image.channels],
            "image/colorspace": [b"RGB" if image.channels == 3 else b"Grayscale"],
            "image/filename": [name],
            "image/class/label": [stored],
            "image/class/text": [label.encode()],
        }
    else:
        features = {"image": [image.data], "label": [stored], "file_name": [name]}
    features.update({feature: [value] for feature, value in extra})
    return features


_ONE_BYTE = tuple(bytes([value]) for value in range(0x80))


def encode_example(features: Mapping[str, list[Any]]) -> bytes:
    """Serializes a tf.train.Example; lists of bytes, int or float, one type a feature."""
    entries = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _encode_feature(values)))
        for name, values in sorted(features.items())
    )
    return _field(1, entries)


def _encode_feature(values: list[Any]) -> bytes:
    first = values[0] if values else b""
    if isinstance(first, bytes):
        return _field(_BYTES_LIST, b"".join(_field(1, value) for value in values))
    if isinstance(first, float):
        return _field(_FLOAT_LIST, _field(1, struct.pack(f"<{len(values)}f", *values)))
    return _field(_INT64_LIST, _field(1, b"".join(_varint(value) for value in values)))


def _field(number: int, payload: bytes) -> bytes:
    """A length-delimited field: wire type 2."""
    return b"%c%b%b" % (number << 3 | 2, _varint(len(payload)), payload)


def _varint(value: int) -> bytes:
    if 0 <= value <= 0x7F:  # nearly all are: tags, lengths of names, class ids
        return _ONE_BYTE[value]
    value &= 0xFFFF_FFFF_FFFF_FFFF  # int64: two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def parse_example(data: bytes) -> dict[str, tuple[str, list[Any]]]:
    """Parses a tf.train.Example into name -> (dtype, values).

    Raises:
      ValueError: `data` is no tf.train.Example.
    """
    message = _example_class()()
    try:
        message.ParseFromString(data)
    except Exception as error:
        raise ValueError(f"no tf.train.Example: {error}") from error
    features = {}
    for name, feature in message.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind is not None:
            dtype = kind.removesuffix("_list")
            features[name] = (dtype, list(getattr(feature, kind).value))
    return features


# example.proto and feature.proto in protobuf's text format.
_EXAMPLE_PROTO = """
name: "tpufeed/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
    type_name: ".tensorflow.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
    type_name: ".tensorflow.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE
    type_name: ".tensorflow.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE
    type_name: ".tensorflow.Features.FeatureEntry" }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE
      type_name: ".tensorflow.Feature" } } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE
    type_name: ".tensorflow.Features" } }
"""


@functools.cache
def _example_class() -> Any:
    """The Example message, in a pool of its own, since TensorFlow brings a tensorflow.Example."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def check_features(
    features: Mapping[str, tuple[str, list[Any]]], *, specs: Iterable[FeatureSpec]
) -> None:
    """Raises ValueError, naming the feature, unless the record has what the specs say."""
    for spec in specs:
        if spec.name not in features:
            if spec.default is None:
                raise ValueError(f"feature {spec.name!r} is missing, required {spec.dtype}")
            continue
        dtype, values = features[spec.name]
        length = spec.shape[0] if spec.shape else 1
        if dtype != spec.dtype or len(values) != length:
            raise ValueError(
                f"feature {spec.name!r} holds {len(values)} x {dtype}, "
                f"must be {length} x {spec.dtype}"
            )


def read_record(features: Mapping[str, tuple[str, list[Any]]], *, schema: str) -> Record:
    """Returns the parts that every schema has, from what `parse_example` returned."""

    def value(name: str) -> Any:
        return features[name][1][0]

    if schema == "flowers":
        height, width = features["size"][1]
        label = value("label").decode()
        return Record(value("image"), value("class"), value("key").decode(), label, (height, width))
    if schema == "imagenet":
        return Record(
            value("image/encoded"),
            value("image/class/label"),
            value("image/filename").decode(),
            value("image/class/text").decode(),
            (value("image/height"), value("image/width")),
        )
    assert schema == "tfds", schema
    return Record(value("image"), value("label"), value("file_name").decode(), None, None)
