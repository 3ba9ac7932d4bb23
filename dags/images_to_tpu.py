"""Images of one day into TFRecords, verified, a training job launched on the last days, judged.

ingest -> verify -> launch -> evaluate. One data interval, one folder: OUTPUT/YYYY-MM-DD.
docs/airflow.md has the parameters, backfills, and how a second DAG follows the data set.
"""

from __future__ import annotations

import datetime
import shlex

from airflow.providers.apache.beam.operators.beam import BeamRunPythonPipelineOperator
from airflow.sdk import Asset, Param, chain, dag, task
from airflow.sdk.exceptions import AirflowSkipException

RECORDS = Asset(name="tpufeed_records", uri="x-tpufeed://records")
PARAMS = {
    "python": Param("/opt/tpufeed/bin/python", type="string", minLength=1),
    "input": Param("/data/{ds}/*/*", type="string", minLength=1),
    "output": Param("/data/records", type="string", pattern="^(/|gs://)."),
    "runs": Param("/data/runs", type="string", pattern="^(/|gs://)."),
    "ingest_flags": Param({"split": "train=0.9,validation=0.1"}, type="object"),
    "runner": Param("DirectRunner", type="string", enum=["DirectRunner", "DataflowRunner"]),
    "backend": Param("local", type="string", enum=["local", "vertex"]),
    "launch_flags": Param("", type="string"),
    "train_flags": Param("--model lenet5 --epochs 1", type="string", minLength=1),
    "folders": Param(7, type="integer", minimum=1, maximum=366),
    "max_record_drop": Param(0.1, type="number", minimum=0, maximum=1),
    "min_accuracy": Param(0.5, type="number", minimum=0, maximum=1),
}


class Ingest(BeamRunPythonPipelineOperator):
    """The provider's operator, with options that are known only when the run starts."""

    def execute(self, context):
        """Fills in the run's parameters and starts `python -m pipeline ingest`."""
        import tpufeed_steps as steps

        params, day = context["params"], steps.check_day(context.get("ds"))
        self.py_interpreter, self.runner = params["python"], params["runner"]
        root = steps.root_of(params["input"])
        self.pipeline_options = {
            **({"root": root} if root else {}),
            **params["ingest_flags"],
            "input": params["input"].replace("{ds}", day),
            "output": steps.folder_of(params["output"], day),
            "overwrite": True,
        }
        super().execute(context)


@task(outlets=[RECORDS])
def verify(params=None, ds=None, outlet_events=None) -> str:
    """Verifies the day's folder and holds its records against the day before; returns its path."""
    import tpufeed_steps as steps

    folder, python = steps.folder_of(params["output"], ds), params["python"]
    steps.tpufeed(python, "verify", folder)
    today = steps.read_json(python, f"{folder}/dataset.json")
    before = steps.folder_of(params["output"], steps.days_before(ds, 2)[0])
    earlier = steps.read_json(python, f"{before}/dataset.json")
    if earlier is None:
        print(f"{before}: no data set of the day before; the fall of records is not checked")
    else:
        steps.check_records(
            steps.records_of(today),
            before=steps.records_of(earlier),
            max_drop=params["max_record_drop"],
        )
    outlet_events[RECORDS].extra = {"folder": folder}
    return folder


@task
def launch(params=None, ds=None) -> str:
    """Launches training on the last folders unless they were trained on; returns the run's path."""
    import tpufeed_steps as steps

    python, flags = params["python"], shlex.split(params["train_flags"])
    days = steps.days_before(ds, params["folders"])
    folders = [steps.folder_of(params["output"], day) for day in days]
    manifests = {f: steps.read_json(python, f"{f}/dataset.json") for f in folders}
    prints = {f: m["fingerprint"] for f, m in manifests.items() if m}
    last = steps.read_json(python, f"{params['runs']}/{steps.LAST}")
    if last and last["fingerprints"] == sorted(prints.values()):
        raise AirflowSkipException(f"the data has not changed since {last['run']} was trained")
    # A retry has the same name, and so finds the job that was submitted before, or goes on with
    # what a job that failed has left.
    name = steps.run_name(ds, list(prints.values()), flags)
    run = steps.folder_of(params["runs"], name)
    history = steps.read_json(python, f"{run}/history.json")
    if history and steps.is_finished(history):
        print(f"{run}: is finished, so nothing is launched")
        return run
    flags += ["--resume"] if history else []
    data = [word for folder in prints for word in ("--data", folder)]
    backend = ["--backend", params["backend"], "--run", name, *shlex.split(params["launch_flags"])]
    steps.tpufeed(python, "launch", *data, *backend, "--", *flags, "--output", run)
    return run


@task
def evaluate(run: str, params=None) -> None:
    """Fails under the minimum accuracy; else notes what was trained on."""
    import tpufeed_steps as steps

    path = f"{run}/history.json"
    history = steps.read_json(params["python"], path)
    if history is None:
        raise ValueError(f"{path}: not there; the training run left no history")
    accuracy = steps.accuracy_of(history, path=path)
    steps.check_accuracy(accuracy, minimum=params["min_accuracy"], path=path)
    done = {"run": run, "fingerprints": sorted(history["data"])}
    steps.write_json(params["python"], params["runs"], steps.LAST, done)


@dag(
    schedule="@daily",
    start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args={"retries": 2, "retry_delay": datetime.timedelta(minutes=5)},
    tags=["tpufeed"],
)
def images_to_tpu():
    """One day's images into records, then training on the last days' folders."""
    ingest = Ingest(task_id="ingest", py_file="ingest", py_options=["-m", "pipeline"])
    checked, run = verify(), launch()
    chain(ingest, checked, run)
    evaluate(run)


images_to_tpu()
