"""`tpufeed verify`: proves that a data set is whole, or names the file, the record and why not.

Nothing here shares code with what writes the files: records are framed, parsed and decoded by
independent paths, and every number in dataset.json is computed again.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import hashlib
import io
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import google_crc32c
import numpy as np
import pyarrow
import pyarrow.compute

from pipeline.lists import is_digest, parse_list
from pipeline.reference import WHEN_LISTED, check_picture, check_sources, class_ids, shorten
from transforms import example, files, manifest
from transforms.example import Record
from transforms.manifest import Manifest, Shard, Split
from transforms.parquet import read_parquet
from transforms.records import SAME_BYTES
from transforms.shards import SHARD_NAME, SHARD_SUFFIX, place_of, shard_of

DEPTHS = ("quick", "full", "deep")
_MOST_FINDINGS_A_FILE = 10
_CRC_MASK = 0xA282EAD8
# The columns of index/; of the lists, their elements.
_CHANNEL_LISTS = ("channel_sum", "channel_sum_of_squares")
# The smallest value of each: a record has 16 bytes of framing, a source and a picture have pixels.
_LEAST = {
    **{"class": -1, "source_bytes": 1, "source_width": 1, "source_height": 1},
    **{"offset": 0, "size": 17, "pixels": 1},
    **dict.fromkeys(_CHANNEL_LISTS, 0),
}
_COLUMNS = {
    **dict.fromkeys(("key", "source", "label", "source_sha256"), pyarrow.string()),
    **dict.fromkeys(_LEAST, pyarrow.int64()),
}
_MOST_PIXELS = 2**40  # the most that --max-pixels allows
_MAGIC = {"jpeg": b"\xff\xd8\xff", "original": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n"}


class Readable(Protocol):
    """What a record file must be able to do."""

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes, fewer only at the end."""


class RecordError(ValueError):
    """A TFRecord file is damaged; says at which record."""


@dataclasses.dataclass(frozen=True)
class FramedRecord:
    """One record of a file: where it begins, its bytes with framing, and its payload or fault."""

    offset: int
    size: int
    payload: bytes
    fault: str = ""


def read_records(file: Readable) -> Iterator[FramedRecord]:
    """Reads a TFRecord file, gzipped or not, checking both checksums of every record.

    Framing: length uint64, masked crc32c of it, data, masked crc32c of it; little-endian
    (tensorflow/core/lib/io/record_writer.h).

    Raises:
      RecordError: the file is no TFRecord or ends within a record; nothing after can be read.
    """
    start = file.read(2)
    if start == b"\x1f\x8b":
        file = cast(Readable, gzip.GzipFile(fileobj=_Chained(start, file)))
        start = b""
    number = offset = 0
    while True:
        header = start + _read(file, 12 - len(start), number)
        start = b""
        if not header:
            return
        if len(header) < 12:
            raise RecordError(f"record {number}: the file ends within the length")
        length, length_crc = struct.unpack("<QI", header)
        if _masked_crc(header[:8]) != length_crc:
            raise RecordError(
                f"record {number}: the length's checksum does not match"
                + (": is this a TFRecord file?" if number == 0 else "")
            )
        body = _read(file, length + 4, number)
        if len(body) < length + 4:
            raise RecordError(f"record {number}: the file ends within the data")
        payload = body[:-4]
        sound = struct.unpack("<I", body[-4:])[0] == _masked_crc(payload)
        fault = "" if sound else f"record {number}: the data's checksum does not match"
        yield FramedRecord(offset, length + 16, payload, fault)
        offset += length + 16
        number += 1


class _Chained(io.RawIOBase):
    """What was read already, then the rest of the file."""

    def __init__(self, start: bytes, file: Readable):
        super().__init__()
        self._start, self._file = start, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._start[: len(buffer)] or self._file.read(len(buffer))
        self._start = self._start[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _read(file: Readable, size: int, number: int) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, OverflowError, MemoryError, zlib.error) as error:
        raise RecordError(f"record {number}: cannot be read: {error}") from error


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _CRC_MASK) & 0xFFFFFFFF


