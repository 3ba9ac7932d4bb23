"""The exported model: records and image files in, labels out, and what it refuses."""

import io
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow.parquet
import pytest
import tensorflow as tf
from helpers import draw, ingest
from PIL import Image

from pipeline.__main__ import main
from pipeline.dataset import open_dataset
from pipeline.export import FACTS, Server, load_facts
from pipeline.models import build_model
from pipeline.serving_image import prepare_image as prepare_in_graph
from transforms.image import RESIZE_MODES, PixelPolicy, fit_image, prepare_image
from transforms.manifest import load_manifest

REMEDY = "use tpufeed predict, which prepares any file as ingest does"


def said(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1] if lines else ""


def records_of(folder, split="validation") -> list[bytes]:
    return [
        record.numpy()
        for path in sorted(folder.glob(f"{split}-*.tfrecord"))
        for record in tf.data.TFRecordDataset(str(path))
    ]


def logits_of(model, folder, resize=None) -> np.ndarray:
    """By the training path: the reader's batches through the model."""
    parts = []
    for image, _, weight in open_dataset(
        folder, split="validation", training=False, batch_size=7, resize=resize
    ):
        parts.append(np.asarray(model(image, training=False))[weight.numpy() > 0])
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "out"
    words = ["train", "--data", str(dataset), "--model", "convnet", "--epochs", "1"]
    assert main([*words, "--batch-size", "8", "--optimizer", "adam", "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "serving"
    assert main(["export", "--run", str(run), "--output", str(output)]) == 0
    return output


# As a server would, where there is neither Beam nor tensorflow-transform nor tpufeed nor Keras.
PLAIN = """
import json, sys
for name in ("apache_beam", "tensorflow_transform", "pipeline", "transforms", "PIL"):
    sys.modules[name] = None
import tensorflow as tf
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
records = [r for path in sys.argv[2:] for r in tf.data.TFRecordDataset(path)]
answers = serve(records=tf.stack(records))
print(json.dumps({k: v.numpy().astype(object if v.dtype == tf.string else float).tolist()
                  for k, v in answers.items()}, default=bytes.decode))
"""


def test_records_through_the_signature_and_through_training_agree(dataset, run, exported):
    paths = sorted(map(str, dataset.glob("validation-*.tfrecord")))
    words = [sys.executable, "-c", PLAIN, str(exported), *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd="/")
    told = json.loads(done.stdout.splitlines()[-1])
    expected = logits_of(keras.models.load_model(run / "model.keras"), dataset)
    assert len(expected) >= 15
    np.testing.assert_allclose(told["logits"], expected, atol=1e-4)
    labels = load_manifest(str(dataset)).labels
    assert told["label"] == [labels[i] for i in expected.argmax(axis=1)]
    shares = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(told["probabilities"], shares, atol=1e-5)
    np.testing.assert_allclose(told["probability"], shares.max(axis=1), atol=1e-5)


def test_what_goes_with_the_model(dataset, exported):
    facts = load_facts(str(exported))
    assert facts.data == (load_manifest(str(dataset)).fingerprint,)
    assert facts.labels == ("ash", "birch", "cedar")
    assert (facts.schema, facts.encoding, facts.image_size) == ("flowers", "jpeg", (24, 32))
    assert facts.pixels == PixelPolicy(width=32, height=24)
    assert (exported / FACTS).is_file()


@pytest.mark.parametrize(
    ("flags", "resize"),
    [
        (["--schema", "imagenet", "--encoding", "png", "--label-offset", "1"], None),
        (["--schema", "tfds"], (20, 28)),
        (["--encoding", "raw", "--channels", "1"], None),
        (["--resize-mode", "longest"], (24, 24)),
    ],
    ids=["imagenet", "tfds resized", "raw gray", "varying sizes"],
)
def test_every_schema_and_encoding(pictures, tmp_path, flags, resize):
    folder, run = tmp_path / "records", tmp_path / "run"
    split = ["--split", "train=0.6,validation=0.4", "--image-size", "32x24"]
    assert ingest(f"{pictures}/*/*", folder, *split, *flags) == 0
    words = ["train", "--data", str(folder), "--model", "lenet5", "--epochs", "1"]
    size = ["--image-size", f"{resize[1]}x{resize[0]}"] if resize else []
    assert main([*words, "--batch-size", "8", "--output", str(run), *size]) == 0
    assert main(["export", "--run", str(run), "--output", str(tmp_path / "serving")]) == 0
    serve = tf.saved_model.load(str(tmp_path / "serving")).signatures["serving_default"]
    told = serve(records=tf.constant(records_of(folder)))
    model = keras.models.load_model(run / "model.keras")
    np.testing.assert_allclose(told["logits"], logits_of(model, folder, resize), atol=1e-4)


def encoded(image: Image.Image, format: str, **save) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **save)
    return buffer.getvalue()


def smooth(size=(90, 60), mode="RGB", seed=1) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    return Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize("size", [(90, 60), (60, 90), (31, 23), (200, 40)])
@pytest.mark.parametrize("channels", [3, 1])
def test_the_graph_resizes_as_ingest_does(mode, size, channels):
    background = (10, 200, 30)
    policy = PixelPolicy(32, 24, mode, channels, "raw", background=background)
    data = encoded(smooth(size), "PNG")
    picture = prepare_in_graph(tf.constant(data), policy=policy).numpy()
    geometry = fit_image(*size, policy=policy)
    assert picture.shape == (geometry.height, geometry.width, channels)
    expected = np.frombuffer(prepare_image(data, policy=policy).data, np.uint8)
    apart = np.abs(picture.astype(int) - expected.reshape(picture.shape))
    # The window begins at a whole pixel here; that alone is worth a level or two.
    assert apart.mean() <= 3
    if mode == "pad" and channels == 3 and size == (200, 40):
        assert picture[0, 0].tolist() == list(background)


@pytest.mark.parametrize(
    "data",
    [
        encoded(smooth(), "JPEG", quality=95),
        encoded(smooth(), "JPEG", progressive=True, quality=95),
        encoded(smooth(mode="L"), "JPEG", quality=95),
        encoded(smooth(), "BMP"),
        encoded(smooth(), "GIF"),
        encoded(smooth(mode="P"), "PNG"),
    ],
    ids=["jpeg", "progressive", "gray jpeg", "bmp", "gif", "palette png"],
)
def test_the_formats_that_tensorflow_decodes(data):
    for channels in (3, 1):
        policy = PixelPolicy(90, 60, "none", channels, "raw")
        picture = prepare_in_graph(tf.constant(data), policy=policy).numpy()
        expected = np.frombuffer(prepare_image(data, policy=policy).data, np.uint8)
        apart = np.abs(picture.astype(int) - expected.reshape(picture.shape))
        assert apart.mean() <= 1


def test_sixteen_bits_are_scaled_by_both():
    levels = np.linspace(0, 65535, 60 * 90).reshape(60, 90).astype(np.uint16)
    data = encoded(Image.fromarray(levels), "PNG")
    policy = PixelPolicy(90, 60, "none", 1, "raw")
    picture = prepare_in_graph(tf.constant(data), policy=policy).numpy()
    expected = np.frombuffer(prepare_image(data, policy=policy).data, np.uint8)
    assert np.abs(picture.ravel().astype(int) - expected).max() <= 1


def exif(orientation: int, order: bytes = b"MM") -> bytes:
    """A TIFF header and one directory with another tag, then the orientation (TIFF 6.0)."""
    way = "big" if order == b"MM" else "little"

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, way)

    entry = b"".join([number(0x0112, 2), number(3, 2), number(1, 4), number(orientation, 2)])
    other = b"".join([number(0x0100, 2), number(4, 2), number(1, 4), number(6, 4)])
    head = order + number(42, 2) + number(8, 4) + number(2, 2)
    return b"Exif\0\0" + head + other + entry + b"\0\0" + number(0, 4)


