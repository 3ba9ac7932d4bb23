"""run_dataflow.sh against a stand-in for the service that executes what is submitted to it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from dataflow_service import DataflowService, Refused, check_job, parse_job
from helpers import INTERRUPTIBLE, ingest
from terminal import on_terminal, screen

from pipeline.config import UsageError
from pipeline.runner import plan_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "run_dataflow.sh"
FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "6"]
VALUES = {
    "PROJECT": "my-project",
    "REGION": "us-central1",
    "BUCKET": "my-bucket",
    "INPUT": "gs://my-bucket/photos/*/*",
    "OUTPUT": "gs://my-bucket/records",
    "JOB_NAME": "pictures",
    # The one that the tests run with; the script would set up .venv.
    "TPUFEED": str(Path(sys.executable).parent / "tpufeed"),
}
KNOWN = {*VALUES, "WAIT", "MAX_WORKERS", "MACHINE_TYPE", "SDK_IMAGE", "SETUP_FILE", "LABELS"}
KNOWN |= {"SERVICE_ACCOUNT", "NETWORK", "SUBNETWORK", "PUBLIC_IPS", "FLEXRS"}


def start(*words: str, **values: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in KNOWN}
    return subprocess.Popen(
        [*INTERRUPTIBLE, SCRIPT, *words],
        cwd="/",
        env={**inherited, **VALUES, **values},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*words: str, **values: str) -> subprocess.CompletedProcess[str]:
    return finish(start(*words, **values))


@pytest.fixture(scope="module")
def service(clean_install, tmp_path_factory):
    with DataflowService(clean_install.python, tmp_path_factory.mktemp("service")) as service:
        yield service


def at(service, folder: Path) -> list[str]:
    """Options that lead to the stand-in, and staged files to a folder."""
    folder.mkdir()
    places = [f"--{kind}_location={folder}" for kind in ("temp", "staging")]
    return [f"--dataflow_endpoint={service.endpoint}", "--no_auth", *places]


@pytest.fixture(scope="module")
def outcomes(service, pictures, project, tmp_path_factory):
    """Three jobs at once: one that is right, one without a module, one with too many rejects."""
    folder = tmp_path_factory.mktemp("jobs")
    lacking = folder / "lacking"
    shutil.copytree(project, lacking)
    (lacking / "transforms" / "write.py").unlink()
    spoilt = folder / "spoilt"
    shutil.copytree(pictures, spoilt)
    (spoilt / "ash" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    values = {
        "right": {},
        "lacking": {"SETUP_FILE": str(lacking / "setup.py")},
        "spoilt": {"SETUP_FILE": str(project / "setup.py"), "INPUT": f"{spoilt}/*/*"},
    }
    started = {
        name: start(
            *FLAGS,
            *at(service, folder / f"staged-{name}"),
            "--save_main_session",  # the default at any address but localhost
            **{"INPUT": f"{pictures}/*/*", "OUTPUT": str(folder / f"out-{name}"), **given},
            JOB_NAME=name,
        )
        for name, given in values.items()
    }
    return folder, {name: finish(process) for name, process in started.items()}


def job_named(service, name: str):
    (job,) = (job for job in service.jobs.values() if job.message.name == name)
    return job


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The error's one line, after it was seen that no traceback stands anywhere."""
    assert "Traceback" not in done.stderr + done.stdout
    (line,) = (
        line for line in done.stderr.splitlines() if line.startswith("tpufeed ingest: error")
    )
    assert line == done.stderr.splitlines()[-1]
    return line


def test_a_job_is_executed_from_the_staged_package(outcomes, service, dataset):
    folder, done = outcomes
    assert done["right"].returncode == 0, done["right"].stderr
    job = job_named(service, "right")
    assert f"Created job with id: [{job.message.id}]" in done["right"].stderr
    assert f"Job {job.message.id} is in state JOB_STATE_DONE" in done["right"].stderr
    assert "Traceback" not in done["right"].stderr
    assert len(done["right"].stderr.splitlines()) < 30
    local = json.loads((dataset / "dataset.json").read_text())
    remote = json.loads((folder / "out-right" / "dataset.json").read_text())
    assert remote["fingerprint"] == local["fingerprint"]
    assert f"fingerprint: {local['fingerprint']}" in done["right"].stdout


