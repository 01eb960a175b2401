"""Stratified splits: the paper's sizes, each class within one of its share, groups whole, the same everywhere."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from paperlib import splits

DERMAMNIST = np.repeat(np.arange(7), [327, 514, 1099, 115, 1113, 6705, 142])
PAPER = (0.6, 0.2, 0.1, 0.1)


def class_counts(labels, parts):
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]).T


def assert_partition(labels, parts):
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_dermamnist_gives_the_papers_sizes():
    labels = np.random.default_rng(0).permutation(DERMAMNIST)
    parts = splits.stratified(labels)
    assert_partition(labels, parts)
    assert [len(part) for part in parts] == [6009, 2003, 1001, 1002]
    exact = np.outer(np.bincount(labels), PAPER)
    assert np.abs(class_counts(labels, parts) - exact).max() < 1


def test_sizes_agree_with_a_chain_of_scikit_learn_splits():
    rest, sizes = np.arange(len(DERMAMNIST)), []
    for share in (0.4, 0.5, 0.5):
        part, rest = train_test_split(rest, test_size=share, stratify=DERMAMNIST[rest], random_state=0)
        sizes.append(len(part))
    assert [len(part) for part in splits.stratified(DERMAMNIST)] == [*sizes, len(rest)]


def test_balanced_twelve_thousand():
    labels = np.tile(np.arange(100), 120)
    parts = splits.stratified(labels)
    assert [len(part) for part in parts] == [7200, 2400, 1200, 1200]
    assert class_counts(labels, parts).tolist() == [[72, 24, 12, 12]] * 100


class_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 20)


@given(class_sizes, st.integers(0, 5), st.lists(st.integers(1, 30), min_size=2, max_size=6))
def test_every_count_is_its_exact_share_rounded(sizes, seed, weights):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    fractions = np.array(weights) / sum(weights)
    if (fractions * len(labels)).min() < 1:
        return
    parts = splits.stratified(labels, fractions, seed)
    assert_partition(labels, parts)
    assert np.abs(class_counts(labels, parts) - np.outer(sizes, fractions)).max() < 1
    assert np.abs(np.array([len(part) for part in parts]) - fractions * len(labels)).max() < 1


def test_sizes_go_by_largest_remainder_and_the_later_of_equals():
    assert [len(p) for p in splits.stratified(np.zeros(3662, dtype=int))] == [2197, 733, 366, 366]
    assert [len(p) for p in splits.stratified(np.zeros(5, dtype=int), (0.5, 0.5))] == [2, 3]


def test_classes_come_before_the_largest_remainder_where_both_cannot_be():
    # Remainders 2/3 three times would round up parts 2, 3 and 4, but the only class with a remainder there has two
    # units to give.
    labels = np.repeat([0, 1], [6, 4])
    fractions = np.array([1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6])
    parts = splits.stratified(labels, fractions)
    assert np.abs(class_counts(labels, parts) - np.outer([6, 4], fractions)).max() < 1
    assert sorted(len(part) for part in parts) == [1, 2, 2, 2, 3]


def test_the_split_is_pinned_and_depends_on_the_seed():
    parts = splits.stratified(DERMAMNIST)
    digest = hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in parts)).hexdigest()
    assert digest == "8e1e557a10f60e5adc5458468eca8625e78b0251d7b545b45029f60cc3558c5c"
    assert all(np.array_equal(a, b) for a, b in zip(parts, splits.stratified(DERMAMNIST), strict=True))
    assert not np.array_equal(parts[0], splits.stratified(DERMAMNIST, seed=1)[0])


def test_class_names_do_not_matter():
    renamed = np.array([-5, 40, 41, 42, 100, 101, 7000])[DERMAMNIST]
    for a, b in zip(splits.stratified(DERMAMNIST), splits.stratified(renamed), strict=True):
        assert np.array_equal(a, b)


def test_each_input_is_as_likely_in_the_test_part_as_any_other():
    labels = np.repeat([0, 1], [60, 40])
    hits = np.zeros(100)
    for seed in range(2000):
        hits[splits.stratified(labels, seed=seed)[3]] += 1
    assert np.abs(hits / 2000 - 0.1).max() < 5 * np.sqrt(0.1 * 0.9 / 2000)


@given(st.integers(0, 20), st.integers(1, 4))
def test_groups_never_straddle_parts(seed, largest):
    rng = np.random.default_rng(seed)
    of_group = rng.integers(0, 5, size=300)
    groups = rng.permutation(np.repeat(np.arange(300), rng.integers(1, largest + 1, size=300)))
    labels = of_group[groups]
    parts = splits.stratified(labels, seed=seed, groups=groups)
    assert_partition(labels, parts)
    homes = [set(groups[part]) for part in parts]
    assert sum(map(len, homes)) == len(set(groups))
    assert np.abs(class_counts(labels, parts) - np.outer(np.bincount(labels), PAPER)).max() < largest + 1


def test_groups_of_one_give_the_same_counts_as_none():
    plain, grouped = (splits.stratified(DERMAMNIST, groups=g) for g in (None, np.arange(len(DERMAMNIST))))
    assert np.array_equal(class_counts(DERMAMNIST, plain), class_counts(DERMAMNIST, grouped))


def test_large_groups_are_spread_as_the_fractions_ask():
    groups = np.concatenate([np.repeat(np.arange(100), 4), np.arange(100, 700)])
    labels = np.zeros(len(groups), dtype=int)
    share = [np.mean(groups[part] < 100) for part in splits.stratified(labels, groups=groups)]
    assert share == pytest.approx([0.4] * 4, abs=0.03)


@given(class_sizes, st.integers(0, 5), st.floats(0.01, 1))
def test_subset_has_the_size_asked_for_and_the_shares_of_the_whole(sizes, seed, share):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = max(1, round(share * len(labels)))
    chosen = splits.subset(labels, count, seed)
    assert len(np.unique(chosen)) == count
    counts = np.bincount(labels[chosen], minlength=len(sizes))
    assert np.abs(counts - np.array(sizes) * count / len(labels)).max() < 1


def test_subset_of_a_large_balanced_set():
    labels = np.tile(np.arange(100), 600)
    assert np.bincount(labels[splits.subset(labels, 12_000)]).tolist() == [120] * 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: splits.stratified([]), "non-empty"),
        (lambda: splits.stratified([0.0, 1.0]), "integers"),
        (lambda: splits.stratified([[0, 1]]), "vector"),
        (lambda: splits.stratified(DERMAMNIST, (0.5, 0.4)), "sum to 1"),
        (lambda: splits.stratified(DERMAMNIST, (1.2, -0.2)), "positive"),
        (lambda: splits.stratified([0, 1, 0]), "part 2 would be empty"),
        (lambda: splits.stratified(DERMAMNIST, groups=[1, 2]), "groups has 2 entries"),
        (lambda: splits.subset(DERMAMNIST, 0), "count"),
        (lambda: splits.subset(DERMAMNIST, 10_016), "count"),
        (lambda: splits.subset(DERMAMNIST, 10.5), "count"),
        (lambda: splits.subset(["a"], 1), "integers"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