@pytest.mark.parametrize("order", [b"MM", b"II"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientations_other_than_upright_are_refused(exported, orientation, order):
    serve = tf.saved_model.load(str(exported)).signatures["image"]
    data = encoded(smooth(), "JPEG", exif=exif(orientation, order))
    assert Image.open(io.BytesIO(data)).getexif().get(0x0112) == orientation
    if not 2 <= orientation <= 8:
        assert serve(images=tf.constant([data]))["label"].shape == (1,)
        return
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        serve(images=tf.constant([data]))
    assert f"an image has an EXIF orientation, which TensorFlow does not undo: {REMEDY}" in str(
        caught.value
    )


def transparent_palette() -> bytes:
    image = smooth(mode="P")
    return encoded(image, "PNG", transparency=3)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encoded(smooth(mode="CMYK"), "JPEG"), "a JPEG in CMYK, which TensorFlow turns into"),
        (encoded(smooth(mode="RGBA"), "PNG"), "a PNG with transparency, which TensorFlow leaves"),
        (encoded(smooth(mode="LA"), "PNG"), "a PNG with transparency, which TensorFlow leaves"),
        (transparent_palette(), "a PNG with transparency, which TensorFlow leaves"),
        (encoded(smooth(), "WEBP"), "an image is no JPEG, PNG, GIF or BMP: use tpufeed predict"),
        (encoded(smooth(), "TIFF"), "an image is no JPEG, PNG, GIF or BMP: use tpufeed predict"),
        (b"hello", "an image is no JPEG, PNG, GIF or BMP: use tpufeed predict"),
        (b"", "an image is no JPEG, PNG, GIF or BMP: use tpufeed predict"),
        (encoded(smooth(), "JPEG")[:400], "Invalid JPEG data"),
        # Headers that lie about their lengths must end, too.
        (b"\xff\xd8\xff\xe1\xff\xffExif\0\0MM\0*\x7f\xff\xff\xff" + b"\0" * 40, "JPEG"),
        (b"\x89PNG\r\n\x1a\n\x7f\xff\xff\xffIHDR" + b"\0" * 20, "PNG"),
    ],
    ids=[
        *("cmyk", "rgba", "la", "palette", "webp", "tiff", "text", "empty", "cut"),
        *("bad exif", "bad png"),
    ],
)
def test_what_tensorflow_gets_wrong_is_refused(exported, data, problem):
    serve = tf.saved_model.load(str(exported)).signatures["image"]
    good = encoded(smooth(), "PNG")
    with pytest.raises(tf.errors.InvalidArgumentError, match=problem):
        serve(images=tf.constant([good, data]))


