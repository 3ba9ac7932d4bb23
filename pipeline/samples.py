"""Draws a small set of flower pictures to try tpufeed on, without a download.

    python -m pipeline.samples sample/images

Five folders (daisy, dandelion, roses, sunflowers, tulips) of drawn flowers in JPEG, PNG and WebP,
some stored turned with an EXIF orientation tag, and one damaged file in each folder: what a real
folder of photographs holds, small. The same seed gives the same bytes.
"""

import argparse
import functools
import io
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

Colour = tuple[int, int, int]
Point = tuple[float, float]

CLASSES = ("daisy", "dandelion", "roses", "sunflowers", "tulips")
ORIENTATION_TAG = 0x0112
TURNED_SHARE = 0.15  # of the JPEGs; a camera held upright writes such files all the time
OVERSAMPLE = 2  # drawn at twice the size and averaged down, since Pillow draws without antialias

# How the upright picture is stored for each orientation: the inverse of what a viewer applies.
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}

GREENS: tuple[Colour, ...] = ((58, 120, 46), (76, 140, 58), (44, 104, 52), (96, 146, 62))
TULIP_COLOURS: tuple[Colour, ...] = (
    (150, 58, 168),
    (222, 86, 150),
    (214, 44, 48),
    (240, 128, 44),
    (120, 70, 190),
)
ROSE_COLOURS: tuple[Colour, ...] = ((190, 22, 44), (214, 40, 66), (232, 104, 136), (158, 14, 40))

# Backdrops, each from its top colour to its bottom colour.
SKIES: tuple[tuple[Colour, Colour], ...] = (
    ((98, 164, 226), (206, 230, 246)),
    ((140, 178, 214), (232, 226, 214)),
    ((86, 132, 196), (248, 206, 170)),
)
MEADOWS: tuple[tuple[Colour, Colour], ...] = (
    ((112, 158, 84), (44, 90, 42)),
    ((64, 104, 62), (24, 52, 34)),
    ((156, 182, 112), (78, 122, 58)),
)


@dataclass(frozen=True)
class SampleSet:
    """What `draw_samples` wrote.

    Attributes:
        pictures: the files that decode, in order of class and index.
        damaged: the files that do not, one for each class.
    """

    pictures: tuple[Path, ...]
    damaged: tuple[Path, ...]


@dataclass(frozen=True)
class Pose:
    """Where one flower head stands on the canvas.

    Attributes:
        x: the centre from the left, in pixels.
        y: the centre from the top, in pixels.
        radius: the reach of the longest petal, in pixels.
        turn: the rotation in radians, clockwise.
        squash: height over width of the head as seen from the side; 1 is a view from the front.
    """

    x: float
    y: float
    radius: float
    turn: float
    squash: float

    def place(self, points: Sequence[Point]) -> list[Point]:
        """Maps points of the unit circle to pixels."""
        cos, sin = math.cos(self.turn) * self.radius, math.sin(self.turn) * self.radius
        return [
            (self.x + u * cos - v * self.squash * sin, self.y + u * sin + v * self.squash * cos)
            for u, v in points
        ]

    def lifted(self, share: float) -> "Pose":
        """Returns the pose moved up by a share of the radius."""
        return replace(self, y=self.y - share * self.radius)


