"""References in, finished files out: shards with their indexes, rejects, duplicates, the manifest.

Each image is read and prepared as its shard is written, and goes straight into the shard's file: no
pixel is ever shuffled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import itertools
import json
import operator
import pickle
import platform
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import apache_beam as beam
import pyarrow
import pyarrow.parquet
from apache_beam import pvalue
from apache_beam.coders import BytesCoder
from apache_beam.io.filesystem import CompressionTypes

from transforms import files, progress, resume
from transforms.decoders import Outcome, Task, prepare_images
from transforms.example import FeatureSpec, feature_specs
from transforms.exif import exif_specs
from transforms.labels import ONE_LABEL, Labelling
from transforms.manifest import (
    DUPLICATES,
    INDEX_FOLDER,
    MANIFEST,
    REJECTS,
    Manifest,
    describe_features,
    dump_manifest,
    moments_of_training,
    summarize_splits,
)
from transforms.ordered import READERS, map_in_order
from transforms.prepare import PreparedRecord, RecordPolicy, Source, read_source, reject_image
from transforms.records import (
    CHOICES,
    SAME_BYTES,
    DataError,
    Exclusions,
    ImageError,
    ImageRef,
    Reject,
    ShardSummary,
    Skipped,
)
from transforms.shards import SHARD_SUFFIX, place_of, shard_of
from transforms.stats import Sizes
from transforms.tables import Columns

ShardKey = tuple[str, int, int]  # split, index, count

INDEX_SCHEMA = pyarrow.schema(
    [
        ("key", pyarrow.string()),
        ("source", pyarrow.string()),
        ("label", pyarrow.string()),
        ("class", pyarrow.int64()),
        ("source_sha256", pyarrow.string()),
        ("source_bytes", pyarrow.int64()),
        ("source_width", pyarrow.int64()),
        ("source_height", pyarrow.int64()),
        ("offset", pyarrow.int64()),
        ("size", pyarrow.int64()),
        ("pixels", pyarrow.int64()),
        ("channel_sum", pyarrow.list_(pyarrow.int64())),
        ("channel_sum_of_squares", pyarrow.list_(pyarrow.int64())),
    ]
)


def index_schema(labelling: Labelling) -> pyarrow.Schema:
    """Returns the columns of index/: `class` is a list where a record has several labels."""
    if labelling.kind != "many":
        return INDEX_SCHEMA
    number = INDEX_SCHEMA.get_field_index("class")
    return INDEX_SCHEMA.set(number, pyarrow.field("class", pyarrow.list_(pyarrow.int64())))


def treat_copies(ref: ImageRef, result: Outcome, *, exclusions: Exclusions) -> Iterator[Outcome]:
    """Yields what became of an image, then a reject for each copy that was dropped for it.

    Copies of an image that is rejected are rejected for the same reason: so many files are bad.
    """
    yield result
    for copy in ref.copies:
        if isinstance(result, PreparedRecord):
            detail = SAME_BYTES + ref.key
            yield Reject(copy.key, copy.source, copy.label, "duplicate", detail)
        elif result.reason == "excluded":
            yield exclusions.reject_key(copy.key)
        else:
            yield Reject(copy.key, copy.source, copy.label, result.reason, result.detail)


def prepare_refs(
    refs: Sequence[ImageRef], task: Task, *, decoders: int
) -> Generator[Outcome, None, None]:
    """Prepares images in order; what lies in a store is read here, ahead, since it comes slowly."""
    sources = None
    if any(files.is_remote(ref.path) for ref in refs):
        sources = map_in_order(_read_ahead, refs, threads=READERS)
    return prepare_images(refs, task=task, processes=decoders, sources=sources)


def _read_ahead(ref: ImageRef) -> Source | Reject | None:
    if not files.is_remote(ref.path):
        return None
    try:
        return read_source(ref)
    except ImageError as error:
        return reject_image(ref, error)


def index_row(record: PreparedRecord, *, offset: int, size: int) -> dict[str, Any]:
    """Returns the record's row of index/<shard>.parquet; offset and size in bytes, with framing.

    `class` is -1 for a record without labels.
    """
    return {
        "key": record.ref.key,
        "source": record.ref.source,
        "label": record.ref.label,
        "class": -1 if record.class_id is None else record.class_id,
        "source_sha256": record.source_sha256,
        "source_bytes": record.source_bytes,
        "source_width": record.image.geometry.source_width,
        "source_height": record.image.geometry.source_height,
        "offset": offset,
        "size": size,
        "pixels": record.image.pixels,
        "channel_sum": record.image.channel_sum,
        "channel_sum_of_squares": record.image.channel_sum_of_squares,
    }


def summarize_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    key: ShardKey,
    name: str,
    channels: int,
    digest: str,
    labelling: Labelling = ONE_LABEL,
) -> ShardSummary:
    """Returns the shard's summary from its index rows and the file's sha256."""
    classes = collections.Counter(label for row in rows for label in labelling.split(row["label"]))

    def total(column: str) -> tuple[int, ...]:
        return tuple(sum(row[column][c] for row in rows) for c in range(channels))

    return ShardSummary(
        split=key[0],
        index=key[1],
        name=name,
        records=len(rows),
        bytes=sum(row["size"] for row in rows),
        sha256=digest,
        classes=tuple(sorted(classes.items())),
        pixels=sum(row["pixels"] for row in rows),
        channel_sum=total("channel_sum"),
        channel_sum_of_squares=total("channel_sum_of_squares"),
    )


class _Tally:
    """A file that hashes and counts what Beam's sink writes into it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)

    def close(self) -> None:
        self._file.close()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class WriteShards(beam.io.WriteToTFRecord):
    """References -> finished shards, on Beam's own TFRecord sink.

    The sink's open, coder, record framing, close and naming template are used as they are. Its
    initialise and finalise steps are not: they rename only when all shards are there, and delete
    finished ones on a retry. Here each shard is written under a temporary name and renamed when
    it is whole, after its index.

    Expands on a PCollection of ImageRef that know their split. Returns a dict of PCollections:
    `summaries` (ShardSummary), `rejects` (Reject) and `contents` ((sha256 in bytes, (key, label))).
    """

    def __init__(
        self,
        output: str,
        *,
        policy: RecordPolicy,
        seed: int,
        decoders: int,
        plan: pvalue.AsSingleton,
        labels: pvalue.AsSingleton,
        exclusions: Exclusions | pvalue.AsSingleton,
        run: pvalue.AsSingleton,
    ):
        """Takes plan and labels, and exclusions where there are any, as side inputs.

        Args:
          output: the data set's folder.
          policy: how an image becomes a record.
          seed: of the hash that gives shard and order.
          decoders: processes that prepare a shard's images.
          plan: {split: number of shards}.
          labels: all labels, in the order of their ids.
          exclusions: contents that must not come in.
          run: digest of plan.json, which is there before any shard is.
        """
        super().__init__(
            files.join(output, ""),
            coder=BytesCoder(),
            file_name_suffix=SHARD_SUFFIX,
            compression_type=CompressionTypes.UNCOMPRESSED,
        )
        self._output = output
        self._policy = policy
        self._seed = seed
        self._decoders = decoders
        self._plan = plan
        self._labels = labels
        self._exclusions = exclusions
        self._run = run

    def expand(self, refs: beam.PCollection[ImageRef]) -> dict[str, beam.PCollection]:
        """Brings each shard's references together; every planned shard is written, full or not."""
        once = refs.pipeline | "Impulse" >> beam.Impulse() | "Once" >> beam.Map(lambda _: None)
        written = (
            # Joined before they are placed: joined after, all would be held once more.
            (refs, once)
            | "AndOnce" >> beam.Flatten()
            | "PlaceImages" >> beam.FlatMap(place_image, self._plan, seed=self._seed)
            | "GroupShards" >> beam.GroupByKey()
            # ((split, index, count), [ImageRef, pickled, or nothing])
            | "WriteShard"
            >> beam.FlatMap(
                self._write_once, self._run, self._labels, self._exclusions
            ).with_outputs("Reject", "Content", main="ShardSummary")
        )
        return {
            "summaries": written.ShardSummary,
            "rejects": written.Reject,
            "contents": written.Content,
        }

    def _write_once(
        self, shard: tuple[ShardKey, Iterable[bytes]], run: str, *rest: Any
    ) -> Iterator[Any]:
        """Hands on a shard that an earlier run, or attempt, finished; writes it otherwise."""
        with self._saying_where(), files.hold_folder(self._output):
            resume.check_still(self._output, run)
            name = self._shard_name(shard[0])
            done = resume.read_done(self._output, name, plan=run)
            if done is not None:
                progress.report(progress.KEPT, sum(1 for ref in shard[1] if ref))
                yield from _tag_done(done)
                yield done.summary
                return
            told: dict[str, list[Any]] = {"Reject": [], "Content": []}
            for item in self._write(shard, *rest):
                if isinstance(item, pvalue.TaggedOutput):
                    told[item.tag].append(item.value)
                    yield item
                    continue
                done = resume.DoneShard(item, tuple(told["Reject"]), tuple(told["Content"]))
                resume.write_done(self._output, done, plan=run)
                yield item

    @contextlib.contextmanager
    def _saying_where(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Disk full, no permission, a store that refuses: the run's end, not the image's.
            raise DataError(
                f"cannot write to {self._output}: {error.strerror or error}; mend it, then run "
                "again with --resume"
            ) from error

    def _write(
        self,
        shard: tuple[ShardKey, Iterable[bytes]],
        labels: tuple[str, ...],
        exclusions: Exclusions,
    ) -> Iterator[Any]:
        key, refs = shard
        class_ids = {label: i for i, label in enumerate(labels)}
        task = Task(self._policy, class_ids, exclusions)
        ordered = sorted(
            (pickle.loads(ref) for ref in refs if ref),
            key=lambda ref: place_of(ref.key, seed=self._seed),
        )
        with contextlib.closing(prepare_refs(ordered, task, decoders=self._decoders)) as outcomes:
            every = itertools.chain.from_iterable(
                treat_copies(ref, outcome, exclusions=exclusions)
                for ref, outcome in zip(ordered, _counting(outcomes), strict=True)
            )
            yield from self._write_files(key, every)

    def _write_files(self, key: ShardKey, outcomes: Iterable[Outcome]) -> Iterator[Any]:
        name = self._shard_name(key)
        temporary = files.work_path(self._output, name + SHARD_SUFFIX)
        files.file_systems(temporary)  # signs in, before Beam would
        with files.asking_store(temporary):
            tally = _Tally(self._sink.open(temporary))
        rows: list[dict[str, Any]] = []
        try:
            for result in outcomes:
                if isinstance(result, Reject):
                    yield pvalue.TaggedOutput("Reject", result)
                    continue
                offset = tally.bytes
                self._sink.write_record(tally, result.example)
                row = index_row(result, offset=offset, size=tally.bytes - offset)
                rows.append(row)
                # Handed on at once, while the decoders are busy with the next ones.
                digest = bytes.fromhex(result.source_sha256)
                yield pvalue.TaggedOutput("Content", (digest, (row["key"], row["label"])))
                for copy in result.ref.copies:
                    yield pvalue.TaggedOutput("Content", (digest, (copy.key, copy.label)))
        finally:
            self._sink.close(tally)
        write_index(self._output, name, rows, labelling=self._policy.labelling)
        files.rename(temporary, files.join(self._output, name + SHARD_SUFFIX))
        yield summarize_rows(
            rows,
            key=key,
            name=name,
            channels=self._policy.pixels.channels,
            digest=tally.hexdigest(),
            labelling=self._policy.labelling,
        )

    def _shard_name(self, key: ShardKey) -> str:
        split, index, count = key
        return split + self._sink.shard_name_format % {"shard_num": index, "num_shards": count}


def _counting(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    meter = progress.Meter()
    for outcome in outcomes:
        meter.count(progress.REJECTS if isinstance(outcome, Reject) else progress.RECORDS)
        yield outcome
    meter.report()


def _tag_done(done: resume.DoneShard) -> Iterator[pvalue.TaggedOutput]:
    for reject in done.rejects:
        yield pvalue.TaggedOutput("Reject", reject)
    for content in done.contents:
        yield pvalue.TaggedOutput("Content", content)


def place_image(
    ref: ImageRef | None, plan: Mapping[str, int], *, seed: int
) -> Iterator[tuple[ShardKey, bytes]]:
    """Gives an image to its shard, and nothing, once, to every planned shard.

    The image is pickled here, since local runners hold all that is grouped, decoded.
    """
    if ref is not None:
        count = plan[ref.split]
        yield (ref.split, shard_of(ref.key, count=count, seed=seed), count), pickle.dumps(ref)
        return
    for split, count in plan.items():
        for index in range(count):
            yield (split, index, count), b""


def write_index(
    folder: str,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    labelling: Labelling = ONE_LABEL,
) -> None:
    """Writes index/<name>.parquet, and index/<name>.idx in NVIDIA DALI's form.

    The .idx has a line `offset size` for each record, in bytes, framing included, as
    DALI's tfrecord2idx writes it.
    """
    table = pyarrow.Table.from_pylist(list(rows), schema=index_schema(labelling))
    buffer = io.BytesIO()
    # Page checksums: a damaged index is told from a right one before its numbers are used.
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    files.write_file(folder, f"{INDEX_FOLDER}/{name}.parquet", buffer.getvalue())
    lines = "".join(f"{row['offset']} {row['size']}\n" for row in rows)
    files.write_file(folder, f"{INDEX_FOLDER}/{name}.idx", lines.encode())


def _json_lines(objects: Iterable[Any]) -> bytes:
    # ASCII only: names that are not UTF-8 must survive, and terminals must not be driven.
    return "".join(json.dumps(item) + "\n" for item in objects).encode()


def write_rejects(rejects: Iterable[Reject], *, output: str) -> dict[str, int]:
    """Writes rejects.jsonl, sorted by key; returns how many there are for each reason, sorted."""
    ordered = sorted(rejects, key=dataclasses.astuple)
    files.write_file(output, REJECTS, _json_lines(map(dataclasses.asdict, ordered)))
    return dict(sorted(collections.Counter(reject.reason for reject in ordered).items()))


@dataclasses.dataclass
class WriteRejects(beam.PTransform):
    """Rejects -> rejects.jsonl, and one {reason: number}."""

    output: str

    def expand(self, rejects: beam.PCollection[Reject]) -> beam.PCollection[dict[str, int]]:
        """Brings all rejects into one place: they are few, or the run fails."""
        return (
            rejects.pipeline
            | "Once" >> beam.Impulse()
            | "WriteFile" >> beam.Map(self._write, pvalue.AsIter(rejects))
        )

    def _write(self, _: bytes, rejects: Iterable[Reject]) -> dict[str, int]:
        return write_rejects(rejects, output=self.output)


def write_duplicates(
    groups: Iterable[tuple[bytes, Sequence[tuple[str, str]]]], *, output: str
) -> int:
    """Writes duplicates.jsonl, sorted by sha256; returns the number of its lines.

    Args:
      groups: (sha256, [(key, label)]) with at least two keys each.
      output: the data set's folder.
    """
    lines = [
        {
            "sha256": digest.hex(),
            "keys": [key for key, _ in pairs],
            "labels": [lab for _, lab in pairs],
        }
        for digest, pairs in sorted(groups)
    ]
    files.write_file(output, DUPLICATES, _json_lines(lines))
    return len(lines)


@dataclasses.dataclass
class WriteDuplicates(beam.PTransform):
    """(sha256, (key, label)) -> duplicates.jsonl, and the number of its lines."""

    output: str

    def expand(
        self, contents: beam.PCollection[tuple[bytes, tuple[str, str]]]
    ) -> beam.PCollection[int]:
        """Brings equal contents together and keeps those that stand under several keys."""
        groups = (
            contents
            | "PackContent" >> beam.Map(_pack_content)
            | "GroupContents" >> beam.GroupByKey()
            # (bucket, [(sha256, key, label), pickled])
            | "FindDuplicates" >> beam.FlatMap(_find_duplicates)
        )
        return (
            contents.pipeline
            | "Once" >> beam.Impulse()
            | "WriteFile" >> beam.Map(self._write, pvalue.AsIter(groups))
        )

    def _write(self, _: bytes, groups: Iterable[tuple[bytes, Sequence[tuple[str, str]]]]) -> int:
        return write_duplicates(groups, output=self.output)


def _pack_content(content: tuple[bytes, tuple[str, str]]) -> tuple[int, bytes]:
    # A bucket for 1 in 4096 contents: a group for each would cost local runners more than it holds.
    digest, (key, label) = content
    return int.from_bytes(digest[:2], "big") >> 4, pickle.dumps((digest, key, label))


def _find_duplicates(
    group: tuple[int, Iterable[bytes]],
) -> Iterator[tuple[bytes, list[tuple[str, str]]]]:
    found = sorted(map(pickle.loads, group[1]))
    for digest, same in itertools.groupby(found, key=operator.itemgetter(0)):
        pairs = [(key, label) for _, key, label in same]
        if len(pairs) > 1:
            yield digest, pairs


@dataclasses.dataclass(frozen=True)
class ManifestHeader:
    """What is known of the manifest before anything was read."""

    tpufeed: str
    config: Mapping[str, Any]
    policy: RecordPolicy
    splits: tuple[str, ...]
    max_reject_rate: float


NO_IMAGE = (
    "no image was found: the tables have no rows, or all files are a system's own, as .DS_Store; "
    "see --input"
)


def check_reject_rate(
    records: int, rejects: Mapping[str, int], *, max_reject_rate: float, output: str
) -> None:
    """Raises DataError where too many inputs, or all of them, were rejected."""
    faults = sum(number for reason, number in rejects.items() if reason not in CHOICES)
    reasons = ", ".join(f"{reason} {number}" for reason, number in rejects.items())
    where = files.join(output, REJECTS)
    if faults > max_reject_rate * (records + faults):
        raise DataError(
            f"{faults} of {records + faults} inputs were rejected ({reasons}), more than "
            f"--max-reject-rate {max_reject_rate:g}: see {where}; mend the inputs, or "
            "raise the rate and go on with --resume"
        )
    if not records and not reasons:
        raise DataError(NO_IMAGE)
    if not records:
        raise DataError(f"no input became a record ({reasons}): see {where}")


def merge_columns(columns: Iterable[Columns]) -> tuple[FeatureSpec, ...]:
    """Returns the extra features of all CSV files.

    Raises:
      DataError: two files differ in them.
    """
    ordered = sorted(columns, key=lambda c: c.path)
    for other in ordered[1:]:
        if other.specs != ordered[0].specs:
            raise DataError(
                f"{ordered[0].path} and {other.path} differ in their extra columns: give every "
                "file the same header"
            )
    return ordered[0].specs if ordered else ()


def library_versions() -> dict[str, str]:
    """Returns the versions that decide the bytes."""
    import PIL
    from PIL import features

    return {
        "python": platform.python_version(),
        "apache-beam": beam.__version__,
        "pillow": PIL.__version__,
        "libjpeg-turbo": features.version("libjpeg_turbo") or "",
        **{name: importlib.metadata.version(name) for name in ("simplejpeg", "cykooz-resizer")},
        "pyarrow": pyarrow.__version__,
        "machine": platform.machine(),
    }


def make_manifest(
    summaries: Sequence[ShardSummary],
    labels: tuple[str, ...],
    rejects: Mapping[str, int],
    skipped: Iterable[Skipped],
    columns: Iterable[Columns],
    *,
    header: ManifestHeader,
) -> Manifest:
    """Returns the manifest of a data set whose shards are all written."""
    mean, std = moments_of_training(summaries)
    pixels, schema = header.policy.pixels, header.policy.schema
    kind = header.policy.labelling.kind
    extra = (*merge_columns(columns), *exif_specs(header.policy.exif))
    specs = feature_specs(schema, classes=len(labels), extra=extra, kind=kind)
    return Manifest(
        tpufeed=header.tpufeed,
        libraries=library_versions(),
        config=header.config,
        schema=schema,
        encoding=pixels.encoding,
        channels=pixels.channels,
        image_size=(pixels.height, pixels.width) if pixels.fixed_size else None,
        labels=labels,
        label_offset=header.policy.label_offset,
        features=describe_features(specs),
        splits=summarize_splits(summaries, splits=header.splits, labels=labels),
        channel_mean=mean,
        channel_std=std,
        rejects=rejects,
        skipped=sum(1 for _ in skipped),
    )


@dataclasses.dataclass
class KeepPlan(beam.PTransform):
    """What was counted -> the digest of plan.json, which is then there, or was and says the same.

    No shard is written before: where the folder was begun with other flags, inputs or versions,
    nothing in it changes.
    """

    output: str
    header: ManifestHeader
    plan: pvalue.AsSingleton
    labels: pvalue.AsSingleton
    exclusions: Exclusions | pvalue.AsSingleton

    def expand(self, sizes: beam.PCollection[Sizes]) -> beam.PCollection[str]:
        """On a worker, whose libraries make the bytes."""
        return sizes | "KeepPlan" >> beam.Map(self._keep, self.plan, self.labels, self.exclusions)

    def _keep(
        self,
        sizes: Sizes,
        plan: Mapping[str, int],
        labels: tuple[str, ...],
        exclusions: Exclusions,
    ) -> str:
        progress.report(progress.IMAGES, sum(size.records for size in sizes.values()))
        document = resume.describe_plan(
            tpufeed=self.header.tpufeed,
            libraries=library_versions(),
            config=self.header.config,
            labels=labels,
            sizes=sizes,
            exclusions=exclusions.contents,
            shards=plan,
        )
        try:
            return resume.keep_plan(self.output, document)
        except OSError as error:
            raise DataError(
                f"cannot write to {self.output}: {error.strerror or error}; mend it, then run "
                "again with --resume"
            ) from error


@dataclasses.dataclass
class WriteManifest(beam.PTransform):
    """All summaries -> dataset.json, last of all; or the run's failure, and none."""

    output: str
    header: ManifestHeader
    labels: pvalue.AsSingleton
    run: pvalue.AsSingleton
    rejects: pvalue.AsSingleton
    skipped: pvalue.AsIter
    columns: pvalue.AsIter
    # Only waited for: dataset.json comes after duplicates.jsonl.
    duplicates: pvalue.AsSingleton

    def expand(self, summaries: beam.PCollection[ShardSummary]) -> beam.PCollection[Manifest]:
        """Brings the summaries together: a few hundred bytes for each shard."""
        facts = (pvalue.AsList(summaries), self.labels, self.rejects, self.skipped, self.columns)
        return (
            summaries.pipeline
            | "Once" >> beam.Impulse()
            | "WriteManifest" >> beam.Map(self._write, self.run, self.duplicates, *facts)
        )

    def _write(self, _: bytes, run: str, duplicates: int, *facts: Any) -> Manifest:
        manifest = make_manifest(*facts, header=self.header)
        check_reject_rate(
            manifest.records,
            manifest.rejects,
            max_reject_rate=self.header.max_reject_rate,
            output=self.output,
        )
        data = dump_manifest(manifest)
        if not resume.is_finished(self.output, data):  # else by an attempt that was not heard of
            resume.check_still(self.output, run)
            files.write_file(self.output, MANIFEST, data)
        resume.forget_run(self.output, _shard_names(manifest))
        return manifest


def _shard_names(manifest: Manifest) -> Iterator[str]:
    for split in manifest.splits.values():
        for shard in split.shards:
            yield shard.name.removesuffix(SHARD_SUFFIX)
