"""Measures of a Dirichlet, the method of moments, the fixed point, and streaming."""

import dirichlet as pypi_dirichlet
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import digamma, log_softmax, polygamma, softmax

from paperlib import dirichlet
from paperlib.dirichlet import Flag, MomentAccumulator

AGGREGATES = ["mean", "median", "geometric", "trace"]


def ensemble(seed=0, members=7, inputs=5, classes=4, scale=2.0, noise=1.0):
    rng = np.random.default_rng(seed)
    return log_softmax(
        scale * rng.normal(size=(inputs, classes)) + noise * rng.normal(size=(members, inputs, classes)), axis=-1
    )


def literal_moments(probs):
    """Algorithm 1, one input and one class at a time."""
    members, inputs, classes = probs.shape
    alpha = np.empty((inputs, classes))
    for i in range(inputs):
        averages, estimates = [], []
        for k in range(classes):
            values = [float(probs[m, i, k]) for m in range(members)]
            mu = sum(values) / members
            variance = sum((v - mu) ** 2 for v in values) / (members - 1)
            averages.append(mu)
            if variance > 0 and mu * (1 - mu) / variance - 1 > 0:
                estimates.append(mu * (1 - mu) / variance - 1)
        alpha[i] = np.array(averages) * sum(estimates) / len(estimates)
    return alpha


def literal_fixed_point(log_probs, alpha, iterations, tol):
    """Algorithm 2 for one input, with a bisection for the inverse digamma."""

    def inverse(y):
        low, high = 1e-12, 1e12
        for _ in range(200):
            middle = np.sqrt(low * high)
            low, high = (middle, high) if digamma(middle) < y else (low, middle)
        return middle

    mean_log = log_probs.mean(axis=0)
    for step in range(1, iterations + 1):
        new = np.array([inverse(digamma(alpha.sum()) + value) for value in mean_log])
        done = np.linalg.norm(new - alpha) < tol * np.linalg.norm(alpha)
        alpha = new
        if done:
            return alpha, True, step
    return alpha, False, iterations


# ------------------------------------------------------------------------------------------------- measures

ALPHAS = [[0.3, 0.4], [1.0, 1.0, 1.0], [2.0, 5.0, 0.1, 30.0], [1e-3, 2e-3], [300.0, 20.5, 19.9], [40.0] * 20]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_measures_agree_with_scipy(alpha):
    reference = scipy.stats.dirichlet(alpha)
    draws = np.random.default_rng(1).dirichlet(np.array(alpha) + 1, size=3)
    assert_allclose(dirichlet.log_density(draws, alpha), [reference.logpdf(p) for p in draws], rtol=1e-9)
    assert_allclose(dirichlet.mean(alpha), reference.mean(), rtol=1e-13)
    assert_allclose(dirichlet.variance(alpha), reference.var(), rtol=1e-12)
    assert_allclose(dirichlet.total_variance(alpha), np.sum(reference.var()), rtol=1e-12)
    assert_allclose(dirichlet.differential_entropy(alpha), reference.entropy(), rtol=1e-9, atol=1e-10)
    assert_allclose(dirichlet.entropy(alpha), scipy.stats.entropy(reference.mean()), rtol=1e-12)
    assert dirichlet.precision(alpha) == sum(alpha)


def test_expected_entropy_by_monte_carlo():
    alpha = np.array([0.7, 2.0, 4.0])
    draws = np.random.default_rng(0).dirichlet(alpha, size=200_000)
    entropies = scipy.stats.entropy(draws, axis=1)
    error = 5 * entropies.std() / np.sqrt(len(draws))
    assert abs(dirichlet.expected_entropy(alpha) - entropies.mean()) < error
    assert_allclose(
        dirichlet.mutual_information(alpha), dirichlet.entropy(alpha) - dirichlet.expected_entropy(alpha), rtol=1e-12
    )


def test_mutual_information_keeps_its_digits_for_large_alpha():
    # (K - 1) / (2 alpha_0) is the leading term; the entropies themselves agree to all digits here.
    assert_allclose(dirichlet.mutual_information(np.full(5, 2e14)), 4 / (2 * 1e15), rtol=1e-9)
    assert dirichlet.mutual_information([3.0, 0.0]) == 0.0


def test_large_alpha_is_gaussian():
    """At the mean, the log-density and the entropy approach those of the limiting normal distribution."""
    alpha = np.array([2e12, 3e12, 5e12])
    mu, total = alpha / alpha.sum(), alpha.sum()
    log_determinant = np.log(mu).sum() - 2 * np.log(total)
    assert_allclose(dirichlet.log_density(mu, alpha), -np.log(2 * np.pi) - 0.5 * log_determinant, rtol=1e-10)
    gaussian_entropy = np.log(2 * np.pi * np.e) + 0.5 * log_determinant
    assert_allclose(dirichlet.differential_entropy(alpha), gaussian_entropy, rtol=1e-10)


