"""The independent path that `verify --deep` and `verify --sources` compare records with.

Written apart from transforms/image.py and transforms/sources.py on purpose, with Pillow's own
ready-made operations: a fault there must not be found here as well.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import hashlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from pipeline.lists import read_list, shorten_value
from transforms import files, manifest
from transforms.example import Record, parse_example, read_record
from transforms.manifest import Manifest

# Levels of mean difference between a record's picture and the reference, whole and as 8x8
# thumbnails. Measured on 1,000 flowers and 32 photographs: at most 5.6 and 0.7 at quality 75 to
# 90, 6.9 and 0.7 at 50. Below 50 JPEG itself may cost more.
_MOST_DIFFERENCE = 10.0, 2.0
_MOST_DIFFERENCE_LOW_QUALITY = 40.0, 8.0
_LOW_QUALITY = 50
# What encoding as JPEG may move the mean of a channel by.
_JPEG_MEAN_TOLERANCE = 4.0
_MOST_FINDINGS = 20
# Reasons found while inputs are listed: of these alone another input may have the key.
WHEN_LISTED = ("bad_name", "missing", "unreadable")
# How `fit_reference` resizes.
_MODES = ("cover", "stretch", "pad", "contain", "none", "shortest", "longest")
# Of others, Pillow would call a program for one: PostScript.
_RECORD_FORMATS = ("JPEG", "PNG")
_SOURCE_FORMATS = (*_RECORD_FORMATS, "GIF", "BMP", "WEBP", "TIFF", "AVIF")


def decode_picture(record: Record, contents: Manifest) -> Image.Image:
    """Returns a record's picture, decoded in full by plain Pillow."""
    mode = "RGB" if contents.channels == 3 else "L"
    if contents.encoding == "raw":
        assert record.size is not None
        return Image.frombytes(mode, record.size[::-1], record.image)
    picture = _open(record.image, "picture", _RECORD_FORMATS)
    if picture.mode != mode:
        raise ValueError(
            f"picture is {picture.mode}, dataset.json says {contents.channels} channels"
        )
    return picture


def _open(data: bytes, what: str, formats: tuple[str, ...]) -> Image.Image:
    """Decodes in full, with Pillow's own limit of pixels.

    Raises:
      ValueError: it does not decode.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=formats)
        picture.load()
    except Exception as error:  # decoders raise whatever they trip over
        raise ValueError(f"{what} does not decode: {error}") from error
    return picture


def check_picture(record: Record, contents: Manifest, row: Mapping[str, Any]) -> None:
    """Decodes a record's picture and compares it with what index/ says of its pixels.

    Raises:
      ValueError: it does not decode, has another size or mode, or other sums.
    """
    picture = decode_picture(record, contents)
    if record.size is not None and (picture.height, picture.width) != record.size:
        raise ValueError(f"picture is {picture.width}x{picture.height}, size says {record.size}")
    pixels = np.asarray(picture).reshape(-1, contents.channels).astype(np.int64)
    if len(pixels) != row["pixels"]:
        raise ValueError(f"picture has {len(pixels)} pixels, index/ says {row['pixels']}")
    off = np.abs(pixels.sum(axis=0) - np.asarray(row["channel_sum"])) / len(pixels)
    exact = contents.encoding in ("png", "raw")
    if off.max() > (0 if exact else _JPEG_MEAN_TOLERANCE):
        raise ValueError(f"channel means are off by {off.round(2).tolist()} from index/")


# The sources again.


def list_sources(contents: Manifest) -> Iterator[tuple[str, str, str]]:
    """Yields (key, source, label) of every input, by Python's own glob, csv and gzip."""
    for source in contents.config["inputs"]:
        for key, path, label in _list_input(source["pattern"], contents.config["root"]):
            yield key, path, _normalize(label, contents)


def _list_input(pattern: str, root: str) -> Iterator[tuple[str, str, str]]:
    if pattern.startswith("idx:"):
        yield from _list_idx(pattern[4:])
    elif pattern.lower().endswith(".csv"):
        for path in _expand(pattern):
            yield from _list_csv(path)
    else:
        for path in _expand(pattern):
            if not _is_system(os.path.relpath(path, _fixed(pattern))):
                key = os.path.relpath(path, root)
                yield key, path, os.path.basename(os.path.dirname(path))


