"""docs/seeds.md names what there is: every line once, every test and file that it points to."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = {"A": 72, "B": 37, "N": 17}
STATES = ("yes", "partly", "not yet", "text")


def rows() -> list[tuple[str, ...]]:
    """Line, what, state, where and shown by, of each row."""
    found = []
    for line in (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| [A-Z]\d\d ", line):
            cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
            assert len(cells) == 5, line
            found.append(cells)
    return found


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_line_has_one_row():
    expected = [f"{series}{n:02d}" for series, n in LINES.items() for n in range(1, n + 1)]
    assert [row[0] for row in rows()] == expected


def test_every_test_that_is_named_exists():
    known: dict[str, set[str]] = {}
    for line, _, _, _, shown in rows():
        for name in quoted(shown):
            if "::" not in name:
                assert name.startswith("tpufeed "), (line, name)
                continue
            file, function = name.split("::")
            if file not in known:
                known[file] = functions_of(ROOT / "tests" / file)
            assert function.startswith("test_") and function in known[file], (line, name)


def test_every_file_that_is_named_exists():
    for line, _, _, where, _ in rows():
        for name in quoted(where):
            assert name.startswith("--") or (ROOT / name).is_file(), (line, name)


def test_what_works_is_shown_and_what_does_not_says_so():
    for line, _, state, where, shown in rows():
        word = next((word for word in STATES if re.match(rf"{word}\b", state)), None)
        assert word, (line, state)
        if word in ("yes", "partly"):
            assert quoted(where) and quoted(shown), line
        if word == "partly":
            assert state.startswith("partly: "), line  # what is missing
