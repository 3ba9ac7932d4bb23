"""What the whole set is asked before any shard is written: its labels, splits and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import apache_beam as beam
from apache_beam.transforms.combiners import ToSetCombineFn

from transforms.image import PixelPolicy, estimate_bytes
from transforms.records import DataError, ImageRef
from transforms.shards import SplitSize, Weights, plan_shards, split_of


def label_order(label: str) -> tuple[int, int, str]:
    """Sorts whole numbers by value, everything else by code point, whole numbers first."""
    if label.isdecimal() and label.isascii():
        return 0, int(label), label
    return 1, 0, label


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


class SumSplitSizes(beam.CombineFn):
    """(split, bytes) of every image -> {split: SplitSize}."""

    def create_accumulator(self) -> dict[str, SplitSize]:
        """No splits yet."""
        return {}

    def add_input(
        self, accumulator: dict[str, SplitSize], element: tuple[str, int]
    ) -> dict[str, SplitSize]:
        """Counts one image."""
        split, size = element
        before = accumulator.get(split, SplitSize(0, 0))
        return {**accumulator, split: SplitSize(before.records + 1, before.bytes + size)}

    def merge_accumulators(
        self, accumulators: Iterable[dict[str, SplitSize]]
    ) -> dict[str, SplitSize]:
        """Adds up, split by split."""
        merged: dict[str, SplitSize] = {}
        for accumulator in accumulators:
            for split, size in accumulator.items():
                before = merged.get(split, SplitSize(0, 0))
                merged[split] = SplitSize(before.records + size.records, before.bytes + size.bytes)
        return merged

    def extract_output(self, accumulator: dict[str, SplitSize]) -> dict[str, SplitSize]:
        """As it is."""
        return accumulator


@dataclasses.dataclass
class DecideLabels(beam.PTransform):
    """All images -> one tuple of labels, in the order of their ids."""

    known: tuple[str, ...] | None

    def expand(self, refs: beam.PCollection[ImageRef]) -> beam.PCollection[tuple[str, ...]]:
        """Combines each worker's labels before any travels."""
        return (
            refs
            | "TakeLabel" >> beam.Map(lambda ref: ref.label)
            | "CollectLabels" >> beam.CombineGlobally(ToSetCombineFn())
            | "OrderLabels" >> beam.Map(decide_labels, known=self.known)
        )


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
    """Images that know their split -> one {split: number of shards}."""

    pixels: PixelPolicy
    shards: int | None
    shard_size: int

    def expand(self, refs: beam.PCollection[ImageRef]) -> beam.PCollection[dict[str, int]]:
        """Depends on the data and the configuration only, never on workers or time."""
        return (
            refs
            | "EstimateBytes" >> beam.Map(self._estimate)
            | "SumSplitSizes" >> beam.CombineGlobally(SumSplitSizes())
            | "PlanShards" >> beam.Map(self._plan)
        )

    def _estimate(self, ref: ImageRef) -> tuple[str, int]:
        return ref.split, estimate_bytes(ref.size, policy=self.pixels)

    def _plan(self, sizes: dict[str, SplitSize]) -> dict[str, int]:
        try:
            return plan_shards(sizes, shards=self.shards, shard_size=self.shard_size)
        except ValueError as error:
            raise DataError(str(error)) from error
