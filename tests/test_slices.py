"""Slices of splits: the arithmetic by table, and that no record is lost or read twice."""

import random
import re

import pytest

from pipeline.slices import parse_slices


@pytest.mark.parametrize(
    "spec, records, expected",
    [
        ("train", 10, (0, 10)),
        ("train[:]", 10, (0, 10)),
        ("train[:80%]", 10, (0, 8)),
        ("train[80%:]", 10, (8, 10)),
        ("train[-20%:]", 10, (8, 10)),
        ("train[:-20%]", 10, (0, 8)),
        ("train[3:5]", 10, (3, 5)),
        ("train[3:-3]", 10, (3, 7)),
        ("train[-4:]", 10, (6, 10)),
        ("train[2:50%]", 10, (2, 5)),
        ("train[ 25% : 75% ]", 8, (2, 6)),
        ("train[:0.5%]", 200, (0, 1)),
        ("train[:99%]", 101, (0, 100)),  # 99.99
        ("train[:1%]", 50, (0, 1)),  # 0.5, up
        ("train[-1%:]", 50, (50, 50)),  # 49.5, up: nothing is left
        ("train[:33.333%]", 100_000, (0, 33_333)),
        ("train[:100%]", 7, (0, 7)),
        ("t_1[-100%:]", 7, (0, 7)),
    ],
)
def test_spans(spec, records, expected):
    (part,) = parse_slices(spec)
    if expected[0] == expected[1]:
        with pytest.raises(ValueError, match="none of the"):
            part.span(records, spec=spec)
    else:
        assert part.span(records, spec=spec) == expected


def test_a_sum_has_its_parts_in_order():
    parts = parse_slices("train[:10%] + test+train[90%:]")
    assert [(part.split, part.whole) for part in parts] == [
        ("train", False),
        ("test", True),
        ("train", False),
    ]


def test_slices_that_meet_cover_all_exactly_once():
    choose = random.Random(1)
    for _ in range(300):
        records = choose.randrange(50, 3000)
        cuts = sorted(choose.sample(range(5, 95, 5), 3))
        ends = [f"{cut}%" if choose.random() < 0.5 else f"-{100 - cut}%" for cut in cuts]
        bounds = ["", *ends, ""]
        covered = []
        for low, high in zip(bounds, bounds[1:], strict=False):
            spec = f"train[{low}:{high}]"
            covered += range(*parse_slices(spec)[0].span(records, spec=spec))
        assert covered == list(range(records))


FORMS = (
    "allowed are a split's name, NAME[FROM:TO] with whole numbers or percentages, as in "
    "train[:80%], train[100:200] or train[-10%:], and sums of them with +"
)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("", f"split '': {FORMS}"),
        ("train[5]", f"split 'train[5]': {FORMS}"),
        ("train[1:2", f"split 'train[1:2': {FORMS}"),
        ("train[1:2:3]", f"split 'train[1:2:3]': {FORMS}"),
        ("[:10%]", f"split '[:10%]': {FORMS}"),
        ("train+", f"split 'train+': {FORMS}"),
        ("../train", f"split '../train': {FORMS}"),
        ("train[:half]", f"split 'train[:half]': 'half': {FORMS}"),
        ("train[:1.5]", f"split 'train[:1.5]': '1.5': {FORMS}"),
        ("train[:1_0]", f"split 'train[:1_0]': '1_0': {FORMS}"),
        ("train[:4shard]", f"split 'train[:4shard]': '4shard': {FORMS}"),
        ("train[:101%]", "split 'train[:101%]': 101%: allowed are -100% to 100%"),
        ("train[-100.5%:]", "split 'train[-100.5%:]': -100.5%: allowed are -100% to 100%"),
    ],
)
def test_what_is_no_slice(spec, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_slices(spec)


@pytest.mark.parametrize(
    "spec, message",
    [
        (
            "train[5:11]",
            "split 'train[5:11]': 11 is out of range, 'train' has 10 records; allowed are -10 to "
            "10, or -100% to 100%",
        ),
        (
            "train[-11:]",
            "split 'train[-11:]': -11 is out of range, 'train' has 10 records; allowed are -10 to "
            "10, or -100% to 100%",
        ),
        (
            "train[5:50%]",
            "split 'train[5:50%]': none of the 10 records of 'train' lies from 5 to 5; let FROM be "
            "less than TO",
        ),
        (
            "train[:1%]",
            "split 'train[:1%]': none of the 10 records of 'train' lies from 0 to 0; let FROM be "
            "less than TO",
        ),
    ],
)
def test_what_a_split_does_not_hold(spec, message):
    (part,) = parse_slices(spec)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        part.span(10, spec=spec)