def verify_dataset(
    directory: str, *, depth: str = "full", sources: int = 0, leakage: bool = False
) -> list[str]:
    """Checks a data set.

    Args:
      directory: the data set's folder.
      depth: "quick" (names, sizes, index counts, without reading a shard), "full" (every record
        against its checksums, dataset.json and index/) or "deep" (every picture decoded as well).
      sources: re-read this many sources, chosen by hash, by an independent path.
      leakage: whether a content, by the sha256 in index/, may stand in one split only.

    Returns:
      What is wrong, a line each, beginning with the file's name; empty for a whole data set.
    """
    assert depth in DEPTHS, depth
    path = files.join(directory, manifest.MANIFEST)
    try:
        there = files.is_remote(path) and files.exists(path)
        if problem := files.file_problem(path, listed=there):
            return [f"{manifest.MANIFEST}: {problem}, so {directory} is no complete data set"]
        data = files.read_file(path)
        contents = manifest.parse_manifest(data, path=manifest.MANIFEST, check_fingerprint=False)
    except OSError as error:
        return [f"{manifest.MANIFEST}: {error.strerror or _line(error)}"]
    except ValueError as error:
        return [str(error)]
    checker = _Checker(directory, contents, data)
    checker.check_names()
    checker.check_counts()
    for split, shard in checker.shards():
        checker.check_shard(split, shard, depth)
    if depth != "quick" and not checker.findings:
        checker.check_whole()
    if leakage:
        checker.check_leakage()
    if sources and not checker.findings:
        checker.findings += check_sources(directory, contents, count=sources, rows=checker.rows)
    return checker.findings


