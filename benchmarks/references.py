"""Seconds and peak memory of planning and grouping references, without a picture in sight.

    python benchmarks/references.py [--counts 1000000,10000000]

Made-up references go through the transforms of an ingest, from their splits to one list for each
shard, in one process. Each count runs in a process of its own; of the peak (resident set) what the
process held before is taken off. 10 million take some ten minutes.
"""

import argparse
import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.options.pipeline_options import PipelineOptions

from transforms.image import PixelPolicy
from transforms.records import ImageRef
from transforms.stats import AssignSplits, CountImages, PlanShards
from transforms.write import place_image

WEIGHTS = (("train", Fraction(9, 10)), ("validation", Fraction(1, 10)))


def make_references(_, count):
    for number in range(count):
        label = f"class{number % 1000:03d}"
        key = f"{label}/IMG_{number:010d}.jpg"
        yield ImageRef(key, f"gs://a-bucket/photographs/{key}", label, size=120_000)


def count_shard(group):
    key, refs = group
    return key, sum(1 for ref in refs if ref)


def tell(found):
    print(json.dumps({"shards": len(found), "refs": sum(count for _, count in found)}))


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


def group(count):
    before, start = peak(), time.monotonic()
    with beam.Pipeline("FnApiRunner", options=PipelineOptions([])) as root:
        refs = (
            root
            | beam.Impulse()
            | beam.FlatMap(make_references, count)
            | AssignSplits(WEIGHTS, 0, True)
        )
        plan = refs | CountImages(PixelPolicy()) | PlanShards(None, 128_000_000)
        (
            refs
            | beam.FlatMap(place_image, pvalue.AsSingleton(plan), seed=0)
            | beam.GroupByKey()
            | beam.Map(count_shard)
            | beam.combiners.ToList()
            | beam.Map(tell)
        )
    cost = {
        "seconds": time.monotonic() - start,
        "cpu": time.process_time(),
        "bytes": peak() - before,
    }
    print(json.dumps(cost))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="1000000,10000000")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        group(args.one)
        return
    heads = ("references", "shards", "wall s", "CPU s", "CPU us each", "peak MB", "bytes each")
    print("".join(f"{head:>12}" for head in heads))
    for count in map(int, args.counts.split(",")):
        command = [sys.executable, __file__, "--one", str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found, cost = map(json.loads, done.stdout.splitlines()[-2:])
        assert found["refs"] == count, found
        cpu, size = cost["cpu"], cost["bytes"]
        print(
            f"{count:12}{found['shards']:12}{cost['seconds']:12.1f}{cpu:12.1f}"
            f"{cpu / count * 1e6:12.1f}{size / 1e6:12.0f}{size / count:12.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
