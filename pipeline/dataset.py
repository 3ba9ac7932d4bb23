"""The reader: opens data sets as a tf.data.Dataset that feeds a TPU, a GPU or a CPU.

Never imports Beam: files in a bucket are read by TensorFlow's own file systems.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipeline.folders import ShardFile as ShardFile
from pipeline.folders import (
    check_count,
    check_files,
    check_keys,
    check_positive,
    check_whole,
    count_records,
    count_steps,
)
from pipeline.folders import list_shards as list_shards
from pipeline.folders import load_sources as load_sources
from pipeline.folders import share_shards as share_shards
from pipeline.folders import steps_per_epoch as steps_per_epoch
from transforms import files
from transforms.example import ANY_LENGTH, CLASS_FEATURES, FeatureSpec
from transforms.manifest import Manifest

AUTOTUNE = tf.data.AUTOTUNE
IMAGE_DTYPES = (tf.uint8, tf.float32, tf.bfloat16, tf.float16)
# Held by the shuffle buffer, unless the caller says otherwise.
SHUFFLE_BYTES = 256 * 2**20

# Where each schema keeps the picture.
_PICTURE = {"flowers": "image", "imagenet": "image/encoded", "tfds": "image"}
_DTYPES = {"bytes": tf.string, "int64": tf.int64, "float": tf.float32}
# Shards read at a time. Fixed, so that the order does not depend on the number of cores.
_OPEN_SHARDS = 16
# Records parsed in one call.
_BLOCK = 32
# Pictures decoded in one call: as many as divide a batch, within both. Each is a node of the graph,
# which is made anew for each epoch: with 64 a stream is 2 % faster, and short epochs 12 % slower.
_DECODED_BYTES = 16 * 2**20
_DECODED_PICTURES = 16
# A bucket answers a large request hardly later than a small one.
_REMOTE_BUFFER = 8 * 2**20
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_FAULT_REMEDY = ": run tpufeed verify on its folder"

Record = Mapping[str, Any]
Augment = Callable[..., tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _Pictures:
    """How records become pictures.

    Attributes:
      schema: one of example.SCHEMAS.
      encoding: one of image.ENCODINGS.
      channels: 3 or 1.
      classes: number of classes.
      size: height and width of what comes out.
      resize: whether to resize to it.
      specs: the features wanted beside picture and label.
      kind: of the labels, one of labels.KINDS.
    """

    schema: str
    encoding: str
    channels: int
    classes: int
    size: tuple[int, int]
    resize: bool
    specs: tuple[FeatureSpec, ...]
    # The fingerprint stands for it in a cache's name, which comes from repr().
    kind: str = dataclasses.field(default="one", repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of what comes out."""
        return (*self.size, self.channels)


