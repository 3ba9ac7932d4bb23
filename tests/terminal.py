"""Commands on a real pseudo-terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def on_terminal(words: list, *, columns: int = 100, **values: str) -> tuple[int, str, str]:
    """Runs a command with stderr on a terminal; returns code, stdout, stderr."""
    leader, follower = pty.openpty()
    size = struct.pack("4H", 24, columns, 0, 0)
    fcntl.ioctl(follower, termios.TIOCSWINSZ, size)
    environment = {**os.environ, "TERM": "xterm", **values}
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=follower, text=True, env=environment
    )
    os.close(follower)
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(timeout=300)
    reader.join()
    os.close(leader)
    return process.returncode, out, b"".join(shown).decode()


def screen(text: str) -> list[str]:
    """What a terminal shows in the end, of text with carriage returns and line feeds only."""
    assert "\x1b" not in text
    lines, column = [""], 0
    for character in text:
        if character == "\n":
            lines.append("")
        elif character == "\r":
            column = 0
            continue
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
