"""The bar on a real pseudo-terminal, the lines elsewhere, and where their counts come from."""

import io
import os
import re
import sys
import threading
from types import SimpleNamespace

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from helpers import draw
from terminal import on_terminal, screen

from pipeline.__main__ import main
from pipeline.progress import (
    Counts,
    count_in_file,
    describe_counts,
    make_counts,
    read_metrics,
    show_lines,
)
from transforms import progress

FLAGS = ["--image-size", "32x24"]
WORKERS = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]


def command(pictures, output, *flags: str) -> list[str]:
    words = [sys.executable, "-m", "pipeline", "ingest", "--input", f"{pictures}/*/*"]
    return [*words, "--output", str(output), *FLAGS, *flags]


@pytest.mark.parametrize("flags", [[], WORKERS], ids=["in process", "worker processes"])
def test_a_bar_on_a_terminal(pictures, tmp_path, flags):
    code, out, shown = on_terminal(command(pictures, tmp_path / "out", *flags))
    assert code == 0, shown
    assert re.search(r"images: 100%\|.*\| 60/60 \[.* images/s, 0 rejects\]", shown), shown
    assert screen(shown) == [""]  # gone, and nothing left of it
    assert out.startswith(f"{tmp_path}/out: 60 records, 3 classes")
    assert "\r" not in out and "\x1b" not in out


def test_an_error_stands_alone_where_the_bar_was(tmp_path):
    broken = tmp_path / "in" / "ash"
    broken.mkdir(parents=True)
    for number in range(3):
        (broken / f"{number}.jpg").write_bytes(b"no picture")
    code, out, shown = on_terminal(command(tmp_path / "in", tmp_path / "out", "--shards", "1"))
    assert (code, out) == (1, "")
    assert "%|" in shown or "listing [" in shown
    line, empty = screen(shown)
    assert line.startswith("tpufeed ingest: error: 3 of 3 inputs were rejected (unidentified 3)")
    assert empty == ""


def test_warnings_are_printed_above_the_bar(tmp_path):
    draw(tmp_path / "in" / "ash" / "1.PNG", seed=1)
    draw(tmp_path / "in" / "ash" / "2.png", seed=2)
    words = command(tmp_path / "in", tmp_path / "out", "--shards", "1")
    code, _, shown = on_terminal([word.replace("/*/*", "/*/*.png") for word in words])
    assert code == 0, shown
    assert "1 file(s) not matched for upper or lower case" in "".join(screen(shown))
    assert "%|" not in "".join(screen(shown))


def test_a_terminal_without_a_width_has_no_bar(pictures, tmp_path):
    code, _, shown = on_terminal(command(pictures, tmp_path / "out"), columns=0)
    assert (code, shown) == (0, "")


def test_quiet_is_quiet_on_a_terminal_too(pictures, tmp_path):
    assert on_terminal(command(pictures, tmp_path / "out", "--quiet")) == (0, "", "")
    assert (tmp_path / "out" / "dataset.json").exists()


def test_no_bar_where_there_is_no_terminal(pictures, tmp_path, capfd):
    words = ["ingest", "--input", f"{pictures}/*/*", "--output", str(tmp_path / "out"), *FLAGS]
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert "%|" not in err and not re.search(r"[\x00-\x09\x0b-\x1f]", out + err)
    assert re.search(r"^  done in \d+\.\d s$", out, re.MULTILINE)
    assert main([*words, "--overwrite", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_line_now_and_then():
    printed = io.StringIO()
    counts = iter([Counts(), Counts(10_000, 2_000, 0, 1)])
    last = Counts(10_000, 4_000, 0, 3)
    enough = threading.Event()

    def read() -> Counts:
        if printed.getvalue().count("\n") >= 4:
            enough.set()
        return next(counts, last)

    with show_lines(read, printed, every=0.01):
        assert enough.wait(30)
    lines = printed.getvalue().splitlines()
    assert lines[:2] == [
        "tpufeed ingest: listing",
        "tpufeed ingest: 2,000 of 10,000 images (20 %), 1 rejects",
    ]
    # The rate is that since the images were listed: how many it was, the clock says.
    assert re.fullmatch(
        r"tpufeed ingest: 4,000 of 10,000 images \(40 %\), [\d,]+ images/s, \S+ s left, 3 rejects",
        lines[2],
    )
    assert printed.getvalue().isascii() and "\r" not in printed.getvalue()


def test_no_line_of_a_short_run():
    printed = io.StringIO()
    with show_lines(Counts, printed):
        pass
    assert printed.getvalue() == ""


@pytest.mark.parametrize(
    ("counts", "first", "seconds", "line"),
    [
        (Counts(), 0, 0.0, "listing"),
        (Counts(400, 0), 0, 10.0, "0 of 400 images (0 %), 0 rejects"),
        (
            Counts(400, 100),
            0,
            10.0,
            "100 of 400 images (25 %), 10 images/s, 30.0 s left, 0 rejects",
        ),
        (
            Counts(400, 300, kept=200),
            0,
            10.0,
            "300 of 400 images (75 %), 10 images/s, 10.0 s left, 0 rejects",
        ),
        (
            Counts(90_000, 30_000, rejects=1_234),
            29_900,
            10.0,
            "30,000 of 90,000 images (33 %), 10 images/s, 1 h 40 min left, 1,234 rejects",
        ),
    ],
)
def test_lines(counts, first, seconds, line):
    assert describe_counts(counts, first=first, seconds=seconds) == f"tpufeed ingest: {line}"


def test_counts():
    numbers = {"images": 10, "records": 5, "rejects": 2, "kept": 1, "refused": 4}
    assert make_counts(numbers) == Counts(images=10, done=8, kept=1, rejects=6)
    assert make_counts({"images": 4, "records": 9}).done == 4  # a bundle was done again
    assert make_counts({}) == Counts()


def test_workers_report_into_a_file():
    with count_in_file() as read:
        assert read() == Counts()
        path = os.environ[progress.VARIABLE]
        progress.report(progress.IMAGES, 3)
        meter = progress.Meter()
        for _ in range(2):
            meter.count(progress.RECORDS)
        meter.report()
        progress.report(progress.REJECTS)
        assert read() == Counts(images=3, done=3, rejects=1)
        assert read() == Counts(images=3, done=3, rejects=1)
    assert progress.VARIABLE not in os.environ
    assert not os.path.exists(path)
    os.environ[progress.VARIABLE] = path
    try:
        progress.report(progress.RECORDS)  # to a launcher that is gone
    finally:
        del os.environ[progress.VARIABLE]
    assert not os.path.exists(path)


def test_counts_from_an_engines_metrics():
    pipeline = beam.Pipeline(options=PipelineOptions(["--runner=FnApiRunner"]))
    numbers = pipeline | beam.Create([("images", 5), ("records", 2), ("records", 2), ("kept", 1)])
    numbers | beam.Map(lambda pair: progress.report(*pair))
    result = pipeline.run()
    result.wait_until_finish()
    assert read_metrics(result) == Counts(images=5, done=5, kept=1)


def test_an_engine_without_metrics():
    def metrics():
        raise NotImplementedError

    assert read_metrics(SimpleNamespace(metrics=metrics)) == Counts()
