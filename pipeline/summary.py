"""`tpufeed inspect`: what a data set holds, or one record of it by random access."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.index import read_index
from pipeline.lists import read_list
from pipeline.messages import printable
from transforms import files
from transforms.example import parse_example, read_record
from transforms.manifest import DUPLICATES, Manifest, Shard, load_manifest
from transforms.records import DataError

_MOST_ROWS = 50  # classes that are named


def describe_manifest(manifest: Manifest, *, directory: str) -> str:
    """Returns some lines for a person: records by split and class, shards, rejects."""
    size = manifest.image_size
    pictures = f"{size[1]}x{size[0]}" if size else "of varying size"
    lines = [
        f"{directory}: {manifest.records} records, {_describe_classes(manifest)}, "
        f"{pictures}, {manifest.channels} channel(s), {manifest.encoding}, schema {manifest.schema}"
    ]
    splits = manifest.splits
    lines += describe_table(
        manifest.labels,
        {name: split.classes for name, split in splits.items()},
        {
            "total": {name: f"{split.records:,}" for name, split in splits.items()},
            "shards": {name: f"{len(split.shards):,}" for name, split in splits.items()},
            "MB": {name: f"{_bytes(manifest, name) / 1e6:,.1f}" for name in splits},
        },
    )
    rejects = ", ".join(f"{reason} {n}" for reason, n in manifest.rejects.items()) or "none"
    lines.append(f"  rejects: {rejects}; system files skipped: {manifest.skipped}")
    if manifest.channel_mean and manifest.channel_std:
        mean = " ".join(f"{value:.4f}" for value in manifest.channel_mean)
        std = " ".join(f"{value:.4f}" for value in manifest.channel_std)
        lines.append(f"  channel mean: {mean}; standard deviation: {std}")
    lines.append(f"  fingerprint: {manifest.fingerprint}")
    return "\n".join(lines)


def describe_table(
    labels: Sequence[str],
    classes: Mapping[str, Mapping[str, int]],
    more: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Returns the lines of a table: a row for each label, then more; a column for each split.

    Args:
      labels: in the order of their ids.
      classes: images by split and label; the splits in the order of the columns.
      more: further rows: a cell by split.
    """
    splits = list(classes)
    rows = [
        [_shown(label), *(f"{classes[s].get(label, 0):,}" for s in splits)]
        for label in labels[:_MOST_ROWS]
    ]
    if len(labels) > _MOST_ROWS:
        rows.append([f"... {len(labels) - _MOST_ROWS} more", *("" for _ in splits)])
    totals = [[name, *(cells[s] for s in splits)] for name, cells in more.items()]
    table = [["class", *splits], *rows, *totals]
    widths = [max(len(row[column]) for row in table) for column in range(len(splits) + 1)]
    widths = [widths[0], *(max(10, width) for width in widths[1:])]
    lines = [
        "  ".join([f"  {row[0]:<{widths[0]}}", *map("{:>{}}".format, row[1:], widths[1:])])
        for row in table
    ]
    rule = "  ".join(["  " + "-" * widths[0], *("-" * width for width in widths[1:])])
    below = len(lines) - len(totals)
    return [lines[0], rule, *lines[1:below], rule, *lines[below:]]


def _describe_classes(manifest: Manifest) -> str:
    if manifest.label_kind == "none":
        return "no labels"
    several = ", several a record" if manifest.label_kind == "many" else ""
    return f"{len(manifest.labels)} classes{several}"


def _shown(text: str) -> str:
    text = text if len(text) <= 40 else text[:37] + "..."
    return printable(text)


def _bytes(manifest: Manifest, split: str) -> int:
    return sum(shard.bytes for shard in manifest.splits[split].shards)


def inspect_dataset(
    directory: str,
    *,
    split: str | None = None,
    record: int | None = None,
    save: str | None = None,
    as_json: bool = False,
) -> str:
    """Returns what `tpufeed inspect` prints.

    Args:
      directory: the data set.
      split: only this split; for one record, the first split by default.
      record: number of a record in the split, from 0, in file order; None for a summary.
      save: file that the record's picture is written to, as it is stored.
      as_json: machine-readable.

    Raises:
      ValueError: no complete data set, no such split, no such record.
    """
    manifest = load_manifest(directory)
    if split is not None and split not in manifest.splits:
        raise ValueError(f"--split {split}: {directory} has {', '.join(manifest.splits)}")
    if record is None:
        return _summary(manifest, directory, split, as_json)
    chosen = split or next((s for s in manifest.splits if manifest.splits[s].records), "")
    facts, image = read_one(directory, manifest, split=chosen, record=record)
    if save:
        with open(save, "wb") as file:
            file.write(_as_picture(image, manifest, facts))
        facts["saved"] = save
    if as_json:
        return json.dumps(facts, indent=1)
    return "\n".join(f"{name}: {_shown_value(value)}" for name, value in facts.items())


