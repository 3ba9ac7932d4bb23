"""Peak memory and the use of the cores, on a set and on many hard links to it.

    python benchmarks/memory.py 'photos/*/*.jpg' [--times 20]

Prints, for the set itself and for `--times` names of each of its files, in one process and with
two worker processes: the largest peak (resident set) of any one process, and CPU time over wall
time. The links lie in a temporary folder beside the first picture, or where TMPDIR says.
"""

import argparse
import contextlib
import ctypes
import glob
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

MODES = {
    "one process": [],
    "two workers": ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
}


def link(paths, folder, *, times):
    for path in map(Path, paths):
        target = Path(folder) / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        for number in range(times):
            name = target / f"{number:03d}-{path.name}"
            try:
                os.link(path, name)
            except OSError:  # another file system
                shutil.copy(path, name)


def measure(command):
    """Runs a command; returns peak bytes of its largest process, CPU seconds, wall seconds.

    What a worker process leaves behind becomes this one's to wait for, so that all CPU time counts.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    peaks, done = {}, threading.Event()
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch():
        # VmHWM is the kernel's own peak, so a rare look is enough while the process lives.
        while not done.is_set():
            try:
                root = psutil.Process(process.pid)
                for child in [root, *root.children(recursive=True)]:
                    peaks[child.pid] = peak_of(child.pid) or peaks.get(child.pid, 0)
            except (psutil.Error, OSError):
                pass
            done.wait(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    wall = time.monotonic() - started
    done.set()
    watcher.join()
    if code:
        sys.exit(f"{' '.join(command)}: exit {code}")
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return max(peaks.values()), cpu, wall


def peak_of(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern")
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args()
    paths = sorted(glob.glob(args.pattern))
    print(
        f"{'':14}{'images':>8}{'peak MB':>9}{'CPU s':>8}{'wall s':>8}{'cores':>7}{'images/s':>10}"
    )
    for mode, flags in MODES.items():
        peaks = []
        for times in (1, args.times):
            with tempfile.TemporaryDirectory() as folder:
                link(paths, f"{folder}/in", times=times)
                command = [sys.executable, "-m", "pipeline", "ingest", "--image-size", "192"]
                command += ["--input", f"{folder}/in/*/*", "--output", f"{folder}/out", *flags]
                peak, cpu, wall = measure(command)
            peaks.append(peak / 1e6)
            count = len(paths) * times
            print(
                f"{mode:14}{count:8}{peak / 1e6:9.1f}{cpu:8.1f}{wall:8.1f}{cpu / wall:7.2f}"
                f"{count / wall:10.0f}",
                flush=True,
            )
        print(f"{mode:14}{'apart':>8}{peaks[1] - peaks[0]:9.1f}")


if __name__ == "__main__":
    main()