@dataclasses.dataclass(frozen=True)
class _Order:
    """In which order, how often and in which batches records are seen.

    Attributes:
      training: shuffled, in whole batches; else in file order, padded.
      repeat: whether it goes on without end.
      deterministic: whether equal seeds give equal orders.
      drop_remainder: whether a last, incomplete batch is dropped.
    """

    training: bool
    repeat: bool
    deterministic: bool
    drop_remainder: bool


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Everything that the graph is built from, checked.

    Attributes:
      shards: the files of this host.
      plan: how records become pictures.
      order: in which order they come.
      batch_size: pictures in a batch.
      steps: batches in one pass.
      dtype: of the pictures in a batch.
      seed: of everything random.
      buffer: records in the shuffle buffer.
      cache: None, "memory", or the prefix of the cache's files.
      calls: threads for reading and for decoding.
    """

    shards: Sequence[ShardFile]
    plan: _Pictures
    order: _Order
    batch_size: int
    steps: int
    dtype: tf.DType
    seed: int | None
    buffer: int
    cache: str | None
    calls: int


# Pure functions: the same eagerly and inside Dataset.map.


def parse_record(data: tf.Tensor, *, specs: Iterable[FeatureSpec]) -> dict[str, tf.Tensor]:
    """Reads the features of serialized tf.train.Examples.

    Args:
      data: string [], one Example, or string [n].
      specs: what to read. A dtype is "bytes", "int64" or "float"; a shape is () for a scalar,
        (n,) for a list of n, (-1,) for a list of any length. With a default a feature may be
        absent; without one a list of any length reads as empty, and anything else is an error.

    Returns:
      Dense tensors by name: string, int64 or float32, of the specs' shapes, or [n, ...] of them;
      there lists of any length are filled up to the longest, with 0 or "".

    Raises:
      tf.errors.InvalidArgumentError: a required feature is absent, or has another type or length;
        TensorFlow's message names it.
    """
    specs = tuple(specs)
    parsed = _parse_sparse(data, specs)
    for spec in specs:
        if spec.shape == ANY_LENGTH:
            parsed[spec.name] = tf.sparse.to_dense(parsed[spec.name])
    return parsed


def _parse_sparse(data: tf.Tensor, specs: Iterable[FeatureSpec]) -> dict[str, Any]:
    return tf.io.parse_example(data, {spec.name: _tf_feature(spec) for spec in specs})


def _tf_feature(spec: FeatureSpec) -> Any:
    dtype = _DTYPES[spec.dtype]
    if spec.shape == ANY_LENGTH:
        return tf.io.VarLenFeature(dtype)
    default = spec.default
    if default is not None and spec.shape:
        default = tf.fill(spec.shape, tf.constant(default, dtype))
    return tf.io.FixedLenFeature(spec.shape, dtype, default)


def multi_hot(ids: tf.SparseTensor, *, classes: int) -> tf.Tensor:
    """Returns which classes each record has.

    Args:
      ids: int64 [n, longest], class ids from 0, as tf.io.VarLenFeature reads them.
      classes: number of classes.

    Returns:
      bool [n, classes].

    Raises:
      tf.errors.InvalidArgumentError: a record has no class, or an id is not in 0 to classes - 1.
    """
    known = tf.reduce_all((ids.values >= 0) & (ids.values < classes))
    tf.debugging.Assert(known, [ids.values])
    places = tf.stack([ids.indices[:, 0], ids.values], axis=1)
    shape = tf.stack([ids.dense_shape[0], classes])
    found = tf.scatter_nd(places, tf.ones_like(ids.values), shape) > 0
    # Without one, a feature that is missing would read as a picture of nothing.
    tf.debugging.Assert(tf.reduce_all(tf.reduce_any(found, axis=1)), [ids.dense_shape])
    return tf.ensure_shape(found, [None, classes])


def decode_image(
    data: tf.Tensor, *, encoding: str, channels: int, size: tf.Tensor | None = None
) -> tf.Tensor:
    """Decodes one stored picture.

    Args:
      data: string [].
      encoding: "jpeg", "original", "png" or "raw".
      channels: 3 or 1.
      size: int64 [2], height and width; for "raw" only, which does not hold them.

    Returns:
      uint8 [height, width, channels].
    """
    if encoding == "raw":
        assert size is not None
        return tf.reshape(tf.io.decode_raw(data, tf.uint8), tf.concat([size, [channels]], 0))
    if encoding == "png":
        return tf.io.decode_png(data, channels=channels)
    # The default on x86, INTEGER_FAST, is off by a level or two from every other decoder.
    return tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")


def resize_image(image: tf.Tensor, *, size: tuple[int, int]) -> tf.Tensor:
    """Resizes bilinearly with antialias, rounding to the nearest level.

    Args:
      image: uint8 [height, width, channels].
      size: (height, width) of the result; proportions are not kept.

    Returns:
      uint8 [*size, channels].
    """
    resized = tf.image.resize(image, size, antialias=True)
    return tf.saturate_cast(tf.round(resized), tf.uint8)


def convert_image(image: tf.Tensor, *, dtype: tf.DType) -> tf.Tensor:
    """Returns the picture in another type: uint8 as it is, floats scaled from 0..255 to 0..1.

    As tf.image.convert_image_dtype does, but through float32, so that bfloat16 and float16 are
    the nearest to the exact quotient.

    Args:
      image: uint8, or floats already scaled; any shape.
      dtype: one of IMAGE_DTYPES.
    """
    if image.dtype == dtype:
        return image
    if dtype == tf.uint8:
        return tf.image.convert_image_dtype(image, tf.uint8, saturate=True)
    if image.dtype == tf.uint8:  # the same numbers in one pass over a batch, not two
        levels = tf.bitcast(image, tf.quint8)
        scaled = tf.quantization.dequantize(levels, 0.0, 1.0, mode="MIN_COMBINED")
    else:
        scaled = tf.image.convert_image_dtype(image, tf.float32)
    return tf.cast(scaled, dtype)


def _plan_pictures(
    sources: Mapping[str, Manifest],
    *,
    features: Sequence[str],
    resize: tuple[int, int] | None,
) -> _Pictures:
    folder, contents = next(iter(sources.items()))
    if resize is not None:
        if isinstance(resize, int) or len(resize) != 2 or min(resize) < 1:
            raise ValueError(f"resize {resize}: must be (height, width), each 1 or more")
    elif contents.image_size is None:
        raise ValueError(
            f"resize: none given, but the pictures of {folder} vary in size (image_size is null); "
            "give resize=(height, width)"
        )
    size = resize or contents.image_size
    assert size is not None
    return _Pictures(
        schema=contents.schema,
        encoding=contents.encoding,
        channels=contents.channels,
        classes=len(contents.labels),
        size=(int(size[0]), int(size[1])),
        resize=resize is not None and tuple(resize) != contents.image_size,
        specs=_find_specs(sources, features),
        kind=contents.label_kind,
    )


def _find_specs(
    sources: Mapping[str, Manifest], features: Sequence[str]
) -> tuple[FeatureSpec, ...]:
    if isinstance(features, str):
        raise ValueError(f"features {features!r}: must be a list, as in [{features!r}]")
    wanted: dict[str, FeatureSpec] = {}
    for folder, contents in sources.items():
        picture = _PICTURE[contents.schema]
        known = {spec.name: spec for spec in contents.specs if spec.name != picture}
        for name in features:
            if name in ("image", picture):
                raise ValueError(f"features {name!r}: the picture is always there, as 'image'")
            if name not in known:
                raise ValueError(
                    f"features {name!r}: {folder} has no such feature; allowed are "
                    f"{', '.join(known)}"
                )
            if known[name].shape == ANY_LENGTH:
                raise ValueError(
                    f"features {name!r}: a list of another length in each record, which makes no "
                    "batch; the second element has the classes, float32 [batch, classes]"
                )
            if (first := wanted.setdefault(name, known[name])) != known[name]:
                raise ValueError(
                    f"features {name!r}: {known[name]} in {folder}, {first} in another folder; "
                    "leave it out, or ingest one of them again"
                )
    return tuple(wanted.values())


# The graph: records of one shard, of all shards, pictures, batches.


def _parse(data: tf.Tensor, offset: tf.Tensor, *, plan: _Pictures) -> Record:
    """A block of records, their pictures still encoded; the labels from 0."""
    parsed = _parse_sparse(data, {*_needed_specs(plan), *plan.specs})
    record: dict[str, Any] = {"image": parsed[_PICTURE[plan.schema]]}
    if plan.kind != "none":
        record["label"] = _labels_of(parsed[CLASS_FEATURES[plan.schema]], offset, plan=plan)
    if plan.encoding == "raw":
        record["size"] = parsed["size"]
    record["features"] = {spec.name: parsed[spec.name] for spec in plan.specs}
    return record


def _labels_of(stored: Any, offset: tf.Tensor, *, plan: _Pictures) -> tf.Tensor:
    """int64 [n], class ids from 0; bool [n, classes] where a record has several."""
    if plan.kind == "many":
        return multi_hot(stored.with_values(stored.values - offset), classes=plan.classes)
    class_id = stored - offset
    # A label that no model has a logit for would train as garbage, without an error on a GPU.
    known = tf.reduce_all((class_id >= 0) & (class_id < plan.classes))
    tf.debugging.Assert(known, [class_id])
    return class_id


def _needed_specs(plan: _Pictures) -> list[FeatureSpec]:
    return record_specs(plan.schema, plan.encoding, kind=plan.kind)


def record_specs(schema: str, encoding: str, *, kind: str = "one") -> list[FeatureSpec]:
    """Returns the features of a record that picture and class are read from, in this order.

    For the encoding "raw" one more, the picture's height and width.

    Args:
      schema: one of example.SCHEMAS.
      encoding: one of image.ENCODINGS.
      kind: of the labels, one of labels.KINDS; without labels there is no class.
    """
    specs = [FeatureSpec(_PICTURE[schema], "bytes")]
    if kind != "none":
        shape = ANY_LENGTH if kind == "many" else ()
        specs.append(FeatureSpec(CLASS_FEATURES[schema], "int64", shape))
    return specs + ([FeatureSpec("size", "int64", (2,))] if encoding == "raw" else [])


def _read_shard(
    path: tf.Tensor,
    first: tf.Tensor,
    records: tf.Tensor,
    offset: tf.Tensor,
    *,
    plan: _Pictures,
    buffer: int | None,
) -> tf.data.Dataset:
    """The records of one file, from `first`: exactly so many, or an error that names the file.

    TensorFlow's own errors name no file. So they end the file early, and what then is asked for
    beyond its end comes from a data set that finds out what is wrong and says so. It is not
    touched as long as the file is whole.
    """
    # By blocks, since for small pictures a call costs more than the parsing.
    data = tf.data.TFRecordDataset(path, buffer_size=buffer).skip(first).take(records)
    blocks = data.batch(_BLOCK).map(lambda data: _parse(data, offset, plan=plan))
    whole = blocks.ignore_errors(log_warning=True).unbatch()
    fault = _explain_fault(path, first, records, offset, plan=plan)
    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), whole.element_spec
    )
    fault = fault.map(lambda _: nothing)
    return whole.concatenate(fault).take(records)


def _explain_fault(
    path: tf.Tensor, first: tf.Tensor, records: tf.Tensor, offset: tf.Tensor, *, plan: _Pictures
) -> tf.data.Dataset:
    """A data set of bool whose first element is an error that says what is wrong with a file."""
    data = tf.data.TFRecordDataset(path).skip(first)

    def fail(problem: str) -> tf.data.Dataset:
        def assert_false(path: tf.Tensor) -> tf.Tensor:
            text = tf.strings.join([path, ": ", problem, _FAULT_REMEDY])
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(path, ""), [text])]):
                return tf.constant(True)

        return tf.data.Dataset.from_tensors(path).map(assert_false)

    def demand(readable: tf.data.Dataset, problem: str) -> tf.data.Dataset:
        """No element if all records can be read so, else the error."""
        readable = readable.map(lambda _: True).ignore_errors()
        return readable.concatenate(fail(problem)).take(records).filter(lambda _: False)

    faults = demand(data, "a record is damaged, or the file was cut")
    for spec in sorted({*_needed_specs(plan), *plan.specs}, key=lambda spec: spec.name):
        parsed = data.map(lambda record, spec=spec: parse_record(record, specs=[spec]))
        form = f"{spec.dtype}{list(spec.shape)}" if spec.shape else spec.dtype
        form = f"{spec.dtype}[...]" if spec.shape == ANY_LENGTH else form
        faults = faults.concatenate(
            demand(parsed, f"a record has no feature {spec.name!r} of type {form}")
        )
    labels = data.batch(1).map(lambda record: _parse(record, offset, plan=plan))
    problem = f"a record's class is none of the {plan.classes} that dataset.json names"
    if plan.kind == "many":
        problem = (
            f"a record has no class, or one that is none of the {plan.classes} that dataset.json "
            "names"
        )
    faults = faults.concatenate(demand(labels, problem))
    return faults.concatenate(fail("could not be read at first, and then could"))


def find_fault(error: BaseException) -> str:
    """Returns what an error that came out of open_dataset's graph says of a file, on one line.

    TensorFlow wraps it in several lines of its own; "" for an error that is not of this kind.
    """
    pattern = rf"assertion failed: \[(.*{re.escape(_FAULT_REMEDY)})\]"
    found = re.search(pattern, str(error))
    return found[1].replace("\\'", "'") if found else ""


def _read_records(reading: _Reading) -> tf.data.Dataset:
    """All records of a host: in file order, or in training of several files by turns."""
    shards, seed = reading.shards, reading.seed
    paths = tf.data.Dataset.from_tensor_slices(
        (
            [shard.path for shard in shards],
            tf.constant([shard.first for shard in shards], tf.int64),
            tf.constant([shard.records for shard in shards], tf.int64),
            tf.constant([shard.label_offset for shard in shards], tf.int64),
        )
    )
    read = functools.partial(
        _read_shard,
        plan=reading.plan,
        buffer=_REMOTE_BUFFER if files.is_remote(shards[0].path) else None,
    )
    if not reading.order.training:
        return paths.flat_map(read)
    if not reading.cache:  # what is cached would freeze the order of the first epoch
        paths = paths.shuffle(len(shards), seed=seed)
    turns = min(_OPEN_SHARDS, len(shards))
    return paths.interleave(read, turns, num_parallel_calls=min(reading.calls, turns))


def _decode(record: Record, *, plan: _Pictures) -> Record:
    image = _decode_picture(record["image"], record.get("size"), plan=plan)
    return {**_without_size(record), "image": image}


def _without_size(record: Record) -> Record:
    return {name: record[name] for name in record if name != "size"}


def _decode_picture(data: tf.Tensor, size: tf.Tensor | None, *, plan: _Pictures) -> tf.Tensor:
    image = decode_image(data, encoding=plan.encoding, channels=plan.channels, size=size)
    if plan.resize:
        image = resize_image(image, size=plan.size)
    return tf.ensure_shape(image, plan.shape)


def _decode_block(block: Record, *, plan: _Pictures, count: int) -> Record:
    """A block of records at once: a call for each would cost a fifth of the decoding."""
    if plan.encoding == "raw" and not plan.resize:
        same = tf.reduce_all(block["size"] == tf.constant(plan.size, tf.int64))
        with tf.control_dependencies([tf.debugging.Assert(same, [block["size"]])]):
            levels = tf.io.decode_raw(block["image"], tf.uint8)
        images = tf.reshape(levels, [count, *plan.shape])
    else:
        # Not tf.map_fn, whose loop costs more, and copies every picture once more.
        data = tf.unstack(block["image"], num=count)
        sizes = tf.unstack(block["size"], num=count) if "size" in block else [None] * count
        images = tf.stack(
            [_decode_picture(*pair, plan=plan) for pair in zip(data, sizes, strict=True)]
        )
    return {**_without_size(block), "image": images}


def _batch_decoded(data: tf.data.Dataset, *, reading: _Reading) -> tf.data.Dataset:
    """Whole batches of decoded records, from records."""
    plan, batch_size = reading.plan, reading.batch_size
    most = max(1, min(_DECODED_PICTURES, _DECODED_BYTES // math.prod(plan.shape)))
    count = next(n for n in range(min(most, batch_size), 0, -1) if batch_size % n == 0)
    data = data.batch(count, drop_remainder=True)
    data = data.map(functools.partial(_decode_block, plan=plan, count=count), reading.calls)
    if count == batch_size:
        return data

    def join(blocks: tf.Tensor) -> tf.Tensor:
        joined = tf.reshape(blocks, tf.concat([[batch_size], tf.shape(blocks)[2:]], 0))
        return tf.ensure_shape(joined, [batch_size, *blocks.shape[2:]])

    data = data.batch(batch_size // count, drop_remainder=True)
    return data.map(lambda record: tf.nest.map_structure(join, record))


def _augment(data: tf.data.Dataset, *, augment: Augment, reading: _Reading) -> tf.data.Dataset:
    seeded = _with_seed(augment)
    if seeded is None:
        return data.map(lambda r: {**r, "image": augment(r["image"])}, reading.calls)
    # A seed for each picture, another one in each epoch, and none that a thread gets by chance.
    seeds = tf.data.Dataset.random(seed=reading.seed, rerandomize_each_iteration=True)
    seeds = seeds.map(lambda number: tf.cast(number - 2**31, tf.int32)).batch(2, True)
    return tf.data.Dataset.zip((data, seeds)).map(
        lambda r, seed: {**r, "image": seeded(r["image"], seed)}, reading.calls
    )


def _with_seed(augment: Augment) -> Augment | None:
    """The function of a picture and a seed that it is, or None if it is one of a picture alone.

    Raises:
      ValueError: it requires more than that.
    """
    required = [
        parameter
        for parameter in inspect.signature(augment).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    # What functools.partial gives by name, and all that follows it, can be given by name only.
    named = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) > 2 or named not in ([], ["seed"]):
        names = ", ".join(p.name for p in required)
        raise ValueError(
            f"augment: requires {names}; a picture and a seed are all that it is called with: give "
            "the others with functools.partial"
        )
    if named:
        return lambda image, seed: augment(image, seed=seed)
    return augment if len(required) == 2 else None


def check_augment(augment: Augment, *, shape: Sequence[int]) -> None:
    """Traces an augmentation and refuses what could not feed an accelerator.

    Args:
      augment: called with a picture, uint8 of the shape, and, if it requires a second argument, or
        one by the name of seed, with a seed, int32 [2]; returns a picture.
      shape: (height, width, channels).

    Raises:
      ValueError: it requires other arguments, calls back into Python, or returns no picture of
        static shape.
    """
    inputs, seeded = [tf.TensorSpec(shape, tf.uint8)], _with_seed(augment)
    if seeded is not None:
        inputs.append(tf.TensorSpec([2], tf.int32))
    traced = tf.function(seeded or augment).get_concrete_function(*inputs)
    graph = traced.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    for node in nodes:
        if node.op in _PYTHON_OPS:
            raise ValueError(
                f"augment: calls Python from the graph (op {node.op}, node {node.name}), which "
                "holds up every thread and fails on a remote TPU; use TensorFlow operations only"
            )
    result = traced.structured_outputs
    if not isinstance(result, tf.Tensor | tf.TensorSpec):
        raise ValueError(f"augment: returns {result!r}, must return one tensor, the picture")
    static = result.shape.rank == 3 and result.shape.is_fully_defined()
    if not static or not (result.dtype == tf.uint8 or result.dtype.is_floating):
        raise ValueError(
            f"augment: returns {result.dtype.name} {result.shape}, must be uint8 or float of a "
            "static shape [height, width, channels]; end it with tf.ensure_shape"
        )


def _shuffle_size(
    shards: Sequence[ShardFile], *, buffer: int | None, limit: int, each: float
) -> int:
    """Records in the shuffle buffer, of `each` bytes.

    Raises:
      ValueError: more are asked for than the limit allows, or it allows none.
    """
    check_positive("shuffle_bytes", limit)
    records = count_records(shards)
    if buffer is None:
        return max(1, min(records, int(limit / max(1, each))))
    check_count("shuffle_buffer", buffer)
    if (needed := min(buffer, records) * each) > limit:
        raise ValueError(
            f"shuffle_buffer {buffer}: takes some {needed / 1e6:.1f} MB, more than the "
            f"{limit / 1e6:.1f} MB of shuffle_bytes; give {max(1, int(limit / each))} or less, or "
            "raise shuffle_bytes"
        )
    return min(buffer, records)


def cache_path(
    folder: str,
    *,
    sources: Mapping[str, Manifest],
    shards: Sequence[ShardFile],
    split: str,
    preprocessing: Any,
) -> str:
    """Returns where the decoded pictures are cached: `<split>-<fingerprint>-<preprocessing>`.

    Other data, other shards and another preprocessing have another name, so that no cache is ever
    taken for another's.

    Args:
      folder: of all caches.
      sources: the data.
      shards: what this host reads of it.
      split: name of the split, a slice, or a sum.
      preprocessing: what is done to a record before it is cached; its repr() counts.
    """
    prints = [contents.fingerprint for contents in sources.values()]
    data = prints[0] if len(prints) == 1 else _digest(prints)
    names = [shard.path for shard in shards] if len(prints) > 1 else []
    names = names or [os.path.basename(shard.path) for shard in shards]
    names = [name + shard.part for name, shard in zip(names, shards, strict=True)]
    rest = _digest([names, repr(preprocessing), tf.__version__])
    name = re.sub(r"\W+", "_", split).strip("_")
    return files.join(folder, f"{name}-{data[:16]}-{rest[:16]}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _prepare_cache(cache: str, path: str) -> str:
    """Returns the prefix of the cache's files, in a folder that is there.

    Raises:
      ValueError: the folder cannot be made, or a cache in it is half filled.
    """
    try:
        tf.io.gfile.makedirs(path)
        names = tf.io.gfile.listdir(path)
    except tf.errors.OpError as error:
        raise ValueError(f"cache {cache}: cannot be used: {error.message}") from error
    locks = [name for name in names if name.endswith(".lockfile")]
    if locks and "records.index" not in names:
        raise ValueError(
            f"cache {cache}: {path} is being filled by another process, or one was stopped while "
            f"it filled it ({locks[0]}); wait for it, or delete that folder"
        )
    return files.join(path, "records")


def _pad(dataset: tf.data.Dataset, *, count: int) -> tf.data.Dataset:
    """Adds the weights: 1 for every record, 0 for the padding that fills the last batches."""
    real = dataset.map(lambda record: {**record, "weight": tf.constant(1.0)})
    if not count:
        return real
    empty = tf.nest.map_structure(lambda spec: tf.zeros(spec.shape, spec.dtype), real.element_spec)
    return real.concatenate(tf.data.Dataset.from_tensors(empty).repeat(count))


def _finish(data: tf.data.Dataset, *, reading: _Reading, weighted: bool) -> tf.data.Dataset:
    """Batches of records as tuples."""

    def finish(batch: Record) -> Any:
        image = convert_image(batch["image"], dtype=reading.dtype)
        first = {"image": image, **batch["features"]} if reading.plan.specs else image
        parts = [first]
        if reading.plan.kind == "many":
            parts.append(tf.cast(batch["label"], tf.float32))
        elif reading.plan.kind == "one":
            parts.append(batch["label"])
        if weighted:
            parts.append(batch["weight"])
        return tuple(parts) if len(parts) > 1 else first

    # A batch at a time: a call costs as much as the conversion of a small picture.
    return data.map(finish, reading.calls)


def _make_for_training(reading: _Reading, augment: Augment | None) -> tf.data.Dataset:
    order, calls = reading.order, reading.calls
    data = _read_records(reading)
    if reading.cache:
        # Before the shuffle and the augmentation, which else were those of the first epoch for
        # ever.
        data = data.map(functools.partial(_decode, plan=reading.plan), calls)
        data = data.cache("" if reading.cache == "memory" else reading.cache)
    data = data.shuffle(reading.buffer, seed=reading.seed)
    # After the shuffle: all of an epoch is seen before any of the next. Before the decoding: no
    # thread idles where one epoch meets another.
    data = data.repeat() if order.repeat else data
    # Decoded after the shuffle: a picture then takes ten times the memory.
    if not reading.cache and augment is None and order.drop_remainder:
        data = _batch_decoded(data, reading=reading)
    else:
        if not reading.cache:
            data = data.map(functools.partial(_decode, plan=reading.plan), calls)
        if augment is not None:
            data = _augment(data, augment=augment, reading=reading)
        # Whole batches have a static shape, without which a TPU cannot compile.
        data = data.batch(reading.batch_size, drop_remainder=order.drop_remainder)
    if not order.repeat and count_records(reading.shards) // reading.batch_size > reading.steps:
        # As many steps as the host with the fewest records. Not by take(), which would leave the
        # end unread, and so a cache for ever incomplete.
        data = data.enumerate().filter(lambda number, _: number < reading.steps)
        data = data.map(lambda _, batch: batch)
    return _finish(data, reading=reading, weighted=False)


def _make_for_evaluation(reading: _Reading) -> tf.data.Dataset:
    decode = functools.partial(_decode, plan=reading.plan)
    data = _read_records(reading).map(decode, reading.calls)
    if reading.cache:
        data = data.cache("" if reading.cache == "memory" else reading.cache)
    padding = reading.steps * reading.batch_size - count_records(reading.shards)
    data = _pad(data, count=padding)
    data = data.batch(reading.batch_size, drop_remainder=True)
    return _finish(data, reading=reading, weighted=True)


def _make_options(reading: _Reading, *, shard_count: int, ram_budget: int | None) -> Any:
    options = tf.data.Options()
    options.deterministic = reading.order.deterministic
    # With shards of its own for each host nothing is left to share out. Otherwise every worker
    # takes its share of the batches: sharing out files fails where there are fewer than workers.
    policy = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = (
        policy.OFF if shard_count > 1 else policy.DATA
    )
    if ram_budget is not None:
        options.autotune.ram_budget = ram_budget
    return options


class _EndsOnTime(tf.data.Dataset):
    """The same data set; its iterators are taken down by another thread."""

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        super().__init__(dataset._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        if tf.executing_eagerly() and hasattr(iterator, "_iterator_resource"):
            # Attributes go in the order in which they came: this one after the iterator's own.
            iterator._last_hold = _LastHold(iterator._iterator_resource)
        return iterator


class _LastHold:
    """Holds a resource longest, and lets go of it in a thread."""

    def __init__(self, resource: Any):
        self._held = [resource]

    def __del__(self) -> None:
        # Not threading.Thread: its start() takes a lock and waits, neither of which is safe in a
        # finalizer. At the interpreter's end no thread may start; then it goes here and now.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._held.clear, ())


def end_on_time(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set, its epochs ending with their last batch. open_dataset does this itself.

    Use it again after a transformation of your own. Without it the end of a finite data set with
    AUTOTUNE can come late by as much as the epoch took: whoever drops the iterator waits for its
    tuning thread, which sleeps ever longer and, in a race, overlooks that it was cancelled
    (TensorFlow 2.21, Model::OptimizeLoop). Here a thread of its own does that waiting.

    TensorFlow has no public way to this. Where a later one has renamed what is used here, the data
    set comes back as it is: nothing is wrong then but the time, and tests/test_dataset.py fails.

    Args:
      dataset: any.

    Returns:
      The same elements and options.
    """
    return _EndsOnTime(dataset) if hasattr(dataset, "_variant_tensor") else dataset


