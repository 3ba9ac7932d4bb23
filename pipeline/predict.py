"""`tpufeed predict`: labels of image files, each prepared exactly as ingest prepares it.

for prediction in predict_images("serving", ["a.jpg", "b.png"]):
print(prediction)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from pipeline.export import ServingFacts, load_facts
from pipeline.history import first_line
from transforms.example import encode_example, make_features
from transforms.image import prepare_image
from transforms.prepare import read_source
from transforms.records import ImageError, ImageRef

_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a model says of a file, or why it says nothing.

    Attributes:
      path: as it was given.
      label: the likeliest class, "" with an error.
      probability: of the label, 0 to 1.
      reason: "" or the reason of a reject, as in rejects.jsonl.
      detail: what is wrong with the file.
    """

    path: str
    label: str = ""
    probability: float = 0.0
    reason: str = ""
    detail: str = ""

    def __str__(self) -> str:
        """Returns the line for a terminal."""
        if self.reason:
            return f"{self.path}: {self.reason}: {self.detail}"
        return f"{self.path}: {self.label} {100 * self.probability:.1f} %"

    @property
    def json(self) -> str:
        """One line of JSON, ASCII only."""
        kept = ("path", "reason", "detail") if self.reason else ("path", "label", "probability")
        return json.dumps({name: getattr(self, name) for name in kept})


def make_record(data: bytes, *, facts: ServingFacts, path: str) -> bytes:
    """Returns the record that ingest would make of a file, with an unknown label.

    Args:
      data: the file's bytes.
      facts: of the exported model.
      path: becomes the key.

    Raises:
      ImageError: the bytes are no whole image of an accepted kind.
    """
    image = prepare_image(data, policy=facts.pixels)
    features = make_features(
        image,
        key=path.encode(errors="replace").decode(),
        label="",
        class_id=0,
        schema=facts.schema,
        classes=len(facts.labels),
    )
    return encode_example(features)


def predict_images(model: str, paths: Iterable[str]) -> Iterator[Prediction]:
    """Yields a prediction for each file, in order; bad files among them.

    Args:
      model: --output of `tpufeed export`.
      paths: files, local or in a bucket.

    Raises:
      ValueError: no model there.
    """
    facts = load_facts(model)
    try:
        serve = tf.saved_model.load(model).signatures["serving_default"]
    except (OSError, KeyError, tf.errors.OpError) as error:
        raise ValueError(f"--model {model}: cannot be loaded: {first_line(error)}") from error
    remaining = iter(paths)
    while batch := list(itertools.islice(remaining, _BATCH)):
        yield from _predict(serve, facts, batch)


def _predict(serve: Any, facts: ServingFacts, paths: list[str]) -> Iterator[Prediction]:
    records: dict[int, bytes] = {}
    failed: dict[int, Prediction] = {}
    for number, path in enumerate(paths):
        try:
            data, _ = read_source(ImageRef(path, path, ""))
            records[number] = make_record(data, facts=facts, path=path)
        except ImageError as error:
            failed[number] = Prediction(path, reason=error.reason, detail=error.detail)
    told = {}
    if records:
        answers = serve(records=tf.constant(list(records.values())))
        names, shares = answers["label"].numpy().tolist(), answers["probability"].numpy().tolist()
        for number, name, share in zip(records, names, shares, strict=True):
            told[number] = Prediction(paths[number], name.decode(), share)
    yield from (failed.get(number) or told[number] for number in range(len(paths)))
