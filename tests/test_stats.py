"""What is asked of the whole set: its labels, its splits, its sizes."""

import dataclasses
import random
from fractions import Fraction

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from transforms.image import PixelPolicy, estimate_bytes
from transforms.records import Copy, DataError, Grouping, ImageRef
from transforms.shards import SplitSize
from transforms.stats import (
    AssignSplits,
    CountImages,
    DecideLabels,
    PlanShards,
    SumSizes,
    assign_split,
    decide_labels,
    digest_ref,
    sort_labels,
)

WEIGHTS = (("train", Fraction("0.7")), ("test", Fraction("0.3")))
POLICY = PixelPolicy(width=8, height=8)
GOLDEN_DIGEST = 13794169598389446722310151505820014647


def ref(key: str, label: str = "cat", split: str = "", group: str = "", size: int = 100):
    return ImageRef(key, f"/in/{key}", label, split, group, size)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([], ()),
        (["dog", "cat", "cat", "Zebra", "ant"], ("Zebra", "ant", "cat", "dog")),
        (["10", "2", "1"], ("1", "2", "10")),
        (["10", "2", "01", "1"], ("01", "1", "2", "10")),
        # Not all whole numbers: by code point.
        (["10", "2", "x"], ("10", "2", "x")),
        (["10", "2", "-1"], ("-1", "10", "2")),
        # Digits of another script are names.
        (["10", "2", "٣"], ("10", "2", "٣")),
        (["z", "é", "\U0001f600", "\uffff"], ("z", "é", "\uffff", "\U0001f600")),
    ],
)
def test_sort_labels(labels, expected):
    assert sort_labels(labels) == expected
    assert sort_labels(reversed(labels)) == expected


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        (["b", "a"], None, ("a", "b")),
        (["b", "a"], ["b", "a", "unused"], ("b", "a", "unused")),
        (["b", "new2", "a", "new1"], ["b", "a"], ("b", "a", "new1", "new2")),
        (["11", "9"], ["10"], ("10", "9", "11")),
        (["Cat", "cat"], ["Cat", "cat"], ("Cat", "cat")),
        ([], ["a"], ("a",)),
    ],
)
def test_decide_labels(found, known, expected):
    assert decide_labels(found, known=known) == expected


@pytest.mark.parametrize(
    ("found", "known", "message"),
    [
        (
            ["cat", "dog", "Cat"],
            None,
            "labels 'Cat' and 'cat' differ by case only: rename one folder, or list both in "
            "--class-names",
        ),
        (
            ["CAT"],
            ["cat"],
            "labels 'cat' and 'CAT' differ by case only: rename one folder, or list both in "
            "--class-names",
        ),
    ],
)
def test_labels_that_differ_by_case_only(found, known, message):
    with pytest.raises(DataError) as caught:
        decide_labels(found, known=known)
    assert str(caught.value) == message


def test_assign_split_golden():
    keys = ["a", "b", "c", "d", "e", "f", "g", "h"]
    found = [assign_split(ref(k), weights=WEIGHTS, seed=0, explicit=True).split for k in keys]
    assert found == ["train", "train", "test", "train", "test", "train", "train", "train"]


def test_a_given_split_stays():
    given = ref("a", split="holdout")
    assert assign_split(given, weights=WEIGHTS, seed=0, explicit=False) == given
    with pytest.raises(DataError) as caught:
        assign_split(given, weights=WEIGHTS, seed=0, explicit=True)
    assert str(caught.value) == (
        "--split: 'a' already has the split 'holdout' from its source; drop --split, or the "
        "splits of the source"
    )


def test_a_group_stays_together_whatever_its_keys():
    splits = {
        group: {
            assign_split(ref(f"{i}", group=group), weights=WEIGHTS, seed=0, explicit=True).split
            for i in range(20)
        }
        for group in map(str, range(30))
    }
    assert {len(found) for found in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "test"}


def test_two_hundred_more_files_move_none():
    def splits(keys):
        return {k: assign_split(ref(k), weights=WEIGHTS, seed=4, explicit=True).split for k in keys}

    before = splits(f"c/{i}.jpg" for i in range(1000))
    after = splits(f"c/{i}.jpg" for i in range(1200))
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("grouping", "key", "expected"),
    [
        (Grouping(), "patient7/scan1.png", ""),
        (Grouping("column", "patient"), "patient7/scan1.png", ""),
        (Grouping("group", r"patient\d+"), "a/patient7/scan1.png", "patient7"),
        (Grouping("group", r"patient(\d+)"), "a/patient7/scan1.png", "7"),
        (Grouping("group", r"(?:a|b)/([^/]+)/"), "b/x/1.png", "x"),
    ],
)
def test_group_of(grouping, key, expected):
    assert grouping.group_of(key) == expected


@pytest.mark.parametrize("expression", [r"patient(\d+)", r"x*", r"(x)?", r"()"])
def test_a_key_without_a_group_is_named(expression):
    with pytest.raises(DataError) as caught:
        Grouping("group", expression).group_of("scans/1.png")
    assert str(caught.value) == (
        f"--split-by group:{expression} does not match the key 'scans/1.png': every key needs a "
        "group; widen the expression"
    )


