"""Reliability, ECE, high-confidence error and temperature against literal loops, torchmetrics and scipy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats
from torchmetrics.functional.classification import multiclass_calibration_error

from paperlib import calibration, scores


def sample(inputs=500, classes=4, seed=0, concentration=0.5):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, concentration), size=inputs), rng.integers(0, classes, size=inputs)


def literal_bin(value, bins):
    for b in range(1, bins + 1):
        if (b - 1) / bins < value <= b / bins:
            return b - 1
    return 0


@given(st.integers(0, 1000), st.integers(1, 300), st.sampled_from([1, 2, 10, 15]))
def test_reliability_by_a_literal_loop(seed, inputs, bins):
    probs, labels = sample(inputs, seed=seed)
    table = calibration.reliability(probs, labels, bins)
    expected = {}
    for p, y in zip(probs, labels, strict=True):
        expected.setdefault(literal_bin(p.max(), bins), []).append((p.max(), p.argmax() == y))
    assert [round(low * bins) for low in table.lower] == sorted(expected)
    for row, b in enumerate(sorted(expected)):
        sure, right = zip(*expected[b], strict=True)
        assert table.count[row] == len(sure)
        assert table.confidence[row] == pytest.approx(np.mean(sure))
        assert table.accuracy[row] == pytest.approx(np.mean(right))
        assert table.lower[row] < table.confidence[row] <= table.upper[row] + 1e-12
    assert np.average(table.accuracy, weights=table.count) == pytest.approx(scores.accuracy(probs, labels))


@pytest.mark.parametrize("bins", [5, 10, 20, 100])
def test_an_edge_belongs_to_the_bin_below_it(bins):
    edges = [float(f"{b / bins:.6g}") for b in range(1, bins + 1)]  # as a user writes them: 0.7, not 7 * 0.1
    for b, edge in enumerate(edges):
        if edge >= 0.5:
            table = calibration.reliability([[edge, 1 - edge]], np.array([0]), bins)
            assert (table.lower[0], table.upper[0]) == (b / bins, (b + 1) / bins)


def test_confidence_a_little_above_one_stays_in_the_last_bin():
    table = calibration.reliability([[1.0004, 0.0]], np.array([0]))
    assert (table.lower.tolist(), table.upper.tolist(), table.count.tolist()) == ([0.9], [1.0], [1])


@pytest.mark.parametrize("bins", [5, 10, 15])
@pytest.mark.parametrize("seed", range(3))
def test_ece_agrees_with_torchmetrics(bins, seed):
    probs, labels = sample(2000, classes=3, seed=seed)
    expected = multiclass_calibration_error(
        torch.from_numpy(probs), torch.from_numpy(labels), num_classes=3, n_bins=bins, norm="l1"
    )
    assert calibration.ece(probs, labels, bins) == pytest.approx(float(expected), abs=1e-6)


def test_ece_keeps_full_confidence_in_the_last_bin():
    # Where torchmetrics opens a bin of its own for confidence 1: here one bin holds 0.95 (wrong) and 1 (right).
    probs, labels = np.array([[0.95, 0.05], [1.0, 0.0]]), np.array([1, 0])
    assert calibration.ece(probs, labels) == pytest.approx(0.975 - 0.5)
    phantom = multiclass_calibration_error(torch.from_numpy(probs), torch.from_numpy(labels), 2, n_bins=10)
    assert float(phantom) == pytest.approx(0.475) or float(phantom) == pytest.approx(0.95 / 2)


def test_ece_of_a_calibrated_and_of_an_overconfident_classifier():
    labels = np.array([0] * 8 + [1] * 2)
    assert calibration.ece(np.tile([0.8, 0.2], (10, 1)), labels) == pytest.approx(0, abs=1e-12)
    assert calibration.ece(np.tile([1.0, 0.0], (10, 1)), labels) == pytest.approx(0.2)


def test_high_confidence_error_both_ways():
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.85, 0.15], [0.6, 0.4], [0.7, 0.3], [0.8, 0.2]])
    labels = np.array([0, 0, 0, 1, 1, 1, 1])
    assert calibration.high_confidence_error(probs, labels) == 1 / 4  # 0.8 itself is not above 0.8
    assert calibration.high_confidence_error(probs, labels, among="wrong") == 1 / 4
    assert calibration.high_confidence_error(probs, labels, threshold=0.65) == 3 / 6
    assert calibration.high_confidence_error(probs, labels, threshold=0.65, among="wrong") == 3 / 4


def test_high_confidence_error_of_no_prediction_is_nan():
    assert math.isnan(calibration.high_confidence_error([[0.6, 0.4]], np.array([0])))
    assert math.isnan(calibration.high_confidence_error([[0.9, 0.1]], np.array([0]), among="wrong"))


def test_histograms_add_up_to_the_reliability_counts():
    probs, labels = sample()
    shown, table = calibration.confidence_histograms(probs, labels), calibration.reliability(probs, labels)
    total = shown.correct + shown.incorrect
    assert shown.edges.tolist() == [b / 10 for b in range(11)]
    assert total[total > 0].tolist() == table.count.tolist()
    assert (shown.correct[total > 0] / table.count).tolist() == pytest.approx(table.accuracy.tolist())
    assert shown.correct.sum() == calibration.correctness(probs, labels).sum()


def test_intervals_agree_with_scipy_and_are_closed_at_the_ends():
    table = calibration.Reliability(
        lower=np.array([0.0, 0.1, 0.2]),
        upper=np.array([0.1, 0.2, 0.3]),
        count=np.array([12, 30, 5]),
        confidence=np.array([0.05, 0.15, 0.25]),
        accuracy=np.array([0.0, 11 / 30, 1.0]),
    )
    low, high = calibration.accuracy_intervals(table, level=0.9)
    for row, (right, count) in enumerate([(0, 12), (11, 30), (5, 5)]):
        expected = stats.binomtest(right, count).proportion_ci(0.9, method="exact")
        assert (low[row], high[row]) == pytest.approx((expected.low, expected.high))


def test_temperature_recovers_the_truth():
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(40_000, 5))
    labels = (special.softmax(logits, axis=1).cumsum(axis=1) < rng.random((len(logits), 1))).sum(axis=1)
    assert calibration.fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.03)


@given(st.integers(0, 200), st.floats(0.3, 3.0))
def test_temperature_is_the_minimum_and_scales_with_the_logits(seed, factor):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(200, 4))
    labels = (logits + rng.normal(size=logits.shape)).argmax(axis=1)

    def loss(temperature):
        return scores.nll(calibration.apply_temperature(logits, temperature), labels)

    best = calibration.fit_temperature(logits, labels)
    found = optimize.minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert best == pytest.approx(found.x, rel=1e-3)
    assert loss(best) <= found.fun + 1e-12
    assert calibration.fit_temperature(factor * logits, labels) == pytest.approx(factor * best, rel=1e-9)
    shifted = special.log_softmax(logits, axis=1)
    assert calibration.fit_temperature(shifted, labels) == pytest.approx(best, rel=1e-9)


def test_temperature_without_a_minimum_is_a_bound():
    logits = np.array([[2.0, 0.0], [0.0, 1.0]])
    assert calibration.fit_temperature(logits, np.array([0, 1])) == 0.05
    assert calibration.fit_temperature(logits, np.array([1, 0])) == 20.0
    assert calibration.fit_temperature(logits, np.array([0, 1]), bounds=(0.5, 2)) == 0.5
    assert calibration.fit_temperature(1e6 * logits, np.array([0, 1])) == 0.05


def test_temperature_one_and_class_order_change_nothing():
    probs, _ = sample()
    logits = np.log(probs)
    assert calibration.apply_temperature(logits, 1.0) == pytest.approx(probs)
    hot = calibration.apply_temperature(logits, 7.0)
    assert (hot.argmax(axis=1) == probs.argmax(axis=1)).all()
    assert (hot.max(axis=1) <= probs.max(axis=1)).all()


GOOD = (np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([0, 1]))


@pytest.mark.parametrize(
    "function",
    [
        calibration.correctness,
        calibration.reliability,
        calibration.ece,
        calibration.high_confidence_error,
        calibration.confidence_histograms,
    ],
)
def test_bad_predictions_are_named(function):
    probs, labels = GOOD
    for bad, message in [
        (probs[0], "axes"),
        (probs * [[1], [np.nan]], r"probs\[1, 0\] is not finite"),
        (probs - [[0], [0.4]], r"probs\[1, 0\] is negative"),
        (probs * [[1], [2]], r"probs\[1\] does not sum to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            function(bad, labels)
    with pytest.raises(ValueError, match=r"labels\[0\] is outside"):
        function(probs, labels + 5)
    with pytest.raises(ValueError, match="labels has 1"):
        function(probs, labels[:1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calibration.confidence(GOOD[0] * 2), "sum to 1"),
        (lambda: calibration.ece(*GOOD, bins=0), "bins"),
        (lambda: calibration.reliability(*GOOD, bins=2.5), "bins"),
        (lambda: calibration.confidence_histograms(*GOOD, bins=-1), "bins"),
        (lambda: calibration.high_confidence_error(*GOOD, threshold=1.0), "threshold"),
        (lambda: calibration.high_confidence_error(*GOOD, among="all"), "confident, wrong"),
        (lambda: calibration.accuracy_intervals(calibration.reliability(*GOOD), level=95), "level"),
        (lambda: calibration.fit_temperature(np.full((2, 2), -np.inf), GOOD[1]), "not finite"),
        (lambda: calibration.fit_temperature(np.log(GOOD[0]), np.array([0, 2])), "outside"),
        (lambda: calibration.fit_temperature(np.log(GOOD[0]), GOOD[1], bounds=(2, 1)), "bounds"),
        (lambda: calibration.apply_temperature(np.log(GOOD[0]), 0), "temperature"),
        (lambda: calibration.apply_temperature(np.log(GOOD[0]), np.nan), "temperature"),
        (lambda: calibration.apply_temperature(np.zeros(3), 1), "axes"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
