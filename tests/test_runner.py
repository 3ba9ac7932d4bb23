"""Running a pipeline here: what is changed in Beam meanwhile, and put back."""

import os
import subprocess
import sys
import tempfile

import apache_beam as beam
import pytest
from apache_beam.runners.worker import statesampler
from helpers import COLLECTED, collect

from pipeline.runner import plan_run, run_pipeline

USUAL = (statesampler.DEFAULT_SAMPLING_PERIOD_MS,)


def note_period(name):
    collect(statesampler.get_current_tracker().sampling_period_ms, name)


def fail(_):
    raise ValueError("no such thing")


def usual_period():
    return statesampler.StateSampler.__init__.__defaults__


def test_a_local_run_samples_often_so_that_its_stages_end_at_once():
    """Else each waits for up to 0.2 s, and all cores with it."""
    COLLECTED.clear()

    def build(root):
        return root | beam.Create(["inner"]) | beam.Map(note_period)

    def build_around(root):
        return root | beam.Create(["outer"]) | beam.Map(note_and_run_another)

    def note_and_run_another(name):
        note_period(name)
        run_pipeline(plan_run([]), build)

    run_pipeline(plan_run([]), build_around)
    assert COLLECTED == {"outer": [5], "inner": [5]}
    assert usual_period() == USUAL


def test_beam_is_as_before_also_after_a_failure():
    with pytest.raises(RuntimeError, match="no such thing"):
        run_pipeline(plan_run([]), lambda root: root | beam.Create([1]) | beam.Map(fail))
    assert usual_period() == USUAL


def test_another_beam_is_left_alone(monkeypatch):
    COLLECTED.clear()
    monkeypatch.setattr(statesampler.StateSampler.__init__, "__defaults__", (70,))
    run_pipeline(plan_run([]), lambda root: root | beam.Create(["other"]) | beam.Map(note_period))
    assert COLLECTED["other"] == [70]
    assert usual_period() == (70,)


def test_to_try_options_leaves_no_folder_behind(tmp_path, monkeypatch):
    """Beam makes one for each pipeline, and removes it only where that is run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flags = ["--project=some-project", "--region=us-west1", "--temp_location=gs://bucket/temp"]
    plan = plan_run(["--runner=DataflowRunner", "--dry_run=true", *flags])
    assert plan.dry_run
    plan_run(["--runner=PrismRunner"])
    assert list(tmp_path.iterdir()) == []


# Cells as a notebook runs them.
CELLS = """
from IPython.core.interactiveshell import InteractiveShell
from apache_beam.utils import interactive_utils
shell = InteractiveShell.instance()
for words in {commands!r}:
    cell = f"from pipeline.__main__ import main; code = main(['ingest', *{{words}}])"
    shell.run_cell(cell).raise_error()
    assert shell.user_ns["code"] == 0
assert interactive_utils.is_in_ipython()
"""


def test_a_notebook_ingests(pictures, tmp_path):
    pytest.importorskip("IPython")
    local = ["--input", f"{pictures}/*/*", "--image-size", "16", "--output"]
    commands = [
        [*local, f"{tmp_path}/records"],
        [*local, f"{tmp_path}/more", "--direct_running_mode=multi_threading"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CELLS.format(commands=commands)],
        capture_output=True,
        text=True,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "records" / "dataset.json").exists()
