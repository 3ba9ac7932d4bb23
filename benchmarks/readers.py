"""Readers of the same pictures, measured by turns in one process.

    python benchmarks/readers.py --jpeg RECORDS --raw RECORDS --files FOLDER [--rounds 3]

RECORDS are folders of tpufeed ingest, FOLDER holds the pictures themselves. Prints a line of JSON
for each measurement: contender, images, seconds.
"""

import argparse
import concurrent.futures
import json
import os
import time

import simplejpeg
import tensorflow as tf

from pipeline.dataset import open_dataset
from transforms.manifest import load_manifest

AUTOTUNE = tf.data.AUTOTUNE
BATCH = 128
SPEC = {"image": tf.io.FixedLenFeature([], tf.string), "class": tf.io.FixedLenFeature([], tf.int64)}


def list_shards(folder):
    return sorted(tf.io.gfile.glob(f"{folder}/train-*"))


def open_records(folder):
    """The lab's fast reader, up to the serialized records: all files at once, in no fixed order."""
    options = tf.data.Options()
    options.deterministic = False
    data = tf.data.TFRecordDataset(list_shards(folder), num_parallel_reads=AUTOTUNE)
    return data.with_options(options)


def side_of(folder):
    return load_manifest(folder).image_size[0]


def lab_reader(args, dtype=tf.float32):
    side = side_of(args.jpeg)

    def parse(data):
        record = tf.io.parse_single_example(data, SPEC)
        image = tf.io.decode_jpeg(record["image"], channels=3)
        if dtype == tf.float32:
            image = tf.cast(image, tf.float32) / 255.0
        return tf.reshape(image, [side, side, 3]), record["class"]

    return open_records(args.jpeg).map(parse, num_parallel_calls=AUTOTUNE)


def lab_batches(args, *, dtype, repeat):
    data = lab_reader(args, dtype)
    data = data.repeat() if repeat else data
    return data.batch(args.batch, drop_remainder=True).prefetch(AUTOTUNE)


def file_per_image(args):
    """The lab's first reader: a file for each picture, decoded and resized as it is read."""
    side = side_of(args.jpeg)

    def load(path):
        label = tf.strings.split(path, os.sep)[-2]
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.cast(tf.image.resize(image, [side, side]), tf.uint8), label

    data = tf.data.Dataset.from_tensor_slices(sorted(tf.io.gfile.glob(f"{args.files}/*/*")))
    data = data.shuffle(10_000).repeat().map(load, num_parallel_calls=args.calls)
    return data.batch(args.batch, drop_remainder=True).prefetch(AUTOTUNE)


def mapped_batches(args):
    """The batch is parsed at once, and decoded by a loop inside."""

    def parse(data):
        record = tf.io.parse_example(data, SPEC)
        decode = decoder_of(side_of(args.jpeg))
        return tf.map_fn(decode, record["image"], fn_output_signature=tf.uint8), record["class"]

    data = open_records(args.jpeg).repeat().batch(args.batch, drop_remainder=True)
    return data.map(parse, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def decoder_of(side):
    return lambda data: tf.reshape(tf.io.decode_jpeg(data, channels=3), [side, side, 3])


def record_bytes(args):
    """The serialized records, not looked into."""
    data = open_records(args.jpeg).repeat().batch(args.batch, drop_remainder=True)
    return data.prefetch(AUTOTUNE)


def ours(folder, args, **more):
    return open_dataset(folder, batch_size=args.batch, **more)


class Clock:
    """Wall and processor time since it was made."""

    def __init__(self):
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self):
        return time.perf_counter() - self._wall

    def read(self):
        return self.seconds, time.process_time() - self._cpu


def stream(make):
    """Batches without end: a second to warm up, then the time of what comes."""

    def measure(args):
        batches = iter(make(args))
        start = time.perf_counter()
        while time.perf_counter() - start < args.warm:
            next(batches)
        clock, images = Clock(), 0
        while clock.seconds < args.seconds:
            next(batches)
            images += args.batch
        return images, *clock.read()

    return measure


def epochs(make, count=3):
    """Whole epochs, the iterator made and dropped for each."""

    def measure(args):
        data, images = make(args), 0
        clock = Clock()
        for _ in range(count):
            batches = iter(data)
            for _ in batches:
                images += args.batch
            del batches
        return images, *clock.read()

    return measure


def decode_alone(args):
    """libjpeg-turbo on the records' pictures from memory, in a thread for each core."""
    pictures = [
        tf.io.parse_single_example(data, SPEC)["image"].numpy()
        for data in open_records(args.jpeg).take(1000)
    ]
    parts = [pictures[n :: os.cpu_count()] for n in range(os.cpu_count())]

    def decode(part):
        return [simplejpeg.decode_jpeg(data).nbytes for data in part]

    clock, images = Clock(), 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        while clock.seconds < args.seconds:
            images += sum(map(len, pool.map(decode, parts)))
    return images, *clock.read()


CONTENDERS = {
    "file-per-image": stream(file_per_image),
    "lab-float": stream(lambda args: lab_batches(args, dtype=tf.float32, repeat=True)),
    "lab-uint8": stream(lambda args: lab_batches(args, dtype=tf.uint8, repeat=True)),
    "mapped-batches": stream(mapped_batches),
    "record-bytes": stream(record_bytes),
    "decode-alone": decode_alone,
    "tpufeed-uint8": stream(lambda args: ours(args.jpeg, args)),
    "tpufeed-float": stream(lambda args: ours(args.jpeg, args, image_dtype=tf.float32)),
    "tpufeed-raw": stream(lambda args: ours(args.raw, args)),
    "lab-epochs": epochs(lambda args: lab_batches(args, dtype=tf.float32, repeat=False)),
    "lab-uint8-epochs": epochs(lambda args: lab_batches(args, dtype=tf.uint8, repeat=False)),
    "tpufeed-epochs": epochs(lambda args: ours(args.jpeg, args, repeat=False)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jpeg", required=True)
    parser.add_argument("--raw")
    parser.add_argument("--files")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--calls", type=int, default=AUTOTUNE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--only", help="contenders, with commas between")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CONTENDERS)
    for _ in range(args.rounds):
        for name in names:
            if name == "tpufeed-raw" and not args.raw:
                continue
            images, seconds, cpu = CONTENDERS[name](args)
            found = {"name": name, "images": images, "seconds": seconds, "cpu": cpu}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
