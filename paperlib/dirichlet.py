"""From M probability vectors for each of N inputs to N Dirichlets, and the uncertainty measures of a Dirichlet.

Three estimators share one set of statistics. `fit_moments` is the paper's Algorithm 1, `fit_fixed_point` its
Algorithm 2 to the letter, `fit_mle` the maximum that Algorithm 2 approaches. `MomentAccumulator` collects the
statistics member by member, for ensembles that do not fit in memory. Numpy in, numpy out, float64 inside.

How accurate is `fit_mle`? Taken as given, mean log-probabilities fix alpha only up to about
2e-16 * alpha_0 / (K - 1): for a concentrated ensemble all information sits in the last digits. Therefore the
statistics are the mean log-probabilities and, class by class, the difference of the arithmetic and the geometric
mean, summed from the deviations between members without cancellation. Two consequences: members need to sum to 1
only roughly (the estimate is that of the normalised members), and alpha keeps a relative error below 1e-9 for
alpha_0 from 1e-3 to 1e12 and K from 2 to 1000 (measured against a 60-digit reference: at most 2e-14).
"""

import enum
import functools
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, psi, xlogy

from paperlib import _kernels as kernels
from paperlib import checks

AXES = ("members", "inputs", "classes")
AGGREGATES = {
    "mean": kernels.MEAN,
    "median": kernels.MEDIAN,
    "geometric": kernels.GEOMETRIC,
    "trace": kernels.TRACE,
}
MAX_ALPHA0 = kernels.MAX_ALPHA0
MIN_ALPHA0 = kernels.MIN_ALPHA0

# Values converted at a time where the input is not a contiguous float32 or float64 array.
CONVERTED_AT_ONCE = 2**16
# From here on the asymptotic series of the gamma functions are exact to float64.
SERIES_FROM = 20.0


class Flag(enum.IntFlag):
    """What was special about an input; `DirichletFit.flags` holds the sum, 0 for an ordinary input.

    `Flag(int(fit.flags[i]))` prints the names, `fit.flags & Flag.NO_SPREAD` selects inputs.

    Paper: not in the paper, which takes every input to be regular; the cases are those where its formulas fail.
    """

    #: The members are equal up to rounding (or all but): no finite concentration. alpha_0 is MAX_ALPHA0.
    NO_SPREAD = kernels.NO_SPREAD
    #: The members spread at least as much as one-hot vectors: no positive concentration. alpha_0 is MIN_ALPHA0.
    OVERDISPERSED = kernels.OVERDISPERSED
    #: Some class is the same in all members up to rounding; its own estimate of alpha_0 is left out.
    CONSTANT_CLASS = kernels.CONSTANT_CLASS
    #: Some class is 0 in all members: its alpha is 0 and its own estimate of alpha_0 is left out.
    ZERO_CLASS = kernels.ZERO_CLASS
    #: Some log-probability is -inf: the likelihood has no maximum. The class has alpha 0, the limit.
    UNDERFLOW = kernels.UNDERFLOW
    #: Probabilities of 0 were raised to the smallest positive number of their type before taking logarithms.
    CLIPPED = kernels.CLIPPED
    #: alpha is accurate, but 1e-15 added to all mean log-probabilities would move it by more than 1e-9 (relative):
    #: estimates made from the mean log-probabilities alone differ by that.
    SENSITIVE = kernels.SENSITIVE


UNDETERMINED = int(Flag.NO_SPREAD | Flag.OVERDISPERSED)


@dataclass(frozen=True)
class DirichletFit:
    """N fitted Dirichlets and, for each, whether the fit is to be trusted.

    Paper: the outcome of Algorithms 1 and 2 (alg:mom-dirichlet, alg:mle-dirichlet).
    Shapes: alpha (N, K) float64; converged (N,) bool, flags (N,) int (sums of Flag), iterations (N,) int and
        gradient_norm (N,), the norm of the log-likelihood's gradient a member (None for moments).
    """

    alpha: np.ndarray
    converged: np.ndarray
    flags: np.ndarray
    iterations: np.ndarray
    gradient_norm: np.ndarray | None = None

    @property
    def alpha0(self):
        """Total concentrations (N,). Paper: eq:mvbfunc."""
        return self.alpha.sum(axis=-1)

    @property
    def mean(self):
        """Predictive means (N, K). Paper: eq:meanvar."""
        return mean(self.alpha)

    @property
    def total_variance(self):
        """Total predictive variances (N,). Paper: eq:totalvar."""
        return total_variance(self.alpha)

    @property
    def entropy(self):
        """Entropies of the predictive means (N,). Paper: not in the paper; see `entropy`."""
        return entropy(self.alpha)

    @property
    def mutual_information(self):
        """Mutual informations (N,). Paper: not in the paper; see `mutual_information`."""
        return mutual_information(self.alpha)


