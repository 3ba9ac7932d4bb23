"""The architecture, held: who may import whom, and what nobody may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Imports go downwards only: a module may import from floors below its own, or beside it where
# listed here.
FLOORS = {
    "transforms.records": 0,
    "transforms.credentials": 0,
    "transforms.labels": 0,
    "transforms.files": 1,
    "transforms.filters": 0,
    "transforms.headers": 0.5,
    "transforms.image": 1,
    "transforms.shards": 1,
    "transforms.example": 1,
    "transforms.ordered": 1,
    "transforms.parquet": 1,
    "transforms.progress": 1,
    "transforms.exif": 2,
    "transforms.manifest": 2,
    "transforms.resume": 3,
    "transforms.globs": 3,
    "transforms.idx": 3,
    "transforms.tables": 4,
    "transforms.prepare": 4,
    "transforms.decoders": 5,
    "transforms.sources": 5,
    "transforms.stats": 5,
    "transforms.screen": 6,
    "transforms.duplicates": 7,
    "transforms.write": 7,
    "pipeline.slices": 7,
    "pipeline.config": 8,
    "pipeline.messages": 8,
    "pipeline.dataflow": 8.5,
    "pipeline.mnist": 8,
    "pipeline.samples": 8,
    "pipeline.reference": 8,
    "pipeline.progress": 8.5,
    "pipeline.runner": 9,
    "pipeline.devices": 9,
    "pipeline.models": 9,
    "pipeline.figures": 9,
    "pipeline.compare": 13,
    "pipeline.folders": 8.5,
    "pipeline.index": 8,
    "pipeline.lean": 8,
    "pipeline.lists": 7,
    "pipeline.needs": 8.2,
    "pipeline.repeat": 8,
    "pipeline.report_page": 8,
    "pipeline.survey": 9,
    "pipeline.plots": 10,
    "pipeline.thumbnails": 10,
    "pipeline.report": 11,
    "pipeline.diff": 9,
    "pipeline.dataset": 9,
    "pipeline.summary": 9,
    "pipeline.verify": 9,
    "pipeline.vertex": 9,
    "pipeline.learner": 10,
    "pipeline.frames": 9,
    "pipeline.ingest": 10,
    "pipeline.plan": 10,
    "pipeline.rehearsal": 11,
    "pipeline.transform_fn": 10,
    "pipeline.serving_image": 10,
    "pipeline.analyze": 11,
    "pipeline.history": 11,
    "pipeline.train": 12,
    "pipeline.export": 14,
    "pipeline.launch": 10,
    "pipeline.predict": 15,
    "pipeline.__main__": 16,
}


def modules():
    for package in ("transforms", "pipeline"):
        for path in sorted((ROOT / package).glob("*.py")):
            if path.name != "__init__.py":
                yield f"{package}.{path.stem}", path


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module, path", list(modules()), ids=lambda value: str(value)[-20:])
def test_imports_go_downwards_only(module, path):
    assert module in FLOORS, f"{module} has no floor: give it one"
    for name in imported(path) & set(FLOORS):
        assert FLOORS[name] < FLOORS[module], f"{module} imports {name}"
    if module.startswith("transforms."):
        assert not any(name.split(".")[0] == "pipeline" for name in imported(path))


@pytest.mark.parametrize("folder", ["transforms", "dags"])
def test_workers_and_dags_never_name_tensorflow(folder):
    for path in (ROOT / folder).glob("**/*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"tensorflow", "tensorflow_transform", "keras", "tfx_bsl"}, path


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return {name.split(".")[0] for name in done.stderr.split()}


def test_importing_transforms_loads_no_tensorflow():
    names = [f"transforms.{path.stem}" for path in (ROOT / "transforms").glob("*.py")]
    loaded = loaded_by("import " + ", ".join(names))
    assert "apache_beam" in loaded
    assert not loaded & {"tensorflow", "keras", "tensorflow_transform", "pipeline"}


def test_help_loads_neither_beam_nor_tensorflow():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pipeline", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "usage: tpufeed" in done.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"apache_beam", "tensorflow", "keras", "pyarrow", "pandas", "grpc"}


def test_functions_stay_short():
    long = []
    for module, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = [n for n in node.body if not _is_docstring(n)]
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > 45:
                    long.append(f"{module}.{node.name}: {lines} lines")
    # Argument parsers are lists; ingest.build is the graph, on one screen.
    allowed = {"pipeline.config.make_parser", "pipeline.ingest.build"}
    assert [name for name in long if name.split(":")[0] not in allowed] == []


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_parquet_is_read_in_one_place():
    files = [*ROOT.glob("pipeline/*.py"), *ROOT.glob("transforms/*.py")]
    words = ("ParquetFile(", "parquet.read_table(")
    reading = [path.name for path in files if any(word in path.read_text() for word in words)]
    assert reading == ["parquet.py"]
