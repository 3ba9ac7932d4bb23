"""Copies, exact and by content: brought into one split, or dropped but for the first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import pickle
from collections.abc import Iterable, Iterator

import apache_beam as beam

from transforms.ordered import READERS, map_in_order
from transforms.records import Copy, DataError, ImageRef
from transforms.screen import hash_source
from transforms.shards import stable_hash

# Groups in which sources are read: as many workers can take part.
_READING_GROUPS = 1024
_CONTENT_GROUPS = 4096


def know_content(ref: ImageRef) -> ImageRef:
    """Returns the ref with the sha256 of its bytes, as it is where they cannot be read."""
    return dataclasses.replace(ref, sha256=hash_source(ref))


def group_by_content(ref: ImageRef) -> ImageRef:
    """Returns the ref with its content as the group, so that copies go to one split.

    The split depends on the bytes alone: more files move none to another split.

    Raises:
      DataError: its source gives it a split.
    """
    if ref.split:
        raise DataError(
            f"--duplicates together: {ref.key!r} already has the split {ref.split!r} from its "
            "source, so copies cannot be brought into one; use drop"
        )
    return dataclasses.replace(ref, group=ref.sha256)


def drop_copies(refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
    """Yields the first ref by key of each content, with the others as its copies."""
    ordered = sorted(refs, key=lambda ref: (ref.sha256, ref.key))
    for digest, group in itertools.groupby(ordered, key=operator.attrgetter("sha256")):
        if not digest:  # unreadable ones are nobody's copies
            yield from group
            continue
        first, *others = group
        copies = tuple(Copy(ref.key, ref.source, ref.label) for ref in others)
        yield dataclasses.replace(first, copies=copies)


@dataclasses.dataclass
class TreatCopies(beam.PTransform):
    """Images -> images that know their content, their copies treated; reads every source once.

    Attributes:
      mode: "together" or "drop".
    """

    mode: str

    def expand(self, refs: beam.PCollection[ImageRef]) -> beam.PCollection[ImageRef]:
        """Spreads the references first: one worker listed them, and would read them all."""
        known = (
            refs
            | "SpreadByKey" >> beam.Map(_with_key_group)
            | "GroupForReading" >> beam.GroupByKey()
            # (group, [ImageRef, pickled])
            | "HashContents" >> beam.FlatMap(self._hash)
        )
        if self.mode == "together":
            return known | "GroupByContent" >> beam.Map(group_by_content)
        return (
            known
            | "SpreadByContent" >> beam.Map(_with_content_group)
            | "GroupContents" >> beam.GroupByKey()
            # (group, [ImageRef, pickled])
            | "DropCopies" >> beam.FlatMap(_drop_copies)
        )

    def _hash(self, group: tuple[int, Iterable[bytes]]) -> Iterator[ImageRef]:
        refs = map(pickle.loads, group[1])
        # What hangs is left without a hash here, and becomes a reject where it is read again.
        give_up = functools.partial(dataclasses.replace, sha256="")
        return map_in_order(know_content, refs, threads=READERS, give_up=give_up)


def _with_key_group(ref: ImageRef) -> tuple[int, bytes]:
    return stable_hash(ref.key, seed=0)[0] * _READING_GROUPS >> 64, pickle.dumps(ref)


def _with_content_group(ref: ImageRef) -> tuple[int, bytes]:
    digest = ref.sha256 or f"{stable_hash(ref.key, seed=0)[0]:016x}"
    return int(digest[:16], 16) * _CONTENT_GROUPS >> 64, pickle.dumps(ref)


def _drop_copies(group: tuple[int, Iterable[bytes]]) -> Iterator[ImageRef]:
    return drop_copies(map(pickle.loads, group[1]))
