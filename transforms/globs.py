"""Globs: which files a pattern matches, and what they are called."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import posixpath
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transforms import files
from transforms.labels import ONE_LABEL, Labelling
from transforms.records import DataError, Grouping, ImageRef, Input, Reject, Skipped

_LOGGER = logging.getLogger(__name__)
_STAR = re.compile(r"[*?]")
_SYSTEM_FILES = ("thumbs.db", "desktop.ini", "ehthumbs.db", "icon\r")
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


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


def list_glob(
    source: Input, *, root: str, grouping: Grouping, labelling: Labelling = ONE_LABEL
) -> Iterator[ImageRef | Reject | Skipped]:
    """Lists one pattern: the label is the parent folder's name, where there are labels.

    Raises:
      DataError: nothing matches, or the pattern is a folder.
    """
    folder, _ = split_pattern(source.pattern)
    matched = False
    for path, size, problem in match_files(source.pattern):
        matched = True
        key = key_of(path, root=root)
        label = posixpath.basename(posixpath.dirname(path)) * (labelling.kind != "none")
        if is_system_file(path.removeprefix(folder).removeprefix("/")):
            yield Skipped(path)
        elif problem:
            yield Reject(key, path, label, *problem)
        else:
            ref = ImageRef(key, path, label, source.split, size=size)
            yield check_names(ref, grouping, labelling)
    if not matched:
        raise DataError(nothing_matches(source.pattern))


def check_matches(source: Input) -> None:
    """Raises DataError where a local pattern matches nothing, or there is no such store.

    Stops at the first match; a store is not asked.
    """
    if problem := files.store_problem(source.pattern):
        raise DataError(f"--input {source.pattern}: {problem}")
    if source.kind != "idx" and not files.is_remote(source.pattern):
        for _ in match_files(source.pattern):
            return
        raise DataError(nothing_matches(source.pattern))


def nothing_matches(pattern: str) -> str:
    """Says that a pattern matched no file, and why that may be."""
    hint = "wildcards are *, **, ? and [...]; * stops at /, case counts"
    if "{" in pattern:
        hint += "; {a,b} is not expanded: give --input once for each"
    if "[" in pattern:
        hint += "; for a [ in a name write [[]"
    return f"--input {pattern}: no file matches ({hint})"


def match_files(pattern: str) -> Iterator[tuple[str, int, tuple[str, str] | None]]:
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
            yield path, -1, read_problem(error)
            continue
        if stat.S_ISREG(status.st_mode):
            yield path, status.st_size, None
        else:
            yield path, -1, ("unreadable", "no regular file")


def find_match(pattern: str, *, folder: str, names: Iterable[str]) -> str:
    """Returns the first of the names, relative to the folder, that a glob matches; "" for none."""
    remote = files.is_remote(pattern)
    if remote != files.is_remote(folder):
        return ""
    fixed, rest = ("", pattern) if remote else split_pattern(pattern)
    matches = _translate(rest, pattern)
    if not remote:  # folders that are links are not entered
        fixed, folder = os.path.realpath(fixed), os.path.realpath(folder)
    fixed = files.join(fixed, "") if fixed else ""
    for name in names:
        path = files.join(folder, name)
        if path.startswith(fixed) and matches(path.removeprefix(fixed)):
            return name
    return ""


def _match_remote(pattern: str) -> Iterator[tuple[str, int, None]]:
    if problem := files.store_problem(pattern):
        raise DataError(f"--input {pattern}: {problem}")
    try:
        with files.asking_store(pattern):
            found = files.file_systems(pattern).match([pattern])[0].metadata_list
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{pattern}: ")
        raise DataError(f"--input {pattern}: cannot be listed: {reason}") from error
    for metadata in found:
        yield metadata.path, metadata.size_in_bytes, None


def read_problem(error: OSError) -> tuple[str, str]:
    """Returns reason and detail for what cannot be opened; a link in a loop leads nowhere."""
    nowhere = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    missing = isinstance(error, FileNotFoundError) or error.errno in nowhere
    detail = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ETIMEDOUT:
        return "timeout", detail
    return "missing" if missing else "unreadable", detail


def _walk(folder: str, rest: str, pattern: str) -> Iterator[str]:
    """Walks down where the pattern can match; folders that are links are not entered."""
    matches, nearly = _translate(rest, pattern), _translate(rest, pattern, re.IGNORECASE)
    can_enter = _folder_filter(rest, pattern)
    links: list[str] = []
    other_case: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        below = os.path.relpath(parent, folder).replace(os.sep, "/")
        prefix = "" if below == "." else below + "/"
        folders[:] = sorted(name for name in folders if can_enter(prefix, name))
        links += [path for name in folders if os.path.islink(path := posixpath.join(parent, name))]
        for name in sorted(names):
            if matches(prefix + name):
                yield posixpath.join(folder, prefix + name)
            elif nearly(prefix + name):
                other_case.append(posixpath.join(parent, name))
    _warn(pattern, links, "link(s) to folders not followed", "give --input for what they lead to")
    _warn(
        pattern,
        other_case,
        "file(s) not matched for upper or lower case",
        "give --input for them, unless you did",
    )


def _warn(pattern: str, paths: list[str], what: str, remedy: str) -> None:
    if paths:
        _LOGGER.warning(
            "--input %s: %d %s, the first is %s; %s",
            pattern,
            len(paths),
            what,
            ascii(paths[0]),
            remedy,
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


def _translate(glob: str, pattern: str, flags: int = 0) -> Callable[[str], Any]:
    """Returns a test for Beam's wildcards, in which, unlike Beam's, * matches a backslash."""
    from apache_beam.io.filesystem import FileSystem

    expression = FileSystem.translate_pattern(glob).replace(r"[^/\\]*", "[^/]*")
    try:
        with warnings.catch_warnings():  # [[] is a set of one
            warnings.simplefilter("ignore", FutureWarning)
            return re.compile(expression, flags).match
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


def check_names(
    ref: ImageRef, grouping: Grouping, labelling: Labelling = ONE_LABEL
) -> ImageRef | Reject:
    """Returns the ref with its group, or a reject where a name cannot stand in a record.

    Args:
      ref: with its label as the folder or the CSV has it.
      grouping: what the split is hashed by.
      labelling: how the label is read.
    """
    for what, text in (("key", ref.key), ("path", ref.path), ("label", ref.label)):
        problem = ""
        if not text:
            problem = "is empty" * (what != "label" or labelling.kind != "none")
        elif _CONTROL.search(text):
            problem = "holds control characters"
        else:
            try:
                text.encode()
            except UnicodeEncodeError:
                problem = "is not UTF-8"
        if problem:
            return Reject(ref.key, ref.path, ref.label, "bad_name", f"the {what} {problem}")
    try:
        label = labelling.read(ref.label)
    except ValueError as error:
        return Reject(ref.key, ref.path, ref.label, "bad_name", f"the label {error}")
    group = ref.group or grouping.group_of(ref.key)
    if group or label != ref.label:
        return dataclasses.replace(ref, group=group, label=label)
    return ref
