"""How to make a data set again, and how to read it: a command and a program, from dataset.json."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from transforms.example import CLASS_FEATURES
from transforms.manifest import Manifest

# Everything that dataset.json's config holds; a test compares it with IngestConfig. Beside it
# there may be label_separator or unlabelled.
FIELDS = (
    *("inputs", "output", "root", "pixels", "schema", "weights", "split_by", "seed", "shards"),
    *("shard_size", "class_names", "new_classes", "label_offset", "max_reject_rate", "exclude"),
    *("duplicates", "min_size", "max_area", "max_aspect_ratio", "exif"),
)


def quote(text: str) -> str:
    """Returns one word for a shell: as it is, in '...', or in bash's $'...' where it must not show.

    Control characters, marks that turn the writing direction, and bytes that are not UTF-8 come
    out as escapes, so that what is copied from a page is what was meant.
    """
    if text.isprintable():
        return shlex.quote(text)
    out = []
    for character in text:
        if character.isprintable() and character not in "'\\":
            out.append(character)
        else:
            # Two digits are the most that bash takes, so a digit may follow.
            out.extend(f"\\x{byte:02x}" for byte in os.fsencode(character))
    return f"$'{''.join(out)}'"


def command_of(config: Mapping[str, Any]) -> str:
    """Returns the `tpufeed ingest` command that makes a data set again.

    Beam's own options are not in dataset.json; they change no byte.

    Args:
      config: of dataset.json.
    """
    words = [quote(word) for word in _flags(config)]
    lines = ["tpufeed ingest"]
    for word in words:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _flags(config: Mapping[str, Any]) -> list[str]:
    words = []
    for source in config["inputs"]:
        split = source["split"]
        words += ["--input", f"{split}={source['pattern']}" if split else source["pattern"]]
    words += ["--output", config["output"]]
    if config["root"]:
        words += ["--root", config["root"]]
    pixels = config["pixels"]
    words += ["--image-size", f"{pixels['width']}x{pixels['height']}"]
    words += ["--resize-mode", pixels["mode"], "--channels", str(pixels["channels"])]
    words += ["--encoding", pixels["encoding"], "--quality", str(pixels["quality"])]
    words += ["--background", ",".join(map(str, pixels["background"]))]
    words += ["--max-pixels", str(pixels["max_pixels"]), "--schema", config["schema"]]
    if dict(config["weights"]) != {"train": "1"}:
        words += ["--split", ",".join(f"{n}={share}" for n, share in config["weights"].items())]
    by = config["split_by"]
    if by["kind"] != "key":
        words += ["--split-by", f"{by['kind']}:{by['value']}"]
    words += ["--seed", str(config["seed"])]
    if config["shards"] is not None:
        words += ["--shards", str(config["shards"])]
    else:
        words += ["--shard-size", str(config["shard_size"])]
    if config["class_names"]:
        words += ["--class-names", config["class_names"], "--new-classes", config["new_classes"]]
    words += ["--label-offset", str(config["label_offset"])]
    if config.get("label_separator"):
        words += ["--label-separator", config["label_separator"]]
    if config.get("unlabelled"):
        words += ["--unlabelled"]
    words += ["--max-reject-rate", repr(config["max_reject_rate"])]
    if config["exclude"]:
        words += ["--exclude", config["exclude"]]
    if config["duplicates"] != "keep":
        words += ["--duplicates", config["duplicates"]]
    for name in ("min_size", "max_area", "max_aspect_ratio"):
        if name in config:
            words += [f"--{name.replace('_', '-')}", str(config[name])]
    if config.get("exif"):
        words += ["--exif", ",".join(config["exif"])]
    return words


def reader_of(manifest: Manifest, *, directory: str, split: str) -> str:
    """Returns a Python program that reads a batch with tpufeed's reader."""
    resize = "" if manifest.image_size else ", resize=(224, 224)"
    labelled = manifest.label_kind != "none"
    names, shown = ("images, labels", ", labels.numpy()") if labelled else ("images", "")
    return f"""\
from pipeline.dataset import open_dataset

batches = open_dataset({_literal(directory)}, split={_literal(split)}, batch_size=32{resize})
for {names} in batches.take(1):
    print(images.shape{shown})
"""


def plain_reader_of(manifest: Manifest, *, directory: str, split: str) -> str:
    """Returns a Python program that reads a record with TensorFlow alone."""
    image = {"flowers": "image", "imagenet": "image/encoded", "tfds": "image"}[manifest.schema]
    label = CLASS_FEATURES[manifest.schema]
    form = {
        "one": "tf.io.FixedLenFeature([], tf.int64)",
        "many": "tf.io.RaggedFeature(tf.int64)",
        "none": "",
    }[manifest.label_kind]
    read = f'\n    "{label}": {form},' if form else ""
    shown = f', example["{label}"].numpy()' if form else ""
    raw = manifest.encoding == "raw"
    size = '\n    "size": tf.io.FixedLenFeature([2], tf.int64),' if raw else ""
    if raw:
        decode = (
            'tf.reshape(tf.io.decode_raw(example["image"], tf.uint8), '
            f'[*tf.unstack(example["size"]), {manifest.channels}])'
        )
    else:
        decode = f'tf.io.decode_image(example["{image}"], channels={manifest.channels})'
    return f"""\
import tensorflow as tf

folder = {_literal(directory)}
names = sorted(name for name in tf.io.gfile.listdir(folder) if name.startswith("{split}-"))
files = [tf.io.gfile.join(folder, name) for name in names]
spec = {{
    "{image}": tf.io.FixedLenFeature([], tf.string),{read}{size}
}}
for record in tf.data.TFRecordDataset(files).take(1):
    example = tf.io.parse_single_example(record, spec)
    picture = {decode}
    print(picture.shape{shown})
"""


def _literal(text: str) -> str:
    """A Python literal, of which the page shows nothing that it does not mean."""
    return repr(text).encode("ascii", "backslashreplace").decode()