# -------------------------------------------------------------------------------------- measures of a Dirichlet


def _concentrations(alpha, allow_zero=True):
    alpha = np.asarray(alpha)
    if alpha.ndim == 0:
        raise ValueError("alpha must have at least 1 axis (classes), got a single number")
    alpha = checks.real_array(alpha, "alpha", ("...",) * (alpha.ndim - 1) + ("classes",))
    if allow_zero:
        checks.first_bad(alpha < 0, alpha, "alpha", "is negative")
        checks.first_bad(alpha.sum(axis=-1) == 0, alpha.sum(axis=-1), "alpha", "sums to 0")
    else:
        checks.first_bad(alpha <= 0, alpha, "alpha", "is not positive")
    return alpha


def _log_minus_digamma(x):
    """log x - digamma(x), about 1 / (2 x), without cancellation."""
    u = 1 / np.maximum(x, SERIES_FROM)
    v = u * u
    series = u / 2 + v * (1 / 12 - v * (1 / 120 - v * (1 / 252 - v * (1 / 240 - v / 132))))
    return np.where(x >= SERIES_FROM, series, np.log(x) - psi(x))


def _stirling_rest(x):
    """log Gamma(x) - ((x - 1/2) log x - x + log(2 pi) / 2), about 1 / (12 x), without cancellation."""
    u = 1 / np.maximum(x, SERIES_FROM)
    v = u * u
    series = u * (1 / 12 - v * (1 / 360 - v * (1 / 1260 - v * (1 / 1680 - v * (1 / 1188)))))
    small = np.minimum(x, SERIES_FROM)
    direct = gammaln(small) - ((small - 0.5) * np.log(small) - small + 0.5 * np.log(2 * np.pi))
    return np.where(x >= SERIES_FROM, series, direct)


def log_density(probs, alpha):
    """Logarithm of the Dirichlet density at probs.

    Paper: eq:dirpdf with eq:mvbfunc, in Stirling's form, so that digits survive a large alpha.
    Shapes: probs and alpha (..., K), broadcast against each other -> (...).
    Errors: ValueError if alpha is not positive, or probs are not probabilities, or their shapes do not go together.
    """
    alpha = _concentrations(alpha, allow_zero=False)
    probs = np.asarray(probs)
    probs = checks.probabilities(probs, "probs", ("...",) * (probs.ndim - 1) + ("classes",))
    if probs.shape[-1] != alpha.shape[-1]:
        raise ValueError(f"probs has {probs.shape[-1]} classes, but alpha has {alpha.shape[-1]}")
    total = alpha.sum(axis=-1)
    expected = alpha / total[..., None]
    near = np.abs(probs - expected) < 0.5 * expected  # where log(p / mean) would cancel
    ratio = np.log1p(np.where(near, (probs - expected) / expected, 0.0))
    close = alpha * ratio - np.log(np.where(near, probs, 1.0))
    main = np.where(near, close, xlogy(alpha - 1, probs) - alpha * np.log(expected))
    corrections = 0.5 * np.log(alpha) - _stirling_rest(alpha) - 0.5 * np.log(2 * np.pi)
    return (main + corrections).sum(axis=-1) - 0.5 * np.log(total) + _stirling_rest(total) + 0.5 * np.log(2 * np.pi)


def precision(alpha):
    """Total concentration alpha_0, the precision of a Dirichlet.

    Paper: eq:mvbfunc.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    return _concentrations(alpha).sum(axis=-1)


def mean(alpha):
    """Mean of a Dirichlet, its predictive probabilities.

    Paper: eq:meanvar.
    Shapes: alpha (..., K) -> (..., K).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    alpha = _concentrations(alpha)
    return alpha / alpha.sum(axis=-1, keepdims=True)


