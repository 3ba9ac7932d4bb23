"""Training jobs on Vertex AI: what is sent, how a job is found again, followed, and explained.

One request submits, and the service knows no request id: so that no job is submitted twice, a job
is looked for by its label before the request, and after every request that may have arrived.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import HISTORY, RUN_LABEL, LaunchConfig, UsageError
from transforms.credentials import find_credentials
from transforms.files import is_remote
from transforms.records import DataError

Note = Callable[[str], None]

_LOST = ("FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
_ENDED = ("SUCCEEDED", *_LOST)
_NAME = re.compile(
    r"projects/(?P<project>[^/]+)/locations/(?P<region>[^/]+)/customJobs/(?P<id>\d+)"
)
_REGION = re.compile(r"[a-z]+-[a-z]+\d+")
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# Of a request: a service that does not answer must not hold the caller for ever.
_SECONDS = 60
_ATTEMPTS = 5
_LONGEST_PAUSE = 60
_QUOTA = 429
_PASSING = (408, _QUOTA, 500, 502, 503, 504)
_REQUEST = re.compile(r"(GET|POST) https?://\S+: ")  # what the client puts before it
_MOST = 400  # characters of what the service says
_DEADLINE_EXCEEDED = 4  # google.rpc.Code


@dataclasses.dataclass(frozen=True)
class Shape:
    """A TPU slice: its chips, a replica of the model each, and the machines that hold them."""

    chips: int
    hosts: int


# TPU v5e: https://cloud.google.com/vertex-ai/docs/training/configure-compute
SHAPES: Mapping[str, Mapping[str, Shape]] = {
    "ct5lp-hightpu-1t": {"1x1": Shape(1, 1)},
    "ct5lp-hightpu-4t": {
        "2x2": Shape(4, 1),
        "2x4": Shape(8, 2),
        "4x4": Shape(16, 4),
        "4x8": Shape(32, 8),
        "8x8": Shape(64, 16),
        "8x16": Shape(128, 32),
        "16x16": Shape(256, 64),
    },
    "ct5lp-hightpu-8t": {"2x4": Shape(8, 1)},
}


def shape_of(config: LaunchConfig) -> tuple[str, Shape]:
    """Returns the topology and what it is made of.

    Raises:
      UsageError: an unknown machine type or topology, or --hosts that are not the topology's.
    """
    topologies = SHAPES.get(config.machine_type)
    if topologies is None:
        raise UsageError(
            f"--machine-type {config.machine_type}: allowed are {', '.join(SHAPES)} (TPU v5e)"
        )
    name = config.tpu_topology or next(iter(topologies))
    if name not in topologies:
        raise UsageError(
            f"--tpu-topology {name}: with {config.machine_type} allowed are {', '.join(topologies)}"
        )
    shape = topologies[name]
    if config.hosts != shape.hosts:
        single = ", ".join(f"{m} {t}" for m, s in SHAPES.items() for t in s if s[t].hosts == 1)
        raise UsageError(
            f"--hosts {config.hosts}: {config.machine_type} in topology {name} is {shape.hosts} "
            f"host(s); give --hosts {shape.hosts}, or a slice of one host ({single})"
        )
    return name, shape


def check_config(config: LaunchConfig) -> None:
    """Refuses, before anything is asked or spent, what cannot run there.

    Raises:
      UsageError: names the flag, the value, what is allowed and the remedy.
    """
    _check_endpoint(config.endpoint)
    _location(config)
    if config.train is None:
        return
    if not config.image:
        raise UsageError("--image: not given; it is made of docker/trainer.Dockerfile")
    shape_of(config)
    if config.train.tpu not in ("auto", "local") or config.train.zone or config.train.project:
        raise UsageError("--tpu, --zone, --project after --: the job's own TPU is used; drop them")
    if config.train.mode == "eager":
        raise UsageError("--mode eager: a TPU runs compiled programs only; use --mode xla")
    if config.train.dump_hlo:
        raise UsageError("--dump-hlo: not on a TPU; train on one CPU or GPU for it, or drop it")
    if not is_local(config.endpoint):
        _check_paths(config)


def is_local(endpoint: str | None) -> bool:
    """Whether the service stands on this machine: it sees local files, and asks nobody's name."""
    parts = urlsplit(endpoint or "")
    return parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS


def _check_endpoint(endpoint: str | None) -> None:
    scheme = urlsplit(endpoint).scheme if endpoint else "https"
    if scheme != "https" and not is_local(endpoint):
        raise UsageError(
            f"--endpoint {endpoint}: must be https://HOST, or http://localhost:PORT; to any other "
            "the credentials would travel unprotected"
        )