def test_log_density_on_the_boundary():
    assert dirichlet.log_density([0.0, 1.0], [1.0, 1.0]) == 0.0
    assert dirichlet.log_density([0.0, 1.0], [2.0, 1.0]) == -np.inf
    assert dirichlet.log_density([0.0, 1.0], [0.5, 1.0]) == np.inf


def test_measures_work_on_the_last_axis_and_reject_bad_alpha():
    alpha = np.random.default_rng(0).gamma(2.0, size=(2, 3, 4))
    for measure in ("mean", "variance"):
        assert getattr(dirichlet, measure)(alpha).shape == (2, 3, 4)
    for measure in ("total_variance", "entropy", "expected_entropy", "mutual_information", "differential_entropy"):
        values = getattr(dirichlet, measure)(alpha)
        assert values.shape == (2, 3)
        assert_allclose(values[1, 2], getattr(dirichlet, measure)(alpha[1, 2]), rtol=1e-12)
    alpha[1, 0, 3] = -1
    with pytest.raises(ValueError, match=r"alpha\[1, 0, 3\] is negative"):
        dirichlet.mean(alpha)
    with pytest.raises(ValueError, match=r"alpha\[1\] is not positive"):
        dirichlet.differential_entropy([1.0, 0.0])
    with pytest.raises(ValueError, match="sums to 0"):
        dirichlet.mean([0.0, 0.0])
    with pytest.raises(ValueError, match="2 classes, but alpha has 3"):
        dirichlet.log_density([0.5, 0.5], [1.0, 1.0, 1.0])


@settings(deadline=None)
@given(hnp.arrays(float, st.integers(1, 30), elements=st.floats(-1e6, 700)))
def test_inverse_digamma_inverts(y):
    x = dirichlet.inverse_digamma(y)
    assert (x > 0).all()
    # A relative error of 1e-12 in x moves digamma(x) by at most 1e-12 x trigamma(x), next to digamma's own rounding.
    assert (np.abs(digamma(x) - y) <= 1e-12 * x * polygamma(1, x) + 4e-16 * np.abs(y)).all()