def test_sum_sizes_in_any_order():
    chance = random.Random(1)
    elements = [
        (
            (chance.choice("abc"), chance.choice(("ant", "bee"))),
            SplitSize(1, chance.randint(0, 10**12), chance.randrange(2**128)),
        )
        for _ in range(300)
    ]
    expected = {
        (split, label): SplitSize(
            sum(key == (split, label) for key, _ in elements),
            sum(size.bytes for key, size in elements if key == (split, label)),
            sum(size.digest for key, size in elements if key == (split, label)) % 2**128,
        )
        for split in "abc"
        for label in ("ant", "bee")
    }
    combine = SumSizes()
    for _ in range(5):
        chance.shuffle(elements)
        accumulators = [combine.create_accumulator() for _ in range(4)]
        for i, element in enumerate(elements):
            accumulators[i % 4] = combine.add_input(accumulators[i % 4], element)
        merged = combine.merge_accumulators(accumulators)
        assert combine.extract_output(merged) == expected


def test_sum_sizes_does_not_change_what_it_merges():
    key = ("a", "ant")
    one, two = {key: SplitSize(1, 10)}, {key: SplitSize(2, 20)}
    assert SumSizes().merge_accumulators([one, two]) == {key: SplitSize(3, 30)}
    assert (one, two) == ({key: SplitSize(1, 10)}, {key: SplitSize(2, 20)})


def test_count_images_in_a_pipeline():
    refs = [ref("1", "cat", "a"), ref("2", "bee", "a"), ref("3", "cat", "b"), ref("4", "cat", "a")]
    one = estimate_bytes(100, policy=POLICY)
    digests = [digest_ref(item) for item in refs]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        sizes = pipeline | beam.Create(refs) | CountImages(POLICY)
        expected = {
            ("a", "cat"): SplitSize(2, 2 * one, (digests[0] + digests[3]) % 2**128),
            ("a", "bee"): SplitSize(1, one, digests[1]),
            ("b", "cat"): SplitSize(1, one, digests[2]),
        }
        assert_that(sizes, equal_to([expected]))


def test_every_field_of_an_image_is_in_its_digest():
    """And nothing of this process: the number is that of another machine, another day."""
    plain = ImageRef(
        "k", "/in/k", "cat", "a", "g", 100, 3, (("age", 4),), "ab", (Copy("c", "d", "e"),)
    )
    assert digest_ref(plain) == GOLDEN_DIGEST
    others = {
        "key": "j", "path": "/in/j", "label": "bee", "split": "b", "group": "h", "size": 101,
        "item": 4, "features": (("age", 5),), "sha256": "cd", "copies": (),
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(ImageRef)}
    changed = [dataclasses.replace(plain, **{name: value}) for name, value in others.items()]
    assert len({digest_ref(item) for item in [plain, *changed]}) == 1 + len(others)


def test_count_images_of_nothing():
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        assert_that(pipeline | beam.Create([]) | CountImages(POLICY), equal_to([{}]))


@pytest.mark.parametrize(
    ("known", "expected"),
    [(None, ("ant", "bee", "cat")), (("cat", "fly", "bee"), ("cat", "fly", "bee", "ant"))],
)
def test_decide_labels_in_a_pipeline(known, expected):
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        labels = (
            pipeline
            | beam.Create([ref("1", "cat"), ref("2", "bee"), ref("3", "ant"), ref("4", "cat")])
            | CountImages(POLICY)
            | DecideLabels(known)
        )
        assert_that(labels, equal_to([expected]))


def test_decide_labels_of_nothing():
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        assert_that(pipeline | beam.Create([{}]) | DecideLabels(None), equal_to([()]))


def test_assign_splits_in_a_pipeline():
    refs = [ref("a"), ref("c"), ref("x", split="own")]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        found = pipeline | beam.Create(refs) | AssignSplits(WEIGHTS, 0, False)
        expected = [ref("a", split="train"), ref("c", split="test"), ref("x", split="own")]
        assert_that(found, equal_to(expected))


@pytest.mark.parametrize(
    ("shards", "shard_size", "expected"),
    [
        (None, 128_000_000, {"test": 1, "train": 2}),
        (10, 128_000_000, {"test": 1, "train": 9}),
        (None, 40 * estimate_bytes(100, policy=POLICY), {"test": 1, "train": 4}),
    ],
)
def test_plan_shards_in_a_pipeline(shards, shard_size, expected):
    refs = [ref(str(i), split="test" if i < 20 else "train") for i in range(180)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        sizes = pipeline | beam.Create(refs) | CountImages(POLICY)
        plan = sizes | PlanShards(shards, shard_size)
        assert_that(plan, equal_to([expected]))


def test_plan_shards_of_nothing():
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        plan = pipeline | beam.Create([{}]) | PlanShards(None, 1000)
        assert_that(plan, equal_to([{}]))


def test_plan_shards_fails_with_what_is_wrong():
    message = "--shards 3: more than the 2 images found; allowed: 1 to 2"
    with pytest.raises(DataError, match=f"^{message}"):
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            refs = [ref("a", split="train"), ref("b", split="train")]
            pipeline | beam.Create(refs) | CountImages(POLICY) | PlanShards(3, 1000)
