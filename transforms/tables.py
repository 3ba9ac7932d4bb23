"""CSV files: a row for each image, with further columns as features."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import posixpath
import struct
from collections.abc import Iterable, Iterator

from transforms import files
from transforms.example import DEFAULTS, FeatureSpec
from transforms.globs import (
    check_names,
    is_system_file,
    match_files,
    nothing_matches,
    split_pattern,
)
from transforms.labels import ONE_LABEL, Labelling
from transforms.records import DataError, Grouping, ImageRef, Input, Reject, Skipped
from transforms.shards import SPLIT_NAME

_CSV_TYPES = {"": "bytes", "bytes": "bytes", "int": "int64", "float": "float"}
_OWN_COLUMNS = ("path", "label", "split", "key")
_MOST_COLUMNS = 1_000
_MOST_CHARACTERS = 2**24  # of one line, which is held in memory


@dataclasses.dataclass(frozen=True)
class Columns:
    """The extra columns of one CSV file, sorted by name."""

    path: str
    specs: tuple[FeatureSpec, ...]


Row = ImageRef | Reject | Columns | Skipped


def list_csv(
    source: Input,
    *,
    grouping: Grouping,
    reserved: Iterable[str],
    labelling: Labelling = ONE_LABEL,
) -> Iterator[Row]:
    """Lists the rows of every CSV file that the pattern matches.

    Args:
      source: a pattern that ends in .csv.
      grouping: what the split is hashed by.
      reserved: names that extra columns cannot have, since the schema has them.
      labelling: how the column label is read; "none" allows no such column.

    Raises:
      DataError: a header or a cell is wrong; names the file and the line.
    """
    folder, _ = split_pattern(source.pattern)
    matched = False
    for path, _, problem in match_files(source.pattern):
        matched = True
        if is_system_file(path.removeprefix(folder).removeprefix("/")):
            yield Skipped(path)
        elif problem:
            raise DataError(f"{path}: {problem[1]}")
        else:
            yield from _read_csv(path, source.split, grouping, frozenset(reserved), labelling)
    if not matched:
        raise DataError(nothing_matches(source.pattern))


def _read_csv(
    path: str, split: str, grouping: Grouping, reserved: frozenset[str], labelling: Labelling
) -> Iterator[Row]:
    try:
        with files.open_file(path) as binary:
            # utf-8-sig: spreadsheets write a byte order mark, which would hide the first column.
            text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            lines = iter(lambda: text.readline(_MOST_CHARACTERS), "")
            reader = csv.reader(_sound_lines(lines, path), strict=True)
            line = 1  # where the row begins; it may end further down
            header = _parse_header(next(reader, []), path, split, grouping, reserved, labelling)
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


def _sound_lines(lines: Iterable[str], path: str) -> Iterator[str]:
    """Yields the lines; some versions of Python's reader take a NUL, others do not."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise DataError(
                f"{path}, line {number}: holds a NUL byte: the file is damaged or UTF-16; save "
                "it as UTF-8"
            )
        if len(line) == _MOST_CHARACTERS:
            raise DataError(
                f"{path}, line {number}: has {_MOST_CHARACTERS} characters and no end: no CSV"
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
    labelling: Labelling

    def read_row(self, cells: list[str], *, where: str) -> Row:
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
                f"{where}: split {_short(split)!r}: allowed are 1 to 64 letters, digits and "
                "underscores"
            )
        features = tuple(_parse_cell(row[spec.name], spec, where) for spec in self.specs)
        path = resolve_cell(row["path"], posixpath.dirname(self.path))
        if problem := files.store_problem(path):
            raise DataError(f"{where}: the cell path is {_short(path)!r}: {problem}")
        group = row[by_column] if by_column else ""
        ref = ImageRef(key, path, row.get("label", ""), split, group, features=features)
        return check_names(ref, self.grouping, self.labelling)


def _parse_header(
    cells: list[str],
    path: str,
    split: str,
    grouping: Grouping,
    reserved: frozenset[str],
    labelling: Labelling,
) -> _Header:
    if len(cells) > _MOST_COLUMNS:
        raise DataError(f"{path}: {len(cells)} columns, allowed are up to {_MOST_COLUMNS}")
    pairs = [cell.strip().partition(":") for cell in cells]
    names = tuple(name for name, _, _ in pairs)
    needed = ("path",) if labelling.kind == "none" else ("path", "label")
    for name in needed:
        if name not in names:
            header = _short(",".join(cells[:20]))
            raise DataError(
                f"{path}: no column {name!r} in the header {header!r}; needed is "
                f"{','.join(needed)}[,split][,key][,more]"
            )
    if labelling.kind == "none" and "label" in names:
        raise DataError(f"--unlabelled: {path} has a column label: drop the column, or the flag")
    for name in names:
        if not name:
            raise DataError(f"{path}: a column has no name: name each column")
        if names.count(name) > 1:
            raise DataError(
                f"{path}: two columns are named {_short(name)!r}: name each column once"
            )
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
    return _Header(path, names, extra, split, grouping, labelling)


def _column_spec(name: str, type_: str, path: str, reserved: frozenset[str]) -> FeatureSpec | None:
    """Returns what an extra column becomes, None for one of our own."""
    if type_ not in _CSV_TYPES:
        raise DataError(
            f"{path}: column {_short(name)}:{_short(type_)}: allowed types are int, float, bytes"
        )
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
        raise DataError(
            f"{where}: {_short(spec.name)} is {_short(cell, most=40)!r}, must be {kind} bits or "
            "empty"
        ) from error
    return spec.name, value


def _short(text: str, *, most: int = 200) -> str:
    """Returns the text, cut where repr(), with its escapes, would be longer than `most`."""
    if len(repr(text)) <= most + 2:
        return text
    kept = text[: most - 3]
    while len(repr(kept)) > most:
        kept = kept[: len(kept) * 3 // 4]
    return kept + "..."


def resolve_cell(cell: str, folder: str) -> str:
    """Returns the path that a cell names: absolute, in a store, or relative to the folder."""
    if files.is_remote(cell):
        return cell
    if files.is_remote(folder) and not cell.startswith("/"):
        scheme, _, where = folder.partition("://")
        path = posixpath.join(where, cell)
        # A bucket has no "..", and "a//b" is a name of its own.
        return f"{scheme}://{posixpath.normpath(path) if '..' in cell.split('/') else path}"
    return os.path.normpath(os.path.join(folder, cell))
