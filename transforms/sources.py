"""Where images come from: globs, CSV files and IDX folders become ImageRefs.

Keys are paths relative to the root; labels are parent folders, or what a CSV or IDX file says.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import errno
import functools
import gzip
import hashlib
import io
import logging
import math
import os
import posixpath
import re
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
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

_LOGGER = logging.getLogger(__name__)
_STAR = re.compile(r"[*?]")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r")
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CSV_TYPES = {"": "bytes", "bytes": "bytes", "int": "int64", "float": "float"}
_OWN_COLUMNS = ("path", "label", "split", "key")
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

    A local folder that exists under its name is fixed although the name holds "[", which says
    nothing about what it matches; one whose name holds "*" or "?" matches itself, and others.
    """
    folder, rest = posixpath.split(pattern)
    fixed: list[str] = []
    parts = [*folder.split("/"), rest]
    while len(parts) > 1:
        candidate = "/".join([*fixed, parts[0]])
        if _STAR.search(parts[0]):
            break
        if "[" in parts[0] and (files.is_remote(pattern) or not os.path.isdir(candidate)):
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
        not last  # what a bucket's browser leaves for an empty folder
        or last.startswith(".")
        or last.lower() in _SYSTEM_FILES
        or any(folder.startswith(".") or folder in _SYSTEM_FOLDERS for folder in folders)
    )


def list_glob(source: Input, *, root: str, grouping: Grouping) -> Iterator[Listed]:
    """Lists one pattern: the label is the parent folder's name.

    Raises:
      DataError: nothing matches, or the pattern is a folder.
    """
    folder, _ = split_pattern(source.pattern)
    matched = False
    for path, size, problem in _match(source.pattern):
        matched = True
        key = key_of(path, root=root)
        label = posixpath.basename(posixpath.dirname(path))
        if is_system_file(path.removeprefix(folder).removeprefix("/")):
            yield Skipped(path)
        elif problem:
            yield Reject(key, path, label, *problem)
        else:
            yield _check_names(ImageRef(key, path, label, source.split, size=size), grouping)
    if not matched:
        raise DataError(_nothing_matches(source.pattern))


def check_matches(source: Input) -> None:
    """Raises DataError where a local pattern matches nothing; stops at the first match."""
    if source.kind != "idx" and not files.is_remote(source.pattern):
        for _ in _match(source.pattern):
            return
        raise DataError(_nothing_matches(source.pattern))


def _nothing_matches(pattern: str) -> str:
    hint = "wildcards are *, **, ? and [...]; * stops at /, case counts"
    if "{" in pattern:
        hint += "; {a,b} is not expanded: give --input once for each"
    if "[" in pattern:
        hint += "; for a [ in a name write [[]"
    return f"--input {pattern}: no file matches ({hint})"


def _match(pattern: str) -> Iterator[tuple[str, int, tuple[str, str] | None]]:
    """Yields path, bytes and what is wrong with the file (reason, detail), if anything."""
    if files.is_remote(pattern):
        yield from _match_remote(pattern)
        return
    folder, rest = split_pattern(pattern)
    literal = posixpath.join(folder, rest)
    names: Iterable[str] = [literal]
    if _STAR.search(rest) or not os.path.lexists(literal):
        names = _walk(folder, rest, pattern)
    elif os.path.isdir(literal):
        raise DataError(f"--input {pattern}: is a folder; to read below it: '{pattern}/*/*'")
    for path in names:
        try:
            status = os.stat(path)
        except OSError as error:
            yield path, -1, _read_problem(error)
            continue
        if stat.S_ISREG(status.st_mode):
            yield path, status.st_size, None
        else:
            yield path, -1, ("unreadable", "no regular file")


def _match_remote(pattern: str) -> Iterator[tuple[str, int, None]]:
    from apache_beam.io.filesystem import BeamIOError
    from apache_beam.io.filesystems import FileSystems

    try:
        found = FileSystems.match([pattern])[0].metadata_list
    except (BeamIOError, ValueError) as error:
        raise DataError(f"--input {pattern}: cannot be listed: {error}") from error
    for metadata in found:
        yield metadata.path, metadata.size_in_bytes, None


def _read_problem(error: OSError) -> tuple[str, str]:
    """Returns reason and detail for what cannot be opened; a link in a loop leads nowhere."""
    nowhere = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    missing = isinstance(error, FileNotFoundError) or error.errno in nowhere
    detail = error.strerror or str(error) or type(error).__name__
    return "missing" if missing else "unreadable", detail


