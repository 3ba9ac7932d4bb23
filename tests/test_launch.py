"""`tpufeed launch`, on this machine and against a stand-in for Vertex AI that executes the job."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from gcs_emulator import serve
from google.api_core.client_options import ClientOptions
from google.api_core.exceptions import BadRequest
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform_v1
from helpers import INTERRUPTIBLE, draw, ingest
from vertex_service import VertexService, check_job, parse_job

from pipeline import launch, vertex
from pipeline.__main__ import main
from pipeline.config import LaunchConfig, TrainConfig
from transforms import files
from transforms.manifest import Split, dump_manifest, load_manifest

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "us-docker.pkg.dev/my-project/images/trainer:1"
TRAIN = ["--model", "lenet5", "--epochs", "1", "--batch-size", "8"]
REPORT = r"\[Epoch 0\] Training Loss: .+ Test Accuracy: \d+/\d+ \(.+%\) seconds per epoch: [\d.]+"
ATTACH = "to follow it: tpufeed launch --backend vertex --job {name} --endpoint {endpoint}"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """60 gray pictures of 28x28: 4 shards to train on, 2 to test on; read only."""
    folder = tmp_path_factory.mktemp("digits")
    for number in range(60):
        draw(folder / "in" / "abc"[number % 3] / f"{number:02d}.jpg", seed=number)
    flags = "--image-size 28 --channels 1 --encoding png --split train=0.7,validation=0.3"
    output = folder / "records"
    assert ingest(f"{folder}/in/*/*", output, *flags.split(), "--shards", "6") == 0
    shards = load_manifest(str(output)).splits["train"].shards
    assert len(shards) == 4
    return output


@pytest.fixture
def silence(monkeypatch, tmp_path):
    """A machine without credentials, on a network that swallows the question who it is.

    Returns the socket that the question would come to.
    """
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_TIMEOUT", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nobody"))
    with socket.create_server(("127.0.0.1", 0)) as hole:
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{hole.getsockname()[1]}")
        yield hole


def calls(hole: socket.socket) -> int:
    """How often it was called."""
    hole.settimeout(0.1)
    number = 0
    try:
        while True:
            hole.accept()[0].close()
            number += 1
    except TimeoutError:
        return number


@pytest.fixture
def service(tmp_path, silence):
    with VertexService(tmp_path, log=tmp_path / "submissions.jsonl") as service:
        yield service
    assert calls(silence) == 0  # nothing was ever asked who this machine is


def words(service, digits, output, *flags: str, train=TRAIN) -> list[str]:
    return [
        *("launch", "--backend", "vertex", "--endpoint", service.endpoint, "--poll", "0.05"),
        *("--project", "my-project", "--region", "us-west1", "--image", IMAGE),
        *("--data", str(digits), "--output", str(output), *flags, "--", *train),
    ]


def start(*argv: str, cwd="/") -> subprocess.Popen[str]:
    """The command as a process of its own, that interrupts reach."""
    return subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "pipeline", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What it prints up to a line that has the text; the tests' own time limit bounds it."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"no {text!r} in {''.join(lines)}: {process.stderr.read()}")


def only_job(service):
    (job,) = service.jobs.values()
    return job


def client_of(service, transport="grpc"):
    """The library's own client, for what others do to a job."""
    if transport == "rest":
        return aiplatform_v1.JobServiceClient(
            credentials=AnonymousCredentials(),
            transport="rest",
            client_options=ClientOptions(api_endpoint=service.endpoint),
        )
    import grpc
    from google.cloud.aiplatform_v1.services.job_service import transports

    channel = grpc.insecure_channel(service.grpc_address)
    return aiplatform_v1.JobServiceClient(
        transport=transports.JobServiceGrpcTransport(channel=channel)
    )


def states(out: str, name: str) -> list[str]:
    return re.findall(rf"^(?:run )?{re.escape(name)}: ([A-Z]+) after \d+ s$", out, re.MULTILINE)


def error_line(text: str) -> str:
    """The error's one line, the last."""
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("tpufeed launch: error: ")]
    assert lines == text.splitlines()[-1:]
    return lines[0].removeprefix("tpufeed launch: error: ")


# What is sent


