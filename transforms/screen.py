"""What must not come in: --exclude, by key and by content, and labels that nobody named."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from transforms import files, progress
from transforms.labels import ONE_LABEL, Labelling
from transforms.prepare import read_source
from transforms.records import DataError, Exclusions, ImageError, ImageRef, Reject

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def parse_exclusions(data: bytes) -> Exclusions:
    """Reads keys and sha256, one a line; 64 hex digits may be either and exclude both."""
    rows = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = frozenset(os.fsdecode(row.removesuffix(b"\r")) for row in rows) - {""}
    contents = frozenset(line.lower() for line in lines if _SHA256.fullmatch(line))
    return Exclusions(lines, contents)


def screen_image(
    ref: ImageRef,
    exclusions: Exclusions,
    *,
    known: frozenset[str] | None,
    labelling: Labelling = ONE_LABEL,
) -> ImageRef | Reject:
    """Returns the ref, or a reject where its key is excluded or a label of it is not known."""
    if ref.key in exclusions.keys:
        return exclusions.reject_key(ref.key)
    unknown = () if known is None else [n for n in labelling.split(ref.label) if n not in known]
    if unknown:
        which = f"{', '.join(map(repr, unknown))}: " if labelling.kind == "many" else ""
        detail = f"{which}not in --class-names"
        return Reject(ref.key, ref.source, ref.label, "unknown_label", detail)
    return ref


def screen_reject(reject: Reject, exclusions: Exclusions, *, ref: ImageRef) -> Reject:
    """Returns the reject, without its names where its key or its content is excluded."""
    if ref.key in exclusions.keys or (
        exclusions.contents and hash_source(ref) in exclusions.contents
    ):
        return exclusions.reject_key(ref.key)
    return reject


def hash_source(ref: ImageRef) -> str:
    """Returns the sha256 of a source's bytes in hex, "" where it cannot be read."""
    try:
        return hashlib.sha256(read_source(ref)[0]).hexdigest()
    except ImageError:
        return ""


def hash_excluded(ref: ImageRef, exclusions: Exclusions) -> Iterator[str]:
    """Yields the sha256 of an excluded source, since its copies under other keys go as well."""
    # What cannot be read has no copy that could be told.
    if ref.key in exclusions.keys and (digest := hash_source(ref)):
        yield digest


@dataclasses.dataclass
class ScreenImages(beam.PTransform):
    """Takes out what --exclude and --class-names keep out.

    Expands on what ListImages returns. Returns a dict: the PCollections `refs` (ImageRef) and
    `rejects` (Reject; the listing's among them, without the names of what is excluded), and
    `exclusions`, Exclusions completed with the contents of the excluded keys, as a side input;
    as a value where there is no file of them.
    """

    exclude: str | None
    known: frozenset[str] | None
    labelling: Labelling = ONE_LABEL

    def expand(self, listed: dict[str, beam.PCollection]) -> dict[str, Any]:
        """Reads the file of exclusions in the graph: it may be long."""
        keys: Any = Exclusions()
        complete: Any = keys
        if self.exclude is not None:
            keys, complete = self._read(listed["refs"])
        screened = listed["refs"] | "Screen" >> beam.FlatMap(self._screen, keys).with_outputs(
            "Reject", main="ImageRef"
        )
        rejects = (
            (listed["rejects"] | "WithRef" >> beam.Map(_with_ref), screened.Reject)
            | "AllRejects" >> beam.Flatten()
            # (ImageRef, Reject)
            | "ScreenRejects" >> beam.Map(_screen_reject, complete)
        )
        return {"refs": screened.ImageRef, "rejects": rejects, "exclusions": complete}

    def _read(
        self, refs: beam.PCollection[ImageRef]
    ) -> tuple[pvalue.AsSingleton, pvalue.AsSingleton]:
        exclusions = (
            refs.pipeline
            | "ExcludeFile" >> beam.Create([self.exclude])
            | "ReadExclusions" >> beam.Map(read_exclusions)
        )
        keys = pvalue.AsSingleton(exclusions)
        contents = refs | "HashExcluded" >> beam.FlatMap(hash_excluded, keys)
        complete = exclusions | "AddContents" >> beam.Map(add_contents, pvalue.AsIter(contents))
        return keys, pvalue.AsSingleton(complete)

    def _screen(self, ref: ImageRef, exclusions: Exclusions) -> Iterator[Any]:
        item = screen_image(ref, exclusions, known=self.known, labelling=self.labelling)
        yield item if isinstance(item, ImageRef) else pvalue.TaggedOutput("Reject", (ref, item))


def _with_ref(reject: Reject) -> tuple[ImageRef, Reject]:
    return ImageRef(reject.key, reject.path, reject.label), reject


def _screen_reject(pair: tuple[ImageRef, Reject], exclusions: Exclusions) -> Reject:
    ref, reject = pair
    progress.report(progress.REFUSED)
    return screen_reject(reject, exclusions, ref=ref)


def read_exclusions(path: str) -> Exclusions:
    """Reads the file of --exclude.

    Raises:
      DataError: it cannot be read, or is no text that a key could stand in.
    """
    try:
        data = files.read_file(path)
    except OSError as error:
        raise DataError(f"--exclude {path}: {error.strerror or error}") from error
    text, nul, _ = data.partition(b"\0")
    if nul:  # nothing would be excluded, and nothing said
        line = text.count(b"\n") + 1
        raise DataError(
            f"--exclude {path}, line {line}: holds a NUL byte: the file is damaged, packed or "
            "UTF-16; save it as UTF-8"
        )
    return parse_exclusions(data)


def add_contents(exclusions: Exclusions, contents: Iterable[str]) -> Exclusions:
    """Returns the exclusions with more contents."""
    return dataclasses.replace(exclusions, contents=exclusions.contents | set(contents))
