"""Makes playground.ipynb and solution.ipynb from lesson.py, which says how it is written.

python notebooks/build.py
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
EDITIONS = ("playground", "solution")
CELL = re.compile(r"^# %%(?P<text> \[markdown\])?(?: (?P<edition>\w+))?$", re.MULTILINE)
YOUR_TURN = "# Your turn: "


def build(lesson: str, edition: str) -> str:
    """Returns the text of a notebook, without outputs.

    Args:
      lesson: the text of lesson.py.
      edition: one of EDITIONS.
    """
    cells = [
        {
            "cell_type": "markdown" if is_text else "code",
            "id": f"cell-{number:03d}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
            **({} if is_text else {"execution_count": None, "outputs": []}),
        }
        for number, (is_text, source) in enumerate(split_cells(lesson, edition))
    ]
    notebook = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def split_cells(lesson: str, edition: str) -> Iterator[tuple[bool, str]]:
    """Yields the cells of an edition: whether it is text, and its source."""
    marks = list(CELL.finditer(lesson))
    ends = [mark.start() for mark in marks[1:]] + [len(lesson)]
    for mark, end in zip(marks, ends, strict=True):
        source = lesson[mark.end() : end].strip()
        if mark["edition"] not in (None, edition):
            continue
        if mark["text"]:
            yield True, re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        else:
            yield False, source if edition == "solution" else leave_open(source)


def leave_open(source: str) -> str:
    """Returns the code of a cell with `...` in the place of each answer.

    Raises:
      ValueError: what follows a mark is neither an assignment nor a return.
    """
    lines = source.splitlines()
    answers = {
        node.lineno: node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign | ast.Return)
    }
    for number in range(len(lines) - 1, 0, -1):  # from the end, so that the others stay in place
        if not lines[number - 1].lstrip().startswith(YOUR_TURN):
            continue
        node = answers.get(number + 1)
        if node is None:
            raise ValueError(f"{lines[number - 1]}: must stand above an assignment or a return")
        before = re.match(r"\s*(?:return|[^=]+=)", lines[number])
        assert before is not None
        lines[number : node.end_lineno] = [f"{before[0]} ..."]
    return "\n".join(lines)


def main() -> None:
    """Writes both notebooks."""
    lesson = (FOLDER / "lesson.py").read_text(encoding="utf-8")
    for edition in EDITIONS:
        path = FOLDER / f"{edition}.ipynb"
        path.write_text(build(lesson, edition), encoding="utf-8")
        print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
