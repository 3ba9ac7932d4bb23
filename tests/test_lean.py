"""What a local run does without; and that it is only left out, never missed."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from gcs_emulator import serve

from pipeline import lean
from pipeline.lean import find_spare, without_modules
from transforms.manifest import load_manifest

CONNECTORS, STORES = lean._CONNECTORS, lean._STORES
FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
# The command, as the shell calls it; then what it has imported, and what can be imported now.
COMMAND = """
import importlib, json, sys
from pipeline.__main__ import run
try:
    run()
except SystemExit as end:
    assert not end.code
loaded = sorted(sys.modules)
from apache_beam.io.gcp.bigquery import ReadFromBigQuery
import pandas
with open({found!r}, "w") as file:
    json.dump(loaded, file)
"""


def run_command(tmp_path, *words, **environment) -> set[str]:
    """Runs `tpufeed WORDS`; returns the modules that it had imported by its end."""
    found = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(found=str(found)), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "bson" not in done.stderr
    return set(json.loads(found.read_text()))


@pytest.mark.parametrize(
    "words, connectors, stores",
    [
        (["ingest", "--input", "in/*"], CONNECTORS, STORES),
        (["ingest", "--input", "in/*", "--direct_num_workers=2"], CONNECTORS, STORES),
        (["ingest", "--input", "gs://in/*"], CONNECTORS, ()),
        (["ingest", "--temp_location=gs://tmp"], CONNECTORS, ()),
        (["ingest", "--runner=DataflowRunner"], (), ()),
        (["ingest", "--runner", "DirectRunner"], (), ()),
        (["ingest", "--runner", "apache_beam.runners.dataflow.DataflowRunner"], (), ()),
    ],
)
def test_what_is_spare_by_the_command(words, connectors, stores):
    assert find_spare(words) == (connectors, stores)


def test_modules_are_missing_inside_only(tmp_path, monkeypatch):
    for name in ("tpufeed_a", "tpufeed_b"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("tpufeed_b")
    with without_modules(["tpufeed_a", "tpufeed_b"]):
        importlib.import_module("tpufeed_b")  # known before
        with pytest.raises(ModuleNotFoundError, match="^tpufeed_a is left out of a local run$"):
            importlib.import_module("tpufeed_a")
    importlib.import_module("tpufeed_a")


@pytest.mark.parametrize("command", ["ingest", "plan"])
def test_a_local_command_does_without(command, pictures, dataset, tmp_path):
    words = [command, "--input", f"{pictures}/*/*", "--output", tmp_path / "records", *FLAGS]
    loaded = run_command(tmp_path, *words)
    assert "apache_beam.io.filesystems" in loaded
    assert not loaded & {*CONNECTORS, *STORES, "google.cloud.storage", "google.cloud.bigquery"}
    if command == "ingest":
        made = load_manifest(str(tmp_path / "records"))
        assert made.fingerprint == load_manifest(str(dataset)).fingerprint


def test_another_runner_or_debug_has_all_of_beam(pictures, tmp_path):
    for number, flag in enumerate(["--runner=DirectRunner", "--debug"]):
        output = tmp_path / f"records{number}"
        words = ["ingest", "--input", f"{pictures}/*/*", "--output", output, *FLAGS, flag]
        assert {*STORES, "pandas", "pymongo"} <= run_command(tmp_path, *words)


def test_a_bucket_that_only_a_csv_names_is_found(pictures, tmp_path):
    """No argument tells of it: the file system is imported when the first such path is met."""
    paths = sorted(path for path in pictures.rglob("*.*"))
    with serve("pictures", "records") as store:
        rows = []
        for path in paths:
            name = path.relative_to(pictures).as_posix()
            store.put(f"gs://pictures/{name}", path.read_bytes())
            rows.append(f"gs://pictures/{name},{path.parent.name}\n")
        (tmp_path / "rows.csv").write_text("path,label\n" + "".join(rows))
        words = ["ingest", "--input", tmp_path / "rows.csv", "--output", tmp_path / "records"]
        environment = {
            "STORAGE_EMULATOR_HOST": store.address,
            "GOOGLE_APPLICATION_CREDENTIALS": "",
            "CLOUDSDK_CONFIG": str(tmp_path / "nobody"),
            "NO_GCE_CHECK": "true",
        }
        loaded = run_command(tmp_path, *words, *FLAGS, **environment)
    assert set(STORES) <= loaded
    made = load_manifest(str(tmp_path / "records"))
    assert (made.records, made.rejects) == (len(paths), {})
