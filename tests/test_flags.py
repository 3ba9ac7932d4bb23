"""Every flag of every command: documented, with its default; in --help; and shown to do something.

A new flag needs a row in docs/cli.md, a row in SHOWN_BY and, for ingest, train and launch, one in
REACHES.
"""

import argparse
import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import ingest
from PIL import Image

from pipeline.__main__ import main
from pipeline.config import (
    make_ingest_config,
    make_launch_config,
    make_parser,
    make_train_config,
    parse_compare,
    split_train_flags,
)
from transforms.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
EVERYWHERE = ("--help", "--debug")
# A command that has all flags of another; they are documented and shown there.
EXTENDS = {"plan": "ingest"}

# Command and flag, and the test that shows what the flag does. A test may name the flag, or the
# field of the configuration that REACHES holds it to.
SHOWN_BY = {
    "ingest --input": "test_inputs.py::test_glob",
    "ingest --output": "test_ingest.py::test_an_output_that_is_not_empty_is_refused",
    "ingest --root": "test_inputs.py::test_root_and_given_splits",
    "ingest --image-size": "test_flags.py::test_a_flag_of_ingest_changes_what_is_written",
    "ingest --resize-mode": "test_verify.py::test_every_schema_and_encoding_verifies_deep",
    "ingest --channels": "test_verify.py::test_every_schema_and_encoding_verifies_deep",
    "ingest --encoding": "test_verify.py::test_every_schema_and_encoding_verifies_deep",
    "ingest --quality": "test_diff.py::test_other_pixels",
    "ingest --schema": "test_inputs.py::test_csv_features_ride_along_in_every_schema",
    "ingest --split": "test_ingest.py::test_a_split_that_gets_nothing_is_there_and_empty",
    "ingest --split-by": "test_inputs.py::test_groups_stay_in_one_split",
    "ingest --seed": "test_flags.py::test_a_flag_of_ingest_changes_what_is_written",
    "ingest --shards": "test_diff.py::test_other_shards",
    "ingest --shard-size": "test_flags.py::test_a_flag_of_ingest_changes_what_is_written",
    "ingest --class-names": "test_inputs.py::test_class_names_give_the_ids",
    "ingest --new-classes": "test_inputs.py::test_labels_outside_are_rejected_or_appended",
    "ingest --label-offset": "test_inputs.py::test_class_names_give_the_ids",
    "ingest --label-separator": "test_labels.py::test_several_labels_are_what_tensorflow_reads",
    "ingest --unlabelled": "test_labels.py::test_without_labels_no_feature_speaks_of_them",
    "ingest --background": "test_flags.py::test_a_flag_of_ingest_changes_what_is_written",
    "ingest --max-pixels": "test_ingest.py::test_what_only_the_data_can_tell",
    "ingest --max-reject-rate": "test_ingest.py::test_bad_files_are_counted_and_the_rest_goes_on",
    "ingest --duplicates": "test_duplicates.py::test_drop_keeps_the_first_by_key",
    "ingest --exclude": "test_inputs.py::test_what_is_excluded_leaves_nothing_behind",
    "ingest --min-size": "test_filters.py::test_filtered_inputs_are_rejects_outside_the_rate",
    "ingest --max-area": "test_filters.py::test_filtered_inputs_are_rejects_outside_the_rate",
    "ingest --max-aspect-ratio": (
        "test_filters.py::test_filtered_inputs_are_rejects_outside_the_rate"
    ),
    "ingest --exif": "test_exif.py::test_the_features_are_in_the_records_beside_the_others",
    "ingest --overwrite": "test_ingest.py::test_overwrite_leaves_no_shard_of_the_old_set",
    "ingest --resume": "test_resume.py::test_a_complete_set_stays_and_it_is_said",
    "ingest --quiet": "test_progress.py::test_quiet_is_quiet_on_a_terminal_too",
    "plan --workers": "test_plan.py::test_the_report_for_people",
    "plan --sample": "test_plan.py::test_a_sample_stands_for_all",
    "plan --prices": "test_plan.py::test_the_cost_comes_from_the_prices_given",
    "plan --json": "test_plan.py::test_a_plan_is_what_ingest_does",
    "verify --quick": "test_duplicates.py::test_keep_leaks_and_verify_says_where",
    "verify --deep": "test_ingest.py::test_an_empty_shard_is_written_verified_and_read",
    "verify --sources": "test_reference.py::test_a_planted_fault_is_found",
    "verify --leakage": "test_duplicates.py::test_keep_leaks_and_verify_says_where",
    "inspect --split": "test_summary.py::test_one_split_lists_its_shards",
    "inspect --record": "test_summary.py::test_every_record_is_reached_by_its_number",
    "inspect --save": "test_summary.py::test_every_record_is_reached_by_its_number",
    "inspect --json": "test_summary.py::test_the_summary_counts_what_is_there",
    "diff --json": "test_diff.py::test_every_change_of_a_record_is_told",
    "devices --json": "test_devices.py::test_command_lists_devices",
    "train --data": "test_train.py::test_two_sets_that_differ_are_refused",
    "train --model": "test_train.py::test_what_xla_cannot_compile_is_one_line",
    "train --mode": "test_train.py::test_the_compiled_step_can_be_read",
    "train --compare": "test_train.py::test_compare_runs_each_mode",
    "train --epochs": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --batch-size": "test_train.py::test_run_reports_each_epoch",
    "train --optimizer": "test_train.py::test_resume_goes_on_with_weights_optimizer_and_history",
    "train --learning-rate": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --schedule": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --augment": "test_train.py::test_augmentation",
    "train --scaling": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --image-size": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --cache": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --weights": "test_models.py::test_keras_network_and_its_weights",
    "train --mixed-bfloat16": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --steps-per-execution": "test_flags.py::test_flags_of_train_come_out_in_the_run",
    "train --seed": "test_flags.py::test_the_seed_of_train_gives_the_first_weights",
    "train --tpu": "test_train.py::test_a_tpu_that_was_asked_for_is_never_replaced",
    "train --zone": "test_devices.py::test_a_name_with_zone_and_project_needs_credentials",
    "train --project": "test_devices.py::test_a_name_with_zone_and_project_needs_credentials",
    "train --output": "test_train.py::test_compare_runs_each_mode",
    "train --resume": "test_train.py::test_resume_goes_on_with_weights_optimizer_and_history",
    "train --permute-labels": (
        "test_train.py::test_permuted_labels_are_the_same_labels_on_other_pictures"
    ),
    "train --dump-hlo": "test_train.py::test_the_compiled_step_can_be_read",
    "train --transform": (
        "test_analyze.py::test_training_takes_the_moments_and_refuses_other_classes"
    ),
    "train --json": "test_train.py::test_resume_goes_on_with_weights_optimizer_and_history",
    "analyze --data": "test_analyze.py::test_two_folders_are_analyzed_as_one",
    "analyze --output": "test_analyze.py::test_two_folders_are_analyzed_as_one",
    "export --run": "test_export.py::test_a_moved_data_set_is_given_again",
    "export --output": "test_export.py::test_a_moved_data_set_is_given_again",
    "export --data": "test_export.py::test_a_moved_data_set_is_given_again",
    "export --layers": "test_export.py::test_layers_of_ones_own",
    "predict --model": "test_predict.py::test_json_is_a_line_a_file",
    "predict --json": "test_predict.py::test_json_is_a_line_a_file",
    "launch --data": "test_launch.py::test_the_request_is_this_json",
    "launch --backend": "test_launch.py::test_the_request_is_this_json",
    "launch --output": "test_launch.py::test_the_request_is_this_json",
    "launch --run": "test_launch.py::test_the_request_is_this_json",
    "launch --project": "test_launch.py::test_the_request_is_this_json",
    "launch --region": "test_launch.py::test_the_request_is_this_json",
    "launch --image": "test_launch.py::test_the_request_is_this_json",
    "launch --machine-type": "test_launch.py::test_the_request_is_this_json",
    "launch --tpu-topology": "test_launch.py::test_too_few_shards_for_the_hosts",
    "launch --hosts": "test_launch.py::test_too_few_shards_for_the_hosts",
    "launch --spot": "test_launch.py::test_the_request_is_this_json",
    "launch --timeout": "test_launch.py::test_the_request_is_this_json",
    "launch --service-account": "test_launch.py::test_the_request_is_this_json",
    "launch --labels": "test_launch.py::test_the_request_is_this_json",
    "launch --detach": "test_launch.py::test_detached_found_again_and_never_submitted_twice",
    "launch --job": "test_launch.py::test_a_job_that_is_not_there",
    "launch --endpoint": "test_launch.py::test_the_request_is_this_json",
    "launch --poll": "test_launch.py::test_quota_that_stays_exceeded_is_status_1",
}

