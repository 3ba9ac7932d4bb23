"""What the DAG decides, as pure functions, and its calls of the ETL's own interpreter.

Imports neither airflow nor tensorflow nor anything of tpufeed: Airflow lives in a venv of its own.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

_READ = (
    "import sys; from transforms import files; p = sys.argv[1]; "
    "files.exists(p) and sys.stdout.buffer.write(files.read_file(p))"
)
_WRITE = (
    "import sys; from transforms import files; files.make_folder(sys.argv[1]); "
    "files.write_file(sys.argv[1], sys.argv[2], sys.stdin.buffer.read())"
)
LAST = "last-training.json"


def check_day(day: str | None) -> str:
    """Returns the day of the run; raises ValueError for one that was triggered without."""
    if not day:
        raise ValueError("the run has no logical date, so no day to ingest: trigger it with one")
    return day


def folder_of(output: str, day: str) -> str:
    """The folder of one data interval: OUTPUT/YYYY-MM-DD."""
    return f"{output.rstrip('/')}/{day}"


def root_of(pattern: str) -> str | None:
    """The folder that all days have in common, to make keys relative to.

    Below the day's own folder, files of two days that have one name would have one key too.

    Args:
      pattern: the parameter `input`, with {ds} for the day.

    Returns:
      The pattern's fixed part before {ds}; None where it names no day, or no folder before it.
    """
    path = re.sub(r"^[^/=:]+=", "", pattern)  # SPLIT=PATTERN
    before, day, _ = path.partition("{ds}")
    if not day or path.startswith("idx:"):
        return None
    folder, slash, _ = re.split(r"[*?\[]", before)[0].rpartition("/")
    if "://" in path:
        return folder if folder.count("/") > 1 else None
    return folder or slash or "."


def days_before(day: str, count: int) -> list[str]:
    """The count days that end with day, oldest first."""
    last = datetime.date.fromisoformat(day)
    return [str(last - datetime.timedelta(days=back)) for back in reversed(range(count))]


def records_of(manifest: Mapping[str, Any]) -> int:
    """Records in all splits of a dataset.json."""
    return sum(split["records"] for split in manifest["splits"].values())


def check_records(today: int, *, before: int, max_drop: float) -> None:
    """Raises ValueError when the records fell by more than max_drop (0.1 is 10 %)."""
    if today < before * (1 - max_drop):
        raise ValueError(
            f"records: {today}, the day before had {before}: fallen by more than {max_drop:.0%}; "
            "mend the input, or raise max_record_drop"
        )


def run_name(day: str, fingerprints: Sequence[str], train_flags: Sequence[str]) -> str:
    """A name for the training run: equal on a retry, another for other data or flags.

    Lower case letters, digits and dashes, at most 63 characters, as a Vertex AI label must be.
    """
    text = json.dumps([list(fingerprints), list(train_flags)])
    return f"run-{day}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def is_finished(history: Mapping[str, Any]) -> bool:
    """Whether the run of a history.json came to its end: only then does it have the confusion."""
    return history.get("confusion") is not None


def accuracy_of(history: Mapping[str, Any], *, path: str) -> float:
    """Test accuracy, 0 to 1, of the last epoch in a history.json."""
    if not history["epochs"]:
        raise ValueError(f"{path}: no epoch was trained; look at the training job's log")
    test = history["epochs"][-1]["test"]
    return test["correct"] / test["total"]


def check_accuracy(accuracy: float, *, minimum: float, path: str) -> None:
    """Raises ValueError when the accuracy is under the minimum."""
    if not accuracy >= minimum:
        raise ValueError(f"{path}: test accuracy {accuracy:.4f} is under min_accuracy {minimum}")


def tpufeed(python: str, *arguments: str) -> None:
    """Runs a tpufeed command in the ETL's venv; its output goes to the task's log.

    Raises:
      RuntimeError: it ended with another exit code than 0.
    """
    command = [python, "-m", "pipeline", *arguments]
    print("+", *command, flush=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        line = ""
        for text in process.stdout:
            line = text.rstrip() or line
            print(text.rstrip(), flush=True)
    if process.returncode:
        raise RuntimeError(f"tpufeed {arguments[0]}: exit code {process.returncode}: {line}")


def read_json(python: str, path: str) -> dict[str, Any] | None:
    """Reads a JSON file, local or gs://, with the ETL's file systems; None where there is none."""
    done = subprocess.run([python, "-c", _READ, path], capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise RuntimeError(f"{path}: cannot be read: {lines[-1]}")
    return json.loads(done.stdout) if done.stdout else None


def write_json(python: str, folder: str, name: str, document: Any) -> None:
    """Writes a JSON file, local or gs://, with the ETL's file systems."""
    data = json.dumps(document).encode()
    subprocess.run([python, "-c", _WRITE, folder, name], input=data, check=True)