def _check_paths(config: LaunchConfig) -> None:
    train = config.train
    assert train is not None
    weights = None if train.weights == "imagenet" else train.weights
    flags = [*(("--data", folder) for folder in train.data), ("--output", train.output)]
    flags += [("--weights", weights), ("--transform", train.transform)]
    for flag, path in flags:
        if path and not is_remote(path):
            raise UsageError(
                f"{flag} {path}: is on this machine, where the TPU's cannot reach it; give "
                "gs://BUCKET/..."
            )
    if ".py:" in train.model and not train.model.startswith("/"):
        raise UsageError(
            f"--model {train.model}: is on this machine; copy the file into the image, and give "
            "its whole path there"
        )


def _location(config: LaunchConfig) -> tuple[str, str]:
    """Project and region."""
    if found := _NAME.fullmatch(config.job or ""):
        return found["project"], found["region"]
    if config.job and not config.job.isdigit():
        raise UsageError(
            f"--job {config.job}: must be projects/P/locations/R/customJobs/ID, or ID with "
            "--project and --region"
        )
    for flag, value, example in (
        ("--project", config.project, "my-project"),
        ("--region", config.region, "us-west1"),
    ):
        if not value:
            raise UsageError(f"{flag}: not given; where the job runs, as in {flag} {example}")
    assert config.project and config.region
    if not _REGION.fullmatch(config.region):
        raise UsageError(f"--region {config.region}: must be a region, as in us-west1")
    return config.project, config.region


def make_job(config: LaunchConfig, *, run: str, args: Sequence[str]) -> dict[str, Any]:
    """Returns the CustomJob as JSON of the API.

    Args:
      config: checked by check_config.
      run: the run's name.
      args: what follows the image's entry point, `tpufeed train`.
    """
    assert config.train is not None and config.train.output is not None
    topology, _ = shape_of(config)
    spec: dict[str, Any] = {
        "workerPoolSpecs": [
            {
                "machineSpec": {"machineType": config.machine_type, "tpuTopology": topology},
                # One worker, whatever the number of hosts: the topology has it.
                "replicaCount": "1",
                "containerSpec": {"imageUri": config.image, "args": list(args)},
            }
        ],
        "scheduling": {
            "timeout": f"{config.timeout}s",
            "strategy": "SPOT" if config.spot else "STANDARD",
            # Begun again by the service, the same command would refuse its own half-filled folder.
            "disableRetries": True,
        },
    }
    if is_remote(config.train.output):
        spec["baseOutputDirectory"] = {"outputUriPrefix": config.train.output}
    if config.service_account:
        spec["serviceAccount"] = config.service_account
    labels = {RUN_LABEL: run, **dict(config.labels)}
    return {"displayName": run, "labels": labels, "jobSpec": spec}


def run_on_vertex(
    config: LaunchConfig, *, run: str, args: Sequence[str], before: Callable[[], None], note: Note
) -> None:
    """Submits a job, or finds it, and follows it to its end.

    Args:
      config: checked by check_config.
      run: the run's name; not used with config.job.
      args: as for make_job.
      before: called right before a new job is submitted; may refuse.
      note: called with what a person may want to know.

    Raises:
      DataError: the service refuses, or cannot be reached.
      RuntimeError: the job did not succeed, or the following was interrupted.
    """
    name = _full_name(config) if config.job else ""
    try:
        client = connect(config)
        if config.job:
            job = _read(client, name, config=config, note=note)
        else:
            job = _find_or_submit(client, config, run=run, args=args, before=before, note=note)
        name = job.name
        note(f"{name}: to follow it: {follow_command(name, config)}")
        if config.detach:
            note(f"{name}: {state_of(job)}, not waited for")
            return
        job = follow(client, job, config=config, note=note)
    except KeyboardInterrupt:
        raise RuntimeError(_interrupted(name, run, config)) from None
    if problem := explain_end(job, spot=config.spot):
        raise RuntimeError(f"{name}: {problem}; its log: {_gcloud('stream-logs', name)}")


def follow_command(name: str, config: LaunchConfig) -> str:
    """Returns the command line that follows a job."""
    endpoint = f" --endpoint {config.endpoint}" if config.endpoint else ""
    return f"tpufeed launch --backend vertex --job {name}{endpoint}"


def _interrupted(name: str, run: str, config: LaunchConfig) -> str:
    if not name:
        return (
            f"run {run}: interrupted while it was being submitted, so there may be a job: the "
            f"same command with --run {run} finds it, or else submits it"
        )
    return (
        f"{name}: interrupted here, but it runs on; to follow it: {follow_command(name, config)}; "
        f"to end it: {_gcloud('cancel', name)}"
    )


def _gcloud(verb: str, name: str) -> str:
    found = _NAME.fullmatch(name)
    assert found
    place = f"--project {found['project']} --region {found['region']}"
    return f"gcloud ai custom-jobs {verb} {found['id']} {place}"


