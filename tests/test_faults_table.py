"""docs/faults.md has every row, and names tests that exist; and the few that had none."""

import ast
import functools
import re
from pathlib import Path

import apache_beam as beam
import google_crc32c
from apache_beam.io import tfrecordio

from pipeline.config import make_ingest_config, make_parser
from pipeline.ingest import build, resolve_config

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = {
    "A": [1, 2, 3, 4, 6, 7, 8, 10, 12, 15, 16, 17, 21, 24, 26, 27, 28, 29, 31, *range(34, 39)],
    "B": [1, 2, 5, 6, 7, 8, 9, 10, 11, *range(13, 18)],
    "C": [1, 2, 5, 6, 7, 8, 9, 11, 12, 14, 17, 18],
    "D": [1, 2, 4, *range(6, 15)],
    "E": list(range(1, 11)),
    "F": [1, 2, 3, 4, 5, 6, 8],
    "G": [1, 2, 4],
}


def rows() -> list[list[str]]:
    """Number, fault, what happens here and what holds it, of each row."""
    found = []
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| [A-Z]\d+ ", line):
            cells = [cell.strip() for cell in line[1:-1].split(" |")]
            assert len(cells) == 4 and all(cells[:3]), line
            found.append(cells)
    return found


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_one_row():
    expected = [f"{series}{n}" for series, numbers in NUMBERS.items() for n in numbers]
    assert [row[0] for row in rows()] == expected


def test_every_test_that_is_named_exists():
    for number, _, here, held in rows():
        names = re.findall(r"`(tests/test_\w+\.py)::(test_\w+)`", held)
        assert re.sub(r"`[^`]+`", "", held).strip(", ") == "", number
        assert names or "cannot" in here, number
        assert len(names) == held.count("`") / 2
        for file, function in names:
            assert function in functions_of(ROOT / file), (number, file, function)


def test_checksums_are_native():
    assert google_crc32c.implementation == "c"
    tfrecordio._default_crc32c_fn.fn = None
    assert tfrecordio._default_crc32c_fn(b"123456789") == 0xE3069283
    assert tfrecordio._default_crc32c_fn.fn is google_crc32c.value


def test_listing_and_writing_are_apart(pictures, tmp_path):
    """One GroupByKey lies between them, so that no runner fuses them into one worker's work."""
    words = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out")]
    config = resolve_config(make_ingest_config(make_parser().parse_args(words)))
    groupings: list[str] = []

    class Visitor(beam.pipeline.PipelineVisitor):
        def visit_transform(self, node):
            if isinstance(node.transform, beam.GroupByKey):
                groupings.append(node.full_label)

    pipeline = beam.Pipeline()
    build(pipeline, config)
    pipeline.visit(Visitor())
    assert [name for name in groupings if name.startswith("WriteShards")] == [
        "WriteShards/GroupShards"
    ]
    assert not [name for name in groupings if name.startswith("ListImages")]