# Flags that become one field of the configuration, as given here: the field and no other changes.
REACHES = {
    "ingest": {
        "--root /r": "root",
        "--image-size 9x9": "pixels",
        "--resize-mode pad": "pixels",
        "--channels 1": "pixels",
        "--encoding png": "pixels",
        "--quality 80": "pixels",
        "--background 1,2,3": "pixels",
        "--max-pixels 99": "pixels",
        "--schema tfds": "schema",
        "--split-by group:a": "split_by",
        "--seed 1": "seed",
        "--shards 2": "shards",
        "--shard-size 1MB": "shard_size",
        "--class-names f": "class_names",
        "--label-offset 1": "label_offset",
        "--max-reject-rate 0.5": "max_reject_rate",
        "--duplicates drop": "duplicates",
        "--exclude f": "exclude",
        "--label-separator ;": "label_separator",
        "--unlabelled": "unlabelled",
        "--min-size 9": "min_size",
        "--max-area 9": "max_area",
        "--max-aspect-ratio 9": "max_aspect_ratio",
        "--exif make": "exif",
        "--overwrite": "overwrite",
        "--resume": "resume",
    },
    "train": {
        "--mode xla": "mode",
        "--epochs 2": "epochs",
        "--batch-size 2": "batch_size",
        "--optimizer adam": "optimizer",
        "--learning-rate 0.5": "learning_rate",
        "--schedule ramp=5": "schedule",
        "--augment flip": "augment",
        "--scaling unit": "scaling",
        "--image-size 9": "image_size",
        "--cache none": "cache",
        "--weights f": "weights",
        "--mixed-bfloat16": "mixed_bfloat16",
        "--steps-per-execution 2": "steps_per_execution",
        "--seed 1": "seed",
        "--tpu none": "tpu",
        "--zone z": "zone",
        "--project p": "project",
        "--output o": "output",
        "--permute-labels": "permute_labels",
        "--transform t": "transform",
    },
    "launch": {
        "--run r": "run",
        "--project p": "project",
        "--region r": "region",
        "--image i": "image",
        "--machine-type m": "machine_type",
        "--tpu-topology 2x2": "tpu_topology",
        "--hosts 2": "hosts",
        "--spot": "spot",
        "--timeout 1h": "timeout",
        "--service-account a": "service_account",
        "--labels a=b": "labels",
        "--detach": "detach",
        "--endpoint e": "endpoint",
        "--poll 1": "poll",
    },
}


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(found.choices)


