"""Other ways to make TFRecords of pictures, short, and tuned as their kind allows.

    python benchmarks/contenders.py NAME --input FOLDER --output FOLDER --size 192

Prints one line of JSON: the pictures, and the seconds that they took once everything was imported.
All make pictures of size x size, cut to fill it, as JPEG of quality 90 without subsampling, unless
they say otherwise.
"""

import argparse
import glob
import io
import json
import multiprocessing
import os
import time

SHARDS = 16


def list_pictures(folder):
    return sorted(glob.glob(f"{folder}/*/*"))


def prepare_by_pillow(path, size):
    from PIL import Image, ImageOps

    with Image.open(path) as picture:
        picture = picture.convert("RGB")  # the whole file, at its full size
    picture = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=90, subsampling=0)
    return data.getvalue()


def make_example(image, label, class_id):
    import tensorflow as tf

    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "class": tf.train.Feature(int64_list=tf.train.Int64List(value=[class_id])),
        "label": tf.train.Feature(bytes_list=tf.train.BytesList(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def run_notebook(args):
    """The lab's notebook: tf.data with AUTOTUNE, then a TFRecordWriter for each shard.

    As it stands there: no antialias, quality 95 and optimised Huffman tables.
    """
    return _notebook(args, quality=95, optimize_size=True)


def run_notebook_90(args):
    """The same with the JPEG settings of all others here; still no antialias."""
    return _notebook(args, quality=90, optimize_size=False)


def _notebook(args, **settings):
    import tensorflow as tf

    paths, classes = list_pictures(args.input), sorted(os.listdir(args.input))
    side = args.size

    def load(path):
        label = tf.strings.split(path, os.sep)[-2]
        return tf.io.decode_jpeg(tf.io.read_file(path), channels=3), label

    def fill(image, label):
        height, width = tf.shape(image)[0], tf.shape(image)[1]
        ratio = tf.cast(side / tf.minimum(height, width), tf.float32)
        new = tf.cast(tf.math.ceil(tf.cast([height, width], tf.float32) * ratio), tf.int32)
        image = tf.image.resize(image, new)
        top, left = (new[0] - side) // 2, (new[1] - side) // 2
        return tf.image.crop_to_bounding_box(image, top, left, side, side), label

    def pack(image, label):
        image = tf.cast(image, tf.uint8)
        return tf.io.encode_jpeg(image, chroma_downsampling=False, **settings), label

    def work():
        data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=35155)
        for step in (load, fill, pack):
            data = data.map(step, num_parallel_calls=tf.data.AUTOTUNE)
        data = data.batch(-(-len(paths) // SHARDS)).prefetch(tf.data.AUTOTUNE)
        for shard, (images, labels) in enumerate(data):
            name = f"{args.output}/flowers{shard:02d}-{len(images)}.tfrec"
            with tf.io.TFRecordWriter(name) as out:
                for image, label in zip(images.numpy(), labels.numpy(), strict=True):
                    out.write(make_example(image, label, classes.index(label.decode())))
        return len(paths)

    return work


def run_naive_beam(args):
    """ReadMatches | Map | WriteToTFRecord, which sends every picture through a shuffle."""
    import apache_beam as beam
    import tensorflow as tf  # noqa: F401
    from apache_beam.io import fileio
    from apache_beam.options.pipeline_options import PipelineOptions

    classes = sorted(os.listdir(args.input))

    def prepare(file):
        label = file.metadata.path.split(os.sep)[-2]
        image = prepare_by_pillow(io.BytesIO(file.read()), args.size)
        return make_example(image, label.encode(), classes.index(label))

    def work():
        options = PipelineOptions(["--runner=FnApiRunner"])
        with beam.Pipeline(options=options) as root:
            (
                root
                | fileio.MatchFiles(f"{args.input}/*/*")
                | fileio.ReadMatches()
                | beam.Map(prepare)
                | beam.io.WriteToTFRecord(f"{args.output}/train", num_shards=SHARDS)
            )
        return len(list_pictures(args.input))

    return work


def _pool(function, args):
    paths = list_pictures(args.input)

    def work():
        with multiprocessing.get_context("fork").Pool() as pool:
            for _ in pool.imap_unordered(function, paths, chunksize=16):
                pass
        return len(paths)

    return work


_SIZE = 0


def _by_our_pixels(path):
    from transforms.image import PixelPolicy, prepare_image

    with open(path, "rb") as file:
        return len(prepare_image(file.read(), policy=PixelPolicy(_SIZE, _SIZE)).data)


def _by_pillow(path):
    return len(prepare_by_pillow(path, _SIZE))


def _by_turbo(path):
    import simplejpeg

    with open(path, "rb") as file:
        return simplejpeg.decode_jpeg(file.read()).nbytes


def run_our_pixels_pool(args):
    """A process pool around the pixels of tpufeed; nothing is hashed, framed or written."""
    import transforms.image  # noqa: F401

    return _pool(_by_our_pixels, args)


def run_pillow_pool(args):
    """A process pool around Pillow, full decode; nothing is framed or written."""
    import PIL.ImageOps  # noqa: F401

    return _pool(_by_pillow, args)


def run_turbo_pool(args):
    """A process pool that decodes by libjpeg-turbo and does nothing else."""
    import simplejpeg  # noqa: F401

    return _pool(_by_turbo, args)


def run_tpufeed(args):
    """tpufeed ingest, after Python, Beam and the rest were imported."""
    import pipeline.__main__
    import pipeline.dataflow
    import pipeline.ingest
    import pipeline.summary  # noqa: F401

    command = ["ingest", "--input", f"{args.input}/*/*", "--output", f"{args.output}/records"]
    command += ["--image-size", str(args.size)]

    def work():
        if pipeline.__main__.main(command):
            raise SystemExit(1)
        return len(list_pictures(args.input))

    return work


CONTENDERS = {
    "notebook": run_notebook,
    "notebook-90": run_notebook_90,
    "naive-beam": run_naive_beam,
    "our-pixels-pool": run_our_pixels_pool,
    "pillow-pool": run_pillow_pool,
    "turbo-pool": run_turbo_pool,
    "tpufeed": run_tpufeed,
}


def main():
    global _SIZE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--size", type=int, default=192)
    args = parser.parse_args()
    _SIZE = args.size
    work = CONTENDERS[args.name](args)
    start = time.perf_counter()
    images = work()
    print(json.dumps({"images": images, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
