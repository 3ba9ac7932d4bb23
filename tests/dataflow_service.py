"""A stand-in for the Dataflow service, which really executes what is submitted to it.

It takes the requests of Beam's own client, holds them against the API's messages (an unknown field
is refused), and runs the job as a worker would: the staged package is installed into a fresh
virtual environment, the staged pipeline is loaded there by another process, which cannot see the
project, and executed. States and messages go back to the client that waits.

Called as a program it is that other process: dataflow_service.py PIPELINE OPTIONS [SESSION]
"""

import dataclasses
import email
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PATH = re.compile(
    r"/v1b3/projects/([^/]+)/locations/([^/]+)/jobs(?:/([^/]+)(/messages|/metrics)?)?"
)
JOB_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,1022}[a-z0-9])?")
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
SECONDS = 300  # for each step of a job
COUNTERS = "counters.json"


class Refused(Exception):
    """A request that the API does not accept."""


class Failed(Exception):
    """A job that did not come to its end; the text is what the worker says."""


@dataclasses.dataclass(frozen=True)
class CleanInstall:
    """What `pip install SDIST` made of an empty virtual environment.

    Attributes:
      python: of the environment, from which the package itself was removed again.
      sdist: the package.
      facts: what was measured while it was there.
    """

    python: Path
    sdist: Path
    facts: dict


@dataclasses.dataclass
class RunningJob:
    """A job that was accepted: as it was sent, as a message, and what became of it."""

    received: dict
    message: object
    folder: Path
    messages: list[dict] = dataclasses.field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.message.current_state in (_state("DONE"), _state("FAILED"))

    @property
    def options(self) -> dict:
        from google.protobuf import json_format

        return json_format.MessageToDict(self.message.environment.sdk_pipeline_options)["options"]