class _Checker:
    """One pass over a data set; gathers findings and, for the whole, the index rows."""

    def __init__(self, directory: str, contents: Manifest, data: bytes):
        self.directory = directory
        self.manifest = contents
        self.document = json.loads(data)
        self.findings: list[str] = []
        self.unusable: set[str] = set()  # files that are reported, and not to be opened
        self.rows: dict[str, list[dict[str, Any]]] = {}  # by split, in file order

    def shards(self) -> Iterator[tuple[str, Shard]]:
        for name, split in self.manifest.splits.items():
            for shard in split.shards:
                yield name, shard

    def report(self, file: str, problem: str) -> None:
        self.findings.append(f"{file}: {problem}")

    def claim(self, what: str, found: Any, *, claimed: Any) -> None:
        """Reports a number of dataset.json that its data do not bear out."""
        if found != claimed:
            self.report(manifest.MANIFEST, f"{what} is {_short(claimed)}, found {_short(found)}")

    def check_names(self) -> None:
        """Exactly the shards that dataset.json names, and an index for each."""
        names = set(files.list_folder(self.directory))
        shards = {shard.name for _, shard in self.shards()}
        index = {name for shard in shards for name in _index_names(shard)}
        lists = {manifest.REJECTS, manifest.DUPLICATES}
        for name in [*sorted(shards | index), *sorted(lists, reverse=True)]:
            path = files.join(self.directory, *name.split("/"))
            if problem := files.file_problem(path, listed=name in names):
                self.report(name, problem)
                self.unusable.add(name)
        for name in sorted(names - shards - index):
            stem, in_index = name.removeprefix(f"{manifest.INDEX_FOLDER}/"), "/" in name
            like_shard = SHARD_NAME.match(stem) and (not in_index or name.startswith("index/"))
            matched = not in_index and any(name.startswith(f"{s}-") for s in self.manifest.splits)
            if like_shard or matched:
                self.report(name, "not in dataset.json, but a glob of shards would match it")

    def check_counts(self) -> None:
        """dataset.json against itself."""
        contents = self.manifest
        self.claim(
            "fingerprint",
            manifest.fingerprint(self.document),
            claimed=self.document["fingerprint"],
        )
        if type(seed := contents.config.get("seed", 0)) is not int:
            self.report(manifest.MANIFEST, f"config.seed is {_short(seed)}, no whole number")
        for name, split in contents.splits.items():
            total = sum(shard.records for shard in split.shards)
            self.claim(f"splits.{name}.records", total, claimed=split.records)
            self._check_class_counts(name, split)
            self.claim(f"splits.{name}.classes", list(split.classes), claimed=list(contents.labels))
            count = len(split.shards)
            expected = [f"{name}-{i:05d}-of-{count:05d}{SHARD_SUFFIX}" for i in range(count)]
            found = [shard.name for shard in split.shards]
            self.claim(f"splits.{name}.shards", expected, claimed=found)

    def _check_class_counts(self, name: str, split: Split) -> None:
        """Each record counts once; where it has several labels, once for each; or not at all."""
        kind, counts = self.manifest.label_kind, split.classes.values()
        if kind == "one":
            self.claim(f"splits.{name}.classes", sum(counts), claimed=split.records)
        elif kind == "none":
            self.claim("labels", [], claimed=list(self.manifest.labels))
        elif not max(counts, default=0) <= split.records <= sum(counts):
            self.report(
                manifest.MANIFEST,
                f"splits.{name}.classes are {_short(dict(split.classes))}, which "
                f"{split.records} records cannot have",
            )

    def check_shard(self, split: str, shard: Shard, depth: str) -> None:
        """One file with its index."""
        self._check_size(shard)
        name = _index_names(shard.name)[0]
        if name in self.unusable:
            return
        try:
            rows = self._read_index(shard)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            self.report(name, _line(error))
            return
        if len(rows) != shard.records:
            self.report(name, f"{len(rows)} rows, dataset.json says {shard.records} records")
        self._check_idx(shard, rows)
        self.rows.setdefault(split, []).extend(rows)
        if depth != "quick" and shard.name not in self.unusable:
            before = len(self.findings)
            _ShardChecker(self, split, shard, rows, depth == "deep").run()
            self.findings[before:] = shorten(self.findings[before:], limit=_MOST_FINDINGS_A_FILE)

    def _check_size(self, shard: Shard) -> None:
        if shard.name in self.unusable:
            return
        try:
            size = files.size_of(files.join(self.directory, shard.name))
        except OSError as error:
            self.report(shard.name, error.strerror or _line(error))
            self.unusable.add(shard.name)
            return
        if size != shard.bytes:
            self.report(shard.name, f"{size} bytes, dataset.json says {shard.bytes}")

    def _read_index(self, shard: Shard) -> list[dict[str, Any]]:
        data = files.read_file(files.join(self.directory, *_index_names(shard.name)[0].split("/")))
        table = read_parquet(data)
        lists = (*_CHANNEL_LISTS, "class") if self.manifest.label_kind == "many" else _CHANNEL_LISTS
        for name, kind in _COLUMNS.items():
            if name not in table.column_names:
                raise ValueError(f"no column {name!r}")
            column = table.column(name)
            listed = pyarrow.types.is_list(column.type)
            values = pyarrow.compute.list_flatten(column) if listed else column
            if (
                listed != (name in lists)
                or values.type != kind
                or column.null_count
                or values.null_count
            ):
                raise ValueError(f"column {name} is {column.type}, or has gaps")
            if name in _CHANNEL_LISTS and len(values) != len(column) * self.manifest.channels:
                raise ValueError(f"column {name} has not {self.manifest.channels} numbers a record")
            least = pyarrow.compute.min(values).as_py() if name in _LEAST else None
            if least is not None and least < _LEAST[name]:
                raise ValueError(f"column {name} has {least}, less than {_LEAST[name]}")
        _check_values(table, channels=self.manifest.channels)
        return table.to_pylist()

    def _check_idx(self, shard: Shard, rows: list[dict[str, Any]]) -> None:
        name = _index_names(shard.name)[1]
        if name in self.unusable:
            return
        try:
            data = files.read_file(files.join(self.directory, *name.split("/")))
        except (OSError, ValueError) as error:
            self.report(name, _line(error))
            return
        expected = [f"{row['offset']} {row['size']}" for row in rows]
        *lines, rest = data.decode("latin-1").split("\n")
        lines += [rest] if rest else []
        for number, (found, wanted) in enumerate(zip(lines, expected, strict=False)):
            if found != wanted:
                self.report(
                    name, f"line {number + 1} is {_short(found)}, the parquet says {wanted!r}"
                )
                return
        if len(lines) != len(expected):
            self.report(name, f"{len(lines)} lines, the parquet has {len(expected)} rows")
        elif rest:
            self.report(name, "the last line does not end")

    def check_leakage(self) -> None:
        """No content in two splits; the sources themselves are not read."""
        contents: dict[str, dict[str, list[str]]] = {}
        for split, rows in self.rows.items():
            for row in rows:
                keys = contents.setdefault(row["source_sha256"], {}).setdefault(split, [])
                keys.append(row["key"])
        found = [
            f"{manifest.INDEX_FOLDER}: content {digest} stands in the splits "
            + " and ".join(f"{split} ({_list(keys)})" for split, keys in sorted(splits.items()))
            for digest, splits in sorted(contents.items())
            if len(splits) > 1
        ]
        self.findings += shorten(found, limit=_MOST_FINDINGS_A_FILE)

    def check_whole(self) -> None:
        """What only all rows together can tell."""
        contents = self.manifest
        keys: dict[str, str] = {}
        for split, rows in self.rows.items():
            for row in rows:
                if (other := keys.setdefault(row["key"], split)) != split:
                    self.report(
                        manifest.MANIFEST,
                        f"key {row['key']!r} stands in the splits {other} and {split}",
                    )
            split_label = contents.labelling.split
            counts = collections.Counter(name for row in rows for name in split_label(row["label"]))
            self.claim(
                f"splits.{split}.classes",
                {label: counts[label] for label in contents.labels},
                claimed=dict(contents.splits[split].classes),
            )
        total = sum(map(len, self.rows.values()))
        if len(keys) != total:
            self.report(manifest.MANIFEST, f"{total} records, but only {len(keys)} keys")
        self._check_moments()
        self._check_lists()
        self._check_features()

    def _check_moments(self) -> None:
        rows = self.rows.get("train") or [row for rows in self.rows.values() for row in rows]
        pixels = sum(row["pixels"] for row in rows)
        if not pixels:
            return
        sums = [sum(column) for column in zip(*(r["channel_sum"] for r in rows), strict=True)]
        squares = [
            sum(column) for column in zip(*(r["channel_sum_of_squares"] for r in rows), strict=True)
        ]
        mean, std = manifest.channel_moments(pixels=pixels, sums=sums, squares=squares)
        self.claim("channel_mean", mean, claimed=self.manifest.channel_mean)
        self.claim("channel_std", std, claimed=self.manifest.channel_std)
        self.claim("channels", len(sums), claimed=self.manifest.channels)

    def _check_lists(self) -> None:
        rejects = self._read_lines(manifest.REJECTS)
        contents = self._read_lines(manifest.DUPLICATES)
        if rejects is None or contents is None:
            return
        reasons = collections.Counter(reject["reason"] for reject in rejects)
        self.claim("rejects", dict(reasons), claimed=dict(self.manifest.rejects))
        self._check_rejects(rejects)
        groups: dict[str, list[tuple[str, str]]] = {}
        digests: dict[str, str] = {}
        for rows in self.rows.values():
            for row in rows:
                groups.setdefault(row["source_sha256"], []).append((row["key"], row["label"]))
                digests[row["key"]] = row["source_sha256"]
        for reject in rejects:
            if reject["reason"] == "duplicate":
                kept = reject["detail"].removeprefix(SAME_BYTES)
                if kept not in digests:
                    self.report(manifest.REJECTS, f"{reject['key']!r}: no record {kept!r}")
                    continue
                groups[digests[kept]].append((reject["key"], reject["label"]))
        expected = [
            {"sha256": digest, "keys": [k for k, _ in pairs], "labels": [v for _, v in pairs]}
            for digest, pairs in sorted((d, sorted(p)) for d, p in groups.items() if len(p) > 1)
        ]
        if contents != expected:
            self.report(
                manifest.DUPLICATES, f"does not list the {len(expected)} contents that index/ has"
            )

    def _check_rejects(self, rejects: Sequence[dict[str, str]]) -> None:
        """No input is a record and a reject; the lines are in order, an excluded one has no name.

        What was rejected as it was listed may share its key with another input, under its own path.
        """
        sources = {row["key"]: row["source"] for rows in self.rows.values() for row in rows}
        found = []
        for number, (reject, before) in enumerate(zip(rejects, [None, *rejects], strict=False)):
            key, path, reason = reject["key"], reject["path"], reject["reason"]
            problem = ""
            if before and tuple(before.values()) > tuple(reject.values()):
                problem = "not sorted by key"
            elif reason == "excluded":
                digest = key.removeprefix("sha256:")
                if path or reject["label"] or digest == key or not is_digest(digest):
                    problem = "excluded, but not only by the hash of its key"
            elif key in sources and (path == sources[key] or reason not in WHEN_LISTED):
                problem = f"key {_short(key)} is that of a record"
            if problem:
                found.append(f"{manifest.REJECTS}: line {number + 1}: {problem}")
        self.findings += shorten(found, limit=_MOST_FINDINGS_A_FILE)

    def _read_lines(self, name: str) -> list[dict[str, Any]] | None:
        """Returns what a list holds, or None where that was reported."""
        try:
            data = files.read_file(files.join(self.directory, name))
            items = parse_list(data, name=name, path=name)
        except OSError as error:
            self.report(name, error.strerror or _line(error))
            return None
        except ValueError as error:
            self.findings.append(_line(error))
            return None
        for number, (item, line) in enumerate(zip(items, data.split(b"\n"), strict=False)):
            if json.dumps(item).encode() != line:
                self.report(name, f"line {number + 1}: not written as JSON is by tpufeed")
                return None
        return items

    def _check_features(self) -> None:
        contents = self.manifest
        of_schema = {
            spec.name: spec
            for spec in example.feature_specs(
                contents.schema, classes=len(contents.labels), kind=contents.label_kind
            )
        }
        found = {spec.name: spec for spec in contents.specs}
        for name, spec in of_schema.items():
            self.claim(f"features.{name}", spec, claimed=found.get(name))


