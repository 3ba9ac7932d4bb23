"""gs:// in and out, through Beam's file systems, against a local store that can be made to fail."""

import concurrent.futures
import os
import subprocess
import sys

import pytest
from gcs_emulator import serve
from helpers import draw, ingest

from pipeline.__main__ import main
from transforms import files
from transforms.manifest import load_manifest, parse_manifest
from transforms.prepare import read_source
from transforms.records import DataError, ImageError, ImageRef

FLAGS = ["--image-size", "32x24", "--split", "train=0.7,validation=0.3", "--shards", "5"]


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A store with two buckets, and nobody signed in."""
    from apache_beam.internal.gcp import auth

    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nobody"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(auth._Credentials, "_credentials_init", False)
    monkeypatch.setattr(auth._Credentials, "_credentials", None)
    files._sign_in.cache_clear()
    with serve("pictures", "records") as service:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", service.address)
        yield service
    files._sign_in.cache_clear()


def upload(store, folder, prefix) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def manifest_of(store, folder):
    return parse_manifest(store.get(f"{folder}/dataset.json"), path=folder)


def said(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1] if lines else ""


def test_from_and_to_a_bucket_are_the_local_bytes(store, pictures, tmp_path, capsys):
    upload(store, pictures, "gs://pictures/in")
    local = tmp_path / "records"
    assert ingest(f"{pictures}/*/*", local, *FLAGS) == 0
    assert ingest("gs://pictures/in/*/*", "gs://records/out", *FLAGS) == 0
    assert manifest_of(store, "gs://records/out").fingerprint == (
        load_manifest(str(local)).fingerprint
    )
    for path in local.glob("*.tfrecord"):
        assert store.get(f"gs://records/out/{path.name}") == path.read_bytes()
    kept = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
    assert {name.removeprefix("out/") for name in store.names("gs://records/out")} == kept
    for flags in (["--quick"], [], ["--deep"]):
        assert main(["verify", "gs://records/out", *flags]) == 0
    capsys.readouterr()
    assert main(["inspect", "gs://records/out", "--record", "3"]) == 0
    assert "gs://pictures/in/" in capsys.readouterr().out


def test_a_bucket_is_listed_once(store, pictures, tmp_path):
    upload(store, pictures, "gs://pictures/in")
    before = len(store.requests)
    assert ingest("gs://pictures/in/*/*", tmp_path / "out", "--image-size", "16") == 0
    asked = [path.partition("?")[0] for _, path in store.requests[before:]]
    assert asked.count("/storage/v1/b/pictures/o") == 1
    objects = [path for path in asked if path.startswith("/storage/v1/b/pictures/o/")]
    assert len(objects) == len(set(objects)) == 60


def test_the_flowers_from_and_to_a_bucket(shared, store, tmp_path):
    flowers = shared / "data" / "flowers"
    for path in sorted(flowers.glob("*/*.jpg"))[::5]:
        store.put(f"gs://pictures/{path.parent.name}/{path.name}", path.read_bytes())
        target = tmp_path / "in" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    assert ingest(f"{tmp_path}/in/*/*.jpg", tmp_path / "out", *FLAGS) == 0
    assert ingest("gs://pictures/*/*.jpg", "gs://records/out", *FLAGS) == 0
    there = manifest_of(store, "gs://records/out")
    assert there.records == 200
    assert there.fingerprint == load_manifest(str(tmp_path / "out")).fingerprint


def test_every_third_request_fails_in_passing(store, tmp_path):
    for number in range(9):
        draw(tmp_path / "in" / "ab"[number % 2] / f"{number}.jpg", seed=number)
    upload(store, tmp_path / "in", "gs://pictures/in")
    flags = ["--image-size", "32x24", "--shards", "2"]
    assert ingest(f"{tmp_path}/in/*/*", tmp_path / "out", *flags) == 0
    store.fault = lambda number, method, path: (None, None, (503, 429)[number % 2])[number % 3]
    assert ingest("gs://pictures/in/*/*", "gs://records/out", *flags) == 0
    assert store.faults > 10
    store.fault = lambda *request: None
    there = manifest_of(store, "gs://records/out")
    assert there.fingerprint == load_manifest(str(tmp_path / "out")).fingerprint
    assert main(["verify", "gs://records/out"]) == 0


@pytest.mark.parametrize("fault", ["reset", "cut"])
def test_a_broken_connection_is_tried_again(store, tmp_path, fault):
    draw(tmp_path / "a.jpg", seed=1)
    data = (tmp_path / "a.jpg").read_bytes()
    store.put("gs://pictures/a.jpg", data)
    broken = []

    def fail_once(number, method, path):
        if "alt=media" in path and not broken:
            broken.append(path)
            return fault
        return None

    store.fault = fail_once
    assert files.read_file("gs://pictures/a.jpg") == data
    assert broken


def test_fewer_bytes_than_listed_are_never_a_picture_or_a_reject(store, tmp_path, capsys):
    draw(tmp_path / "a.jpg", seed=1, size=(200, 150))
    data = (tmp_path / "a.jpg").read_bytes()
    store.put("gs://pictures/cat/a.jpg", data)
    store.put("gs://pictures/cat/b.jpg", data + b"\n")
    store.fault = lambda number, method, path: (
        "short" if "alt=media" in path and "/pictures/" in path else None
    )
    assert ingest("gs://pictures/*/*.jpg", "gs://records/out", "--image-size", "16") == 1
    message = said(capsys)
    assert "bytes came" in message
    assert message.endswith(
        "it was changed, or cut off on the way; run again with --resume, with --overwrite if it "
        "was changed"
    )
    store.fault = lambda *request: None
    assert "out/dataset.json" not in store.names("gs://records/")


def test_forbidden_is_one_line(store, capsys):
    store.put("gs://pictures/cat/a.jpg", b"x")
    store.fault = lambda *request: 403
    assert ingest("gs://pictures/*/*.jpg", "gs://records/out") == 1
    assert said(capsys) == (
        "tpufeed ingest: error: --output gs://records/out: permission denied (403): sign in with "
        "gcloud auth application-default login"
    )
    store.fault = lambda number, method, path: 403 if "/b/pictures" in path else None
    assert ingest("gs://pictures/*/*.jpg", "gs://records/out") == 1
    assert said(capsys) == (
        "tpufeed ingest: error: --input gs://pictures/*/*.jpg: cannot be listed: permission denied "
        "(403): sign in with gcloud auth application-default login"
    )
    assert main(["verify", "gs://pictures/gone"]) == 1


def test_one_forbidden_object_is_a_reject(store, tmp_path):
    for number in range(3):
        draw(tmp_path / "in" / "cat" / f"{number}.png", seed=number)
    upload(store, tmp_path / "in", "gs://pictures/in")
    store.fault = lambda number, method, path: (
        403 if "1.png" in path and "alt=media" in path else None
    )
    flags = ["--image-size", "16", "--max-reject-rate", "0.5"]
    assert ingest("gs://pictures/in/*/*", "gs://records/out", *flags) == 0
    store.fault = lambda *request: None
    assert manifest_of(store, "gs://records/out").rejects == {"unreadable": 1}


def test_a_bucket_that_is_not_there_is_one_line(store, capsys):
    assert ingest("gs://pictures/*/*.jpg", "gs://gone/out") == 1
    first = said(capsys)
    assert first.startswith("tpufeed ingest: error: ")
    assert "gs://gone/out" in first or "gs://pictures" in first
    assert ingest("gs://gone/*/*.jpg", "gs://records/out") == 1
    assert "--input gs://gone/*/*.jpg: " in said(capsys)


def test_names_are_opaque(store, tmp_path):
    draw(tmp_path / "a.png", seed=1)
    # Not # ? and %, which the emulator leaves unquoted in the links that it gives.
    names = ["a b.png", "[1].png", "grün.png", "{x}.png", "st*r.png", "+&=.png"]
    data = (tmp_path / "a.png").read_bytes()
    for name in names:
        store.put(f"gs://pictures/in/cat/{name}", data)
    assert ingest("gs://pictures/in/cat/*", "gs://records/out", "--image-size", "16") == 0
    assert manifest_of(store, "gs://records/out").records == len(names)
    for name in names:
        assert read_source(ImageRef("k", f"gs://pictures/in/cat/{name}", "cat"))[0] == data


def test_tables_class_names_and_exclusions_from_a_bucket(store, tmp_path):
    for number in range(4):
        draw(tmp_path / "in" / "cat" / f"{number}.png", seed=number)
    upload(store, tmp_path / "in", "gs://pictures/in")
    rows = "".join(f"in/cat/{number}.png,cat\n" for number in range(4))
    store.put("gs://pictures/rows.csv", f"path,label\n{rows}".encode())
    store.put("gs://pictures/names.txt", b"dog\ncat\n")
    store.put("gs://pictures/out.txt", b"in/cat/2.png\n")
    flags = ["--class-names", "gs://pictures/names.txt", "--exclude", "gs://pictures/out.txt"]
    assert ingest("gs://pictures/rows.csv", "gs://records/out", *flags, "--image-size", "16") == 0
    there = manifest_of(store, "gs://records/out")
    assert (there.labels, there.records, there.rejects) == (("dog", "cat"), 3, {"excluded": 1})


def test_overwrite_removes_our_own_objects_only(store, tmp_path, capsys):
    draw(tmp_path / "in" / "cat" / "a.png", seed=1)
    upload(store, tmp_path / "in", "gs://pictures/in")
    flags = ["gs://pictures/in/*/*", "gs://records/out", "--image-size", "16"]
    assert ingest(*flags) == 0
    store.put("gs://records/out/mine.txt", b"mine")
    assert ingest(*flags) == 1
    assert "--output gs://records/out: not empty" in said(capsys)
    assert ingest(*flags, "--overwrite") == 0
    assert "out/mine.txt" in store.names("gs://records/out")
    assert main(["verify", "gs://records/out"]) == 0


def test_an_output_with_wildcards_is_refused(store, capsys):
    assert ingest("gs://pictures/*/*", "gs://records/out[1]") == 1
    assert said(capsys) == (
        "tpufeed ingest: error: --output gs://records/out[1]: a store takes * ? and [ for "
        "wildcards; give a name without"
    )


def test_without_credentials_a_line_says_so_and_beam_does_not_look_again(
    store, caplog, monkeypatch
):
    from apache_beam.internal.gcp import auth

    def look(*_):
        raise AssertionError("Beam looks, four times over, for 20 seconds")

    monkeypatch.setattr(auth._Credentials, "_get_service_credentials", look)
    store.put("gs://pictures/a", b"abc")
    assert files.read_file("gs://pictures/a") == b"abc"
    assert files.read_file("gs://pictures/a", size=3) == b"abc"
    lines = [record.message for record in caplog.records if record.name == "transforms.files"]
    assert lines == [
        "no Google Cloud credentials: gs:// is asked without, which does for public buckets; for "
        "others: gcloud auth application-default login"
    ]


def test_threads_sign_in_once(store, caplog):
    for number in range(8):
        store.put(f"gs://pictures/{number}", b"abc")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(files.read_file, [f"gs://pictures/{n}" for n in range(8)]))
    assert found == [b"abc"] * 8
    assert [record.name for record in caplog.records].count("transforms.files") == 1


@pytest.mark.parametrize(
    "words, said_of",
    [
        (["ingest", "--input", "gcs://b/*", "--output", "{new}"], "--input gcs://b/*: no store "),
        (["plan", "--input", "gcs://b/a.csv", "--output", "{new}"], "--input gcs://b/a.csv: no "),
        (["ingest", "--input", "{pictures}/*/*", "--output", "gcs://b/new"], "gcs://b/new: no "),
        (["ingest", "--input", "{pictures}/*/*", "--output", "{new}", "--exclude", "gcs://b/x"],
         "gcs://b/x: no store "),
        (["ingest", "--input", "{pictures}/*/*", "--output", "{new}", "--class-names", "gcs://b/x"],
         "--class-names gcs://b/x: gcs"),
        (["inspect", "gcs://b/records"], "gcs://b/records/dataset.json: no store "),
        (["diff", "{dataset}", "gcs://b/records"], "gcs://b/records/dataset.json: no store "),
    ],
)  # fmt: skip
def test_a_store_of_another_name_is_one_line(words, said_of, pictures, dataset, tmp_path, capsys):
    new = tmp_path / "new"
    words = [word.format(pictures=pictures, dataset=dataset, new=new) for word in words]
    assert main(words) == (2 if words[0] == "diff" else 1)
    line = said(capsys)
    assert line.startswith(f"tpufeed {words[0]}: error: {said_of}")
    assert line.endswith(": no store is called gcs://; give a local path or gs://")
    assert not new.exists()


def test_credentials_that_are_named_and_missing_are_an_error(store, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/key.json")
    with pytest.raises(DataError) as caught:
        files.read_file("gs://pictures/a")
    assert str(caught.value).startswith(
        "GOOGLE_APPLICATION_CREDENTIALS=/no/key.json: cannot be used: File /no/key.json was not"
    )


def test_what_is_missing_is_missing(store):
    assert not files.exists("gs://pictures/a")
    with pytest.raises(FileNotFoundError):
        files.read_file("gs://pictures/a")
    with pytest.raises(FileNotFoundError):
        files.size_of("gs://pictures/a")
    with pytest.raises(ImageError) as caught:
        read_source(ImageRef("a", "gs://pictures/a", "cat"))
    assert caught.value.reason == "missing"


def test_worker_processes_read_and_write_a_bucket(store, pictures, tmp_path):
    upload(store, pictures, "gs://pictures/in")
    assert ingest(f"{pictures}/*/*", tmp_path / "local", *FLAGS) == 0
    words = [sys.executable, "-m", "pipeline", "ingest", "--input", "gs://pictures/in/*/*"]
    words += ["--output", "gs://records/out", *FLAGS]
    words += ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ}, timeout=200)
    assert done.returncode == 0, done.stderr
    there = manifest_of(store, "gs://records/out")
    assert there.fingerprint == load_manifest(str(tmp_path / "local")).fingerprint
