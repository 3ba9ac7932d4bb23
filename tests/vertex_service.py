"""A stand-in for Vertex AI's job service, which really executes what is submitted to it.

It takes custom jobs over REST and gRPC, holds them against the API's own messages (an unknown field
is refused) and the machines that it knows, and runs the container's command on this machine, with
the image's entry point as it stands in docker/trainer.Dockerfile, by this interpreter, in an empty
folder. A TPU that the command asks for becomes none: there is none here. As at the real service, a
job's name has the project's number, whatever the project was called by.

As a process of its own, until it is terminated:

    python tests/vertex_service.py --port 8123 --log submissions.jsonl [--folder DIR]
        [--outcome O ...] [--fault METHOD=F ...]

    prints `vertex_service: http://localhost:8123` once it listens (--port 0: a free port);
    submissions.jsonl gets a line for each job that was accepted: {"name": ..., "job": the body};
    DIR/ID.log has what the job's container printed (DIR: a temporary folder).

What is to become of the next jobs (OUTCOMES), and of the next requests (FAULTS, by method: create,
get, list or cancel), is used up in the order given; after that jobs are executed, and requests
answered. --outcome preempt --fault create=lose --fault get=drop: the reply to the first submission
is lost, the first look at a job meets a closed connection, and the first job is pre-empted.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("create", "get", "list", "cancel")
# Executed, or ended by itself without; hold: RUNNING until cancelled or released.
OUTCOMES = ("run", "succeed", "fail", "preempt", "timeout", "hold")
# A status to answer with; drop: nothing is done and nothing answered; lose: done, not answered.
FAULTS = ("401", "403", "404", "429", "500", "503", "drop", "lose")
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")
# https://cloud.google.com/vertex-ai/docs/training/configure-compute, TPU v5e
TOPOLOGIES = {
    "ct5lp-hightpu-1t": {"1x1"},
    "ct5lp-hightpu-4t": {"2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"},
    "ct5lp-hightpu-8t": {"2x4"},
}
PATH = re.compile(
    r"/v1/projects/(?P<project>[^/]+)/locations/(?P<region>[^/]+)/customJobs"
    r"(?:/(?P<id>\d+)(?P<verb>:cancel)?)?"
)
PARENT = re.compile(r"projects/([^/]+)/locations/([^/]+)")
NAME = re.compile(r"projects/([^/]+)/locations/([^/]+)/customJobs/(\d+)")
TERM = re.compile(r'labels\.([-_a-z0-9]+)(?:=(?:"([^"]*)"|([-_a-z0-9]+))|(:\*))')
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
EMAIL = re.compile(r"[-a-z0-9]+@[-a-z0-9]+\.iam\.gserviceaccount\.com")
IMAGE = re.compile(r"[-a-z0-9.]+(?::\d+)?/[-a-z0-9._/]+(?::[-\w.]+|@sha256:[0-9a-f]{64})?")
FIRST_ID = 4_000_000_000_000_000_001
PAGE = 2  # jobs, where the client does not say: so that clients must turn pages
STATUS = {  # HTTP status: google.rpc.Code
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
TEXTS = {
    401: "Request had invalid authentication credentials.",
    403: "Permission 'aiplatform.customJobs.create' denied on the resource.",
    404: "The resource is not found.",
    429: "The following quota metrics exceed quota limits: "
    "aiplatform.googleapis.com/custom_model_training_tpu_v5e",
    500: "Internal error encountered.",
    503: "The service is currently unavailable.",
}


class Refused(Exception):
    """A request that is not granted.

    Args:
      code: HTTP status.
      text: why.
    """

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code, self.text = code, text


class Unanswered(Exception):
    """A request whose connection is closed in place of an answer."""


@dataclasses.dataclass
class RunningJob:
    """A job that was accepted: as it was sent, as a message, and what became of it.

    Attributes:
      received: the body as JSON.
      message: the CustomJob.
      outcome: one of OUTCOMES.
      log: what the container printed.
      argv: what was executed.
      exit_status: of the container.
      states: all that it went through.
    """

    received: dict
    message: object
    outcome: str
    log: Path
    argv: list[str] = dataclasses.field(default_factory=list)
    exit_status: int | None = None
    states: list[str] = dataclasses.field(default_factory=list)
    seen: threading.Event = dataclasses.field(default_factory=threading.Event)
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    released: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def state(self) -> str:
        return self.states[-1]


class VertexService:
    """The service, from `with` to the end of it, at `endpoint` and `grpc_address`.

    Args:
      folder: for what the jobs leave.
      port: for REST; 0 for a free one.
      log: file that gets a line for each job that was accepted.

    Attributes:
      jobs: by name, in the order of submission.
      outcomes: of the next jobs.
      faults: of the next requests, by method.
      requests: (method, JSON or query) of all requests.
      seconds_unseen: that a state stays which nobody looks at.
    """

    def __init__(self, folder: Path, *, port: int = 0, log: Path | None = None):
        self.folder, self.log = folder, log
        self.jobs: dict[str, RunningJob] = {}
        self.outcomes: collections.deque[str] = collections.deque()
        self.faults = {method: collections.deque() for method in METHODS}
        self.requests: list[tuple[str, object]] = []
        self.seconds_unseen = 1.0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._server = ThreadingHTTPServer(("localhost", port), _handler_of(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://localhost:{self._server.server_port}"
        self._grpc, grpc_port = _grpc_server_of(self)
        self.grpc_address = f"localhost:{grpc_port}"

    def __enter__(self) -> "VertexService":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            job.cancelled.set()
        for thread in self._threads:
            thread.join(30)
        self.stop()
        self._grpc.stop(None)

    def stop(self) -> None:
        """Ends REST, as a service that cannot be reached any more; jobs go on."""
        self._server.shutdown()
        self._server.server_close()

    # The methods of the API, whatever the transport

    def call(self, method: str, request: object, act: Callable[[], object]) -> object:
        """Answers a request, or fails as was asked for.

        Raises:
          Refused: with the status.
          Unanswered: the connection is to be closed.
        """
        with self._lock:
            self.requests.append((method, request))
            fault = self.faults[method].popleft() if self.faults[method] else ""
        if fault == "drop":
            raise Unanswered
        if fault.isdigit():
            raise Refused(int(fault), TEXTS[int(fault)])
        answer = act()
        if fault == "lose":
            raise Unanswered
        return answer

    def create(self, parent: str, body: dict) -> object:
        message = parse_job(body)
        project, region = parse_parent(parent)
        check_job(message)
        with self._lock:
            number = FIRST_ID + len(self.jobs)
            message.name = f"projects/{number_of(project)}/locations/{region}/customJobs/{number}"
            message.create_time.GetCurrentTime()
            job = RunningJob(
                body,
                message,
                self.outcomes.popleft() if self.outcomes else "run",
                self.folder / f"{number}.log",
            )
            self._set(job, "QUEUED")
            self.jobs[message.name] = job
            if self.log:
                with self.log.open("a") as log:
                    log.write(json.dumps({"name": message.name, "job": body}) + "\n")
            answer = copy_of(message)
        thread = threading.Thread(target=self._live, args=[job], daemon=True)
        self._threads.append(thread)
        thread.start()
        return answer

    def get(self, name: str) -> object:
        job = self._job(name)
        with self._lock:
            answer = copy_of(job.message)
        job.seen.set()
        return answer

    def list(self, parent: str, filter_text: str, size: int, token: str) -> object:
        from google.cloud import aiplatform_v1

        project, region = parse_parent(parent)
        wanted = parse_filter(filter_text)
        begin, size = int(token or 0), size or PAGE
        prefix = f"projects/{number_of(project)}/locations/{region}/"
        with self._lock:
            newest_first = [job.message for job in reversed(self.jobs.values())]
            found = [m for m in newest_first if m.name.startswith(prefix) and wanted(m.labels)]
            answer = aiplatform_v1.ListCustomJobsResponse.pb()()
            answer.custom_jobs.extend(found[begin : begin + size])
        if begin + size < len(found):
            answer.next_page_token = str(begin + size)
        return answer

    def cancel(self, name: str) -> object:
        from google.protobuf import empty_pb2

        self._job(name).cancelled.set()
        return empty_pb2.Empty()

    def _job(self, name: str) -> RunningJob:
        found = NAME.fullmatch(name)
        number = found and number_of(found[1])
        known = found and f"projects/{number}/locations/{found[2]}/customJobs/{found[3]}"
        if known not in self.jobs:
            raise Refused(404, f"The CustomJob {name} is not found.")
        return self.jobs[known]

    # A job's life

    def _set(self, job: RunningJob, state: str, code: int = 0, text: str = "") -> None:
        from google.cloud import aiplatform_v1

        job.message.state = int(aiplatform_v1.JobState[f"JOB_STATE_{state}"])
        job.message.update_time.GetCurrentTime()
        if state == "RUNNING":
            job.message.start_time.GetCurrentTime()
        if state in ENDED:
            job.message.end_time.GetCurrentTime()
        if text:
            job.message.error.code, job.message.error.message = code, text
        job.states.append(state)
        job.seen.clear()

    def _live(self, job: RunningJob) -> None:
        """Goes through the states; each stays until somebody saw it, or for a while."""
        for state in ("PENDING", "RUNNING"):
            job.seen.wait(self.seconds_unseen)
            with self._lock:
                self._set(job, state)
        if job.outcome == "run":
            end = self._execute(job)
        else:
            job.seen.wait(self.seconds_unseen)
            if job.outcome == "hold":
                while not (job.cancelled.wait(0.05) or job.released.is_set()):
                    pass
            end = ENDS[job.outcome]
        if job.cancelled.is_set():
            with self._lock:
                self._set(job, "CANCELLING")
            job.seen.wait(self.seconds_unseen)
            end = ("CANCELLED", 1, "CANCELED")
        with self._lock:
            self._set(job, *end)

    def _execute(self, job: RunningJob) -> tuple:
        (pool,) = job.message.job_spec.worker_pool_specs
        scheduling = job.message.job_spec.scheduling
        seconds = scheduling.timeout.seconds if scheduling.HasField("timeout") else 7 * 86_400
        elsewhere = Path(tempfile.mkdtemp(dir=self.folder))
        job.argv = command_of(pool.container_spec)
        with job.log.open("wb") as log:
            process = subprocess.Popen(
                job.argv,
                cwd=elsewhere,
                env=environment_of(job.message),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        late = time.monotonic() + seconds
        while process.poll() is None and not job.cancelled.wait(0.05):
            if time.monotonic() > late:
                break
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return ENDS["timeout"]  # or cancelled, which prevails
        job.exit_status = process.returncode
        if process.returncode:
            text = FAILED_TEXT.format(process.returncode)
            return ("FAILED", 3, text)
        shutil.rmtree(elsewhere)
        return ("SUCCEEDED",)


FAILED_TEXT = (
    "The replica workerpool0-0 exited with a non-zero status of {}. To find out more about why "
    "your job exited please check the logs."
)
ENDS = {
    "succeed": ("SUCCEEDED",),
    "hold": ("SUCCEEDED",),
    "fail": ("FAILED", 3, FAILED_TEXT.format(1)),
    "preempt": ("FAILED", 14, "The replica workerpool0-0 was preempted."),
    "timeout": ("EXPIRED", 4, "The job has exceeded its timeout."),
}


def number_of(project: str) -> int:
    """A project's number; a number is its own."""
    return int(project) if project.isdigit() else 10**11 + zlib.crc32(project.encode())


