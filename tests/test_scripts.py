"""The shell scripts and the packaging, as far as that goes without installing anything."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("*.sh"), ROOT / ".ci" / "run"])

# A stand-in for a Python, named by what it lacks.
TOO_OLD = "#!/bin/sh\necho 3.9\nexit 1\n"
NO_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\necho 3.12\n'


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts, in a path with a space, where nothing is installed."""
    copy = tmp_path / "a copy"
    (copy / "pipeline").mkdir(parents=True)
    for name in ("run_local.sh", "setup.py", "constraints.txt", "pipeline/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def make_stand_in(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(script):
    assert run("bash", "-n", script).stderr == ""
    assert os.access(script, os.X_OK)


def test_help_installs_nothing(checkout):
    done = run(checkout / "run_local.sh", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ./run_local.sh")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frobnicate"], "--frobnicate: unknown flag; GLOB and OUT come first"),
        (["photos/*/*"], "OUT: missing after the glob photos/*/*"),
        (["photos/*/*", "--shards"], "OUT: missing after the glob photos/*/*"),
        (["a.jpg", "b.jpg", "out"], "out: is neither GLOB nor OUT nor a flag; put the glob in"),
        ([""], "GLOB: must not be empty"),
        (["--setup-only", "--with", "tests"], "--with tests: must be of train, report"),
        (["--setup-only", "now"], "--setup-only: takes nothing but --with"),
    ],
)
def test_wrong_words_are_one_line_and_status_2(checkout, words, message):
    done = run(checkout / "run_local.sh", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"run_local.sh: error: {message}")
    assert done.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "PYTHON={python}: must be a Python from 3.10 to 3.13; set it to one, or unset it\n"),
        (TOO_OLD, "PYTHON={python}: must be a Python from 3.10 to 3.13; set it to one, or"),
        (NO_VENV, "{python}: has no venv module; install it (Debian: python3.12-venv), or set"),
    ],
    ids=["missing", "too old", "no venv"],
)
def test_unsuitable_python_is_one_line_and_status_1(checkout, tmp_path, text, message):
    python = tmp_path / "python"
    if text is not None:
        make_stand_in(python, text)
    done = run(checkout / "run_local.sh", "--setup-only", PYTHON=str(python))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("run_local.sh: error: " + message.format(python=python))
    assert done.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


def test_no_python_on_the_path_is_one_line_and_status_1(checkout, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    done = run(
        tools / "bash", checkout / "run_local.sh", "--setup-only", PATH=str(tools), PYTHON=""
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "run_local.sh: error: python: none from 3.10 to 3.13 found on the path; install one,"
        " or set PYTHON=/path\n"
    )


def test_an_interrupted_installation_is_begun_again(checkout, tmp_path):
    venv = checkout / ".venv"
    venv.mkdir()
    (venv / "tpufeed-ready").write_text("0 0\n\n", encoding="utf-8")
    (venv / "tpufeed-unfinished").touch()
    (venv / "half").touch()
    # This one makes a venv that cannot install, which is as far as this test goes.
    python = make_stand_in(
        tmp_path / "python", '#!/bin/sh\n[ "$1" = -m ] && exit 1\necho 3.12\nexit 0\n'
    )
    done = run(checkout / "run_local.sh", "--setup-only", PYTHON=str(python))
    assert done.returncode == 1
    assert sorted(path.name for path in venv.iterdir()) == ["tpufeed-unfinished"]


def test_sdist_holds_the_two_packages_only(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    for name in ("pipeline", "transforms", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("tpufeed-*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames() if name.endswith(".py")]
    modules = {
        path.relative_to(ROOT).as_posix()
        for package in ("pipeline", "transforms")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sorted(names) == sorted({"setup.py", *modules})


def test_constraints_are_exact_and_complete():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    form = re.compile(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.\d+")?')
    assert [line for line in pins if not form.fullmatch(line)] == []
    names = {line.split("==")[0].lower() for line in pins}
    assert {"apache-beam", "pillow", "google-crc32c", "pyarrow", "tensorflow"} <= names
    assert not {"pip", "tpufeed"} & names
