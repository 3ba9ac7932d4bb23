"""The command line's arguments: what they become, and what every wrong one says."""

import shutil
from fractions import Fraction

import pytest

from pipeline.__main__ import main
from pipeline.config import IngestConfig, UsageError, make_ingest_config, make_parser
from transforms.image import PixelPolicy
from transforms.records import Grouping, Input

BASE = ["ingest", "--input", "in/*/*.jpg", "--output", "out"]
HELP = " (see tpufeed ingest --help)"


def run(argv) -> int:
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


def configured(*argv: str, base=BASE) -> IngestConfig:
    return make_ingest_config(make_parser().parse_args([*base, *argv]))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test may leave an `out` in the checkout."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    yield folder
    assert list(folder.iterdir()) == []


def test_defaults(elsewhere):
    assert configured() == IngestConfig(
        inputs=(Input(f"{elsewhere}/in/*/*.jpg"),),
        output=f"{elsewhere}/out",
        root=None,
        pixels=PixelPolicy(224, 224, "cover", 3, "jpeg", 90, (255, 255, 255), 178_956_970),
        schema="flowers",
        weights=(("train", Fraction(1)),),
        weights_given=False,
        split_by=Grouping("key", ""),
        seed=0,
        shards=None,
        shard_size=128_000_000,
        class_names=None,
        known_labels=None,
        new_classes="reject",
        label_offset=0,
        max_reject_rate=0.01,
        exclude=None,
        overwrite=False,
        decoders=None,
    )


def test_everything_given():
    argv = (
        "--root /in --image-size 320x240 --resize-mode pad --channels 1 --encoding png "
        "--quality 80 --schema tfds --split train=0.9,test=0.1 --split-by group:p(\\d+) --seed 7 "
        "--shard-size 64MiB --class-names names.txt --new-classes append --label-offset 1 "
        "--background 0,127,255 --max-pixels 1000 --max-reject-rate 0.5 --exclude ~/x.txt "
        "--duplicates drop --overwrite --min-size 8 --max-area 900 --max-aspect-ratio 1.5 "
        "--exif iso,make"
    ).split()
    base = ["ingest", "--input=gs://bucket/*/*.jpg", "--output=gs://bucket/out"]
    assert configured(*argv, base=base) == IngestConfig(
        inputs=(Input("gs://bucket/*/*.jpg"),),
        output="gs://bucket/out",
        root="/in",
        pixels=PixelPolicy(320, 240, "pad", 1, "png", 80, (0, 127, 255), 1000),
        schema="tfds",
        weights=(("train", Fraction("0.9")), ("test", Fraction("0.1"))),
        weights_given=True,
        split_by=Grouping("group", r"p(\d+)"),
        seed=7,
        shards=None,
        shard_size=64 * 1024**2,
        class_names="names.txt",
        new_classes="append",
        label_offset=1,
        max_reject_rate=0.5,
        duplicates="drop",
        exclude="/home/me/x.txt",
        min_size=8,
        max_area=900,
        max_aspect_ratio=Fraction("1.5"),
        exif=("make", "iso"),
        overwrite=True,
    )


@pytest.mark.parametrize(
    ("text", "pattern", "split", "kind"),
    [
        ("a/*.jpg", "{}/a/*.jpg", "", "glob"),
        ("/a/b=c/*.jpg", "/a/b=c/*.jpg", "", "glob"),
        ("train=a/*.jpg", "{}/a/*.jpg", "train", "glob"),
        ("./a=b/*.jpg", "{}/a=b/*.jpg", "", "glob"),
        ("test=gs://b/x=1/*.jpg", "gs://b/x=1/*.jpg", "test", "glob"),
        ("~/a/*", "/home/me/a/*", "", "glob"),
        ("rows.csv", "{}/rows.csv", "", "csv"),
        ("val=gs://b/*.CSV", "gs://b/*.CSV", "val", "csv"),
        ("idx:digits", "idx:{}/digits", "", "idx"),
        ("idx:/d", "idx:/d", "", "idx"),
        ("idx:gs://b/d", "idx:gs://b/d", "", "idx"),
        ("idx:mnist", "idx:mnist", "", "idx"),
        ("idx:./mnist", "idx:{}/mnist", "", "idx"),
        ("a [1]#%?é.jpg", "{}/a [1]#%?é.jpg", "", "glob"),
    ],
)
def test_input(elsewhere, text, pattern, split, kind):
    (found,) = configured(base=["ingest", "--input", text, "--output", "out"]).inputs
    assert found == Input(pattern.format(elsewhere), split)
    assert found.kind == kind


