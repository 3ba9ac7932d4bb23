"""The lesson behind both notebooks; `python notebooks/build.py` makes them from this file.

A line `# %%` begins a cell of code, `# %% [markdown]` one of text. A cell whose line ends in
`playground` or `solution` goes into that notebook alone. Under a comment `# Your turn: ...` stands
one statement, the answer; the playground gets `...` in place of its value.
"""
# ruff: noqa: E402  (cells import where they need it)

# %% [markdown] playground
# # Feeding an accelerator: the playground
#
# You will read pictures with `tf.data`, find out why a folder full of files is slow, pack the
# pictures into TFRecords, read them back fast, look at what an accelerator does with them, and
# train a model. It takes about an hour.
#
# Run the cells from top to bottom. Where a comment says **Your turn**, put your answer in the
# place of `...` and run the cell again: it checks what you wrote. A place that you leave open stops
# nothing that comes after it, so you may skip; but exercise 2 needs the answer of 1, and 7 that of
# 4. `solution.ipynb` has them all.

# %% [markdown] solution
# # Feeding an accelerator: the solution
#
# The same lesson as `playground.ipynb`, with every place filled in. Look for **Your turn** to find
# the answers.

# %% [markdown]
# Everything runs on the processor of any computer, on flowers that the notebook draws itself: no
# download, no accelerator, no cloud account. A number in the text is either measured by the cell
# next to it, or says where it was published.
#
# ## 0. Tools
#
# Nothing in these cells is part of the lesson: imports, and small helpers to show pictures and
# to check answers.

# %%
from pipeline.devices import import_tensorflow

tf = import_tensorflow()  # import tensorflow as tf, without word of the hardware that is not there
# GPUs would otherwise multiply float32 with fewer digits, and chapter 6 compares to the fifth.
tf.config.experimental.enable_tensor_float_32_execution(False)

# %%
import collections
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from IPython.display import display
from PIL import Image, ImageDraw

from pipeline.config import TrainConfig
from pipeline.dataset import open_dataset, steps_per_epoch
from pipeline.devices import describe_devices, list_devices, run_on
from pipeline.samples import draw_samples
from pipeline.train import train


# %%
def show(pictures, titles, columns=6, side=120):
    """Shows pictures of any size in a grid, each above its title."""
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * (side + 8), rows * (side + 24)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        x, y = number % columns * (side + 8), number // columns * (side + 24)
        small = Image.fromarray(np.asarray(picture, np.uint8))
        small.thumbnail((side, side))
        sheet.paste(small, (x, y))
        draw.text((x, y + side + 4), str(title), "black")
    display(sheet)


def answered(*answers):
    """Whether these were filled in; says so if not."""
    if any(answer is ... for answer in answers):
        print("Your turn: put your answer in the place of ... in this cell, and run it again.")
        return False
    return True