def copy_of(message):
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def parse_job(body: dict):
    """Returns the API's CustomJob; Refused where a field or a value is not of it."""
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    try:
        return json_format.ParseDict(body, aiplatform_v1.CustomJob.pb()())
    except json_format.ParseError as error:
        raise Refused(400, f"Invalid JSON payload received. {error}") from error


def parse_parent(parent: str) -> tuple[str, str]:
    found = PARENT.fullmatch(parent)
    if not found:
        raise Refused(400, f"Invalid parent {parent!r}.")
    return found[1], found[2]


def check_job(message) -> None:
    """Refuses what the service would not run, or would run otherwise than was meant."""
    if not 1 <= len(message.display_name) <= 128:
        raise Refused(400, "display_name must have 1 to 128 characters.")
    for field in ("name", "state", "create_time", "start_time", "end_time", "update_time", "error"):
        if field in {descriptor.name for descriptor, _ in message.ListFields()}:
            raise Refused(400, f"{field} is output only.")
    if len(message.labels) > 64:
        raise Refused(400, "More than 64 labels.")
    for key, value in message.labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            raise Refused(400, f"The label {key}={value} is invalid.")
    spec = message.job_spec
    if len(spec.worker_pool_specs) != 1:
        raise Refused(400, "A TPU job has one worker pool.")
    if spec.service_account and not EMAIL.fullmatch(spec.service_account):
        raise Refused(400, f"The service account {spec.service_account} is invalid.")
    output = spec.base_output_directory.output_uri_prefix
    if output and not output.startswith("gs://"):
        raise Refused(400, f"The output {output} is not in Cloud Storage.")
    if spec.scheduling.HasField("timeout") and spec.scheduling.timeout.seconds < 1:
        raise Refused(400, "The timeout must be positive.")
    check_pool(spec.worker_pool_specs[0])