@pytest.mark.parametrize(
    ("inputs", "size", "channels", "encoding"),
    [
        (["idx:d"], (28, 28), 1, "png"),
        (["idx:d", "idx:e"], (28, 28), 1, "png"),
        (["idx:d", "a/*"], (224, 224), 3, "jpeg"),
    ],
)
def test_idx_has_defaults_of_its_own(inputs, size, channels, encoding):
    base = ["ingest", "--output", "out", *(f"--input={text}" for text in inputs)]
    pixels = configured(base=base).pixels
    assert (pixels.width, pixels.height, pixels.channels, pixels.encoding) == (
        *size,
        channels,
        encoding,
    )
    given = configured("--image-size=32", "--channels=3", "--encoding=jpeg", base=base).pixels
    assert (given.width, given.height, given.channels, given.encoding) == (32, 32, 3, "jpeg")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("128MB", 128_000_000),
        ("128 mb", 128_000_000),
        ("64MiB", 67_108_864),
        ("1.5kB", 1500),
        ("2G", 2_000_000_000),
        ("1TB", 10**12),
        ("0.3GB", 300_000_000),
    ],
)
def test_shard_size(text, expected):
    assert configured("--shard-size", text).shard_size == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train=1", [("train", "1")]),
        ("a=0.7,b=0.2,c=0.1", [("a", "0.7"), ("b", "0.2"), ("c", "0.1")]),
        ("a=1/3, b=2/3", [("a", "1/3"), ("b", "2/3")]),
    ],
)
def test_split(text, expected):
    assert configured("--split", text).weights == tuple((n, Fraction(w)) for n, w in expected)


