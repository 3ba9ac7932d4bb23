"""`tpufeed export`: a run's model as a SavedModel that takes records or image files.

    export_run(ExportConfig(run="run", output="serving"))

Signatures, both with label string [batch], probability float32 [batch], probabilities and logits
float32 [batch, classes] as outputs:

- `serving_default`: `records`, string [batch], serialized tf.train.Examples as in the data set;
- `image`: `images`, string [batch], files as they are: JPEG, PNG, GIF or BMP.

The second does in TensorFlow what transforms.image does in Pillow, as far as TensorFlow can, and
refuses the rest. `tpufeed predict` has no such limits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipeline import serving_image
from pipeline.config import ExportConfig
from pipeline.dataset import decode_image, parse_record, record_specs, resize_image
from pipeline.folders import load_sources
from pipeline.history import first_line, load_history
from pipeline.models import load_objects, one_line
from pipeline.transform_fn import Transform, load_transform
from transforms.files import join
from transforms.image import PixelPolicy
from transforms.manifest import Manifest

# TensorFlow Serving's place for files of one's own beside a model.
FACTS = "assets.extra/tpufeed.json"


@dataclasses.dataclass(frozen=True)
class ServingFacts:
    """What goes with an exported model, so that pictures can be prepared as ingest prepared them.

    Attributes:
      data: fingerprint of each data set that it was trained on.
      labels: in id order.
      schema: one of example.SCHEMAS.
      encoding: of the pictures in records.
      pixels: the pixel policy of ingest.
      image_size: height and width that the model takes.
    """

    data: tuple[str, ...]
    labels: tuple[str, ...]
    schema: str
    encoding: str
    pixels: PixelPolicy
    image_size: tuple[int, int]

    def to_json(self) -> str:
        """Returns the text of FACTS."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def parse_facts(text: str, *, path: str) -> ServingFacts:
    """Reads what ServingFacts.to_json wrote.

    Raises:
      ValueError: it did not.
    """
    try:
        document = json.loads(text)
        pixels = document.pop("pixels")
        background = tuple(pixels.pop("background"))
        height, width = document["image_size"]
        return ServingFacts(
            data=tuple(document["data"]),
            labels=tuple(document["labels"]),
            schema=document["schema"],
            encoding=document["encoding"],
            pixels=PixelPolicy(**pixels, background=background),
            image_size=(height, width),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not as tpufeed export writes it: {error!r}") from error


class Server(tf.Module):
    """A model between records, or image files, and labels."""

    def __init__(self, model: Any, facts: ServingFacts, *, transform: Transform | None = None):
        """Takes a model from pixels to logits.

        Args:
          model: Keras's; uint8 levels in, logits out.
          facts: how pictures are stored and what the classes are called.
          transform: of tpufeed analyze; goes along with its vocabulary.
        """
        super().__init__()
        self._facts = facts
        self.model = model
        self.transform = transform.module if transform else None
        self._labels = tf.constant(list(facts.labels))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="records")])
    def record(self, records: tf.Tensor) -> dict[str, tf.Tensor]:
        """Answers for records, string [batch]."""
        return self._answer(self.pixels_of_records(records))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="images")])
    def image(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Answers for image files, string [batch]."""
        return self._answer(self.pixels_of_images(images))

    def pixels_of_records(self, records: tf.Tensor) -> tf.Tensor:
        """Returns uint8 [batch, height, width, channels] of records, as the reader does."""
        facts = self._facts
        picture, _, *size = record_specs(facts.schema, facts.encoding)
        parsed = parse_record(records, specs=[picture, *size])
        sizes = parsed["size"] if size else tf.zeros([tf.shape(records)[0], 2], tf.int64)
        return self._map(self._decode, (parsed[picture.name], sizes))

    def pixels_of_images(self, images: tf.Tensor) -> tf.Tensor:
        """Returns uint8 [batch, height, width, channels] of image files."""
        return self._map(self._prepare, images)

    def _map(self, function: Any, elements: Any) -> tf.Tensor:
        shape = (*self._facts.image_size, self._facts.pixels.channels)
        return tf.map_fn(function, elements, fn_output_signature=tf.TensorSpec(shape, tf.uint8))

    def _decode(self, element: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        facts = self._facts
        data, size = element
        channels = facts.pixels.channels
        return self._fit(decode_image(data, encoding=facts.encoding, channels=channels, size=size))

    def _prepare(self, data: tf.Tensor) -> tf.Tensor:
        return self._fit(serving_image.prepare_image(data, policy=self._facts.pixels))

    def _fit(self, image: tf.Tensor) -> tf.Tensor:
        facts = self._facts
        stored = (facts.pixels.height, facts.pixels.width) if facts.pixels.fixed_size else None
        if facts.image_size != stored:
            image = resize_image(image, size=facts.image_size)
        return tf.ensure_shape(image, [*facts.image_size, facts.pixels.channels])

    def _answer(self, pixels: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = tf.cast(self.model(pixels, training=False), tf.float32)
        probabilities = tf.nn.softmax(logits)
        best = tf.argmax(logits, axis=-1)
        return {
            "label": tf.gather(self._labels, best),
            "probability": tf.reduce_max(probabilities, axis=-1),
            "probabilities": probabilities,
            "logits": logits,
        }


def export_run(config: ExportConfig) -> ServingFacts:
    """Writes the model of a finished run as a SavedModel.

    Args:
      config: what to do.

    Returns:
      What was written beside it.

    Raises:
      ValueError: the run is not finished, its model cannot be loaded, its data sets are not those
        it was trained on, or the output is not empty.
      OSError: the output cannot be written.
    """
    if tf.io.gfile.isdir(config.output) and tf.io.gfile.listdir(config.output):
        raise ValueError(f"--output {config.output}: is not empty: give a new folder")
    history = load_history(config.run)
    path = join(config.run, "model.keras")
    if not tf.io.gfile.exists(path):
        raise ValueError(
            f"--run {config.run}: has no model.keras, so the run did not end: "
            "tpufeed train --resume, or train anew"
        )
    sources = load_sources(config.data or tuple(history["config"]["data"]))
    prints = tuple(contents.fingerprint for contents in sources.values())
    if prints != history["data"]:
        raise ValueError(
            f"--run {config.run}: was trained on other data than {', '.join(sources)} holds now: "
            "give the folders of the run with --data"
        )
    facts = _make_facts(history, sources)
    model = _load_model(config.run, config.layers)
    name = history["config"].get("transform")
    manifest = next(iter(sources.values()))
    transform = load_transform(name, manifest=manifest) if name else None
    _save(Server(model, facts, transform=transform), facts, config.output)
    return facts


def _load_model(run: str, layers: str | None) -> Any:
    """The model of a run; no file is run for it but the one that was given."""
    import keras

    objects = load_objects(layers) if layers else None
    try:
        path = join(run, "model.keras")
        return keras.models.load_model(path, custom_objects=objects, compile=False)
    except Exception as error:  # zipfile, h5py, Keras and layers raise what they like
        hint = "" if layers else "; if it has layer classes of its own, give --layers FILE.py"
        raise ValueError(
            f"--run {run}: model.keras cannot be loaded: {one_line(error)}{hint}"
        ) from error


def _make_facts(history: Mapping[str, Any], sources: Mapping[str, Manifest]) -> ServingFacts:
    policies = {folder: _policy_of(contents) for folder, contents in sources.items()}
    (first, policy), *others = policies.items()
    for folder, other in others:
        if other != policy:
            raise ValueError(
                f"{first} and {folder}: were ingested with {policy} and {other}: a served picture "
                "can be prepared in one way only; ingest one of them again"
            )
    manifest = sources[first]
    size = history["config"].get("image_size") or manifest.image_size
    assert size is not None  # else it could not have been trained on
    return ServingFacts(
        data=history["data"],
        labels=manifest.labels,
        schema=manifest.schema,
        encoding=manifest.encoding,
        pixels=policy,
        image_size=(int(size[0]), int(size[1])),
    )


def _policy_of(manifest: Manifest) -> PixelPolicy:
    pixels = dict(manifest.config["pixels"])
    return PixelPolicy(**{**pixels, "background": tuple(pixels["background"])})


def _save(server: Server, facts: ServingFacts, output: str) -> None:
    signatures = {"serving_default": server.record, "image": server.image}
    try:
        tf.saved_model.save(server, output, signatures=signatures)
        path = join(output, *FACTS.split("/"))
        tf.io.gfile.makedirs(join(output, FACTS.split("/")[0]))
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(facts.to_json())
    except (tf.errors.OpError, OSError) as error:
        raise OSError(f"--output {output}: cannot be written: {first_line(error)}") from error


def load_facts(folder: str) -> ServingFacts:
    """Reads what goes with an exported model.

    Raises:
      ValueError: the folder holds none.
    """
    path = join(folder, *FACTS.split("/"))
    try:
        with tf.io.gfile.GFile(path) as file:
            text = file.read()
    except (tf.errors.OpError, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--model {folder}: has no {FACTS}: give the --output of tpufeed export"
        ) from error
    return parse_facts(text, path=path)