def test_inverse_digamma_at_the_ends():
    assert dirichlet.inverse_digamma(-np.inf) == 0
    assert dirichlet.inverse_digamma(1e6) == np.inf
    assert dirichlet.inverse_digamma(np.zeros((2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match=r"y\[1\]"):
        dirichlet.inverse_digamma([0.0, np.nan])


# ------------------------------------------------------------------------------------------ method of moments


@pytest.mark.parametrize("members", [2, 3, 4, 5, 50])
def test_moments_are_algorithm_1(members):
    probs = np.exp(ensemble(members, members=members, inputs=30, classes=6))
    fit = dirichlet.fit_moments(probs)
    assert_allclose(fit.alpha, literal_moments(probs), rtol=1e-11)
    assert fit.converged.all()


def test_aggregates():
    probs = np.exp(ensemble(inputs=200, members=9))
    mu, var = probs.mean(axis=0), probs.var(axis=0, ddof=1)
    estimates = mu * (1 - mu) / var - 1
    estimates[estimates <= 0] = np.nan
    expected = {
        "mean": np.nanmean(estimates, axis=1),
        "median": np.nanmedian(estimates, axis=1),
        "geometric": np.exp(np.nanmean(np.log(estimates), axis=1)),
        "trace": (mu * (1 - mu)).sum(axis=1) / var.sum(axis=1) - 1,
    }
    for aggregate, alpha0 in expected.items():
        assert_allclose(dirichlet.fit_moments(probs, aggregate).alpha0, alpha0, rtol=1e-10)
    assert_allclose(dirichlet.fit_moments(probs, "trace").total_variance, var.sum(axis=1), rtol=1e-10)
    with pytest.raises(ValueError, match="unknown aggregate 'mode'; choose one of: mean, median"):
        dirichlet.fit_moments(probs, "mode")


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 9),
    st.integers(1, 6),
    st.integers(2, 7),
    st.sampled_from([0.01, 1.0, 30.0]),
    st.sampled_from(AGGREGATES),
)
def test_moments_properties(seed, members, inputs, classes, noise, aggregate):
    """The mean is the ensemble's; permuting classes, inputs or members permutes the result alike."""
    rng = np.random.default_rng(seed)
    probs = np.exp(ensemble(seed, members, inputs, classes, noise=noise))
    fit = dirichlet.fit_moments(probs, aggregate)
    assert np.isfinite(fit.alpha).all()
    assert_allclose(fit.mean, probs.mean(axis=0), rtol=1e-12, atol=1e-300)
    by_class, by_input, by_member = rng.permutation(classes), rng.permutation(inputs), rng.permutation(members)
    shuffled = dirichlet.fit_moments(probs[by_member][:, by_input][:, :, by_class], aggregate)
    assert_allclose(shuffled.alpha, fit.alpha[by_input][:, by_class], rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_narrow_types_are_summed_in_float64(dtype):
    probs = np.exp(ensemble(members=30, inputs=300, classes=10, noise=0.3)).astype(dtype)
    wide = dirichlet.fit_moments(probs.astype(np.float64))
    narrow = dirichlet.fit_moments(probs)
    # The same numbers, so the same moments; only classes within rounding of constant may be left out.
    same = narrow.flags == 0
    assert same.mean() > 0.5
    assert_allclose(narrow.alpha[same], wide.alpha[same], rtol=1e-13)


def test_layout_does_not_matter():
    probs = np.exp(ensemble(members=5, inputs=400, classes=6))
    expected = dirichlet.fit_moments(probs).alpha
    transposed = np.ascontiguousarray(probs.transpose(1, 2, 0)).transpose(2, 0, 1)
    assert_array_equal(dirichlet.fit_moments(transposed).alpha, expected)
    assert_array_equal(dirichlet.fit_moments(np.repeat(probs, 2, axis=1)[:, ::2]).alpha, expected)


def test_cancellation_in_float32_does_not_show():
    """Variances near 1e-10 next to means near 1: the sum of squares in float32 would be negative."""
    rng = np.random.default_rng(0)
    small = 1e-4 + 1e-5 * rng.uniform(size=(50, 20))
    probs = np.stack([1 - small, small], axis=-1).astype(np.float32)
    assert_allclose(dirichlet.fit_moments(probs, "trace").alpha, literal_trace(probs), rtol=1e-9)


def literal_trace(probs):
    probs = probs.astype(np.longdouble)
    mu, var = probs.mean(axis=0), probs.var(axis=0, ddof=1)
    return (mu * ((mu * (1 - mu)).sum(axis=1) / var.sum(axis=1) - 1)[:, None]).astype(float)


one_hot = np.eye(3)
DEGENERATE = {
    "all members equal": (np.tile([0.2, 0.3, 0.5], (4, 1)), Flag.NO_SPREAD | Flag.CONSTANT_CLASS),
    "equal up to rounding": (
        np.tile([0.2, 0.3, 0.5], (4, 1)) * (1 + 2e-16 * np.array([[0], [1], [-1], [1]])),
        Flag.NO_SPREAD | Flag.CONSTANT_CLASS,
    ),
    "one class constant": (np.array([[0.2, 0.3, 0.5], [0.2, 0.4, 0.4], [0.2, 0.25, 0.55]]), Flag.CONSTANT_CLASS),
    "one class zero": (np.array([[0.0, 0.3, 0.7], [0.0, 0.4, 0.6]]), Flag.ZERO_CLASS),
    "same one-hot": (np.tile(one_hot[1], (4, 1)), Flag.NO_SPREAD | Flag.ZERO_CLASS | Flag.CONSTANT_CLASS),
    "disagreeing one-hots": (one_hot[[0, 1, 1, 2]], Flag.OVERDISPERSED),
}


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_inputs_are_flagged_and_finite(case, aggregate):
    members, flags = DEGENERATE[case]
    fit = dirichlet.fit_moments(members[:, None], aggregate)
    assert Flag(int(fit.flags[0])) == flags
    assert fit.converged[0] == (not flags & (Flag.NO_SPREAD | Flag.OVERDISPERSED))
    assert np.isfinite(fit.alpha).all()
    assert fit.alpha0[0] > 0
    assert_allclose(fit.mean[0], members.mean(axis=0), rtol=1e-12)
    for measure in (fit.total_variance, fit.entropy, fit.mutual_information):
        assert np.isfinite(measure).all()


def corrupted(index, value):
    probs = np.exp(ensemble(members=6, inputs=5, classes=4))
    probs[index] = value
    return probs


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (corrupted((3, 2, 1), np.nan), r"probs\[3, 2, 1\] is not finite"),
        (corrupted((5, 4, 3), np.inf), r"probs\[5, 4, 3\] is not finite"),
        (corrupted((0, 1), [0.5, 0.6, -0.1, 0.0]), r"probs\[0, 1, 2\] is negative"),
        (corrupted((4, 3), [0.5, 0.5, 0.25, 0.0]), r"probs\[4, 3\] does not sum to 1"),
        (corrupted((), 0.25)[0], "must have 3 axes"),
        (corrupted((), 0.25)[:, :0], "is empty"),
        (corrupted((), 0.25)[:1], "has 1 member"),
        (np.ones((3, 2, 1)), "has 1 class"),
    ],
)
def test_bad_probabilities_are_named(probs, message, dtype):
    with pytest.raises(ValueError, match=message):
        dirichlet.fit_moments(probs.astype(dtype))


