"""Decoder processes: the same outcomes in the same order, whatever becomes of a process."""

import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import INTERRUPTIBLE, draw, ingest
from PIL import Image

from transforms import decoders
from transforms.decoders import Task, end_decoders, prepare_images, start_decoders
from transforms.image import PixelPolicy
from transforms.prepare import RecordPolicy, prepare_record, read_source
from transforms.records import Copy, DataError, Exclusions, ImageRef, Reject

ROOT = Path(__file__).resolve().parents[1]
TASK = Task(RecordPolicy(PixelPolicy(width=16, height=12)), {"ash": 0, "birch": 1}, Exclusions())

# Python runs it as it starts: what a broken decoder would do, in the decoder's place.
SABOTAGE = """
import ctypes, os, time
import simplejpeg

decode_jpeg = simplejpeg.decode_jpeg

def decode(data, *args, **kwargs):
    if b"CRASH" in data:
        ctypes.string_at(0)
    if b"EXIT" in data:
        os._exit(7)
    if b"HANG" in data:
        time.sleep(600)
    return decode_jpeg(data, *args, **kwargs)

simplejpeg.decode_jpeg = decode
"""


@pytest.fixture(autouse=True)
def none_left():
    end_decoders()
    yield
    end_decoders()
    assert children() == []


def children():
    """Those that are alive: a killed one is a zombie until somebody asks how it ended."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "serve(" in str(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def sabotage(tmp_path, monkeypatch):
    folder = tmp_path / "sabotage"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")


def make_refs(folder, number=60, **marks):
    """Pictures of which some carry a comment by which they are told."""
    refs = []
    for i in range(number):
        label = ("ash", "birch")[i % 2]
        path = folder / label / f"{i:03d}.jpg"
        mark = next((mark for mark, places in marks.items() if i in places), None)
        draw(path, seed=i, size=(30 + i % 7, 20), **({"comment": mark} if mark else {}))
        refs.append(ImageRef(f"{label}/{i:03d}.jpg", str(path), label))
    return refs


def prepare_here(refs):
    return [prepare_record(ref, **vars(TASK)) for ref in refs]


def prepare(refs, **options):
    return list(prepare_images(refs, task=TASK, **options))


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_outcomes_are_those_of_this_process_in_order(tmp_path, processes):
    refs = make_refs(tmp_path)
    Path(refs[7].path).write_bytes(b"")
    Path(refs[8].path).unlink()
    found = prepare(refs, processes=processes)
    assert found == prepare_here(refs)
    assert [o.reason for o in found if isinstance(o, Reject)] == ["zero_byte", "missing"]


def test_what_is_read_elsewhere_goes_along_however_large(tmp_path):
    refs = make_refs(tmp_path, 12)
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    assert buffer.tell() > 2_000_000  # more than a pipe holds
    task = Task(
        RecordPolicy(PixelPolicy(mode="none", encoding="raw")), *list(vars(TASK).values())[1:]
    )
    items = [(ref, (buffer.getvalue(), None)) for ref in refs]
    failed = Reject("k", "gs://b/k", "ash", "missing", "no such object")
    items.insert(5, (refs[0], failed))
    items.insert(9, (refs[1], None))  # which its process reads
    named, sources = zip(*items, strict=True)
    found = list(prepare_images(named, task=task, processes=2, sources=iter(sources)))
    assert found.pop(5) == failed
    assert [o.example for o in found] == [
        prepare_record(ref, source, **vars(task)).example
        for ref, source in items
        if source != failed
    ]
    assert [read_source(ref) for ref in refs[:1]] == [(Path(refs[0].path).read_bytes(), None)]


# Of each image its own: what is the same object goes into a message once.
LONG = {
    "a CSV's cells": lambda i: {"features": (("notes", b"%d" % i * 8000),)},
    "one cell": lambda i: {"features": (("notes", b"%d" % i * 400_000),)},
    "copies": lambda i: {"copies": tuple(Copy(f"{i}/{j}", f"/{i}", "ash") for j in range(2000))},
    "long names": lambda i: {"group": f"{i}\N{EURO SIGN}" * 4000},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", LONG)
def test_long_requests_and_long_answers_do_not_wait_for_each_other(what, tmp_path):
    # Both sides would write into full pipes: answers of some 16 x 28 kB meet the next request.
    pixels = PixelPolicy(width=96, height=96, encoding="raw")
    task = dataclasses.replace(TASK, policy=RecordPolicy(pixels))
    refs = make_refs(tmp_path, 200)
    refs = [dataclasses.replace(ref, size=1000, **LONG[what](i)) for i, ref in enumerate(refs)]
    found = list(prepare_images(refs, task=task, processes=2))
    assert found == [prepare_record(ref, **vars(task)) for ref in refs]


def sizes_of_requests(number, size, *, pixels=None, processes=2):
    task = TASK if pixels is None else dataclasses.replace(TASK, policy=RecordPolicy(pixels))
    refs = [ImageRef(f"ash/{i}", f"/in/ash/{i}", "ash", size=size) for i in range(number)]
    requests = list(decoders._make_requests(refs, None, task=task, processes=processes))
    assert [slot.ref for slots in requests for slot in slots] == refs
    return list(map(len, requests))


def test_requests_are_of_several_small_pictures_and_of_fewer_at_the_end():
    sizes = sizes_of_requests(1000, 2000)
    assert sizes[:50] == [16] * 50
    assert sizes == sorted(sizes, reverse=True) and sizes[-8:] == [1] * 8
    assert sizes_of_requests(1000, 60_000)[:50] == [8] * 50  # half a megabyte
    assert sizes_of_requests(1000, -1)[:50] == [5] * 50  # not known
    assert sizes_of_requests(9, 2000) == [1] * 9
    assert sizes_of_requests(0, 2000) == []


@pytest.mark.parametrize(
    "pixels",
    [
        PixelPolicy(mode="none"),  # a picture of any size may come of it
        PixelPolicy(mode="shortest", encoding="raw"),
        PixelPolicy(width=2000, height=2000, encoding="raw"),
    ],
)
def test_what_may_be_large_is_asked_for_alone(pixels):
    assert set(sizes_of_requests(200, 2000, pixels=pixels)) == {1}
    assert set(sizes_of_requests(200, 2_000_000)) == {1}


def test_processes_are_kept_for_the_next_shard_and_ended_at_the_end(tmp_path):
    start_decoders(2)
    before = {child.pid for child in children()}
    assert len(before) == 2
    refs = make_refs(tmp_path, 8)
    other = Task(TASK.policy, {"ash": 5, "birch": 6}, Exclusions())
    for task in (TASK, other, TASK):
        found = list(prepare_images(refs, task=task, processes=2))
        assert [o.class_id for o in found] == [task.labels[ref.label] for ref in refs]
    assert {child.pid for child in children()} == before


def test_a_run_given_up_in_the_middle_leaves_no_answers_to_the_next(tmp_path):
    refs = make_refs(tmp_path, 20)
    outcomes = prepare_images(refs, task=TASK, processes=2)
    assert next(outcomes) == prepare_here(refs[:1])[0]
    outcomes.close()
    assert prepare(refs[10:], processes=2) == prepare_here(refs[10:])


def test_processes_killed_at_any_moment_change_nothing(tmp_path):
    files = make_refs(tmp_path, 120)
    refs = [dataclasses.replace(ref, key=f"{n}/{ref.key}") for n in range(10) for ref in files]
    wanted = prepare_here(refs)
    chance = random.Random(0)
    found = []
    for outcome in prepare_images(refs, task=TASK, processes=2):
        found.append(outcome)
        # 128 at most are under way: none is hit thrice.
        if len(found) % 129 == 0:
            time.sleep(chance.random() / 4)
            chance.choice(children()).kill()
    assert found == wanted


def test_an_idle_process_that_died_is_replaced(tmp_path):
    refs = make_refs(tmp_path, 6)
    assert prepare(refs, processes=2) == prepare_here(refs)
    for child in children():
        child.kill()
        child.wait()
    assert prepare(refs, processes=2) == prepare_here(refs)


def test_a_crash_costs_the_image(tmp_path, sabotage):
    refs = make_refs(tmp_path, 30, CRASH={0, 11}, EXIT={12, 29})
    found = prepare(refs, processes=2)
    wanted = prepare_here(refs)
    for i, how in {0: "SIGSEGV", 11: "SIGSEGV", 12: "exit status 7", 29: "exit status 7"}.items():
        ref = refs[i]
        detail = f"the decoder's process died twice, by {how}"
        wanted[i] = Reject(ref.key, ref.path, ref.label, "decoder_crash", detail)
    assert found == wanted


def test_an_image_that_takes_too_long_is_given_up(tmp_path, sabotage):
    refs = make_refs(tmp_path, 12, HANG={0, 5})
    found = prepare(refs, processes=2, longest=2.0)
    wanted = prepare_here(refs)
    for i in (0, 5):
        ref = refs[i]
        wanted[i] = Reject(ref.key, ref.path, ref.label, "timeout", "not done after 2 s")
    assert found == wanted


def test_a_process_that_does_not_start_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(decoders, "_BOOT", "raise SystemExit(3)")
    with pytest.raises(RuntimeError) as caught:
        prepare(make_refs(tmp_path, 3), processes=2)
    assert str(caught.value) == "a decoder process did not start: exit status 3"


def test_what_is_no_images_fault_comes_back_as_it_was_raised(tmp_path):
    path = f"{tmp_path}/train-images-idx3-ubyte"
    refs = [ImageRef("train/0", path, "ash", item=0)]
    with pytest.raises(DataError) as caught:
        prepare(refs, processes=1)
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"


def test_they_end_when_this_process_is_killed():
    code = "import time; from transforms.decoders import start_decoders; start_decoders(2)"
    code += "; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    started = psutil.Process(process.pid).children()
    assert len(started) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


MODES = {
    "in process": [],
    "worker processes": ["--direct_num_workers=2", "--direct_running_mode=multi_processing"],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_costs_one_image_of_a_run(mode, tmp_path, sabotage, capfd):
    refs = make_refs(tmp_path / "in", 60, CRASH={21})
    process = subprocess.run(
        [sys.executable, "-m", "pipeline", "ingest", "--input", f"{tmp_path}/in/*/*"]
        + ["--output", f"{tmp_path}/out", "--image-size", "16", "--max-reject-rate", "0.02"]
        + ["--shards", "4", "--quiet", *MODES[mode]],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stderr) == (0, "")
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").open()]
    assert [(reject["key"], reject["reason"]) for reject in rejects] == [
        (refs[21].key, "decoder_crash")
    ]
    Path(refs[21].path).unlink()
    assert (
        ingest(f"{tmp_path}/in/*/*", tmp_path / "without", "--image-size", "16", "--shards", "4")
        == 0
    )
    names = [f"train-{i:05d}-of-00004.tfrecord" for i in range(4)]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


def test_ctrl_c_leaves_no_process_behind(tmp_path):
    refs = make_refs(tmp_path / "in", 2)
    for i in range(4000):
        os.link(refs[0].path, tmp_path / "in/ash" / f"x{i}.jpg")
    process = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "pipeline", "ingest"]
        + ["--input", f"{tmp_path}/in/*/*"]
        + ["--output", f"{tmp_path}/out", "--shards", "4"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/_tmp/*.tfrecord.*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    line = "tpufeed ingest: interrupted: --resume goes on with what is there"
    assert (process.returncode, err.splitlines()[-1]) == (1, line)
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert not (tmp_path / "out/dataset.json").exists()
