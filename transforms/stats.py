"""What the whole set is asked before any shard is written: its labels, splits and sizes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import apache_beam as beam

from transforms.image import PixelPolicy, estimate_bytes
from transforms.labels import ONE_LABEL, Labelling, label_order
from transforms.records import DataError, ImageRef
from transforms.shards import SplitSize, Weights, plan_shards, split_of

K = TypeVar("K")
Sizes = dict[tuple[str, str], SplitSize]  # by split and label, "" for all labels and for none

_NO_IMAGES = SplitSize(0, 0)


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels in the order of their ids: by value where all are whole numbers."""
    labels = set(labels)
    if all(label_order(label)[0] == 0 for label in labels):
        return tuple(sorted(labels, key=label_order))
    return tuple(sorted(labels))


def decide_labels(found: Iterable[str], *, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns all labels in the order of their ids: known ones first, then new ones, sorted.

    Args:
      found: the labels of the images.
      known: from --class-names; their ids never change.

    Raises:
      DataError: two labels differ by case only and --class-names does not list both.
    """
    known = tuple(known or ())
    labels = known + sort_labels(set(found) - set(known))
    folded: dict[str, str] = {}
    for label in labels:
        other = folded.setdefault(label.casefold(), label)
        if other != label and not {label, other} <= set(known):
            raise DataError(
                f"labels {other!r} and {label!r} differ by case only: rename one folder, or list "
                "both in --class-names"
            )
    return labels


class SumSizes(beam.CombineFn):
    """((split, label), SplitSize) of every image -> {(split, label): SplitSize}."""

    def create_accumulator(self) -> Sizes:
        """No images yet."""
        return {}

    def add_input(self, accumulator: Sizes, element: tuple[tuple[str, str], SplitSize]) -> Sizes:
        """Counts one image."""
        key, size = element
        accumulator[key] = accumulator.get(key, _NO_IMAGES) + size
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[Sizes]) -> Sizes:
        """Adds up, split by split and label by label."""
        return _add_up(pair for sizes in accumulators for pair in sizes.items())

    def extract_output(self, accumulator: Sizes) -> Sizes:
        """As it is."""
        return accumulator


def _add_up(pairs: Iterable[tuple[K, SplitSize]]) -> dict[K, SplitSize]:
    total: dict[K, SplitSize] = {}
    for key, size in pairs:
        total[key] = total.get(key, _NO_IMAGES) + size
    return total


def digest_ref(ref: ImageRef) -> int:
    """Returns 128 bits of the sha256 of all that is known of an image before it is read."""
    # Not its pickle, whose bytes depend on which strings are the same object.
    fields = (ref.key, ref.path, ref.label, ref.split, ref.group, ref.size, ref.item)
    text = ascii((*fields, ref.features, ref.sha256, ref.copies))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")


def size_image(
    ref: ImageRef, *, pixels: PixelPolicy, labelling: Labelling = ONE_LABEL
) -> Iterator[tuple[tuple[str, str], SplitSize]]:
    """Yields what one image, which knows its split, adds to its split and label.

    Where a label names several classes the image counts under "", and each class is only named:
    there may be as many sets of classes as images.
    """
    many = labelling.kind == "many"
    size = estimate_bytes(ref.size, policy=pixels)
    yield (ref.split, "" if many else ref.label), SplitSize(1, size, digest_ref(ref))
    if many:
        for label in labelling.split(ref.label):
            yield (ref.split, label), _NO_IMAGES


@dataclasses.dataclass
class CountImages(beam.PTransform):
    """Images that know their split -> one {(split, label): SplitSize}."""

    pixels: PixelPolicy
    labelling: Labelling = ONE_LABEL

    def expand(self, refs: beam.PCollection[ImageRef]) -> beam.PCollection[Sizes]:
        """One combination for labels and shards: each costs local runners a tenth of a second."""
        return (
            refs
            | "EstimateBytes"
            >> beam.FlatMap(size_image, pixels=self.pixels, labelling=self.labelling)
            | "SumSizes" >> beam.CombineGlobally(SumSizes())
        )


@dataclasses.dataclass
class DecideLabels(beam.PTransform):
    """What was counted -> one tuple of labels, in the order of their ids."""

    known: tuple[str, ...] | None

    def expand(self, sizes: beam.PCollection[Sizes]) -> beam.PCollection[tuple[str, ...]]:
        """A pure function of all labels."""
        return sizes | "DecideLabels" >> beam.Map(self._decide)

    def _decide(self, sizes: Sizes) -> tuple[str, ...]:
        # Only what has no label, or counts for several, is counted under "".
        return decide_labels((label for _, label in sizes if label), known=self.known)


def assign_split(ref: ImageRef, *, weights: Weights, seed: int, explicit: bool) -> ImageRef:
    """Returns the ref with its split: the given one, or the hash's.

    Raises:
      DataError: it has a given split although the weights were asked for by name.
    """
    if not ref.split:
        split = split_of(ref.group or ref.key, weights=weights, seed=seed)
        return dataclasses.replace(ref, split=split)
    if explicit:
        raise DataError(
            f"--split: {ref.key!r} already has the split {ref.split!r} from its source; drop "
            "--split, or the splits of the source"
        )
    return ref


@dataclasses.dataclass
class AssignSplits(beam.PTransform):
    """Images -> images that know their split."""

    weights: Weights
    seed: int
    explicit: bool

    def expand(self, refs: beam.PCollection[ImageRef]) -> beam.PCollection[ImageRef]:
        """A pure function of each image's key or group."""
        return refs | "AssignSplit" >> beam.Map(
            assign_split, weights=self.weights, seed=self.seed, explicit=self.explicit
        )


@dataclasses.dataclass
class PlanShards(beam.PTransform):
    """What was counted -> one {split: number of shards}."""

    shards: int | None
    shard_size: int

    def expand(self, sizes: beam.PCollection[Sizes]) -> beam.PCollection[dict[str, int]]:
        """Depends on the data and the configuration only, never on workers or time."""
        return sizes | "PlanShards" >> beam.Map(self.plan)

    def plan(self, sizes: Sizes) -> dict[str, int]:
        """Returns the number of shards by split.

        Raises:
          DataError: `shards` does not go with what was counted.
        """
        splits = _add_up((split, size) for (split, _), size in sizes.items())
        try:
            return plan_shards(splits, shards=self.shards, shard_size=self.shard_size)
        except ValueError as error:
            raise DataError(str(error)) from error
