"""One line out of many: what a traceback ends with, and log records that stay on their line."""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

_NAMED = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
_TRACEBACK = "Traceback (most recent call last):"
_MOST = 300  # characters of a log line; the options of a job alone are some 3,000


def last_line(text: str) -> str:
    """Returns what a worker's traceback ends with, without Beam's own remarks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line)]
    line = (named or lines or ["failed without a message"])[-1]
    return re.sub(r" \[while running '.*'\]$", "", line)


def printable(text: str, *, keep: str = "") -> str:
    """The text with what is not printable, and would drive the terminal, spelt out.

    Control characters and escape sequences, those that turn the direction of writing round, and
    what stands for a byte that is no UTF-8.

    Args:
      text: may hold names that others gave.
      keep: characters that stay.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class ReaderGone(Exception):
    """Nobody reads any more what is printed, as after `| head`."""


def say(text: object, *, file: TextIO | None = None) -> None:
    """Prints lines for a person, in which names can do no more than stand there.

    Raises:
      ReaderGone: the other end of the pipe was closed.
    """
    try:
        print(printable(str(text), keep="\n"), file=file or sys.stdout, flush=True)
    except BrokenPipeError as error:  # of another pipe, it stays an error like others
        raise ReaderGone from error


def describe_seconds(seconds: float) -> str:
    """Returns a duration for people, as 4.2 s, 3 min 20 s, 5 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


class OneLineFormatter(logging.Formatter):
    """Log records on one line each, without tracebacks.

    Of a record that carries a traceback, what comes before it and what it ends with; of any other
    of several lines, the first; of a long line, the beginning.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns `LEVEL:logger: text`."""
        text = record.getMessage()
        before, found, trace = text.partition(_TRACEBACK)
        if found:
            text = before + last_line(trace)
        lines = text.strip().splitlines() or [""]
        text = lines[0] + (" ..." if len(lines) > 1 else "")
        if len(text) > _MOST:
            text = f"{text[:_MOST]} ..."
        return printable(f"{record.levelname}:{record.name}:{text}")