def test_negative_zero_is_a_probability():
    assert dirichlet.fit_moments(corrupted((0, 0), [0.5, 0.5, -0.0, 0.0])).converged.all()


# ------------------------------------------------------------------------------------------------ fixed point


@pytest.mark.parametrize("iterations", [1, 20, 500])
def test_fixed_point_is_algorithm_2(iterations):
    log_probs = ensemble(3, members=12, inputs=8, classes=3)
    start = dirichlet.fit_moments(np.exp(log_probs)).alpha
    fit = dirichlet.fit_fixed_point(log_probs, iterations=iterations)
    for i in range(8):
        alpha, converged, steps = literal_fixed_point(log_probs[:, i], start[i], iterations, 1e-6)
        assert_allclose(fit.alpha[i], alpha, rtol=1e-10)
        assert (fit.converged[i], fit.iterations[i]) == (converged, steps)
        gradient = digamma(alpha.sum()) - digamma(alpha) + log_probs[:, i].mean(axis=0)
        assert_allclose(fit.gradient_norm[i], np.linalg.norm(gradient), atol=1e-12)
    assert not fit.converged.all() or iterations > 20


def test_fixed_point_agrees_with_the_dirichlet_package():
    log_probs = ensemble(5, members=40, inputs=5, classes=4, scale=1.0)
    fit = dirichlet.fit_fixed_point(log_probs, iterations=20_000, tol=1e-10)
    for i in range(5):
        reference = pypi_dirichlet.mle(np.exp(log_probs[:, i]), tol=1e-13, method="fixedpoint")
        assert_allclose(fit.alpha[i], reference, rtol=1e-4)


def test_fixed_point_start():
    log_probs = ensemble()
    flat = dirichlet.fit_fixed_point(log_probs, init=np.ones((5, 4)), iterations=1)
    expected = dirichlet.inverse_digamma(digamma(4.0) + log_probs.mean(axis=0))
    assert_allclose(flat.alpha, expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"init must have the shape \(5, 4\)"):
        dirichlet.fit_fixed_point(log_probs, init=np.ones((4, 4)))
    with pytest.raises(ValueError, match="iterations must be"):
        dirichlet.fit_fixed_point(log_probs, iterations=0)
    with pytest.raises(ValueError, match="tol must not be negative"):
        dirichlet.fit_fixed_point(log_probs, tol=-1.0)


@given(st.integers(0, 10**6), st.integers(1, 25))
@settings(deadline=None)
def test_fixed_point_orders_classes_by_mean_log_probability(seed, iterations):
    log_probs = ensemble(seed)
    fit = dirichlet.fit_fixed_point(log_probs, iterations=iterations)
    assert_array_equal(fit.alpha.argmax(axis=-1), log_probs.mean(axis=0).argmax(axis=-1))


@pytest.mark.parametrize("case", DEGENERATE)
def test_fixed_point_and_mle_never_give_nan(case):
    with np.errstate(divide="ignore"):
        log_probs = np.log(DEGENERATE[case][0])[:, None]
    for fit in (dirichlet.fit_fixed_point(log_probs), dirichlet.fit_mle(log_probs)):
        assert np.isfinite(fit.alpha).all()
        assert fit.alpha0[0] > 0
        assert bool(fit.flags[0] & Flag.UNDERFLOW) == bool(np.isneginf(log_probs).any())
        assert np.isfinite(fit.gradient_norm).all()


# -------------------------------------------------------------------------------------------------- streaming


def all_fits(source, log_probs=None):
    if log_probs is None:
        return [source.fit_moments(a) for a in AGGREGATES] + [source.fit_fixed_point(), source.fit_mle()]
    moments = [dirichlet.fit_moments(np.exp(log_probs), a) for a in AGGREGATES]
    return [*moments, dirichlet.fit_fixed_point(log_probs), dirichlet.fit_mle(log_probs)]