def test_photographs_through_both_signatures(shared, tmp_path):
    """Prints how far TensorFlow's own preparation is from ingest's, on real photographs."""
    pattern = f"{shared}/data/flowers/*/*.jpg"
    folder, run, output = tmp_path / "records", tmp_path / "run", tmp_path / "serving"
    split = ["--split", "train=0.9,validation=0.1", "--image-size", "96"]
    assert ingest(pattern, folder, *split) == 0
    words = ["train", "--data", str(folder), "--model", "convnet", "--epochs", "2"]
    flags = ["--batch-size", "32", "--optimizer", "adam", "--output", str(run)]
    assert main([*words, *flags]) == 0
    assert main(["export", "--run", str(run), "--output", str(output)]) == 0
    rows = [
        row
        for path in sorted((folder / "index").glob("validation-*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ][:100]
    records = records_of(folder)[: len(rows)]
    images = [open(row["source"], "rb").read() for row in rows]
    module = tf.saved_model.load(str(output))
    by_record = module.signatures["serving_default"](records=tf.constant(records))
    by_image = module.signatures["image"](images=tf.constant(images))
    server = Server(keras.models.load_model(run / "model.keras"), load_facts(str(output)))
    stored = server.pixels_of_records(tf.constant(records)).numpy().astype(int)
    raw = server.pixels_of_images(tf.constant(images)).numpy().astype(int)
    apart = np.abs(stored - raw).mean(axis=(1, 2, 3))
    agree = np.mean(by_record["label"].numpy() == by_image["label"].numpy())
    print(
        f"{len(rows)} photographs: TensorFlow's picture is {apart.mean():.2f} levels from the "
        f"record's (worst {apart.max():.2f}); the labels agree for {100 * agree:.0f} %"
    )
    assert len(rows) >= 90
    assert apart.mean() < 4
    assert agree >= 0.9


def test_the_transform_goes_along(dataset, tmp_path):
    pytest.importorskip("tensorflow_transform")
    words = ["--data", str(dataset)]
    assert main(["analyze", *words, "--output", str(tmp_path / "transform")]) == 0
    flags = ["--model", "convnet", "--epochs", "1", "--batch-size", "8"]
    flags += ["--transform", str(tmp_path / "transform"), "--output", str(tmp_path / "run")]
    assert main(["train", *words, *flags]) == 0
    assert (
        main(["export", "--run", str(tmp_path / "run"), "--output", str(tmp_path / "serving")]) == 0
    )
    module = tf.saved_model.load(str(tmp_path / "serving"))
    rows = {name: tf.zeros([2, 3], tf.int64) for name in ("channel_sum", "channel_squares")}
    rows |= {name: tf.zeros([2], tf.int64) for name in ("training", "pixels")}
    told = module.transform.transform_fn({**rows, "label": tf.constant(["cedar", "ash"])})
    assert told["class"].numpy().tolist() == [2, 0]
    # The scaling inside the model is that of the transform's moments.
    model = keras.models.load_model(tmp_path / "run" / "model.keras")
    scaling = next(layer for layer in model.layers if isinstance(layer, keras.layers.Rescaling))
    std = load_manifest(str(dataset)).channel_std
    np.testing.assert_allclose(scaling.scale, [1 / (255 * s) for s in std], rtol=1e-9)


def test_wrong_folders_are_one_line(dataset, run, exported, pictures, tmp_path, capsys):
    def export(*words) -> str:
        assert main(["export", *map(str, words)]) == 1
        return said(capsys).removeprefix("tpufeed export: error: ")

    new = tmp_path / "new"
    assert export("--run", tmp_path, "--output", new) == (
        f"{tmp_path}: has no history.json: give the --output of tpufeed train"
    )
    assert export("--run", run, "--output", exported) == (
        f"--output {exported}: is not empty: give a new folder"
    )
    other = tmp_path / "other"
    assert ingest(f"{pictures}/*/*", other, "--image-size", "32x24") == 0
    assert export("--run", run, "--output", new, "--data", other) == (
        f"--run {run}: was trained on other data than {other} holds now: give the folders of the "
        "run with --data"
    )
    half = tmp_path / "half"
    half.mkdir()
    (half / "history.json").write_bytes((run / "history.json").read_bytes())
    assert export("--run", half, "--output", new) == (
        f"--run {half}: has no model.keras, so the run did not end: tpufeed train --resume, or "
        "train anew"
    )
    assert not new.exists()
    assert main(["export", "--run", "", "--output", "x"]) == 2
    assert said(capsys) == "tpufeed export: error: --run '': is empty; give a folder"


MINE = """
import keras

class Twice(keras.layers.Layer):
    def call(self, x):
        return x * 2

@keras.saving.register_keras_serializable("mine")
class Thrice(keras.layers.Layer):
    def call(self, x):
        return x * 3

def model(input_shape, classes):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input(input_shape), layers.Flatten(), layers.Dense(classes), Twice(), Thrice()]
    )
"""


def test_layers_of_ones_own(dataset, tmp_path, capsys):
    """Trained in this process, exported in another one, which has not run the file."""
    mine, run, serving = tmp_path / "mine.py", tmp_path / "run", tmp_path / "serving"
    mine.write_text(MINE)
    words = ["train", "--data", str(dataset), "--model", f"{mine}:model", "--epochs", "1"]
    assert main([*words, "--batch-size", "8", "--output", str(run)]) == 0
    export = ["export", "--run", str(run), "--output", str(serving)]

    def try_export(*words):
        return subprocess.run(
            [sys.executable, "-m", "pipeline", *export, *words],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
        )

    # No file is run that only the run names: runs are handed on, and data should be no program.
    ended = try_export()
    assert ended.returncode == 1 and not serving.exists()
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"tpufeed export: error: --run {run}: model.keras cannot be loaded: ")
    assert line.endswith("; if it has layer classes of its own, give --layers FILE.py")
    assert try_export("--layers", str(mine)).returncode == 0
    serve = tf.saved_model.load(str(serving)).signatures["serving_default"]
    assert serve(records=tf.constant(records_of(dataset)))["logits"].shape[1] == 3
    mine.unlink()
    again = [*export[:-1], str(tmp_path / "again"), "--layers"]
    assert main([*again, str(mine)]) == 1
    assert said(capsys) == f"tpufeed export: error: {mine}: no such file"
    assert main([*again, ""]) == 2
    assert said(capsys) == "tpufeed export: error: --layers '': is empty; give a Python file"


def test_a_model_that_is_none_is_one_line(run, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "history.json").write_bytes((run / "history.json").read_bytes())
    (broken / "model.keras").write_bytes((run / "model.keras").read_bytes()[:-1000])
    assert main(["export", "--run", str(broken), "--output", str(tmp_path / "new")]) == 1
    assert said(capsys).startswith(
        f"tpufeed export: error: --run {broken}: model.keras cannot be loaded: "
    )
    assert not (tmp_path / "new").exists()


def test_a_moved_data_set_is_given_again(dataset, run, tmp_path):
    moved = tmp_path / "moved"
    moved.symlink_to(dataset)
    words = ["export", "--run", str(run), "--output", str(tmp_path / "out")]
    assert main([*words, "--data", str(moved)]) == 0


def test_a_model_for_other_labels_is_not_loaded(tmp_path):
    draw(tmp_path / "x.png", seed=1)
    with pytest.raises(ValueError, match="has no assets.extra/tpufeed.json: give the --output of"):
        load_facts(str(tmp_path))
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / FACTS).write_text('{"labels": []}')
    with pytest.raises(ValueError, match="not as tpufeed export writes it: KeyError"):
        load_facts(str(tmp_path))


def test_an_untrained_server_answers_for_one_and_for_many(exported):
    facts = load_facts(str(exported))
    model = build_model("convnet", input_shape=(24, 32, 3), classes=3)
    server = Server(model, facts)
    data = [encoded(smooth(seed=seed), "PNG") for seed in range(5)]
    together = server.image(tf.constant(data))["logits"].numpy()
    single = [server.image(tf.constant([one]))["logits"].numpy()[0] for one in data]
    np.testing.assert_allclose(together, single, atol=1e-4)