SIZE = "must be N or WIDTHxHEIGHT, as in 224 or 320x240"
BACKGROUND = "must be R,G,B, each 0 to 255, as in 255,255,255"
SHARE = "is no NAME=SHARE, as in train=0.8,validation=0.2"
RATIO = "must be a number, 1 or more, as in 2.5"
EXIF = (
    "allowed are datetime_original, make, model, orientation, focal_length, f_number, "
    "exposure_time, iso, gps_latitude, gps_longitude, and all, which is all but gps_latitude and "
    "gps_longitude"
)
BY = "allowed are key, group:REGEX, column:NAME"
MODES = "cover, contain, pad, stretch, shortest, longest, none"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--image-size", "0"], "--image-size 0: allowed are 1 to 16384"),
        (["--image-size", "224x99999"], "--image-size 99999: allowed are 1 to 16384"),
        (["--image-size", "big"], f"--image-size big: {SIZE}"),
        (["--image-size", "-5"], f"--image-size -5: {SIZE}"),
        (["--image-size", "224,224"], f"--image-size 224,224: {SIZE}"),
        (["--image-size", "224x"], f"--image-size 224x: {SIZE}"),
        (["--resize-mode", "crop"], f"--resize-mode crop: allowed are {MODES}"),
        (["--channels", "4"], "--channels 4: allowed are 3, 1"),
        (["--channels", "0"], "--channels 0: allowed are 3, 1"),
        (["--channels", "rgb"], "argument --channels: invalid int value: 'rgb'" + HELP),
        (["--encoding", "webp"], "--encoding webp: allowed are jpeg, png, raw, original"),
        (["--quality", "0"], "--quality 0: allowed are 1 to 100"),
        (["--quality", "101"], "--quality 101: allowed are 1 to 100"),
        (["--quality", "high"], "argument --quality: invalid int value: 'high'" + HELP),
        (["--schema", "coco"], "--schema coco: allowed are flowers, imagenet, tfds"),
        (
            ["--encoding", "raw", "--schema", "imagenet"],
            "--encoding raw: only with --schema flowers, not imagenet",
        ),
        (
            ["--encoding", "raw", "--schema", "tfds"],
            "--encoding raw: only with --schema flowers, not tfds",
        ),
        (
            ["--split", "train=0.8,test=0.1"],
            "--split train=0.8,test=0.1: split weights add up to 0.9, must be 1, as in "
            "train=0.8,validation=0.2",
        ),
        (
            ["--split", "train=80,test=20"],
            "--split train=80,test=20: split weights add up to 100, must be 1, as in "
            "train=0.8,validation=0.2",
        ),
        (["--split", "train"], f"--split train: 'train' {SHARE}"),
        (["--split", "train=x"], f"--split train=x: 'train=x' {SHARE}"),
        (["--split", "train=nan"], f"--split train=nan: 'train=nan' {SHARE}"),
        (["--split", "train=1/0"], f"--split train=1/0: 'train=1/0' {SHARE}"),
        (["--split", "train=1,"], f"--split train=1,: '' {SHARE}"),
        (["--split", "a=1,b=0"], "--split a=1,b=0: split b=0: a weight must be above 0"),
        (["--split", "a=2,b=-1"], "--split a=2,b=-1: split b=-1: a weight must be above 0"),
        (
            ["--split", "a=0.5,a=0.5"],
            "--split a=0.5,a=0.5: split 'a' is named twice: name each split once",
        ),
        (
            ["--split", "my-train=1"],
            "--split my-train=1: split name 'my-train': allowed are 1 to 64 letters, digits and "
            "underscores",
        ),
        (["--split-by", "label"], f"--split-by label: {BY}"),
        (["--split-by", "group"], f"--split-by group: {BY}"),
        (["--split-by", "group:"], f"--split-by group:: {BY}"),
        (["--split-by", "key:x"], f"--split-by key:x: {BY}"),
        (["--split-by", ""], f"--split-by : {BY}"),
        (
            ["--split-by", "group:("],
            "--split-by group:(: no regular expression: missing ), unterminated subpattern at "
            "position 0",
        ),
        (
            ["--split-by", "column:patient"],
            "--split-by column:NAME: only CSV inputs have columns",
        ),
        (["--seed=-1"], "--seed -1: must be 0 or more"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'" + HELP),
        (["--shards", "0"], "--shards 0: must be 1 or more"),
        (["--shards", "100000"], "--shards 100000: allowed are 1 to 99999"),
        (["--shards", "many"], "argument --shards: invalid int value: 'many'" + HELP),
        (["--shards", "4.0"], "argument --shards: invalid int value: '4.0'" + HELP),
        (["--shard-size", "0"], "--shard-size 0: must be 1 or more"),
        (
            ["--shard-size", "big"],
            "--shard-size big: must be a size such as 128MB, 64MiB or 1GB",
        ),
        (
            ["--shard-size=-1MB"],
            "--shard-size -1MB: must be a size such as 128MB, 64MiB or 1GB",
        ),
        (["--min-size", "0"], "--min-size 0: must be 1 or more"),
        (["--min-size", "big"], "argument --min-size: invalid int value: 'big'" + HELP),
        (["--max-area", "0"], "--max-area 0: must be 1 or more"),
        (
            ["--max-area", "200000000"],
            "--max-area 200000000: a source of more than the 178956970 of --max-pixels is a "
            "fault; give less, or raise --max-pixels",
        ),
        (
            ["--min-size", "100", "--max-area", "9999"],
            "--min-size 100, --max-area 9999: no source can be so large and so small; give "
            "--max-area 10000 or more",
        ),
        (["--max-aspect-ratio", "0.5"], "--max-aspect-ratio 0.5: must be 1 or more"),
        (["--max-aspect-ratio", "wide"], f"--max-aspect-ratio wide: {RATIO}"),
        (["--max-aspect-ratio", "nan"], f"--max-aspect-ratio nan: {RATIO}"),
        (["--max-aspect-ratio", "1e9"], f"--max-aspect-ratio 1e9: {RATIO}"),
        (["--max-aspect-ratio", "1/0"], f"--max-aspect-ratio 1/0: {RATIO}"),
        (["--exif", "camera"], f"--exif 'camera': {EXIF}"),
        (["--exif", "make,"], f"--exif '': {EXIF}"),
        (["--exif", ""], f"--exif '': {EXIF}"),
        (
            ["--shards", "4", "--shard-size", "1MB"],
            "argument --shard-size: not allowed with argument --shards" + HELP,
        ),
        (["--new-classes", "drop"], "--new-classes drop: allowed are reject, append"),
        (
            ["--new-classes", "append"],
            "--new-classes append: needs --class-names, to append to",
        ),
        (["--label-offset=-1"], "--label-offset -1: must be 0 or more"),
        (
            ["--label-offset", "2147483648"],
            "--label-offset 2147483648: allowed are 0 to 2147483647",
        ),
        (["--background", "white"], f"--background white: {BACKGROUND}"),
        (["--background", "1,2"], f"--background 1,2: {BACKGROUND}"),
        (["--background", "1,2,3,4"], f"--background 1,2,3,4: {BACKGROUND}"),
        (["--background=1,2,-3"], f"--background 1,2,-3: {BACKGROUND}"),
        (["--background", "1,2,256"], "--background 256: allowed are 0 to 255"),
        (["--max-pixels", "0"], "--max-pixels 0: allowed are 1 to 1099511627776"),
        (["--max-pixels", "1e6"], "argument --max-pixels: invalid int value: '1e6'" + HELP),
        (["--max-reject-rate", "1.5"], "--max-reject-rate 1.5: allowed are 0 to 1"),
        (["--max-reject-rate=-0.1"], "--max-reject-rate -0.1: allowed are 0 to 1"),
        (["--max-reject-rate", "nan"], "--max-reject-rate nan: allowed are 0 to 1"),
        (
            ["--max-reject-rate", "1%"],
            "argument --max-reject-rate: invalid float value: '1%'" + HELP,
        ),
        (["--duplicates", "merge"], "--duplicates merge: allowed are keep, together, drop"),
        (
            ["--duplicates", "together", "--split-by", "group:a"],
            "--duplicates together: splits by content, so --split-by group:a cannot hold as well; "
            "use drop, or --split-by key",
        ),
        (
            ["--overwrite", "--resume"],
            "--overwrite, --resume: one begins again, one goes on; drop one",
        ),
        (["--output", ""], "--output '': is empty; give a path"),
        (["--root", ""], "--root '': is empty; give a path"),
        (["--class-names", ""], "--class-names '': is empty; give a path"),
        (["--exclude", ""], "--exclude '': is empty; give a path"),
        (["--input", ""], "--input '': the pattern is empty"),
        (["--input", "train="], "--input 'train=': the pattern is empty"),
        (["--input", "idx:"], "--input idx: names no folder; give idx:DIR or idx:mnist"),
        (
            ["--input", "s" * 65 + "=a"],
            f"--input {'s' * 65}=a: {'s' * 65!r} is no name for a split",
        ),
        (["--input", "test=b/*"], "--input: give SPLIT= to every --input or to none"),
        # No abbreviations, and nothing unknown.
        (["--shard", "4"], "--shard: neither tpufeed nor Beam has such an option"),
        (["--sharsd", "4"], "--sharsd: neither tpufeed nor Beam has such an option"),
        (["--shards=4", "--over"], "--over: neither tpufeed nor Beam has such an option"),
        (["--runne", "X"], "--runne: neither tpufeed nor Beam has such an option"),
        (
            ["--direct_num_workers", "two"],
            "argument --direct_num_workers: invalid int value: 'two'",
        ),
        (
            ["in/b/2.jpg"],
            "in/b/2.jpg: belongs to no option; quote the pattern of --input, or the shell "
            "expands it",
        ),
        (["--quality"], "argument --quality: expected one argument" + HELP),
        (["--debug=1"], "argument --debug: ignored explicit argument '1'" + HELP),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value)[:40],
)
def test_a_wrong_argument_is_one_line_and_2(capsys, argv, message):
    assert run([*BASE, *argv]) == 2
    assert capsys.readouterr() == ("", f"tpufeed ingest: error: {message}\n")


