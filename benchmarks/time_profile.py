"""Where the time of an ingest goes, as a table.

    python benchmarks/time_profile.py 'photos/*/*.jpg' [--size 192]

Three measurements. The start: processor time of importing what `tpufeed ingest` imports. The
pictures: processor time of each step on one picture, one after the other in this process, over a
sample. The run: `tpufeed ingest` on all of them in this process, whose own processor time is
sampled a thousand times a second and put down to what was being called; that of the decoder
processes; and the rest of the time, in which the cores had nothing to do or did others' work.
"""

import argparse
import collections
import glob
import hashlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.lean import find_spare, without_modules  # noqa: E402
from transforms import image as pixels  # noqa: E402
from transforms.example import encode_example, make_features  # noqa: E402
from transforms.prepare import RecordPolicy, prepare_record, read_source  # noqa: E402
from transforms.records import Exclusions, ImageRef  # noqa: E402

SAMPLE = 1000
# As the command has them, which leaves out what a local run has no use for.
IMPORTS = """
with without_modules(sum(find_spare([]), ())):
    import pipeline.dataflow, pipeline.ingest, pipeline.summary
"""
# What a stack of this process is put down to: the first that it holds of a function.
BLAME = (
    ("wait for decoders and take their answers", ("decoders.py:wait", "decoders.py:receive")),
    ("hand pictures to decoders", ("decoders.py:ask", "decoders.py:prepare_images")),
    ("framing, checksums and sha256 of shards", ("filebasedsink.py:write_record",)),
    ("index", ("write.py:write_index", "write.py:index_row", "write.py:summarize_rows")),
    ("duplicates", ("write.py:_pack_content", "write.py:_find_duplicates")),
    ("listing", ("globs.py:list_glob", "sources.py:list_input", "ingest.py:resolve_config")),
    ("splits, counts, places", ("stats.py:assign_split", "stats.py:_estimate",
                                "stats.py:add_input", "write.py:place_image",
                                "records.py:_restore_ref", "records.py:__reduce__")),
    ("Beam: building and translating the graph", ("ingest.py:build", "pipeline.py:to_runner_api")),
    ("Beam: running it", ("fn_runner.py:run_pipeline", "worker_handlers.py:push")),
)  # fmt: skip


class Steps:
    """Processor time by step."""

    def __init__(self):
        self.seconds = collections.Counter()

    def time(self, name, function, *args, **kwargs):
        start = time.thread_time()
        result = function(*args, **kwargs)
        self.seconds[name] += time.thread_time() - start
        return result


def time_pictures(paths, size):
    """Microseconds of processor time a picture, by step."""
    steps, policy = Steps(), pixels.PixelPolicy(size, size)
    names = sorted({Path(path).parent.name for path in paths})
    labels = {name: number for number, name in enumerate(names)}
    for path in paths:
        ref = ImageRef(path, path, Path(path).parent.name)
        data, _ = steps.time("read", read_source, ref)
        steps.time("sha256 of the source", lambda data=data: hashlib.sha256(data).hexdigest())
        source = steps.time("decode", pixels.decode_image, data, policy=policy)
        geometry = pixels.fit_image(source.width, source.height, policy=policy)
        picture = steps.time("resize", pixels.resize_image, source.image, geometry, policy=policy)
        steps.time("encode", pixels.encode_image, picture, policy=policy)
        steps.time("channel sums", pixels._channel_sums, picture)
        prepared = pixels.prepare_image(data, policy=policy)
        facts = {"key": path, "label": ref.label, "class_id": 0, "schema": "flowers"}
        facts |= {"classes": len(names), "label_offset": 0}
        features = make_features(prepared, **facts)
        steps.time("tf.train.Example", encode_example, features)
        record = prepare_record(
            ref, policy=RecordPolicy(policy), labels=labels, exclusions=Exclusions()
        )
        steps.time("to the main process", pickle.dumps, record)
    return {name: 1e6 * seconds / len(paths) for name, seconds in steps.seconds.items()}


def time_imports():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = f"from pipeline.lean import find_spare, without_modules\n{IMPORTS}"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def find_blame(frame):
    names = []
    while frame is not None:
        names.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")
        frame = frame.f_back
    for name, functions in BLAME:
        if any(function in names for function in functions):
            return name
    return "the rest of the main process"


def run_sampled(pattern, output, size):
    """Runs the ingest; returns wall seconds, and CPU seconds by what they went into."""
    from pipeline.__main__ import main

    counts, main_thread = collections.Counter(), threading.main_thread().ident

    def sample(_, frame):
        # Beam runs its bundles in threads beside the main one, which then waits.
        frames = sys._current_frames()
        frames[main_thread] = frame
        found = [find_blame(each) for each in frames.values()]
        order = [name for name, _ in BLAME]
        known = [name for name in order if name in found]
        counts[known[0] if known else "the rest of the main process"] += 1

    exec(IMPORTS, dict(globals()))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    wall, own = time.perf_counter(), time.process_time()
    with without_modules(find_spare([])[0]):
        code = main(["ingest", "--input", pattern, "--output", output, "--image-size", str(size)])
    wall, own = time.perf_counter() - wall, time.process_time() - own
    signal.setitimer(signal.ITIMER_PROF, 0)
    if code:
        raise SystemExit(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    decoders = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    total = sum(counts.values())
    return wall, decoders, {name: own * count / total for name, count in counts.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern")
    parser.add_argument("--size", type=int, default=192)
    args = parser.parse_args()
    paths = sorted(glob.glob(args.pattern))
    sample = paths[:: max(1, len(paths) // SAMPLE)]
    start = time_imports()
    steps = time_pictures(sample, args.size)
    with tempfile.TemporaryDirectory() as folder:
        out = os.dup(1)  # what ingest prints is not this table
        os.dup2(2, 1)
        wall, decoders, own = run_sampled(args.pattern, f"{folder}/records", args.size)
        sys.stdout.flush()
        os.dup2(out, 1)
    cores = os.cpu_count()
    rows = [("start: importing Beam and the rest", start)]
    share = decoders / sum(steps.values())
    rows += [(f"decoders: {name}", each * share) for name, each in steps.items()]
    rows += sorted(((f"main: {n}", s) for n, s in own.items()), key=lambda row: -row[1])
    idle = cores * wall - decoders - sum(own.values())
    rows.append(("idle, or others' work", max(0.0, idle)))
    total = sum(seconds for _, seconds in rows)
    print(f"{len(paths):,} pictures on {cores} cores; {wall:.1f} s after the imports.\n")
    print("| | core seconds | share | us a picture |\n|---|---|---|---|")
    for name, seconds in rows:
        each = 1e6 * seconds / len(paths)
        print(f"| {name} | {seconds:.2f} | {100 * seconds / total:.1f} % | {each:.0f} |")


if __name__ == "__main__":
    main()
