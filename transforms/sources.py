"""Where images come from: globs, CSV files and IDX folders become ImageRefs.

Keys are paths relative to the root; labels are parent folders, or what a CSV or IDX file says.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import math
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from transforms import files
from transforms.example import DEFAULTS, FeatureSpec
from transforms.records import (
    IDX_PREFIX,
    DataError,
    Grouping,
    ImageError,
    ImageRef,
    Input,
    Reject,
)
from transforms.shards import SPLIT_NAME, stable_hash

_GLOB = re.compile(r"[*?\[]")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r")
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CSV_TYPES = {"": "bytes", "bytes": "bytes", "int": "int64", "float": "float"}
_MOST_COLUMNS = 1_000
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The extra columns of one CSV file, sorted by name."""

    path: str
    specs: tuple[FeatureSpec, ...]


@dataclasses.dataclass(frozen=True)
class Skipped:
    """One system file that a pattern matched."""

    path: str


Listed = ImageRef | Reject | Columns | Skipped


# Globs.


def split_pattern(pattern: str) -> tuple[str, str]:
    """Returns the fixed folder of a pattern and the rest, which holds all wildcards.

    A local folder that exists under its name is fixed, even where the name holds "[": only what
    is not there can be meant as a pattern.
    """
    folder, rest = posixpath.split(pattern)
    fixed: list[str] = []
    parts = [*folder.split("/"), rest]
    while len(parts) > 1:
        candidate = "/".join([*fixed, parts[0]])
        if _GLOB.search(parts[0]) and (files.is_remote(pattern) or not os.path.isdir(candidate)):
            break
        fixed.append(parts.pop(0))
    return "/".join(fixed) or "/", "/".join(parts)


def common_root(patterns: Iterable[str]) -> str:
    """Returns the longest folder common to the fixed parts of all patterns.

    Raises:
      ValueError: there is none, as between a disk and a bucket.
    """
    folders = [split_pattern(pattern)[0] for pattern in patterns]
    parts = [folder.split("/") for folder in folders]
    common = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    root = "/".join(common)
    remote = {files.is_remote(folder) for folder in folders}
    if len(remote) > 1 or (remote == {True} and root.count("/") < 2):
        raise ValueError(
            f"--input {', '.join(folders)}: no common folder; give --root, or one ingest for each"
        )
    return root or "/"


def is_system_file(name: str) -> bool:
    """Whether a path below a pattern's fixed folder is what systems strew, not what people mean."""
    *folders, last = name.split("/")
    return (
        last.startswith(".")
        or last.lower() in _SYSTEM_FILES
        or any(folder.startswith(".") or folder in _SYSTEM_FOLDERS for folder in folders)
    )


def list_glob(source: Input, *, root: str, grouping: Grouping) -> Iterator[Listed]:
    """Lists one pattern: the label is the parent folder's name.

    Raises:
      DataError: nothing matches, or the pattern is a folder.
    """
    matched = False
    for path, size, problem in _match(source.pattern):
        matched = True
        key = key_of(path, root=root)
        label = posixpath.basename(posixpath.dirname(path))
        if is_system_file(path.removeprefix(split_pattern(source.pattern)[0]).lstrip("/")):
            yield Skipped(path)
        elif problem:
            yield Reject(key, path, label, *problem)
        else:
            ref = ImageRef(key, path, label, source.split, grouping.group_of(key), size)
            yield _check_names(ref)
    if not matched:
        raise DataError(_nothing_matches(source.pattern))


def _nothing_matches(pattern: str) -> str:
    hint = "wildcards are *, **, ? and [...]; * stops at /, case counts"
    if "{" in pattern:
        hint += "; {a,b} is not expanded: give --input once for each"
    return f"--input {pattern}: no file matches ({hint})"


