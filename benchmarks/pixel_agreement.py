"""How far the scaled (DCT) decode of large JPEGs lies from the full one, after the resize.

    python benchmarks/pixel_agreement.py DIR

Every JPEG below DIR is prepared at each size in the mode "cover", once as `tpufeed ingest` does it
and once from its full decode. Differences are in levels of 0 to 255: the mean over a picture's
samples, averaged over the pictures and for the worst of them, its 99th percentile, averaged over
them, and the largest of any one sample.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from transforms.image import (
    DecodedImage,
    PixelPolicy,
    decode_image,
    fit_image,
    resize_image,
    sniff_format,
)
from transforms.records import ImageError

SIZES = (192, 224, 331, 512)


def list_jpegs(folder: Path) -> list[bytes]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            try:
                if sniff_format(data) == "JPEG":
                    found.append(data)
            except ImageError:
                continue
    return found


def resize(source: DecodedImage, policy: PixelPolicy) -> np.ndarray:
    geometry = fit_image(source.width, source.height, policy=policy)
    return np.asarray(resize_image(source.image, geometry, policy=policy), np.int16)


def compare(data: bytes) -> list[tuple[bool, float, float, int]]:
    """For each size: whether the decode was scaled, the difference's mean, 99th percentile, max."""
    whole = decode_image(data, policy=PixelPolicy(mode="none"))
    found = []
    for size in SIZES:
        policy = PixelPolicy(width=size, height=size)
        source = decode_image(data, policy=policy)
        difference = np.abs(resize(source, policy) - resize(whole, policy))
        scaled = source.image.size != whole.image.size
        p99 = float(np.percentile(difference, 99))
        found.append((scaled, float(difference.mean()), p99, int(difference.max())))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    args = parser.parse_args(argv)
    folder = args.folder
    rows = []
    for data in list_jpegs(folder):
        try:
            rows.append(compare(data))
        except ImageError:
            continue
    if not rows:
        print(
            f"pixel_agreement.py: error: {folder}: holds no JPEG; name a folder of them",
            file=sys.stderr,
        )
        return 1
    facts = {}
    for size, column in zip(SIZES, zip(*rows, strict=True), strict=True):
        scaled, means, p99, largest = zip(*column, strict=True)
        facts[size] = {
            "JPEGs": len(rows),
            "scaled": sum(scaled),
            "mean": float(np.mean(means)),
            "worst mean": max(means),
            "p99": float(np.mean(p99)),
            "max": max(largest),
        }
    if args.json:
        print(json.dumps(facts))
        return 0
    print("size  JPEGs scaled   mean worst mean   p99  max")
    for size, fact in facts.items():
        print(
            f"{size:>4} {fact['JPEGs']:>6} {fact['scaled']:>6} {fact['mean']:>6.2f}"
            f" {fact['worst mean']:>10.2f} {fact['p99']:>5.1f} {fact['max']:>4}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