def test_a_bar_shows_the_counters_of_the_job(service, pictures, project, tmp_path):
    values = {"INPUT": f"{pictures}/*/*", "OUTPUT": str(tmp_path / "out"), "JOB_NAME": "bar"}
    values |= {"SETUP_FILE": str(project / "setup.py")}
    words = [SCRIPT, *FLAGS, *at(service, tmp_path / "staged")]
    code, out, shown = on_terminal(words, **{**VALUES, **values})
    assert code == 0, shown
    assert re.search(r"images: 100%\|.*\| 60/60 \[.*, 0 rejects\]", shown), shown
    assert not any("%|" in line for line in screen(shown))
    assert "60 records, 3 classes" in out


def test_what_was_staged_is_the_two_packages(outcomes, service):
    folder, _ = outcomes
    with tarfile.open(folder / "staged-right" / "workflow.tar.gz") as archive:
        names = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.name.endswith(".py")}
    own = {
        path.relative_to(ROOT).as_posix()
        for package in ("pipeline", "transforms")
        for path in (ROOT / package).rglob("*.py")
    }
    assert names == {"setup.py", *own}
    venv = job_named(service, "right").folder / "venv"
    installed = {path.name for path in (venv / "lib").glob("python*/site-packages/*")}
    assert {"pipeline", "transforms"} < installed
    assert "apache_beam" not in installed


def test_a_package_that_lacks_a_module_fails_by_its_name(outcomes, service):
    folder, done = outcomes
    job = job_named(service, "lacking")
    assert done["lacking"].returncode == 1
    assert error_of(done["lacking"]) == (
        f"tpufeed ingest: error: job {job.message.id}: ModuleNotFoundError: No module named "
        "'transforms.write'"
    )
    assert not (folder / "out-lacking" / "dataset.json").exists()


def test_a_job_that_fails_midway_shows_the_remote_error(outcomes, service):
    folder, done = outcomes
    job = job_named(service, "spoilt")
    output = folder / "out-spoilt"
    assert done["spoilt"].returncode == 1
    assert error_of(done["spoilt"]) == (
        f"tpufeed ingest: error: job {job.message.id}: 1 of 61 inputs were rejected "
        f"(unidentified 1), more than --max-reject-rate 0.01: see {output}/rejects.jsonl; mend "
        "the inputs, or raise the rate and go on with --resume"
    )
    assert not (output / "dataset.json").exists()
    assert (output / "rejects.jsonl").exists()


def test_the_dry_run_prints_the_job_that_is_then_sent(service, pictures, tmp_path):
    values = {"INPUT": f"{pictures}/*/*", "OUTPUT": str(tmp_path / "out"), "WAIT": "0"}
    values |= {"LABELS": "team=vision,run=nightly", "JOB_NAME": "twice", "FLEXRS": "1"}
    flags = [*FLAGS, *at(service, tmp_path / "staged")]
    dry = run("--dry-run", *flags, **values)
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "staged").iterdir()) == []
    shown = json.loads(dry.stdout)

    sent = run(*flags, **values)
    assert sent.returncode == 0, sent.stderr
    job = job_named(service, "twice")
    assert sent.stdout.splitlines() == [
        f"job {job.message.id} submitted (project my-project, region us-central1), not waited for"
    ]
    received = dict(job.received)
    assert dict(received["labels"]) == {"team": "vision", "run": "nightly"}
    for document in (shown, received):
        del document["clientRequestId"]
        options = document["environment"]["sdkPipelineOptions"]
        del options["display_data"]
        # Of the proto, in which staged files have other paths than those to be staged.
        del options["options"]["pipelineProtoHash"]
        options["options"].pop("dry_run", None)
    assert by_number(shown) == by_number(received)

    deadline = time.monotonic() + 120
    while not job.ended and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (tmp_path / "out" / "dataset.json").exists(), job.messages


def by_number(document: dict) -> dict:
    """The API's Job as JSON, with numbers for its enumerations."""
    from google.protobuf import json_format

    return json_format.MessageToDict(parse_job(document), use_integers_for_enums=True)


