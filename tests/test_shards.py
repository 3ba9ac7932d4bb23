"""Splits, shards and places: golden values, and the rules that hold for any data."""

import hashlib
import os
import random
from fractions import Fraction

import pytest

from transforms.shards import (
    MOST_SHARDS,
    SHARD_NAME,
    SplitSize,
    check_weights,
    place_of,
    plan_shards,
    shard_name,
    shard_of,
    split_of,
    stable_hash,
)

WEIGHTS = (
    ("train", Fraction("0.8")),
    ("validation", Fraction("0.1")),
    ("test", Fraction("0.1")),
)
KEYS = [f"class{i % 7}/{i:05d}.jpg" for i in range(5000)]


def sizes(**records: int) -> dict[str, SplitSize]:
    return {split: SplitSize(n, 1000 * n) for split, n in records.items()}


def plan(records: dict[str, int], *, shards=None, shard_size=128_000_000) -> dict[str, int]:
    return plan_shards(sizes(**records), shards=shards, shard_size=shard_size)


@pytest.mark.parametrize(
    ("key", "seed", "expected"),
    [
        ("cats/1.jpg", 0, (10162488390389348855, 9016011690328284590)),
        ("cats/1.jpg", 7, (13941287945782954767, 587853028197334519)),
    ],
)
def test_stable_hash_is_fixed_for_ever(key, seed, expected):
    assert stable_hash(key, seed=seed) == expected


@pytest.mark.parametrize("key", ["", "é/日本.jpg", "a\nb", os.fsdecode(b"latin\xe9.jpg")])
@pytest.mark.parametrize("seed", [0, 12, 10**30])
def test_stable_hash_is_sha256_of_seed_and_name(key, seed):
    digest = hashlib.sha256(str(seed).encode() + b"\n" + os.fsencode(key)).digest()
    expected = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")
    assert stable_hash(key, seed=seed) == expected


def test_split_of_golden():
    found = {key: split_of(key, weights=WEIGHTS, seed=0) for key in "abcdefgh"}
    assert found == {
        "a": "train",
        "b": "train",
        "c": "test",
        "d": "train",
        "e": "train",
        "f": "train",
        "g": "train",
        "h": "train",
    }


def test_split_of_follows_the_hash_space_exactly():
    for key in KEYS[:500]:
        value = Fraction(stable_hash(key, seed=3)[0], 1 << 64)
        expected = "train" if value < Fraction(8, 10) else "validation"
        expected = expected if value < Fraction(9, 10) else "test"
        assert split_of(key, weights=WEIGHTS, seed=3) == expected


def test_split_shares_and_seed():
    found = [split_of(key, weights=WEIGHTS, seed=0) for key in KEYS]
    other = [split_of(key, weights=WEIGHTS, seed=1) for key in KEYS]
    counts = {name: found.count(name) for name, _ in WEIGHTS}
    # Within 4 standard deviations of the binomial distribution.
    assert abs(counts["train"] - 4000) < 4 * 28.3
    assert abs(counts["validation"] - 500) < 4 * 21.2
    assert abs(counts["test"] - 500) < 4 * 21.2
    assert found != other


def test_thirds_leave_no_gap_at_the_end():
    thirds = tuple((name, Fraction(1, 3)) for name in "abc")
    assert {split_of(key, weights=thirds, seed=0) for key in KEYS} == {"a", "b", "c"}


@pytest.mark.parametrize("count", [1, 2, 3, 16, 1000])
def test_shards_are_contiguous_ranges_of_the_place(count):
    ordered = sorted(KEYS, key=lambda key: place_of(key, seed=5))
    shards = [shard_of(key, count=count, seed=5) for key in ordered]
    assert shards == sorted(shards)
    assert set(shards) <= set(range(count))
    assert count > 100 or set(shards) == set(range(count))


def test_shard_of_golden():
    found = {key: shard_of(key, count=4, seed=0) for key in "abcdefgh"}
    assert found == {"a": 2, "b": 3, "c": 1, "d": 3, "e": 3, "f": 3, "g": 3, "h": 0}


def test_place_is_independent_of_the_split():
    train = [key for key in KEYS if split_of(key, weights=WEIGHTS, seed=0) == "test"]
    places = [place_of(key, seed=0)[0] / (1 << 64) for key in train]
    assert min(places) < 0.05 and max(places) > 0.95  # not one end of the hash space