def tpufeed(*words):
    """Runs a command of tpufeed, as you would in a shell, and shows what it prints."""
    print("$ tpufeed", *words)
    # In a process of its own: inside a notebook Beam asks for packages that it does not need.
    command = [sys.executable, "-m", "pipeline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout + done.stderr)
    assert done.returncode == 0


# %% [markdown]
# The pictures: 300 drawn flowers in five folders, one folder a class, and in each folder one file
# that is broken, as in real life. They are removed when you close the notebook.

# %%
folder = tempfile.TemporaryDirectory()
images = Path(folder.name, "images")
drawn = draw_samples(images, count=300)
print(f"{len(drawn.pictures)} pictures in {sorted(path.name for path in images.iterdir())}")

# %% [markdown]
# ## 1. `tf.data` in ten minutes
#
# A `tf.data.Dataset` is a recipe for a stream of elements. You begin with a source and append
# steps; nothing is read until you iterate.
#
# The first source: names of files. `*` stands for any characters and `?` for exactly one.

# %%
some_paths = tf.data.Dataset.list_files(f"{images}/daisy/daisy_000?.jpg", shuffle=False)
for path in some_paths:
    print(path.numpy().decode().removeprefix(folder.name))

# %% [markdown]
# An element is a tensor; `.numpy()` gives the value in it. Without `shuffle=False`, `list_files`
# hands out the names in a new order on every pass, which is what you want in training.
#
# `map` appends a function that is applied to each element. This one turns a name into a picture: a
# tensor of whole numbers from 0 to 255, height x width x 3 colours.


# %%
def decode(path):
    """A name becomes a picture."""
    return tf.io.decode_jpeg(tf.io.read_file(path), channels=3)


for picture in some_paths.map(decode):
    print(picture.shape, picture.dtype.name)

# %% [markdown]
# They all differ in size. Keep that in mind: it will matter when we want batches.
#
# To learn from a picture a model needs its label too, and the label is the name of the folder. A
# function that returns two things makes a dataset of pairs, which the loop takes apart again.


# %%
def load(path):
    """A name becomes a picture and its label."""
    return decode(path), tf.strings.split(path, os.sep)[-2]


paths = tf.data.Dataset.list_files(f"{images}/*/*_00[0-2]?.jpg", seed=7)
# AUTOTUNE: as many pictures at a time as turn out to be good for this machine.
flowers = paths.map(load, num_parallel_calls=tf.data.AUTOTUNE)
first = list(itertools.islice(flowers, 12))
show([picture for picture, label in first], [label.numpy().decode() for picture, label in first])

# %% [markdown]
# **Exercise 1.** Make a dataset of the names of all JPEGs of roses and of tulips that have a number
# (`roses_0000.jpg`, ...). `list_files` also takes a list of patterns.

# %%
# Your turn: list the files of both classes; the broken files have no number in their names.
red_paths = tf.data.Dataset.list_files([f"{images}/roses/*_0*.jpg", f"{images}/tulips/*_0*.jpg"])

if answered(red_paths):
    found = {Path(path.decode()) for path in red_paths.as_numpy_iterator()}
    wanted = {p for p in drawn.pictures if p.parent.name in ("roses", "tulips")}
    assert found == {path for path in wanted if path.suffix == ".jpg"}, "not those files"
    print(f"Right: {len(found)} names.")

# %% [markdown]
# **Exercise 2.** Turn the names of exercise 1 into pairs of picture and label.

# %%
# Your turn: one step is enough; let several files be read at a time.
red_flowers = red_paths.map(load, num_parallel_calls=tf.data.AUTOTUNE)

if answered(red_flowers):
    for picture, label in itertools.islice(red_flowers, 3):
        assert picture.shape.rank == 3 and label.numpy() in (b"roses", b"tulips")
        print(label.numpy().decode(), picture.shape)

# %% [markdown]
# ### Shuffle, cache, repeat, batch, prefetch
#
# For training, five more steps are usual. To put several pictures into one tensor they must be of
# the same size, and labels must be numbers, so `prepare` sees to that first.
#
# - `shuffle(1000)` draws at random from the next 1,000 elements. It holds them all in memory, so
#   shuffle names or records rather than pixels.
# - `cache()` keeps what came through on the first pass: in memory, or on disk if you give it a
#   name. It belongs before anything random, or you would see the same randomness again and again.
# - `repeat()` begins again at the end, for ever. After `shuffle`, so that each epoch is whole.
# - `batch(32)` makes one element of 32. With `drop_remainder=True` all batches are of one shape.
# - `prefetch(AUTOTUNE)` prepares the next batches while the model works on this one. It comes last.

# %%
CLASSES = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]


def prepare(picture, label):
    """A picture of any size becomes 96 x 96, a name becomes a number."""
    small = tf.image.resize(picture, [96, 96], antialias=True)
    # Beware: a label that is not in CLASSES would silently become 0, which is daisy.
    return tf.saturate_cast(tf.round(small), tf.uint8), tf.argmax(tf.equal(label, CLASSES))


cached = flowers.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).cache()
for attempt in ("first pass, from the files", "second pass, from memory"):
    start = time.perf_counter()
    count = sum(1 for _ in cached)
    print(f"{attempt}: {count} pictures in {time.perf_counter() - start:.3f} s")

# %% [markdown]
# **Exercise 3.** Build a stream for training out of `cached`: shuffled, without end, in batches of
# 32 that are always full, prefetched.

