"""The pictures that the benchmarks run on, made in a folder that is thrown away."""

import concurrent.futures
import glob
import io
import os
import shutil
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

PHOTO_SIZES = ((2560, 1600), (3200, 2000), (3840, 2160), (1920, 1200))


def find_jpegs(folder):
    paths = sorted(glob.glob(f"{folder}/**/*.jpg", recursive=True))
    if not paths:
        raise SystemExit(f"benchmarks: error: {folder}: holds no *.jpg; name a folder of them")
    return paths


def draw_flowers(folder, *, count):
    """Drawn flowers, for who has no photographs at hand."""
    from pipeline.samples import draw_samples

    drawn = draw_samples(f"{folder}.drawn", count=count)
    for path in drawn.pictures:
        target = Path(folder) / path.parent.name / f"{path.stem}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            picture.convert("RGB").save(target, "JPEG", quality=92, subsampling=0)
    shutil.rmtree(f"{folder}.drawn")


def draw_photos(folder, *, count):
    """Large smooth pictures with some noise, as a camera's are."""
    Path(folder).mkdir(parents=True)
    for number in range(count):
        rng = np.random.default_rng(number)
        width, height = PHOTO_SIZES[number % len(PHOTO_SIZES)]
        levels = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        large = np.asarray(levels.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(large + rng.integers(-6, 7, large.shape, np.int16), 0, 255)
        picture = Image.fromarray(noisy.astype(np.uint8))
        picture.save(f"{folder}/{number:02d}.jpg", "JPEG", quality=85)


def multiply(source, target, *, count):
    """Fills `target` with `count` pictures: those of `source`, then copies of each.

    A copy has a square of its own in the corner and is encoded again with its original's tables:
    no two files have the same bytes, and all cost the same to decode.
    """
    paths = find_jpegs(source)
    jobs = []
    for number in range(count):
        copy, place = divmod(number, len(paths))
        path = paths[place]
        label = Path(path).parent.name
        jobs.append((path, Path(target) / label / f"{copy:03d}-{Path(path).name}", copy))
    for folder in {job[1].parent for job in jobs}:
        folder.mkdir(parents=True)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for _ in pool.map(_copy, jobs, chunksize=32):
            pass


def _copy(job):
    path, target, number = job
    if not number:
        shutil.copyfile(path, target)
        return
    with Image.open(path) as picture:
        picture.load()
        level = (37 * number) % 256
        colour = level if picture.mode == "L" else (level,) * len(picture.mode)
        picture.paste(colour, (0, 0, 16, 16))
        progressive = bool(picture.info.get("progressive"))
        data = io.BytesIO()
        picture.save(data, "JPEG", quality="keep", progressive=progressive)
    target.write_bytes(data.getvalue())


def link_some(source, target, *, count):
    """Hard links to `count` pictures of a folder, evenly over it."""
    paths = find_jpegs(source)
    count = min(count, len(paths))
    for number in range(count):
        path = Path(paths[number * len(paths) // count])
        name = Path(target) / path.parent.name / path.name
        name.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, name)


def write_tiny(folder, *, count):
    """JPEGs of 16x16 in ten classes, no two alike."""
    rng = np.random.default_rng(0)
    for number in range(10):
        (Path(folder) / f"class{number}").mkdir(parents=True)
    for start in range(0, count, 1000):
        pixels = rng.integers(0, 256, (1000, 16, 16, 3), np.uint8)
        for number in range(start, min(start + 1000, count)):
            path = f"{folder}/class{number % 10}/{number:07d}.jpg"
            with open(path, "wb") as file:
                file.write(simplejpeg.encode_jpeg(pixels[number - start], quality=75))