def _walk(folder: str, rest: str, pattern: str) -> Iterator[str]:
    """Walks down where the pattern can match; folders that are links are not entered."""
    matches = _translate(rest, pattern)
    can_enter = _folder_filter(rest, pattern)
    links: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        below = os.path.relpath(parent, folder).replace(os.sep, "/")
        prefix = "" if below == "." else below + "/"
        folders[:] = sorted(name for name in folders if can_enter(prefix, name))
        links += [path for name in folders if os.path.islink(path := posixpath.join(parent, name))]
        for name in sorted(names):
            if matches(prefix + name):
                yield posixpath.join(folder, prefix + name)
    if links:
        _LOGGER.warning(
            "--input %s: %d link(s) to folders not followed, the first is %s; give --input for "
            "what they lead to",
            pattern,
            len(links),
            ascii(links[0]),
        )


def _folder_filter(rest: str, pattern: str) -> Callable[[str, str], bool]:
    """Returns whether a folder, by what it lies in and its name, can hold what is matched."""
    parts = rest.split("/")[:-1]
    if "**" in rest:
        depth = next((i for i, part in enumerate(parts) if "**" in part), len(parts))
        parts = parts[:depth]
    tests = [_translate(part, pattern) for part in parts]

    def can_enter(prefix: str, name: str) -> bool:
        depth = prefix.count("/")
        return bool(tests[depth](name)) if depth < len(tests) else "**" in rest

    return can_enter


def _translate(glob: str, pattern: str) -> Callable[[str], Any]:
    """Returns a test for Beam's wildcards, in which, unlike Beam's, * matches a backslash."""
    from apache_beam.io.filesystem import FileSystem

    expression = FileSystem.translate_pattern(glob).replace(r"[^/\\]*", "[^/]*")
    try:
        with warnings.catch_warnings():  # [[] is a set of one
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(expression).match
    except re.error as error:
        raise DataError(f"--input {pattern}: a [...] is no range of characters: {error}") from error


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


def _check_names(ref: ImageRef, grouping: Grouping) -> Listed:
    """Returns the ref with its group, or a reject where a name cannot stand in a record."""
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
    return dataclasses.replace(ref, group=ref.group or grouping.group_of(ref.key))


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
    folder, _ = split_pattern(source.pattern)
    matched = False
    for path, _, problem in _match(source.pattern):
        matched = True
        if is_system_file(path.removeprefix(folder).removeprefix("/")):
            yield Skipped(path)
        elif problem:
            raise DataError(f"{path}: {problem[1]}")
        else:
            yield from _read_csv(path, source.split, grouping, frozenset(reserved))
    if not matched:
        raise DataError(_nothing_matches(source.pattern))


