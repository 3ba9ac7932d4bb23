"""rejects.jsonl and duplicates.jsonl, read line by line; each line is held to its form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from transforms import files
from transforms.manifest import DUPLICATES, REJECTS
from transforms.records import CHOICES, FAULTS, DataError

_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_list(directory: str, name: str, *, path: str | None = None) -> list[dict[str, Any]]:
    """Reads one of the two lists of a data set.

    Args:
      directory: the data set.
      name: manifest.REJECTS or manifest.DUPLICATES.
      path: what errors call the file, its path by default.

    Returns:
      An object for each line, as docs/format.md says.

    Raises:
      DataError: missing, or a line is not as it should be; names the file and the line.
      OSError: the file cannot be read.
    """
    place = files.join(directory, name)
    try:
        return parse_list(files.read_file(place), name=name, path=path or place)
    except FileNotFoundError as error:
        raise DataError(f"{path or place}: missing") from error


def parse_list(data: bytes, *, name: str, path: str) -> list[dict[str, Any]]:
    """Reads the bytes of one of the two lists.

    Args:
      data: of the file.
      name: manifest.REJECTS or manifest.DUPLICATES.
      path: for messages.

    Returns:
      An object for each line, its fields in the order of docs/format.md.

    Raises:
      DataError: a line is not as it should be; names the file and the line.
    """
    problem_of = {REJECTS: _reject_problem, DUPLICATES: _content_problem}[name]
    names = {REJECTS: _REJECT, DUPLICATES: _CONTENT}[name]
    lines = data.split(b"\n")
    items = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            item = json.loads(line)
            problem = problem_of(item)
        except (ValueError, RecursionError) as error:
            problem = f"no JSON: {error}"
        if problem:
            raise DataError(f"{path}: line {number}: {problem}")
        items.append({name: item[name] for name in names})
    if lines[-1]:
        raise DataError(f"{path}: line {len(lines)}: does not end: the file is cut")
    return items


def _reject_problem(item: Any) -> str:
    if problem := _form_problem(item, _REJECT):
        return problem
    known = item["reason"] in (*FAULTS, *CHOICES)
    return "" if known else f"reason is {shorten_value(item['reason'])}, which is none"


def _content_problem(item: Any) -> str:
    if problem := _form_problem(item, _CONTENT):
        return problem
    keys, labels = len(item["keys"]), len(item["labels"])
    return "" if keys == labels >= 2 else f"{keys} keys and {labels} labels"


def _form_problem(item: Any, tests: Mapping[str, Callable[[Any], bool]]) -> str:
    if not isinstance(item, dict):
        return f"{shorten_value(item)} is no object"
    if absent := sorted(set(tests) - set(item)):
        return f"{shorten_value(absent[0])} missing"
    if unknown := sorted(set(item) - set(tests)):
        return f"unknown field {shorten_value(unknown[0])}"
    return next(
        (
            f"{name} is {shorten_value(item[name])}"
            for name, test in tests.items()
            if not test(item[name])
        ),
        "",
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def is_digest(value: Any) -> bool:
    """Whether it is a sha256 as 64 lower-case hex digits."""
    return _is_text(value) and bool(_SHA256.fullmatch(value))


_REJECT = dict.fromkeys(("key", "path", "label", "reason", "detail"), _is_text)
_CONTENT = {"sha256": is_digest, "keys": _is_texts, "labels": _is_texts}


def shorten_value(value: Any) -> str:
    """Returns a value as Python shows it, in ASCII and at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