def test_the_request_is_this_json(service, digits, tmp_path, monkeypatch, capsys):
    """With everything that can be set; the data set in a bucket."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # Beam's own look at the bucket asks, rightly
    files._sign_in.cache_clear()
    service.outcomes.append("succeed")
    with serve("records", "runs") as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
        for path in digits.rglob("*"):
            if path.is_file():
                name = path.relative_to(digits).as_posix()
                store.put(f"gs://records/digits/{name}", path.read_bytes())
        flags = ["--run", "nightly-7", "--machine-type", "ct5lp-hightpu-4t", "--spot"]
        flags += ["--timeout", "90m", "--labels", "team=vision,cost-center=42"]
        flags += ["--service-account", "trainer@my-project.iam.gserviceaccount.com"]
        argv = words(service, "gs://records/digits", "gs://runs/7", *flags)
        assert main(argv) == 0, capsys.readouterr().err
    files._sign_in.cache_clear()
    golden = json.loads("""
{
  "displayName": "nightly-7",
  "labels": {"tpufeed-run": "nightly-7", "team": "vision", "cost-center": "42"},
  "jobSpec": {
    "workerPoolSpecs": [
      {
        "machineSpec": {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"},
        "replicaCount": "1",
        "containerSpec": {
          "imageUri": "us-docker.pkg.dev/my-project/images/trainer:1",
          "args": [
            "--data=gs://records/digits",
            "--model", "lenet5", "--epochs", "1", "--batch-size", "8",
            "--output=gs://runs/7",
            "--tpu=local"
          ]
        }
      }
    ],
    "scheduling": {"timeout": "5400s", "strategy": 4, "disableRetries": true},
    "serviceAccount": "trainer@my-project.iam.gserviceaccount.com",
    "baseOutputDirectory": {"outputUriPrefix": "gs://runs/7"}
  }
}
""")
    assert only_job(service).received == golden
    line = (tmp_path / "submissions.jsonl").read_text()
    assert json.loads(line) == {"name": only_job(service).message.name, "job": golden}
    out = capsys.readouterr().out
    assert "42 training records in 4 shards; 1 host(s), 4 replica(s) of batch 8, global" in out
    assert "global batch 32; 1 steps an epoch, 1 in 1 epoch(s)" in out


def test_without_flags_the_request_has_the_defaults():
    train = TrainConfig(data=("gs://b/d",), model="convnet", output="gs://b/r")
    config = LaunchConfig("vertex", train, image=IMAGE, project="p", region="us-west1")
    assert vertex.make_job(config, run="r", args=["--x"]) == {
        "displayName": "r",
        "labels": {"tpufeed-run": "r"},
        "jobSpec": {
            "workerPoolSpecs": [
                {
                    "machineSpec": {"machineType": "ct5lp-hightpu-1t", "tpuTopology": "1x1"},
                    "replicaCount": "1",
                    "containerSpec": {"imageUri": IMAGE, "args": ["--x"]},
                }
            ],
            "scheduling": {"timeout": "86400s", "strategy": "STANDARD", "disableRetries": True},
            "baseOutputDirectory": {"outputUriPrefix": "gs://b/r"},
        },
    }


@pytest.mark.parametrize("machine", vertex.SHAPES)
def test_every_shape_is_one_that_the_service_takes(machine):
    for topology, shape in vertex.SHAPES[machine].items():
        chips = 1
        for side in topology.split("x"):
            chips *= int(side)
        assert shape.chips == chips
        # The last part of the name: how many chips a machine has.
        assert shape.hosts * int(re.fullmatch(r".*-(\d)t", machine)[1]) == chips
        train = TrainConfig(data=("gs://b/d",), model="convnet", output="gs://b/r")
        config = LaunchConfig(
            "vertex",
            train,
            image=IMAGE,
            machine_type=machine,
            tpu_topology=topology,
            hosts=shape.hosts,
        )
        check_job(parse_job(vertex.make_job(config, run="r", args=[])))


# What becomes of it


@pytest.fixture(scope="module")
def executed(digits, tmp_path_factory):
    """Two jobs that are really executed, at once: one right, one whose trainer refuses."""
    folder = tmp_path_factory.mktemp("executed")
    with VertexService(folder) as service:
        started = {
            "right": start(*words(service, digits, folder / "right", "--run", "right")),
            "wrong": start(
                *words(service, digits, folder / "wrong", "--run", "wrong"),
                *("--weights", str(folder / "missing.keras")),
            ),
        }
        done = {name: (*p.communicate(timeout=300), p.returncode) for name, p in started.items()}
        jobs = {job.message.display_name: job for job in service.jobs.values()}
    return folder, done, jobs


def test_a_job_that_succeeds_has_trained(executed, digits):
    folder, done, jobs = executed
    out, err, status = done["right"]
    job = jobs["right"]
    assert (status, err) == (0, ""), job.log.read_text()
    assert states(out, job.message.name) == ["QUEUED", "PENDING", "RUNNING", "SUCCEEDED"]
    assert re.search(REPORT, job.log.read_text())
    history = json.loads((folder / "right" / "history.json").read_text())
    assert [len(history["epochs"]), history["config"]["data"]] == [1, [str(digits)]]
    assert history["data"] == [load_manifest(str(digits)).fingerprint]


def test_a_job_that_fails_is_status_1_with_what_the_service_says(executed):
    folder, done, jobs = executed
    out, err, status = done["wrong"]
    job = jobs["wrong"]
    name = job.message.name
    assert status == 1
    assert states(out, name) == ["QUEUED", "PENDING", "RUNNING", "FAILED"]
    number = name.rpartition("/")[2]
    assert error_line(err) == (
        f"{name}: FAILED: The replica workerpool0-0 exited with a non-zero status of 1. To find "
        "out more about why your job exited please check the logs.; its log: gcloud ai "
        f"custom-jobs stream-logs {number} --project {name.split('/')[1]} --region us-west1"
    )
    assert "missing.keras" in job.log.read_text()
    assert job.exit_status == 1


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("preempt", ": pre-empted, its spot machines were taken back (FAILED: The replica"),
        ("timeout", ": ran out of its --timeout (EXPIRED: The job has exceeded its timeout.): "),
        ("fail", ": FAILED: The replica workerpool0-0 exited with a non-zero status of 1."),
    ],
)
def test_other_ends_are_status_1_and_say_what_to_do(
    service, digits, tmp_path, capsys, outcome, expected
):
    service.outcomes.append(outcome)
    assert main(words(service, digits, tmp_path / "run", "--spot")) == 1
    line = error_line(capsys.readouterr().err)
    assert line.startswith(only_job(service).message.name + expected)
    assert ("launch again with --resume after --" in line) == (outcome != "fail")


def test_a_job_that_outlives_its_timeout_is_ended(service, digits, tmp_path, capsys):
    """Really executed, and killed by the service."""
    assert main(words(service, digits, tmp_path / "run", "--timeout", "1s")) == 1
    line = error_line(capsys.readouterr().err)
    assert ": ran out of its --timeout (EXPIRED: " in line
    assert only_job(service).exit_status is None


def test_a_job_that_somebody_cancels_is_status_1(service, digits, tmp_path, capsys):
    service.outcomes.append("hold")

    def cancel() -> None:
        client = client_of(service)  # over gRPC
        for _ in range(600):
            for job in client.list_custom_jobs(parent="projects/my-project/locations/us-west1"):
                if job.state.name == "JOB_STATE_RUNNING":
                    client.cancel_custom_job(name=job.name)
                    return
            time.sleep(0.05)

    somebody = threading.Thread(target=cancel)
    somebody.start()
    status = main(words(service, digits, tmp_path / "run"))
    somebody.join()
    out, err = capsys.readouterr()
    name = only_job(service).message.name
    assert status == 1
    assert states(out, name)[-3:] == ["RUNNING", "CANCELLING", "CANCELLED"]
    assert error_line(err).startswith(f"{name}: was cancelled by somebody (CANCELLED: CANCELED): ")


def end(state: str, code: int = 0, text: str = "", strategy: str = "STANDARD"):
    return aiplatform_v1.CustomJob(
        state=f"JOB_STATE_{state}",
        error={"code": code, "message": text},
        job_spec={"scheduling": {"strategy": strategy}},
    )


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (end("SUCCEEDED"), ""),
        (end("FAILED"), "FAILED: without a message; see its log"),
        (end("FAILED", 14, "Instance was pre-empted.", "SPOT"), "pre-empted, its spot machines"),
        # Only spot machines are: whoever says so of others means something else.
        (end("FAILED", 14, "preempted"), "FAILED: preempted"),
        (end("CANCELLED", 0, "The job timed out."), "ran out of its --timeout (CANCELLED: "),
        (end("FAILED", 4, "late"), "ran out of its --timeout (FAILED: late)"),
        (end("PARTIALLY_SUCCEEDED", 0, "some"), "PARTIALLY_SUCCEEDED: some"),
        (end("FAILED", 3, "two\nlines"), "FAILED: two lines"),
    ],
)
def test_every_end_is_explained(job, expected):
    text = vertex.explain_end(job, spot=False)
    assert text.startswith(expected) and bool(text) == bool(expected)


# Requests that fail


def test_quota_that_stays_exceeded_is_status_1(service, digits, tmp_path, capsys):
    service.faults["create"].extend(["429"] * 5)
    assert main(words(service, digits, tmp_path / "run", "--poll", "0.001")) == 1
    out, err = capsys.readouterr()
    assert service.jobs == {}
    assert error_line(err) == (
        "project my-project, region us-west1: out of quota, 5 times: 429 The following quota "
        "metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_tpu_v5e: "
        "ask for more, try another --region or a smaller --machine-type, or later"
    )
    assert [method for method, _ in service.requests].count("create") == 5
    assert out.count("looking again in") == 5


@pytest.mark.parametrize("fault", ["429", "503", "drop"])
def test_a_refusal_that_passes_is_asked_again(service, digits, tmp_path, capsys, fault):
    service.faults["create"].append(fault)
    service.outcomes.append("succeed")
    assert main(words(service, digits, tmp_path / "run")) == 0
    assert only_job(service).state == "SUCCEEDED"
    assert "looking again in 0.05 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("403", "permission denied: 403 Permission 'aiplatform.customJobs.create' denied on the "),
        ("404", "the service refused: 404 The resource is not found."),
    ],
)
def test_a_refusal_that_stays_is_not(service, digits, tmp_path, capsys, fault, expected):
    service.faults["create"].append(fault)
    assert main(words(service, digits, tmp_path / "run")) == 1
    line = error_line(capsys.readouterr().err)
    assert line.startswith(f"project my-project, region us-west1: {expected}")
    assert [method for method, _ in service.requests] == ["list", "create"]


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
def test_a_lost_reply_does_not_submit_twice(service, digits, tmp_path, capsys, outcome):
    """Not even where the job has failed by the time that it is looked for."""
    service.faults["create"].append("lose")
    service.outcomes.append(outcome)
    service.seconds_unseen = 0.01
    status = main(words(service, digits, tmp_path / "run", "--poll", "0.5"))
    assert status == {"succeed": 0, "fail": 1}[outcome]
    out = capsys.readouterr().out
    assert "no answer (ConnectionError); looking again in 0.5 s" in out
    assert "it had been submitted" in out
    assert only_job(service).state == {"succeed": "SUCCEEDED", "fail": "FAILED"}[outcome]


def test_a_lost_reply_with_nothing_after_it_is_told_and_found_by_the_next_launch(
    service, digits, tmp_path, capsys
):
    service.faults["create"].append("lose")
    service.faults["list"].extend(["", *["drop"] * 5])
    service.outcomes.append("hold")
    argv = words(service, digits, tmp_path / "run", "--poll", "0.001")
    assert main(argv) == 1
    assert error_line(capsys.readouterr().err) == (
        "project my-project, region us-west1: the service cannot be reached: no answer "
        "(ConnectionError), 5 times; there may be a job all the same: the same command finds it, "
        "or else submits it"
    )
    only_job(service).released.set()
    assert main(argv) == 0
    assert "found, so nothing is submitted" in capsys.readouterr().out
    assert only_job(service).state == "SUCCEEDED"


def test_a_connection_that_is_lost_once_while_following_is_made_again(
    service, digits, tmp_path, capsys
):
    service.faults["get"].extend(["", "drop", "503"])
    service.outcomes.append("succeed")
    assert main(words(service, digits, tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "no answer (ConnectionError); asking again in 0.05 s" in out
    assert "503 The service is currently unavailable.; asking again in 0.1 s" in out


def test_a_service_that_goes_away_while_following_is_status_1_and_says_how_to_attach(
    service, digits, tmp_path, capsys
):
    service.faults["get"].extend(["", *["drop"] * 5])
    service.outcomes.append("hold")
    assert main(words(service, digits, tmp_path / "run", "--poll", "0.001")) == 1
    name = only_job(service).message.name
    assert error_line(capsys.readouterr().err) == (
        f"{name}: project my-project, region us-west1: the service cannot be reached: no answer "
        "(ConnectionError), 5 times; the job itself is not ended by this, "
        + ATTACH.format(name=name, endpoint=service.endpoint)
    )
    only_job(service).released.set()
    attach = ["--job", name, "--endpoint", service.endpoint, "--poll", "0.05"]
    assert main(["launch", "--backend", "vertex", *attach]) == 0
    assert states(capsys.readouterr().out, name)[-1] == "SUCCEEDED"
    assert len(service.jobs) == 1


# Left, found, followed again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_job_and_says_how_to_attach(service, digits, tmp_path, number):
    service.outcomes.append("hold")
    process = start(*words(service, digits, tmp_path / "run"))
    try:
        read_until(process, ": RUNNING after")
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    job = only_job(service)
    name = job.message.name
    place = f"--project {name.split('/')[1]} --region us-west1"
    assert process.returncode == 1
    assert error_line(err) == (
        f"{name}: interrupted here, but it runs on; "
        + ATTACH.format(name=name, endpoint=service.endpoint)
        + f"; to end it: gcloud ai custom-jobs cancel {name.rpartition('/')[2]} {place}"
    )
    assert job.state == "RUNNING" and not job.cancelled.is_set()

    # What it says is done as it stands there.
    command = re.search(r"to follow it: (tpufeed launch .+?);", err)[1].split()
    job.released.set()
    process = start(*command[1:], "--poll", "0.05")
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert states(out, name)[-1] == "SUCCEEDED"


def test_detached_found_again_and_never_submitted_twice(service, digits, tmp_path, capsys):
    service.outcomes.append("hold")
    argv = words(service, digits, tmp_path / "run")
    at = argv.index("--")
    assert main([*argv[:at], "--detach", *argv[at:]]) == 0
    out = capsys.readouterr().out
    job = only_job(service)
    assert out.splitlines()[-1] == f"{job.message.name}: QUEUED, not waited for"
    assert ATTACH.format(name=job.message.name, endpoint=service.endpoint) in out

    job.released.set()
    for _ in range(2):  # while it runs, and after it has ended
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert "found, so nothing is submitted" in out
        assert states(out, job.message.name)[-1] == "SUCCEEDED"
    assert len(service.jobs) == 1


def test_a_job_that_failed_is_submitted_again(service, digits, tmp_path, capsys):
    service.outcomes.extend(["fail", "preempt", "succeed"])
    argv = words(service, digits, tmp_path / "run")
    assert [main(argv) for _ in range(4)] == [1, 1, 0, 0]
    assert [job.state for job in service.jobs.values()] == ["FAILED", "FAILED", "SUCCEEDED"]


def test_the_label_finds_among_pages_of_others(service, digits, tmp_path, capsys):
    """Other runs, other regions, and the same name in another project."""
    train = TrainConfig(data=("gs://b/d",), model="convnet", output="gs://b/r")
    config = LaunchConfig("vertex", train, image=IMAGE)
    service.outcomes.extend(["succeed"] * 9)
    argv = words(service, digits, tmp_path / "run", "--run", "mine")
    assert main(argv) == 0
    for number in range(5):
        other = vertex.make_job(config, run=f"other-{number}", args=[])
        service.create("projects/my-project/locations/us-west1", other)
    for parent in ("projects/p/locations/us-west1", "projects/my-project/locations/us-east1"):
        service.create(parent, vertex.make_job(config, run="mine", args=[]))
    capsys.readouterr()
    assert main(argv) == 0
    assert "found, so nothing is submitted" in capsys.readouterr().out
    filters = [query["filter"] for method, query in service.requests if method == "list"]
    assert set(filters) == {'labels.tpufeed-run="mine"'}


def test_a_name_that_another_work_has_is_refused(service, digits, tmp_path, capsys):
    service.outcomes.append("succeed")
    assert main(words(service, digits, tmp_path / "run", "--run", "mine")) == 0
    capsys.readouterr()
    train = ["--model", "lenet5", "--epochs", "2", "--batch-size", "8"]
    assert main(words(service, digits, tmp_path / "run", "--run", "mine", train=train)) == 1
    assert error_line(capsys.readouterr().err) == (
        f"--run mine: {only_job(service).message.name} has this name, but another image, machine "
        "or other arguments; give another --run"
    )


def test_a_run_is_named_by_its_data_flags_and_output(digits):
    train = TrainConfig(data=(str(digits),), model="lenet5", output="/r")
    config = LaunchConfig("vertex", train, ("--model", "lenet5"))
    name = launch.name_run(config, ["f"])
    assert re.fullmatch(r"tpufeed-[0-9a-f]{16}", name)
    resumed = dataclasses.replace(config, train_flags=("--model", "lenet5", "--resume"))
    assert launch.name_run(resumed, ["f"]) == name
    elsewhere = dataclasses.replace(config, train=dataclasses.replace(train, output="/s"))
    longer = dataclasses.replace(config, train_flags=("--model", "lenet5", "--epochs", "9"))
    others = [
        launch.name_run(config, ["g"]),
        *(launch.name_run(c, ["f"]) for c in (elsewhere, longer)),
    ]
    assert len({name, *others}) == 4


def test_a_job_that_is_not_there(service, capsys):
    flags = ["--project", "p", "--region", "us-west1", "--endpoint", service.endpoint]
    assert main(["launch", "--backend", "vertex", "--job", "12", *flags]) == 1
    assert error_line(capsys.readouterr().err).startswith(
        "projects/p/locations/us-west1/customJobs/12: project p, region us-west1: the service "
        "refused: 404 The CustomJob projects/p/locations/us-west1/customJobs/12 is not found.; "
    )


# Refused before anything is sent


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--machine-type", "n1-standard-4"], "--machine-type n1-standard-4: allowed are ct5lp-"),
        (["--tpu-topology", "3x3"], "--tpu-topology 3x3: with ct5lp-hightpu-1t allowed are 1x1"),
        (
            ["--machine-type", "ct5lp-hightpu-4t", "--tpu-topology", "4x4"],
            "--hosts 1: ct5lp-hightpu-4t in topology 4x4 is 4 host(s); give --hosts 4, or a slice",
        ),
        (["--hosts", "0"], "--hosts 0: must be 1 or more"),
        (["--image", ""], "--image '': is empty; give a value or drop the flag"),
        (["--region", "moon"], "--region moon: must be a region, as in us-west1"),
        (["--timeout", "soon"], "--timeout soon: must be a time such as 3600, 90m, 24h or 7d"),
        (["--timeout", "0"], "--timeout 0s: allowed are 1s to 30d"),
        (["--poll", "0"], "--poll 0: must be more than 0"),
        (["--run", "Nightly"], "--run Nightly: allowed are up to 63 lower-case letters, digits,"),
        (["--labels", "Team=a"], "--labels Team=a: 'Team=a': give each KEY=VALUE once, of lower"),
        (["--labels", "tpufeed-run=a"], "--labels tpufeed-run=a: 'tpufeed-run=a': give each KEY"),
        (["--endpoint", "http://example.com"], "--endpoint http://example.com: must be https://"),
        (["--backend", "slurm"], "--backend slurm: allowed are local, vertex"),
        (["--job", "12"], "--job 12: has its data and flags; drop --data, --output and --"),
        (["--frob"], "--frob: tpufeed launch has no such argument; flags of tpufeed train go "),
    ],
)
def test_wrong_arguments_are_status_2(service, digits, tmp_path, capsys, flags, message):
    assert main(words(service, digits, tmp_path / "run", *flags)) == 2
    assert error_line(capsys.readouterr().err).startswith(message)
    assert service.requests == []


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (["--model", "lenet6"], "--model lenet6: allowed are lenet5, convnet"),
        (["--tpu", "none"], "--tpu, --zone, --project after --: the job's own TPU is used; drop"),
        (["--data", "d"], "--data: give it before --"),
        (["--output", "elsewhere"], "--output elsewhere: is given twice, before -- and after it"),
        (["--frob"], "--frob: tpufeed train has no such argument"),
        (["--epochs", "0"], "--epochs 0: must be 1 or more"),
    ],
)
def test_wrong_flags_of_train_are_status_2(service, digits, tmp_path, capsys, train, message):
    argv = words(service, digits, tmp_path / "run", train=["--model", "lenet5", *train])
    assert main(argv) == 2
    assert error_line(capsys.readouterr().err).startswith(message)
    assert service.requests == []


REMOTE = ["launch", "--backend", "vertex", "--project", "p", "--region", "us-west1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*REMOTE, "--image", IMAGE, "--data", "/d", "--output", "gs://b/r"],
            "--data /d: is on this machine, where the TPU's cannot reach it; give gs://BUCKET/...",
        ),
        (
            [*REMOTE, "--image", IMAGE, "--data", "gs://b/d", "--output", "/r"],
            "--output /r: is on this machine, where the TPU's cannot reach it; give gs://BUCKET",
        ),
        ([*REMOTE, "--data", "gs://b/d", "--output", "gs://b/r"], "--image: not given; it is made"),
        ([*REMOTE, "--image", IMAGE, "--data", "gs://b/d"], "--output: not given, so nothing of"),
        (
            [*REMOTE[:3], "--data", "gs://b/d", "--output", "gs://b/r"],
            "--project: not given; where",
        ),
        ([*REMOTE], "--data: give at least one folder that tpufeed ingest made"),
    ],
)
def test_what_cannot_run_there_is_status_2(silence, capsys, argv, message):
    flags = ["--", "--model", "lenet5"]
    assert main([*argv, *flags]) == 2
    assert error_line(capsys.readouterr().err).startswith(message)
    assert calls(silence) == 0


@pytest.mark.parametrize("flag", ["--weights", "--transform"])
def test_every_path_of_train_must_be_reachable(silence, capsys, flag):
    argv = [*REMOTE, "--image", IMAGE, "--data", "gs://b/d", "--output", "gs://b/r"]
    assert main([*argv, "--", "--model", "lenet5", flag, "/w"]) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith(f"{flag} /w: is on this machine")
    assert main([*argv, "--", "--model", "mine.py:build"]) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith("--model mine.py:build: is on this machine; copy the file into the")


def test_too_few_shards_for_the_hosts(service, digits, tmp_path, capsys):
    flags = ["--machine-type", "ct5lp-hightpu-4t", "--tpu-topology", "4x8", "--hosts", "8"]
    train = ["--model", "lenet5", "--batch-size", "1"]
    assert main(words(service, digits, tmp_path / "run", *flags, train=train)) == 1
    assert error_line(capsys.readouterr().err) == (
        f"{digits}: split train has 4 shard(s), and each of 8 hosts reads shards of its own: "
        "ingest with --shards 8 or more for this split, or use fewer hosts"
    )
    assert service.requests == []


def test_too_few_records_for_a_step(service, digits, tmp_path, capsys):
    flags = ["--machine-type", "ct5lp-hightpu-8t"]
    assert main(words(service, digits, tmp_path / "run", *flags)) == 1
    assert error_line(capsys.readouterr().err) == (
        f"{digits}: split train has 42 records, a step of 8 replica(s) takes 64: --batch-size 5 "
        "or less"
    )
    assert service.requests == []


def test_data_that_are_not_whole_cost_nothing(service, digits, tmp_path, capsys):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(digits, spoilt)
    shard = next(spoilt.glob("train-00001-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(words(service, spoilt, tmp_path / "run")) == 1
    line = error_line(capsys.readouterr().err)
    assert line.startswith(f"{spoilt}: not whole: {shard.name}")
    assert main(words(service, tmp_path / "nothing", tmp_path / "run")) == 1
    assert "dataset.json" in error_line(capsys.readouterr().err)
    assert main(words(service, digits, tmp_path / "run", "--data", str(digits))) == 1
    assert "a folder is given twice" in error_line(capsys.readouterr().err)
    assert service.requests == []


def changed(folder, target, *, drop: str = "", **fields) -> Path:
    """A copy of a data set, whole but without a split, or with other fields in dataset.json."""
    copy = shutil.copytree(folder, target)
    manifest = load_manifest(str(copy))
    splits = {name: split for name, split in manifest.splits.items() if name != drop}
    if drop:
        for path in [*copy.glob(f"{drop}-*"), *copy.glob(f"index/{drop}-*")]:
            path.unlink()
    manifest = dataclasses.replace(manifest, **{"splits": splits, **fields})
    (copy / "dataset.json").write_bytes(dump_manifest(manifest))
    return copy


def test_what_train_would_refuse_is_refused_before_anything_is_asked(
    service, digits, tmp_path, capsys
):
    def refusal(data, *flags: str) -> str:
        assert main(words(service, data, tmp_path / "run", *flags)) == 1
        assert not service.requests
        return error_line(capsys.readouterr().err)

    bare = changed(digits, tmp_path / "bare", drop="validation")
    lacks = f"{bare}: no split validation, only train: ingest with --split train=0.9,validation=0.1"
    assert refusal(digits, "--data", str(bare)) == lacks
    assert refusal(bare) == lacks.replace("validation, only", "validation or test, only")
    # There is something to test on, but not in the split that is taken.
    splits = load_manifest(str(digits)).splits
    none = Split(records=0, classes=dict.fromkeys("abc", 0), shards=())
    splits = {"train": splits["train"], "validation": none}
    empty = changed(bare, tmp_path / "empty", splits=splits)
    assert (
        refusal(empty) == f"{empty}: split validation is empty: ingest more, or with other shares"
    )
    varying = changed(digits, tmp_path / "varying", image_size=None)
    message = f"{varying}: pictures of varying size; give --image-size N or WxH"
    assert refusal(varying) == message
    copy = shutil.copytree(digits, tmp_path / "copy")
    line = refusal(digits, "--data", str(copy))
    assert f"stands in {digits} and in {copy} (60 such keys): its record would count twice" in line
    assert "--root at a folder above both" in line
    line = refusal("gs://b/r", "--data", "gs://b/r/")
    assert line == "--data gs://b/r/: a folder is given twice; its records would count twice"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mode", "eager"], "--mode eager: a TPU runs compiled programs only; use --mode xla"),
        (
            ["--mode", "xla", "--dump-hlo", "gs://b/hlo"],
            "--dump-hlo: not on a TPU; train on one CPU or GPU for it, or drop it",
        ),
    ],
)
def test_what_no_tpu_does_is_status_2(service, digits, tmp_path, capsys, flags, message):
    argv = words(service, digits, tmp_path / "run", train=["--model", "lenet5", *flags])
    assert main(argv) == 2
    assert error_line(capsys.readouterr().err) == message
    assert service.requests == []


def test_a_run_that_is_there_is_not_spoilt(service, digits, tmp_path, capsys):
    output = tmp_path / "run"
    argv = words(service, digits, output)
    assert main([*argv, "--resume"]) == 1
    assert error_line(capsys.readouterr().err) == (f"{output}: no run to go on with: drop --resume")
    output.mkdir()
    (output / "history.json").write_text("{}")
    assert main(argv) == 1
    assert error_line(capsys.readouterr().err) == (
        f"{output}: there is a run in it: give a new folder as --output, or --resume after --"
    )
    assert main([*argv, "--resume"]) == 1
    assert f"{output}/history.json: not as tpufeed train writes" in capsys.readouterr().err
    (output / "history.json").write_text('{"epochs": [{}, {}, {}]}')
    assert main([*argv, "--resume"]) == 1
    assert error_line(capsys.readouterr().err) == (
        f"--epochs 1: {output} has 3 already: give --epochs 3 or more"
    )
    assert service.jobs == {}


# Without credentials, without a stall


FIND = """
import time
import google.auth.compute_engine
import google.auth.transport.requests
from google.auth.exceptions import DefaultCredentialsError
from transforms.credentials import find_credentials

times = []
for _ in range(3):  # the best of them: machines that run tests stand still at times
    begin = time.monotonic()
    try:
        find_credentials("https://www.googleapis.com/auth/cloud-platform")
    except DefaultCredentialsError:
        times.append(time.monotonic() - begin)
print(min(times, default="found"))
"""


@pytest.mark.parametrize("listens", [True, False], ids=["silent", "refuses"])
def test_that_there_are_no_credentials_is_known_in_time(silence, listens):
    """Where the question is swallowed, and where nobody listens; google-auth takes 12 and 3 s."""
    if not listens:
        silence.close()
    # A process of its own: google-auth reads the address as it is imported.
    done = subprocess.run(
        [sys.executable, "-c", FIND], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert float(done.stdout) < 2
    if listens:
        assert calls(silence) == 3


def test_credentials_are_found_where_the_machine_is_googles(monkeypatch, silence):
    """A metadata server that answers is asked as the library asks it."""
    server = MetadataServer()
    with server:
        monkeypatch.setenv("GCE_METADATA_IP", server.address)
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)
        done = subprocess.run(
            [sys.executable, "-c", FIND], capture_output=True, text=True, cwd=ROOT, check=True
        )
    assert done.stdout == "found\n", done.stderr
    assert server.paths[0] == "/"


class MetadataServer:
    """As on a machine of Google's, as far as google-auth asks."""

    def __init__(self):
        self.paths = paths = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                data = b"my-project"
                self.send_response(200)
                self.send_header("Metadata-Flavor", "Google")
                self.send_header("Content-Type", "application/text")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_the_real_service_is_not_asked_without_credentials(silence):
    flags = ["--project", "p", "--region", "us-west1"]
    process = start("launch", "--backend", "vertex", "--job", "12", *flags)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert error_line(err) == (
        "no Google Cloud credentials to submit the job with: gcloud auth application-default "
        "login, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
    )
    assert calls(silence) == 1


# On this machine


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """One epoch on this machine, called in a folder with another package of our name."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "__init__.py").write_text("")
    (folder / "pipeline" / "__main__.py").write_text("raise SystemExit(7)")
    process = subprocess.run(
        [Path(sys.executable).parent / "tpufeed", *local(digits, "run")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return folder / "run", process


def local(digits, output, *flags: str, train=TRAIN) -> list[str]:
    places = ["--data", str(digits), "--output", str(output), *flags]
    return ["launch", "--backend", "local", *places, "--", *train]


def test_one_epoch_of_lenet_is_trained_and_reported_as_a_far_one_is(trained, executed, digits):
    output, done = trained
    assert done.returncode == 0, done.stderr
    plan, *lines = done.stdout.splitlines()
    run = plan.split(":")[0].removeprefix("run ")
    assert plan == (
        f"run {run}: 42 training records in 4 shards; 1 host(s), 1 replica(s) of batch 8, global "
        "batch 8; 5 steps an epoch, 5 in 1 epoch(s)"
    )
    assert states(done.stdout, run) == ["RUNNING", "SUCCEEDED"]
    (report,) = (line for line in lines if re.fullmatch(REPORT, line))
    history = json.loads((output / "history.json").read_text())
    (epoch,) = history["epochs"]
    assert f"Training Accuracy: {epoch['training']['correct']}/40" in report
    assert history["data"] == [load_manifest(str(digits)).fingerprint]
    # The far job is told in the same words, but for its own name and the times before it runs.
    folder, far, jobs = executed
    name = jobs["right"].message.name
    assert states(far["right"][0], name)[-2:] == states(done.stdout, run)
    assert far["right"][0].splitlines()[0].partition(": ")[2] == plan.partition(": ")[2]
    assert re.search(REPORT, jobs["right"].log.read_text())


def test_a_local_run_that_fails_is_status_1(digits, tmp_path):
    process = start(*local(digits, tmp_path / "run", train=[*TRAIN, "--weights", "/missing.keras"]))
    out, err = process.communicate(timeout=240)
    run = out.split(":")[0].removeprefix("run ")
    assert process.returncode == 1
    assert states(out, run) == ["RUNNING", "FAILED"]
    assert error_line(err) == f"run {run}: FAILED: exit status 1; what it said stands above"
    assert "tpufeed train: error: " in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_local_run(digits, tmp_path, number):
    process = start(*local(digits, tmp_path / "run", "--run", "mine"))
    try:
        read_until(process, "run mine: RUNNING")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 30
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        (child,) = children.read_text().split()
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1
    assert states("run mine: RUNNING after 0 s\n" + out, "mine") == ["RUNNING", "CANCELLED"]
    assert error_line(err).startswith("run mine: interrupted, and ended: launch again with --res")
    assert not Path(f"/proc/{child}").exists()


def test_an_interrupt_waits_until_the_process_has_a_name():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(KeyboardInterrupt), launch._interrupts_later():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--detach"], "--detach: a local run ends with this command; drop the flag"),
        (["--timeout", "1w"], "--timeout 1w: must be a time such as 3600, 90m, 24h or 7d"),
    ],
)
def test_wrong_arguments_of_a_local_run_are_status_2(digits, tmp_path, capsys, flags, message):
    assert main(local(digits, tmp_path / "run", *flags)) == 2
    assert error_line(capsys.readouterr().err) == message


def test_how_a_process_ended_is_told():
    assert launch.describe_status(3) == "exit status 3"
    assert launch.describe_status(-9) == "ended by signal 9 (SIGKILL)"


def test_the_job_sees_its_folders(digits):
    assert launch.environment("gs://b/run") == {
        "AIP_MODEL_DIR": "gs://b/run/model/",
        "AIP_CHECKPOINT_DIR": "gs://b/run/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": "gs://b/run/logs/",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda job: job.update(jobName="x"), 'no field named "jobName"'),
        (lambda job: job["jobSpec"].update(tpu="2x2"), 'no field named "tpu"'),
        (lambda job: job["labels"].update(Team="a"), "The label Team=a is invalid."),
        (lambda job: job.pop("displayName"), "display_name must have 1 to 128 characters."),
        (lambda job: job.update(name="projects/1/x"), "name is output only."),
        (lambda job: pool(job)["machineSpec"].update(tpuTopology="9x9"), "TPU topology '9x9' is"),
        (lambda job: pool(job)["machineSpec"].update(machineType="e2"), "Machine type 'e2' is not"),
        (lambda job: pool(job).update(replicaCount="2"), "A TPU worker pool has one replica."),
        (lambda job: pool(job)["containerSpec"].update(imageUri="x"), "The image 'x' is invalid."),
    ],
)
@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_the_stand_in_refuses_what_the_service_would(service, change, message, transport):
    train = TrainConfig(data=("gs://b/d",), model="convnet", output="gs://b/r")
    job = vertex.make_job(LaunchConfig("vertex", train, image=IMAGE), run="r", args=[])
    change(job)
    parent = "projects/p/locations/us-west1"
    if "no field" in message:  # the library itself would not send it
        url = f"{service.endpoint}/v1/{parent}/customJobs"
        answer = requests.post(url, json=job, timeout=30)
        assert (answer.status_code, service.jobs) == (400, {})
        assert message in answer.json()["error"]["message"]
        return
    with pytest.raises(BadRequest, match=re.escape(message)):
        client_of(service, transport).create_custom_job(
            parent=parent, custom_job=vertex._to_message(job)
        )
    assert service.jobs == {}


def pool(job: dict) -> dict:
    (only,) = job["jobSpec"]["workerPoolSpecs"]
    return only


@pytest.mark.parametrize("transport", ["rest", "grpc"])
def test_both_transports_tell_the_same_of_a_job(service, transport):
    train = TrainConfig(data=("gs://b/d",), model="convnet", output="gs://b/r")
    job = vertex.make_job(LaunchConfig("vertex", train, image=IMAGE), run="r", args=["--x"])
    service.outcomes.append("succeed")
    client = client_of(service, transport)
    parent = "projects/p/locations/us-west1"
    made = client.create_custom_job(parent=parent, custom_job=vertex._to_message(job))
    assert made.job_spec.worker_pool_specs[0].container_spec.args == ["--x"]
    seen = [client.get_custom_job(name=made.name).state.name for _ in range(400)]
    order = [f"JOB_STATE_{state}" for state in ("QUEUED", "PENDING", "RUNNING", "SUCCEEDED")]
    assert [state for state in order if state in seen] == order
    assert seen == sorted(seen, key=order.index)
    wanted = {"parent": parent, "filter": 'labels.tpufeed-run="r"'}
    assert [found.name for found in client.list_custom_jobs(wanted)] == [made.name]
    wanted["filter"] = "labels.tpufeed-run=other"
    assert list(client.list_custom_jobs(wanted)) == []
    with pytest.raises(BadRequest, match="Invalid filter"):
        client.list_custom_jobs({"parent": parent, "filter": "labels=r"})


def test_the_stand_in_is_a_program_too(tmp_path, digits, capsys):
    log = tmp_path / "submissions.jsonl"
    command = [sys.executable, ROOT / "tests" / "vertex_service.py", "--log", log]
    command += ["--outcome", "preempt", "--outcome", "succeed", "--fault", "create=lose"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")
    try:
        endpoint = process.stdout.readline().removeprefix("vertex_service: ").strip()
        service = types.SimpleNamespace(endpoint=endpoint)
        argv = words(service, digits, tmp_path / "run", "--spot")
        assert [main(argv), main(argv)] == [1, 0], capsys.readouterr()
        assert len(log.read_text().splitlines()) == 2
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