def check_pool(pool) -> None:
    machine, container = pool.machine_spec, pool.container_spec
    if machine.machine_type not in TOPOLOGIES:
        raise Refused(400, f"Machine type {machine.machine_type!r} is not supported.")
    if machine.tpu_topology not in TOPOLOGIES[machine.machine_type]:
        raise Refused(400, f"TPU topology {machine.tpu_topology!r} is not supported.")
    if machine.accelerator_type or machine.accelerator_count:
        raise Refused(400, "A v5e machine type has its accelerators.")
    if pool.replica_count != 1:
        raise Refused(400, "A TPU worker pool has one replica.")
    if not IMAGE.fullmatch(container.image_uri):
        raise Refused(400, f"The image {container.image_uri!r} is invalid.")


def parse_filter(text: str) -> Callable[[dict], bool]:
    """Returns a test of labels: equalities and existences, joined by AND."""
    terms = []
    for part in text.split(" AND ") if text else []:
        found = TERM.fullmatch(part.strip())
        if not found:
            raise Refused(400, f"Invalid filter: {text}")
        terms.append((found[1], None if found[4] else found[2] or found[3] or ""))
    return lambda labels: all(
        key in labels and value in (None, labels[key]) for key, value in terms
    )


def entry_point() -> list[str]:
    """The image's, by the file that it is built from."""
    text = (ROOT / "docker" / "trainer.Dockerfile").read_text()
    (words,) = re.findall(r"^ENTRYPOINT (\[.+\])$", text, re.MULTILINE)
    return json.loads(words)