GIVEN = "the inputs already have their splits"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--input", "train=a/*", "--split", "train=1"],
            f"--split: {GIVEN}; drop one of the two",
        ),
        (["--input", "idx:d", "--split", "train=1"], f"--split: {GIVEN}; drop one of the two"),
        (
            ["--input", "idx:d", "--duplicates", "together"],
            f"--duplicates together: {GIVEN}; use drop, which keeps the first by key",
        ),
        (
            ["--input", "train=a/*", "--duplicates", "together"],
            f"--duplicates together: {GIVEN}; use drop, which keeps the first by key",
        ),
        (
            ["--input", "train=idx:d"],
            "--input SPLIT=idx:DIR: IDX files bring their splits; drop SPLIT=",
        ),
        (
            ["--input", "train=a/*", "--split-by", "group:x"],
            f"--split-by group:x: {GIVEN}, so nothing is split by it; drop one of the two",
        ),
        (
            ["--input", "idx:d", "--split-by", "group:x"],
            f"--split-by group:x: {GIVEN}, so nothing is split by it; drop one of the two",
        ),
        (
            ["--input", "idx:d", "--exif", "make"],
            "--exif: pictures in IDX files have no EXIF; drop it",
        ),
        (
            ["--input", "a.csv", "--input", "b/*", "--split-by", "column:p"],
            "--split-by column:NAME: only CSV inputs have columns",
        ),
    ],
)
def test_contradictions(capsys, argv, message):
    assert run(["ingest", "--output", "out", *argv]) == 2
    assert capsys.readouterr() == ("", f"tpufeed ingest: error: {message}\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [],
            "tpufeed: error: no command: give one of ingest, verify, inspect (see tpufeed --help)",
        ),
        (
            ["ingest"],
            "tpufeed ingest: error: the following arguments are required: --input, --output" + HELP,
        ),
        (
            ["ingest", "--input", "a"],
            "tpufeed ingest: error: the following arguments are required: --output" + HELP,
        ),
    ],
)
def test_commands(capsys, argv, message):
    assert run(argv) == 2
    assert capsys.readouterr() == ("", message + "\n")


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        ("Nonsense", "tpufeed ingest: error: Unexpected pipeline runner: Nonsense. Valid values"),
        ("DataflowRunner", "tpufeed ingest: error: --input "),
    ],
)
def test_beam_refuses_before_the_old_data_set_is_removed(elsewhere, capsys, runner, message):
    output, picture = elsewhere / "out", elsewhere / "in" / "cat" / "a.jpg"
    picture.parent.mkdir(parents=True)
    picture.touch()
    output.mkdir()
    (output / "dataset.json").write_text("{}")
    assert run([*BASE, "--overwrite", "--runner", runner]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith(message)] == lines[-1:]
    (output / "dataset.json").unlink()  # fails if it is gone
    output.rmdir()
    shutil.rmtree(elsewhere / "in")


def test_help_names_every_flag_of_the_contract(capsys):
    assert run(["ingest", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in (
        "input output root image-size resize-mode channels encoding quality schema split split-by "
        "seed shards shard-size class-names new-classes label-offset background max-pixels "
        "max-reject-rate duplicates exclude overwrite resume"
    ).split():
        assert f" --{flag} " in text.replace("\n", " ").replace("]", " ") + " ", flag


def test_no_input():
    with pytest.raises(UsageError) as caught:
        IngestConfig(inputs=(), output="out")
    assert str(caught.value) == "--input: give at least one glob, CSV or idx:DIR"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ("train",)),
        (["--split", "b=0.5,a=0.5"], ("b", "a")),
        (["--input", "rows.csv"], ()),
    ],
)
def test_the_splits_that_are_sure(argv, expected):
    assert configured(*argv).splits == expected


def test_the_splits_given_by_name():
    base = ["ingest", "--output", "o", "--input", "b=x/*", "--input", "a=y/*"]
    assert configured(base=base).splits == ("a", "b")


def test_config_in_the_manifest(elsewhere):
    found = configured("--split", "a=0.25,b=3/4", "--split-by", "group:x", "--overwrite").to_json()
    assert found == {
        "inputs": ({"pattern": f"{elsewhere}/in/*/*.jpg", "split": ""},),
        "output": f"{elsewhere}/out",
        "root": None,
        "pixels": {
            "width": 224,
            "height": 224,
            "mode": "cover",
            "channels": 3,
            "encoding": "jpeg",
            "quality": 90,
            "background": (255, 255, 255),
            "max_pixels": 178956970,
        },
        "schema": "flowers",
        "weights": {"a": "1/4", "b": "3/4"},
        "split_by": {"kind": "group", "value": "x"},
        "seed": 0,
        "shards": None,
        "shard_size": 128000000,
        "class_names": None,
        "new_classes": "reject",
        "label_offset": 0,
        "max_reject_rate": 0.01,
        "duplicates": "keep",
        "exclude": None,
    }


def test_the_ratio_of_the_python_interface_is_what_is_written():
    """Not the float's last bit."""
    for ratio in (1.15, "1.15", Fraction("1.15")):
        config = IngestConfig(inputs=(Input("/a/*"),), output="/o", max_aspect_ratio=ratio)
        assert config.filters.max_aspect_ratio == Fraction("1.15")
        assert config.to_json()["max_aspect_ratio"] == "23/20"
