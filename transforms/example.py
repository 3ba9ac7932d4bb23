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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transforms.labels import ClassIds, Names
from transforms.records import PreparedImage

SCHEMAS = ("flowers", "imagenet", "tfds")
MOST_ONE_HOT_CLASSES = 256
# The shape of a list of any length.
ANY_LENGTH = (-1,)
# Where each schema keeps the class id, or the ids.
CLASS_FEATURES = {"flowers": "class", "imagenet": "image/class/label", "tfds": "label"}
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
      shape: () for a scalar, (n,) for a list of n, ANY_LENGTH for a list of one value or more.
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
      class_id: as stored, with the label offset in it; a tuple of several; None without labels.
      key: the record's key.
      label: class name, or a tuple of several; None without, or without a place for it (tfds).
      size: (height, width), None where the schema has no place for it (tfds).
    """

    image: bytes
    class_id: ClassIds
    key: str
    label: Names
    size: tuple[int, int] | None


def feature_specs(
    schema: str, *, classes: int, extra: Iterable[FeatureSpec] = (), kind: str = "one"
) -> tuple[FeatureSpec, ...]:
    """Returns the features of every record, sorted by name.

    Args:
      schema: one of SCHEMAS.
      classes: number of classes, for the length of one_hot_class.
      extra: what the extra columns of a CSV add.
      kind: of the labels, one of labels.KINDS.
    """
    if schema == "flowers":
        specs = [
            FeatureSpec("image", "bytes"),
            FeatureSpec("size", "int64", (2,)),
            FeatureSpec("key", "bytes"),
        ]
    elif schema == "imagenet":
        texts = ("encoded", "format", "colorspace", "filename")
        specs = [FeatureSpec(f"image/{name}", "bytes") for name in texts]
        specs += [FeatureSpec(f"image/{name}", "int64") for name in ("height", "width", "channels")]
    else:
        assert schema == "tfds", schema
        specs = [FeatureSpec("image", "bytes"), FeatureSpec("file_name", "bytes")]
    if kind != "none":
        specs += _class_specs(schema, classes, () if kind == "one" else ANY_LENGTH)
    return tuple(sorted([*specs, *extra], key=lambda spec: spec.name))


def _class_specs(schema: str, classes: int, shape: tuple[int, ...]) -> list[FeatureSpec]:
    specs = [FeatureSpec(CLASS_FEATURES[schema], "int64", shape)]
    if schema == "imagenet":
        specs.append(FeatureSpec("image/class/text", "bytes", shape))
    if schema == "flowers":
        specs.append(FeatureSpec("label", "bytes", shape))
        if classes <= MOST_ONE_HOT_CLASSES:
            specs.append(FeatureSpec("one_hot_class", "float", (classes,)))
    return specs


def make_features(
    image: PreparedImage,
    *,
    key: str,
    label: Names,
    class_id: ClassIds,
    schema: str,
    classes: int,
    label_offset: int = 0,
    extra: Iterable[tuple[str, Value]] = (),
) -> dict[str, list[Any]]:
    """Returns the values of one record by feature name.

    Args:
      image: the picture and its facts.
      key: the record's key; UTF-8.
      label: class name, those of several classes by id, or None for a record without labels.
      class_id: from 0, likewise; `label_offset` is added to what is stored.
      schema: one of SCHEMAS.
      classes: number of classes.
      label_offset: 1 leaves room for a background class.
      extra: further features, one value each.
    """
    height, width = image.geometry.height, image.geometry.width
    name = key.encode()
    if schema == "flowers":
        features: dict[str, list[Any]] = {
            "image": [image.data],
            "size": [height, width],
            "key": [name],
        }
    elif schema == "imagenet":
        features = {
            "image/encoded": [image.data],
            "image/format": [image.format.encode()],
            "image/height": [height],
            "image/width": [width],
            "image/channels": [image.channels],
            "image/colorspace": [b"RGB" if image.channels == 3 else b"Grayscale"],
            "image/filename": [name],
        }
    else:
        features = {"image": [image.data], "file_name": [name]}
    if label is not None and class_id is not None:
        ids = (class_id,) if isinstance(class_id, int) else class_id
        names = (label,) if isinstance(label, str) else label
        features.update(_class_features(schema, classes, ids, names, label_offset))
    features.update({feature: [value] for feature, value in extra})
    return features


def _class_features(
    schema: str, classes: int, ids: Sequence[int], names: Sequence[str], label_offset: int
) -> dict[str, list[Any]]:
    features: dict[str, list[Any]] = {CLASS_FEATURES[schema]: [i + label_offset for i in ids]}
    if schema == "imagenet":
        features["image/class/text"] = [name.encode() for name in names]
    if schema == "flowers":
        features["label"] = [name.encode() for name in names]
        if classes <= MOST_ONE_HOT_CLASSES:
            features["one_hot_class"] = [float(i in ids) for i in range(classes)]
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
        fits = len(values) == length if spec.shape != ANY_LENGTH else len(values) > 0
        if dtype != spec.dtype or not fits:
            wanted = length if spec.shape != ANY_LENGTH else "1 or more"
            raise ValueError(
                f"feature {spec.name!r} holds {len(values)} x {dtype}, "
                f"must be {wanted} x {spec.dtype}"
            )


def read_record(
    features: Mapping[str, tuple[str, list[Any]]], *, schema: str, kind: str = "one"
) -> Record:
    """Returns the parts that every schema has, from what `parse_example` returned.

    Args:
      features: of the record.
      schema: one of SCHEMAS.
      kind: of the labels, one of labels.KINDS.
    """

    def value(name: str) -> Any:
        return features[name][1][0]

    def of_class(name: str) -> Any:
        if kind == "none":
            return None
        values = [v.decode() if isinstance(v, bytes) else v for v in features[name][1]]
        return tuple(values) if kind == "many" else values[0]

    class_id = of_class(CLASS_FEATURES[schema])
    if schema == "flowers":
        height, width = features["size"][1]
        label, key = of_class("label"), value("key").decode()
        return Record(value("image"), class_id, key, label, (height, width))
    if schema == "imagenet":
        return Record(
            value("image/encoded"),
            class_id,
            value("image/filename").decode(),
            of_class("image/class/text"),
            (value("image/height"), value("image/width")),
        )
    assert schema == "tfds", schema
    return Record(value("image"), class_id, value("file_name").decode(), None, None)
