"""Act or abstain: risk against coverage, thresholds (the paper's and one with a guarantee), areas, bounds.

Uncertainty is any score whose small values are kept; an input is kept where uncertainty <= tau. Equal scores
stand or fall together, so every cut is at the end of a block of ties.
"""

import math
from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import special

from paperlib import checks

# Where the search for a guaranteed threshold starts (share of the calibration set: share of delta): fixed in advance,
# or the guarantee would not hold. Two, since a run from one start alone ends at its first unlucky stretch.
STARTS = {0.25: 0.7, 0.6: 0.3}


class RiskCoverage(NamedTuple):
    """Risk-coverage curve, one entry for each distinct uncertainty, in increasing order."""

    coverage: np.ndarray
    risk: np.ndarray
    threshold: np.ndarray


class RiskBound(NamedTuple):
    """Threshold, what it keeps of the calibration set, and an upper bound of its true risk."""

    threshold: float
    coverage: float
    risk: float
    bound: float


class ClassRiskBounds(NamedTuple):
    """For each class: calibration inputs kept, errors among them, upper bound of the true risk (NaN: none kept)."""

    kept: np.ndarray
    errors: np.ndarray
    bound: np.ndarray


def risk_coverage(uncertainty, correct):
    """Coverage, risk among the kept, and threshold, at the end of each block of equal uncertainties.

    Paper: selective-classification section, risk-coverage curves (fig. 50CE_riskcov_curves); D15 for ties.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a RiskCoverage with an entry a distinct value.
    Errors: ValueError for wrong axes, values not finite, correct that is not 0/1, lengths that differ, no inputs.
    """
    values, kept, errors = _blocks(*_checked(uncertainty, correct))
    return RiskCoverage(kept / kept[-1], errors / kept, values)


def select_threshold(uncertainty, correct, risk=0.1):
    """Threshold tau of the largest coverage whose empirical risk is at most `risk`; -inf (abstain on all) if none.

    Its true risk exceeds `risk` in about half of all calibration draws: see guaranteed_threshold.

    Paper: selective-classification section, choice of tau; D15.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float.
    Errors: as risk_coverage, and a risk outside (0, 1).
    """
    curve = risk_coverage(uncertainty, correct)
    within = np.flatnonzero(curve.risk <= checks.inside(risk, "risk", 0, 1))
    return float(curve.threshold[within[-1]]) if within.size else -np.inf


def retained(uncertainty, tau):
    """Whether each input is kept: uncertainty <= tau.

    Paper: selective-classification section, decision rule.
    Shapes: uncertainty (N,), tau a number, -inf and inf included; returns (N,) bool.
    Errors: ValueError for wrong axes, values not finite, no inputs, tau that is NaN.
    """
    if np.isnan(tau):
        raise ValueError("tau is NaN")
    return checks.real_array(uncertainty, "uncertainty", ("inputs",)) <= tau


def coverage_at_risk(uncertainty, correct, risk=0.1):
    """Largest coverage whose empirical risk is at most `risk`; 0 if none.

    Paper: caption of fig. 50CE_riskcov_curves ("achieved coverage"); D15.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float.
    Errors: as select_threshold.
    """
    return float(np.mean(retained(uncertainty, select_threshold(uncertainty, correct, risk))))


def aurc(uncertainty, correct):
    """Area under the risk-coverage curve: mean of the risk at coverages 1/N, 2/N, ..., 1.

    Within a block of ties the errors are spread evenly: the mean over all ways to break them.

    Paper: not in the paper, which shows the curves; it is the usual one-number summary of one.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float.
    Errors: as risk_coverage.
    """
    _, kept, errors = _blocks(*_checked(uncertainty, correct))
    counts = np.arange(1, kept[-1] + 1)
    return float(np.mean(np.interp(counts, np.append(0, kept), np.append(0, errors)) / counts))


def excess_aurc(uncertainty, correct):
    """AURC above that of the best possible order, which keeps every right prediction before any wrong one.

    Paper: not in the paper; unlike AURC it compares orders of classifiers of different accuracy.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float, 0 for the best order.
    Errors: as risk_coverage.
    """
    _, correct = _checked(uncertainty, correct)
    return aurc(uncertainty, correct) - aurc(~correct, correct)


