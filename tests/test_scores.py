"""Accuracy, macro F1 and NLL against scikit-learn, literal loops and hand-made cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, log_loss

from paperlib import scores

SCORES = (scores.accuracy, scores.macro_f1, scores.nll)


@st.composite
def predictions(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    inputs, classes = draw(st.integers(1, 40)), draw(st.integers(2, 12))
    probs = rng.dirichlet(np.full(classes, draw(st.sampled_from([0.05, 1.0, 20.0]))), size=inputs)
    return probs, rng.integers(0, classes, size=inputs)


@given(predictions())
def test_agree_with_scikit_learn(case):
    probs, labels = case
    names = np.arange(probs.shape[1])
    predicted = probs.argmax(axis=1)
    assert scores.accuracy(probs, labels) == pytest.approx(accuracy_score(labels, predicted))
    expected = f1_score(labels, predicted, labels=names, average="macro", zero_division=0)
    assert scores.macro_f1(probs, labels) == pytest.approx(expected)
    if probs[np.arange(len(labels)), labels].min() > 1e-12:  # scikit-learn clips below
        assert scores.nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=names), rel=1e-9)


@given(predictions(), st.randoms(use_true_random=False))
def test_permuting_inputs_or_classes_changes_nothing(case, random):
    probs, labels = case
    inputs = random.sample(range(len(labels)), len(labels))
    classes = np.array(random.sample(range(probs.shape[1]), probs.shape[1]))
    for score in SCORES:
        value = score(probs, labels)
        assert score(probs[inputs], labels[inputs]) == pytest.approx(value)
        assert score(probs[:, classes], np.argsort(classes)[labels]) == pytest.approx(value)


def test_macro_f1_by_a_literal_loop():
    rng = np.random.default_rng(0)
    probs, labels = rng.dirichlet(np.ones(5), size=200), rng.integers(0, 4, size=200)
    each = []
    for k in range(5):
        hit = sum(1 for p, y in zip(probs, labels, strict=True) if p.argmax() == k and y == k)
        false = sum(1 for p, y in zip(probs, labels, strict=True) if p.argmax() == k and y != k)
        missed = sum(1 for p, y in zip(probs, labels, strict=True) if p.argmax() != k and y == k)
        each.append(2 * hit / (2 * hit + false + missed))
    assert scores.macro_f1(probs, labels) == pytest.approx(sum(each) / 5)


def test_macro_f1_counts_a_class_that_is_neither_predicted_nor_present_as_zero():
    probs = np.eye(4)[[0, 1, 0, 1]]
    assert scores.macro_f1(probs, [0, 1, 0, 1]) == 0.5


def test_nll_is_infinite_where_the_true_class_has_probability_zero():
    assert scores.nll([[1.0, 0.0], [0.5, 0.5]], np.array([1, 0])) == math.inf
    assert scores.nll([[1.0, 0.0]], np.array([0])) == 0.0


def test_equal_probabilities_predict_the_first_class():
    assert scores.accuracy([[0.5, 0.5], [0.5, 0.5]], np.array([0, 1])) == 0.5


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([0.5, 0.5], [0], "axes"),
        ([[0.5, 0.5], [0.5, np.nan]], [0, 1], r"probs\[1, 1\] is not finite"),
        ([[0.5, 0.5], [1.5, -0.5]], [0, 1], r"probs\[1, 1\] is negative"),
        ([[0.5, 0.5], [0.5, 0.6]], [0, 1], r"probs\[1\] does not sum to 1"),
        ([[0.5, 0.5], [0.5, 0.5]], [0, 2], r"labels\[1\] is outside 0\.\.1"),
        ([[0.5, 0.5], [0.5, 0.5]], [0], "labels has 1 entries"),
        ([[0.5, 0.5]], [0.0], "integer"),
        (np.empty((0, 3)), np.empty(0, dtype=int), "empty"),
    ],
)
def test_bad_input_is_named(score, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        score(np.asarray(probs), np.asarray(labels))