class DataflowService:
    """The service, from `with` to the end of it, at `endpoint`.

    Args:
      python: of a virtual environment with what the package requires, and not the package.
      folder: for what each job leaves.
    """

    def __init__(self, python: Path, folder: Path):
        self.python = python
        self.folder = folder
        self.jobs: dict[str, RunningJob] = {}
        self.may_work = threading.Event()  # cleared, jobs run and get nowhere
        self.may_work.set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("localhost", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> "DataflowService":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def create(self, project: str, region: str, body: dict) -> dict:
        message = parse_job(body)
        check_job(message, project=project, region=region)
        with self._lock:
            number = len(self.jobs) + 1
            message.id = f"2026-01-01_00_00_00-{number:04d}"
            message.project_id, message.location = project, region
            message.current_state = _state("PENDING")
            message.create_time.GetCurrentTime()
            folder = self.folder / f"job-{number:04d}"
            folder.mkdir(parents=True)
            job = self.jobs[message.id] = RunningJob(body, message, folder)
        threading.Thread(target=self._run, args=[job], daemon=True).start()
        return _to_json(message)

    def get(self, job_id: str) -> dict:
        return _to_json(self.jobs[job_id].message)

    def list_messages(self, job_id: str, since: str) -> dict:
        found = [m for m in self.jobs[job_id].messages if m["time"] >= since]
        return {"jobMessages": found}

    def metrics(self, job_id: str) -> dict:
        """The counters of a job that has ended, each as the service tells it: twice."""
        path = self.jobs[job_id].folder / COUNTERS
        if not path.exists():
            return {}
        updates = []
        for namespace, name, value in json.loads(path.read_text()):
            for context in ({}, {"tentative": "true"}):
                context |= {"namespace": namespace, "step": "s1"}
                full = {"origin": "user", "name": name, "context": context}
                updates.append({"name": full, "scalar": value})
        return {"metrics": updates}

    def _run(self, job: RunningJob) -> None:
        self._say(job, "JOB_MESSAGE_BASIC", "Worker configuration: this machine.")
        job.message.current_state = _state("RUNNING")
        self.may_work.wait()
        try:
            artifacts = staged_files(job)
            python = self._install(job, artifacts)
            self._execute(job, python, artifacts)
        except Failed as failure:
            self._say(job, "JOB_MESSAGE_ERROR", f"Error message from worker: {failure}")
            self._say(job, "JOB_MESSAGE_ERROR", WORKFLOW_FAILED)
            job.message.current_state = _state("FAILED")
        else:
            job.message.current_state = _state("DONE")

    def _say(self, job: RunningJob, importance: str, text: str) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        number = len(job.messages)
        job.messages.append(
            {"id": str(number), "time": now, "messageImportance": importance, "messageText": text}
        )

    def _install(self, job: RunningJob, artifacts: dict[str, Path]) -> Path:
        """A fresh environment with the staged package; returns its Python.

        What the package requires is looked for in the base environment only (--no-index), so a
        requirement that is not there fails as it would on a worker that cannot get it.
        """
        venv = job.folder / "venv"
        _call([self.python, "-m", "venv", "--without-pip", venv])
        python = venv / "bin" / "python"
        (site_packages(python) / "base.pth").write_text(f"{site_packages(self.python)}\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        if package := artifacts.get("workflow.tar.gz"):
            _call([*pip, "install", *OFFLINE, package])
        return python

    def _execute(self, job: RunningJob, python: Path, artifacts: dict[str, Path]) -> None:
        options = job.folder / "options.json"
        options.write_text(json.dumps(job.options))
        elsewhere = job.folder / "cwd"
        elsewhere.mkdir()
        command = [python, "-I", Path(__file__).resolve(), job.options["pipelineUrl"], options]
        session = [artifacts[name] for name in artifacts if name == "pickled_main_session"]
        _call([*command, *session], cwd=elsewhere)


# Beam's client passes over what says "work item was attempted" for an error that says more.
WORKFLOW_FAILED = "Workflow failed. Causes: A work item was attempted 4 times without success."
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"


def _call(command: list, **kwargs: object) -> str:
    """Returns what it prints; Failed with all that it says where it fails."""
    names = ("HOME", "PATH", "TMPDIR", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS")
    done = subprocess.run(
        list(map(str, command)),
        env={name: os.environ[name] for name in names if name in os.environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        **kwargs,
    )
    if done.returncode:
        raise Failed(done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


def parse_job(body: dict):
    """Returns the API's Job; Refused where a field or a value is not of it."""
    from google.cloud import dataflow
    from google.protobuf import json_format

    try:
        return json_format.ParseDict(body, dataflow.Job.pb()(), ignore_unknown_fields=False)
    except json_format.ParseError as error:
        raise Refused(f"Invalid JSON payload received. {error}") from error


def check_job(message, *, project: str, region: str) -> None:
    """Refuses what the service would not run, or would run otherwise than was meant."""
    environment = message.environment
    if not JOB_NAME.fullmatch(message.name):
        raise Refused(f"The job name {message.name!r} is invalid.")
    for key, value in message.labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise Refused(f"The label {key}={value} is invalid.")
    if message.type_ != 1:
        raise Refused("Not a batch job.")
    if len(environment.worker_pools) != 1:
        raise Refused("A job has one worker pool.")
    if not environment.worker_pools[0].sdk_harness_container_images:
        raise Refused("No image for the workers.")
    if not environment.temp_storage_prefix:
        raise Refused("No folder for temporary files.")
    try:
        options = environment.sdk_pipeline_options["options"]
    except (KeyError, ValueError) as error:
        raise Refused("No pipeline options.") from error
    for name, wanted in (("project", project), ("region", region)):
        if options[name] != wanted:
            raise Refused(f"The options say {name} {options[name]}, the address {wanted}.")
    if "pipelineUrl" not in options:
        raise Refused("No pipeline was staged.")


def staged_files(job: RunningJob) -> dict[str, Path]:
    """The staged artifacts by name, after their sha256 and that of the pipeline were compared."""
    from apache_beam.portability.api import beam_runner_api_pb2 as api

    data = Path(job.options["pipelineUrl"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != job.options["pipelineProtoHash"]:
        raise Failed("the staged pipeline is not the one that was submitted")
    artifacts = {}
    for environment in api.Pipeline.FromString(data).components.environments.values():
        for part in environment.dependencies:
            file = api.ArtifactFilePayload.FromString(part.type_payload)
            role = api.ArtifactStagingToRolePayload.FromString(part.role_payload)
            if hashlib.sha256(Path(file.path).read_bytes()).hexdigest() != file.sha256:
                raise Failed(f"{file.path}: not the file that was staged")
            artifacts[role.staged_name] = Path(file.path)
    packages = {package.name for package in job.message.environment.worker_pools[0].packages}
    if not set(artifacts) <= packages:
        raise Failed(f"the job names {packages}, the pipeline {set(artifacts)}")
    return artifacts


def build_sdist(project: Path, folder: Path) -> Path:
    """Builds the package as Beam does for --setup_file where there is no `build`."""
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder]
    _call(command, cwd=project)
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def install_sdist(sdist: Path, folder: Path) -> CleanInstall:
    """Installs the package and what it requires, and nothing else; measures; removes the package.

    What it requires is taken from the environment that the tests run in, by metadata, and linked:
    a download takes minutes. pip then decides whether that is all, since it may look nowhere else.

    Args:
      sdist: the package.
      folder: for the environment; on the file system of this one, else files are copied.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _call([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    # setuptools: what the image of the workers builds the package with.
    link_distributions(requirements_of(sdist) | {"setuptools"}, site_packages(python))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    _call([*pip, "install", *OFFLINE, sdist])
    _call([*pip, "check"])
    facts = json.loads(_call([python, "-I", "-c", MEASURE], cwd="/"))
    _call([*pip, "uninstall", "--quiet", "--yes", "tpufeed"])
    return CleanInstall(python, sdist, facts)


OFFLINE = ("--quiet", "--no-index", "--no-build-isolation", "--no-cache-dir")


def site_packages(python: Path) -> Path:
    return Path(_call([python, "-c", SITE_PACKAGES]))


def requirements_of(sdist: Path) -> set[str]:
    """The requirements that the package states."""
    with tarfile.open(sdist) as archive:
        name = min((n for n in archive.getnames() if n.endswith("/PKG-INFO")), key=len)
        info = email.message_from_bytes(archive.extractfile(name).read())
    return set(info.get_all("Requires-Dist"))


def link_distributions(requirements: set[str], target: Path) -> None:
    """Links what is required, and what that requires, from this environment into another."""
    from packaging.requirements import Requirement

    todo, seen = [Requirement(text) for text in requirements], set()
    todo = [need for need in todo if not need.marker or need.marker.evaluate({"extra": ""})]
    while todo:
        need = todo.pop()
        own = importlib.metadata.distribution(need.name)
        for extra in {"", *need.extras}:
            if (own.name, extra) in seen:
                continue
            seen.add((own.name, extra))
            for further in map(Requirement, own.requires or ()):
                if not further.marker or further.marker.evaluate({"extra": extra}):
                    todo.append(further)
    for name in {name for name, _ in seen}:
        for path in importlib.metadata.distribution(name).files:
            if ".." not in path.parts:
                link = target / path
                link.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path.locate(), link)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        pass  # in the list of files, and removed since
    except OSError:
        shutil.copyfile(source, target)


MEASURE = """
import importlib.metadata, json, os, sys, time
def peak():  # getrusage would count what the process that started this one holds
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
names = sorted(d.metadata["Name"].lower() for d in importlib.metadata.distributions())
begin = time.perf_counter()
import apache_beam
between = time.perf_counter()
before = peak()
import pipeline.ingest
end = time.perf_counter()
own = importlib.metadata.distribution("tpufeed")
print(json.dumps({
    "packages": names,
    "files": sorted(str(path) for path in own.files if path.suffix == ".py"),
    "bytes": sum(own.locate_file(p).stat().st_size for p in own.files if p.suffix != ".pyc"),
    "total_bytes": sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(own.locate_file(""))
        for name in names
    ),
    "seconds_beam": between - begin,
    "seconds": end - between,
    "kib_beam": before,
    "kib": peak(),
    "loaded": sorted({name.split(".")[0] for name in sys.modules}),
    "from": os.path.dirname(pipeline.__file__),
}))
"""


def _state(name: str) -> int:
    from google.cloud import dataflow

    return int(dataflow.JobState[f"JOB_STATE_{name}"])


def _to_json(message) -> dict:
    from google.protobuf import json_format

    return json_format.MessageToDict(message, use_integers_for_enums=True)


def _handler_of(service: DataflowService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(
                lambda project, region, job_id, part, query: service.create(project, region, body)
            )

        def do_GET(self) -> None:
            def get(project, region, job_id, part, query):
                if part == "/messages":
                    return service.list_messages(job_id, query.get("startTime", [""])[0])
                return service.metrics(job_id) if part == "/metrics" else service.get(job_id)

            self._answer(get)

        def _answer(self, answer) -> None:
            address = urlsplit(self.path)
            found = PATH.fullmatch(address.path)
            try:
                if not found:
                    raise KeyError(self.path)
                self._send(200, answer(*found.groups(), parse_qs(address.query)))
            except Refused as error:
                self._send_error(400, "INVALID_ARGUMENT", str(error))
            except KeyError as error:
                self._send_error(404, "NOT_FOUND", f"not found: {error}")

        def _send_error(self, code: int, status: str, text: str) -> None:
            self._send(code, {"error": {"code": code, "status": status, "message": text}})

        def _send(self, code: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    return Handler


def parse_number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def work(pipeline: str, options: str, session: str = "") -> None:
    """What a worker does: runs the pipeline with the options that came with the job."""
    from apache_beam.internal import pickler
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.pipeline_options import PipelineOptions, SetupOptions
    from apache_beam.portability.api import beam_runner_api_pb2
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner
    from apache_beam.transforms.environments import EmbeddedPythonEnvironment

    # The API's numbers are all floats, JSON's are not.
    given = json.loads(Path(options).read_text(), parse_float=parse_number)
    settings = PipelineOptions.from_dictionary(given)
    FileSystems.set_options(settings)
    pickler.set_library(settings.view_as(SetupOptions).pickle_library)
    if session:
        pickler.load_session(session)
    proto = beam_runner_api_pb2.Pipeline.FromString(Path(pipeline).read_bytes())
    embedded = EmbeddedPythonEnvironment.default().to_runner_api(None)
    for environment in proto.components.environments.values():
        environment.CopyFrom(embedded)
    result = FnApiRunner().run_via_runner_api(proto, settings)
    result.wait_until_finish()
    counters: dict[tuple[str, str], int] = {}
    for counter in result.metrics().query()["counters"]:
        name = counter.key.metric.namespace, counter.key.metric.name
        counters[name] = counters.get(name, 0) + counter.result
    told = [[*name, value] for name, value in counters.items()]
    Path(options).with_name(COUNTERS).write_text(json.dumps(told))


if __name__ == "__main__":
    work(*sys.argv[1:])