def augrc(uncertainty, correct):
    """Area under the generalised risk-coverage curve: errors kept as a share of all inputs, against coverage.

    It equals (1 - AUROC) a (1 - a) + (1 - a)^2 / 2, a the accuracy and AUROC that of telling right from wrong.

    Paper: not in the paper; unlike AURC it does not weigh the errors among the first few kept above all others.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float in 0..0.5.
    Errors: as risk_coverage.
    """
    _, kept, errors = _blocks(*_checked(uncertainty, correct))
    return float(np.trapezoid(np.append(0, errors), np.append(0, kept)) / kept[-1] ** 2)


def risk_bound(errors, kept, delta=0.1):
    """Exact (Clopper-Pearson) upper bound of an error rate, `errors` seen in `kept` independent trials.

    Paper: not in the paper, whose thresholds carry no guarantee.
    Shapes: errors and kept numbers or arrays of one shape; returns that shape. 1 where nothing was kept.
    Errors: ValueError for errors outside 0..kept, a delta outside (0, 1).
    """
    errors, kept = np.asarray(errors), np.asarray(kept)
    delta = checks.inside(delta, "delta", 0, 1)
    if ((errors < 0) | (errors > kept)).any():
        raise ValueError(f"errors must lie in 0..kept, got errors {errors}, kept {kept}")
    right = kept - errors
    return np.where(right > 0, special.betainccinv(errors + 1, np.maximum(right, 1), delta), 1.0)


def guaranteed_threshold(uncertainty, correct, risk=0.1, delta=0.1, seed=0):
    """Threshold tau whose true risk is at most `risk` with probability at least 1 - delta; -inf if none is found.

    The probability is over the draw of the calibration set, whose inputs are independent and like those the
    threshold will meet. Nothing is assumed of the score: risk need not grow with it, and it may have ties.

    From each start (a number k of inputs fixed in advance, STARTS) the cut moves up, one block of ties at a
    time, as long as the exact binomial p-value of "the true risk is above `risk`" stays within a budget; the
    starts share delta, and one whose run reaches the next start hands its budget on. The k inputs below the
    next larger one are independent draws from that region, so the p-value is exact there; where the true risk
    first passes `risk` it is exact again. docs/guarantee.md has the proof. A start may fall within a block of
    ties, which `seed` then orders; the order of the inputs does not matter.

    Paper: not in the paper; it is the paper's choice of tau with the promise that "approximately r" lacks.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a float, one of the uncertainties or -inf.
    Errors: as risk_coverage, and a risk or delta outside (0, 1).
    """
    risk, delta = checks.inside(risk, "risk", 0, 1), checks.inside(delta, "delta", 0, 1)
    uncertainty, correct = _checked(uncertainty, correct)
    # Sorted by outcome too before ties are shuffled: the order of the inputs leaves no trace.
    order = np.lexsort((correct, uncertainty))
    values, wrong = uncertainty[order], ~correct[order]
    shuffle = np.lexsort((np.random.PCG64(seed).random_raw(len(values)), values))
    errors, kept = np.cumsum(wrong[shuffle]).astype(float), np.arange(1, len(values) + 1)
    block_end = np.append(values[1:] != values[:-1], True)

    starts = _starts(len(values), risk, delta)
    budget, certified = 0.0, -np.inf
    for start, stop in pairwise([*starts, len(values)]):
        budget += starts[start]
        run = slice(start - 1, stop)
        tested = block_end[run].copy()
        tested[[0, -1]] = True
        failed = tested & (special.bdtr(errors[run], kept[run], risk) > budget)
        passed = failed.argmax() if failed.any() else len(failed)
        # The start itself only opens the run: a cut is an end of a block beyond it.
        cuts = np.flatnonzero(block_end[run][1:passed])
        if cuts.size:
            certified = values[start + cuts[-1]]
        if failed.any():
            budget = 0.0
    return float(certified)


