"""README as a stranger follows it: cloned, then every command run as it stands, in its order.

Commands are what stands in README's blocks of sh and python. All are run, with two exceptions:

- ./run_tests.sh, of which this test is a part;
- those that name my-project or my-bucket, which need an account. They are checked instead: flags by
  the parser of tpufeed, ./run_dataflow.sh by a dry run.

The reader's pictures, photos/, are drawn. To save the installation, the clone gets an environment
whose packages are those of the running one, where both were made from the same setup.py and
constraints.txt. It is truly installed where CI, TPUFEED_LONG=1 or TPUFEED_INSTALL=1 says so:

    TPUFEED_INSTALL=1 ./run_tests.sh tests/test_readme.py -s
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import draw

from pipeline.config import (
    make_ingest_config,
    make_launch_config,
    make_parser,
    split_train_flags,
)

ROOT = Path(__file__).resolve().parents[1]
TESTS = "./run_tests.sh"
ACCOUNT = re.compile(r"\bmy-(project|bucket)\b")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Python and sh in one, as pip writes it where the first line would hold a space.
ENTRY = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import sys
from pipeline.__main__ import run
sys.argv[0] = "tpufeed"
run()
"""


class Step(NamedTuple):
    """One command of README, or one program."""

    kind: str
    text: str

    @property
    def title(self) -> str:
        return "python: " + self.text.splitlines()[0] if self.kind == "python" else self.text


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def steps() -> list[Step]:
    found = []
    for kind, body in FENCE.findall(readme()):
        if kind == "python":
            found.append(Step(kind, body))
        elif kind == "sh":
            lines = re.sub(r"\s*\\\n\s*", " ", body).splitlines()
            found += [Step(kind, line.strip()) for line in lines if line.strip()]
    return found


def words_of(step: Step) -> list[str]:
    return shlex.split(step.text, comments=True)


def needs_account(step: Step) -> bool:
    return bool(ACCOUNT.search(step.text))


# What is run, and that nothing else is left out


def test_every_block_says_what_it_is():
    text = readme()
    assert text.count("```") == 2 * len(FENCE.findall(text))
    assert {kind for kind, _ in FENCE.findall(text)} == {"sh", "python", "text"}
    outside = FENCE.sub("", text)
    assert not re.search(r"^ {4}|^\t", outside, re.MULTILINE), "an indented block is no command"
    for name in ("my-project", "my-bucket"):  # the rule, where a reader sees it
        assert f"`{name}`" in outside
    assert sum(words_of(step) == [TESTS] for step in steps() if step.kind == "sh") == 1


def test_the_first_screen_has_the_two_commands_and_the_program():
    first = [step for step in steps() if not needs_account(step)][:4]
    assert [words_of(step)[0] for step in first[:3]] == ["./run_local.sh", TESTS, "./run_local.sh"]
    assert first[3].kind == "python" and "tf.data.TFRecordDataset" in first[3].text
    lines = readme().splitlines()
    assert lines[0] == "# tpufeed" and lines[2].startswith("tpufeed turns a glob of images into")
    assert lines.index("```python") < 40


def test_every_page_and_picture_is_there():
    linked = set(re.findall(r"\]\(([\w./-]+)\)", readme()))
    assert {name for name in linked if not (ROOT / name).is_file()} == set()
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set(), "a page that README does not name"


def test_commands_that_need_an_account_have_flags_that_are_taken():
    found = [step for step in steps() if needs_account(step)]
    assert len(found) >= 2
    for step in found:
        words = words_of(step)
        at = next(i for i, word in enumerate(words) if "=" not in word)  # variables come first
        program, *argv = words[at:]
        if program == "tpufeed":
            argv, train = split_train_flags(argv)
            args, rest = make_parser().parse_known_args(argv)
            assert args.command == "launch" and not rest
            assert make_launch_config(args, train).backend == "vertex"
        else:
            assert program == "./run_dataflow.sh"
            variables = dict(word.split("=", 1) for word in words[:at])
            places = ["--input", variables["INPUT"], "--output", variables["OUTPUT"]]
            args, rest = make_parser().parse_known_args(["ingest", *places, *argv])
            assert make_ingest_config(args) and not rest