def options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {a.option_strings[-1]: a for a in parser._actions if a.option_strings}


def flags() -> dict[str, argparse.Action]:
    """What every command takes, but what all of them take or the one that it extends."""
    found, known = {}, commands()
    for name, parser in known.items():
        extended = options(known[EXTENDS[name]]) if name in EXTENDS else {}
        for flag, action in options(parser).items():
            if flag not in extended and flag not in EVERYWHERE:
                found[f"{name} {flag}"] = action
    return found


def default_of(name: str, action: argparse.Action) -> str:
    """As --help shows it."""
    if action.required:
        return "required"
    if action.nargs == 0:
        return "off"
    parser = commands()[name.split()[0]]
    shown = parser._get_formatter()._expand_help(action)
    found = re.search(r"\(default: ([^()]+)\)$", shown)
    assert found, f"{name}: --help shows no default: {shown}"
    return found[1]


def sections() -> dict[str, str]:
    parts = re.split(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def rows(text: str) -> list[tuple[str, ...]]:
    """Flag, default and meaning of each row that is about flags."""
    lines = [line for line in text.splitlines() if line.startswith("| `--")]
    return [tuple(c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]


def flagged(cell: str) -> str:
    return re.findall(r"`(--[\w-]+)`", cell)[0]


# The page


def test_the_page_has_every_command_in_the_order_of_help():
    found = sections()
    assert [name for name in found if name] == list(commands())
    linked = re.findall(r"^\| \[(\w+)\]\(#\1\) \|", found[""], re.MULTILINE)
    assert linked == list(commands())
    assert [flagged(row[0]) for row in rows(found[""])] == list(EVERYWHERE)


@pytest.mark.parametrize("command", list(commands()))
def test_the_page_has_every_flag_with_its_default(command):
    found = {flagged(row[0]): row for row in rows(sections()[command])}
    wanted = {n.split()[1]: a for n, a in flags().items() if n.split()[0] == command}
    assert list(found) == list(wanted), "one row a flag, in the order of --help"
    for flag, action in wanted.items():
        assert found[flag][1] == default_of(f"{command} {flag}", action), flag
        assert found[flag][2], f"{flag}: says nothing of what it does"


@pytest.mark.parametrize("command", list(commands()))
def test_the_page_has_an_example_that_is_taken(command):
    examples = [e for e in shell_lines(sections()[command]) if e.startswith(f"tpufeed {command}")]
    assert examples
    for example in examples:
        check_example(example)


def shell_lines(text: str) -> list[str]:
    """The indented lines, those that end in a backslash with the next ones."""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(line.strip() for line in lines).replace("\\\n", " ").splitlines()


def check_example(example: str) -> None:
    words, train = split_train_flags(shlex.split(example, comments=True)[1:])
    args, rest = make_parser().parse_known_args(words)
    assert not rest, example
    checks = {"ingest": make_ingest_config, "train": make_train_config}
    if args.command == "launch":
        make_launch_config(args, train)
    elif args.command in checks:
        checks[args.command](args)


# --help


@pytest.mark.parametrize("command", list(commands()))
def test_help_shows_defaults_and_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    listed, _, examples = re.split(r"^(examples?):\n", text, flags=re.MULTILINE)
    found = [line for line in "".join(examples).replace("\\\n", " ").splitlines() if line.strip()]
    assert 1 <= len(found) <= 3
    for example in found:
        check_example(example)
    flat = " ".join(listed.split())
    for name, action in flags().items():
        if name.split()[0] == command:
            assert action.help, name
            default = default_of(name, action)
            assert default in ("required", "off") or f"(default: {default})" in flat, name


def test_a_default_is_that_of_the_parser_and_stands_there_once():
    for name, action in flags().items():
        shown = commands()[name.split()[0]]._get_formatter()._expand_help(action)
        assert shown.count("default: ") <= 1, name
        if action.nargs != 0 and action.default is not None:
            assert shown.endswith(f"(default: {action.default})"), name


# Effects


def test_every_flag_is_shown_by_a_test():
    assert list(SHOWN_BY) == list(flags()), "one row a flag, in the order of --help"
    for name, shown in SHOWN_BY.items():
        file, function = shown.split("::")
        text = text_of(file, function)
        assert text, f"{name}: {shown} is not there"
        flag = name.split()[1]
        words = (flag, field_of(name) or flag)
        assert any(re.search(rf"(?<![a-z-]){w}(?![\w-])", text) for w in words), (name, shown)


def field_of(name: str) -> str | None:
    command, flag = name.split()
    reached = REACHES.get(command, {})
    return next((field for given, field in reached.items() if given.split()[0] == flag), None)


@cache
def definitions(file: str) -> dict[str, str]:
    """The text of everything at the top of a test file, by name; decorators included."""
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            names, first = [node.name], min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names, first = [t.id for t in node.targets if isinstance(t, ast.Name)], node.lineno
        else:
            continue
        found.update(dict.fromkeys(names, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def text_of(file: str, function: str) -> str:
    """A test with the helpers, fixtures and constants of its file that it comes to."""
    known = definitions(file)
    if not function.startswith("test_") or function not in known:
        return ""
    reached, todo = [], [function]
    for name in todo:
        reached.append(known[name])
        words = set(re.findall(r"\w+", known[name]))
        # The tables of this file name every flag, and are no test of any.
        more = words & set(known) - set(todo) - {"SHOWN_BY", "REACHES"}
        todo += sorted(name for name in more if not name.startswith("test_"))
    return "\n".join(reached)


def configured(command: str, *words: str):
    base = {
        "ingest": ["--input", "/in/*/*", "--output", "/out"],
        "train": ["--data", "/d", "--model", "lenet5"],
        "launch": ["--backend", "vertex", "--data", "/d", "--output", "/o"],
    }[command]
    argv = [command, *base, *words]
    if command == "launch":
        argv += ["--", "--model", "lenet5"]
    words, train = split_train_flags(argv)
    args = make_parser().parse_args(words)
    if command == "launch":
        return make_launch_config(args, train)
    return {"ingest": make_ingest_config, "train": make_train_config}[command](args)


@pytest.mark.parametrize("command, given", [(c, g) for c in REACHES for g in REACHES[c]])
def test_a_flag_becomes_its_field_and_no_other(command, given):
    usual, found = vars(configured(command)), vars(configured(command, *given.split()))
    changed = [field for field in usual if usual[field] != found[field]]
    assert changed == [REACHES[command][given]]
    if changed == ["pixels"]:
        pixels = [n for n, v in vars(usual["pixels"]).items() if v != getattr(found["pixels"], n)]
        name = given.split()[0].removeprefix("--").replace("-", "_")
        other = {"resize_mode": ["mode"], "image_size": ["width", "height"]}
        assert pixels == other.get(name, [name])


def test_compare_becomes_modes():
    args = make_parser().parse_args(
        ["train", "--data", "d", "--model", "lenet5", "--compare", "xla,eager"]
    )
    assert parse_compare(args) == ("xla", "eager")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Eight pictures that are all transparent, and what ingest makes of them without flags."""
    folder = tmp_path_factory.mktemp("few")
    for number in range(8):
        path = folder / "in" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 4), np.uint8)).save(path)
    assert ingest(f"{folder}/in/*/*", folder / "usual", "--encoding", "png") == 0
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--image-size", "9x7"], ((7, 9), 1, 1.0)),
        (["--background", "0,255,0"], ((224, 224), 1, 0.0)),
        (["--shard-size", "1kB"], ((224, 224), 8, 1.0)),
        (["--seed", "1"], ((224, 224), 1, 1.0)),
    ],
    ids=lambda value: str(value[0]),
)
def test_a_flag_of_ingest_changes_what_is_written(few, tmp_path, words, expected):
    usual = load_manifest(str(few / "usual"))
    assert described(usual) == ((224, 224), 1, 1.0)
    assert ingest(f"{few}/in/*/*", tmp_path / "out", "--encoding", "png", *words) == 0
    found = load_manifest(str(tmp_path / "out"))
    assert described(found) == expected
    assert found.fingerprint != usual.fingerprint  # of the seed: another order


def described(manifest):
    """Height and width, shards, mean of red."""
    shards = manifest.splits["train"].shards
    return tuple(manifest.image_size), len(shards), round(manifest.channel_mean[0], 3)


TRAIN = ["--model", "lenet5", "--batch-size", "8", "--tpu", "none"]


def test_flags_of_train_come_out_in_the_run(dataset, tmp_path, capsys):
    """On pictures of 32x24, levels as they are, in half the digits, two steps at a time."""
    from pipeline.devices import import_tensorflow

    import_tensorflow()
    import keras

    words = ["--image-size", "20x16", "--scaling", "none", "--mixed-bfloat16"]
    words += ["--steps-per-execution", "2", "--cache", str(tmp_path / "cache"), "--epochs", "2"]
    words += ["--optimizer", "adam", "--learning-rate", "1e-5", "--schedule", "ramp=1,start=1e-6"]
    argv = ["train", "--data", str(dataset), *TRAIN, *words, "--output", str(tmp_path / "run")]
    assert main(argv) == 0, capsys.readouterr().err
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    assert model.input_shape[1:] == (16, 20, 3)
    assert [layer.scale for layer in model.layers if hasattr(layer, "scale")] == [1.0]
    assert "mixed_bfloat16" in {layer.dtype_policy.name for layer in model.layers}
    assert any((tmp_path / "cache").rglob("*.data-*"))
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    assert [epoch["learning_rate"] for epoch in history["epochs"]] == pytest.approx([1e-6, 1e-5])
    # Five steps an epoch: a program for two of them, one for the fifth, one for the test.
    assert load_manifest(str(dataset)).splits["train"].records // 8 == 5
    assert history["traces"] == 3


def test_the_seed_of_train_gives_the_first_weights(dataset, tmp_path, capsys):
    """So small a rate leaves them as they were."""
    from pipeline.devices import import_tensorflow

    import_tensorflow()
    import keras

    kernels = []
    for number, seed in enumerate(("5", "5", "6")):
        run = str(tmp_path / str(number))
        words = ["--epochs", "1", "--seed", seed, "--learning-rate", "1e-12", "--output", run]
        argv = ["train", "--data", str(dataset), *TRAIN, *words]
        assert main(argv) == 0, capsys.readouterr().err
        kernels.append(keras.models.load_model(f"{run}/model.keras").get_weights()[0])
    assert np.allclose(kernels[0], kernels[1], atol=1e-6)
    assert not np.allclose(kernels[0], kernels[2], atol=1e-3)