def _settle_order(
    *,
    training: bool,
    repeat: bool | None,
    deterministic: bool | None,
    drop_remainder: bool | None,
    augment: Augment | None,
) -> _Order:
    """Returns the order with the defaults filled in.

    Raises:
      ValueError: the arguments contradict each other.
    """
    if training:
        order = _Order(True, repeat is not False, bool(deterministic), drop_remainder is not False)
        if order.repeat and not order.drop_remainder:
            raise ValueError("drop_remainder False: needs repeat=False; else no batch is the last")
        return order
    for name, value, wrong in (
        ("repeat", repeat, bool(repeat)),
        ("deterministic", deterministic, deterministic is False),
        ("drop_remainder", drop_remainder, bool(drop_remainder)),
        ("augment", augment, augment is not None),
    ):
        if wrong:
            raise ValueError(
                f"{name} {value}: not with training=False, which gives every record once, as it "
                "is, in file order; leave it out, or give training=True"
            )
    return _Order(training=False, repeat=False, deterministic=True, drop_remainder=False)


def _check_numbers(
    batch_size: int, image_dtype: Any, parallel_calls: int, shard_index: int, shard_count: int
) -> tf.DType:
    check_count("batch_size", batch_size)
    check_count("shard_count", shard_count)
    if parallel_calls != AUTOTUNE:
        check_count("parallel_calls", parallel_calls)
    check_whole("shard_index", shard_index)
    if not 0 <= shard_index < shard_count:
        raise ValueError(
            f"shard_index {shard_index}: allowed are 0 to {shard_count - 1}, since shard_count is "
            f"{shard_count}"
        )
    allowed = {name: dtype for dtype in IMAGE_DTYPES for name in (dtype, dtype.name)}
    if image_dtype not in allowed:
        shown = getattr(image_dtype, "name", image_dtype)
        raise ValueError(
            f"image_dtype {shown}: allowed are {', '.join(d.name for d in IMAGE_DTYPES)}"
        )
    return allowed[image_dtype]