def _summary(manifest: Manifest, directory: str, split: str | None, as_json: bool) -> str:
    duplicates, conflicts = _count_duplicates(directory)
    if as_json:
        names = [split] if split else list(manifest.splits)
        return json.dumps(
            {
                "directory": directory,
                "records": sum(manifest.splits[s].records for s in names),
                "labels": manifest.labels,
                "label_offset": manifest.label_offset,
                "label_kind": manifest.label_kind,
                "schema": manifest.schema,
                "encoding": manifest.encoding,
                "channels": manifest.channels,
                "image_size": manifest.image_size,
                "splits": {
                    s: {
                        "records": manifest.splits[s].records,
                        "shards": len(manifest.splits[s].shards),
                        "bytes": _bytes(manifest, s),
                        "classes": manifest.splits[s].classes,
                    }
                    for s in names
                },
                "rejects": manifest.rejects,
                "skipped": manifest.skipped,
                "duplicates": duplicates,
                "label_conflicts": conflicts,
                "channel_mean": manifest.channel_mean,
                "channel_std": manifest.channel_std,
                "fingerprint": manifest.fingerprint,
            },
            indent=1,
        )
    text = describe_manifest(manifest, directory=directory)
    text += "\n" + describe_duplicates(directory, mode=manifest.config.get("duplicates", "keep"))
    if split is None:
        return text
    shards = manifest.splits[split].shards
    return "\n".join([text, *(f"  {s.name}: {s.records} records, {s.bytes} bytes" for s in shards)])


def describe_duplicates(directory: str, *, mode: str) -> str:
    """Returns a line on copies, and whether their labels contradict each other."""
    duplicates, conflicts = _count_duplicates(directory)
    treated = {
        "together": "; each is in one split (every source was read once more)",
        "drop": "; the first by key of each was kept (every source was read once more)",
    }
    text = f"  contents under several keys: {duplicates}, with several labels: {conflicts}"
    return text + treated.get(str(mode), "") + (f": see {DUPLICATES}" if conflicts else "")


def _count_duplicates(directory: str) -> tuple[int, int]:
    contents = read_list(directory, DUPLICATES)
    return len(contents), sum(len(set(content["labels"])) > 1 for content in contents)


def locate(manifest: Manifest, *, split: str, record: int) -> tuple[Shard, int]:
    """Returns the shard that holds a split's record, and its number there.

    Raises:
      ValueError: the split has no such record.
    """
    total = manifest.splits[split].records if split else 0
    if not 0 <= record < total:
        raise ValueError(f"--record {record}: split {split!r} has records 0 to {total - 1}")
    for shard in manifest.splits[split].shards:
        if record < shard.records:
            return shard, record
        record -= shard.records
    raise AssertionError("shards hold fewer records than their split")


def read_one(
    directory: str, manifest: Manifest, *, split: str, record: int
) -> tuple[dict[str, Any], bytes]:
    """Reads one record through index/, without reading those before it.

    Returns:
      What is known of it, and its picture as stored.

    Raises:
      DataError: the shard or its index is damaged; names the file.
    """
    shard, number = locate(manifest, split=split, record=record)
    row = read_index(directory, shard).slice(number, 1).to_pylist()[0]
    try:
        features = parse_example(_read_payload(files.join(directory, shard.name), row))
        parts = read_record(features, schema=manifest.schema, kind=manifest.label_kind)
        if parts.key != row["key"]:
            raise DataError(f"its key is {parts.key!r}, index/ says {row['key']!r}")
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        # TypeError: of a column of another kind, or that is not there.
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(
            f"{shard.name}, record {number}: {' '.join(said.split()) or type(error).__name__}: run "
            f"tpufeed verify {directory}"
        ) from error
    if manifest.label_kind == "none":
        del row["label"], row["class"]
    facts = {
        "split": split,
        "record": record,
        "shard": shard.name,
        "record_in_shard": number,
        **row,
        "features": {
            name: [v.decode(errors="replace") if isinstance(v, bytes) else v for v in values]
            for name, (_, values) in sorted(features.items())
            if values != [parts.image]
        },
        "image_bytes": len(parts.image),
    }
    return facts, parts.image


def _read_payload(path: str, row: Mapping[str, Any]) -> bytes:
    with files.open_file(path) as file:
        file.seek(row["offset"])
        framed = file.read(row["size"])
    if len(framed) != row["size"]:
        raise DataError(f"{len(framed)} bytes, index/ says {row['size']}: the file is cut")
    return framed[12:-4]


def _as_picture(image: bytes, manifest: Manifest, facts: dict[str, Any]) -> bytes:
    """Returns the stored picture; raw pixels as PNG, since nothing else could open them."""
    if manifest.encoding != "raw":
        return image
    from PIL import Image

    height, width = facts["features"]["size"]
    mode = "RGB" if manifest.channels == 3 else "L"
    buffer = io.BytesIO()
    Image.frombytes(mode, (width, height), image).save(buffer, "PNG")
    return buffer.getvalue()


def _shown_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return printable(text)
