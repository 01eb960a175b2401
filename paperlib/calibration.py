"""Does confidence mean what it says: bins, reliability, ECE, high-confidence error, temperature scaling."""

from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from paperlib import checks


class Reliability(NamedTuple):
    """Reliability table, one entry for each bin (lower, upper] that holds an input."""

    lower: np.ndarray
    upper: np.ndarray
    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


class Histograms(NamedTuple):
    """Counts of inputs by confidence bin, apart for right and wrong predictions; empty bins included."""

    edges: np.ndarray
    correct: np.ndarray
    incorrect: np.ndarray


def confidence(probs):
    """Largest class probability of each input.

    Paper: Sec. momcalibration, definition of the confidence score.
    Shapes: probs (N, K); returns (N,).
    Errors: ValueError for rows that are no distributions, no inputs.
    """
    return checks.probabilities(probs).max(axis=1)


def correctness(probs, labels):
    """Whether the most probable class (the first of equals) of each input is the true one.

    Paper: Sec. momcalibration, definition of R.
    Shapes: probs (N, K), labels (N,) class indices; returns (N,) bool.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs.
    """
    probs = checks.probabilities(probs)
    return probs.argmax(axis=1) == checks.class_indices(labels, *probs.shape)


def reliability(probs, labels, bins=10):
    """Mean confidence, accuracy and count of each equal-width confidence bin; empty bins are left out.

    Paper: Sec. momcalibration, definitions of I_b, S_b, acc and conf. Bins are (lo, hi]; confidence 0 belongs
        to the first.
    Shapes: probs (N, K), labels (N,) class indices; returns a Reliability of at most `bins` entries.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs,
        bins that is not a positive integer.
    """
    right, sure = correctness(probs, labels), confidence(probs)
    edges, index = _binned(sure, bins)
    count = np.bincount(index, minlength=bins)
    filled = count > 0
    count = count[filled]
    return Reliability(
        lower=edges[:-1][filled],
        upper=edges[1:][filled],
        count=count,
        confidence=np.bincount(index, weights=sure, minlength=bins)[filled] / count,
        accuracy=np.bincount(index, weights=right, minlength=bins)[filled] / count,
    )


def ece(probs, labels, bins=10):
    """Expected calibration error: mean |accuracy - confidence| of the bins, weighted by their counts.

    Paper: Sec. momcalibration, ECE in words.
    Shapes: probs (N, K), labels (N,) class indices; returns a float.
    Errors: as reliability.
    """
    table = reliability(probs, labels, bins)
    return float(np.average(np.abs(table.accuracy - table.confidence), weights=table.count))


def high_confidence_error(probs, labels, threshold=0.8, among="confident"):
    """Share of the predictions with confidence above the threshold that are wrong.

    With among="wrong" it is the other reading: the share of the wrong predictions that lie above the threshold.
    Where there is no prediction to take a share of (none above the threshold, or none wrong) it is NaN.

    Paper: Sec. exp1, "percentage of incorrect predictions above this threshold"; D17.
    Shapes: probs (N, K), labels (N,) class indices; returns a float.
    Errors: ValueError for rows that are no distributions, labels out of range, lengths that differ, no inputs,
        a threshold outside (0, 1), an unknown `among`.
    """
    checks.choice("among", among, ("confident", "wrong"))
    threshold = checks.inside(threshold, "threshold", 0, 1)
    wrong, confident = ~correctness(probs, labels), confidence(probs) > threshold
    share, whole = (wrong, confident) if among == "confident" else (confident, wrong)
    return float(share[whole].mean()) if whole.any() else float("nan")


def confidence_histograms(probs, labels, bins=10):
    """Number of right and of wrong predictions in each equal-width confidence bin.

    Paper: Sec. momcalibration, confidence histograms conditioned on correctness; for several runs pass the mean
        of their predictive means (D16).
    Shapes: probs (N, K), labels (N,) class indices; returns Histograms: edges (bins + 1,), counts (bins,).
    Errors: as reliability.
    """
    right = correctness(probs, labels)
    edges, index = _binned(confidence(probs), bins)
    return Histograms(edges, np.bincount(index[right], minlength=bins), np.bincount(index[~right], minlength=bins))