class _ShardChecker:
    """Every record of one shard against its row, the schema and the plan."""

    def __init__(
        self, checker: _Checker, split: str, shard: Shard, rows: list[dict[str, Any]], deep: bool
    ):
        self.checker = checker
        self.manifest = checker.manifest
        self.split = split
        self.shard = shard
        self.rows = rows
        self.deep = deep

    def run(self) -> None:
        before = len(self.checker.findings)
        digest = hashlib.sha256()
        number = 0
        try:
            with files.open_file(files.join(self.checker.directory, self.shard.name)) as file:
                for number, record in enumerate(read_records(_Hashing(file, digest)), start=1):
                    self._check_framed(number - 1, record)
        except RecordError as error:
            self.checker.report(self.shard.name, str(error))
        except OSError as error:
            self.checker.report(self.shard.name, error.strerror or _line(error))
        if len(self.checker.findings) > before:
            return
        if number != self.shard.records:
            self._report(f"{number} records, dataset.json says {self.shard.records}")
        elif digest.hexdigest() != self.shard.sha256:
            self._report(f"sha256 is {digest.hexdigest()}, dataset.json says {self.shard.sha256}")
        self._check_order()

    def _report(self, problem: str, number: int | None = None) -> None:
        where = "" if number is None else f"record {number}: "
        self.checker.report(self.shard.name, where + problem)

    def _check_framed(self, number: int, record: FramedRecord) -> None:
        if record.fault:
            self.checker.report(self.shard.name, record.fault)
            return
        if number >= len(self.rows):
            self._report(f"not in {_index_names(self.shard.name)[0]}", number)
            return
        row = self.rows[number]
        if (record.offset, record.size) != (row["offset"], row["size"]):
            self._report(
                f"at {record.offset} with {record.size} bytes, index/ says {row['offset']} with "
                f"{row['size']}",
                number,
            )
            return
        try:
            self._check_record(record.payload, row)
        except (ValueError, KeyError, IndexError) as error:
            self._report(_line(error), number)

    def _check_record(self, payload: bytes, row: Mapping[str, Any]) -> None:
        contents = self.manifest
        features = example.parse_example(payload)
        example.check_features(features, specs=contents.specs)
        record = example.read_record(features, schema=contents.schema, kind=contents.label_kind)
        _agree("key", record.key, row["key"])
        self._check_classes(record, features, row)
        if record.size is not None:
            _agree("height x width", record.size[0] * record.size[1], row["pixels"])
            if contents.image_size is not None and record.size != contents.image_size:
                raise ValueError(f"size is {record.size}, dataset.json says {contents.image_size}")
        if not record.image.startswith(_MAGIC.get(contents.encoding, b"")):
            raise ValueError(f"picture begins with {record.image[:8]!r}, is no {contents.encoding}")
        if contents.encoding == "raw":
            _agree("bytes of pixels", len(record.image), row["pixels"] * contents.channels)
        if self.deep:
            check_picture(record, contents, row)

    def _check_classes(
        self, record: Record, features: Mapping[str, Any], row: Mapping[str, Any]
    ) -> None:
        """The record's classes and labels against dataset.json and its row."""
        contents = self.manifest
        ids = class_ids(record, contents)
        names = tuple(contents.labels[class_id] for class_id in ids)
        if contents.label_kind == "one":
            _agree("class", ids[0], row["class"])
            _agree("label of its class", names[0], row["label"])
            if record.label is not None:
                _agree("label", record.label, row["label"])
        elif contents.label_kind == "many":
            _agree("classes", list(ids), row["class"])
            indexed = contents.labelling.split(row["label"])
            _agree("labels of its classes", sorted(names), sorted(indexed))
            if record.label is not None:
                _agree("labels in the order of its classes", record.label, names)
        else:
            _agree("class, of none,", -1, row["class"])
            _agree("label, of none,", "", row["label"])
            if (name := example.CLASS_FEATURES[contents.schema]) in features:
                raise ValueError(f"feature {name!r}, but by dataset.json there are no labels")
        if "one_hot_class" in features:
            expected = [float(i in ids) for i in range(len(contents.labels))]
            _agree("one_hot_class", features["one_hot_class"][1], expected)

    def _check_order(self) -> None:
        """The plan: this shard's range of the hash, in the hash's order."""
        seed = self.manifest.config.get("seed", 0)
        found = SHARD_NAME.match(self.shard.name)
        if not found or not isinstance(seed, int):
            return
        index, count = int(found["index"]), int(found["count"])
        places = [place_of(row["key"], seed=seed) for row in self.rows]
        for number, row in enumerate(self.rows):
            right = shard_of(row["key"], count=count, seed=seed)
            if right != index:
                self._report(f"key {row['key']!r} belongs to shard {right} (seed {seed})", number)
                return
        if places != sorted(places):
            self._report(f"records are not in the order of the hash (seed {seed})")


