"""`tpufeed analyze`: vocabulary and channel moments by tensorflow-transform, over index/.

    transform = analyze_datasets(["records"], output="transform")

Beam runs it over one row for each shard and class, never over pixels: index/ holds the sums.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow
import tensorflow as tf

from pipeline.folders import load_sources
from pipeline.runner import plan_run, run_pipeline
from pipeline.transform_fn import FOLDER, Transform, load_transform
from transforms import files
from transforms.labels import ONE_LABEL, Labelling
from transforms.manifest import INDEX_FOLDER, Manifest
from transforms.parquet import read_parquet
from transforms.records import DataError

# Assets of the SavedModel.
VOCABULARY = "labels"
FOUND = "labels_by_count"
_COLUMNS = ("label", "pixels", "channel_sum", "channel_sum_of_squares")
_NOTHING = -1

Row = dict[str, Any]


def summarize_index(
    data: bytes, *, training: bool, path: str, labelling: Labelling = ONE_LABEL
) -> Iterator[Row]:
    """Adds up one shard's index, label by label.

    Args:
      data: a parquet file of index/.
      training: whether its split is the training split, whose moments are wanted.
      path: of the file, for errors.
      labelling: how labels are read. Of several, the first stands for the record's pixels, so
        that these count once.

    Yields:
      label str; training 0 or 1; pixels int; channel_sum and channel_squares, lists of int.

    Raises:
      DataError: no index as tpufeed ingest writes it.
    """
    try:
        table = read_parquet(data, columns=list(_COLUMNS))
        columns = table.to_pydict()
        rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: no index of tpufeed ingest: {error}") from error
    totals: dict[str, list[int]] = {}
    for label, pixels, sums, squares in rows:
        values = [pixels, *sums, *squares]
        first, *others = labelling.split(label)
        before = totals.get(first, [0] * len(values))
        totals[first] = [a + b for a, b in zip(before, values, strict=True)]
        for other in others:
            totals.setdefault(other, [0] * len(values))
    for label, (pixels, *rest) in totals.items():
        half = len(rest) // 2
        yield {
            "label": label,
            "training": int(training),
            "pixels": pixels,
            "channel_sum": rest[:half],
            "channel_squares": rest[half:],
        }


def make_preprocessing_fn(vocabulary: str, *, classes: int) -> Callable[..., dict[str, tf.Tensor]]:
    """Returns tensorflow-transform's preprocessing_fn.

    It maps rows of `summarize_index` to `class`, the label's line in the vocabulary (-1 for
    none), and, the same for every row, to `classes`, the vocabulary's length, and to `pixels`,
    `channel_sum` and `channel_squares`, the exact totals over the training split. int64 all.

    Args:
      vocabulary: file with a label a line, in the order of their ids.
      classes: how many lines it has.
    """
    import tensorflow_transform as tft

    def preprocess(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.init_scope():
            lines = tf.lookup.TextFileInitializer(
                vocabulary,
                tf.string,
                tf.lookup.TextFileIndex.WHOLE_LINE,
                tf.int64,
                tf.lookup.TextFileIndex.LINE_NUMBER,
            )
            table = tf.lookup.StaticHashTable(lines, _NOTHING)
        # Not what class ids come from, since it goes by frequency; it is held against the
        # manifest's labels when all is done.
        tft.vocabulary(row["label"], vocab_filename=FOUND)
        rows = tf.shape(row["label"])[0]

        def to_all(total: tf.Tensor) -> tf.Tensor:
            return tf.repeat(total[tf.newaxis], rows, axis=0)

        wanted = row["training"]
        return {
            "class": table.lookup(row["label"]),
            "classes": to_all(tf.constant(classes, tf.int64)),
            "pixels": to_all(tft.sum(row["pixels"] * wanted)),
            **{
                name: to_all(tft.sum(row[name] * wanted[:, tf.newaxis], False))
                for name in ("channel_sum", "channel_squares")
            },
        }

    return preprocess


def analyze_datasets(folders: Sequence[str], *, output: str) -> Transform:
    """Writes the transform_fn of data sets that are read as one.

    Args:
      folders: of data sets.
      output: a new folder; gets transform_fn/ and transformed_metadata/.

    Returns:
      The transform_fn, loaded again and held against the first data set.

    Raises:
      ValueError: the folders do not fit each other, have no training records, or `output` is not
        empty.
      DataError: index/ does not hold what dataset.json says.
      RuntimeError: tensorflow-transform is not installed.
    """
    sources = load_sources(folders)
    manifest = next(iter(sources.values()))
    if manifest.label_kind == "none":
        raise ValueError(
            f"{', '.join(sources)}: the records have no labels (--unlabelled), so there is no "
            "vocabulary; the moments are in dataset.json"
        )
    if not any(m.splits["train"].records for m in sources.values() if "train" in m.splits):
        raise ValueError(f"{', '.join(sources)}: no record in a split train to take moments of")
    if tf.io.gfile.isdir(output) and tf.io.gfile.listdir(output):
        raise ValueError(f"--output {output}: is not empty: give a new folder")
    _import_transform()
    indexes = [
        (
            files.join(folder, INDEX_FOLDER, f"{shard.name.rpartition('.')[0]}.parquet"),
            name,
            contents.labelling,
        )
        for folder, contents in sources.items()
        for name, split in contents.splits.items()
        for shard in split.shards
    ]
    with tempfile.TemporaryDirectory(prefix="tpufeed-") as folder:
        vocabulary = os.path.join(folder, VOCABULARY)
        with open(vocabulary, "w", encoding="utf-8", newline="") as file:
            file.write("".join(f"{label}\n" for label in manifest.labels))
        run_pipeline(
            plan_run(()),
            lambda root: build(
                root, indexes, manifest=manifest, vocabulary=vocabulary, output=output, work=folder
            ),
        )
    transform = load_transform(output, manifest=manifest)
    _check_found(output, sources)
    _check_moments(transform, sources)
    return transform


def build(
    root: beam.Pipeline,
    indexes: Iterable[tuple[str, str, Labelling]],
    *,
    manifest: Manifest,
    vocabulary: str,
    output: str,
    work: str,
) -> None:
    """Adds the analysis to a pipeline.

    Args:
      root: the pipeline.
      indexes: (path, split, labelling) of each parquet file of index/.
      manifest: its labels and channels.
      vocabulary: file with a label a line.
      output: where transform_fn/ goes.
      work: a folder for what tensorflow-transform puts aside.
    """
    import tensorflow_transform.beam as tft_beam
    from tensorflow_transform.tf_metadata import dataset_metadata, schema_utils

    scalar = tf.io.FixedLenFeature([], tf.int64)
    channels = tf.io.FixedLenFeature([manifest.channels], tf.int64)
    spec = {
        "label": tf.io.FixedLenFeature([], tf.string),
        "training": scalar,
        "pixels": scalar,
        "channel_sum": channels,
        "channel_squares": channels,
    }
    metadata = dataset_metadata.DatasetMetadata(schema_utils.schema_from_feature_spec(spec))
    preprocess = make_preprocessing_fn(vocabulary, classes=len(manifest.labels))
    rows = (
        root
        | "Indexes" >> beam.Create(list(indexes))
        | "SummarizeIndex" >> beam.FlatMapTuple(_read_index)
    )
    with tft_beam.Context(temp_dir=work):
        transform = (rows, metadata) | "Analyze" >> tft_beam.AnalyzeDataset(preprocess)
        transform | "WriteTransform" >> tft_beam.WriteTransformFn(output)


def _read_index(path: str, split: str, labelling: Labelling) -> Iterator[Row]:
    try:
        data = files.read_file(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: run tpufeed verify") from error
    training = split == "train"
    for row in summarize_index(data, training=training, path=path, labelling=labelling):
        yield {**row, "label": row["label"].encode()}


def _import_transform() -> None:
    try:
        import tensorflow_transform  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"tensorflow-transform cannot be imported ({error}): pip install 'tpufeed[train]' on "
            "Python 3.11 or later; beside Beam it has no version for 3.10"
        ) from error


def _check_found(output: str, sources: Mapping[str, Manifest]) -> None:
    """Raises DataError unless tensorflow-transform found the labels that dataset.json counts."""
    path = files.join(output, FOLDER, "assets", FOUND)
    with tf.io.gfile.GFile(path, "rb") as file:
        found = set(file.read().decode().split("\n")) - {""}
    counted = {
        label
        for contents in sources.values()
        for split in contents.splits.values()
        for label, count in split.classes.items()
        if count
    }
    if found != counted:
        odd = sorted(found ^ counted)[0]
        where = "index/" if odd in found else "dataset.json"
        raise DataError(
            f"{', '.join(sources)}: label {odd!r} is in {where} only: run tpufeed verify"
        )


def _check_moments(transform: Transform, sources: Mapping[str, Manifest]) -> None:
    """Raises DataError unless the moments of a single data set are those of its dataset.json."""
    if len(sources) > 1:
        return
    (folder, manifest), *_ = sources.items()
    for name, mine, theirs in (
        ("channel_mean", transform.mean, manifest.channel_mean),
        ("channel_std", transform.std, manifest.channel_std),
    ):
        if theirs is None or not np.allclose(mine, theirs, rtol=0, atol=1e-9):
            raise DataError(
                f"{folder}: {name} is {mine} by index/ and {theirs} in dataset.json: run tpufeed "
                "verify"
            )