def test_the_dry_run_needs_neither_bucket_nor_credentials(tmp_path):
    begin = time.monotonic()
    done = run(
        *["--dry-run", "--shards", "8", "--experiments=shuffle_mode=service"],
        SDK_IMAGE="us-docker.pkg.dev/my-project/images/tpufeed:1",
        MACHINE_TYPE="e2-standard-4",
        MAX_WORKERS="7",
        SERVICE_ACCOUNT="worker@my-project.iam.gserviceaccount.com",
        NETWORK="default",
        SUBNETWORK="regions/us-central1/subnetworks/inner",
        PUBLIC_IPS="0",
        FLEXRS="1",
        BUCKET="gs://my-bucket/below/",
        GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path / "missing.json"),
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    message = parse_job(json.loads(done.stdout))
    check_job(message, project="my-project", region="us-central1")
    (pool,) = message.environment.worker_pools
    assert pool.kind == "harness"
    assert pool.machine_type == "e2-standard-4"
    assert pool.autoscaling_settings.max_num_workers == 7
    assert pool.network == "default"
    assert pool.subnetwork == "regions/us-central1/subnetworks/inner"
    assert pool.ip_configuration == 2  # private
    (image,) = pool.sdk_harness_container_images
    assert image.container_image == "us-docker.pkg.dev/my-project/images/tpufeed:1"
    assert image.use_single_core_per_container
    assert "workflow.tar.gz" not in {package.name for package in pool.packages}
    environment = message.environment
    assert environment.service_account_email == "worker@my-project.iam.gserviceaccount.com"
    assert environment.flex_resource_scheduling_goal == 2  # cost
    assert "shuffle_mode=service" in environment.experiments
    assert environment.temp_storage_prefix.startswith(
        "storage.googleapis.com/my-bucket/below/tpufeed/temp/pictures."
    )


def test_a_job_that_the_service_refuses_is_one_line(service, pictures, tmp_path):
    before = len(service.jobs)
    done = run(
        *FLAGS,
        *at(service, tmp_path / "staged"),
        INPUT=f"{pictures}/*/*",
        OUTPUT=str(tmp_path / "out"),
        LABELS="Team=vision",
    )
    assert done.returncode == 1
    line = error_of(done)
    assert line.startswith("tpufeed ingest: error: BadRequest: 400 POST http://localhost:")
    assert line.endswith(": The label Team=vision is invalid.")
    assert len(service.jobs) == before


@pytest.fixture
def held(service):
    """The service, whose jobs run to no end until the test has."""
    service.may_work.clear()
    yield service
    service.may_work.set()


def test_an_interrupted_wait_says_that_the_job_runs_on(held, pictures, tmp_path):
    service = held
    process = start(
        *FLAGS,
        *at(service, tmp_path / "staged"),
        INPUT=f"{pictures}/*/*",
        OUTPUT=str(tmp_path / "out"),
        JOB_NAME="interrupted",
    )
    for line in process.stderr:
        if "is in state" in line:
            break
    process.send_signal(signal.SIGINT)
    done = finish(process)
    job = job_named(service, "interrupted")
    assert done.returncode == 1
    assert error_of(done) == (
        f"tpufeed ingest: error: job {job.message.id}: interrupted here, but it runs on; to end "
        f"it: gcloud dataflow jobs cancel {job.message.id} --region us-central1"
    )


@pytest.mark.parametrize(
    ("place", "field"),
    [([], "nmae"), (["environment"], "workerPoolz"), (["environment", "workerPools", 0], "zones")],
)
def test_the_stand_in_refuses_unknown_fields(service, place, field):
    body = {"name": "pictures", "environment": {"workerPools": [{"kind": "harness"}]}}
    target = body
    for step in place:
        target = target[step]
    target[field] = 1
    url = f"{service.endpoint}/v1b3/projects/my-project/locations/us-central1/jobs"
    request = urllib.request.Request(url, json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 400
    assert f'no field named "{field}"' in json.load(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "Pictures"}, "job name 'Pictures' is invalid"),
        ({"type": "JOB_TYPE_STREAMING"}, "Not a batch job"),
        ({"environment": {}}, "one worker pool"),
        ({"labels": {"a": "B"}}, "label a=B is invalid"),
    ],
)
def test_the_stand_in_refuses_what_the_service_would(change, reason):
    body = {"name": "pictures", "type": "JOB_TYPE_BATCH", **change}
    with pytest.raises(Refused, match=reason):
        check_job(parse_job(body), project="my-project", region="us-central1")


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        ([], {"PROJECT": ""}, "PROJECT: not set; it is the Google Cloud project that runs the "),
        ([], {"REGION": ""}, "REGION: not set; it is the region of the workers, as in REGION=us-"),
        ([], {"BUCKET": ""}, "BUCKET: not set; it is the bucket for staged and temporary files, "),
        ([], {"INPUT": ""}, "INPUT: not set; it is the glob or CSV of the images, as in INPUT='"),
        ([], {"OUTPUT": ""}, "OUTPUT: not set; it is the folder for the TFRecords, as in OUTPUT="),
        ([], {"WAIT": "no"}, "WAIT=no: must be 0 or 1"),
        ([], {"FLEXRS": "yes"}, "FLEXRS=yes: must be 0 or 1"),
        ([], {"PUBLIC_IPS": "2"}, "PUBLIC_IPS=2: must be 0 or 1"),
        ([], {"MAX_WORKERS": "0"}, "MAX_WORKERS=0: must be 1 or more"),
        (["--dry-run"], {"SETUP_FILE": "/no/setup.py"}, "SETUP_FILE=/no/setup.py: no such file"),
    ],
)
def test_wrong_values_are_one_line_and_status_2(words, values, message):
    done = run(*words, **values)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"run_dataflow.sh: error: {message}")
    assert done.stderr.count("\n") == 1