def variance(alpha):
    """Variance of each class probability under a Dirichlet.

    Paper: eq:meanvar.
    Shapes: alpha (..., K) -> (..., K).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    alpha = _concentrations(alpha)
    total = alpha.sum(axis=-1, keepdims=True)
    return (alpha / total) * ((total - alpha) / total) / (total + 1)


def total_variance(alpha):
    """Total variance: the sum of the class variances, the paper's ordering of inputs.

    Paper: eq:totalvar.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    return variance(alpha).sum(axis=-1)


def entropy(alpha):
    """Entropy (nats) of a Dirichlet's mean: the total uncertainty of the prediction.

    Paper: not in the paper; one of the orderings total variance is compared with.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    expected = mean(alpha)
    return -xlogy(expected, expected).sum(axis=-1)


def expected_entropy(alpha):
    """Mean entropy (nats) of a probability vector drawn from a Dirichlet: the uncertainty of the data.

    Paper: not in the paper; the part of the entropy that is no disagreement.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    alpha = _concentrations(alpha)
    return psi(alpha.sum(axis=-1) + 1) - (mean(alpha) * psi(alpha + 1)).sum(axis=-1)


def mutual_information(alpha):
    """Mutual information (nats) of label and probability vector: entropy less expected entropy.

    Paper: not in the paper; one of the orderings total variance is compared with.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha has a negative or non-finite value, or is 0 in all classes.
    """
    alpha = _concentrations(alpha)
    total = alpha.sum(axis=-1, keepdims=True)
    positive = np.where(alpha > 0, alpha, 1.0)
    # Entropy and expected entropy agree in all but the last digits when alpha is large, so they are not subtracted.
    classwise = np.log1p(1 / positive) - _log_minus_digamma(positive + 1)
    common = np.log1p(1 / total) - _log_minus_digamma(total + 1)
    return (alpha / total * (classwise - common)).sum(axis=-1)


def differential_entropy(alpha):
    """Differential entropy (nats) of a Dirichlet with respect to its first K - 1 coordinates.

    Paper: not in the paper; the usual entropy of eq:dirpdf, in Stirling's form, so that digits survive a large alpha.
    Shapes: alpha (..., K) -> (...).
    Errors: ValueError if alpha is not positive and finite.
    """
    alpha = _concentrations(alpha, allow_zero=False)
    total, classes = alpha.sum(axis=-1), alpha.shape[-1]
    classwise = 0.5 * np.log(alpha) + _stirling_rest(alpha) + (alpha - 1) * _log_minus_digamma(alpha)
    common = _stirling_rest(total) + (total - classes) * _log_minus_digamma(total)
    constant = (classes - 1) * 0.5 * np.log(2 * np.pi)
    return classwise.sum(axis=-1) - common + constant - (classes - 0.5) * np.log(total)


def inverse_digamma(y):
    """The x > 0 whose digamma is y.

    Paper: psi^{-1} of eq:fpi.
    Shapes: any -> the same; a number for a number. -inf gives 0; above 709.8 the answer exceeds float64 and is inf.
    Errors: ValueError if y is not numeric or has a NaN.
    """
    y = np.asarray(y)
    if not np.issubdtype(y.dtype, np.number):
        raise ValueError(f"y must be numeric, got dtype {y.dtype}")
    y = y.astype(np.float64)
    checks.first_bad(np.isnan(y), y, "y", "is not a number")
    x = np.empty(y.size)
    kernels.inverse_digamma_all(y.ravel(), x)
    return x.reshape(y.shape)[()]


# ------------------------------------------------------------------------------------------ from an ensemble


def _ensemble(values, name, members=2):
    """An ensemble as an array whose shape and type are right; its values are checked by the pass over them."""
    values = np.asarray(values)
    if values.ndim != 3:
        raise ValueError(f"{name} must have 3 axes ({', '.join(AXES)}), got shape {values.shape}")
    if values.size == 0:
        raise ValueError(f"{name} is empty: shape {values.shape}")
    if not (np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)):
        raise ValueError(f"{name} must be real numbers, got dtype {values.dtype}")
    if values.shape[0] < members:
        raise ValueError(f"{name} has 1 member, but a Dirichlet needs at least 2")
    if values.shape[2] < 2:
        raise ValueError(f"{name} has 1 class, but a Dirichlet needs at least 2")
    return values


