"""What `tpufeed plan` says, beside what `tpufeed ingest` then does.

    python benchmarks/plan.py [--times 3] -- 'flowers/*/*.jpg' --image-size 192 \\
        -- idx:mnist

Each group of words after a -- is an input and further flags of ingest. Plan and ingest run by
turns, as commands, `--times` times, since the speed of a machine that others use changes. Prints
bytes of the shards and seconds from start to end of the command: predicted, measured, and
predicted / measured.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMAND = [sys.executable, "-m", "pipeline"]


def run(*words):
    """Runs a command; returns what it prints and its seconds."""
    began = time.perf_counter()
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout, seconds


def compare(words):
    """Plans, then ingests; returns two pairs of bytes, seconds, shards."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--input", *words, "--output", os.path.join(folder, "out")]
        text, planning = run("plan", *flags, "--json")
        plan = json.loads(text)
        _, seconds = run("ingest", *flags)
        text, _ = run("inspect", os.path.join(folder, "out"), "--json")
        splits = json.loads(text)["splits"].values()
    shards = sum(split["shards"] for split in plan["splits"].values())
    predicted = plan["bytes"], plan["seconds"], shards
    total = {name: sum(split[name] for split in splits) for name in ("bytes", "shards")}
    return predicted, (total["bytes"], seconds, total["shards"]), planning


def main():
    groups, times = [[]], 3
    for word in sys.argv[1:]:
        if word == "--":
            groups.append([])
        else:
            groups[-1].append(word)
    if groups[0]:
        if groups[0][0] != "--times" or len(groups[0]) != 2:
            sys.exit(__doc__)
        times = int(groups[0][1])
    if not groups[1:]:
        sys.exit(__doc__)
    names = ("MB planned", "written", "ratio", "s planned", "measured", "ratio", "shards", "load")
    print(f"{'':24}" + "".join(f"{name:>11}" for name in names) + f"{'plan s':>11}")
    ratios = {}
    for _ in range(times):
        for words in groups[1:]:
            name = f"{words[0][-23:]:24}"
            (size, seconds, shards), (written, measured, wrote), planning = compare(words)
            ratios.setdefault(name, []).append((size / written, seconds / measured))
            print(
                f"{name}{size / 1e6:11.2f}{written / 1e6:11.2f}{size / written:11.2f}"
                f"{seconds:11.2f}{measured:11.2f}{seconds / measured:11.2f}"
                f"{f'{shards}={wrote}' if shards == wrote else f'{shards}!={wrote}':>11}"
                f"{os.getloadavg()[0]:11.2f}{planning:11.2f}",
                flush=True,
            )
    for name, pairs in ratios.items():
        middle = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name}" + "median: bytes {:.2f}, seconds {:.2f}".format(*middle))


if __name__ == "__main__":
    main()
