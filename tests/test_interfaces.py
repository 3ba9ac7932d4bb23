"""The Python interface, the command and the module are one: same bytes, same words, same codes."""

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import pytest
from helpers import draw

from pipeline.config import IngestConfig
from pipeline.ingest import ingest_images
from transforms.image import PixelPolicy
from transforms.manifest import load_manifest
from transforms.records import Input

ROOT = Path(__file__).resolve().parents[1]
COMMAND = Path(sys.executable).parent / "tpufeed"


def test_a_configuration_made_by_hand_gives_the_data_set_of_the_command_line(
    pictures, dataset, tmp_path
):
    config = IngestConfig(
        inputs=(Input(f"{pictures}/*/*"),),
        output=str(tmp_path / "out"),
        pixels=PixelPolicy(width=32, height=24),
        weights=(("train", Fraction("0.7")), ("validation", Fraction("0.3"))),
        shards=6,
    )
    mine, theirs = ingest_images(config), load_manifest(str(dataset))
    assert mine.fingerprint == theirs.fingerprint
    assert {**mine.config, "output": ""} == {**theirs.config, "output": ""}
    for path in dataset.glob("*.tfrecord"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_the_command_is_the_module():
    (entry,) = metadata.distribution("tpufeed").entry_points.select(name="tpufeed")
    assert entry.value == "pipeline.__main__:run"
    assert 'console_scripts": ["tpufeed = pipeline.__main__:run"]' in (
        (ROOT / "setup.py").read_text(encoding="utf-8")
    )


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed beside this Python")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        (["ingest", "--help"], 0),
        ([], 2),
        (["ingest", "--input", "a/*", "--output", "o", "--quality", "0"], 2),
        (["ingest", "--input", "absent/*/*", "--output", "o"], 1),
        (["inspect", "absent"], 1),
        (["inspect", "{dataset}", "--record", "3", "--json"], 0),
        (["verify", "{dataset}", "--quick"], 0),
    ],
    ids=str,
)
def test_the_command_and_the_module_say_and_return_the_same(dataset, tmp_path, words, code):
    words = [word.format(dataset=dataset) for word in words]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    outcomes = []
    for start in ([str(COMMAND)], [sys.executable, "-m", "pipeline"]):
        done = subprocess.run(
            [*start, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
        )
        outcomes.append((done.returncode, done.stdout, done.stderr))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == code


def test_what_docs_api_says_runs(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    for number in range(30):
        label = ("ash", "birch", "cedar")[number % 3]
        draw(tmp_path / "photos" / label / f"{number}.jpg", seed=number)
    draw(tmp_path / "photos" / "ash" / "small.jpg", seed=99, size=(20, 20))
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    program = textwrap.dedent("".join(blocks))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/api.md", "exec"), {})
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("30 ('ash', 'birch', 'cedar') {'filtered': 1} ")
    assert "{'dtype': 'int64', 'shape': [], 'default': 0}" in lines
    assert "True" in lines
    assert any(line.startswith("(4, 192, 192, 3) b'' [") for line in lines)