def accuracy_intervals(table, level=0.95):
    """Exact (Clopper-Pearson) confidence interval of the accuracy of each bin of a reliability table.

    Paper: not in the paper, whose bands are over runs; a single fit needs the sampling error of its bins.
    Shapes: table a Reliability of B entries; returns lower (B,), upper (B,).
    Errors: ValueError for a level outside (0, 1).
    """
    tail = (1 - checks.inside(level, "level", 0, 1)) / 2
    right = np.rint(table.accuracy * table.count)
    wrong = table.count - right
    # The interval is closed at 0 (none right) and at 1 (none wrong); the beta quantile has no value there.
    lower = np.where(right > 0, special.betaincinv(np.maximum(right, 1), wrong + 1, tail), 0.0)
    upper = np.where(wrong > 0, special.betainccinv(right + 1, np.maximum(wrong, 1), tail), 1.0)
    return lower, upper


def fit_temperature(logits, labels, bounds=(0.05, 20.0)):
    """Temperature T that minimises the negative log-likelihood of softmax(logits / T).

    The loss is convex in 1/T, so the root of its derivative is the minimum, found to a relative 1e-12. Where
    the loss still falls at a bound the bound is returned: the lower one when every input is classified right
    (the best T would be 0), the upper one when the logits say nothing about the labels (it would be infinite).

    Paper: Sec. exp1 (temperature scaling is what the calibration set is for; no formula is given).
    Shapes: logits or log-probabilities (N, K), labels (N,) class indices; returns a float.
    Errors: ValueError for wrong axes, values not finite, labels out of range, lengths that differ, no inputs,
        bounds that are not 0 < lower < upper.
    """
    logits = checks.real_array(logits, "logits", ("inputs", "classes"))
    labels = checks.class_indices(labels, *logits.shape)
    lower, upper = bounds
    if not 0 < lower < upper < np.inf:
        raise ValueError(f"bounds must be 0 < lower < upper, got {bounds}")
    # Relative to the true class: the loss is mean log sum exp(margin / T), its slope a mean of softmax averages.
    margins = logits - logits[np.arange(len(labels)), labels][:, None]

    def slope(log_inverse):
        weights = special.softmax(margins * np.exp(log_inverse), axis=1)
        return np.einsum("nk,nk->", weights, margins)

    steepest, flattest = -np.log(lower), -np.log(upper)
    if slope(steepest) <= 0:
        return float(lower)
    if slope(flattest) >= 0:
        return float(upper)
    return float(np.exp(-optimize.brentq(slope, flattest, steepest, xtol=1e-12)))


def apply_temperature(logits, temperature):
    """Probabilities softmax(logits / temperature).

    Paper: Sec. exp1 (temperature scaling); eq. softmax with logits divided by the temperature.
    Shapes: logits or log-probabilities (N, K); returns (N, K).
    Errors: ValueError for wrong axes, values not finite, no inputs, a temperature that is not positive and finite.
    """
    logits = checks.real_array(logits, "logits", ("inputs", "classes"))
    return special.softmax(logits / checks.inside(temperature, "temperature", 0, np.inf), axis=1)


def _binned(values, bins):
    """Edges of equal-width bins (lo, hi] over [0, 1], and the bin of each value."""
    if not isinstance(bins, int | np.integer) or bins < 1:
        raise ValueError(f"bins must be a positive integer, got {bins!r}")
    # b / bins is the double nearest to the edge, so 0.7 falls in (0.6, 0.7]; linspace puts that edge off by an ulp.
    edges = np.arange(bins + 1) / bins
    return edges, np.clip(np.searchsorted(edges, values) - 1, 0, bins - 1)
