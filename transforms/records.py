"""The elements that flow through the graph, and the two errors that carry meaning."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from typing import Any

# Reasons in rejects.jsonl. The second group does not count against --max-reject-rate.
FAULTS = (
    "zero_byte",
    "unidentified",
    "unsupported_format",
    "truncated",
    "corrupt",
    "too_large",
    "bit_depth",
    "unreadable",
    "missing",
    "timeout",
    "decoder_crash",
    "bad_name",
    "unknown_label",
)
CHOICES = ("duplicate", "excluded", "filtered")
IDX_PREFIX = "idx:"
# How the detail of a reject `duplicate` begins; the key that was kept follows.
SAME_BYTES = "same bytes as "


class DataError(ValueError):
    """The data, not the code, is wrong: the run ends with this one line, without a traceback."""


class ImageError(ValueError):
    """One image cannot become a record; `reason` is one of FAULTS, or "filtered"."""

    def __init__(self, reason: str, detail: str):
        """Keeps both parts as arguments, so that the error survives pickling."""
        assert reason in FAULTS or reason == "filtered", reason
        super().__init__(reason, detail)

    @property
    def reason(self) -> str:
        """The reason code."""
        return self.args[0]

    @property
    def detail(self) -> str:
        """What the decoder or the file system said."""
        return self.args[1]


@dataclasses.dataclass(frozen=True)
class Input:
    """One --input: a pattern, and the split it is given to ("" where the hash decides)."""

    pattern: str
    split: str = ""

    @property
    def kind(self) -> str:
        """One of "idx", "csv" and "glob"."""
        if self.pattern.startswith(IDX_PREFIX):
            return "idx"
        return "csv" if self.pattern.lower().endswith(".csv") else "glob"


@dataclasses.dataclass(frozen=True)
class Grouping:
    """What the split is hashed by.

    Attributes:
      kind: "key", "group" (what `value`, a regular expression, finds in the key) or "column".
      value: the expression, or the CSV column's name.
    """

    kind: str = "key"
    value: str = ""

    def group_of(self, key: str) -> str:
        """Returns the group that a key belongs to, "" where the key itself decides.

        Raises:
          DataError: the expression does not match the key, or matches nothing of it.
        """
        if self.kind != "group":
            return ""
        found = re.search(self.value, key)
        group = found and found[found.re.groups and 1]
        if not group:
            raise DataError(
                f"--split-by group:{self.value} does not match the key {key!r}: every key "
                "needs a group; widen the expression"
            )
        return group


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """An image that has the bytes of another: its key, source and label."""

    key: str
    source: str
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class ImageRef:
    """One input: where it lies and what it is called. Some 200 bytes; never pixels.

    Attributes:
      key: unique name, stable when the data set moves; decides split, shard and order.
      path: exact name to open (never matched again as a glob).
      label: class name.
      split: given split, or "" where the hash decides.
      group: what the split is hashed by, or "" for the key.
      size: bytes of the file, -1 where the listing does not tell.
      item: index of the picture inside an IDX file, -1 for a file that is one picture.
      features: extra columns as (name, value), value bytes, int or float.
      sha256: of its bytes, in hex, "" where they were not read yet.
      copies: other images of the same bytes, dropped for this one.
    """

    key: str
    path: str
    label: str
    split: str = ""
    group: str = ""
    size: int = -1
    item: int = -1
    features: tuple[tuple[str, bytes | int | float], ...] = ()
    sha256: str = ""
    copies: tuple[Copy, ...] = ()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickles what is not told twice: local runners hold every ref several times over."""
        below = self.path.endswith(self.key)
        place = self.path.removesuffix(self.key) if below else self.path
        values = (below, self.key, place, self.label, self.split, self.group, self.size)
        rest = (self.item, self.features, self.sha256, self.copies)
        return _restore_ref, values if rest == (-1, (), "", ()) else values + rest

    @property
    def source(self) -> str:
        """The path, with the picture's index for an IDX file: `path#42`."""
        return self.path if self.item < 0 else f"{self.path}#{self.item}"


def _restore_ref(below: bool, key: str, place: str, label: str, split: str, *rest: Any) -> ImageRef:
    # Labels and splits are few, refs are many: each name is kept once.
    path = place + key if below else place
    return ImageRef(key, path, sys.intern(label), sys.intern(split), *rest)


@dataclasses.dataclass(frozen=True)
class Reject:
    """One input that did not become a record: a line of rejects.jsonl."""

    key: str
    path: str
    label: str
    reason: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Exclusions:
    """What must not come in: keys, and sha256 (hex) of sources' bytes."""

    keys: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()

    def reject_key(self, key: str) -> Reject:
        """The reject for an excluded input: it must not leave its name behind, only its hash."""
        digest = hashlib.sha256(os.fsencode(key)).hexdigest()
        return Reject(f"sha256:{digest}", "", "", "excluded", "by --exclude")


@dataclasses.dataclass(frozen=True)
class Skipped:
    """One system file that a pattern matched."""

    path: str


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How the upright source maps onto the picture: x' = x * scale_x + offset_x, y likewise.

    Attributes:
      orientation: EXIF orientation that was undone, 1 to 8.
      source_width: width in pixels of the upright source.
      source_height: height in pixels of the upright source.
      width: width in pixels of the picture, padding included.
      height: height in pixels of the picture, padding included.
      box: part of the upright source that was used: left, upper, right, lower, in source pixels.
      content: where that part lies in the picture: left, upper, right, lower, in whole pixels.
    """

    orientation: int
    source_width: int
    source_height: int
    width: int
    height: int
    box: tuple[float, float, float, float]
    content: tuple[int, int, int, int]

    @property
    def scale(self) -> tuple[float, float]:
        """Picture pixels per source pixel: (scale_x, scale_y)."""
        left, upper, right, lower = self.box
        return (
            (self.content[2] - self.content[0]) / (right - left),
            (self.content[3] - self.content[1]) / (lower - upper),
        )

    @property
    def offset(self) -> tuple[float, float]:
        """Where the upright source's corner (0, 0) falls in the picture: (offset_x, offset_y)."""
        scale_x, scale_y = self.scale
        return self.content[0] - self.box[0] * scale_x, self.content[1] - self.box[1] * scale_y


@dataclasses.dataclass(frozen=True)
class PreparedImage:
    """One picture, encoded, with the facts about it.

    Attributes:
      data: the encoded bytes (for "raw": height x width x channels uint8 in row order).
      format: "JPEG", "PNG" or "RAW".
      channels: 1 or 3.
      geometry: what was done to the source; holds the sizes.
      pixels: height x width.
      channel_sum: sum of each channel over the uint8 pixels handed to the encoder; exact.
      channel_sum_of_squares: likewise, of the squares.
    """

    data: bytes
    format: str
    channels: int
    geometry: Geometry
    pixels: int
    channel_sum: tuple[int, ...]
    channel_sum_of_squares: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """What dataset.json says about one shard, and what its statistics are made from.

    Attributes:
      split: name of the split.
      index: number of the shard in the split, from 0.
      name: file name without the folder.
      records: how many records it holds.
      bytes: size of the file.
      sha256: of the whole file, in hex.
      classes: (label, records) for the labels that occur, sorted.
      pixels: sum over the records.
      channel_sum: sum over the records, per channel.
      channel_sum_of_squares: sum over the records, per channel.
    """

    split: str
    index: int
    name: str
    records: int
    bytes: int
    sha256: str
    classes: tuple[tuple[str, int], ...]
    pixels: int
    channel_sum: tuple[int, ...]
    channel_sum_of_squares: tuple[int, ...]
