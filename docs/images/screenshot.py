"""Makes report.png of the sample's report: the top of the page, in 256 colours.

    ./run_local.sh && .venv/bin/tpufeed report sample/tfrecords
    .venv/bin/python docs/images/screenshot.py

Needs Chromium, and the extras train and report.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTH = 1200
SECOND_CLASS = "document.querySelectorAll('details')[1].getBoundingClientRect().top"


def main() -> None:
    """Opens the report as a reader would, and keeps what fits on a page."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import open_browser

    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.png"
        with open_browser(Path(folder)) as page:
            page.open(ROOT / "sample" / "tfrecords" / "report.html", width=WIDTH)
            page.value("document.documentElement.style.scrollbarWidth = 'none'")
            height = int(page.value(SECOND_CLASS))
            page.screenshot(whole)
        with Image.open(whole) as picture:
            top = picture.convert("RGB").crop((0, 0, picture.width, height))
    top.quantize(256, dither=Image.Dither.NONE).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