def test_help_has_every_variable():
    done = run("--help", PROJECT="")
    assert done.returncode == 0
    assert [name for name in KNOWN if name not in done.stdout] == []
    documented = (ROOT / "docs" / "dataflow.md").read_text()
    assert [name for name in KNOWN if f"`{name}" not in documented] == []


@pytest.mark.parametrize("flag", ["--input", "--output"])
def test_local_paths_are_refused_before_anything_is_asked(flag, tmp_path):
    name = flag.removeprefix("--").upper()
    done = run(**{name: str(tmp_path / "a")})
    assert done.returncode == 2
    assert error_of(done) == (
        f"tpufeed ingest: error: {flag} {tmp_path}/a: is on this machine, where Dataflow's "
        "workers cannot reach it; give gs://BUCKET/..."
    )


def test_nobody_submits_a_job(tmp_path):
    nobody = {
        "GOOGLE_APPLICATION_CREDENTIALS": "",
        "CLOUDSDK_CONFIG": str(tmp_path),
        "NO_GCE_CHECK": "true",
    }
    done = run(**nobody)
    assert done.returncode == 1
    assert error_of(done) == (
        "tpufeed ingest: error: no Google Cloud credentials to submit the job with: gcloud auth "
        "application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
    )


@pytest.mark.parametrize(
    "flag", ["--dry_run=True", "--no_wait_until_finish", "--template_location=gs://b/t"]
)
def test_what_only_dataflow_can_do_is_refused_elsewhere(flag, pictures, tmp_path, capsys):
    assert ingest(f"{pictures}/*/*", tmp_path / "out", flag) == 2
    name = flag.partition("=")[0]
    assert capsys.readouterr().err == (
        f"tpufeed ingest: error: {name}: only with --runner=DataflowRunner; drop it\n"
    )


def test_a_template_is_written_and_not_waited_for(pictures, tmp_path):
    """What the launcher of a Flex Template asks for."""
    template = tmp_path / "staged" / "job_object"
    template.parent.mkdir()
    done = run(
        *FLAGS,
        "--dataflow_endpoint=http://localhost:1",
        "--no_auth",
        *(f"--{kind}_location={tmp_path}/staged" for kind in ("temp", "staging")),
        f"--template_location={template}",
        INPUT=f"{pictures}/*/*",
        OUTPUT=str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"template written to {template}\n"
    assert parse_job(json.loads(template.read_text())).name == "pictures"
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_the_job_does_not_depend_on_the_launchers_cores(monkeypatch):
    options = ["--runner=DataflowRunner", "--project=my-project", "--region=us-central1"]
    options += [
        "--temp_location=gs://my-bucket/t",
        "--staging_location=gs://my-bucket/s",
        "--dry_run=True",
    ]
    decoders = set()
    for cores in (1, 2, 96):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        decoders.add(plan_run(options).decoders)
    assert decoders == {2}


def test_an_option_that_beam_lacks_is_refused_before_anything_is_asked():
    with pytest.raises(UsageError, match="--max_workers=3: neither tpufeed nor Beam has such an"):
        plan_run(["--runner=DataflowRunner", "--max_workers=3"])
