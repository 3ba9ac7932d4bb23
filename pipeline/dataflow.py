"""What Dataflow needs beyond any runner: jobs that are handed over, shown, or fail far away."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from pipeline.config import UsageError
from pipeline.messages import last_line
from transforms.files import is_remote
from transforms.records import DataError


@dataclasses.dataclass(frozen=True)
class Submission:
    """A pipeline that was handed over instead of run to its end.

    Attributes:
      job_id: what the service calls it; empty for a template and a dry run.
      text: for people: where the job is; of a dry run, the job itself as JSON.
    """

    job_id: str
    text: str


def check_paths(options: PipelineOptions, paths: Iterable[tuple[str, str]]) -> None:
    """Refuses local paths, which the service's machines do not see.

    Args:
      options: Beam's. A service on localhost, as tests have, does see them.
      paths: (flag, path).

    Raises:
      UsageError: names the flag and the path.
    """
    if "localhost" in (options.view_as(GoogleCloudOptions).dataflow_endpoint or ""):
        return
    for flag, path in paths:
        if not is_remote(path):
            raise UsageError(
                f"{flag} {path}: is on this machine, where Dataflow's workers cannot reach it; "
                "give gs://BUCKET/..."
            )


def check_signed_in(options: PipelineOptions) -> None:
    """Refuses to submit as nobody, which Beam would find out after minutes of trying.

    Args:
      options: Beam's. A service on localhost asks nobody who they are.

    Raises:
      DataError: there are no Google Cloud credentials.
    """
    google_options = options.view_as(GoogleCloudOptions)
    if google_options.no_auth or "localhost" in (google_options.dataflow_endpoint or ""):
        return
    import google.auth

    try:
        google.auth.default()
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise DataError(
            "no Google Cloud credentials to submit the job with: gcloud auth application-default "
            "login, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
        ) from error


def describe_job(options: PipelineOptions, build: Callable[[beam.Pipeline], Any]) -> Submission:
    """Returns the job that would be sent, without asking anything of the service or the bucket.

    The graph and the package are built; the rest is Beam's own code that describes a job, between
    the staging before it and the request after it.

    Args:
      options: Beam's, with dry_run.
      build: adds the graph.
    """
    from apache_beam.runners.dataflow.internal import apiclient
    from apache_beam.runners.internal.names import STAGED_PIPELINE_FILENAME

    pipeline = beam.Pipeline(options=options)
    build(pipeline)
    job = pipeline.run().job
    staging = job.google_cloud_options.staging_location
    job.proto.environment = apiclient.Environment(
        packages=_package_names(job.proto_pipeline),
        options=job.options,
        environment_version=apiclient._FNAPI_ENVIRONMENT_MAJOR_VERSION,
        proto_pipeline_staged_url=f"{staging.rstrip('/')}/{STAGED_PIPELINE_FILENAME}",
        proto_pipeline=job.proto_pipeline,
        pipeline_proto_hash=hashlib.sha256(job.proto_pipeline.SerializeToString()).hexdigest(),
    ).proto
    return Submission("", job.json())


def _package_names(proto: Any) -> list[str]:
    from apache_beam.portability.api import beam_runner_api_pb2

    return [
        beam_runner_api_pb2.ArtifactStagingToRolePayload.FromString(part.role_payload).staged_name
        for _, environment in sorted(proto.components.environments.items())
        for part in environment.dependencies
    ]


def describe_submission(result: Any, options: PipelineOptions) -> Submission:
    """Returns what became of a pipeline that is not waited for.

    Args:
      result: of `Pipeline.run()`.
      options: Beam's.
    """
    google = options.view_as(GoogleCloudOptions)
    job_id = job_id_of(result)
    if not job_id:
        return Submission("", f"template written to {google.template_location}")
    where = f"project {google.project}, region {google.region}"
    return Submission(job_id, f"job {job_id} submitted ({where}), not waited for")


def job_id_of(result: Any) -> str:
    """Returns the id of a job on Dataflow; empty where it is none."""
    if getattr(result, "has_job", False):
        return str(result.job_id())
    return ""


def explain_failure(error: BaseException, result: Any, options: PipelineOptions) -> str:
    """Returns a failed job's error in one line; empty where it was no job on Dataflow.

    Args:
      error: what waiting for it raised.
      result: of `Pipeline.run()`, or None where it raised.
      options: Beam's.
    """
    job_id = job_id_of(result)
    if not job_id:
        return ""
    if isinstance(error, KeyboardInterrupt):
        region = options.view_as(GoogleCloudOptions).region
        return (
            f"job {job_id}: interrupted here, but it runs on; to end it: gcloud dataflow jobs "
            f"cancel {job_id} --region {region}"
        )
    state, _, message = str(error).partition(", Error:\n")
    state = state.rpartition(" ")[2]
    if message in ("", "None"):
        return f"job {job_id}: ended as {state}, without an error message; see its log"
    return f"job {job_id}: {last_line(message)}"
