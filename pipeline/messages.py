"""One line out of many: what a traceback ends with, and log records that stay on their line."""

from __future__ import annotations

import logging
import re

_NAMED = re.compile(r"[\w.]*(Error|Exception)\b.*: ")
_TRACEBACK = "Traceback (most recent call last):"
_MOST = 300  # characters of a log line; the options of a job alone are some 3,000


def last_line(text: str) -> str:
    """Returns what a worker's traceback ends with, without Beam's own remarks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _NAMED.match(line)]
    line = (named or lines or ["failed without a message"])[-1]
    return re.sub(r" \[while running '.*'\]$", "", line)


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
        return f"{record.levelname}:{record.name}:{text}"
