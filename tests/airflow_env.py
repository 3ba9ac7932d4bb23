"""Airflow's own virtual environment, made once, and what runs in it."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-airflow"
CONSTRAINTS = ROOT / "constraints-airflow.txt"


def airflow_python() -> Path:
    """The interpreter of the venv; skips where it cannot be made, fails where CI is set."""
    python, mark = VENV / "bin/python", VENV / "installed"
    wanted = hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted:
        return python
    # pip would take minutes over these 276 packages.
    uv = [python, "-m", "uv", "pip", "install", "-q", "--python", python, "-r", CONSTRAINTS]
    pip = [python, "-m", "pip", "install", "-q", "uv"]
    for command in ([sys.executable, "-m", "venv", VENV], pip, uv):
        done = subprocess.run(command, capture_output=True, text=True, timeout=560)
        if done.returncode:
            reason = f"Airflow's venv cannot be made: {done.stderr.strip()[-300:]}"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    mark.write_text(wanted)
    return python


def run_airflow(python: Path, code: str, *, home: Path, timeout: int = 400):
    """Runs Python code in the venv, with a home and an SQLite database of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "PYTHON"))}
    env |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PATH": f"{python.parent}:{env['PATH']}",
    }
    return subprocess.run(
        [python, "-c", code], env=env, cwd=home, capture_output=True, text=True, timeout=timeout
    )
