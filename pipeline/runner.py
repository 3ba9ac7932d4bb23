"""Runs a Beam pipeline: Beam's options checked, the local runner settled, dead workers noticed."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import glob
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    DirectOptions,
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    TestOptions,
)
from apache_beam.runners.worker.statesampler import DEFAULT_SAMPLING_PERIOD_MS, StateSampler
from apache_beam.utils import interactive_utils

from pipeline.config import UsageError
from pipeline.dataflow import (
    Submission,
    check_paths,
    check_signed_in,
    describe_job,
    describe_submission,
    explain_failure,
)
from pipeline.messages import last_line
from pipeline.progress import Watch, count_in_file, read_metrics
from transforms.records import DataError

# Beam's DirectRunner is a switch that first tries to download another runner.
_LOCAL_RUNNERS = ("", "directrunner", "switchingdirectrunner", "fnapirunner")
_LOCAL_RUNNER = "FnApiRunner"
# Where workers are elsewhere the cores of this machine say nothing, and the same job must come out
# of any. Dataflow has a process a vCPU: one decodes while the other waits for what comes next.
_REMOTE_DECODERS = 2
_LONGEST_LINE = 2**16
_INTERRUPTED = re.compile(r"^KeyboardInterrupt\b", re.MULTILINE)
_WORKER = "apache_beam.runners.worker.sdk_worker_main"
_SAMPLING_MS = 5
# A busy machine may take a second to tell a process's end; Beam's threads tell it no sooner.
_DEATH_S = 5
_notebook = threading.RLock()


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """How a pipeline is run.

    Attributes:
      options: Beam's.
      decoders: processes for each shard that is being written.
      local: whether it is the local runner.
      processes: whether the local runner starts worker processes.
      dry_run: whether the job is only to be shown.
      wait: whether to stay until the end.
    """

    options: PipelineOptions
    decoders: int
    local: bool = False
    processes: bool = False
    dry_run: bool = False
    wait: bool = True


def plan_run(
    beam_args: Sequence[str], *, paths: Sequence[tuple[str, str]] = (), submit: bool = True
) -> RunPlan:
    """Returns how to run.

    In one process, the default, Beam's --direct_num_workers is the number of decoder processes for
    a shard: one a core unless it is given. Workers of Beam's own share the cores between them. On
    other machines it is a fixed number.

    Args:
      beam_args: options for Beam.
      paths: (flag, path) of what is read and written.
      submit: whether it is to run; if not, nobody need be signed in.

    Raises:
      UsageError: Beam does not know an option (it would only warn), or a value of it, or lacks
        one; or there is no such runner; or its workers could not reach a path.
    """
    options = PipelineOptions(_check_options(beam_args))
    standard = options.view_as(StandardOptions)
    runner = (standard.runner or "").rpartition(".")[2].lower()
    cores = os.cpu_count() or 1
    if runner == "dataflowrunner":
        check_paths(options, paths)
        return _plan_dataflow(options, submit=submit)
    _refuse_dataflow_only(options)
    if runner not in _LOCAL_RUNNERS:
        _try_options(options)
        return RunPlan(options, _REMOTE_DECODERS)
    standard.runner = _LOCAL_RUNNER
    direct = options.view_as(DirectOptions)
    asked = "direct_num_workers" in options.get_all_options(drop_default=True)
    workers = direct.direct_num_workers or cores
    processes = direct.direct_running_mode == "multi_processing"
    if processes or direct.direct_running_mode == "multi_threading":
        return RunPlan(options, cores, True, processes)
    direct.direct_num_workers = 1
    return RunPlan(options, workers if asked else cores, True)


def _plan_dataflow(options: PipelineOptions, *, submit: bool) -> RunPlan:
    dry_run = bool(options.view_as(TestOptions).dry_run)
    if submit and not dry_run:
        check_signed_in(options)
    _try_options(options)
    wait = not options.view_as(StandardOptions).no_wait_until_finish
    return RunPlan(
        options,
        _REMOTE_DECODERS,
        dry_run=dry_run,
        wait=wait and not options.view_as(GoogleCloudOptions).template_location,
    )


def _refuse_dataflow_only(options: PipelineOptions) -> None:
    for flag, given in (
        ("--dry_run", options.view_as(TestOptions).dry_run),
        ("--no_wait_until_finish", options.view_as(StandardOptions).no_wait_until_finish),
        ("--template_location", options.view_as(GoogleCloudOptions).template_location),
    ):
        if given:
            raise UsageError(f"{flag}: only with --runner=DataflowRunner; drop it")


def _check_options(beam_args: Sequence[str]) -> list[str]:
    parser = _BeamOptions(prog="tpufeed ingest", add_help=False, allow_abbrev=False)
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(beam_args))
    if not unknown:
        return list(beam_args)
    if not unknown[0].startswith("-"):
        raise UsageError(
            f"{unknown[0]}: belongs to no option; quote the pattern of --input, or the shell "
            "expands it"
        )
    raise UsageError(f"{unknown[0]}: neither tpufeed nor Beam has such an option")


class _BeamOptions(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def _try_options(options: PipelineOptions) -> None:
    """Has Beam refuse what it would refuse now, before --overwrite removes anything."""
    shutil.rmtree(_make_pipeline(options).local_tempdir, ignore_errors=True)


def _make_pipeline(
    options: PipelineOptions, runner: beam.runners.PipelineRunner | None = None
) -> beam.Pipeline:
    try:
        return beam.Pipeline(runner=runner, options=options)
    except ValueError as error:  # no such runner, or it lacks an option
        raise UsageError(str(error)) from error


def run_pipeline(
    plan: RunPlan, build: Callable[[beam.Pipeline], Any], *, watch: Watch | None = None
) -> Submission | None:
    """Runs to the end what `build` adds to a pipeline; a worker's error comes out as one line.

    Args:
      plan: how to run.
      build: adds the graph.
      watch: shows how far the run is.

    Returns:
      None, or what became of it where the plan is not to wait.

    Raises:
      DataError: from a worker, as it was raised there.
      RuntimeError: any other failure, on one line; its cause has the rest.
    """
    build = _outside_notebooks()(build)
    if plan.dry_run:
        return describe_job(plan.options, build)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_collect_log()) if plan.processes else None
        runner = _process_runner(plan, log.path) if log else None
        pipeline = _make_pipeline(plan.options, runner)
        build(pipeline)
        with _watching(plan, watch), _sampling_often():
            if log:
                outcome = _wait(pipeline, log)
            else:
                elsewhere = None if plan.local else watch
                outcome = _try(pipeline, wait=plan.wait, watch=elsewhere)
    if not isinstance(outcome, BaseException):
        return outcome
    if not isinstance(outcome, Exception):
        raise outcome
    if _INTERRUPTED.search(str(outcome)):
        # It hit a step that ran in this process, which Beam then tells as the step's failure.
        raise KeyboardInterrupt from outcome
    # Beam hands on a worker's traceback as the text of a RuntimeError, or the error itself.
    kind = "" if isinstance(outcome, RuntimeError) else f"{type(outcome).__name__}: "
    line = last_line(f"{kind}{outcome}")
    if found := re.search(r"^(job \S+: )?.*\bDataError: (.*)", line):
        raise DataError((found[1] or "") + found[2]) from outcome
    raise RuntimeError(line) from outcome


@contextlib.contextmanager
def _watching(plan: RunPlan, watch: Watch | None) -> Iterator[None]:
    """Watches a local run, of which Beam tells nothing before its end."""
    if watch is None or not plan.local:
        yield
        return
    with count_in_file() as read, watch(read):
        yield


@contextlib.contextmanager
def _outside_notebooks() -> Iterator[None]:
    """Lets Beam take a notebook for any other process while a graph is built.

    To put the cell's number into labels, Beam 2.77 imports its data frames there, which fail with
    pandas 3. It asks the function that stands here, so one thread builds at a time.
    """
    with _notebook:
        usual = interactive_utils.is_in_ipython
        interactive_utils.is_in_ipython = lambda: False
        try:
            yield
        finally:
            interactive_utils.is_in_ipython = usual


@contextlib.contextmanager
def _sampling_often() -> Iterator[None]:
    """Lets workers in this process end each stage at once.

    A stage ends when the thread that samples what it does awakes: in Beam 2.77 every 200 ms, for
    which all cores are idle. The period can be set nowhere; to sample costs microseconds.
    """
    initialise = StateSampler.__init__
    if initialise.__defaults__ != (DEFAULT_SAMPLING_PERIOD_MS,):  # another Beam, or another run
        yield
        return
    initialise.__defaults__ = (_SAMPLING_MS,)
    try:
        yield
    finally:
        initialise.__defaults__ = (DEFAULT_SAMPLING_PERIOD_MS,)


def _try(
    pipeline: beam.Pipeline, *, wait: bool = True, watch: Watch | None = None
) -> BaseException | Submission | None:
    result = None
    try:
        result = pipeline.run()
        if not wait:
            return describe_submission(result, pipeline.options)
        watched = watch(functools.partial(read_metrics, result)) if watch else None
        with watched or contextlib.nullcontext():
            result.wait_until_finish()
    except BaseException as error:
        if line := explain_failure(error, result, pipeline.options):
            failure = RuntimeError(line)
            failure.__cause__ = error
            return failure
        return error
    return None


@dataclasses.dataclass
class _WorkerLog:
    """The end of what workers print.

    In no file: on a full disk Beam's worker fails to print a traceback, and then answers nothing,
    for ever.

    Attributes:
      path: for the workers to write to.
      lines: the last ones.
    """

    path: str
    lines: collections.deque[str]
    _end: Callable[[], None]

    def last_line(self) -> str:
        """Returns the last line that says something, once all workers were ended."""
        self._end()
        return next(filter(None, reversed(self.lines)), "")


@contextlib.contextmanager
def _collect_log() -> Iterator[_WorkerLog]:
    read, write = os.pipe()
    lines: collections.deque[str] = collections.deque(maxlen=20)

    def drain() -> None:
        with open(read, errors="replace") as file:
            for line in iter(functools.partial(file.readline, _LONGEST_LINE), ""):
                lines.append(line.strip())

    def end() -> None:
        ours.close()
        thread.join(timeout=1)  # until the last worker's end is closed, too

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    with open(write, "wb") as ours:
        yield _WorkerLog(f"/proc/{os.getpid()}/fd/{write}", lines, end)


def _process_runner(plan: RunPlan, log_path: str) -> beam.runners.PipelineRunner:
    """The local runner with worker processes, as --direct_running_mode=multi_processing has them.

    Beam's own command line for them breaks on a path with a space, leaves a shell in between that
    announces its child's death, and lets every worker print its tracebacks beside ours.
    """
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner
    from apache_beam.transforms.environments import SubprocessSDKEnvironment

    plan.options.view_as(DirectOptions).direct_running_mode = "in_memory"
    # Where it is there: a worker must not go on writing when this process was killed.
    tied = "setpriv --pdeathsig KILL " if shutil.which("setpriv") else ""
    command = f"exec {tied}{shlex.quote(sys.executable)} -m {_WORKER} 2>{log_path}"
    return FnApiRunner(SubprocessSDKEnvironment.from_command_string(command))


def _wait(pipeline: beam.Pipeline, log: _WorkerLog) -> BaseException | Submission | None:
    """Runs in another thread, since the runner waits for ever for a dead worker process.

    Beam waits for each process in a thread of its own, named run_worker, which then raises.
    """
    outcome: queue.SimpleQueue[BaseException | Submission | None] = queue.SimpleQueue()
    deaths: list[BaseException | None] = []
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.thread and args.thread.name == "run_worker":
            deaths.append(args.exc_value)
            outcome.put(args.exc_value)
        elif not _is_beams(args):  # its connections break with the worker: no news
            before(args)

    threading.excepthook = hook
    threading.Thread(target=lambda: outcome.put(_try(pipeline)), daemon=True).start()
    ended = outcome.get()
    if isinstance(ended, BaseException):
        _await_deaths(deaths)
    if deaths:  # the first: the others may be our own doing
        _end_workers()
        return RuntimeError(_describe_death(deaths[0], log.last_line()))
    if ended is None:  # else the other workers' threads have yet to raise, for nobody to read
        threading.excepthook = before
    return ended


def _await_deaths(deaths: Sequence[object]) -> None:
    """Lets a dead worker's thread tell of it: a connection that broke may be told sooner.

    Where a worker told of a failure, all of them have ended by now, and their threads.
    """
    deadline = time.monotonic() + _DEATH_S
    while not deaths and time.monotonic() < deadline:
        if not any(thread.name == "run_worker" for thread in threading.enumerate()):
            return
        time.sleep(0.05)


def _is_beams(args: threading.ExceptHookArgs) -> bool:
    trace = args.exc_traceback
    while trace is not None:
        if os.sep + "apache_beam" + os.sep in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def _describe_death(error: BaseException | None, said: str) -> str:
    last = f"; it said: {said[:200]}" if said else ""
    return (
        f"a worker process died ({error}{last}): run again with --resume, without worker "
        "processes if it was short of memory"
    )


def _end_workers() -> None:
    """Ends the other worker processes, which would wait for ever too.

    Beam keeps no handle of them; they are those descendants of this process, as /proc tells, that
    run its worker. Where there is no /proc they end by themselves once this process has.
    """
    children: dict[int, list[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.split("/")[2]))
    family = [os.getpid()]
    for pid in family:
        family += children.get(pid, [])
    for pid in family[1:]:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if _WORKER.encode() in file.read():
                os.kill(pid, signal.SIGKILL)