def _full_name(config: LaunchConfig) -> str:
    project, region = _location(config)
    job = (config.job or "").rpartition("/")[2]
    return f"projects/{project}/locations/{region}/customJobs/{job}"


def connect(config: LaunchConfig) -> Any:
    """Returns the service's client, over REST.

    Raises:
      DataError: there are no Google Cloud credentials.
    """
    from google.api_core.client_options import ClientOptions
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import aiplatform_v1

    _, region = _location(config)
    if is_local(config.endpoint):
        credentials = AnonymousCredentials()
    else:
        try:
            credentials = find_credentials("https://www.googleapis.com/auth/cloud-platform")
        except DefaultCredentialsError as error:
            raise DataError(
                "no Google Cloud credentials to submit the job with: gcloud auth "
                "application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
            ) from error
    address = config.endpoint or f"{region}-aiplatform.googleapis.com"
    return aiplatform_v1.JobServiceClient(
        credentials=credentials,
        transport="rest",
        client_options=ClientOptions(api_endpoint=address.rstrip("/")),
    )


def _find_or_submit(
    client: Any,
    config: LaunchConfig,
    *,
    run: str,
    args: Sequence[str],
    before: Callable[[], None],
    note: Note,
) -> Any:
    job = make_job(config, run=run, args=args)
    earlier = _list(client, config, run, note=note)
    # One that failed is no reason not to try again.
    going = [other for other in earlier if state_of(other) not in _LOST]
    if found := _newest_alike(going, job, run=run):
        note(f"run {run}: found, so nothing is submitted")
        return found
    before()
    known = {other.name for other in earlier}
    try:
        return _submit(client, config, job, run=run, known=known, note=note)
    except _InDoubt as error:
        raise DataError(
            f"{error}; there may be a job all the same: the same command finds it, or else "
            "submits it"
        ) from error


class _InDoubt(DataError):
    """Requests were sent, and whether one of them did its work is not known."""


def _submit(
    client: Any,
    config: LaunchConfig,
    job: dict[str, Any],
    *,
    run: str,
    known: Collection[str],
    note: Note,
) -> Any:
    parent = "projects/{}/locations/{}".format(*_location(config))
    message, doubt, last = _to_message(job), False, Exception()
    for pause in _pauses(config, _ATTEMPTS):
        try:
            made = client.create_custom_job(parent=parent, custom_job=message, timeout=_SECONDS)
            note(f"run {run}: submitted to {config.machine_type} in {parent}")
            return made
        except Exception as error:
            if not _passes(error):
                raise _explain_request(error, config) from error
            doubt, last = doubt or _code(error) != _QUOTA, error
            note(f"run {run}: {_said(error)}; looking again in {pause:g} s")
        time.sleep(pause)
        # The request may have arrived, only its reply been lost, and the job have ended since.
        try:
            new = [j for j in _list(client, config, run, note=note) if j.name not in known]
        except DataError as error:
            if doubt:
                raise _InDoubt(str(error)) from error
            raise
        if found := _newest_alike(new, job, run=run):
            note(f"run {run}: it had been submitted")
            return found
    text = _explain_request(last, config)
    raise _InDoubt(str(text)) if doubt else text from last


def _to_message(job: dict[str, Any]) -> Any:
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    message = aiplatform_v1.CustomJob()
    json_format.ParseDict(job, aiplatform_v1.CustomJob.pb(message))
    return message


def _list(client: Any, config: LaunchConfig, run: str, *, note: Note) -> list[Any]:
    """All jobs of the run."""
    parent = "projects/{}/locations/{}".format(*_location(config))
    request = {"parent": parent, "filter": f'labels.{RUN_LABEL}="{run}"'}

    def ask() -> list[Any]:
        return list(client.list_custom_jobs(request=request, timeout=_SECONDS))

    found = _patiently(ask, config=config, note=note)
    return [job for job in found if job.labels.get(RUN_LABEL) == run]


def _newest_alike(jobs: Sequence[Any], job: dict[str, Any], *, run: str) -> Any:
    """The newest; None where there is none.

    Raises:
      DataError: it is another piece of work.
    """
    if not jobs:
        return None
    newest = max(jobs, key=lambda other: other.create_time)
    if _essence(newest) != _essence(_to_message(job)):
        raise DataError(
            f"--run {run}: {newest.name} has this name, but another image, machine or other "
            "arguments; give another --run"
        )
    return newest


def _essence(job: Any) -> tuple[Any, ...]:
    """What makes two jobs the same piece of work."""
    return tuple(
        (
            pool.container_spec.image_uri,
            [arg for arg in pool.container_spec.args if arg != "--resume"],
            pool.machine_spec.machine_type,
            pool.machine_spec.tpu_topology,
        )
        for pool in job.job_spec.worker_pool_specs
    )