def test_shard_name():
    name = shard_name(split="train", index=3, count=16)
    assert name == "train-00003-of-00016"
    found = SHARD_NAME.fullmatch(name)
    assert found and found.groupdict() == {"split": "train", "index": "00003", "count": "00016"}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [("train", Fraction("0.8")), ("test", Fraction("0.1"))],
            "split weights add up to 0.9, must be 1, as in train=0.8,validation=0.2",
        ),
        (
            [("train", Fraction("0.8")), ("test", Fraction("0.3"))],
            "split weights add up to 1.1, must be 1, as in train=0.8,validation=0.2",
        ),
        ([], "split weights add up to 0, must be 1, as in train=0.8,validation=0.2"),
        (
            [("a", Fraction(1)), ("b", Fraction(0))],
            "split b=0: a weight must be above 0",
        ),
        (
            [("a", Fraction(2)), ("b", Fraction(-1))],
            "split b=-1: a weight must be above 0",
        ),
        (
            [("a", Fraction("0.5")), ("a", Fraction("0.5"))],
            "split 'a' is named twice: name each split once",
        ),
        (
            [("a-b", Fraction(1))],
            "split name 'a-b': allowed are 1 to 64 letters, digits and underscores",
        ),
        (
            [("a/b", Fraction(1))],
            "split name 'a/b': allowed are 1 to 64 letters, digits and underscores",
        ),
        (
            [("", Fraction(1))],
            "split name '': allowed are 1 to 64 letters, digits and underscores",
        ),
    ],
)
def test_check_weights_refuses(weights, message):
    with pytest.raises(ValueError) as caught:
        check_weights(weights)
    assert str(caught.value) == message


def test_check_weights_takes_tenths_exactly():
    tenths = [(f"s{i}", Fraction("0.1")) for i in range(10)]
    assert check_weights(tenths) == tuple(tenths)


@pytest.mark.parametrize(
    ("records", "shards", "expected"),
    [
        ({"train": 100}, 1, {"train": 1}),
        ({"train": 100}, 100, {"train": 100}),
        ({"train": 800, "validation": 100, "test": 100}, 10, dict(test=1, train=8, validation=1)),
        # 6.4, 0.8 and 0.8: the remainders decide.
        ({"train": 80, "validation": 10, "test": 10}, 8, dict(test=1, train=6, validation=1)),
        # At least one each, taken from the largest.
        ({"train": 998, "validation": 1, "test": 1}, 3, dict(test=1, train=1, validation=1)),
        ({"train": 998, "validation": 1, "test": 1}, 10, dict(test=1, train=8, validation=1)),
        # No more than its records: 4.95 and 0.05 of 5.
        ({"a": 3, "b": 3}, 6, {"a": 3, "b": 3}),
        ({"a": 1, "b": 9}, 9, {"a": 1, "b": 8}),
        # Equal remainders: by name, the last one.
        ({"a": 10, "b": 10}, 3, {"a": 1, "b": 2}),
        # A split without records has no shards.
        ({"train": 10, "test": 0}, 2, {"train": 2}),
        ({}, 4, {}),
        ({"train": 0}, 4, {}),
    ],
)
def test_plan_with_a_total(records, shards, expected):
    found = plan(records, shards=shards)
    assert found == expected
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("records", "shard_size", "expected"),
    [
        ({"train": 1}, 128_000_000, {"train": 1}),
        ({"train": 64}, 128_000_000, {"train": 1}),
        ({"train": 65}, 128_000_000, {"train": 2}),
        ({"train": 1000}, 128_000_000, {"train": 16}),
        # 1,000 bytes a record.
        ({"train": 100_000}, 1_000_000, {"train": 100}),
        ({"train": 100_001}, 1_000_000, {"train": 101}),
        ({"train": 80_000, "test": 20_000}, 1_000_000, {"test": 20, "train": 80}),
        # Never more shards than records, nor than a name can say, nor fewer than splits.
        ({"train": 7}, 1, {"train": 7}),
        ({"train": 300_000}, 1, {"train": MOST_SHARDS}),
        ({"a": 1, "b": 1, "c": 1}, 128_000_000, {"a": 1, "b": 1, "c": 1}),
    ],
)
def test_plan_by_size(records, shard_size, expected):
    assert plan(records, shard_size=shard_size) == expected


def test_plan_is_within_one_of_the_exact_share_unless_held():
    chance = random.Random(0)
    for _ in range(300):
        records = {f"s{i}": chance.randint(1, 200) for i in range(chance.randint(1, 6))}
        everything = sum(records.values())
        total = chance.randint(len(records), everything)
        found = plan(records, shards=total)
        assert sum(found.values()) == total
        for split, count in found.items():
            assert 1 <= count <= records[split]
            exact = total * records[split] / everything
            assert exact < 1 or abs(count - exact) < 2


@pytest.mark.parametrize(
    ("records", "shards", "message"),
    [
        (
            {"train": 5},
            6,
            "--shards 6: more than the 5 images found; allowed: 1 to 5",
        ),
        (
            {"train": 5, "test": 4},
            1,
            "--shards 1: fewer than the 2 splits (test, train); allowed: 2 to 9",
        ),
    ],
)
def test_plan_refuses(records, shards, message):
    with pytest.raises(ValueError) as caught:
        plan(records, shards=shards)
    assert str(caught.value) == message
