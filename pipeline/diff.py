"""`tpufeed diff`: what differs between two data sets, by dataset.json and index/ alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.index import read_index
from pipeline.messages import printable
from transforms.manifest import Manifest, load_manifest

_MOST_SHOWN = 10  # keys of a kind; JSON has them all
_COLUMNS = ("key", "label", "source_sha256")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is compared of a record: its place, its label, and its source's sha256."""

    split: str
    shard: str
    label: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Change:
    """One record that stands in both sets, otherwise: its key, and both values."""

    key: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two data sets, compared.

    Attributes:
      added: keys of the new set only, sorted.
      removed: keys of the old set only, sorted.
      content: keys whose source's sha256 changed.
      label: keys whose label changed.
      split: keys that moved to another split.
      shard: keys that moved to another shard of their split.
      config: fields of the configuration that differ but the output, a dot between parts:
        (old, new).
      facts: fields of dataset.json that differ, likewise.
      shards: names in both sets whose bytes differ, in order.
      records: of the old set, of the new one.
      fingerprints: of the old set, of the new one.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    content: tuple[Change, ...]
    label: tuple[Change, ...]
    split: tuple[Change, ...]
    shard: tuple[Change, ...]
    config: Mapping[str, tuple[Any, Any]]
    facts: Mapping[str, tuple[Any, Any]]
    shards: tuple[str, ...]
    records: tuple[int, int]
    fingerprints: tuple[str, str]

    @property
    def equal(self) -> bool:
        """Whether both hold the same data, byte for byte."""
        return self.fingerprints[0] == self.fingerprints[1]

    @property
    def json(self) -> str:
        """All of it, as JSON."""
        return json.dumps({"equal": self.equal, **dataclasses.asdict(self)}, indent=1)

    def __str__(self) -> str:
        """Some lines for a person; of many keys the first."""
        lines = [f"records: {self.records[0]} -> {self.records[1]}"]
        for name, keys in (("added", self.added), ("removed", self.removed)):
            lines += _list(name, [printable(key) for key in keys])
        for name, changes in (
            ("content changed", self.content),
            ("label changed", self.label),
            ("other split", self.split),
            ("other shard", self.shard),
        ):
            lines += _list(
                name,
                [f"{printable(c.key)}: {printable(c.old)} -> {printable(c.new)}" for c in changes],
            )
        for name, fields in (("configuration", self.config), ("dataset.json", self.facts)):
            lines += [
                f"{name}: {field}: {_value(old)} -> {_value(new)}"
                for field, (old, new) in fields.items()
            ]
        lines += _list("shards of other bytes", self.shards)
        same = "equal, byte for byte" if self.equal else "different"
        return "\n".join([*lines, f"fingerprints: {same}"])


def compare_datasets(old: str, new: str) -> Difference:
    """Compares two data sets; holds the keys of both in memory.

    Args:
      old: a data set's folder.
      new: another's.

    Raises:
      ValueError: one of them is no complete data set, or its index/ is damaged.
    """
    before, after = load_manifest(old), load_manifest(new)
    entries = read_entries(old, before), read_entries(new, after)
    return compare(*entries, manifests=(before, after))


def read_entries(directory: str, manifest: Manifest) -> dict[str, Entry]:
    """Returns every record of a data set, by key.

    Raises:
      DataError: index/ is missing, damaged, or does not fit dataset.json.
    """
    entries = {}
    for split in manifest.splits:
        for shard in manifest.splits[split].shards:
            table = read_index(directory, shard, columns=_COLUMNS)
            columns = (table[name].to_pylist() for name in _COLUMNS)
            for key, label, sha256 in zip(*columns, strict=True):
                entries[key] = Entry(split, shard.name, label, sha256)
    return entries


def compare(
    old: Mapping[str, Entry], new: Mapping[str, Entry], *, manifests: tuple[Manifest, Manifest]
) -> Difference:
    """Compares the records of two data sets.

    Args:
      old: records by key.
      new: records by key.
      manifests: of both.
    """
    both = sorted(old.keys() & new.keys())

    def changes(field: str, keys: Sequence[str]) -> tuple[Change, ...]:
        pairs = ((key, getattr(old[key], field), getattr(new[key], field)) for key in keys)
        return tuple(Change(key, a, b) for key, a, b in pairs if a != b)

    before, after = manifests
    return Difference(
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        content=changes("sha256", both),
        label=changes("label", both),
        split=changes("split", both),
        shard=changes("shard", [key for key in both if old[key].split == new[key].split]),
        config=_fields({**before.config, "output": ""}, {**after.config, "output": ""}),
        facts=_fields(_facts(before), _facts(after)),
        shards=_changed_shards(before, after),
        records=(before.records, after.records),
        fingerprints=(before.fingerprint, after.fingerprint),
    )


def _facts(manifest: Manifest) -> dict[str, Any]:
    """What dataset.json says of the whole set; of shards, their number and a change of bytes."""
    return {
        "schema": manifest.schema,
        "encoding": manifest.encoding,
        "channels": manifest.channels,
        "image_size": manifest.image_size,
        "labels": list(manifest.labels),
        "label_offset": manifest.label_offset,
        "features": manifest.features,
        "shards": {name: len(split.shards) for name, split in manifest.splits.items()},
        "channel_mean": manifest.channel_mean,
        "channel_std": manifest.channel_std,
        "rejects": manifest.rejects,
        "skipped": manifest.skipped,
        "libraries": manifest.libraries,
    }


def _changed_shards(old: Manifest, new: Manifest) -> tuple[str, ...]:
    before, after = (
        {shard.name: shard.sha256 for split in m.splits.values() for shard in split.shards}
        for m in (old, new)
    )
    return tuple(name for name in sorted(before.keys() & after) if before[name] != after[name])


def _fields(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for part in sorted(old.keys() | new.keys()):
            found |= _fields(old.get(part), new.get(part), f"{name}.{part}" if name else part)
        return found
    return {} if old == new else {name: (old, new)}


def _list(name: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    shown = [f"  {line}" for line in lines[:_MOST_SHOWN]]
    if len(lines) > _MOST_SHOWN:
        shown.append(f"  and {len(lines) - _MOST_SHOWN} more; --json has all")
    return [f"{name}: {len(lines)}", *shown]


def _value(value: Any) -> str:
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:117]}..."
