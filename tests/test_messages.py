"""One line out of many."""

import logging

import pytest

from pipeline.messages import OneLineFormatter, last_line

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