# %%
# Your turn: four steps, in the order of the list.
training = cached.shuffle(1000).repeat().batch(32, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

if answered(training):
    assert training.cardinality() == tf.data.INFINITE_CARDINALITY, "it ends"
    shapes = {(tuple(x.shape), tuple(y.shape)) for x, y in itertools.islice(training, 10)}
    assert shapes == {((32, 96, 96, 3), (32,))}, shapes
    print("Right: ten batches, each of", *shapes)

# %% [markdown]
# Such a dataset goes into `model.fit`, `model.evaluate` and `model.predict` as it is.
#
# ## 2. Why a file per picture is slow
#
# On a disk of its own, with everything in the machine's memory already, opening a file costs next
# to nothing. In a bucket each open is a request over the network, and many milliseconds pass before
# the first byte arrives. The lab that this lesson retells (Google's "TPU-speed data pipelines")
# states 1 to 2 pictures a second for files read from a bucket one by one.
#
# We have no bucket here, so we build a stand-in: before each open it waits 20 ms. The wait is made
# up; what we measure is what the wait does to different ways of reading. Change it and see.

# %%
WAIT = 0.020  # seconds before each open


def wait(name):
    """Does nothing for a while."""
    time.sleep(WAIT)
    return name


def slow(path):
    """Passes a name on, as late as a bucket would answer."""
    path = tf.numpy_function(wait, [path], tf.string)
    return tf.ensure_shape(path, [])


# A thread that waits does nothing else, and tf.data has only as many as the machine has cores.
patient = tf.data.Options()
patient.threading.private_threadpool_size = 16


def speed(dataset):
    """Returns elements a second, once AUTOTUNE has had half a second to settle."""
    elements = iter(dataset.repeat().with_options(patient))
    for seconds in (0.5, 1.0):
        count, start = 0, time.perf_counter()
        while time.perf_counter() < start + seconds:
            next(elements)
            count += 1
    return count / (time.perf_counter() - start)


auto = tf.data.AUTOTUNE
every_path = tf.data.Dataset.list_files(f"{images}/*/*_00??.jpg", seed=7)
speeds = {
    "files, one at a time": (
        speed(every_path.map(load)),
        speed(every_path.map(slow).map(load)),
    ),
    "files, AUTOTUNE": (
        speed(every_path.map(load, auto)),
        speed(every_path.map(lambda path: load(slow(path)), auto)),
    ),
}


def print_speeds():
    """Prints what was measured so far."""
    print(f"{'pictures a second':26}{'this disk':>10}{'20 ms an open':>15}")
    for name, (disk, bucket) in speeds.items():
        print(f"{name:26}{disk:10.0f}{bucket:15.0f}")


print_speeds()

# %% [markdown]
# In the first column the processor is the limit: it decodes. In the second, one at a time, the wait
# sets a ceiling that no processor can lift: 1 / 0.020 s = 50 pictures a second at the very best.
# Waiting for several files at a time helps. Opening fewer files helps more: that is what TFRecords
# are for. We come back to this table in chapter 4.
#
# A warning: `slow` calls Python from inside the dataset. That is fine for a demonstration and
# wrong in earnest. Python runs one thread at a time, and where a TPU is attached over the network
# the call does not work at all.
#
# ## 3. TFRecords
#
# A TFRecord file is a row of records, each a string of bytes with its length and a checksum. Any
# bytes will do, but the custom is one `tf.train.Example` a record: names, and a list of values for
# each. There are three kinds of list and no others: byte strings, whole numbers (int64), and
# floats (float32). A single value is a list of one.


# %%
def bytes_feature(values):
    """A list of byte strings."""
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def int_feature(values):
    """A list of whole numbers."""
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def float_feature(values):
    """A list of floats."""
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


# %% [markdown]
# We write a record for each picture: the JPEG bytes themselves (pixels would take several times the
# space, as you will see), the number of the class, height and width, and a list of floats whose
# length differs from record to record.
#
# **Exercise 4.** `class` and `size` are missing.


# %%
def make_example(picture, label, floats):
    """Packs a small picture, the number of its class and some floats."""
    jpeg = tf.io.encode_jpeg(picture, quality=95, chroma_downsampling=False).numpy()
    height, width = picture.shape[:2]
    # Your turn: a feature with one number, and one with height and width.
    class_and_size = {"class": int_feature([label]), "size": int_feature([height, width])}
    if not answered(class_and_size):
        return None
    features = {"image": bytes_feature([jpeg]), "float_data": float_feature(floats)}
    return tf.train.Example(features=tf.train.Features(feature=features | class_and_size))


picture, label = next(iter(cached))
example = make_example(picture, int(label), [0.25, 0.5])
if example is not None:
    stored = example.features.feature
    assert list(stored["class"].int64_list.value) == [int(label)]
    assert list(stored["size"].int64_list.value) == [96, 96]
    print({name: feature.WhichOneof("kind") for name, feature in sorted(stored.items())})

# %% [markdown]
# A writer takes the serialized records. Several files, called shards, let a reader read from many
# places at once. It is good practice to put the number of records into the name: a reader can add
# them up without opening anything.

# %%
SHARDS = 4
by_hand = Path(folder.name, "by-hand")
by_hand.mkdir()
elements = list(cached) if example is not None else []
for shard in range(SHARDS if elements else 0):
    mine = elements[shard::SHARDS]
    with tf.io.TFRecordWriter(str(by_hand / f"flowers{shard:02d}-{len(mine)}.tfrec")) as writer:
        for number, (picture, label) in enumerate(mine):
            record = make_example(picture, int(label), [0.5] * (number % 3))
            writer.write(record.SerializeToString())
for path in sorted(by_hand.iterdir()):
    pixels = 96 * 96 * 3 * int(path.stem.partition("-")[2])
    print(f"{path.name}: {path.stat().st_size:,} bytes; as pixels {pixels:,}")

# %% [markdown]
# ### The same with tpufeed
#
# By hand we left much undone: PNG and WebP files, pictures that a camera stored on their side,
# broken files, a shuffle over everything before the shards are cut, a part held back for
# validation, and proof that all is right. `tpufeed ingest` does that, with Apache Beam, on this
# machine or on many.

# %%
records = Path(folder.name, "records")
tpufeed(
    *("ingest", "--input", f"{images}/*/*", "--output", records, "--image-size", 96),
    *("--split", "train=0.8,validation=0.2", "--shards", 10, "--max-reject-rate", 0.05),
)
tpufeed("verify", records)

# %% [markdown]
# Nothing is lost without a word: inputs = records + rejects. The broken files, and what is wrong
# with each:

# %%
for line in (records / "rejects.jsonl").read_text().splitlines():
    reject = json.loads(line)
    print(f"{reject['key']:28}{reject['reason']}")

# %% [markdown]
# `dataset.json` says what the set holds, so that no reader has to guess.

# %%
facts = json.loads((records / "dataset.json").read_text())
print("classes, in the order of their numbers:", facts["labels"])
print("records:", {name: split["records"] for name, split in facts["splits"].items()})
print("height and width:", facts["image_size"])
print("features:", {name: feature["dtype"] for name, feature in facts["features"].items()})

# %% [markdown]
# ## 4. Reading TFRecords
#
# The simple reader: find the files, read records from one after the other, say what is in a record
# and decode the picture.

# %%
shards = tf.io.gfile.glob(f"{records}/train-*.tfrecord")
layout = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "class": tf.io.FixedLenFeature([], tf.int64),
    "size": tf.io.FixedLenFeature([2], tf.int64),
}