def _match(pattern: str) -> Iterator[tuple[str, int, tuple[str, str] | None]]:
    """Yields path, bytes and what is wrong with the file (reason, detail), if anything."""
    if files.is_remote(pattern):
        from apache_beam.io.filesystems import FileSystems

        for metadata in FileSystems.match([pattern])[0].metadata_list:
            yield metadata.path, metadata.size_in_bytes, None
        return
    folder, rest = split_pattern(pattern)
    literal = posixpath.join(folder, rest)
    if os.path.isdir(literal):
        raise DataError(f"--input {pattern}: is a folder; to read below it: '{pattern}/*/*'")
    if os.path.lexists(literal):
        names: Iterable[str] = [literal]
    else:
        names = _walk(folder, rest)
    for path in names:
        try:
            status = os.stat(path)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError) or os.path.islink(path)
            yield path, -1, ("missing" if missing else "unreadable", error.strerror or "")
            continue
        if stat.S_ISREG(status.st_mode):
            yield path, status.st_size, None
        else:
            yield path, -1, ("unreadable", "no regular file")


def _walk(folder: str, rest: str) -> Iterator[str]:
    """Walks down as far as the pattern can match; folders that are links are not entered."""
    from apache_beam.io.filesystem import FileSystem

    matches = re.compile(FileSystem.translate_pattern(rest)).match
    depth = math.inf if "**" in rest else rest.count("/")
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        folders.sort()
        below = os.path.relpath(parent, folder).replace(os.sep, "/")
        prefix = "" if below == "." else below + "/"
        if prefix.count("/") >= depth:
            folders.clear()
        for name in sorted(names):
            if matches(prefix + name):
                yield posixpath.join(folder, prefix + name)


def _raise_unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise DataError(f"--input: cannot list {error.filename}: {error.strerror}") from error


def key_of(path: str, *, root: str) -> str:
    """Returns the path relative to the root.

    Raises:
      DataError: the path is not below the root.
    """
    prefix = root.rstrip("/") + "/"
    if not path.startswith(prefix):
        raise DataError(f"--root {root}: {path} is not below it; keys are paths relative to it")
    return path.removeprefix(prefix)


def _check_names(ref: ImageRef) -> Listed:
    """Returns the ref, or a reject where a name of its cannot stand in a record."""
    for what, text in (("key", ref.key), ("path", ref.path), ("label", ref.label)):
        problem = ""
        if not text:
            problem = "is empty"
        elif _CONTROL.search(text):
            problem = "holds control characters"
        else:
            try:
                text.encode()
            except UnicodeEncodeError:
                problem = "is not UTF-8"
        if problem:
            return Reject(ref.key, ref.path, ref.label, "bad_name", f"the {what} {problem}")
    return ref


# CSV.


def list_csv(source: Input, *, grouping: Grouping, reserved: Iterable[str]) -> Iterator[Listed]:
    """Lists the rows of every CSV file that the pattern matches.

    Args:
      source: a pattern that ends in .csv.
      grouping: what the split is hashed by.
      reserved: names that extra columns cannot have, since the schema has them.

    Raises:
      DataError: a header or a cell is wrong; names the file and the line.
    """
    matched = False
    for path, _, problem in _match(source.pattern):
        matched = True
        if problem:
            raise DataError(f"{path}: {problem[1]}")
        yield from _read_csv(path, source.split, grouping, frozenset(reserved))
    if not matched:
        raise DataError(_nothing_matches(source.pattern))


