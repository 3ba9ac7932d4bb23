"""Both notebooks run from top to bottom, and are what build.py makes of lesson.py."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest

from notebooks import build

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = Path(build.__file__).parent
LESSON = (NOTEBOOKS / "lesson.py").read_text(encoding="utf-8")
EXERCISES = 12
SECONDS = 300  # for one cell

# Run as one more cell at the end.
PROBE = """
print(json.dumps({
    "accuracy": accuracy, "missing": missing, "python": sys.executable, "refused": refused,
    "speeds": speeds, "systolic": systolic_equal, "traces": dict(traces),
}))
"""


def load(edition):
    return nbformat.read(NOTEBOOKS / f"{edition}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook with this Python; returns it with its outputs, and what PROBE found."""
    pytest.importorskip("tensorflow")
    client = pytest.importorskip("nbclient")
    kernels = pytest.importorskip("jupyter_client")
    # The user's own kernels, settings and start-up files stay out of it.
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    root = str(NOTEBOOKS.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    work = tmp_path / "work"
    work.mkdir()

    def run(edition):
        notebook = load(edition)
        notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
        specs = kernels.kernelspec.KernelSpecManager(kernel_dirs=[])  # leaves the native one
        manager = kernels.AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        resources = {"metadata": {"path": str(work)}}
        client.NotebookClient(notebook, km=manager, timeout=SECONDS, resources=resources).execute()
        outputs = [output for cell in code(notebook) for output in cell.outputs]
        assert not [output for output in outputs if output.output_type == "error"]
        assert list(work.iterdir()) == []  # what it writes goes to a folder of its own
        return notebook, json.loads(printed(notebook.cells[-1]))

    return run


def check_what_both_find(found):
    assert found["python"] == sys.executable
    assert found["accuracy"] > 0.3  # one in five by chance
    assert found["missing"].startswith("Feature: scent (data type: float) is required")
    assert found["refused"].startswith("augment: calls Python from the graph (op PyFunc")
    assert found["traces"]["eager"] == 200
    assert (found["traces"]["graph"], found["traces"]["mean"]) == (1, 2)
    # Columns: as it lies on the disk, with 20 ms before each open.
    speeds = {name: slow for name, (_, slow) in found["speeds"].items()}
    assert speeds["files, one at a time"] < 50
    assert speeds["8 shards, AUTOTUNE"] > 2 * speeds["files, one at a time"]


def test_solution_runs(run):
    notebook, found = run("solution")
    check_what_both_find(found)
    assert found["systolic"] is True
    assert found["traces"]["xla"] == 1
    assert not [cell for cell in code(notebook) if "Your turn:" in printed(cell)]


def test_playground_runs_unanswered(run):
    notebook, found = run("playground")
    check_what_both_find(found)
    assert found["systolic"] is None
    for cell in code(notebook):
        if build.YOUR_TURN in cell.source:
            assert printed(cell).startswith("Your turn:"), cell.source


@pytest.mark.parametrize("edition", build.EDITIONS)
def test_committed_notebook_is_what_the_lesson_makes(edition):
    committed = (NOTEBOOKS / f"{edition}.ipynb").read_text(encoding="utf-8")
    assert committed == build.build(LESSON, edition), "run: python notebooks/build.py"
    notebook = load(edition)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code(notebook))


def count_open(source) -> int:
    """Assignments and returns of `...`."""
    statements = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assign | ast.Return))
    values = (node.value for node in statements)
    return sum(isinstance(v, ast.Constant) and v.value is ... for v in values)


def test_every_answer_is_open_in_the_playground_and_given_in_the_solution():
    for edition, expected in (("playground", EXERCISES), ("solution", 0)):
        cells = code(load(edition))
        assert sum(cell.source.count(build.YOUR_TURN) for cell in cells) == EXERCISES
        assert sum(count_open(cell.source) for cell in cells) == expected
    text = "\n".join(cell.source for cell in load("playground").cells)
    assert text.count("**Exercise ") == EXERCISES


def test_an_answer_of_several_lines_and_a_return_are_left_open():
    source = (
        "# Your turn: a\nx = (\n    1\n)\n\n\ndef f():\n    # Your turn: b\n    return 2\ny = 3"
    )
    assert build.leave_open(source) == (
        "# Your turn: a\nx = ...\n\n\ndef f():\n    # Your turn: b\n    return ...\ny = 3"
    )


def test_a_mark_above_anything_else_is_an_error():
    with pytest.raises(ValueError, match="^# Your turn: a: must stand above an assignment"):
        build.leave_open("# Your turn: a\nprint(1)")