# The clone


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clone_into(folder: Path) -> None:
    """What is committed, and over it what is not yet."""
    git("clone", "--quiet", str(ROOT), str(folder))
    changed = git("diff", "--name-only", "-z", "HEAD")
    changed += git("ls-files", "--others", "--exclude-standard", "-z")
    for name in filter(None, changed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def fingerprint_of(folder: Path) -> str:
    """As run_local.sh computes it."""
    command = "cat setup.py constraints.txt pipeline/__init__.py | cksum"
    return subprocess.check_output(command, shell=True, cwd=folder, text=True).strip()


def borrow_packages(clone: Path) -> bool:
    """Makes the clone's .venv of the packages that this test runs with; False where it must not."""
    stamp = Path(sys.prefix, "tpufeed-ready")
    if any(os.environ.get(name) for name in ("CI", "TPUFEED_LONG", "TPUFEED_INSTALL")):
        return False
    if not stamp.is_file():
        return False
    fingerprint, extras = stamp.read_text(encoding="utf-8").splitlines()
    if fingerprint != fingerprint_of(clone) or not {"train", "test"} <= set(extras.split(",")):
        return False
    venv = clone / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = venv / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # The clone comes first: that of the running environment is another checkout.
    paths = f"{clone}\n{sysconfig.get_path('purelib')}\n"
    (packages / "clone.pth").write_text(paths, encoding="utf-8")
    entry = venv / "bin" / "tpufeed"
    entry.write_text(ENTRY.format(python=venv / "bin" / "python"), encoding="utf-8")
    entry.chmod(0o755)
    # test brings all that report asks for.
    (venv / "tpufeed-ready").write_text(f"{fingerprint}\ntrain,report,test\n", encoding="utf-8")
    return True


def environment() -> dict[str, str]:
    """That of a reader who has no environment active, and no accelerator."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    folders = [f for f in env["PATH"].split(os.pathsep) if not f.startswith(sys.prefix)]
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "LC_ALL": "C.UTF-8"}
    return {**env, "PATH": os.pathsep.join(folders), **quiet}


def script_of(todo: list[Step]) -> str:
    """One session of bash, as a reader has one; what begins when is told on descriptor 3."""
    lines = ["set -eo pipefail"]
    for number, step in enumerate(todo):
        lines.append(f"printf '%s {number}\\n' \"$EPOCHREALTIME\" >&3")
        lines.append(f'printf "\\n== {number}\\n"')
        if step.kind == "python":
            lines += [".venv/bin/python - <<'END_OF_README'", step.text + "END_OF_README"]
        else:
            lines.append(step.text)
    return "\n".join([*lines, f"printf '%s {len(todo)}\\n' \"$EPOCHREALTIME\" >&3", ""])


def follow(todo: list[Step], clone: Path, folder: Path) -> tuple[list[float], list[str]]:
    """Runs the steps; returns seconds and output of each."""
    script, marks, log = folder / "steps.sh", folder / "marks", folder / "log"
    script.write_text(script_of(todo), encoding="utf-8")
    with open(marks, "wb") as told, open(log, "wb") as output:
        code = subprocess.run(
            ["bash", "-c", f'exec bash "$1" 3>&{told.fileno()}', "bash", str(script)],
            cwd=clone,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[told.fileno()],
            check=False,
        ).returncode
    times = [float(line.split()[0]) for line in marks.read_text().splitlines()]
    said = re.split(r"^== \d+$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    assert code == 0, f"{todo[len(times) - 1].text}: exit {code}:\n{said[-1][-3000:]}"
    return [end - start for start, end in zip(times, times[1:], strict=False)], said


@pytest.mark.timeout(1800)
def test_a_strangers_way(tmp_path, capsys):
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository, so nothing to clone")
    clone = tmp_path / "a fresh clone"
    clone_into(clone)
    borrowed = borrow_packages(clone)
    for number in range(40):
        draw(clone / "photos" / "ab"[number % 2] / f"{number}.jpg", seed=number, size=(320, 240))
    todo = [s for s in steps() if not needs_account(s) and (s.kind, s.text[:14]) != ("sh", TESTS)]
    for step in (step for step in steps() if "./run_dataflow.sh" in step.text):
        todo.append(step._replace(text=step.text.replace(".sh ", ".sh --dry-run ", 1)))
    seconds, said = follow(todo, clone, tmp_path)

    with capsys.disabled():
        print(f"\npackages {'of the running environment' if borrowed else 'installed'}; seconds:")
        for spent, step in zip(seconds, todo, strict=True):
            print(f"{spent:7.1f}  {step.title[:88]}")
        print(f"{sum(seconds):7.1f}  in all")
    check_what_is_promised(clone, todo, said)


def check_what_is_promised(clone: Path, todo: list[Step], said: list[str]) -> None:
    (listed,) = (body for kind, body in FENCE.findall(readme()) if kind == "text")
    for line in listed.splitlines():
        assert (clone / "sample" / "tfrecords" / line.split()[0]).is_file(), line
    rejects = (clone / "sample" / "tfrecords" / "rejects.jsonl").read_text().splitlines()
    assert f"the {len(rejects)} broken files" in listed
    first, second = (out for step, out in zip(todo, said, strict=True) if step.kind == "python")
    assert len(re.findall(r"^\(192, 192, 3\) [0-4]$", first, re.MULTILINE)) == 3
    assert "\n(128, 96, 96, 3) (128,)\n" in second
    for name in ("flowers/report.html", "seven.jpg", "first/history.json", "serving"):
        assert (clone / "sample" / name).exists(), name
    assert (clone / "records" / "dataset.json").is_file()
    assert '"environment"' in said[-1], said[-1][-2000:]