def risk_bound_at_coverage(uncertainty, correct, coverage, delta=0.1):
    """Threshold that keeps a share `coverage` of the calibration set, and the bound of its true risk.

    The true risk is at most the bound with probability at least 1 - delta, for one coverage named in advance.
    A block of ties that would have to be cut is left out, so the coverage kept can be smaller, down to none.

    Paper: not in the paper; guaranteed_threshold in the other direction.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1; returns a RiskBound; threshold inf keeps every input.
    Errors: as risk_coverage, and a coverage outside (0, 1], a delta outside (0, 1).
    """
    uncertainty, correct = _checked(uncertainty, correct)
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must lie in (0, 1], got {coverage}")
    inputs = len(uncertainty)
    wanted = int(np.ceil(round(coverage * inputs, 9)))
    # The inputs strictly below the next larger one are independent draws from the region below it.
    first_out = np.inf if wanted == inputs else np.partition(uncertainty, wanted)[wanted]
    kept = uncertainty < first_out
    errors = np.count_nonzero(kept & ~correct)
    bound = float(risk_bound(errors, kept.sum(), delta))
    if not kept.any():
        return RiskBound(-np.inf, 0.0, 0.0, bound)
    tau = first_out if np.isinf(first_out) else np.nextafter(first_out, -np.inf)
    return RiskBound(float(tau), float(kept.mean()), float(errors / kept.sum()), bound)


def class_risk_bounds(uncertainty, correct, predicted, classes, tau, delta=0.1, searched=True):
    """Upper bound of the true risk among the kept inputs of each predicted class, all of them at once.

    All bounds hold together with probability at least 1 - delta. With searched=True (tau was chosen with the
    help of these inputs, by any rule) delta is shared by all it can be: one of their uncertainties, or inf.
    With searched=False tau came from elsewhere, or from a coverage named in advance. Small classes get bounds
    near 1.

    Paper: not in the paper; a risk kept on average can be broken in a small class.
    Shapes: uncertainty (N,), correct (N,) bool or 0/1, predicted (N,) class indices, tau a number; returns
        ClassRiskBounds with arrays (classes,).
    Errors: as risk_coverage and retained, a class out of range, a delta outside (0, 1), searched with a finite
        tau that is not among the uncertainties.
    """
    uncertainty, correct = _checked(uncertainty, correct)
    predicted = checks.class_indices(predicted, len(uncertainty), classes, "predicted")
    delta = checks.inside(delta, "delta", 0, 1)
    keep = retained(uncertainty, tau)
    kept, errors = (np.bincount(predicted[mask], minlength=classes) for mask in (keep, keep & ~correct))
    trials, level = kept, delta / classes
    if searched:
        at_tau = uncertainty == tau
        if np.isfinite(tau) and not at_tau.any():
            raise ValueError(f"tau {tau} is not one of the uncertainties, so it was not found by searching them")
        # Given the input that sits at tau, the others are independent of the cut: leave it out. Taking a right
        # one away from every class that has one there is on the safe side whichever input it is.
        trials = kept - (np.bincount(predicted[at_tau & correct], minlength=classes) > 0)
        level /= len(uncertainty) + 1
    return ClassRiskBounds(kept, errors, np.where(kept > 0, risk_bound(errors, trials, level), np.nan))


def _checked(uncertainty, correct):
    uncertainty = checks.real_array(uncertainty, "uncertainty", ("inputs",))
    outcome = checks.real_array(correct, "correct", ("inputs",))
    checks.same_length(len(uncertainty), len(outcome), "uncertainty", "correct")
    checks.first_bad((outcome != 0) & (outcome != 1), outcome, "correct", "is neither 0 nor 1")
    return uncertainty, outcome.astype(bool)


def _blocks(uncertainty, correct):
    """Distinct uncertainties in increasing order, with the inputs and the errors up to and including each."""
    values, block = np.unique(uncertainty, return_inverse=True)
    return values, np.bincount(block).cumsum(), np.bincount(block[~correct], minlength=len(values)).cumsum()


def _starts(inputs, risk, delta):
    """Counts at which a guaranteed search starts, with their budgets; from the sizes alone, never from the data."""
    first_budget = delta * next(iter(STARTS.values()))
    # Below this count a single error already fails the first start.
    lowest = 1 + bisect_left(range(1, inputs), True, key=lambda count: special.bdtr(1.0, count, risk) <= first_budget)
    starts = {}
    for share, budget in STARTS.items():
        start = max(min(max(math.ceil(share * inputs), lowest), inputs - 1), 1)
        starts[start] = starts.get(start, 0.0) + budget * delta
    return starts