def draw_samples(directory: str | Path, *, count: int = 600, seed: int = 0) -> SampleSet:
    """Draws `count` pictures over the five classes, and five damaged files, into `directory`.

    The pictures are drawn beside `directory` and moved there when all are done, so that a folder
    under that name is always whole.
    """
    if count < len(CLASSES):
        raise ValueError(f"count={count}: must be {len(CLASSES)} or more, one for each class")
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"directory={target}: must be new or an empty folder; name another one")
    partial = target.absolute().with_name(f".{target.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in CLASSES:
        (partial / name).mkdir(parents=True)
    pictures = sorted(
        write_picture(partial, kind=CLASSES[number % 5], index=number // 5, seed=seed)
        for number in range(count)
    )
    damaged = write_damaged(partial, seed=seed)
    if target.exists():
        target.rmdir()
    partial.rename(target)
    return SampleSet(
        pictures=tuple(target / path.relative_to(partial) for path in pictures),
        damaged=tuple(target / path.relative_to(partial) for path in damaged),
    )


def write_picture(directory: Path, *, kind: str, index: int, seed: int) -> Path:
    """Draws and stores one picture; its bytes depend on (seed, kind, index) alone."""
    rng = random.Random(f"{seed}/{kind}/{index}")
    suffix = rng.choices((".jpg", ".png", ".webp"), weights=(84, 8, 8))[0]
    path = directory / kind / f"{kind}_{index:04d}{suffix}"
    path.write_bytes(encode(draw_picture(rng, kind=kind), suffix=suffix, rng=rng))
    return path


def encode(picture: Image.Image, *, suffix: str, rng: random.Random) -> bytes:
    """Encodes an upright picture, now and then stored turned, as a camera does."""
    buffer = io.BytesIO()
    if suffix == ".png":
        picture.save(buffer, "PNG", compress_level=4)
    elif suffix == ".webp":
        picture.save(buffer, "WEBP", quality=rng.randint(75, 90), method=2)
    else:
        exif = Image.Exif()
        if rng.random() < TURNED_SHARE:
            exif[ORIENTATION_TAG] = rng.randint(2, 8)
            picture = picture.transpose(STORED_AS[exif[ORIENTATION_TAG]])
        picture.save(buffer, "JPEG", quality=rng.randint(78, 92), exif=exif)
    return buffer.getvalue()


def write_damaged(directory: Path, *, seed: int) -> list[Path]:
    """Writes one file into each class that no decoder takes, each for another reason."""
    rng = random.Random(f"{seed}/damaged")
    jpeg = encode(draw_picture(rng, kind="dandelion"), suffix=".jpg", rng=rng)
    png = bytearray(encode(draw_picture(rng, kind="tulips"), suffix=".png", rng=rng))
    start = png.index(b"IDAT") + 200
    png[start : start + 64] = bytes(byte ^ 0xFF for byte in png[start : start + 64])
    files = {
        "daisy/empty.jpg": b"",
        "dandelion/cut_in_half.jpg": jpeg[: len(jpeg) // 2],
        "roses/web_page.jpg": b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n",
        "sunflowers/notes.png": b"shot at noon, sun from the left\n",
        "tulips/damaged.png": bytes(png),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in files]


def draw_picture(rng: random.Random, *, kind: str) -> Image.Image:
    """Draws one upright picture: a backdrop, one to three flowers, and the light on them."""
    width, height = pick_size(rng)
    size = (width * OVERSAMPLE, height * OVERSAMPLE)
    canvas = draw_backdrop(rng, size=size, blossom=BLOSSOMS[kind])
    brush = ImageDraw.Draw(canvas)
    draw_stem, draw_head = PAINTERS[kind]
    for pose in pick_poses(rng, size=size, upright=kind == "tulips"):
        draw_stem(brush, rng, pose, size[1])
        draw_head(brush, rng, pose)
    return light(rng, canvas.reduce(OVERSAMPLE))


def pick_size(rng: random.Random) -> tuple[int, int]:
    """Picks width and height: landscape or portrait, in the usual proportions of a camera."""
    longer = round(rng.triangular(240, 640, 380))
    shorter = max(160, round(longer / rng.choice((1, 5 / 4, 4 / 3, 4 / 3, 3 / 2, 3 / 2, 16 / 9))))
    return (longer, shorter) if rng.random() < 0.6 else (shorter, longer)


def pick_poses(rng: random.Random, *, size: tuple[int, int], upright: bool) -> Iterator[Pose]:
    """Places one to three flowers, the nearest and largest last, so that it stands in front."""
    width, height = size
    number = rng.choices((1, 2, 3), weights=(64, 22, 14))[0]
    reach = min(size) * rng.uniform(0.3, 0.42) / number**0.4
    slots = [(slot + 0.5) / number for slot in range(number)]
    rng.shuffle(slots)
    lean = 0.22 if upright else 3.2
    for place, slot in enumerate(slots):
        across = slot if width >= height or number == 1 else 0.25 + slot / 2
        down = rng.uniform(0.34, 0.52) if number == 1 else rng.uniform(0.24, 0.6)
        yield Pose(
            x=width * (across + rng.uniform(-0.07, 0.07)),
            y=height * down,
            radius=reach * (0.78 + 0.22 * (place + 1) / number),
            turn=rng.uniform(-lean, lean),
            squash=rng.uniform(0.72, 1.0),
        )


def draw_backdrop(rng: random.Random, *, size: tuple[int, int], blossom: Colour) -> Image.Image:
    """Draws sky over grass, or an out-of-focus meadow, with blurred blossoms of the same kind."""
    # A sixth of the size and blurred: enlarged, it looks like the unsharp depth behind a flower.
    width, height = max(8, size[0] // 6), max(8, size[1] // 6)
    open_sky = rng.random() < 0.45
    small = gradient((width, height), ends=rng.choice(SKIES if open_sky else MEADOWS))
    brush = ImageDraw.Draw(small, "RGBA")
    if open_sky:
        draw_clouds(brush, rng, width=width, height=height)
        draw_grass(brush, rng, width=width, height=height)
    for _ in range(rng.randint(5, 16)):
        x, y = rng.uniform(0, width), height * rng.uniform(0.6 if open_sky else 0.05, 1.0)
        reach = min(width, height) * rng.uniform(0.03, 0.12)
        tone = blossom if rng.random() < 0.55 else rng.choice(GREENS)
        box = (x - reach, y - reach, x + reach, y + reach)
        brush.ellipse(box, fill=(*vary(rng, tone, 26), rng.randint(60, 170)))
    softness = min(width, height) * rng.uniform(0.012, 0.035)
    small = small.filter(ImageFilter.GaussianBlur(softness))
    return small.resize(size, Image.Resampling.BILINEAR)


def draw_clouds(brush: ImageDraw.ImageDraw, rng: random.Random, *, width: int, height: int) -> None:
    """Draws a few white clouds into the upper half."""
    for _ in range(rng.randint(0, 3)):
        x, y = rng.uniform(0, width), height * rng.uniform(0.05, 0.4)
        for _ in range(5):
            dx, dy = rng.uniform(-0.12, 0.12) * width, rng.uniform(-0.03, 0.03) * height
            rx, ry = rng.uniform(0.05, 0.12) * width, rng.uniform(0.03, 0.06) * height
            brush.ellipse(
                (x + dx - rx, y + dy - ry, x + dx + rx, y + dy + ry), fill=(255, 255, 255, 120)
            )


def draw_grass(brush: ImageDraw.ImageDraw, rng: random.Random, *, width: int, height: int) -> None:
    """Draws the lower part of the backdrop as grass, darker towards the viewer."""
    horizon = height * rng.uniform(0.55, 0.8)
    green = vary(rng, rng.choice(GREENS), 14)
    hill = [
        (x, horizon + math.sin(x / width * 4 + green[0]) * height * 0.04) for x in range(width + 1)
    ]
    brush.polygon([*hill, (width, height), (0, height)], fill=green)
    for _ in range(width):
        x, y = rng.uniform(0, width), rng.uniform(horizon, height * 1.1)
        blade = height * rng.uniform(0.05, 0.14)
        fill = (*vary(rng, mix(green, (20, 50, 24), rng.random() * 0.5), 22), 200)
        brush.line((x, y, x + rng.uniform(-2, 2), y - blade), fill=fill, width=1)


def gradient(size: tuple[int, int], *, ends: tuple[Colour, Colour]) -> Image.Image:
    """Returns a picture that runs from the first colour at the top to the second."""
    return ImageOps.colorize(Image.linear_gradient("L").resize(size), black=ends[0], white=ends[1])


def light(rng: random.Random, picture: Image.Image) -> Image.Image:
    """Lights a picture: hour of the day, exposure, and a shade that falls in from one side."""
    shade = Image.linear_gradient("L").rotate(rng.choice((0, 90, 180, 270))).resize(picture.size)
    depth = rng.uniform(0.0, 0.35)
    shade = shade.point([round(255 * depth * (level / 255) ** 2) for level in range(256)])
    picture = Image.composite(Image.new("RGB", picture.size, (16, 20, 40)), picture, shade)
    warm = rng.uniform(-0.07, 0.09)
    exposure = rng.uniform(0.9, 1.18)
    gains = (exposure * (1 + warm), exposure, exposure * (1 - warm))
    picture = picture.point([min(255, round(v * gain)) for gain in gains for v in range(256)])
    return ImageEnhance.Color(picture).enhance(rng.uniform(0.85, 1.15))


def mix(first: Colour, second: Colour, share: float) -> Colour:
    """Returns the colour at `share` of the way from the first to the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return red, green, blue


def vary(rng: random.Random, colour: Colour, amount: int) -> Colour:
    """Returns the colour made lighter or darker and a little off, by at most about `amount`."""
    whole = rng.randint(-amount, amount)
    red, green, blue = (
        max(0, min(255, level + whole + rng.randint(-amount // 3, amount // 3))) for level in colour
    )
    return red, green, blue


@functools.lru_cache(maxsize=1024)  # the petals of a ring differ in direction alone
def petal_outline(
    *, start: float, length: float, width: float, belly: float, tip: float
) -> tuple[Point, ...]:
    """Returns the outline of a petal or leaf that points to the right, in unit coordinates.

    Args:
        start: the distance of the foot from the centre.
        length: from foot to tip.
        width: the half width at the widest place.
        belly: how slowly it widens from the foot; small is at once.
        tip: how slowly it narrows to the tip; small is a round tip, 1 a sharp one.
    """
    peak = belly / (belly + tip)
    top = peak**belly * (1 - peak) ** tip
    # Closer steps at both ends, where the outline bends most.
    steps = [(1 - math.cos(math.pi * step / 12)) / 2 for step in range(13)]
    half = [width * share**belly * max(0.0, 1 - share) ** tip / top for share in steps]
    along = [start + length * share for share in steps]
    edge = [*zip(along, half, strict=True)]
    return (*edge, *((reach, -side) for reach, side in reversed(edge)))


def rotate(points: Sequence[Point], angle: float) -> list[Point]:
    """Turns points of the unit circle by `angle` radians."""
    cos, sin = math.cos(angle), math.sin(angle)
    return [(u * cos - v * sin, u * sin + v * cos) for u, v in points]


def circle(reach: float) -> list[Point]:
    """Returns a circle in unit coordinates."""
    steps = [step * math.tau / 36 for step in range(36)]
    return [(reach * math.cos(angle), reach * math.sin(angle)) for angle in steps]


def spiral(*, reach: float, number: int, step: float) -> list[Point]:
    """Returns points from the centre outwards, each turned by `step` radians, evenly dense."""
    radii = [reach * math.sqrt(n / number) for n in range(number)]
    return [(r * math.cos(n * step), r * math.sin(n * step)) for n, r in enumerate(radii)]


@dataclass(frozen=True)
class Petal:
    """The shape and colours that the petals of one ring share.

    Attributes:
        start: the distance of the foot from the centre of the head, which has radius 1.
        length: from foot to tip.
        width: the half width.
        belly: see `petal_outline`.
        tip: see `petal_outline`.
        edge: the colour at the rim.
        heart: the colour along the middle.
    """

    start: float
    length: float
    width: float
    belly: float
    tip: float
    edge: Colour
    heart: Colour

    def draw(
        self, brush: ImageDraw.ImageDraw, pose: Pose, *, angle: float, tint: float = 0.0
    ) -> None:
        """Draws the petal in one direction, as three shells from rim to heart."""
        for shell, share in enumerate((1.0, 0.72, 0.36)):
            outline = petal_outline(
                start=self.start + self.length * (1 - share) * 0.1,
                length=self.length * (0.8 + 0.2 * share),
                width=self.width * share,
                belly=self.belly,
                tip=self.tip,
            )
            tone = mix(mix(self.edge, self.heart, shell / 2), (30, 24, 20), tint)
            brush.polygon(pose.place(rotate(outline, angle)), fill=tone)


def draw_ring(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, petal: Petal, *, number: int
) -> None:
    """Draws `number` petals around the head, none quite like the next."""
    offset = rng.uniform(0, math.tau)
    for place in range(number):
        angle = offset + math.tau * (place + rng.uniform(-0.2, 0.2)) / number
        petal.draw(brush, pose, angle=angle, tint=rng.uniform(0.0, 0.14))


def draw_disc(
    brush: ImageDraw.ImageDraw, pose: Pose, *, reach: float, fill: Colour, lift: float = 0.0
) -> None:
    """Draws a filled circle of the head, moved up by `lift` for a look of height."""
    brush.polygon(pose.lifted(lift).place(circle(reach)), fill=fill)


def draw_seeds(
    brush: ImageDraw.ImageDraw,
    rng: random.Random,
    pose: Pose,
    *,
    reach: float,
    number: int,
    tones: Sequence[Colour],
) -> None:
    """Draws florets in the spiral that they grow in: each the golden angle after the last."""
    dot = reach * pose.radius * 0.9 / math.sqrt(number)
    places = pose.place(spiral(reach=reach, number=number, step=2.39996))
    for rank, (x, y) in enumerate(places):
        tone = tones[min(len(tones) - 1, rank * len(tones) // number)]
        brush.ellipse(
            (x - dot / 2, y - dot / 2, x + dot / 2, y + dot / 2), fill=vary(rng, tone, 20)
        )


def draw_daisy(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws long white petals in two rings around a yellow button."""
    blush = mix((226, 226, 236), (236, 190, 214), rng.random() ** 3)
    number = rng.randint(13, 20)
    for length, heart in ((0.8, (238, 238, 240)), (0.72, (255, 255, 252))):
        petal = Petal(0.18, length, 2.1 / number, 0.55, 0.22, edge=blush, heart=heart)
        draw_ring(brush, rng, pose, petal, number=number)
    draw_disc(brush, pose, reach=0.3, fill=(176, 112, 12))
    draw_disc(brush, pose, reach=0.28, fill=(236, 178, 26), lift=0.03)
    tones = ((250, 208, 62), (240, 184, 34), (214, 146, 20))
    draw_seeds(brush, rng, pose.lifted(0.03), reach=0.25, number=70, tones=tones)


def draw_dandelion(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws a full yellow tuft of narrow florets, or, one time in four, the head gone to seed."""
    if rng.random() < 0.25:
        draw_seed_head(brush, rng, pose)
        return
    for ring in range(7):
        reach = 1 - ring * 0.135
        petal = Petal(
            0.0,
            reach,
            0.05,
            0.9,
            0.12,
            edge=mix((222, 158, 0), (236, 150, 4), ring / 6),
            heart=mix((255, 226, 40), (252, 200, 24), ring / 6),
        )
        draw_ring(brush, rng, pose, petal, number=round(14 + 30 * reach))


def draw_seed_head(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws the round gray ball of a dandelion's parachutes."""
    globe = Pose(pose.x, pose.y, pose.radius * 0.95, pose.turn, 1.0)
    hair = max(1, round(pose.radius * 0.012))
    for _ in range(95):
        angle, reach = rng.uniform(0, math.tau), math.sqrt(rng.uniform(0.12, 0.9))
        foot, tip = globe.place(((0, 0), (reach * math.cos(angle), reach * math.sin(angle))))
        brush.line((foot, tip), fill=(196, 198, 190), width=hair)
        for spread in range(9):
            ray = spread * math.tau / 9 + angle
            end = (
                tip[0] + 0.15 * globe.radius * math.cos(ray),
                tip[1] + 0.15 * globe.radius * math.sin(ray),
            )
            brush.line((tip, end), fill=(238, 240, 246), width=hair)
    draw_disc(brush, globe, reach=0.12, fill=(128, 104, 72))


def draw_rose(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws ring within ring of round petals with a lit rim, wound up at the heart."""
    base = vary(rng, rng.choice(ROSE_COLOURS), 14)
    rim, deep = mix(base, (255, 226, 226), 0.34), mix(base, (40, 0, 12), 0.5)
    for ring in range(7):
        reach, number = 1 - ring * 0.135, max(3, 7 - ring)
        offset = rng.uniform(0, math.tau)
        for place in range(number):
            angle = offset + math.tau * (place + rng.uniform(-0.12, 0.12)) / number
            tone = mix(base, deep, 0.1 + 0.09 * ring + rng.uniform(0, 0.12))
            draw_rose_petal(brush, pose, angle=angle, reach=reach, tones=(deep, rim, tone))
    for turn in range(3):
        coil = rotate(spiral(reach=0.16, number=22, step=0.33), turn * 2.1)
        brush.line(
            pose.place(coil), fill=(deep, rim, base)[turn], width=max(1, round(pose.radius * 0.03))
        )


def draw_rose_petal(
    brush: ImageDraw.ImageDraw, pose: Pose, *, angle: float, reach: float, tones: Sequence[Colour]
) -> None:
    """Draws one round petal: its shadow, its lit rim and its face."""
    for shift, size, tone in (
        (0.44, 0.6, tones[0]),
        (0.45, 0.56, tones[1]),
        (0.41, 0.53, tones[2]),
    ):
        x, y = shift * reach * math.cos(angle), shift * reach * math.sin(angle)
        brush.polygon(
            pose.place([(x + u * size * reach, y + v * size * reach) for u, v in circle(1.0)]),
            fill=tone,
        )


def draw_sunflower(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws pointed golden petals in two rings around a large brown disc of seeds."""
    gold = vary(rng, (250, 186, 18), 10)
    number = rng.randint(17, 24)
    for length, share in ((0.56, 0.35), (0.5, 0.0)):
        petal = Petal(
            0.44,
            length,
            2.2 / number,
            0.6,
            0.8,
            edge=mix(gold, (190, 96, 4), 0.35 + share),
            heart=mix(gold, (255, 232, 90), 0.4 - share),
        )
        draw_ring(brush, rng, pose, petal, number=number)
    draw_disc(brush, pose, reach=0.5, fill=(58, 32, 14))
    tones = ((74, 60, 24), (52, 30, 14), (84, 48, 18), (132, 80, 22))
    draw_seeds(brush, rng, pose, reach=0.48, number=260, tones=tones)


def draw_tulip(brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose) -> None:
    """Draws a closed cup from the side: three petals behind, two at the sides, one in front."""
    base = vary(rng, rng.choice(TULIP_COLOURS), 14)
    edge, heart = mix(base, (50, 0, 30), 0.22), mix(base, (255, 240, 220), 0.3)
    cup = Pose(pose.x, pose.y, pose.radius, pose.turn, 1.0)
    # Each: the foot to the side, the lean, the length, the half width, how far in the shade.
    for foot, lean, length, width, tint in (
        (-0.12, -0.1, 1.5, 0.3, 0.38),
        (0.12, 0.1, 1.5, 0.3, 0.38),
        (0.0, 0.0, 1.56, 0.34, 0.3),
        (-0.2, -0.13, 1.6, 0.42, 0.12),
        (0.2, 0.13, 1.6, 0.42, 0.18),
        (0.0, 0.02, 1.42, 0.46, 0.0),
    ):
        sway = lean + rng.uniform(-0.03, 0.03)
        cos, sin = math.cos(cup.turn) * cup.radius, math.sin(cup.turn) * cup.radius
        stand = Pose(
            cup.x + foot * cos - 0.8 * sin, cup.y + foot * sin + 0.8 * cos, cup.radius, cup.turn, 1
        )
        petal = Petal(0.0, length, width, 0.42, 0.62, edge=edge, heart=heart)
        petal.draw(brush, stand, angle=sway - math.pi / 2, tint=tint)


def draw_stalk(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float, *, thick: float
) -> list[Point]:
    """Draws a bent stalk from the head to the lower edge and returns the points along it."""
    foot = pose.x + rng.uniform(-0.5, 0.5) * pose.radius
    bend = (pose.x + foot) / 2 + rng.uniform(-0.35, 0.35) * pose.radius
    points = []
    for step in range(21):
        t = step / 20
        x = (1 - t) ** 2 * pose.x + 2 * t * (1 - t) * bend + t**2 * foot
        points.append((x, pose.y + (bottom + 10 - pose.y) * t))
    green = vary(rng, rng.choice(GREENS), 12)
    wide = max(3, round(pose.radius * thick))
    brush.line(points, fill=mix(green, (10, 30, 10), 0.35), width=wide, joint="curve")
    lit = [(x - wide * 0.15, y) for x, y in points]
    brush.line(lit, fill=mix(green, (220, 240, 170), 0.18), width=max(1, wide // 2), joint="curve")
    return points


def draw_leaf(
    brush: ImageDraw.ImageDraw,
    rng: random.Random,
    *,
    at: Point,
    angle: float,
    length: float,
    width: float,
    belly: float = 0.6,
    tip: float = 0.7,
) -> None:
    """Draws one leaf with a lighter middle rib."""
    green = vary(rng, rng.choice(GREENS), 14)
    pose = Pose(at[0], at[1], length, angle, 1.0)
    dark, pale = mix(green, (10, 36, 14), 0.35), mix(green, (210, 236, 160), 0.25)
    for share, tone in ((1.0, dark), (0.8, green)):
        outline = petal_outline(start=0, length=share, width=width * share, belly=belly, tip=tip)
        brush.polygon(pose.place(outline), fill=tone)
    rib = max(1, round(length * 0.02))
    brush.line(pose.place(((0, 0), (0.92, 0))), fill=pale, width=rib)


def draw_leaf_pairs(
    brush: ImageDraw.ImageDraw,
    rng: random.Random,
    stalk: Sequence[Point],
    *,
    number: int,
    length: float,
    width: float,
) -> None:
    """Draws leaves to the left and to the right of the lower two thirds of a stalk."""
    for place in range(number):
        at = stalk[min(20, 9 + place * 11 // max(1, number))]
        for side in (0, 1):
            rise = rng.uniform(0.2, 0.8)
            angle = -rise if side else rise - math.pi
            draw_leaf(
                brush, rng, at=at, angle=angle, length=length * rng.uniform(0.8, 1.1), width=width
            )


def draw_daisy_stem(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float
) -> None:
    """Draws a thin stalk with narrow leaves near the ground."""
    stalk = draw_stalk(brush, rng, pose, bottom, thick=0.06)
    for _ in range(4):
        angle = -math.pi / 2 + rng.uniform(-1.1, 1.1)
        draw_leaf(
            brush,
            rng,
            at=stalk[-1],
            angle=angle,
            length=pose.radius * rng.uniform(0.6, 1.0),
            width=0.1,
        )


def draw_dandelion_stem(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float
) -> None:
    """Draws a bare stalk out of a rosette of toothed leaves."""
    stalk = draw_stalk(brush, rng, pose, bottom, thick=0.07)
    for _ in range(6):
        lean = -math.pi / 2 + rng.uniform(-1.3, 1.3)
        leaf = Pose(*stalk[-1], pose.radius * rng.uniform(0.9, 1.5), lean, 1.0)
        edge = [
            (step / 16, (0.17 if step % 2 else 0.06) * math.sin(math.pi * (step / 16) ** 0.8 + 0.1))
            for step in range(17)
        ]
        outline = edge + [(reach, -side) for reach, side in reversed(edge)]
        green = vary(rng, rng.choice(GREENS), 12)
        brush.polygon(leaf.place(outline), fill=mix(green, (12, 40, 14), rng.uniform(0.1, 0.4)))
        brush.line(
            leaf.place(((0, 0), (0.9, 0))),
            fill=(150, 180, 110),
            width=max(1, round(leaf.radius * 0.02)),
        )


def draw_rose_stem(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float
) -> None:
    """Draws a thorny stalk, leaves in pairs, and the sepals that show behind the petals."""
    stalk = draw_stalk(brush, rng, pose, bottom, thick=0.09)
    for place in range(6, 20, 3):
        x, y = stalk[place]
        side = pose.radius * (0.12 if place % 2 else -0.12)
        brush.polygon(
            ((x, y - side / 3), (x + side, y - abs(side) / 2), (x, y + abs(side) / 2)),
            fill=(70, 84, 44),
        )
    draw_leaf_pairs(brush, rng, stalk, number=2, length=pose.radius * 0.85, width=0.26)
    for place in range(5):
        draw_leaf(
            brush,
            rng,
            at=(pose.x, pose.y),
            angle=pose.turn + place * math.tau / 5,
            length=pose.radius * 1.12,
            width=0.2,
        )


def draw_sunflower_stem(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float
) -> None:
    """Draws a thick stalk with broad leaves."""
    stalk = draw_stalk(brush, rng, pose, bottom, thick=0.13)
    draw_leaf_pairs(brush, rng, stalk, number=2, length=pose.radius * 1.0, width=0.36)


def draw_tulip_stem(
    brush: ImageDraw.ImageDraw, rng: random.Random, pose: Pose, bottom: float
) -> None:
    """Draws a straight stalk between long upright leaves."""
    stalk = draw_stalk(brush, rng, pose, bottom, thick=0.11)
    for side in (-1, 1):
        draw_leaf(
            brush,
            rng,
            at=stalk[-1],
            angle=-math.pi / 2 + side * rng.uniform(0.12, 0.4),
            length=(bottom - pose.y) * rng.uniform(0.7, 1.0),
            width=0.13,
            belly=0.5,
            tip=0.9,
        )


Stem = Callable[[ImageDraw.ImageDraw, random.Random, Pose, float], None]
Head = Callable[[ImageDraw.ImageDraw, random.Random, Pose], None]

PAINTERS: dict[str, tuple[Stem, Head]] = {
    "daisy": (draw_daisy_stem, draw_daisy),
    "dandelion": (draw_dandelion_stem, draw_dandelion),
    "roses": (draw_rose_stem, draw_rose),
    "sunflowers": (draw_sunflower_stem, draw_sunflower),
    "tulips": (draw_tulip_stem, draw_tulip),
}

BLOSSOMS: dict[str, Colour] = {
    "daisy": (244, 244, 240),
    "dandelion": (246, 206, 20),
    "roses": (206, 40, 66),
    "sunflowers": (240, 170, 16),
    "tulips": (190, 84, 160),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the samples that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.samples",
        description="Draw a small set of flower pictures to try tpufeed on.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", help="a new or empty folder")
    parser.add_argument("--count", type=int, default=600, help="pictures in all (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed, other pictures (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        drawn = draw_samples(args.directory, count=args.count, seed=args.seed)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print(
        f"drew {len(drawn.pictures)} pictures of {len(CLASSES)} classes"
        f" and {len(drawn.damaged)} damaged files into {args.directory}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