def _plan_cache(
    cache: str | os.PathLike | None,
    *,
    sources: Mapping[str, Manifest],
    shards: Sequence[ShardFile],
    split: str,
    plan: _Pictures,
    order: _Order,
) -> tuple[str | None, float]:
    """Returns the prefix of the cache's files, and the bytes of a record in the shuffle buffer."""
    labels = plan.classes if plan.kind == "many" else 0  # a byte each
    if cache is None:
        # A host whose shards are all empty has nothing but padding to deliver.
        held = sum(shard.bytes_read for shard in shards)
        return None, held / max(1, count_records(shards)) + labels
    if cache == "memory":
        return "memory", 1  # the buffer holds the cache's own tensors
    folder = os.fspath(cache)
    # What training wrote is not in file order, nor, unless asked for, in an order that recurs.
    preprocessing = (plan, order.training, order.deterministic)
    path = cache_path(
        folder, sources=sources, shards=shards, split=split, preprocessing=preprocessing
    )
    return _prepare_cache(folder, path), math.prod(plan.shape) + labels


def open_dataset(
    folders: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    split: str = "train",
    batch_size: int = 128,
    training: bool = True,
    repeat: bool | None = None,
    image_dtype: tf.DType = tf.uint8,
    features: Sequence[str] | None = None,
    resize: tuple[int, int] | None = None,
    augment: Augment | None = None,
    cache: str | os.PathLike | None = None,
    seed: int | None = None,
    deterministic: bool | None = None,
    drop_remainder: bool | None = None,
    shuffle_buffer: int | None = None,
    shuffle_bytes: int = SHUFFLE_BYTES,
    shard_index: int = 0,
    shard_count: int = 1,
    parallel_calls: int = AUTOTUNE,
    ram_budget: int | None = None,
) -> tf.data.Dataset:
    """Opens data sets for training or evaluation.

    Training: shards and records shuffled, repeated without end, whole batches only. Evaluation:
    file order, every record exactly once, the last batch padded. docs/reading.md has examples.

    Args:
      folders: a data set's folder, or several that are read as one set.
      split: name of the split; or a slice as TFDS writes it, by position in file order, such as
        "train[:80%]", "train[100:200]" or "train[-10%:]"; or a sum, "train+test".
      batch_size: pictures in a batch; with several hosts, of this host.
      training: False for evaluation.
      repeat: training only; None means True there. False ends after one epoch.
      image_dtype: uint8 (0 to 255), or float32, bfloat16, float16 (0 to 1).
      features: names of further features; the first element then is a dict.
      resize: (height, width); needed where dataset.json's image_size is null.
      augment: training only; called with a picture, uint8 [height, width, channels], and with a
        seed, int32 [2], if it requires two arguments, or one by the name of seed; returns the
        picture, of static shape.
      cache: "memory", or a folder, to keep the decoded pictures in.
      seed: of the shuffles and of the augmentation's seeds; None for TensorFlow's global one.
      deterministic: training only; whether equal seeds give equal orders (slower). None: no.
      drop_remainder: training only; False, together with repeat=False, keeps a short last batch;
        hosts then may have unequal numbers of batches.
      shuffle_buffer: records in the shuffle buffer; None for as many as `shuffle_bytes` hold.
      shuffle_bytes: the most memory that the shuffle buffer may take.
      shard_index: number of this host, from 0.
      shard_count: number of hosts; each reads shards of its own.
      parallel_calls: threads for reading and for decoding, tuned by default.
      ram_budget: bytes that tuned buffers may take; None for half of the free memory.

    Returns:
      A tf.data.Dataset of (image, label), in evaluation (image, label, weight):
      image [batch, height, width, channels] of `image_dtype`, or a dict of it as "image" and of
      the features, each [batch, ...]; label int64 [batch], from 0 whatever the label offset, or,
      where records have several labels, float32 [batch, classes] of 1 for each class and 0;
      weight float32 [batch], 0 for padding, else 1. Where records have no labels there is no
      label: image alone, in evaluation (image, weight). Its cardinality is known.

    Raises:
      ValueError: an argument, a folder or a file is wrong, or they do not go together.
    """
    order = _settle_order(
        training=training,
        repeat=repeat,
        deterministic=deterministic,
        drop_remainder=drop_remainder,
        augment=augment,
    )
    dtype = _check_numbers(batch_size, image_dtype, parallel_calls, shard_index, shard_count)
    sources = load_sources(folders)
    plan = _plan_pictures(sources, features=features or (), resize=resize)
    if augment is not None:
        check_augment(augment, shape=plan.shape)
    hosts = share_shards(list_shards(sources, split=split), count=shard_count)
    shards = hosts[shard_index]
    check_files(shards)
    check_keys(sources)
    prefix, each = _plan_cache(
        cache, sources=sources, shards=shards, split=split, plan=plan, order=order
    )
    reading = _Reading(
        shards=shards,
        plan=plan,
        order=order,
        batch_size=batch_size,
        steps=count_steps(
            hosts if order.drop_remainder or not training else [shards],
            batch_size,
            drop_remainder=order.drop_remainder,
            split=split,
        ),
        dtype=dtype,
        seed=seed,
        buffer=_shuffle_size(shards, buffer=shuffle_buffer, limit=shuffle_bytes, each=each),
        cache=prefix,
        calls=parallel_calls,
    )
    data = _make_for_training(reading, augment) if training else _make_for_evaluation(reading)
    if not order.repeat:
        data = data.apply(tf.data.experimental.assert_cardinality(reading.steps))
    options = _make_options(reading, shard_count=shard_count, ram_budget=ram_budget)
    return end_on_time(data.prefetch(AUTOTUNE).with_options(options))
