"""The command line: `tpufeed COMMAND ...`, the same as `python -m pipeline COMMAND ...`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pipeline import __version__
from pipeline.config import (
    PlanConfig,
    UsageError,
    check_predict_arguments,
    make_analyze_arguments,
    make_export_config,
    make_ingest_config,
    make_launch_config,
    make_parser,
    make_train_config,
    parse_compare,
    split_train_flags,
)
from pipeline.lean import find_spare, without_modules
from pipeline.messages import OneLineFormatter, ReaderGone, describe_seconds, printable, say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments, without the program's name; None for those of the process.

    Returns:
      The exit code: 0 done, 2 wrong from the arguments alone, 1 anything else.
    """
    parser = make_parser()
    words, train_flags = split_train_flags(sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(words)
    if args.version:
        print(f"tpufeed {__version__}")
        return 0
    if args.command is None:
        parser.error("no command: give one of ingest, verify, inspect")
    # Whoever calls this from a process of their own may use all of Beam afterwards.
    spare, args.stores = find_spare(words) if argv is None and not args.debug else ((), ())
    try:
        if rest and args.command not in ("ingest", "plan"):
            hint = "; flags of tpufeed train go after --" if args.command == "launch" else ""
            raise UsageError(f"{rest[0]}: tpufeed {args.command} has no such argument{hint}")
        with without_modules(spare if args.command in ("ingest", "plan") else ()):
            return _run_command(args, train_flags if args.command == "launch" else rest)
    except KeyboardInterrupt:
        if args.debug:
            traceback.print_exc()
        print(f"tpufeed {args.command}: interrupted{_way_on(args)}", file=sys.stderr)
        return 1
    except ReaderGone:
        _drop_output()
        return 1
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        text = printable(" ".join(str(error).split())) or type(error).__name__
        expected = isinstance(error, (ValueError, OSError, RuntimeError))
        kind = "" if expected else f"{type(error).__name__}: "
        print(f"tpufeed {args.command}: error: {kind}{text}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _way_on(args: argparse.Namespace) -> str:
    if args.command == "ingest":
        return ": --resume goes on with what is there"
    if args.command == "train" and args.output and not args.compare:
        return ": --resume goes on after the last checkpoint, if there is one"
    return ""


def _drop_output() -> None:
    """Leaves nothing to flush at the end into a pipe that is closed, as Python's docs advise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a stream that is no file of the system's
            os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def _run_command(args: argparse.Namespace, rest: list[str]) -> int:
    if args.command == "ingest":
        return _ingest(args, rest)
    if args.command == "plan":
        return _plan(args, rest)
    if args.command == "launch":
        return _launch(args, rest)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "verify": _verify,
        "inspect": _inspect,
        "report": _report,
        "diff": _diff,
        "devices": _devices,
        "train": _train,
        "analyze": _analyze,
        "export": _export,
        "predict": _predict,
    }
    return commands[args.command](args)


def _ingest(args: argparse.Namespace, beam_args: list[str]) -> int:
    config, began = make_ingest_config(args), time.monotonic()
    _prepare_process(args, beam_args)
    with without_modules(args.stores):
        from pipeline.dataflow import Submission
        from pipeline.ingest import ingest_images
    from pipeline.summary import describe_duplicates, describe_manifest

    gc.freeze()
    gc.enable()
    outcome = ingest_images(config, beam_args, show_progress=not args.quiet)
    if isinstance(outcome, Submission):
        say(outcome.text)
    elif not args.quiet:
        say(describe_manifest(outcome, directory=config.output))
        say(describe_duplicates(config.output, mode=config.duplicates))
        say(f"  done in {describe_seconds(time.monotonic() - began)}")
    return 0


def _prepare_process(args: argparse.Namespace, beam_args: list[str]) -> None:
    """Settles what is logged, and starts what can come up before Beam is imported."""
    from transforms.decoders import start_decoders

    remote = any("runner" in arg.lower() and "dataflow" in arg.lower() for arg in beam_args)
    # Dataflow's job id is printed at INFO; the local runner's INFO is of no use to anyone.
    handler = logging.StreamHandler()
    if not args.debug:  # Beam logs whole jobs, and the tracebacks of far workers
        handler.setFormatter(OneLineFormatter())
    chatty = remote and args.debug
    logging.basicConfig(level=logging.INFO if chatty else logging.WARNING, handlers=[handler])
    if remote:
        logging.getLogger("apache_beam.runners.dataflow").setLevel(logging.INFO)
    if not remote and not args.debug:
        # The local runner logs a worker's traceback beside raising it; our line says it once.
        logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    # What decoders grumble about shows in the outcome: a record, or a reject with its reason.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    # What Beam makes as it is imported stays to the end, so there is nothing to collect in it.
    gc.disable()
    if not any(arg.startswith(("--runner", "--direct_")) for arg in beam_args):
        # They come up on the other cores while Beam is imported on this one.
        start_decoders(os.cpu_count() or 1)


def _plan(args: argparse.Namespace, beam_args: list[str]) -> int:
    config = make_ingest_config(args)
    how = PlanConfig(args.workers, args.sample, args.prices)
    fresh, began = "apache_beam" not in sys.modules, time.perf_counter()
    _prepare_process(args, beam_args)
    with without_modules(args.stores):
        from pipeline.plan import describe_plan
        from pipeline.rehearsal import age_of_process, plan_images

    gc.freeze()
    gc.enable()
    # As a command, what came before counts for ingest, too.
    importing = (age_of_process() if fresh else 0.0) or time.perf_counter() - began
    plan = plan_images(config, beam_args, how=how, importing=importing)
    if args.quiet and not args.json:
        for text in plan.warnings:
            say(f"warning: {text}")
    else:
        say(plan.json if args.json else describe_plan(plan, output=config.output))
    return 0


def _verify(args: argparse.Namespace) -> int:
    from pipeline.verify import verify_dataset

    findings = verify_dataset(
        args.directory,
        depth="quick" if args.quick else "deep" if args.deep else "full",
        sources=args.sources or 0,
        leakage=args.leakage,
    )
    for finding in findings:
        say(printable(finding), file=sys.stderr)  # one line each, whatever a file is called
    if findings:
        say(f"tpufeed verify: {args.directory}: {len(findings)} finding(s)", file=sys.stderr)
    else:
        say(f"{args.directory}: whole" + (", no content in two splits" * args.leakage))
    return 1 if findings else 0


def _inspect(args: argparse.Namespace) -> int:
    if args.save and args.record is None:
        raise UsageError("--save: needs --record, whose picture is saved")
    from pipeline.summary import inspect_dataset

    say(
        inspect_dataset(
            args.directory,
            split=args.split,
            record=args.record,
            save=args.save,
            as_json=args.json,
        )
    )
    return 0


def _report(args: argparse.Namespace) -> int:
    from pipeline.report import write_report

    say(write_report(args.directory))
    return 0


def _diff(args: argparse.Namespace) -> int:
    from pipeline.diff import compare_datasets

    try:
        difference = compare_datasets(args.old, args.new)
    except (ValueError, OSError) as error:  # 1 says that they differ, so this is 2, as of diff
        raise UsageError(str(error)) from error
    say(difference.json if args.json else difference)
    return 0 if difference.equal else 1


def _devices(args: argparse.Namespace) -> int:
    from pipeline.devices import describe_devices, import_tensorflow

    import_tensorflow(quiet=not args.debug)
    say(describe_devices(as_json=args.json))
    return 0


def _train(args: argparse.Namespace) -> int:
    config = make_train_config(args)
    modes = parse_compare(args)
    from pipeline.devices import import_tensorflow

    import_tensorflow(quiet=not args.debug)
    from pipeline.compare import compare_modes
    from pipeline.train import train

    def note(text: str) -> None:
        say(text, file=sys.stderr)

    def report(epoch: Any) -> None:
        say(epoch.json if args.json else epoch)

    if modes:
        say(compare_modes(config, modes, note=note))
    else:
        train(config, report=report, note=note)
    return 0


def _launch(args: argparse.Namespace, train_flags: list[str]) -> int:
    config = make_launch_config(args, train_flags)
    # What the client libraries log comes again in the one line of the error.
    logging.basicConfig(level=logging.DEBUG if args.debug else logging.CRITICAL)
    from pipeline.launch import launch

    launch(config, note=say)
    return 0


def _analyze(args: argparse.Namespace) -> int:
    folders, output = make_analyze_arguments(args)
    from pipeline.devices import import_tensorflow

    import_tensorflow(quiet=not args.debug)
    if not args.debug:
        # Beam and tensorflow-transform tell at length what went well.
        for name in ("apache_beam", "tensorflow", "absl"):
            logging.getLogger(name).setLevel(logging.ERROR)
    from pipeline.analyze import analyze_datasets

    transform = analyze_datasets(folders, output=output)
    for name, values in (("mean", transform.mean), ("standard deviation", transform.std)):
        say(f"channel {name}: {' '.join(f'{value:.4f}' for value in values)}")
    say(f"{output}: transform_fn")
    return 0


def _export(args: argparse.Namespace) -> int:
    config = make_export_config(args)
    from pipeline.devices import import_tensorflow

    import_tensorflow(quiet=not args.debug)
    from pipeline.export import export_run

    facts = export_run(config)
    height, width = facts.image_size
    say(f"{config.output}: {len(facts.labels)} classes, pictures of {width}x{height}")
    return 0


def _predict(args: argparse.Namespace) -> int:
    check_predict_arguments(args)
    from pipeline.devices import import_tensorflow

    import_tensorflow(quiet=not args.debug)
    from pipeline.predict import predict_images

    failed = 0
    for prediction in predict_images(args.model, args.images):
        failed += bool(prediction.reason)
        line = prediction.json if args.json else prediction
        say(line, file=sys.stderr if prediction.reason and not args.json else sys.stdout)
    return 1 if failed else 0


def run() -> NoReturn:
    """What the command `tpufeed` calls: main, then the end of the process."""
    code = main()
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        # After a dead worker process the runner's threads wait for ever.
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    run()