def _normalize(label: str, contents: Manifest) -> str:
    """A label as index/ has it: as it is; several sorted, each once; or none."""
    if contents.label_kind == "one":
        return label
    if contents.label_kind == "none":
        return ""
    separator = contents.config["label_separator"]
    names = list(dict.fromkeys(part.strip() for part in label.split(separator)))
    numbers = [name for name in names if re.fullmatch(r"[0-9]+", name)]
    numbers.sort(key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return separator.join(numbers + sorted(set(names) - set(numbers)))


def class_ids(record: Record, contents: Manifest) -> tuple[int, ...]:
    """Returns a record's class ids from 0: one, or several in rising order, or none.

    Raises:
      ValueError: one is none of those in dataset.json, or several do not rise.
    """
    if record.class_id is None:
        return ()
    stored = (record.class_id,) if isinstance(record.class_id, int) else record.class_id
    ids = tuple(class_id - contents.label_offset for class_id in stored)
    for class_id, found in zip(ids, stored, strict=True):
        if not 0 <= class_id < len(contents.labels):
            raise ValueError(
                f"class {found} with label_offset {contents.label_offset}, there are "
                f"{len(contents.labels)} labels"
            )
    if list(ids) != sorted(set(ids)):
        raise ValueError(f"classes {list(stored)} do not rise, each once")
    return ids


def _fixed(pattern: str) -> str:
    folder = os.path.dirname(pattern)
    while re.search(r"[*?\[]", folder) and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _expand(pattern: str) -> list[str]:
    if files.is_remote(pattern):
        raise ValueError(f"--sources: {pattern} is not local; re-reading a bucket is not available")
    if os.path.lexists(pattern):
        return [pattern]
    fixed = _fixed(pattern)
    # `**` is anything at all, slashes included, as in Beam; fnmatch and glob know it otherwise.
    parts = re.split(r"(\*\*|\*|\?|\[[^\]]+\])", os.path.relpath(pattern, fixed))
    wild = {"**": ".*", "*": "[^/]*", "?": "."}
    regex = "".join(
        wild.get(part) or (part.replace("[!", "[^") if number % 2 else re.escape(part))
        for number, part in enumerate(parts)
    )
    matches = re.compile(regex, re.DOTALL).fullmatch
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(fixed) for name in names)
    return sorted(path for path in paths if matches(os.path.relpath(path, fixed)))


def _is_system(name: str) -> bool:
    parts = name.split("/")
    junk = {"thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r"}
    return (
        any(part.startswith(".") for part in parts)
        or parts[-1].lower() in junk
        or bool({"__MACOSX", "@eaDir"} & set(parts[:-1]))
    )


