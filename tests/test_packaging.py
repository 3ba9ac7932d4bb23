"""What workers install: the sdist, the worker image, and the Flex Template's parameters."""

import importlib.util
import json
import re
import tarfile
from pathlib import Path

import pytest
from google.cloud import dataflow
from google.protobuf import json_format

from pipeline.config import make_parser

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"

# Flags of ingest that the Flex Template has no parameter for.
OMITTED = {
    "help": "prints and ends",
    "debug": "the launcher's log is for people who know the job",
    "quiet": "the launcher's log is all that tells of the launcher",
}


def python_files(package: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")]


def test_the_sdist_holds_the_two_packages_and_what_builds_them(clean_install):
    with tarfile.open(clean_install.sdist) as archive:
        files = {m.name.split("/", 1)[1] for m in archive.getmembers() if m.isfile()}
    other = {"setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    assert {name for name in files if not name.startswith("tpufeed.egg-info/")} == {
        "PKG-INFO",
        *other,
        *python_files("pipeline"),
        *python_files("transforms"),
    }


def test_the_sdist_installs_alone_without_tensorflow(clean_install, capsys):
    facts = clean_install.facts
    size = clean_install.sdist.stat().st_size
    with capsys.disabled():
        print(
            f"\nsdist {size / 1e3:.0f} kB, installed {facts['bytes'] / 1e3:.0f} kB beside "
            f"{len(facts['packages']) - 1} packages of {facts['total_bytes'] / 1e6:.0f} MB; "
            f"import {facts['seconds']:.2f} s after Beam's {facts['seconds_beam']:.2f} s; memory "
            f"{facts['kib'] / 1024:.0f} MiB, of which Beam {facts['kib_beam'] / 1024:.0f} MiB"
        )
    assert sorted(facts["files"]) == sorted(python_files("pipeline") + python_files("transforms"))
    assert facts["from"].startswith(str(clean_install.python.parents[1]))
    heavy = ("tensorflow", "keras", "torch", "jax", "tfx")
    for kind in ("packages", "loaded"):
        assert [name for name in facts[kind] if name.startswith(heavy)] == []
    assert size < 1_000_000
    assert facts["kib"] - facts["kib_beam"] < 100 * 1024


def test_the_image_is_of_the_versions_that_are_tested():
    text = (DOCKER / "worker.Dockerfile").read_text()
    pins = (ROOT / "constraints.txt").read_text()
    (beam,) = re.findall(r"^apache-beam==(.+)$", pins, re.MULTILINE)
    assert f"FROM apache/beam_python3.11_sdk:{beam}\n" in text
    assert "python311-template-launcher-base" in text
    assert "-c /tmp/tpufeed/constraints.txt" in text


def test_the_image_is_built_from_files_that_are_there_and_let_in():
    text = (DOCKER / "worker.Dockerfile").read_text()
    let_in = (DOCKER / "worker.Dockerfile.dockerignore").read_text().splitlines()
    assert let_in[0] == "*"
    sources = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for name in line.split()
    ]
    assert len(sources) > 8
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_in


def load_entry_point():
    spec = importlib.util.spec_from_file_location("flex_template", DOCKER / "flex_template.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ingest_flags() -> dict:
    parser = make_parser()
    (commands,) = (a for a in parser._actions if a.dest == "command")
    return {action.dest: action for action in commands.choices["ingest"]._actions}


@pytest.fixture
def template() -> dict:
    return json.loads((DOCKER / "flex_template.json").read_text())


def test_the_templates_metadata_is_of_the_api(template):
    message = json_format.ParseDict(template, dataflow.TemplateMetadata.pb()())
    assert len(message.parameters) == len(template["parameters"])
    for parameter in template["parameters"]:
        assert re.fullmatch("[a-z][a-z0-9_]*", parameter["name"])
        for regex in parameter.get("regexes", []):
            re.compile(regex)


def test_the_templates_parameters_are_the_flags(template):
    flags = ingest_flags()
    parameters = {parameter["name"]: parameter for parameter in template["parameters"]}
    image = parameters.pop("sdk_container_image")  # Beam's
    assert image["isOptional"] is False
    assert set(parameters) == set(flags) - set(OMITTED)
    assert set(OMITTED) <= set(flags)
    for name, parameter in parameters.items():
        assert parameter["isOptional"] is not flags[name].required, name
        assert (parameter["paramType"] == "BOOLEAN") == (flags[name].nargs == 0), name


def test_the_templates_choices_and_defaults_are_the_command_lines(template):
    flags = ingest_flags()
    for parameter in template["parameters"]:
        name, help_text = parameter["name"], parameter["helpText"]
        choices = [option["value"] for option in parameter.get("enumOptions", [])]
        text = "" if name == "sdk_container_image" else flags[name].help
        assert all(choice in text for choice in choices), name
        if found := re.search(r"Default: ([^ ]+)\.$", help_text):
            default = flags[name].default
            assert found[1] == str(default) or found[1] in text, name


def test_the_entry_point_takes_every_parameter(template):
    entry = load_entry_point()
    named = {p["name"] for p in template["parameters"]} - {"sdk_container_image"}
    assert {*entry.FLAGS, *entry.SWITCHES} == named


def test_the_entry_point_makes_flags_of_parameters():
    make_argv = load_entry_point().make_argv
    given = [
        "--input=gs://b/*/*",
        "--image_size=96",
        "--overwrite=true",
        "--sdk_container_image=gcr.io/p/i",
        "--template_location=gs://b/t",
    ]
    assert make_argv(given) == [
        "ingest",
        "--runner=DataflowRunner",
        "--input=gs://b/*/*",
        "--image-size=96",
        "--overwrite",
        "--sdk_container_image=gcr.io/p/i",
        "--template_location=gs://b/t",
    ]
    assert make_argv(["--overwrite=False"]) == ["ingest", "--runner=DataflowRunner"]
    with pytest.raises(ValueError, match="overwrite=1: must be true or false"):
        make_argv(["--overwrite=1"])
    args, rest = make_parser().parse_known_args(make_argv([*given, "--output=gs://b/o"]))
    assert (args.image_size, args.overwrite, args.output) == ("96", True, "gs://b/o")
    assert rest == ["--runner=DataflowRunner", *given[3:]]