def _read_csv(
    path: str, split: str, grouping: Grouping, reserved: frozenset[str]
) -> Iterator[Listed]:
    try:
        with files.open_file(path) as binary:
            # utf-8-sig: spreadsheets write a byte order mark, which would hide the first column.
            text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            reader = csv.reader(_without_nul(text, path), strict=True)
            line = 1  # where the row begins; it may end further down
            header = _parse_header(next(reader, []), path, split, grouping, reserved)
            yield Columns(path, header.specs)
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield header.read_row(cells, where=f"{path}, line {line}")
                line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: no CSV: {error}; check the quotes") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{_first_undecodable(path)}; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _without_nul(lines: Iterable[str], path: str) -> Iterator[str]:
    """Yields the lines; some versions of Python's reader take a NUL, others do not."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise DataError(
                f"{path}, line {number}: holds a NUL byte: the file is damaged or UTF-16; save "
                "it as UTF-8"
            )
        yield line


def _first_undecodable(path: str) -> str:
    with files.open_file(path) as binary:
        for number, line in enumerate(binary, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}, line {number}: byte {line[error.start]:#04x} is not UTF-8"
    return f"{path}: not UTF-8"


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
        by_column = self.grouping.value if self.grouping.kind == "column" else ""
        for name in self.names:
            if name in ("path", "label", "key", by_column) and not row[name]:
                raise DataError(f"{where}: the cell {name} is empty, every row needs one")
        key = row.get("key", row["path"])
        split = row.get("split", self.split)
        if "split" in row and not SPLIT_NAME.fullmatch(split):
            raise DataError(
                f"{where}: split {split!r}: allowed are 1 to 64 letters, digits and underscores"
            )
        features = tuple(_parse_cell(row[spec.name], spec, where) for spec in self.specs)
        path = _resolve(row["path"], posixpath.dirname(self.path))
        group = row[by_column] if by_column else ""
        ref = ImageRef(key, path, row["label"], split, group, features=features)
        return _check_names(ref, self.grouping)


def _parse_header(
    cells: list[str], path: str, split: str, grouping: Grouping, reserved: frozenset[str]
) -> _Header:
    if len(cells) > _MOST_COLUMNS:
        raise DataError(f"{path}: {len(cells)} columns, allowed are up to {_MOST_COLUMNS}")
    pairs = [cell.strip().partition(":") for cell in cells]
    names = tuple(name for name, _, _ in pairs)
    for name in ("path", "label"):
        if name not in names:
            raise DataError(
                f"{path}: no column {name!r} in the header {','.join(cells[:20])!r}; needed is "
                "path,label[,split][,key][,more]"
            )
    for name in names:
        if not name:
            raise DataError(f"{path}: a column has no name: name each column")
        if names.count(name) > 1:
            raise DataError(f"{path}: two columns are named {name!r}: name each column once")
    if grouping.kind == "column" and grouping.value not in names:
        raise DataError(f"--split-by column:{grouping.value}: no such column in {path}")
    if split and "split" in names:
        raise DataError(f"--input {split}={path}: the file has a column split: drop one of the two")
    if grouping.kind != "key" and "split" in names:
        raise DataError(
            f"--split-by {grouping.kind}:{grouping.value}: {path} has a column split, so nothing "
            "is split by it: drop one of the two"
        )
    specs = (_column_spec(name, type_, path, reserved) for name, _, type_ in pairs)
    extra = tuple(sorted((spec for spec in specs if spec), key=lambda spec: spec.name))
    return _Header(path, names, extra, split, grouping)


def _column_spec(name: str, type_: str, path: str, reserved: frozenset[str]) -> FeatureSpec | None:
    """Returns what an extra column becomes, None for one of our own."""
    if type_ not in _CSV_TYPES:
        raise DataError(f"{path}: column {name}:{type_}: allowed types are int, float, bytes")
    if name in _OWN_COLUMNS:
        if type_:
            raise DataError(f"{path}: column {name}:{type_}: {name} takes no type; write {name}")
        return None
    if name in reserved:
        raise DataError(f"{path}: the schema has a feature {name!r}: rename the column")
    dtype = _CSV_TYPES[type_]
    return FeatureSpec(name, dtype, (), DEFAULTS[dtype])


def _parse_cell(cell: str, spec: FeatureSpec, where: str) -> tuple[str, bytes | int | float]:
    assert spec.default is not None
    if not cell:
        return spec.name, spec.default
    if spec.dtype == "bytes":
        return spec.name, cell.encode()
    try:
        if "_" in cell or not cell.isascii():  # Python's own spellings
            raise ValueError
        value = int(cell) if spec.dtype == "int64" else float(cell)
        # Raises what does not fit the record.
        struct.pack("<q" if spec.dtype == "int64" else "<f", value)
        if not math.isfinite(value):
            raise ValueError
    except (ValueError, OverflowError, struct.error) as error:
        kind = "a whole number of 64" if spec.dtype == "int64" else "a finite number of 32"
        shown = cell if len(cell) <= 40 else cell[:37] + "..."
        raise DataError(
            f"{where}: {spec.name} is {shown!r}, must be {kind} bits or empty"
        ) from error
    return spec.name, value


def _resolve(cell: str, folder: str) -> str:
    if files.is_remote(cell):
        return cell
    if files.is_remote(folder) and not cell.startswith("/"):
        scheme, _, where = folder.partition("://")
        path = posixpath.join(where, cell)
        # A bucket has no "..", and "a//b" is a name of its own.
        return f"{scheme}://{posixpath.normpath(path) if '..' in cell.split('/') else path}"
    return os.path.normpath(os.path.join(folder, cell))


# IDX, the format of MNIST: http://yann.lecun.com/exdb/mnist/ describes it.

_IDX_FILES = {"train": "train", "test": "t10k"}


def list_idx(source: Input) -> Iterator[Listed]:
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
            yield ImageRef(key, images, str(label), split, "", rows * columns, item)


def _find_idx(folder: str, stem: str, suffix: str) -> str:
    names = [f"{stem}{dot}{suffix}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if files.exists(path := files.join(folder, name)):
            return path
    raise DataError(f"--input idx:{folder}: found none of {', '.join(names)}")


_IDX_LOCK = threading.Lock()


def read_idx(path: str) -> tuple[tuple[int, ...], bytes]:
    """Reads an IDX file of unsigned bytes, gzipped or not; the last few are kept in memory.

    Returns:
      Its dimensions, and its values in row order.

    Raises:
      DataError: another magic number, or more or fewer bytes than the dimensions say.
    """
    try:
        status = None if files.is_remote(path) else os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    version = status and (status.st_ino, status.st_size, status.st_mtime_ns)
    with _IDX_LOCK:  # or every thread would read it
        return _read_idx(path, version)


@functools.lru_cache(maxsize=4)
def _read_idx(path: str, _: tuple[int, ...] | None) -> tuple[tuple[int, ...], bytes]:
    try:
        data = files.read_file(path)
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: no whole gzip file: {error}") from error
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
    except OSError as error:
        raise ImageError(*_read_problem(error)) from error


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
    rows = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    lines = frozenset(os.fsdecode(row.removesuffix(b"\r")) for row in rows) - {""}
    contents = frozenset(line.lower() for line in lines if _SHA256.fullmatch(line))
    return Exclusions(lines, contents)


def screen_image(
    ref: ImageRef, exclusions: Exclusions, *, known: frozenset[str] | None
) -> ImageRef | Reject:
    """Returns the ref, or a reject where its key is excluded or its label is not known."""
    if ref.key in exclusions.keys:
        return exclusions.reject_key(ref.key)
    if known is not None and ref.label not in known:
        return Reject(ref.key, ref.source, ref.label, "unknown_label", "not in --class-names")
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
            "Columns", main="Listed"
        )
        once = (
            listed.Listed
            | "HashKey" >> beam.Map(_with_hash)
            | "GroupByKey" >> beam.GroupByKey()
            # (hash, [ImageRef, Reject or Skipped])
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
        for item in list_input(
            source, root=self.root, grouping=self.grouping, reserved=self.reserved
        ):
            yield pvalue.TaggedOutput("Columns", item) if isinstance(item, Columns) else item


def list_input(
    source: Input, *, root: str, grouping: Grouping, reserved: Iterable[str] = ()
) -> Iterator[Listed]:
    """Lists one --input, whatever its kind."""
    if source.kind == "csv":
        return list_csv(source, grouping=grouping, reserved=reserved)
    if source.kind == "idx":
        return list_idx(source)
    return list_glob(source, root=root, grouping=grouping)


def _with_hash(item: ImageRef | Reject | Skipped) -> tuple[int, ImageRef | Reject | Skipped]:
    name = item.path if isinstance(item, Skipped) else item.key
    # Unseeded and signed: the runner's integer coder has 64 bits with a sign.
    return stable_hash(name, seed=0)[0] - (1 << 63), item


def _take_once(group: tuple[int, Iterable[ImageRef | Reject | Skipped]]) -> Iterator[Any]:
    for item in take_once(*group):
        if isinstance(item, ImageRef):
            yield item
        else:
            yield pvalue.TaggedOutput(type(item).__name__, item)


def take_once(
    _: int, items: Iterable[ImageRef | Reject | Skipped]
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


@dataclasses.dataclass
class ScreenImages(beam.PTransform):
    """Takes out what --exclude and --class-names keep out.

    Expands on what ListImages returns. Returns a dict of PCollections: `refs` (ImageRef),
    `rejects` (Reject; the listing's among them, without the names of what is excluded) and
    `exclusions` (one Exclusions, completed with the contents of the excluded keys).
    """

    exclude: str | None
    known: frozenset[str] | None

    def expand(self, listed: dict[str, beam.PCollection]) -> dict[str, beam.PCollection]:
        """Reads the file of exclusions in the graph: it may be long."""
        refs = listed["refs"]
        exclusions = (
            refs.pipeline
            | "ExcludeFile" >> beam.Create([self.exclude])
            | "ReadExclusions" >> beam.Map(read_exclusions)
        )
        keys: Any = Exclusions()  # as a value: a side input would have the runner hold all refs
        complete = exclusions
        if self.exclude is not None:
            keys = pvalue.AsSingleton(exclusions)
            contents = refs | "HashExcluded" >> beam.FlatMap(hash_excluded, keys)
            complete = exclusions | "AddContents" >> beam.Map(add_contents, pvalue.AsIter(contents))
        screened = refs | "Screen" >> beam.FlatMap(self._screen, keys).with_outputs(
            "Reject", main="ImageRef"
        )
        rejects = (
            (listed["rejects"] | "WithRef" >> beam.Map(_with_ref), screened.Reject)
            | "AllRejects" >> beam.Flatten()
            # (ImageRef, Reject)
            | "ScreenRejects" >> beam.Map(_screen_reject, pvalue.AsSingleton(complete))
        )
        return {"refs": screened.ImageRef, "rejects": rejects, "exclusions": complete}

    def _screen(self, ref: ImageRef, exclusions: Exclusions) -> Iterator[Any]:
        item = screen_image(ref, exclusions, known=self.known)
        yield item if isinstance(item, ImageRef) else pvalue.TaggedOutput("Reject", (ref, item))


def _with_ref(reject: Reject) -> tuple[ImageRef, Reject]:
    return ImageRef(reject.key, reject.path, reject.label), reject


def _screen_reject(pair: tuple[ImageRef, Reject], exclusions: Exclusions) -> Reject:
    ref, reject = pair
    return screen_reject(reject, exclusions, ref=ref)


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