def _list_csv(path: str) -> Iterator[tuple[str, str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file):
            row = {name.partition(":")[0].strip(): cell for name, cell in row.items()}
            source = os.path.join(os.path.dirname(path), row["path"])
            yield row.get("key") or row["path"], os.path.normpath(source), row.get("label", "")


def _list_idx(folder: str) -> Iterator[tuple[str, str, str]]:
    for split, stem in (("train", "train"), ("test", "t10k")):
        (images,) = sorted(glob.glob(os.path.join(glob.escape(folder), f"{stem}-images*")))[:1]
        (labels,) = sorted(glob.glob(os.path.join(glob.escape(folder), f"{stem}-labels*")))[:1]
        for number, label in enumerate(_gunzip(labels)[8:]):
            yield f"{split}/{number:08d}", f"{images}#{number}", str(label)


def _gunzip(path: str) -> bytes:
    with open(path, "rb") as file:
        data = file.read()
    return gzip.decompress(data) if path.endswith(".gz") else data


def check_sources(
    directory: str,
    contents: Manifest,
    *,
    count: int,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[str]:
    """Compares records with their sources.

    Every source must be a record or a reject, under the label that its place gives it; `count` of
    the records, chosen by the hash of their keys, must hold what the source holds.

    Args:
      directory: the data set's folder.
      contents: its manifest.
      count: how many sources are read again.
      rows: index rows by split, in file order.

    Returns:
      Findings, a line each.
    """
    try:
        check_config(contents.config)
        rejects = read_list(directory, manifest.REJECTS, path=manifest.REJECTS)
    except (OSError, ValueError) as error:
        return [str(error)]
    inputs = {(k, os.path.normpath(source)): v for k, source, v in list_sources(contents)}
    indexed = {row["key"]: row for split in rows.values() for row in split}
    refused = {(reject["key"], os.path.normpath(reject["path"])) for reject in rejects}
    # One key may have two paths, of which one was rejected: the other is the record's.
    ordered = sorted(inputs.items(), key=lambda item: item[0] not in refused)
    listed = {key: (source, label) for (key, source), label in ordered}
    findings = _check_complete(listed, indexed, {reject["key"] for reject in rejects})
    findings += _check_rejects(rejects, inputs)
    places = {
        row["key"]: (shard.name, row)
        for name, split in contents.splits.items()
        for shard, row in _pair(split.shards, rows.get(name, ()))
    }
    chosen = sorted(places, key=lambda key: hashlib.sha256(key.encode()).digest())[:count]
    for key in chosen:
        shard, row = places[key]
        try:
            _check_source(directory, contents, shard, row, listed.get(key))
        except (OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            said = str(error) or type(error).__name__
            findings.append(f"{shard}: record {key!r}: {said}")
    return shorten(findings, limit=_MOST_FINDINGS)


def shorten(findings: list[str], *, limit: int) -> list[str]:
    """Returns the first findings and, where there are more than the limit, how many more."""
    if len(findings) <= limit:
        return findings
    file = findings[limit].partition(":")[0]
    return [*findings[:limit], f"{file}: and {len(findings) - limit} more findings"]


def _pair(
    shards: Any, rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    remaining = iter(rows)
    for shard in shards:
        for _ in range(shard.records):
            yield shard, next(remaining)


def check_config(config: Mapping[str, Any]) -> None:
    """Sees to it that the configuration has what it takes to read sources again.

    Raises:
      ValueError: names dataset.json and the field.
    """
    pixels = config.get("pixels")
    pixels = pixels if isinstance(pixels, dict) else {}
    fields = {
        "inputs": (config.get("inputs"), _is_inputs),
        "root": (config.get("root"), lambda value: isinstance(value, str) and value != ""),
        "pixels.mode": (pixels.get("mode"), lambda value: value in _MODES),
        **{
            f"pixels.{name}": (pixels.get(name), lambda v: type(v) is int and 0 < v < 2**31)
            for name in ("width", "height", "quality")
        },
        "pixels.background": (pixels.get("background"), _is_color),
    }
    for name, (value, test) in fields.items():
        if not test(value):
            raise ValueError(
                f"{manifest.MANIFEST}: config.{name} is {shorten_value(value)}, so no source can "
                "be read again"
            )


def _is_inputs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(source, dict) and isinstance(source.get("pattern"), str) for source in value
    )


def _is_color(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(type(level) is int and 0 <= level <= 255 for level in value)
    )


def _check_complete(
    listed: Mapping[str, tuple[str, str]],
    indexed: Mapping[str, Mapping[str, Any]],
    rejected: AbstractSet[str],
) -> list[str]:
    findings = []
    for key, (source, label) in sorted(listed.items()):
        hashed = "sha256:" + hashlib.sha256(os.fsencode(key)).hexdigest()
        if key not in indexed and not {key, hashed} & rejected:
            findings.append(f"{source!r}: neither a record nor a reject")
        elif key in indexed and indexed[key]["label"] != label:
            findings.append(
                f"{source!r}: its label is {label!r}, index/ says {indexed[key]['label']!r}"
            )
    return findings


def _check_rejects(
    rejects: Sequence[Mapping[str, Any]], listed: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    """Compares rejects with the inputs that have their keys; some may be gone, being faulty."""
    sources: dict[str, list[str]] = {}
    for key, source in listed:
        sources.setdefault(key, []).append(source)
    for reject in rejects:
        key, path, found = reject["key"], os.path.normpath(reject["path"]), reject["label"]
        if key not in sources or reject["reason"] == "excluded":
            continue
        if (label := listed.get((key, path))) is None:
            yield f"{manifest.REJECTS}: key {key!r}: path is {path!r}, it is {sources[key][0]!r}"
        # What was rejected as it was listed has its label as it was found.
        elif found != label and reject["reason"] not in WHEN_LISTED:
            yield f"{manifest.REJECTS}: key {key!r}: label is {found!r}, it is {label!r}"


def _check_source(
    directory: str,
    contents: Manifest,
    shard: str,
    row: Mapping[str, Any],
    listed: tuple[str, str] | None,
) -> None:
    if listed is None:
        raise ValueError(f"no input has this key; index/ says {row['source']}")
    source, label = listed
    data = _read_source(source)
    if hashlib.sha256(data).hexdigest() != row["source_sha256"]:
        raise ValueError(f"{source} has changed since ingest")
    record = _read_record(directory, contents, shard, row)
    _check_label(record, contents, label, source)
    upright = read_upright(data, source, contents)
    if (row["source_width"], row["source_height"]) != upright.size:
        raise ValueError(
            f"index/ says {row['source_width']}x{row['source_height']}, {source} is "
            f"{upright.width}x{upright.height} upright"
        )
    wanted = fit_reference(upright, contents)
    low = contents.encoding in ("jpeg", "original")
    low = low and contents.config["pixels"]["quality"] < _LOW_QUALITY
    limits = _MOST_DIFFERENCE_LOW_QUALITY if low else _MOST_DIFFERENCE
    _compare(decode_picture(record, contents), wanted, record, source, limits)


def _check_label(record: Record, contents: Manifest, label: str, source: str) -> None:
    try:
        names = [contents.labels[class_id] for class_id in class_ids(record, contents)]
    except ValueError as error:
        raise ValueError(f"{error}, but {source} is {label!r}") from error
    if _rejoin(names, contents) != label:
        raise ValueError(f"class {_plain(record.class_id)}, but {source} is {label!r}")
    if record.label is not None and _rejoin(record.label, contents) != label:
        raise ValueError(f"label {_plain(record.label)!r}, but {source} is {label!r}")


def _rejoin(names: str | Sequence[str], contents: Manifest) -> str:
    separator = contents.config.get("label_separator", "")
    return _normalize(names if isinstance(names, str) else separator.join(names), contents)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _read_source(source: str) -> bytes:
    if found := re.fullmatch(r"(.*-images[^/]*)#(\d+)", source):
        data = _gunzip(found[1])
        rows, columns = (int.from_bytes(data[i : i + 4], "big") for i in (8, 12))
        start = 16 + int(found[2]) * rows * columns
        return data[start : start + rows * columns]
    with open(source, "rb") as file:
        return file.read()


def _read_record(directory: str, contents: Manifest, shard: str, row: Mapping[str, Any]) -> Record:
    with files.open_file(files.join(directory, shard)) as file:
        file.seek(row["offset"] + 12)
        payload = file.read(row["size"] - 16)
    features = parse_example(payload)
    return read_record(features, schema=contents.schema, kind=contents.label_kind)


def read_upright(data: bytes, source: str, contents: Manifest) -> Image.Image:
    """Decodes a source in full, upright, RGB or gray, by plain Pillow."""
    if "#" in source and re.search(r"-images[^/]*#\d+$", source):
        header = _gunzip(source.rpartition("#")[0])[8:16]
        rows, columns = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
        image: Image.Image = Image.frombytes("L", (columns, rows), data)
    else:
        image = _open(data, source, _SOURCE_FORMATS)
        with contextlib.suppress(Exception):  # malformed EXIF means upright, by the policy
            image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = image.point(lambda level: level / 256, "L") if image.mode == "I;16" else image
    background = tuple(contents.config["pixels"]["background"])
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, (*background, 255))
        image = Image.alpha_composite(canvas, layer)
    return image.convert("RGB").convert("RGB" if contents.channels == 3 else "L")


def fit_reference(image: Image.Image, contents: Manifest) -> Image.Image:
    """Resizes by Pillow's ready-made operations."""
    pixels = contents.config["pixels"]
    size, bilinear = (pixels["width"], pixels["height"]), Image.Resampling.BILINEAR
    mode = pixels["mode"]
    if mode == "cover":
        return ImageOps.fit(image, size, bilinear)
    if mode == "stretch":
        return image.resize(size, bilinear)
    if mode == "pad":
        patch = Image.new("RGB", (1, 1), tuple(pixels["background"])).convert(image.mode)
        color: Any = patch.getpixel((0, 0))
        return ImageOps.pad(image, size, bilinear, color=color)
    if mode == "contain":
        return ImageOps.contain(image, size, bilinear)
    if mode == "none":
        return image
    side, mine = (
        (min(size), min(image.size)) if mode == "shortest" else (max(size), max(image.size))
    )
    return image.resize(
        tuple(max(1, round(length * side / mine)) for length in image.size), bilinear
    )


def _compare(
    picture: Image.Image,
    wanted: Image.Image,
    record: Record,
    source: str,
    limits: tuple[float, float],
) -> None:
    off = [abs(a - b) for a, b in zip(picture.size, wanted.size, strict=True)]
    if max(off) > 1:  # a length that ends on one half may be rounded either way
        raise ValueError(
            f"picture is {picture.width}x{picture.height}, {source} gives "
            f"{wanted.width}x{wanted.height}"
        )
    if record.size is not None and (picture.height, picture.width) != record.size:
        raise ValueError(
            f"size is {record.size}, the picture is {picture.height} high, {picture.width} wide"
        )
    whole = _difference(picture, wanted.resize(picture.size, Image.Resampling.BILINEAR))
    small = _difference(*(i.resize((8, 8), Image.Resampling.BOX) for i in (picture, wanted)))
    if whole > limits[0] or small > limits[1]:
        raise ValueError(
            f"picture differs from {source} by {whole:.1f} levels (thumbnails by {small:.1f})"
        )


def _difference(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).mean())
