"""The DAG: what it decides, and that Airflow parses it."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from airflow_env import airflow_python, run_airflow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def steps():
    spec = importlib.util.spec_from_file_location("tpufeed_steps", ROOT / "dags/tpufeed_steps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_last_days_end_with_the_interval(steps):
    assert steps.days_before("2026-03-01", 3) == ["2026-02-27", "2026-02-28", "2026-03-01"]


@pytest.mark.parametrize("today, refused", [(100, False), (90, False), (89, True), (0, True)])
def test_records_may_fall_by_the_tenth_and_no_further(steps, today, refused):
    if not refused:
        return steps.check_records(today, before=100, max_drop=0.1)
    with pytest.raises(ValueError, match=f"records: {today}, the day before had 100: fallen by"):
        steps.check_records(today, before=100, max_drop=0.1)


def test_a_retry_has_the_same_run_name_and_other_data_or_flags_another(steps):
    name = steps.run_name("2026-01-02", ["a", "b"], ["--epochs", "1"])
    assert name == steps.run_name("2026-01-02", ["a", "b"], ["--epochs", "1"])
    others = {steps.run_name("2026-01-02", ["a", "c"], ["--epochs", "1"])}
    others.add(steps.run_name("2026-01-02", ["a", "b"], ["--epochs", "2"]))
    others.add(steps.run_name("2026-01-03", ["a", "b"], ["--epochs", "1"]))
    assert len(others | {name}) == 4
    assert len(name) <= 63 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_the_gate(steps):
    history = {"epochs": [{"test": {"correct": 9, "total": 10}}]}
    history["epochs"].append({"test": {"correct": 3, "total": 4}})
    assert steps.accuracy_of(history, path="h") == 0.75
    steps.check_accuracy(0.75, minimum=0.75, path="h")
    for accuracy in (0.74, float("nan")):
        with pytest.raises(ValueError, match="h: test accuracy .* is under min_accuracy 0.75"):
            steps.check_accuracy(accuracy, minimum=0.75, path="h")
    with pytest.raises(ValueError, match="h: no epoch was trained"):
        steps.accuracy_of({"epochs": []}, path="h")


def test_the_steps_verify_a_data_set_and_name_a_corrupted_shard(steps, dataset, tmp_path, capfd):
    manifest = steps.read_json(sys.executable, f"{dataset}/dataset.json")
    assert steps.records_of(manifest) == 60
    assert steps.read_json(sys.executable, f"{tmp_path}/none.json") is None
    steps.write_json(sys.executable, f"{tmp_path}/runs", steps.LAST, {"run": "r"})
    assert json.loads((tmp_path / "runs" / steps.LAST).read_text()) == {"run": "r"}
    steps.tpufeed(sys.executable, "verify", str(dataset))
    copy = shutil.copytree(dataset, tmp_path / "copy")
    shard = min(copy.glob("*.tfrecord"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RuntimeError, match="tpufeed verify: exit code 1"):
        steps.tpufeed(sys.executable, "verify", str(copy))
    assert shard.name in capfd.readouterr().out


PARSE = """
import json, time
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import Asset
start = time.monotonic()
bag = DagBag(dag_folder=DAGS)
seconds = time.monotonic() - start
d = bag.dags["images_to_tpu"]
down = {t.task_id: sorted(t.downstream_task_ids) for t in d.tasks}
print("RESULT" + json.dumps([seconds, dict(bag.import_errors), down]))
"""


@pytest.mark.timeout(600)
def test_airflow_parses_the_dag_in_two_seconds(tmp_path):
    code = PARSE.replace("DAGS", repr(str(ROOT / "dags")))
    done = run_airflow(airflow_python(), code, home=tmp_path)
    assert "RESULT" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
    seconds, errors, downstream = json.loads(done.stdout.split("RESULT")[1])
    assert errors == {}
    assert downstream == {
        "ingest": ["verify"],
        "verify": ["launch"],
        "launch": ["evaluate"],
        "evaluate": [],
    }
    assert seconds < 2
