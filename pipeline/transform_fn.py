"""What `tpufeed analyze` wrote, as training and serving use it: with TensorFlow alone.

A transform_fn is an ordinary SavedModel. It maps rows of index/ to the class id of their label, by
its vocabulary, and to the totals over the training split from which the channels' moments come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from transforms.files import join
from transforms.manifest import Manifest

FOLDER = "transform_fn"  # tensorflow-transform's own name for it, below --output


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transform_fn that fits a data set.

    Attributes:
      path: of the SavedModel.
      module: the SavedModel as TensorFlow loads it.
      mean: of each channel over the training split, scale 0 to 1.
      std: standard deviation of each channel, scale 0 to 1.
    """

    path: str
    module: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_transform(folder: str, *, manifest: Manifest) -> Transform:
    """Loads a transform_fn and holds it against a data set.

    Args:
      folder: --output of `tpufeed analyze`.
      manifest: of the data set that it is to be used with.

    Raises:
      ValueError: there is none, or its classes, their order or its channels are others than the
        data set's.
    """
    path = join(folder, FOLDER)
    try:
        module = tf.saved_model.load(path)
        told = _ask(module, manifest, where=f"--transform {folder}")
    except (OSError, KeyError, AttributeError, tf.errors.OpError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--transform {folder}: holds no {FOLDER} of tpufeed analyze: {reason}"
        ) from error
    _check_labels(told, manifest.labels, where=f"--transform {folder}")
    mean, std = moments(told["pixels"][0], told["channel_sum"][0], told["channel_squares"][0])
    return Transform(path, module, mean, std)


def _ask(module: Any, manifest: Manifest, *, where: str) -> dict[str, np.ndarray]:
    """What the function makes of one row for each label; the totals are the same in each."""
    count, channels = len(manifest.labels), manifest.channels
    inputs = module.signatures["serving_default"].structured_input_signature[1].values()
    wanted = next(spec.shape[1] for spec in inputs if spec.shape.rank == 2)
    if wanted != channels:
        raise ValueError(
            f"{where}: is of pictures with {wanted} channel(s), the data set's have {channels}: "
            "run tpufeed analyze on it"
        )
    rows = {
        "label": tf.constant(list(manifest.labels)),
        "training": tf.zeros([count], tf.int64),
        "pixels": tf.zeros([count], tf.int64),
        "channel_sum": tf.zeros([count, channels], tf.int64),
        "channel_squares": tf.zeros([count, channels], tf.int64),
    }
    told = module.transform_fn(rows)
    return {name: tensor.numpy() for name, tensor in told.items()}


def _check_labels(told: dict[str, np.ndarray], labels: Sequence[str], *, where: str) -> None:
    for class_id, (label, found) in enumerate(zip(labels, told["class"].tolist(), strict=True)):
        if found != class_id:
            known = f"class {found}" if found >= 0 else "no class"
            raise ValueError(
                f"{where}: {label!r} is {known} in its vocabulary, class {class_id} in "
                "dataset.json: run tpufeed analyze on this data set"
            )
    if (count := int(told["classes"][0])) != len(labels):
        raise ValueError(
            f"{where}: its vocabulary has {count} classes, dataset.json {len(labels)}: run "
            "tpufeed analyze on this data set"
        )


def moments(
    pixels: int, sums: Sequence[int], squares: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and standard deviation of each channel, scale 0 to 1.

    Args:
      pixels: how many.
      sums: of the levels, 0 to 255, of each channel.
      squares: of the levels' squares, of each channel.
    """
    count = int(pixels)
    means = [int(total) / (255 * count) for total in sums]
    # In whole numbers up to the root: a difference of large floats would lose the small ones.
    variances = [
        (int(square) * count - int(total) ** 2) / (255 * count) ** 2
        for total, square in zip(sums, squares, strict=True)
    ]
    return tuple(means), tuple(variance**0.5 for variance in variances)