class _Hashing:
    """Hashes what is read through it."""

    def __init__(self, file: Readable, digest: Any):
        self._file, self._digest = file, digest

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def _agree(what: str, found: Any, indexed: Any) -> None:
    if found != indexed:
        raise ValueError(f"{what} is {_short(found)}, index/ says {_short(indexed)}")


def _check_values(table: Any, *, channels: int) -> None:
    """Looks at the values of an index whose columns are of the right kind, all rows at once.

    Raises:
      ValueError: no picture can have them; names the row.
    """
    compute = pyarrow.compute
    for name, form in (("source_sha256", "^[0-9a-f]{64}$"), ("source", "(?s)^.")):
        matches = compute.match_substring_regex(table[name], form)
        if compute.all(matches).as_py() is False:
            found = matches.to_pylist().index(False)
            raise ValueError(f"row {found}: {name} is {_short(table[name][found].as_py())}")
    pixels = np.repeat(_as_numpy(table["pixels"]), channels)
    totals, squares = (_as_numpy(compute.list_flatten(table[name])) for name in _CHANNEL_LISTS)
    # Levels are 0 to 255: no square is less than its level, none more than 255 times that. What is
    # out of bounds is told first, so that no product is too long.
    wrong = (pixels > _MOST_PIXELS) | (totals > 255 * np.minimum(pixels, _MOST_PIXELS))
    most = 255 * np.minimum(totals, 255 * _MOST_PIXELS)
    wrong |= (squares < totals) | (squares > most)
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"row {number // channels}: {pixels[number]} pixels cannot sum up to {totals[number]}, "
            f"their squares to {squares[number]}"
        )


def _as_numpy(column: Any) -> np.ndarray:
    # Not by to_numpy: that imports pandas, as pyarrow.scalar does, which takes a fifth of a second.
    return np.from_dlpack(column.combine_chunks())


def _index_names(shard: str) -> tuple[str, str]:
    stem = shard.removesuffix(SHARD_SUFFIX)
    return (
        f"{manifest.INDEX_FOLDER}/{stem}.parquet",
        f"{manifest.INDEX_FOLDER}/{stem}.idx",
    )


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error))[:300] or type(error).__name__


def _list(keys: list[str]) -> str:
    names = ", ".join(map(repr, sorted(keys)[:3]))
    return names + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