def assert_same_fits(left, right):
    for a, b in zip(left, right, strict=True):
        assert_allclose(a.alpha, b.alpha, rtol=1e-12)
        assert_array_equal(a.converged, b.converged)


@settings(deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=2, max_size=6), st.sampled_from([1e-3, 0.3, 1.0, 4.0])
)
def test_streaming_and_merging_equal_the_batch(seed, chunks, noise):
    rng = np.random.default_rng(seed)
    log_probs = ensemble(seed, members=sum(chunks), noise=noise)
    batch = all_fits(None, log_probs)

    single = MomentAccumulator()
    for member in log_probs:
        single.add(log_probs=member)
    assert_same_fits(all_fits(single), batch)
    assert_allclose(single.mean_log_probs, log_probs.mean(axis=0), rtol=1e-12)
    assert_allclose(single.variance, np.exp(log_probs).var(axis=0, ddof=1), rtol=1e-9)

    parts = [MomentAccumulator().add(log_probs=part) for part in np.split(log_probs, np.cumsum(chunks)[:-1])]
    merged = MomentAccumulator()
    for index in rng.permutation(len(parts)):
        merged.merge(parts[index])
    assert merged.members == sum(chunks)
    assert_same_fits(all_fits(merged), batch)


def test_probabilities_and_log_probabilities_may_be_mixed():
    log_probs = ensemble(members=6)
    mixed = MomentAccumulator().add(np.exp(log_probs[:2])).add(log_probs=log_probs[2:5]).add(np.exp(log_probs[5]))
    for a, b in zip(all_fits(mixed), all_fits(None, log_probs), strict=True):
        assert_allclose(a.alpha, b.alpha, rtol=1e-11)


def test_a_long_stream_of_near_equal_members():
    log_probs = ensemble(members=1000, inputs=2, classes=3, noise=1e-6)
    stream = MomentAccumulator()
    for member in log_probs:
        stream.add(log_probs=member)
    assert_same_fits(all_fits(stream), all_fits(None, log_probs))


def test_zero_probabilities_are_clipped_and_flagged():
    probs = np.array([[[0.0, 0.4, 0.6], [0.1, 0.4, 0.5]], [[0.1, 0.3, 0.6], [0.2, 0.3, 0.5]]])
    stream = MomentAccumulator().add(probs)
    for fit in (stream.fit_mle(), stream.fit_fixed_point()):
        assert_array_equal(fit.flags & Flag.CLIPPED, [Flag.CLIPPED, 0])
        assert np.isfinite(fit.alpha).all()
    assert_array_equal(stream.fit_moments().flags & Flag.CLIPPED, [0, 0])


def test_underflow_survives_merging():
    log_probs = ensemble(members=5, inputs=2)
    log_probs[2, 0] = [-np.inf, *log_softmax(np.arange(3.0))]
    stream = MomentAccumulator()
    for member in log_probs:
        stream.add(log_probs=member)
    assert_same_fits(all_fits(stream)[-2:], all_fits(None, log_probs)[-2:])
    assert_array_equal(stream.fit_mle().flags & Flag.UNDERFLOW, [Flag.UNDERFLOW, 0])


def test_accumulator_errors():
    stream = MomentAccumulator()
    with pytest.raises(ValueError, match="0 members, but this needs at least 2"):
        stream.fit_moments()
    with pytest.raises(ValueError, match="either probs or log_probs"):
        stream.add()
    stream.add(np.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="1 members, but this needs at least 2"):
        stream.fit_mle()
    with pytest.raises(ValueError, match=r"not for \(3, 2\)"):
        stream.add(np.full((4, 2), 0.5))
    with pytest.raises(ValueError, match="cannot merge"):
        stream.merge(MomentAccumulator().add(np.full((4, 2), 0.5)))
    with pytest.raises(ValueError, match=r"probs\[0, 1\] does not sum to 1"):
        stream.add(np.array([[0.5, 0.5], [0.5, 0.6], [0.5, 0.5]]))
    assert stream.members == 1


def test_merging_leaves_the_other_alone():
    log_probs = ensemble()
    other = MomentAccumulator().add(log_probs=log_probs[:3])
    before = other.mean
    MomentAccumulator().merge(other).add(log_probs=log_probs[3:])
    assert_array_equal(other.mean, before)
    assert other.members == 3


def test_total_variance_identity():
    fit = dirichlet.fit_moments(softmax(np.random.default_rng(0).normal(size=(6, 50, 5)), axis=-1))
    assert_allclose(fit.total_variance, (1 - (fit.mean**2).sum(axis=1)) / (fit.alpha0 + 1), rtol=1e-12)
