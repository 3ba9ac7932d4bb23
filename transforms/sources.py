"""Where images come from: inputs become ImageRefs, each once.

Keys are paths relative to the root; labels are parent folders, or what a CSV or IDX file says.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from transforms.globs import list_glob
from transforms.idx import list_idx
from transforms.labels import ONE_LABEL, Labelling
from transforms.records import DataError, Grouping, ImageRef, Input, Reject, Skipped
from transforms.shards import stable_hash
from transforms.tables import Columns, list_csv

Listed = ImageRef | Reject | Columns | Skipped

# Groups of keys in which each is looked for: 250,000 keys a group with a billion images.
_BUCKETS = 4096


@dataclasses.dataclass
class ListImages(beam.PTransform):
    """Inputs -> every image once.

    Returns a dict of PCollections: `refs` (ImageRef), `rejects` (Reject), `columns` (Columns) and
    `skipped` (Skipped).

    Attributes:
      root: keys are paths relative to it.
      grouping: what the split is hashed by.
      reserved: names that a CSV's extra columns must not have.
      repeated: whether a key may be listed twice, see `may_repeat`.
      labelling: how labels are read.
    """

    root: str
    grouping: Grouping
    reserved: tuple[str, ...] = ()
    repeated: bool = True
    labelling: Labelling = ONE_LABEL

    def expand(self, inputs: beam.PCollection[Input]) -> dict[str, beam.PCollection]:
        """Lists, then brings each key together to drop what was matched twice."""
        listed = inputs | "ListInputs" >> beam.FlatMap(self._list).with_outputs(
            "Columns", "Reject", "Skipped", main="ImageRef"
        )
        once = listed
        if self.repeated:
            once = (
                (listed.ImageRef, listed.Reject, listed.Skipped)
                | "AllListed" >> beam.Flatten()
                | "HashKey" >> beam.Map(_with_bucket)
                | "GroupByKey" >> beam.GroupByKey()
                # (bucket, [ImageRef, Reject or Skipped, pickled])
                | "TakeOnce"
                >> beam.FlatMap(_take_once).with_outputs("Reject", "Skipped", main="ImageRef")
            )
        return {
            "refs": once.ImageRef,
            "rejects": once.Reject,
            "columns": listed.Columns,
            "skipped": once.Skipped,
        }

    def _list(self, source: Input) -> Iterator[Any]:
        return _tagged(
            list_input(
                source,
                root=self.root,
                grouping=self.grouping,
                reserved=self.reserved,
                labelling=self.labelling,
            )
        )


def may_repeat(inputs: Sequence[Input]) -> bool:
    """Whether these inputs may list a key twice: one folder tree, or one pair of IDX, does not."""
    return len(inputs) != 1 or inputs[0].kind == "csv"


def list_input(
    source: Input,
    *,
    root: str,
    grouping: Grouping,
    reserved: Iterable[str] = (),
    labelling: Labelling = ONE_LABEL,
) -> Iterator[Listed]:
    """Lists one --input, whatever its kind."""
    if source.kind == "csv":
        return list_csv(source, grouping=grouping, reserved=reserved, labelling=labelling)
    if source.kind == "idx":
        return list_idx(source)
    return list_glob(source, root=root, grouping=grouping, labelling=labelling)


def _with_bucket(item: ImageRef | Reject | Skipped) -> tuple[int, bytes]:
    name = item.path if isinstance(item, Skipped) else item.key
    # Some hundred bytes an image: local runners hold all that is grouped, a list for each group
    # and every object decoded.
    return stable_hash(name, seed=0)[0] * _BUCKETS >> 64, pickle.dumps(item)


def _take_once(group: tuple[int, Iterable[bytes]]) -> Iterator[Any]:
    return _tagged(take_once(map(pickle.loads, group[1])))


def _tagged(items: Iterable[Listed]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, ImageRef):
            yield item
        else:
            yield pvalue.TaggedOutput(type(item).__name__, item)


def take_once(
    items: Iterable[ImageRef | Reject | Skipped],
) -> Iterator[ImageRef | Reject | Skipped]:
    """Yields one ref for each key, and every reject and system file once.

    Raises:
      DataError: two different inputs have one key; names both.
    """
    refs: dict[str, ImageRef] = {}
    others: dict[Reject | Skipped, None] = {}
    for item in items:
        if not isinstance(item, ImageRef):
            others[item] = None
            continue
        other = refs.setdefault(item.key, item)
        if other is item:
            continue
        # A CSV does not tell the size, a glob does.
        if dataclasses.replace(other, size=item.size) != item:
            first, second = sorted((_describe(other, item), _describe(item, other)))
            raise DataError(
                f"two inputs have the key {item.key!r}: {first} and {second}; keys must be unique: "
                "widen --root, or give a CSV with a column key"
            )
        if item.size > other.size:
            refs[item.key] = item
    rejected = {(item.key, item.path) for item in others if isinstance(item, Reject)}
    yield from (ref for ref in refs.values() if (ref.key, ref.path) not in rejected)
    yield from others


def _describe(ref: ImageRef, other: ImageRef) -> str:
    facts = [f"label {ref.label}"]
    if ref.split:
        facts.append(f"split {ref.split}")
    if ref.group != other.group:
        facts.append(f"group {ref.group}")
    differing = (pair for pair in ref.features if pair not in other.features)
    facts += [f"{name} {value!r}" for name, value in differing]
    return f"{ref.source} ({', '.join(facts)})"
