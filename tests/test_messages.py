"""One line out of many."""

import logging
import os

import pytest

from pipeline.messages import (
    OneLineFormatter,
    ReaderGone,
    describe_seconds,
    last_line,
    printable,
    say,
)

TRACE = """Traceback (most recent call last):
  File "/usr/lib/python3/sdk_worker.py", line 312, in _execute
    response = task()
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "write.py", line 3, in _write
transforms.records.DataError: 3 of 9 inputs were rejected: see x [while running 'WriteManifest']

passed through:
==> work/fnapi_service_impl.cc:1044
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRACE, "transforms.records.DataError: 3 of 9 inputs were rejected: see x"),
        ("pip says\nno such package\n", "no such package"),
        ("", "failed without a message"),
        ("ValueError: a: b", "ValueError: a: b"),
    ],
)
def test_last_line(text, line):
    assert last_line(text) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Created job with id: [2026-1]", "Created job with id: [2026-1]"),
        (
            f"now: JOB_MESSAGE_ERROR: {TRACE}",
            "now: JOB_MESSAGE_ERROR: transforms.records.DataError: 3 of 9 inputs were rejected: "
            "see x",
        ),
        ('Create job: id: "1"\nname: "a"\n', 'Create job: id: "1" ...'),
        ("x" * 301, "x" * 300 + " ..."),
        ("", ""),
    ],
)
def test_records_stay_on_their_line(text, line):
    record = logging.LogRecord("beam", logging.INFO, "", 0, "%s", (text,), None)
    assert OneLineFormatter().format(record) == f"INFO:beam:{line}"


def test_a_record_with_an_exception_shows_no_traceback():
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("beam", logging.ERROR, "", 0, "failed: %d", (3,), info)
    assert OneLineFormatter().format(record) == "ERROR:beam:failed: 3"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Löwe 狮子 🦁 a b", "Löwe 狮子 🦁 a b"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\rb\nc\td", r"a\rb\nc\td"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),  # CSI in one character, and DEL
        ("gpj.\u202egnp", r"gpj.\u202egnp"),  # turns the direction of writing round
        ("a\u2028b\ufeffc\u200bd", r"a\u2028b\ufeffc\u200bd"),
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_what_drives_a_terminal_is_spelt_out(text, shown, capsys):
    assert printable(text) == shown
    say(f"{text}!")
    assert capsys.readouterr().out == shown.replace(r"\n", "\n") + "!\n"
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "%s", (f"b{text}",), None)
    assert "\x1b" not in OneLineFormatter().format(record)
    assert OneLineFormatter().format(record).isprintable()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (200.4, "3 min 20 s"),
        (18_730, "5 h 12 min"),
    ],
)
def test_durations_for_people(seconds, text):
    assert describe_seconds(seconds) == text


def test_a_closed_pipe_is_told_from_others():
    read, write = os.pipe()
    os.close(read)
    stream = open(write, "w")
    with pytest.raises(ReaderGone):
        say("hello", file=stream)
    with pytest.raises(BrokenPipeError):
        stream.close()