def command_of(container) -> list[str]:
    """What the container runs, by this interpreter and without a TPU."""
    program, *words = [*(container.command or entry_point()), *container.args]
    if program != "tpufeed":
        raise AssertionError(f"{program}: the stand-in knows how to run tpufeed only")
    words = ["--tpu=none" if word == "--tpu=local" else word for word in words]
    return [sys.executable, "-m", "pipeline", *words]


def environment_of(message) -> dict[str, str]:
    """What a container sees: nothing of this process but where to find programs."""
    names = ("HOME", "PATH", "TMPDIR", "STORAGE_EMULATOR_HOST")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    (pool,) = message.job_spec.worker_pool_specs
    env |= {variable.name: variable.value for variable in pool.container_spec.env}
    if prefix := message.job_spec.base_output_directory.output_uri_prefix.rstrip("/"):
        folders = {"MODEL": "model", "CHECKPOINT": "checkpoints", "TENSORBOARD_LOG": "logs"}
        env |= {f"AIP_{name}_DIR": f"{prefix}/{folder}/" for name, folder in folders.items()}
    return env


def _handler_of(service: VertexService) -> type[BaseHTTPRequestHandler]:
    from google.protobuf import json_format

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(data)

        def do_GET(self) -> None:
            self._answer(b"")

        def _answer(self, data: bytes) -> None:
            try:
                message = self._act(data)
            except Unanswered:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            except Refused as refused:
                error = {"code": refused.code, "status": STATUS[refused.code]}
                self._send(refused.code, {"error": {**error, "message": refused.text}})
            else:
                body = json_format.MessageToDict(message, use_integers_for_enums=True)
                self._send(200, body)

        def _act(self, data: bytes) -> object:
            address = urlsplit(self.path)
            found = PATH.fullmatch(unquote(address.path))
            if not found:
                raise Refused(404, f"{address.path} is not found.")
            query = dict(parse_qsl(address.query))
            if query.pop("$alt", "json").split(";")[0] != "json":
                raise Refused(400, "Only JSON is spoken here.")
            parent = f"projects/{found['project']}/locations/{found['region']}"
            name = f"{parent}/customJobs/{found['id']}"
            kind = (self.command, bool(found["id"]), bool(found["verb"]))
            if kind == ("POST", False, False):
                body = _parse_json(data)
                return service.call("create", body, lambda: service.create(parent, body))
            if kind == ("GET", False, False):
                return service.call("list", query, lambda: self._list(parent, query))
            if kind == ("GET", True, False):
                return service.call("get", name, lambda: service.get(name))
            if kind == ("POST", True, True):
                return service.call("cancel", name, lambda: service.cancel(name))
            raise Refused(404, f"{self.command} {address.path} is not found.")

        def _list(self, parent: str, query: dict[str, str]) -> object:
            if unknown := set(query) - {"filter", "pageSize", "pageToken"}:
                raise Refused(400, f"Unknown name {sorted(unknown)[0]!r}.")
            size = int(query.get("pageSize", 0))
            return service.list(parent, query.get("filter", ""), size, query.get("pageToken", ""))

        def _send(self, code: int, body: dict) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing: `requests` has it all."""

    return Handler


def _parse_json(data: bytes) -> dict:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise Refused(400, f"Invalid JSON payload received. {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "Invalid JSON payload received.")
    return body


def _grpc_server_of(service: VertexService):
    """The same methods over gRPC; returns the server and its port."""
    import grpc
    from google.cloud import aiplatform_v1 as api
    from google.protobuf import json_format

    def handler(method: str, request_type, act):
        def answer(request, context):
            try:
                return service.call(method, request, lambda: act(request))
            except Refused as refused:
                context.abort(getattr(grpc.StatusCode, STATUS[refused.code]), refused.text)
            except Unanswered:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=request_type.pb()().FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    def create(request):
        return service.create(request.parent, json_format.MessageToDict(request.custom_job))

    def list_jobs(request):
        return service.list(request.parent, request.filter, request.page_size, request.page_token)

    handlers = {
        "CreateCustomJob": handler("create", api.CreateCustomJobRequest, create),
        "GetCustomJob": handler("get", api.GetCustomJobRequest, lambda r: service.get(r.name)),
        "ListCustomJobs": handler("list", api.ListCustomJobsRequest, list_jobs),
        "CancelCustomJob": handler(
            "cancel", api.CancelCustomJobRequest, lambda r: service.cancel(r.name)
        ),
    }
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    name = "google.cloud.aiplatform.v1.JobService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])
    return server, server.add_insecure_port("localhost:0")


def _parse_fault(text: str) -> tuple[str, str]:
    method, _, fault = text.partition("=")
    if method not in METHODS or fault not in FAULTS:
        raise argparse.ArgumentTypeError(f"{text}: METHOD of {METHODS}, =, one of {FAULTS}")
    return method, fault


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for Vertex AI's job service.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--outcome", action="append", choices=OUTCOMES, default=[])
    parser.add_argument("--fault", action="append", type=_parse_fault, default=[])
    args = parser.parse_args()
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    with tempfile.TemporaryDirectory(prefix="vertex-service-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with VertexService(folder.resolve(), port=args.port, log=args.log) as service:
            service.outcomes.extend(args.outcome)
            for method, fault in args.fault:
                service.faults[method].append(fault)
            print(f"vertex_service: {service.endpoint}", flush=True)
            end.wait()


if __name__ == "__main__":
    main()