def _input_blocks(values):
    at_once = max(1, CONVERTED_AT_ONCE // (values.shape[0] * values.shape[2]))
    return [slice(start, start + at_once) for start in range(0, values.shape[1], at_once)]


def _run_pass(kernel, values, convert=None):
    """Two (N, K) statistics of an ensemble, and whether its values look wrong; what is not ready is converted."""
    first, second = np.empty(values.shape[1:]), np.empty(values.shape[1:])
    ready = values.flags.c_contiguous and values.dtype in (np.float32, np.float64)
    if ready and convert is None:
        return first, second, kernel(values, checks.SUM_TOLERANCE, first, second)
    suspicious = False
    for block in _input_blocks(values):
        part = np.ascontiguousarray(values[:, block], np.float64)
        part = part if convert is None else convert(part)
        suspicious |= kernel(part, checks.SUM_TOLERANCE, first[block], second[block])
    return first, second, suspicious


def _first_member(values, convert=None):
    first = np.ascontiguousarray(values[0], np.float64)
    return first if convert is None else convert(first)


def _moments(probs, convert=None):
    """First member, mean less the first member, and sums of squared deviations.

    With convert, of convert(probs), where probs is an ensemble that has passed its own checks.
    """
    offset, squares, suspicious = _run_pass(kernels.moments, probs, convert)
    if suspicious and convert is None:
        checks.probabilities(probs, "probs", AXES)
    return _first_member(probs, convert), offset, squares


def _log_moments(log_probs, convert=None):
    """First member, mean less the first member, and excess (see `_kernels`); convert as in `_moments`."""
    offset, excess, suspicious = _run_pass(kernels.log_moments, log_probs, convert)
    if suspicious and convert is None:
        log_probs = log_probs.astype(np.float64)
        bad = np.isnan(log_probs) | (log_probs > checks.SUM_TOLERANCE)
        checks.first_bad(bad, log_probs, "log_probs", "is no log-probability")
        sums = np.exp(log_probs).sum(axis=-1)
        checks.first_bad(np.abs(sums - 1) > checks.SUM_TOLERANCE, sums, "exp(log_probs)", "does not sum to 1")
    return np.maximum(_first_member(log_probs, convert), kernels.LOWEST_FINITE), offset, excess


@functools.cache
def _spacing(dtype):
    """Relative and smallest absolute spacing of the numbers of a type."""
    info = np.finfo(dtype if np.issubdtype(dtype, np.floating) else np.float64)
    return max(float(info.eps), kernels.EPSILON), float(info.smallest_subnormal)


def _moment_fit(first, offset, squares, members, spacing, aggregate):
    code = AGGREGATES[checks.choice("aggregate", aggregate, AGGREGATES)]
    alpha, flags = np.empty_like(offset), np.zeros(len(offset), np.int64)
    kernels.concentration(first, offset, squares, members, *spacing, code, alpha, flags)
    return DirichletFit(alpha, (flags & UNDETERMINED) == 0, flags, np.zeros(len(offset), np.int64))


def _fixed_point_fit(log_mean, start, iterations, tol):
    if isinstance(iterations, bool) or not isinstance(iterations, int | np.integer) or iterations < 1:
        raise ValueError(f"iterations must be a whole number of at least 1, got {iterations!r}")
    if not tol >= 0:
        raise ValueError(f"tol must not be negative, got {tol!r}")
    alpha = _concentrations(start).copy()
    if alpha.shape != log_mean.shape:
        raise ValueError(f"init must have the shape {log_mean.shape} (inputs, classes), got {alpha.shape}")
    inputs, classes = alpha.shape
    converged, steps, gradient_norm = np.zeros(inputs, bool), np.zeros(inputs, np.int64), np.zeros(inputs)
    kernels.fixed_point(log_mean, int(iterations), float(tol), alpha, converged, steps, gradient_norm)
    underflow = np.isneginf(log_mean).any(axis=-1)
    alpha[alpha.sum(axis=-1) == 0] = MIN_ALPHA0 / classes
    flags = np.where(underflow, int(Flag.UNDERFLOW), 0)
    return DirichletFit(alpha, converged & ~underflow, flags, steps, gradient_norm)


def _mle_fit(log_mean, excess, epsilon):
    inputs = len(log_mean)
    alpha, flags, steps = np.empty_like(log_mean), np.zeros(inputs, np.int64), np.zeros(inputs, np.int64)
    converged, gradient_norm = np.zeros(inputs, bool), np.zeros(inputs)
    kernels.maximum_likelihood(log_mean, excess, epsilon, alpha, flags, converged, steps, gradient_norm)
    return DirichletFit(alpha, converged, flags, steps, gradient_norm)


def fit_moments(probs, aggregate="mean"):
    """Dirichlets whose means are the ensemble's and whose concentrations match the spread between members.

    `aggregate` says how the class-wise estimates of alpha_0 become one: "mean" is the paper, "median" and
    "geometric" resist a class that is nearly saturated, "trace" reproduces the ensemble's total variance.
    `converged` is False where the members determine no concentration; `flags` says why.

    Paper: Algorithm 1 (alg:mom-dirichlet) and the formulas of sec:momalphas; D02 for the other aggregations.
    Shapes: probs (M, N, K), M and K at least 2, float16, float32 or float64 -> DirichletFit of N inputs.
    Errors: ValueError naming the first value that is negative or not finite, or the first vector that does not sum
        to 1; for a wrong number of axes, an empty array, one member, one class, an unknown aggregate.
    """
    checks.choice("aggregate", aggregate, AGGREGATES)
    probs = _ensemble(probs, "probs")
    return _moment_fit(*_moments(probs), len(probs), _spacing(probs.dtype), aggregate)


def fit_fixed_point(log_probs, init=None, iterations=20, tol=1e-6):
    """Dirichlets refined towards maximum likelihood by a few fixed-point steps: the paper's estimator.

    `converged` says for each input whether the relative step fell below tol within the iterations allowed. Often
    it did not; `fit_mle` gives the limit.

    Paper: Algorithm 2 (alg:mle-dirichlet), eq:fpi; the start is Algorithm 1 on exp(log_probs) unless init is given.
    Shapes: log_probs (M, N, K), M and K at least 2; init (N, K) concentrations -> DirichletFit of N inputs.
    Errors: ValueError as in `fit_mle`; for an init of another shape or with negative values, iterations below 1, a
        negative tol.
    """
    log_probs = _ensemble(log_probs, "log_probs")
    log_first, log_offset, _ = _log_moments(log_probs)
    if init is None:
        moments = _moments(log_probs, convert=np.exp)
        init = _moment_fit(*moments, len(log_probs), _spacing(log_probs.dtype), "mean").alpha
    return _fixed_point_fit(log_first + log_offset, init, iterations, tol)


def fit_mle(log_probs):
    """Maximum-likelihood Dirichlets, converged to float64 precision.

    Newton's method on the likelihood equations of all classes, in a form that loses no digits for large alpha_0 (see
    the head of this module). `converged` is False where the likelihood has no maximum: all members equal
    (NO_SPREAD) or a log-probability of -inf (UNDERFLOW). Two different members are enough for any K.

    Paper: the maximum of LL(alpha) in sec:momalphas, to which Algorithm 2 (alg:mle-dirichlet) converges.
    Shapes: log_probs (M, N, K), M and K at least 2, float32 or float64 -> DirichletFit of N inputs.
    Errors: ValueError naming the first value that is NaN or positive, or the first vector whose exponentials do not
        sum to 1; for a wrong number of axes, an empty array, one member, one class.
    """
    log_probs = _ensemble(log_probs, "log_probs")
    log_first, log_offset, excess = _log_moments(log_probs)
    return _mle_fit(log_first + log_offset, excess, _spacing(log_probs.dtype)[0])


class MomentAccumulator:
    """The statistics of all three estimators, fed member by member: memory for N x K numbers, however large M is.

    Members come as probabilities or as log-probabilities, one at a time or in chunks, and accumulators of different
    members merge. The fits equal those of the whole ensemble at once.

    Paper: not in the paper, which holds its ensembles in memory; the statistics are those of Algorithms 1 and 2.
    Shapes: mean, variance and mean_log_probs are (N, K).
    Errors: ValueError if a property or fit needs more members than there are.
    """

    def __init__(self):
        self.members = 0
        self._spacing = (0.0, 0.0)

    def add(self, probs=None, *, log_probs=None):
        """Add a member or a chunk of members, as probabilities or as log-probabilities, and return self.

        Probabilities of 0 have no logarithm: for the likelihood they count as the smallest positive number of
        their type, and the input is flagged CLIPPED. Log-probabilities avoid that.

        Paper: the sums of Algorithms 1 and 2; D18 for the clipping.
        Shapes: (N, K) or (M, N, K); N and K are those of the first call.
        Errors: ValueError as in `fit_moments` and `fit_mle`; for both or none of the arguments, or other N or K.
        """
        if (probs is None) == (log_probs is None):
            raise ValueError("give either probs or log_probs")
        name, values = ("probs", probs) if log_probs is None else ("log_probs", log_probs)
        values = np.asarray(values)
        values = _ensemble(values[None] if values.ndim == 2 else values, name, members=1)
        if self.members and values.shape[1:] != self._first.shape:
            raise ValueError(f"{name} is for {values.shape[1:]} inputs and classes, not for {self._first.shape}")

        chunk = MomentAccumulator()
        chunk.members, chunk._spacing = len(values), _spacing(values.dtype)
        if log_probs is None:
            smallest = chunk._spacing[1]
            moments = _moments(values)
            log_moments = _log_moments(values, convert=lambda part: np.log(np.maximum(part, smallest)))
            chunk._clipped = (values == 0).any(axis=(0, 2))
        else:
            log_moments = _log_moments(values)
            moments = _moments(values, convert=np.exp)
            chunk._clipped = np.zeros(values.shape[1], bool)
        chunk._first, chunk._offset, chunk._squares = moments
        chunk._log_first, chunk._log_offset, chunk._excess = log_moments
        return self.merge(chunk)

    def merge(self, other):
        """Take in the members of another accumulator, which stays as it is, and return self.

        Paper: the sums of Algorithms 1 and 2.
        Shapes: both for the same N and K.
        Errors: ValueError if N or K differ.
        """
        if other.members == 0:
            return self
        if self.members == 0:
            for name in ("_first", "_offset", "_squares", "_log_first", "_log_offset", "_excess", "_clipped"):
                setattr(self, name, getattr(other, name).copy())
        elif self._first.shape != other._first.shape:
            raise ValueError(f"cannot merge accumulators of {self._first.shape} and {other._first.shape}")
        else:
            share = other.members / (self.members + other.members)
            step = (other._first - self._first) + (other._offset - self._offset)
            self._squares += other._squares + step * step * (self.members * share)
            self._offset += step * share
            kernels.merge_log_moments(
                *(self._log_first.ravel(), self._log_offset.ravel(), self._excess.ravel(), 1 - share),
                *(other._log_first.ravel(), other._log_offset.ravel(), other._excess.ravel(), share),
            )
            self._clipped |= other._clipped
        self.members += other.members
        self._spacing = tuple(map(max, self._spacing, other._spacing))
        return self

    def _require(self, members):
        if self.members < members:
            raise ValueError(f"the accumulator has {self.members} members, but this needs at least {members}")

    @property
    def mean(self):
        """Mean probabilities of the members so far. Paper: the empirical mean of sec:momalphas."""
        self._require(1)
        return self._first + self._offset

    @property
    def variance(self):
        """Unbiased variances between the members so far. Paper: the empirical variance of sec:momalphas."""
        self._require(2)
        return self._squares / (self.members - 1)

    @property
    def mean_log_probs(self):
        """Mean log-probabilities of the members so far. Paper: the first line of Algorithm 2."""
        self._require(1)
        return self._log_first + self._log_offset

    def _flag_clipped(self, fit):
        fit.flags[self._clipped] |= int(Flag.CLIPPED)
        return fit

    def fit_moments(self, aggregate="mean"):
        """`fit_moments` of the members so far. Paper: Algorithm 1. Shapes and Errors: as there."""
        self._require(2)
        return _moment_fit(self._first, self._offset, self._squares, self.members, self._spacing, aggregate)

    def fit_fixed_point(self, init=None, iterations=20, tol=1e-6):
        """`fit_fixed_point` of the members so far. Paper: Algorithm 2. Shapes and Errors: as there."""
        start = self.fit_moments().alpha if init is None else init
        return self._flag_clipped(_fixed_point_fit(self.mean_log_probs, start, iterations, tol))

    def fit_mle(self):
        """`fit_mle` of the members so far. Paper: the maximum of LL(alpha). Shapes and Errors: as there."""
        self._require(2)
        return self._flag_clipped(_mle_fit(self.mean_log_probs, self._excess, self._spacing[0]))