def parse(record):
    """The bytes of a record become picture, class, height and width."""
    fields = tf.io.parse_single_example(record, layout)
    return tf.io.decode_jpeg(fields["image"], channels=3), fields["class"], fields["size"]


for picture, label, size in tf.data.TFRecordDataset(shards).map(parse).take(3):
    print(picture.shape, CLASSES[label], size.numpy())

# %% [markdown]
# The fast reader reads from several files at once and does not care which record comes first: a
# record that is late holds up no other. In training that is welcome, since order should be random
# anyway. For evaluation leave the order alone.
#
# **Exercise 5.** Write the fast reader: `num_parallel_reads` for the files, `num_parallel_calls`
# for `parse`.

# %%
in_any_order = tf.data.Options()
in_any_order.deterministic = False

# Your turn: read `shards` and map `parse`, both with AUTOTUNE; the options come in between.
fast = (
    tf.data.TFRecordDataset(shards, num_parallel_reads=tf.data.AUTOTUNE)
    .with_options(in_any_order)
    .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
)

if answered(fast):
    train_records = facts["splits"]["train"]["records"]
    assert fast.options().deterministic is False, "the order is still kept"
    assert sum(1 for _ in fast) == train_records
    print(f"Right: {train_records} records.")

# %% [markdown]
# Now the table of chapter 2 again, with shards. The wait comes before each open as it did before,
# but there are 8 opens, not one for each picture. (The pictures in the shards are smaller, so they
# are decoded faster too: that is part of what packing them once gains.)

# %%
shard_names = tf.data.Dataset.from_tensor_slices(shards)


def read(name):
    """The records of one shard."""
    return tf.data.TFRecordDataset(name)


def read_slow(name):
    """The records of one shard, after the wait."""
    return tf.data.Dataset.from_tensors(name).map(slow).flat_map(read)


# interleave(read, 8, 1, auto, False) takes a record from each of 8 shards in turn, in any order:
# what num_parallel_reads does inside.
speeds["8 shards, one at a time"] = (
    speed(shard_names.flat_map(read).map(parse)),
    speed(shard_names.flat_map(read_slow).map(parse)),
)
speeds["8 shards, AUTOTUNE"] = (
    speed(shard_names.interleave(read, 8, 1, auto, False).map(parse, auto)),
    speed(shard_names.interleave(read_slow, 8, 1, auto, False).map(parse, auto)),
)
print_speeds()

# %% [markdown]
# ### Quick reference: every kind of field
#
# Three types, and for each of them one value, a list of fixed length, and a list of any length.
# The last comes out as a sparse tensor, which `tf.sparse.to_dense` turns into an ordinary one.

# %%
example = tf.train.Example(
    features=tf.train.Features(
        feature={
            "name": bytes_feature([b"tulip"]),
            "petals": int_feature([6]),
            "height": float_feature([0.5]),
            "two names": bytes_feature([b"tulip", b"Tulipa"]),
            "size": int_feature([480, 640]),
            "colour": float_feature([0.9, 0.1, 0.2]),
            "tags": bytes_feature([b"spring", b"garden", b"red"]),
            "years": int_feature([2019, 2024]),
            "weights": float_feature([0.1, 0.2, 0.3, 0.4]),
        }
    )
)
record = example.SerializeToString()

reference = {
    # one value
    "name": tf.io.FixedLenFeature([], tf.string),
    "petals": tf.io.FixedLenFeature([], tf.int64),
    "height": tf.io.FixedLenFeature([], tf.float32),
    # a list of fixed length
    "two names": tf.io.FixedLenFeature([2], tf.string),
    "size": tf.io.FixedLenFeature([2], tf.int64),
    "colour": tf.io.FixedLenFeature([3], tf.float32),
    # a list of any length
    "tags": tf.io.VarLenFeature(tf.string),
    "years": tf.io.VarLenFeature(tf.int64),
    "weights": tf.io.VarLenFeature(tf.float32),
}
fields = tf.io.parse_single_example(record, reference)
for name in reference:
    value = fields[name]
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    print(f"{name:10} {value.dtype.name:8} {value.shape!s:5} {value.numpy()}")

