"""Which split, which shard, which place: arithmetic on a stable hash, and nothing else.

Nothing here depends on the runner, the workers, the time or the order of arrival.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

SPLIT_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
# A split's name has no hyphen, so that a glob of `<split>-*` finds that split and no other.
SHARD_NAME = re.compile(r"(?P<split>[A-Za-z0-9_]{1,64})-(?P<index>\d{5})-of-(?P<count>\d{5})")
SHARD_SUFFIX = ".tfrecord"

MOST_SHARDS = 99_999  # the name has five digits

Weights = tuple[tuple[str, Fraction], ...]

_HASH_SPACE = 1 << 64
_SMALL_SET_SHARDS = 16  # enough for every core of a laptop
_SMALL_SET_RECORDS = 64  # below this many records a shard, more shards only cost


def stable_hash(text: str, *, seed: int) -> tuple[int, int]:
    """Returns two independent 64-bit numbers for a key.

    They are the first and the second 8 bytes, big-endian, of the sha256 of the seed in decimal,
    a line feed, and the key as the file system's bytes.
    """
    digest = hashlib.sha256(b"%d\n%s" % (seed, os.fsencode(text))).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def check_weights(weights: Iterable[tuple[str, Fraction]]) -> Weights:
    """Returns the weights; raises ValueError unless all are positive and they add up to 1."""
    weights = tuple(weights)
    names = [name for name, _ in weights]
    for name, weight in weights:
        if not SPLIT_NAME.fullmatch(name):
            raise ValueError(
                f"split name {name!r}: allowed are 1 to 64 letters, digits and underscores"
            )
        if names.count(name) > 1:
            raise ValueError(f"split {name!r} is named twice: name each split once")
        if weight <= 0:
            raise ValueError(f"split {name}={float(weight):g}: a weight must be above 0")
    total = sum(weight for _, weight in weights)
    if total != 1:
        raise ValueError(
            f"split weights add up to {float(total):g}, must be 1, as in train=0.8,validation=0.2"
        )
    return weights


def split_of(key: str, *, weights: Weights, seed: int) -> str:
    """Returns the split whose share of the hash space holds the key.

    Adding or removing other keys moves no key to another split.
    """
    value = stable_hash(key, seed=seed)[0]
    return weights[bisect.bisect_right(_upper_edges(weights), value)][0]


@functools.cache
def _upper_edges(weights: Weights) -> list[int]:
    return [math.ceil(edge * _HASH_SPACE) for edge in itertools.accumulate(w for _, w in weights)]


def shard_of(key: str, *, count: int, seed: int) -> int:
    """Returns the shard, 0 to count - 1: contiguous ranges of the hash, so shards are a shuffle."""
    return place_of(key, seed=seed)[0] * count // _HASH_SPACE


def place_of(key: str, *, seed: int) -> tuple[int, str]:
    """Returns what records are sorted by: the hash, then the key."""
    return stable_hash(key, seed=seed)[1], key


def shard_name(*, split: str, index: int, count: int) -> str:
    """Returns `<split>-SSSSS-of-NNNNN`, without a suffix."""
    return f"{split}-{index:05d}-of-{count:05d}"


@dataclasses.dataclass(frozen=True)
class SplitSize:
    """How much a split will hold: candidates, their rejects not yet known.

    Attributes:
      records: how many.
      bytes: estimated, of the output.
      digest: sum of the candidates' digests, modulo 2^128; the same for the same candidates.
    """

    records: int
    bytes: int
    digest: int = 0

    def __add__(self, other: SplitSize) -> SplitSize:
        """Both together."""
        digest = (self.digest + other.digest) % (1 << 128)
        return SplitSize(self.records + other.records, self.bytes + other.bytes, digest)


def plan_shards(
    sizes: Mapping[str, SplitSize], *, shards: int | None, shard_size: int
) -> dict[str, int]:
    """Returns the number of shards for each split, in the order of the splits' names.

    Args:
      sizes: what each split holds.
      shards: the total over all splits, or None to derive it.
      shard_size: bytes to aim at where `shards` is None; small sets get more shards than that
        needs, min(16, ceil(records / 64)), so that all cores have work.

    Raises:
      ValueError: `shards` is more than there are images, or less than there are splits.
    """
    filled = {split: size for split, size in sorted(sizes.items()) if size.records}
    records = sum(size.records for size in filled.values())
    if not records:
        return {}
    if shards is None:
        by_bytes = math.ceil(sum(size.bytes for size in filled.values()) / shard_size)
        by_records = min(_SMALL_SET_SHARDS, math.ceil(records / _SMALL_SET_RECORDS))
        shards = min(max(by_bytes, by_records, len(filled)), records, MOST_SHARDS)
    elif shards > records:
        raise ValueError(
            f"--shards {shards}: more than the {records} images found; allowed: "
            f"{len(filled)} to {records}"
        )
    elif shards < len(filled):
        raise ValueError(
            f"--shards {shards}: fewer than the {len(filled)} splits "
            f"({', '.join(filled)}); allowed: {len(filled)} to {records}"
        )
    return _largest_remainder({s: size.records for s, size in filled.items()}, total=shards)


def _largest_remainder(records: Mapping[str, int], *, total: int) -> dict[str, int]:
    """Shares `total` out in proportion, at least one and at most its records to each split."""
    everything = sum(records.values())
    exact = {split: Fraction(total * n, everything) for split, n in records.items()}
    # A share is held between 1 and the split's records; what that takes or frees goes to the
    # split that is then furthest below (or above) its exact share. Ties go by name.
    given = {split: max(1, int(share)) for split, share in exact.items()}
    while (short := total - sum(given.values())) != 0:
        step = 1 if short > 0 else -1
        movable = [s for s in given if 1 <= given[s] + step <= records[s]]
        chosen = max(movable, key=lambda s: (step * (exact[s] - given[s]), s))
        given[chosen] += step
    return given
