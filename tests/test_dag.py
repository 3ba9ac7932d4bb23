"""The DAG: what it decides, and that Airflow parses it."""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from airflow_env import airflow_python, run_airflow

from pipeline import samples

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


@pytest.mark.parametrize(
    ("pattern", "root"),
    [
        ("/data/{ds}/*/*", "/data"),
        ("train=/data/{ds}/*/*.jpg", "/data"),
        ("/{ds}/*/*", "/"),
        ("/data/pictures-{ds}/*/*", "/data"),
        ("/data/*/[ab]/{ds}/*", "/data"),
        ("gs://bucket/{ds}/*/*", "gs://bucket"),
        ("gs://bucket/a=b/{ds}/*/*", "gs://bucket/a=b"),
        ("gs://bucket-{ds}/*/*", None),
        ("{ds}/*/*", "."),
        ("/data/*/*", None),
        ("idx:/data/{ds}", None),
    ],
)
def test_keys_are_relative_to_what_all_days_have_in_common(steps, pattern, root):
    assert steps.root_of(pattern) == root


def test_a_run_is_finished_once_it_has_its_confusion(steps):
    assert not steps.is_finished({"epochs": [], "confusion": None})
    assert not steps.is_finished({"epochs": []})
    assert steps.is_finished({"epochs": [{}], "confusion": [[1, 0], [0, 1]]})


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


def test_a_run_without_a_day_is_refused(steps):
    assert steps.check_day("2026-01-02") == "2026-01-02"
    for day in (None, ""):
        with pytest.raises(ValueError, match="no logical date, so no day to ingest"):
            steps.check_day(day)


# In Airflow itself.

PARSE = """
import json, sys, time
from airflow.dag_processing.dagbag import DagBag
start = time.monotonic()
bag = DagBag(dag_folder=DAGS)
seconds = time.monotonic() - start
down = {
    name: {t.task_id: sorted(t.downstream_task_ids) for t in d.tasks}
    for name, d in bag.dags.items()
}
heavy = {"tensorflow", "apache_beam", "pandas", "numpy", "pyarrow", "pipeline", "transforms"}
loaded = sorted(heavy & {name.split(".")[0] for name in sys.modules})
schedule = [a.name for a in bag.dags["records_report"].timetable.asset_condition.objects]
outlets = [a.name for a in bag.dags["images_to_tpu"].get_task("verify").outlets]
print("RESULT" + json.dumps([seconds, dict(bag.import_errors), down, loaded, schedule, outlets]))
"""

RUN = """
import datetime, json
from airflow.dag_processing.dagbag import DagBag
from airflow.utils.session import create_session
from airflow.models.asset import AssetEvent
from airflow.models.xcom import XComModel
bag = DagBag(dag_folder=DAGS)
day = datetime.datetime.fromisoformat(DAY).replace(tzinfo=datetime.timezone.utc)
dag = bag.dags["images_to_tpu"]
for task in dag.tasks:
    task.retries = RETRIES  # each waits five minutes
    task.retry_delay = datetime.timedelta(seconds=1)
run = dag.test(logical_date=day, run_conf=CONF)
with create_session() as session:
    events = [(e.source_task_id, e.extra) for e in session.query(AssetEvent)]
    found = session.query(XComModel).filter(XComModel.run_id == run.run_id)
    xcoms = {f"{x.task_id} {x.key}": x.value for x in found}
states = {t.task_id: str(t.state) for t in run.get_task_instances()}
print("RESULT" + json.dumps([str(run.state), states, events, xcoms], default=str))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Airflow's home with a migrated database, and the interpreter that goes with it."""
    python, home = airflow_python(), tmp_path_factory.mktemp("airflow")
    done = run_airflow(
        python, "import subprocess; subprocess.run(['airflow', 'db', 'migrate'])", home=home
    )
    assert (home / "airflow.db").exists(), done.stderr[-2000:]
    return home


@pytest.mark.timeout(600)
def test_airflow_parses_the_dags_in_two_seconds(home, capsys):
    code = PARSE.replace("DAGS", repr(str(ROOT / "dags")))
    done = run_airflow(airflow_python(), code, home=home)
    assert "RESULT" in done.stdout, done.stdout[-1000:] + done.stderr[-3000:]
    seconds, errors, down, loaded, schedule, outlets = json.loads(done.stdout.split("RESULT")[1])
    assert errors == {}
    assert down == {
        "images_to_tpu": {
            "ingest": ["verify"],
            "verify": ["launch"],
            "launch": ["evaluate"],
            "evaluate": [],
        },
        "records_report": {"report": []},
    }
    assert loaded == []
    assert schedule == outlets == ["tpufeed_records"]
    with capsys.disabled():
        print(f"\n  DagBag: {seconds:.2f} s", end="")
    assert seconds < 10  # 0.8 s on a quiet machine; what would make it slow is not loaded