def _read_csv(
    path: str, split: str, grouping: Grouping, reserved: frozenset[str]
) -> Iterator[Listed]:
    with files.open_file(path) as binary:
        # utf-8-sig: spreadsheets write a byte order mark, which would hide the first column.
        reader = csv.reader(io.TextIOWrapper(binary, encoding="utf-8-sig", newline=""), strict=True)
        try:
            header = _parse_header(next(reader, []), path, split, grouping, reserved)
            yield Columns(path, header.specs)
            for cells in reader:
                if cells:
                    yield header.read_row(cells, where=f"{path}, line {reader.line_num}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {reader.line_num + 1}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Header:
    path: str
    names: tuple[str, ...]
    specs: tuple[FeatureSpec, ...]
    split: str
    grouping: Grouping

    def read_row(self, cells: list[str], *, where: str) -> Listed:
        if len(cells) != len(self.names):
            raise DataError(f"{where}: {len(cells)} cells, the header has {len(self.names)}")
        row = dict(zip(self.names, cells, strict=True))
        for name in {"path", "label", "key"} & set(row):
            if not row[name]:
                raise DataError(f"{where}: the cell {name} is empty, every row needs one")
        key = row.get("key", row["path"])
        split = row.get("split", self.split)
        if "split" in row and not SPLIT_NAME.fullmatch(split):
            raise DataError(
                f"{where}: split {split!r}: allowed are 1 to 64 letters, digits and underscores"
            )
        by_column = self.grouping.kind == "column"
        group = row[self.grouping.value] if by_column else self.grouping.group_of(key)
        features = tuple(_parse_cell(row[spec.name], spec, where) for spec in self.specs)
        path = _resolve(row["path"], os.path.dirname(self.path))
        return _check_names(ImageRef(key, path, row["label"], split, group, features=features))


def _parse_header(
    cells: list[str], path: str, split: str, grouping: Grouping, reserved: frozenset[str]
) -> _Header:
    if len(cells) > _MOST_COLUMNS:
        raise DataError(f"{path}: {len(cells)} columns, allowed are {_MOST_COLUMNS}")
    pairs = [cell.strip().partition(":") for cell in cells]
    names = tuple(name for name, _, _ in pairs)
    for name in ("path", "label"):
        if name not in names:
            raise DataError(
                f"{path}: no column {name!r} in the header {','.join(cells[:20])!r}; needed is "
                "path,label[,split][,key][,more]"
            )
    for name in names:
        if names.count(name) > 1 or not name:
            raise DataError(f"{path}: two columns are named {name!r}: name each column once")
    if grouping.kind == "column" and grouping.value not in names:
        raise DataError(f"--split-by column:{grouping.value}: no such column in {path}")
    if split and "split" in names:
        raise DataError(f"--input {split}={path}: the file has a column split: drop one of the two")
    specs = []
    for name, _, type_ in pairs:
        if type_ not in _CSV_TYPES:
            raise DataError(f"{path}: column {name}:{type_}: allowed types are int, float, bytes")
        if name in ("path", "label", "split", "key"):
            continue
        if name in reserved:
            raise DataError(f"{path}: the schema has a feature {name!r}: rename the column")
        dtype = _CSV_TYPES[type_]
        specs.append(FeatureSpec(name, dtype, (), DEFAULTS[dtype]))
    return _Header(path, names, tuple(sorted(specs, key=lambda s: s.name)), split, grouping)


def _parse_cell(cell: str, spec: FeatureSpec, where: str) -> tuple[str, bytes | int | float]:
    assert spec.default is not None
    if not cell:
        return spec.name, spec.default
    if spec.dtype == "bytes":
        return spec.name, cell.encode()
    try:
        value = int(cell) if spec.dtype == "int64" else float(cell)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError
        if not math.isfinite(value):
            raise ValueError
    except ValueError as error:
        kind = "a whole number of 64 bits" if spec.dtype == "int64" else "a finite number"
        raise DataError(f"{where}: {spec.name} is {cell!r}, must be {kind} or empty") from error
    return spec.name, value


def _resolve(cell: str, folder: str) -> str:
    if files.is_remote(cell):
        return cell
    if files.is_remote(folder):
        return posixpath.join(folder, cell)
    return os.path.normpath(os.path.join(folder, cell))


# IDX, the format of MNIST: http://yann.lecun.com/exdb/mnist/ describes it.

_IDX_FILES = {"train": "train", "test": "t10k"}


def list_idx(source: Input, *, grouping: Grouping) -> Iterator[Listed]:
    """Lists an IDX folder: splits train and test, keys such as train/00000042, labels digits.

    Raises:
      DataError: a file is missing, or is no IDX file, or images and labels do not match.
    """
    folder = source.pattern.removeprefix(IDX_PREFIX)
    for split, stem in _IDX_FILES.items():
        images = _find_idx(folder, f"{stem}-images", "idx3-ubyte")
        labels = _find_idx(folder, f"{stem}-labels", "idx1-ubyte")
        (count, rows, columns), _ = read_idx(images)
        (label_count,), values = read_idx(labels)
        if count != label_count:
            raise DataError(f"{images}: {count} images, but {label_count} labels in {labels}")
        for item, label in enumerate(values):
            key = f"{split}/{item:08d}"
            yield ImageRef(
                key, images, str(label), split, grouping.group_of(key), rows * columns, item
            )


def _find_idx(folder: str, stem: str, suffix: str) -> str:
    names = [f"{stem}{dot}{suffix}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if files.exists(path := files.join(folder, name)):
            return path
    raise DataError(f"--input idx:{folder}: found none of {', '.join(names)}")


@functools.lru_cache(maxsize=4)
def read_idx(path: str) -> tuple[tuple[int, ...], bytes]:
    """Reads an IDX file of unsigned bytes, gzipped or not.

    Returns:
      Its dimensions, and its values in row order.

    Raises:
      DataError: another magic number, or more or fewer bytes than the dimensions say.
    """
    try:
        data = files.read_file(path)
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    wanted = 3 if "idx3" in posixpath.basename(path) else 1
    if data[:4] != bytes([0, 0, 8, wanted]):
        raise DataError(
            f"{path}: begins with {data[:4].hex()}, an IDX file of {wanted} dimension(s) of "
            f"unsigned bytes begins with 000008{wanted:02d}"
        )
    start = 4 + 4 * wanted
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{path}: {max(0, len(data) - start)} values, its header says "
            f"{' x '.join(map(str, shape))}: the file is cut or not IDX"
        )
    return shape, data[start:]


# Reading.


def read_source(ref: ImageRef) -> tuple[bytes, tuple[int, int] | None]:
    """Returns a source's bytes and, for a picture in an IDX file, its (width, height).

    Raises:
      ImageError: missing or unreadable.
    """
    if ref.item >= 0:
        (_, rows, columns), values = read_idx(ref.path)
        size = rows * columns
        return values[ref.item * size : (ref.item + 1) * size], (columns, rows)
    try:
        # A CSV may name a pipe, which would be waited for, or a folder.
        if not files.is_remote(ref.path) and not stat.S_ISREG(os.stat(ref.path).st_mode):
            raise ImageError("unreadable", "no regular file")
        return files.read_file(ref.path), None
    except FileNotFoundError as error:
        raise ImageError("missing", "no such file") from error
    except OSError as error:
        raise ImageError("unreadable", error.strerror or type(error).__name__) from error


# Screening.


@dataclasses.dataclass(frozen=True)
class Exclusions:
    """What must not come in: keys, and sha256 (hex) of sources' bytes."""

    keys: frozenset[str] = frozenset()
    contents: frozenset[str] = frozenset()

    def reject_key(self, key: str) -> Reject:
        """The reject for an excluded input: it must not leave its name behind, only its hash."""
        digest = hashlib.sha256(os.fsencode(key)).hexdigest()
        return Reject(f"sha256:{digest}", "", "", "excluded", "by --exclude")


def parse_exclusions(data: bytes) -> Exclusions:
    """Reads keys and sha256, one a line; 64 hex digits may be either and exclude both."""
    lines = frozenset(os.fsdecode(line.removesuffix(b"\r")) for line in data.split(b"\n")) - {""}
    contents = frozenset(line.lower() for line in lines if _SHA256.fullmatch(line))
    return Exclusions(lines, contents)


def screen_image(
    ref: ImageRef, exclusions: Exclusions, *, known: frozenset[str] | None
) -> ImageRef | Reject:
    """Returns the ref, or a reject where its key is excluded or its label is not known."""
    if ref.key in exclusions.keys:
        return exclusions.reject_key(ref.key)
    if known is not None and ref.label not in known:
        return Reject(ref.key, ref.path, ref.label, "unknown_label", "not in --class-names")
    return ref


def hash_excluded(ref: ImageRef, exclusions: Exclusions) -> Iterator[str]:
    """Yields the sha256 of an excluded source, since its copies under other keys go as well."""
    if ref.key in exclusions.keys:
        with contextlib.suppress(ImageError):  # what cannot be read has no copy that could be told
            yield hashlib.sha256(read_source(ref)[0]).hexdigest()


# The graph's part.


@dataclasses.dataclass
class ListImages(beam.PTransform):
    """Inputs -> every image once.

    Returns a dict of PCollections: `refs` (ImageRef), `rejects` (Reject), `columns` (Columns) and
    `skipped` (Skipped).
    """

    root: str
    grouping: Grouping
    reserved: tuple[str, ...] = ()

    def expand(self, inputs: beam.PCollection[Input]) -> dict[str, beam.PCollection]:
        """Lists, then brings each key together to drop what was matched twice."""
        listed = inputs | "ListInputs" >> beam.FlatMap(self._list).with_outputs(
            "Reject", "Columns", "Skipped", main="ImageRef"
        )
        refs = (
            listed.ImageRef
            | "HashKey" >> beam.Map(_with_hash)
            | "GroupByKey" >> beam.GroupByKey()
            # (hash, [ImageRef])
            | "TakeOnce" >> beam.FlatMapTuple(take_once)
        )
        return {
            "refs": refs,
            "rejects": listed.Reject,
            "columns": listed.Columns,
            "skipped": listed.Skipped,
        }

    def _list(self, source: Input) -> Iterator[Any]:
        for item in list_input(
            source, root=self.root, grouping=self.grouping, reserved=self.reserved
        ):
            if isinstance(item, ImageRef):
                yield item
            else:
                yield pvalue.TaggedOutput(type(item).__name__, item)


def list_input(
    source: Input, *, root: str, grouping: Grouping, reserved: Iterable[str] = ()
) -> Iterator[Listed]:
    """Lists one --input, whatever its kind."""
    if source.kind == "csv":
        return list_csv(source, grouping=grouping, reserved=reserved)
    if source.kind == "idx":
        return list_idx(source, grouping=grouping)
    return list_glob(source, root=root, grouping=grouping)


def _with_hash(ref: ImageRef) -> tuple[int, ImageRef]:
    # Unseeded and signed: the runner's integer coder has 64 bits with a sign.
    return stable_hash(ref.key, seed=0)[0] - (1 << 63), ref


def take_once(_: int, refs: Iterable[ImageRef]) -> Iterator[ImageRef]:
    """Yields one ref for each key.

    Raises:
      DataError: two different inputs have one key; names both.
    """
    seen: dict[str, ImageRef] = {}
    for ref in refs:
        other = seen.setdefault(ref.key, ref)
        if other != ref:
            first, second = sorted((_describe(other), _describe(ref)))
            raise DataError(
                f"two inputs have the key {ref.key!r}: {first} and {second}; keys must be unique: "
                "widen --root, or give a CSV with a column key"
            )
    yield from seen.values()


def _describe(ref: ImageRef) -> str:
    return f"{ref.source} (label {ref.label}{', split ' + ref.split if ref.split else ''})"


@dataclasses.dataclass
class ScreenImages(beam.PTransform):
    """Takes out what --exclude and --class-names keep out.

    Returns a dict of PCollections: `refs` (ImageRef), `rejects` (Reject) and `exclusions`
    (one Exclusions, completed with the contents of the excluded keys).
    """

    exclude: str | None
    known: frozenset[str] | None

    def expand(self, refs: beam.PCollection[ImageRef]) -> dict[str, beam.PCollection]:
        """Reads the file of exclusions in the graph: it may be long."""
        exclusions = (
            refs.pipeline
            | "ExcludeFile" >> beam.Create([self.exclude])
            | "ReadExclusions" >> beam.Map(read_exclusions)
        )
        keys = pvalue.AsSingleton(exclusions)
        screened = refs | "Screen" >> beam.FlatMap(self._screen, keys).with_outputs(
            "Reject", main="ImageRef"
        )
        contents = refs | "HashExcluded" >> beam.FlatMap(hash_excluded, keys)
        complete = exclusions | "AddContents" >> beam.Map(add_contents, pvalue.AsIter(contents))
        return {"refs": screened.ImageRef, "rejects": screened.Reject, "exclusions": complete}

    def _screen(self, ref: ImageRef, exclusions: Exclusions) -> Iterator[Any]:
        item = screen_image(ref, exclusions, known=self.known)
        yield item if isinstance(item, ImageRef) else pvalue.TaggedOutput("Reject", item)


def read_exclusions(path: str | None) -> Exclusions:
    """Reads the file of --exclude; None excludes nothing.

    Raises:
      DataError: it cannot be read.
    """
    if path is None:
        return Exclusions()
    try:
        return parse_exclusions(files.read_file(path))
    except OSError as error:
        raise DataError(f"--exclude {path}: {error.strerror or error}") from error


def add_contents(exclusions: Exclusions, contents: Iterable[str]) -> Exclusions:
    """Returns the exclusions with more contents."""
    return dataclasses.replace(exclusions, contents=exclusions.contents | set(contents))
