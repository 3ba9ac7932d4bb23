"""The image of training jobs, as far as it can be held to account without building it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline import __version__
from pipeline.config import make_parser

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docker" / "trainer.Dockerfile"
REQUIREMENTS = ROOT / "docker" / "trainer-requirements.txt"
UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "name resolution", "connection broken")


def instructions(name: str) -> list[str]:
    """What follows each of the file's instructions of a name, continued lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(found.split()) for found in re.findall(rf"^{name} (.+)$", text, re.MULTILINE)]


def read_pins(path: Path) -> dict[str, set[str]]:
    """Versions by name; a line that is not NAME==VERSION is an error."""
    pins: dict[str, set[str]] = {}
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            requirement = Requirement(text)
            (only,) = requirement.specifier
            assert only.operator == "=="
            pins.setdefault(canonicalize_name(requirement.name), set()).add(only.version)
    return pins


def test_tensorflow_is_the_tpus_and_nothing_is_pinned_twice():
    own, common = read_pins(REQUIREMENTS), read_pins(ROOT / "constraints.txt")
    assert own["tensorflow-tpu"] == {"2.20.0"}
    assert not set(own) & set(common)
    assert common["tensorflow"] == {"2.21.0"}  # and so the image must not take it, nor what does
    assert not {"tensorflow", "tensorflow-transform", "tfx-bsl"} & set(own)
    (install,) = (text for text in instructions("RUN") if "pip install" in text)
    assert "[train]" not in install


def test_what_is_installed_is_held_to_both_files_at_once():
    (install,) = (text for text in instructions("RUN") if "pip install" in text)
    folder = "/tmp/tpufeed"
    assert install.split(" && ")[0].split() == [
        *("pip", "install", "--no-cache-dir", "-c", f"{folder}/constraints.txt"),
        *("-r", f"{folder}/{REQUIREMENTS.name}", folder),
    ]


def test_files_are_there_and_let_in():
    let_in = Path(f"{FILE}.dockerignore").read_text().splitlines()
    assert let_in[0] == "*"
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    assert {f"!{name}" for name in copied} == {line for line in let_in if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert copied >= {"setup.py", "constraints.txt", "pipeline", "transforms", "README.md"}
    assert f"docker/{REQUIREMENTS.name}" in copied


def test_python_is_that_of_the_constraints_and_of_the_library_path():
    (base,) = instructions("FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim-bookworm", base)[1]
    assert f"brings on Python {version}," in (ROOT / "constraints.txt").read_text()
    variables = dict(pair.split("=", 1) for text in instructions("ENV") for pair in text.split())
    assert variables == {
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": (
            f"/usr/local/lib/python{version}/site-packages/libtpu/libtpu.so"
        ),
    }


def test_the_entry_point_is_a_command_that_is_there():
    (entry,) = instructions("ENTRYPOINT")
    program, command = json.loads(entry)
    setup = (ROOT / "setup.py").read_text()
    assert f'"{program} = pipeline.__main__:run"' in setup
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert command == "train" and command in commands.choices
    run = "from pipeline.__main__ import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", run, command, "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "--data DIR" in done.stdout


def test_every_package_resolves_together(project, tmp_path):
    """By pip, as the image is built; what the tests run with already stands, so it is quick."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"),
            *("--quiet", "--no-build-isolation", "--retries", "1", "--timeout", "20"),
            *("--report", report, "-c", ROOT / "constraints.txt", "-r", REQUIREMENTS, project),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_NO_CACHE_DIR": "1"},
        timeout=500,
    )
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("pip reaches no index, and so cannot look up tensorflow-tpu")
    assert done.returncode == 0, done.stderr
    new = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    pins = read_pins(ROOT / "constraints.txt") | read_pins(REQUIREMENTS)
    assert new.pop("tpufeed", __version__) == __version__
    assert {"tensorflow-tpu", "libtpu", "tensorboard"} <= set(new)
    assert "tensorflow" not in new
    for name, version in new.items():
        assert version in pins[name], f"{name} {version} is pinned nowhere"