class Chain:
    """The DAG's surroundings: pictures by day, the stand-in for Vertex AI, the ETL's interpreter.

    The interpreter is a script, so that something can happen between two tasks: `after` is run by
    the shell once a command of tpufeed has succeeded, with its name in $1.
    """

    def __init__(self, folder: Path, home: Path):
        self.folder, self.home, self.after = folder, home, folder / "after.sh"
        self.python = folder / "python"
        root, python, after = (shlex.quote(str(p)) for p in (ROOT, sys.executable, self.after))
        self.python.write_text(
            f'#!/bin/bash\nexport PYTHONPATH={root}\n{python} "$@" || exit\n'
            f'if [ "$1 $2" = "-m pipeline" ] && [ -f {after} ]; then . {after} "$3"; fi\n'
        )
        self.python.chmod(0o755)
        self.service = None

    def serve(self, *faults: str) -> None:
        """Starts the stand-in anew; what it took before stays on its list."""
        if self.service:
            self.close()
        command = [sys.executable, str(ROOT / "tests/vertex_service.py"), "--port", "0"]
        command += ["--log", str(self.folder / "submissions.jsonl"), "--folder", str(self.folder)]
        self.service = subprocess.Popen(
            [*command, *faults],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.address = self.service.stdout.readline().split()[-1]

    def close(self) -> None:
        self.service.terminate()
        self.service.wait()
        self.service.stdout.close()

    def submissions(self) -> list:
        path = self.folder / "submissions.jsonl"
        return [json.loads(line)["job"] for line in path.open()] if path.exists() else []

    def run(self, day: str, *, retries: int = 0, **changes):
        """Runs the DAG for a day: its state, its tasks' states, asset events, XComs and the log."""
        flags = f"--endpoint {self.address} --project p --region us-west1 --poll 0.2"
        conf = {
            "python": str(self.python),
            "input": f"{self.folder}/in/{{ds}}/*/*",
            "output": f"{self.folder}/records",
            "runs": f"{self.folder}/runs",
            "ingest_flags": {
                "image-size": "28",
                "split": "train=0.8,validation=0.2",
                "max-reject-rate": "0.1",
            },
            "backend": "vertex",
            "launch_flags": f"{flags} --image us-docker.pkg.dev/p/r/trainer:1",
            "train_flags": "--model lenet5 --epochs 1 --batch-size 32",
            "folders": 2,
            "min_accuracy": 0.0,
            **changes,
        }
        code = RUN.replace("DAGS", repr(str(ROOT / "dags")))
        for word, value in (("DAY", day), ("CONF", conf), ("RETRIES", retries)):
            code = code.replace(word, repr(value))
        done = run_airflow(airflow_python(), code, home=self.home)
        log = done.stdout + done.stderr
        assert "RESULT" in done.stdout, log[-6000:]
        return *json.loads(done.stdout.split("RESULT")[1]), log


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """400 pictures of the sample set, whatever their folder."""
    folder = tmp_path_factory.mktemp("drawn")
    samples.main([str(folder / "images"), "--count", "440"])
    return sorted(path for path in (folder / "images").rglob("*.*") if path.is_file())


@pytest.fixture
def chain(tmp_path, home, drawn):
    def fill(day, pictures):
        for path in pictures:
            target = tmp_path / "in" / day / path.parent.name
            target.mkdir(parents=True, exist_ok=True)
            os.link(path, target / path.name)

    fill("2026-01-01", drawn[0::2][:200])
    fill("2026-01-02", drawn[1::2][:190])
    fill("2026-01-03", drawn[0::4][:100])
    found = Chain(tmp_path, home)
    found.serve()
    yield found
    found.close()


def trained_on(job):
    args = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    return [Path(arg.removeprefix("--data=")).name for arg in args if arg.startswith("--data=")]


DONE = {"ingest": "success", "verify": "success", "launch": "success", "evaluate": "success"}
STOPPED = {**DONE, "verify": "failed", "launch": "upstream_failed", "evaluate": "upstream_failed"}


@pytest.mark.timeout(1500)
def test_the_chain_day_after_day(chain):
    state, tasks, events, xcoms, log = chain.run("2026-01-01")
    assert (state, tasks) == ("success", DONE), log[-6000:]
    (job,) = chain.submissions()
    assert trained_on(job) == ["2026-01-01"]
    records = f"{chain.folder}/records/2026-01-01"
    assert events[-1] == ["verify", {"folder": records}]
    # Ids and paths alone.
    assert all(len(json.dumps(value)) < 400 for value in xcoms.values())
    assert xcoms["verify return_value"] == records
    run = Path(xcoms["launch return_value"])
    history = json.loads((run / "history.json").read_text())
    manifest = json.loads(Path(records, "dataset.json").read_text())
    assert list(history["data"]) == [manifest["fingerprint"]]
    assert sum(split["records"] for split in manifest["splits"].values()) > 180

    # A second interval is a second folder; training reads both.
    state, tasks, _, _, log = chain.run("2026-01-02")
    assert (state, tasks) == ("success", DONE), log[-6000:]
    assert trained_on(chain.submissions()[1]) == ["2026-01-01", "2026-01-02"]
    assert sorted(path.name for path in Path(records).parent.iterdir()) == [
        "2026-01-01",
        "2026-01-02",
    ]

    # Nothing has changed: nothing is launched.
    state, tasks, _, _, log = chain.run("2026-01-02")
    assert state == "success", log[-6000:]
    assert tasks == {**DONE, "launch": "skipped", "evaluate": "skipped"}
    assert "the data has not changed since" in log
    assert len(chain.submissions()) == 2

    # Half of the day's pictures are missing: stopped before anything is launched.
    state, tasks, _, _, log = chain.run("2026-01-03")
    assert state == "failed"
    assert tasks == STOPPED
    assert "fallen by more than 10%" in log
    assert len(chain.submissions()) == 2


@pytest.mark.timeout(600)
def test_a_corrupted_shard_stops_the_run_before_anything_is_launched(chain):
    shard = f"{chain.folder}/records/2026-01-01/train-00000-of-*"
    chain.after.write_text(
        f"if [ $1 = ingest ]; then printf X | dd of=$(echo {shard}) bs=1 seek=100 conv=notrunc "
        "status=none; fi\n"
    )
    state, tasks, _, _, log = chain.run("2026-01-01")
    assert state == "failed"
    assert tasks == STOPPED
    assert "train-00000-of-" in log and "tpufeed verify: exit code 1" in log
    assert chain.submissions() == []


@pytest.mark.timeout(600)
def test_a_retry_of_a_failed_launch_does_not_submit_twice(chain):
    # The job is taken, then the service cannot be reached for a while.
    chain.serve(*(word for _ in range(5) for word in ("--fault", "get=drop")))
    state, tasks, _, _, log = chain.run("2026-01-01", retries=1)
    assert (state, tasks) == ("success", DONE), log[-6000:]
    assert "the service cannot be reached" in log
    # The first job may have ended while it was not seen.
    assert "found, so nothing is submitted" in log or "is finished, so nothing is launched" in log
    assert len(chain.submissions()) == 1


KILLED = """
import os, signal
from pathlib import Path
import keras

class Kill(keras.layers.Layer):
    def call(self, x):
        mark, runs = Path(FOLDER, "killed"), Path(FOLDER, "runs")
        if list(runs.glob("run-2026-01-12-*/history.json")) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

def make(shape, classes):
    layers = [keras.Input(shape), Kill(), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential(layers)
"""


@pytest.mark.timeout(900)
def test_days_of_the_same_names_and_a_training_that_is_killed_and_retried(chain, drawn):
    """On this machine; the first training of the second day is killed in its first step."""
    (chain.folder / "mine.py").write_text(KILLED.replace("FOLDER", repr(str(chain.folder))))
    for day, first in (("2026-01-11", 0), ("2026-01-12", 1)):
        for number, path in enumerate(drawn[first:120:2]):
            target = chain.folder / "in" / day / "ab"[number % 2]
            target.mkdir(parents=True, exist_ok=True)
            os.link(path, target / f"{number:04d}{path.suffix}")
    changes = {
        "backend": "local",
        "launch_flags": "",
        "train_flags": f"--model {chain.folder}/mine.py:make --epochs 1 --batch-size 8",
        "ingest_flags": {
            "image-size": "28",
            "split": "train=0.7,validation=0.3",
            "max-reject-rate": "0.1",
        },
        "max_record_drop": 0.5,
    }
    state, tasks, _, _, log = chain.run("2026-01-11", **changes)
    assert (state, tasks) == ("success", DONE), log[-6000:]
    state, tasks, _, xcoms, log = chain.run("2026-01-12", retries=1, **changes)
    assert (state, tasks) == ("success", DONE), log[-6000:]
    assert "ended by signal 9 (SIGKILL)" in log
    history = json.loads(Path(xcoms["launch return_value"], "history.json").read_text())
    assert len(history["epochs"]) == 1 and history["config"]["resume"]
    assert len(history["data"]) == 2

    # What is finished is not trained again, though the run did not pass the gate the first time.
    (chain.folder / "runs/last-training.json").unlink()
    state, tasks, _, _, log = chain.run("2026-01-12", **changes)
    assert (state, tasks) == ("success", DONE), log[-6000:]
    assert "is finished, so nothing is launched" in log


@pytest.mark.timeout(600)
def test_the_gate_fails_the_run(chain):
    state, tasks, _, _, log = chain.run("2026-01-01", min_accuracy=1.0)
    assert state == "failed"
    assert tasks == {**DONE, "evaluate": "failed"}
    assert "is under min_accuracy 1.0" in log
    assert not (chain.folder / "runs/last-training.json").exists()
