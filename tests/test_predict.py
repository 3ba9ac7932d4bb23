"""Labels of image files: each prepared as ingest prepares it, the bad ones named."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers import draw, ingest
from PIL import Image

from pipeline.__main__ import main
from pipeline.export import load_facts
from pipeline.predict import make_record, predict_images
from transforms.example import parse_example


@pytest.fixture(scope="module")
def exported(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    words = ["train", "--data", str(dataset), "--model", "convnet", "--epochs", "1"]
    assert main([*words, "--batch-size", "8", "--output", str(folder / "run")]) == 0
    serving = folder / "serving"
    assert main(["export", "--run", str(folder / "run"), "--output", str(serving)]) == 0
    return serving


def awkward(folder) -> None:
    """Pictures that TensorFlow alone would get wrong: turned, transparent, CMYK, 16 bit."""
    levels = np.random.default_rng(5).integers(0, 256, (4, 6, 4), np.uint8)
    image = Image.fromarray(levels).resize((80, 50), Image.Resampling.BICUBIC)
    folder.mkdir(parents=True, exist_ok=True)
    for orientation in range(2, 9):
        tag = Image.Exif()
        tag[0x0112] = orientation
        image.convert("RGB").save(folder / f"turned{orientation}.jpg", exif=tag, quality=95)
    image.save(folder / "alpha.png")
    image.convert("RGB").convert("CMYK").save(folder / "cmyk.jpg")
    deep = np.random.default_rng(6).integers(0, 65536, (50, 80), np.uint16)
    Image.fromarray(deep).save(folder / "deep.png")
    image.convert("RGB").save(folder / "web.webp")


def records_by_key(folder) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("train-*.tfrecord")):
        for record in tf.data.TFRecordDataset(str(path)):
            data = record.numpy()
            found[parse_example(data)["key"][1][0].decode()] = data
    return found


def agrees_with_ingest(root, pattern, model, output, *flags) -> int:
    """Ingests the files and predicts the same ones; returns how many there are."""
    assert ingest(pattern, output, *flags) == 0
    facts = load_facts(str(model))
    serve = tf.saved_model.load(str(model)).signatures["serving_default"]
    records = records_by_key(output)
    paths = [str(root / key) for key in records]
    predictions = list(predict_images(str(model), paths))
    answers = serve(records=tf.constant(list(records.values())))
    for number, (key, record) in enumerate(records.items()):
        mine = parse_example(make_record((root / key).read_bytes(), facts=facts, path=key))
        theirs = parse_example(record)
        assert mine["image"] == theirs["image"], key  # to the byte, so to every pixel
        assert mine["size"] == theirs["size"]
        prediction = predictions[number]
        assert (prediction.path, prediction.reason) == (paths[number], "")
        assert prediction.label == answers["label"].numpy()[number].decode()
        assert prediction.probability == pytest.approx(
            float(answers["probability"][number]), abs=1e-4
        )
    return len(records)


def test_awkward_pictures_agree_with_their_records(exported, tmp_path):
    awkward(tmp_path / "in" / "ash")
    draw(tmp_path / "in" / "ash" / "plain.jpg", seed=3)
    count = agrees_with_ingest(
        tmp_path / "in" / "ash",
        f"{tmp_path}/in/ash/*",
        exported,
        tmp_path / "records",
        *("--image-size", "32x24"),
    )
    assert count == 12


def test_a_hundred_sources_agree_with_their_records(shared, exported, tmp_path):
    folder = tmp_path / "in" / "ash"
    awkward(folder)
    photographs = sorted((shared / "data" / "photos").rglob("*.jp*g"))[:8]
    flowers = sorted((shared / "data" / "flowers").glob("*/*.jpg"))[::12]
    for number, path in enumerate([*photographs, *flowers]):
        (folder / f"{number:03d}{path.suffix}").symlink_to(path)
    size = ("--image-size", "32x24")
    count = agrees_with_ingest(folder, f"{folder}/*", exported, tmp_path / "records", *size)
    print(f"{count} files, {len(photographs)} photographs among them: the same bytes as ingest")
    assert photographs
    assert count >= 100


def test_bad_files_are_named_and_the_others_go_on(exported, tmp_path, capsys):
    draw(tmp_path / "good.png", seed=1)
    (tmp_path / "text.jpg").write_text("hello")
    buffer = io.BytesIO()
    Image.new("RGB", (300, 300), "red").save(buffer, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-300])
    names = ["text.jpg", "good.png", "gone.jpg", "cut.jpg", "good.png", "\x1b[31m.png"]
    words = [str(tmp_path / name) for name in names]
    assert main(["predict", "--model", str(exported), *words]) == 1
    told = capsys.readouterr()
    good = [line for line in told.out.splitlines() if line]
    assert len(good) == 2
    assert all(line.startswith(f"{tmp_path}/good.png: ") and line.endswith(" %") for line in good)
    bad = told.err.splitlines()[-4:]
    assert bad[0].startswith(f"{tmp_path}/text.jpg: unidentified: no image format begins with")
    assert bad[1] == f"{tmp_path}/gone.jpg: missing: No such file or directory"
    assert bad[2].startswith(f"{tmp_path}/cut.jpg: truncated: ")
    assert bad[3] == f"{tmp_path}/\\x1b[31m.png: missing: No such file or directory"


def test_json_is_a_line_a_file(exported, tmp_path, capsys):
    draw(tmp_path / "good.png", seed=1)
    words = [str(tmp_path / "good.png"), str(tmp_path / "gone.png")]
    assert main(["predict", "--model", str(exported), "--json", *words]) == 1
    good, gone = map(json.loads, capsys.readouterr().out.splitlines())
    assert good["path"] == words[0]
    assert good["label"] in ("ash", "birch", "cedar")
    assert 1 / 3 <= good["probability"] <= 1
    assert gone == {"path": words[1], "reason": "missing", "detail": "No such file or directory"}
    assert main(["predict", "--model", str(exported), words[0]]) == 0


def test_more_files_than_a_batch_keep_their_order(exported, tmp_path):
    for seed in range(3):
        draw(tmp_path / f"{seed}.png", seed=seed)
    paths = [str(tmp_path / f"{i % 4}.png") for i in range(150)]  # every fourth is missing
    told = list(predict_images(str(exported), paths))
    assert [prediction.path for prediction in told] == paths
    assert [bool(prediction.reason) for prediction in told] == [i % 4 == 3 for i in range(150)]
    assert len({prediction.label for prediction in told[0::4]}) == 1


def test_a_reader_that_stops_reading_ends_it_without_a_word(exported, tmp_path):
    """As `| head` does, here before the first line, so that no timing decides."""
    draw(tmp_path / "good.png", seed=1)
    read, write = os.pipe()
    os.close(read)
    words = ["predict", "--model", str(exported), str(tmp_path / "good.png")]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words],
        cwd=Path(__file__).resolve().parents[1],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.returncode == 1
    assert "tpufeed predict" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "m", "a.jpg", ""], "IMAGE '': is empty; give a file"),
        (["--model", "", "a.jpg"], "--model '': is empty; give the --output of tpufeed export"),
    ],
)
def test_empty_names_are_refused(words, message, capsys):
    assert main(["predict", *words]) == 2
    assert capsys.readouterr().err == f"tpufeed predict: error: {message}\n"


def test_a_folder_without_a_model_is_one_line(tmp_path, capsys):
    assert main(["predict", "--model", str(tmp_path), "x.jpg"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"tpufeed predict: error: --model {tmp_path}: has no assets.extra/tpufeed.json: give the "
        "--output of tpufeed export"
    )