# %% [markdown]
# What if a field is not in the record? A list of any length is then empty. A field of fixed length
# is an error that names it, which is what you want for one that must be there...

# %%
empty = tf.io.parse_single_example(record, {"prizes": tf.io.VarLenFeature(tf.float32)})
print("prizes:", tf.sparse.to_dense(empty["prizes"]).numpy())

try:
    tf.io.parse_single_example(record, {"scent": tf.io.FixedLenFeature([], tf.float32)})
except tf.errors.InvalidArgumentError as error:
    missing = error.message.split("}} ")[-1]
    print("error:", missing)

# %% [markdown]
# ... unless you give a default.
#
# **Exercise 6.** Read `scent` as an optional number, 0.0 where it is absent.

# %%
# Your turn: the same feature as above, with a default_value.
scent = tf.io.FixedLenFeature([], tf.float32, default_value=0.0)

if answered(scent):
    value = tf.io.parse_single_example(record, {"scent": scent})["scent"]
    assert value.numpy() == 0
    print("scent:", value.numpy())

# %% [markdown]
# **Exercise 7.** Read one of the files that you wrote by hand in chapter 3 (exercise 4), with all
# four fields.

# %%
# Your turn: a dict with image, class, size and float_data.
hand_layout = layout | {"float_data": tf.io.VarLenFeature(tf.float32)}

if answered(hand_layout) and elements:
    for record in tf.data.TFRecordDataset(sorted(map(str, by_hand.iterdir()))[0]).take(3):
        fields = tf.io.parse_single_example(record, hand_layout)
        picture = tf.io.decode_jpeg(fields["image"], channels=3)
        floats = tf.sparse.to_dense(fields["float_data"])
        assert picture.shape == fields["size"].numpy().tolist() + [3]
        print(CLASSES[fields["class"]], picture.shape, floats.numpy())

# %% [markdown]
# ## 5. `open_dataset`
#
# All of that in one call. It takes the layout from `dataset.json`, shuffles shards and records
# (while they are still small, never as pixels), reads with AUTOTUNE, decodes, repeats, batches and
# prefetches.

# %%
training = open_dataset(records, batch_size=32, seed=1)
for pictures, labels in itertools.islice(training, 2):
    print(pictures.shape, pictures.dtype.name, labels.shape, labels.dtype.name)
print("steps in an epoch:", steps_per_epoch(records, batch_size=32))
show(pictures[:12].numpy(), [CLASSES[label] for label in labels[:12]])

# %% [markdown]
# For evaluation every example must be seen exactly once, but a compiled program wants batches of
# one shape. So the last batch is filled up, and a third element says what counts: weight 1 for an
# example, 0 for filling.

# %%
evaluation = open_dataset(records, split="validation", batch_size=32, training=False)
weights = [batch[2].numpy() for batch in evaluation]
print("batches:", len(weights), "of", {len(batch) for batch in weights})
print("examples:", int(sum(map(sum, weights))), "of", facts["splits"]["validation"]["records"])

# %% [markdown]
# Pictures stay whole numbers of one byte until you ask otherwise, since that is what travels to the
# accelerator. Other features come along by name.

# %%
options = {"training": False, "split": "validation", "batch_size": 4}
fields, labels, _ = next(
    iter(open_dataset(records, image_dtype=tf.bfloat16, features=["key", "size"], **options))
)
for name, value in fields.items():
    print(f"{name:6} {value.dtype.name:9} {value.shape}")
print(fields["key"].numpy()[0].decode(), fields["size"].numpy()[0])

# %% [markdown]
# And Python inside the dataset, the sin of chapter 2, is refused before it can hurt.


# %%
def in_python(picture):
    """Turns a picture upside down, the wrong way."""
    return tf.numpy_function(lambda pixels: pixels[::-1], [picture], tf.uint8)


def in_tensorflow(picture):
    """Turns a picture upside down."""
    return tf.image.flip_up_down(picture)


open_dataset(records, batch_size=4, augment=in_tensorflow)
try:
    open_dataset(records, batch_size=4, augment=in_python)
except ValueError as error:
    refused = str(error)
    print("refused:", refused)

# %% [markdown]
# ## 6. What an accelerator does with a batch
#
# ### A dense layer is a matrix product
#
# Eight pictures, each flattened into a row of numbers: a matrix X with 8 rows. The weights of a
# layer with five outputs: a matrix W with a row for each input number and 5 columns. The layer is
# Y = XW + b.

# %%
always_the_same = {"seed": 2, "deterministic": True}
eight = open_dataset(records, batch_size=8, resize=(12, 12), **always_the_same)
pictures, labels = next(iter(eight))
X = (tf.reshape(pictures, [8, -1]) / 255).numpy().astype(np.float32)
layer = keras.layers.Dense(5)
Y = layer(X).numpy()
W, b = (np.asarray(weight) for weight in layer.get_weights())
print(f"X {X.shape}  W {W.shape}  b {b.shape}  Y {Y.shape}")
print("layer equals X @ W + b:", np.allclose(Y, X @ W + b, atol=1e-5))