def follow(client: Any, job: Any, *, config: LaunchConfig, note: Note) -> Any:
    """Looks at a job until it has ended, a note for each change of state; returns its last form."""
    began, state = time.monotonic(), ""
    while True:
        if state_of(job) != state:
            state = state_of(job)
            note(f"{job.name}: {state} after {time.monotonic() - began:.0f} s")
        if state in _ENDED:
            return job
        time.sleep(config.poll)
        job = _read(client, job.name, config=config, note=note)


def _read(client: Any, name: str, *, config: LaunchConfig, note: Note) -> Any:
    def ask() -> Any:
        return client.get_custom_job(name=name, timeout=_SECONDS)

    try:
        return _patiently(ask, config=config, note=note)
    except DataError as error:
        raise DataError(
            f"{name}: {error}; the job itself is not ended by this, to follow it: "
            f"{follow_command(name, config)}"
        ) from error


def _pauses(config: LaunchConfig, number: int) -> Iterator[float]:
    """Between the attempts at one request."""
    for attempt in range(number):
        yield min(config.poll * 2**attempt, _LONGEST_PAUSE)


def _patiently(ask: Callable[[], Any], *, config: LaunchConfig, note: Note) -> Any:
    """Asks again, a bounded number of times, what may be asked twice."""
    for pause in (*_pauses(config, _ATTEMPTS - 1), None):
        try:
            return ask()
        except Exception as error:
            if pause is None or not _passes(error):
                raise _explain_request(error, config) from error
            note(f"{_said(error)}; asking again in {pause:g} s")
        time.sleep(pause)
    raise AssertionError("the last pause is None")


def _passes(error: Exception) -> bool:
    """Whether it may be gone at the next attempt."""
    from google.auth.exceptions import TransportError
    from requests.exceptions import RequestException

    return isinstance(error, TransportError | RequestException) or _code(error) in _PASSING


def _code(error: Exception) -> int:
    code = getattr(error, "code", 0)
    return int(code) if isinstance(code, int) else 0


def _said(error: Exception) -> str:
    """What happened, in short."""
    from requests.exceptions import RequestException

    if isinstance(error, RequestException):
        return f"no answer ({type(error).__name__})"
    text = " ".join(str(getattr(error, "message", "") or error).split())
    text = _REQUEST.sub("", text)
    kind = f"{_code(error)} " if _code(error) else f"{type(error).__name__}: "
    return f"{kind}{text[:_MOST]}"


def _explain_request(error: Exception, config: LaunchConfig) -> Exception:
    """What a person can do about a request that failed for good."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    if not isinstance(error, GoogleAPIError | GoogleAuthError | RequestException):
        return error
    project, region = _location(config)
    where, said, code = f"project {project}, region {region}", _said(error), _code(error)
    if isinstance(error, GoogleAuthError):
        return DataError(f"signing in failed: {said}: gcloud auth application-default login")
    if isinstance(error, RequestException):
        return DataError(f"{where}: the service cannot be reached: {said}, {_ATTEMPTS} times")
    if code == _QUOTA:
        return DataError(
            f"{where}: out of quota, {_ATTEMPTS} times: {said}: ask for more, try another "
            "--region or a smaller --machine-type, or later"
        )
    if code in (401, 403):
        return DataError(
            f"{where}: permission denied: {said}: needs the role roles/aiplatform.user"
        )
    return DataError(f"{where}: the service refused: {said}")


def state_of(job: Any) -> str:
    """Returns a job's state without its prefix; the number of one that this version knows not."""
    return str(getattr(job.state, "name", job.state)).removeprefix("JOB_STATE_")


def explain_end(job: Any, *, spot: bool) -> str:
    """Returns why a job did not succeed, and what to do; empty where it did.

    Args:
      job: has ended.
      spot: whether its machines might be taken back.
    """
    state, said = state_of(job), " ".join(job.error.message.split())[:_MOST]
    if state == "SUCCEEDED":
        return ""
    spot = spot or job.job_spec.scheduling.strategy.name == "SPOT"
    again = f"launch again with --resume after --, if it left a {HISTORY}, to go on"
    text = f"{state}: {said or 'without a message; see its log'}"
    if spot and re.search(r"pre-?empt", said, re.IGNORECASE):
        return f"pre-empted, its spot machines were taken back ({text}): {again}"
    late = re.search(r"time[ds]?[- ]?out|deadline", said, re.IGNORECASE)
    if state == "EXPIRED" or job.error.code == _DEADLINE_EXCEEDED or late:
        return f"ran out of its --timeout ({text}): {again}"
    if state == "CANCELLED":
        return f"was cancelled by somebody ({text}): {again}"
    return text
