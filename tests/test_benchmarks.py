"""The benchmarks run on a few pictures and give all their rows; their figures are not looked at."""

import json
import os
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from helpers import draw

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmarks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import contenders
        import inputs
        import run
        import slow_store

        yield {"run": run, "inputs": inputs, "slow_store": slow_store, "contenders": contenders}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flowers")
    for number in range(8):
        draw(folder / ("ash", "birch")[number % 2] / f"{number}.jpg", seed=number, size=(90, 70))
    return folder


def test_sections_give_their_rows(flowers, tmp_path):
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("before\n<!-- measured -->\nold\n<!-- measured -->\nafter\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--only", "C,D"]
    command += ["--flowers", str(flowers), "--json", str(found), "--into", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    document = json.loads(found.read_text())
    names = {
        table["title"][:2]: [row["name"] for row in table["rows"]] for table in document["tables"]
    }
    assert names["C."] == ["tpufeed ingest", "tpufeed verify"]
    streams = [row["name"] for row in document["tables"][1]["rows"]]
    assert len(streams) == 9 and streams[0] == "a file per image"
    assert [len(table["ratios"]) for table in document["tables"]] == [2, 4, 2]
    assert all(row["median"] > 0 for table in document["tables"] for row in table["rows"])
    assert "| tpufeed, uint8 |" in done.stdout
    text = page.read_text()
    assert text.startswith("before\n<!-- measured -->") and text.endswith("measured -->\nafter\n")
    assert "old" not in text and "| tpufeed ingest |" in text


def test_an_unknown_section_is_refused():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--only", "C,Z"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--only Z: sections are A, B, C, D, E, F, G, H" in done.stderr


@pytest.mark.parametrize("name", ["our-pixels-pool", "pillow-pool", "turbo-pool", "naive-beam"])
def test_contenders_take_every_picture(flowers, tmp_path, name):
    command = [sys.executable, str(ROOT / "benchmarks" / "contenders.py"), name, "--size", "32"]
    command += ["--input", str(flowers), "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["images"] == 8 and told["seconds"] > 0


def test_copies_differ_in_every_byte_string(benchmarks, flowers, tmp_path):
    benchmarks["inputs"].multiply(flowers, tmp_path / "many", count=20)
    contents = [path.read_bytes() for path in (tmp_path / "many").rglob("*.jpg")]
    assert len(contents) == len(set(contents)) == 20


def test_a_table_says_what_was_reached(benchmarks):
    run = benchmarks["run"]
    table = run.Table("title")
    for seconds in (1.0, 2.0, 4.0):
        table.add("ours", run.Sample(100, seconds, cpu=3.0, peak=2_000_000))
    table.add("theirs", run.Sample(100, 4.0, cpu=1.0, peak=1_000_000))
    table.compare("ours", "theirs", least=1.5)
    table.compare("ours", "theirs", least=2.5)
    lines = table.markdown().splitlines()
    assert "| ours | 50 (25 to 100) | 30,000 | 2 |" in lines
    assert "| ours / theirs | 2.00 | at least 1.5 | reached |" in lines
    assert "| ours / theirs | 2.00 | at least 2.5 | missed |" in lines


def test_the_slow_store_answers_in_its_time(benchmarks, tmp_path):
    (tmp_path / "a b.txt").write_bytes(b"0123456789")
    with benchmarks["slow_store"].serve(tmp_path, delay=0.01) as environment:
        context = ssl.create_default_context(cafile=environment["CURL_CA_BUNDLE"])
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({"https": environment["HTTPS_PROXY"]}),
            urllib.request.HTTPSHandler(context=context),
        )
        url = "https://storage.googleapis.com/bucket/a%20b.txt"
        request = urllib.request.Request(url, headers={"Range": "bytes=3-5"})
        assert opener.open(request).read() == b"345"
        facts = opener.open("https://www.googleapis.com/storage/v1/b/bucket/o/a%20b.txt").read()
        assert json.loads(facts)["size"] == "10"
        names = opener.open("https://www.googleapis.com/storage/v1/b/bucket/o?prefix=a").read()
        assert [item["name"] for item in json.loads(names)["items"]] == ["a b.txt"]