# %% [markdown]
# **Exercise 8.** One number of the result: Y[2, 0], what output 0 says about picture 2. It is a dot
# product, the sum over k of X[2, k] W[k, 0], and b[0] on top.

# %%
# Your turn: the same number from X, W and b, without a whole matrix product.
y_2_0 = sum(X[2, k] * W[k, 0] for k in range(len(W))) + b[0]

if answered(y_2_0):
    assert np.isclose(y_2_0, Y[2, 0], atol=1e-4), (y_2_0, Y[2, 0])
    print(f"Right: {y_2_0:.5f}, and the layer says {Y[2, 0]:.5f}.")

# %% [markdown]
# A convolution is one as well. Lay each 3 x 3 neighbourhood out as a row, and the filters as
# columns:

# %%
batch = tf.cast(pictures, tf.float32) / 255
filters = tf.random.stateless_normal([3, 3, 3, 4], seed=[1, 2])
rows = tf.image.extract_patches(batch, [1, 3, 3, 1], [1] * 4, [1] * 4, "SAME")
product = tf.reshape(rows, [-1, 27]) @ tf.reshape(filters, [27, 4])
convolved = tf.nn.conv2d(batch, filters, 1, "SAME")
print(f"({rows.shape[0]} x 12 x 12, 27) @ (27, 4):", end=" ")
print(np.allclose(tf.reshape(product, convolved.shape), convolved, atol=1e-4))

# %% [markdown]
# ### A systolic array
#
# A processor fetches two numbers, multiplies, adds, and stores the sum, again and again. The matrix
# unit of a TPU does without most of the fetching and storing. It is a grid of cells. Each cell
# holds one weight, loaded once. The inputs march through the grid: in every cycle each cell
#
# 1. takes an input from the cell above and a partial sum from the cell on its left,
# 2. multiplies the input by its weight and adds the product to the sum,
# 3. passes the input on downwards and the sum on to the right.
#
# The finished sums leave on the right. Nothing goes back to memory in between. For this to come
# out right the inputs must arrive skewed: column k one cycle later than column k - 1, so that an
# input meets the partial sum that it belongs to.
#
# Here is the grid in numpy. The cell in row n and column k holds W[k, n].
#
# **Exercise 9.** What does a cell make of what it takes? Fill in its one line of arithmetic.


# %%
def new_sum(sum_from_left, weight, input_from_above):
    """The partial sum that a cell passes to the right; works on a whole grid of cells at once."""
    # Your turn: see step 2 above.
    return sum_from_left + weight * input_from_above


def systolic(X, W, show_cycles=False):
    """Returns X @ W as a grid of cells computes it, and the number of cycles."""
    (m, k), n = X.shape, W.shape[1]
    weights = W.T  # one in each cell, for the whole run
    inputs = np.zeros((n, k), X.dtype)  # what each cell took from above
    sums = np.zeros((n, k), X.dtype)  # what each cell passes to the right
    result = np.zeros((m, n), X.dtype)
    cycles = m + n + k - 2
    for cycle in range(cycles):
        # Inputs move down a row; the top row gets new ones, skewed: X[row, column] in cycle
        # row + column.
        inputs = np.vstack([np.zeros((1, k), X.dtype), inputs[:-1]])
        for column in range(k):
            if 0 <= cycle - column < m:
                inputs[0, column] = X[cycle - column, column]
        # Sums move a column to the right; on the left they begin with 0.
        from_left = np.hstack([np.zeros((n, 1), X.dtype), sums[:, :-1]])
        sums = new_sum(from_left, weights, inputs)
        # What leaves grid row `row` on the right now began k - 1 cycles ago.
        for row in range(n):
            if 0 <= cycle - row - (k - 1) < m:
                result[cycle - row - (k - 1), row] = sums[row, -1]
        if show_cycles:
            print(f"cycle {cycle}: inputs {inputs.tolist()}  sums {sums.tolist()}")
    return result, cycles


small_X, small_W = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[1, 10], [2, 20]])
if answered(new_sum(1, 2, 3)):
    result, cycles = systolic(small_X, small_W, show_cycles=True)
    assert np.array_equal(result, small_X @ small_W)
    print("left on the right:", result.tolist())

# %% [markdown]
# Follow picture 0 through it. In cycle 0 the input 1 meets weight 1 in the top left cell; in cycle
# 1 the sum 1 has moved right, where input 2 arrives at that very moment and meets weight 2: 1 + 4
# = 5, and 5 leaves. Meanwhile the cell below works on the same input for the second output.
#
# Now a layer of some size, in whole numbers so that equal means equal:

