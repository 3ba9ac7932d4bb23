"""What a data set's index/ and lists tell about it, counted in one pass and in bounded memory."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

from pipeline.index import read_index
from pipeline.lists import read_list
from transforms import files
from transforms.manifest import DUPLICATES, REJECTS, Manifest, Shard
from transforms.records import DataError

# Bins of equal ratio. Whatever lies outside is counted in the bin at that end.
SIDE_EDGES = 2.0 ** np.arange(0, 17.1, 0.25)  # pixels
ASPECT_EDGES = 2.0 ** np.arange(-3.0625, 3.1, 0.125)  # width / height; 1 is the middle of a bin
BYTES_EDGES = 2.0 ** np.arange(4, 36.1, 0.25)
MEAN_BINS = 64  # each four levels of 0 to 255 wide
NO_CLASS = -1  # in index/, of a record without labels
MOST_LISTED = 100  # rejects of a reason, and contents under several keys

_COLUMNS = (
    *("key", "class", "source_bytes", "source_width", "source_height", "offset", "size"),
    *("pixels", "channel_sum", "channel_sum_of_squares"),
)


@dataclasses.dataclass(frozen=True)
class Range:
    """Smallest, mean and largest of a whole number over all records."""

    low: int
    mean: float
    high: int


@dataclasses.dataclass(frozen=True)
class Pick:
    """A record that is shown: where it lies.

    Attributes:
      split: its split.
      class_id: from 0; one of several; NO_CLASS where records have no labels.
      key: its key.
      shard: name of its file.
      offset: of the record in the file, in bytes.
      size: of the record with its framing, in bytes.
    """

    split: str
    class_id: int
    key: str
    shard: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Survey:
    """What index/ tells.

    Attributes:
      sides: records by source size, int [width bin, height bin], of SIDE_EDGES.
      aspects: records by source width / height, int [bin], of ASPECT_EDGES.
      source_bytes: records by source file size, int [bin], of BYTES_EDGES.
      record_bytes: records by record size, int [bin], of BYTES_EDGES.
      means: records by the mean of a channel over the record, int [channel, MEAN_BINS].
      ranges: of source_width, source_height, source_bytes and size; empty without records.
      flat: records of which every pixel has the same colour.
      smaller: records whose source is less wide or less high than the picture made of it.
      picks: records to show, split by split and class by class, in file order; one with several
        classes can stand under each.
      splits_of: for every key in duplicates.jsonl, its split.
    """

    sides: Any
    aspects: Any
    source_bytes: Any
    record_bytes: Any
    means: Any
    ranges: Mapping[str, Range]
    flat: int
    smaller: int
    picks: tuple[Pick, ...]
    splits_of: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Rejects:
    """The rejects of one reason: how many, and the first of them as rejects.jsonl has them."""

    reason: str
    count: int
    listed: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Content:
    """One content that stands under several keys: its keys and its different labels."""

    sha256: str
    keys: tuple[str, ...]
    labels: tuple[str, ...]


class _Tally:
    """Adds up index tables."""

    def __init__(self, *, channels: int, image_size: tuple[int, int] | None):
        side = len(SIDE_EDGES) - 1
        self.sides = np.zeros((side, side), np.int64)
        self.aspects = np.zeros(len(ASPECT_EDGES) - 1, np.int64)
        self.source_bytes = np.zeros(len(BYTES_EDGES) - 1, np.int64)
        self.record_bytes = np.zeros(len(BYTES_EDGES) - 1, np.int64)
        self.means = np.zeros((channels, MEAN_BINS), np.int64)
        self.totals: dict[str, tuple[int, int, int]] = {}
        self.records = self.flat = self.smaller = 0
        self._channels, self._image_size = channels, image_size

    def add(self, table: Any) -> None:
        if not table.num_rows:
            return
        names = ("source_width", "source_height", "source_bytes", "size")
        columns = {name: table[name].to_numpy() for name in names}
        width, height = columns["source_width"], columns["source_height"]
        np.add.at(self.sides, (_bins(width, SIDE_EDGES), _bins(height, SIDE_EDGES)), 1)
        self.aspects += _count(width / height, ASPECT_EDGES)
        self.source_bytes += _count(columns["source_bytes"], BYTES_EDGES)
        self.record_bytes += _count(columns["size"], BYTES_EDGES)
        if self._image_size:
            rows, row = self._image_size
            self.smaller += int(np.count_nonzero((height < rows) | (width < row)))
        self._add_channels(table)
        self.records += table.num_rows
        for name, values in columns.items():
            low, total, high = self.totals.get(name, (int(values[0]), 0, 0))
            self.totals[name] = (
                min(low, int(values.min())),
                total + int(values.sum()),
                max(high, int(values.max())),
            )

    def _add_channels(self, table: Any) -> None:
        pixels = table["pixels"].to_numpy()[:, None]
        sums = _matrix(table["channel_sum"], self._channels)
        squares = _matrix(table["channel_sum_of_squares"], self._channels)
        # Whole numbers throughout: a mean of exactly 4 belongs to the second bin.
        bins = sums * MEAN_BINS // (256 * pixels)
        for channel in range(self._channels):
            self.means[channel] += np.bincount(bins[:, channel], minlength=MEAN_BINS)
        level = sums // pixels
        flat = (level * pixels == sums) & (level * level * pixels == squares)
        self.flat += int(np.count_nonzero(flat.all(axis=1)))

    def ranges(self) -> dict[str, Range]:
        return {
            name: Range(low, total / self.records, high)
            for name, (low, total, high) in self.totals.items()
        }


def _bins(values: Any, edges: Any) -> Any:
    return np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)


def _count(values: Any, edges: Any) -> Any:
    return np.bincount(_bins(values, edges), minlength=len(edges) - 1)


def _matrix(column: Any, channels: int) -> Any:
    flat = column.combine_chunks().flatten().to_numpy()
    if len(flat) != len(column) * channels:
        raise DataError(f"index/: channel sums are not {channels} a record: run tpufeed verify")
    return flat.reshape(-1, channels)


def survey_index(
    directory: str, manifest: Manifest, *, contents: Iterable[Content], most_picks: int
) -> Survey:
    """Reads index/ once, shard by shard.

    Args:
      directory: the data set.
      manifest: its dataset.json.
      contents: whose keys' splits are wanted.
      most_picks: records to show, over all classes and splits.

    Raises:
      DataError: index/ is missing, damaged, or does not fit dataset.json.
    """
    tally = _Tally(channels=manifest.channels, image_size=manifest.image_size)
    wanted = pyarrow.array(sorted({key for c in contents for key in c.keys}), pyarrow.string())
    wants = shares(manifest, most=most_picks)
    picks: list[Pick] = []
    splits_of: dict[str, str] = {}
    for split in manifest.splits:
        for shard in manifest.splits[split].shards:
            table = read_index(directory, shard, columns=_COLUMNS)
            tally.add(table)
            picks += _pick(table, split=split, shard=shard, wants=wants)
            if len(wanted):
                here = table["key"].filter(pyarrow.compute.is_in(table["key"], wanted))
                splits_of |= dict.fromkeys(here.to_pylist(), split)
    return Survey(
        tally.sides,
        tally.aspects,
        tally.source_bytes,
        tally.record_bytes,
        tally.means,
        tally.ranges(),
        tally.flat,
        tally.smaller,
        tuple(sorted(picks, key=lambda pick: (pick.class_id, pick.split))),
        splits_of,
    )


def shares(manifest: Manifest, *, most: int, most_each: int = 12) -> dict[tuple[str, int], int]:
    """Returns how many records of each split and class to show.

    As many of each as of every other, `most_each` at most; with more classes and splits than
    `most`, one of the first.

    Args:
      manifest: of the data set.
      most: over all classes and splits.
      most_each: of one class in one split.
    """
    cells = [
        (split, number)
        for number, label in enumerate(manifest.labels)
        for split in manifest.splits
        if manifest.splits[split].classes[label]
    ]
    if manifest.label_kind == "none":
        cells = [(name, NO_CLASS) for name, split in manifest.splits.items() if split.records]
    each = min(most_each, max(1, most // max(1, len(cells))))
    return dict.fromkeys(cells[:most], each)


def _pick(table: Any, *, split: str, shard: Shard, wants: dict[tuple[str, int], int]) -> list[Pick]:
    """Takes the first records of each class that is still wanted; counts `wants` down."""
    classes, places = _classes_of(table["class"])
    order = np.argsort(classes, kind="stable")
    ids, starts, counts = np.unique(classes[order], return_index=True, return_counts=True)
    rows: list[int] = []
    taken_for: list[int] = []
    for class_id, start, count in zip(ids.tolist(), starts, counts, strict=True):
        taken = min(wants.get((split, class_id), 0), int(count))
        if taken:
            wants[split, class_id] -= taken
            rows += places[order[start : start + taken]].tolist()
            taken_for += [class_id] * taken
    indices = pyarrow.array(rows, pyarrow.int64())
    chosen = table.select(["key", "offset", "size"]).take(indices).to_pylist()
    return [
        Pick(split, class_id, row["key"], shard.name, row["offset"], row["size"])
        for class_id, row in zip(taken_for, chosen, strict=True)
    ]


def _classes_of(column: Any) -> tuple[Any, Any]:
    """Returns all class ids of a column, and for each the number of its row."""
    if not pyarrow.types.is_list(column.type):
        return column.to_numpy(), np.arange(len(column))
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), pyarrow.compute.list_parent_indices(lists).to_numpy()


def read_rejects(directory: str, manifest: Manifest) -> tuple[Rejects, ...]:
    """Returns the rejects of each reason, the most frequent first.

    Raises:
      DataError: rejects.jsonl is missing, or does not fit dataset.json.
    """
    listed: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    counts: collections.Counter[str] = collections.Counter()
    for item in _read_lines(directory, REJECTS):
        counts[item["reason"]] += 1
        if len(listed[item["reason"]]) < MOST_LISTED:
            listed[item["reason"]].append(item)
    if dict(counts) != dict(manifest.rejects):
        raise DataError(
            f"{files.join(directory, REJECTS)}: does not have the rejects of dataset.json: run "
            f"tpufeed verify {directory}"
        )
    return tuple(
        Rejects(reason, count, tuple(listed[reason]))
        for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def read_contents(directory: str) -> tuple[Content, ...]:
    """Returns every content that stands under several keys, those with several labels first.

    Raises:
      DataError: duplicates.jsonl is missing or damaged.
    """
    contents = [
        Content(line["sha256"], tuple(line["keys"]), tuple(sorted(set(line["labels"]))))
        for line in _read_lines(directory, DUPLICATES)
    ]
    return tuple(sorted(contents, key=lambda c: (len(c.labels) < 2, -len(c.keys), c.sha256)))


def _read_lines(directory: str, name: str) -> Iterable[Any]:
    try:
        return read_list(directory, name)
    except DataError as error:
        raise DataError(f"{error}: run tpufeed verify {directory}") from error