# %%
random = np.random.default_rng(3)
big_X = random.integers(-9, 10, (256, 32))
big_W = random.integers(-9, 10, (32, 16))
systolic_equal = None
if answered(new_sum(1, 2, 3)):
    result, cycles = systolic(big_X, big_W)
    systolic_equal = np.array_equal(result, big_X @ big_W)
    work = big_X.shape[0] * big_W.size
    print("equals the matrix product:", systolic_equal)
    print(f"{work:,} multiply-adds in {cycles} cycles on {big_W.size} cells: ", end="")
    print(f"{work / (cycles * big_W.size):.0%} of the cells busy")

# %% [markdown]
# The more rows stream through, the smaller the share of the cycles in which the grid fills up and
# runs empty: one reason why a TPU likes large batches. (Google's lab gives 128 pictures a core as
# the best batch, and 8 as the least for good use. The grid of a real one is 128 x 128 = 16,384
# cells, by the same source.)
#
# ### bfloat16
#
# The cells of a TPU multiply 16-bit numbers and add up in 32 bits. The 16 bits are not the usual
# half precision, float16, but bfloat16: a float32 with the lower half cut off.


# %%
def bits(value):
    """Sign, exponent and fraction of a float."""
    kinds = {"float32": (np.uint32, 8), "float16": (np.uint16, 5), "bfloat16": (np.uint16, 8)}
    whole, exponent = kinds[value.dtype.name]
    text = f"{int(value.view(whole)):0{8 * value.itemsize}b}"
    return f"{text[0]} {text[1 : exponent + 1]} {text[exponent + 1 :]}"


bfloat16 = tf.bfloat16.as_numpy_dtype
for kind in (np.float32, bfloat16, np.float16):
    print(f"{np.dtype(kind).name:9} {bits(np.array(3.1415927, kind))}")

# %% [markdown]
# bfloat16 has the exponent of float32, all 8 bits of it, and so the same range. float16 spends
# three of those bits on a longer fraction: finer steps, but soon too large or too small.

# %%
print(f"{'float32':>12} {'float16':>12} {'bfloat16':>12}")
for value in (70_000.0, 1e30, 1e-8, 1e-30, 1.001):
    with np.errstate(over="ignore", under="ignore"):
        halves = [float(np.array(value, np.float32).astype(t)) for t in (np.float16, bfloat16)]
    print(f"{value:12.5g} {halves[0]:12.5g} {halves[1]:12.5g}")

# %% [markdown]
# In float16 large gradients become infinite and small ones zero, so training in it needs scaled
# losses. In bfloat16 they merely lose digits. The lab says that training minds that little, and
# that usually no code has to change.
#
# **Exercise 10.** Make bfloat16 out of float32 yourself: drop the lower 16 bits.

# %%
values = np.array([3.1415927, 70_000.0, 1e-30, -1.001], np.float32)
# Your turn: the upper halves of values.view(np.uint32); shift to the right.
upper = values.view(np.uint32) >> 16

if answered(upper):
    cut = np.asarray(upper, np.uint16).view(bfloat16).astype(np.float32)
    rounded = values.astype(bfloat16).astype(np.float32)
    print("cut off:", cut)
    print("rounded:", rounded)
    # 8 bits of precision: a cut is off by less than 2^-7, rounding by half of that.
    assert np.all(abs(cut - values) < abs(values) * 2**-7)
    assert np.all(abs(rounded - values) <= abs(values) * 2**-8)

# %% [markdown]
# Libraries round to the nearest rather than cut, as the second line shows; the idea is the same.
#
# Multiplying in 16 bits is harmless. Adding up in 16 bits is not: once the sum is large, what is
# added falls between two steps and is lost. So sums are kept in float32.

# %%
left, right = (random.random(4096).astype(np.float32).astype(bfloat16) for _ in range(2))
exact = float(np.dot(left.astype(np.float64), right.astype(np.float64)))
in_32, in_16 = np.float32(0), bfloat16(0)
for x, y in zip(left, right, strict=True):
    product = np.float32(x) * np.float32(y)
    in_32 = in_32 + product
    in_16 = bfloat16(np.float32(in_16) + product)
print(f"exact {exact:.2f}, summed in float32 {in_32:.2f}, summed in bfloat16 {float(in_16):.2f}")

# %% [markdown]
# ### Eager against compiled
#
# TensorFlow usually runs op by op, each started by Python: eager. `tf.function` runs your Python
# once, with stand-ins for the tensors, and writes down a graph: that is tracing. From then on the
# graph runs and your Python does not. `jit_compile=True` hands the graph to XLA, which makes one
# program of it. On a TPU there is nothing else: Python never runs there.
#
# Below is one training step of a small network, without Keras so that nothing is hidden. The line
# with `traces` is Python: eagerly it runs in each step, in a graph only while tracing.

# %%
traces = collections.Counter()


def make_step(name):
    """Returns one step of training: weights, inputs and labels to new weights and the loss."""

    def step(weights, inputs, labels):
        traces[name] += 1
        with tf.GradientTape() as tape:
            tape.watch(weights)
            values = inputs
            for weight in weights[:-1]:
                values = tf.nn.relu(values @ weight)
            logits = values @ weights[-1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        slopes = tape.gradient(loss, weights)
        return [w - 0.05 * slope for w, slope in zip(weights, slopes, strict=True)], loss

    return step


def run_steps(step, count):
    """Returns the loss in step 5, the seconds of the first step, and of the others on average."""
    shapes = [(432, 64), *[(64, 64)] * 6, (64, 5)]
    weights = [
        tf.random.stateless_normal(shape, seed=[number, 0], stddev=math.sqrt(2 / shape[0]))
        for number, shape in enumerate(shapes)
    ]
    losses = []
    start = time.perf_counter()
    for number in range(count):
        weights, loss = step(weights, X, labels)
        losses.append(loss)
        if number == 0:
            loss.numpy()  # waits until the result is there
            first, start = time.perf_counter() - start, time.perf_counter()
    loss.numpy()
    return float(losses[4]), first, (time.perf_counter() - start) / (count - 1)


# %% [markdown]
# **Exercise 11.** Make the third step: `make_step("xla")`, compiled by XLA.

# %%
eager_step = make_step("eager")
graph_step = tf.function(make_step("graph"))
# Your turn: as the line above, and compiled.
xla_step = tf.function(make_step("xla"), jit_compile=True)

steps = {"eager": eager_step, "graph": graph_step}
if answered(xla_step):
    steps["xla"] = xla_step
losses = {}
print(f"{'':8}{'first step':>12}{'later steps':>13}{'Python runs':>13}{'loss':>9}")
for name, step in steps.items():
    losses[name], first, later = run_steps(step, 200)
    times = f"{1000 * first:9.1f} ms{1000 * later:10.2f} ms"
    print(f"{name:8} {times}{traces[name]:13d}{losses[name]:9.4f}")
assert max(losses.values()) - min(losses.values()) < 0.001
assert all(traces[name] == 1 for name in steps if name != "eager")

# %% [markdown]
# The first step pays for tracing, and with XLA for compiling; the later ones are what you train
# with. All of them compute the same, but for the last digits: each adds up in its own order. How
# much is gained depends on the machine and on the size of the ops: the larger they are, the less it
# matters who starts them.
#
# A graph fits one shape. Another shape is another trace, and another compilation: the reason for
# `drop_remainder=True`, and for the padded batches of chapter 5.
#
# **Exercise 12.** Batches of 8, 8, 8 and at the end 5: how many traces?


# %%
@tf.function
def mean(batch):
    """Counts its traces, like the steps above."""
    traces["mean"] += 1
    return tf.reduce_mean(batch)


for size in (8, 8, 8, 5):
    mean(tf.constant(X[:size]))

# Your turn: a number.
expected = 2

if answered(expected):
    assert traces["mean"] == expected, f"{expected} is not it: what is new to the graph?"
    print("Right:", traces["mean"])

# %% [markdown]
# ### Which devices are there?
#
# A device has a kind, a number, and a backend: op by op (`TF_EAGER`) or compiled (`XLA`). A TPU has
# only the second. The command `tpufeed devices` prints the list below. It is this machine's; with
# a GPU or a TPU it is longer.

# %%
print(describe_devices())
for device in list_devices():
    add = run_on(device, lambda a, b: a + b)
    total = add(tf.constant([0.0, 1.0, 2.0]), tf.constant([1.5, 2.5, 3.5]))
    print(device, total.numpy())

# %% [markdown]
# ## 7. Training
#
# All pieces together: records through the reader into a convnet, compiled as a graph, two epochs.
# Guessing would be right one time in five. In a shell the same is
# `tpufeed train --data records --model convnet --optimizer adam --epochs 2 ...`.

# %%
config = TrainConfig(
    data=(str(records),),
    model="convnet",
    optimizer="adam",
    learning_rate=0.002,
    epochs=2,
    batch_size=8,
    image_size=(48, 48),
    output=str(Path(folder.name, "run")),
)
history = train(config, report=print, note=print)
accuracy = history.epochs[-1].test.accuracy

# %% [markdown]
# The line about input is the one to watch on an accelerator: a share of the step spent waiting for
# pictures is time for which it was paid and did nothing. Set `mode="xla"` or `mode="eager"` above
# and compare.

# %%
display(Image.open(Path(folder.name, "run", "predictions.png")))
display(Image.open(Path(folder.name, "run", "confusion.png")))

# %% [markdown]
# ## What you have seen
#
# - `list_files`, `map`, pairs of picture and label, and how to iterate over them
# - shuffle, cache, repeat, batch, prefetch, and the order that they belong in
# - why few large files read in parallel beat many small ones
# - writing TFRecords by hand and with `tpufeed ingest`; reading every kind of field
# - layers as matrix products, the grid that computes them, and the numbers that it computes with
# - tracing and compiling, and why shapes should not change
#
# Next: your own pictures. `README.md` of tpufeed has the commands, `docs/format.md` the files.
