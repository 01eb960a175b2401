"""The converged maximum-likelihood estimate against more than 50 digits, other oracles, and its properties."""

import dirichlet as pypi_dirichlet
import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize
from scipy.special import gammaln, log_softmax, psi

from paperlib import dirichlet
from paperlib.dirichlet import Flag, MomentAccumulator


def reference(log_probs, start):
    """Maximum-likelihood alpha of normalised members (M, K) in 60 digits: Newton on alpha, from a start nearby."""
    with mp.workdps(60):
        rows = [[mp.mpf(float(value)) for value in row] for row in log_probs]
        normalisers = [mp.log(mp.fsum(map(mp.exp, row))) for row in rows]
        rows = [[value - shift for value in row] for row, shift in zip(rows, normalisers, strict=True)]
        mean_log = [mp.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
        alpha = [mp.mpf(float(value)) for value in start]
        for _ in range(100):
            total = mp.fsum(alpha)
            level = mp.digamma(total)
            gradient = [level - mp.digamma(a) + m for a, m in zip(alpha, mean_log, strict=True)]
            curvature = [mp.polygamma(1, a) for a in alpha]
            ratios = [g / c for g, c in zip(gradient, curvature, strict=True)]
            shared = mp.fsum(ratios) / (1 / mp.polygamma(1, total) - mp.fsum(1 / c for c in curvature))
            steps = [r + shared / c for r, c in zip(ratios, curvature, strict=True)]
            longest = max(abs(s / a) for s, a in zip(steps, alpha, strict=True))
            factor = min(mp.mpf(1), mp.mpf("0.9") / longest) if longest else mp.mpf(1)
            alpha = [a + factor * s for a, s in zip(alpha, steps, strict=True)]
            if longest < 1e-10:  # what is left after this step is its square
                return alpha
    raise AssertionError("the reference did not converge")


def relative_error(alpha, exact):
    return max(abs(float((mp.mpf(float(a)) - e) / e)) for a, e in zip(alpha, exact, strict=True))


def draws(alpha, members, seed):
    """Log-probabilities of Dirichlet draws without underflow: log G(a) = log G(a + 1) + log(U) / a."""
    rng = np.random.default_rng(seed)
    shape = (members, len(alpha))
    gammas = np.log(rng.gamma(np.asarray(alpha) + 1, size=shape)) + np.log(rng.uniform(size=shape)) / alpha
    return log_softmax(gammas, axis=-1)


def skewed(classes, seed):
    mean = np.random.default_rng(seed).dirichlet(np.full(classes, 0.5)) + 0.1 / classes
    return mean / mean.sum()


def softmax_ensemble(seed=0, members=7, inputs=5, classes=4, scale=2.0, noise=1.0):
    rng = np.random.default_rng(seed)
    return log_softmax(
        scale * rng.normal(size=(inputs, classes)) + noise * rng.normal(size=(members, inputs, classes)), axis=-1
    )


def assert_exact(log_probs, tolerance=1e-11):
    fit = dirichlet.fit_mle(log_probs[:, None])
    assert fit.converged[0]
    assert relative_error(fit.alpha[0], reference(log_probs, fit.alpha[0])) < tolerance
    return fit


# The asked accuracy is 1e-9; what is reached is pinned.
@pytest.mark.parametrize("alpha0", [1e-3, 1e-1, 1.0, 30.0, 1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_50_digits(classes, alpha0):
    for seed, mean in enumerate([np.full(classes, 1 / classes), skewed(classes, classes)]):
        fit = assert_exact(draws(alpha0 * mean, members=16, seed=seed))
        assert Flag(int(fit.flags[0])) == (Flag.SENSITIVE if alpha0 > 1e7 else 0) or alpha0 == 1e6


@pytest.mark.parametrize(("classes", "alpha0"), [(100, 1e-3), (100, 1e2), (100, 1e12), (1000, 1e-3), (1000, 1e12)])
def test_50_digits_many_classes(classes, alpha0):
    assert_exact(draws(alpha0 * skewed(classes, 1), members=2, seed=1))


@pytest.mark.parametrize("noise", [1e-9, 1e-6, 1e-3])
def test_50_digits_near_equal_members(noise):
    assert_exact(softmax_ensemble(members=5, inputs=1, classes=6, noise=noise)[:, 0])


@pytest.mark.parametrize("scale", [10.0, 40.0])
def test_50_digits_overconfident_members(scale):
    """One class takes nearly all: what is left of it, 1 - p, is far below the spacing of numbers near 1."""
    logits = np.array([1.0, 0, -0.5, -1]) * scale + np.random.default_rng(0).normal(size=(6, 4))
    assert_exact(log_softmax(logits, axis=-1))


def test_50_digits_one_member_apart():
    log_probs = softmax_ensemble(members=9, inputs=1, classes=3, noise=1e-5)[:, 0]
    log_probs[4] = log_softmax([0.0, 300.0, -900.0])
    assert_exact(log_probs)


def test_members_that_sum_to_one_roughly_are_normalised():
    """float32 log-probabilities: a literal reading of their mean would give a wrong or no maximum."""
    log_probs = softmax_ensemble(members=6, inputs=1, classes=5, noise=1e-3)[:, 0].astype(np.float32)
    fit = dirichlet.fit_mle(log_probs[:, None])
    assert fit.alpha0[0] > 1e5
    assert relative_error(fit.alpha[0], reference(log_probs, fit.alpha[0])) < 1e-6


def test_agrees_with_a_scipy_loop():
    log_probs = softmax_ensemble(2, members=20, inputs=6)
    fit = dirichlet.fit_mle(log_probs)
    for i, mean_log in enumerate(log_probs.mean(axis=0)):

        def objective(log_alpha, mean_log=mean_log):
            alpha = np.exp(log_alpha)
            value = gammaln(alpha.sum()) - gammaln(alpha).sum() + (alpha - 1) @ mean_log
            return -value, -alpha * (psi(alpha.sum()) - psi(alpha) + mean_log)

        found = minimize(objective, np.zeros(4), jac=True, tol=1e-12)
        assert_allclose(fit.alpha[i], np.exp(found.x), rtol=1e-4)


def test_agrees_with_the_dirichlet_package():
    log_probs = softmax_ensemble(5, members=40, inputs=4, scale=1.0)
    fit = dirichlet.fit_mle(log_probs)
    for i in range(4):
        exact = pypi_dirichlet.mle(np.exp(log_probs[:, i]), tol=1e-13, method="fixedpoint")
        assert_allclose(fit.alpha[i], exact, rtol=1e-4)


def test_the_fixed_point_converges_to_it():
    log_probs = softmax_ensemble(6, members=20)
    limit = dirichlet.fit_fixed_point(log_probs, iterations=100_000, tol=1e-13)
    assert limit.converged.all()
    assert_allclose(dirichlet.fit_mle(log_probs).alpha, limit.alpha, rtol=1e-9)
    start = dirichlet.fit_mle(log_probs).alpha
    assert_array_equal(dirichlet.fit_fixed_point(log_probs, init=start).iterations, 1)


settings_of_an_ensemble = {
    "seed": st.integers(0, 10**6),
    "members": st.integers(2, 8),
    "classes": st.integers(2, 12),
    "scale": st.sampled_from([0.0, 2.0, 20.0]),
    "noise": st.sampled_from([1e-7, 1e-3, 1.0, 30.0, 1000.0]),
}


@settings(deadline=None, max_examples=200)
@given(**settings_of_an_ensemble)
def test_converges_or_says_why(seed, members, classes, scale, noise):
    log_probs = softmax_ensemble(seed, members, 4, classes, scale, noise)
    fit = dirichlet.fit_mle(log_probs)
    assert np.isfinite(fit.alpha).all()
    assert (fit.alpha0 > 0).all()
    assert_array_equal(fit.converged, (fit.flags & Flag.NO_SPREAD) == 0)
    assert (fit.iterations <= 15).all()
    solved = fit.converged & (fit.flags == 0)
    mean_log = log_probs.mean(axis=0)
    gradient = psi(fit.alpha0)[:, None] - psi(fit.alpha) + mean_log
    assert (np.abs(gradient) <= 1e-12 * (1 + np.abs(mean_log)))[solved].all()
    assert (fit.gradient_norm <= 1e-12 * (1 + np.linalg.norm(mean_log, axis=1)))[solved].all()
    if noise == 1.0:
        assert_array_equal(fit.alpha.argmax(axis=-1), mean_log.argmax(axis=-1))


@settings(deadline=None)
@given(**settings_of_an_ensemble)
def test_permutation_and_repetition(seed, members, classes, scale, noise):
    rng = np.random.default_rng(seed)
    log_probs = softmax_ensemble(seed, members, 4, classes, scale, noise)
    fit = dirichlet.fit_mle(log_probs)
    solved = fit.converged
    by_class, by_input, by_member = rng.permutation(classes), rng.permutation(4), rng.permutation(members)
    shuffled = dirichlet.fit_mle(log_probs[by_member][:, by_input][:, :, by_class])
    assert_allclose(shuffled.alpha[solved[by_input]], fit.alpha[by_input][:, by_class][solved[by_input]], rtol=1e-9)
    repeated = dirichlet.fit_mle(np.concatenate([log_probs] * 3))
    assert_allclose(repeated.alpha[solved], fit.alpha[solved], rtol=1e-9)


def test_two_different_members_identify_a_thousand_classes():
    fit = dirichlet.fit_mle(softmax_ensemble(members=2, inputs=3, classes=1000))
    assert fit.converged.all()
    assert_array_equal(fit.flags, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_equal_members_have_no_maximum(dtype):
    log_probs = np.repeat(softmax_ensemble(members=1, inputs=3), 5, axis=0).astype(dtype)
    fit = dirichlet.fit_mle(log_probs)
    assert_array_equal(fit.flags, Flag.NO_SPREAD)
    assert not fit.converged.any()
    assert_allclose(fit.alpha0, dirichlet.MAX_ALPHA0)
    normalised = np.exp(log_probs[0].astype(float))
    assert_allclose(fit.mean, normalised / normalised.sum(axis=-1, keepdims=True), rtol=1e-12)


def test_members_equal_up_to_rounding_have_no_maximum():
    log_probs = np.repeat(softmax_ensemble(members=1, inputs=3), 5, axis=0)
    log_probs *= 1 + 2e-16 * np.array([0, 1, -1, 1, 0])[:, None, None]
    assert_array_equal(dirichlet.fit_mle(log_probs).flags, Flag.NO_SPREAD)


def test_an_underflowed_class_is_left_out():
    """The limit of a class that vanishes: alpha 0, and the other classes solve their own equations."""
    log_probs = softmax_ensemble(members=6, inputs=2, classes=3)
    padded = np.concatenate([log_probs, np.full((6, 2, 1), -np.inf)], axis=2)
    fit = dirichlet.fit_mle(padded)
    assert_array_equal(fit.flags, Flag.UNDERFLOW)
    assert not fit.converged.any()
    assert_array_equal(fit.alpha[:, 3], 0)
    assert_allclose(fit.alpha[:, :3], dirichlet.fit_mle(log_probs).alpha, rtol=1e-12)


def corrupted(index, value):
    log_probs = softmax_ensemble(members=6)
    log_probs[index] = value
    return log_probs


@pytest.mark.parametrize("fit", [dirichlet.fit_mle, dirichlet.fit_fixed_point])
@pytest.mark.parametrize(
    ("log_probs", "message"),
    [
        (corrupted((3, 2, 1), np.nan), r"log_probs\[3, 2, 1\] is no log-probability: nan"),
        (corrupted((3, 2, 1), np.inf), r"log_probs\[3, 2, 1\] is no log-probability: inf"),
        (corrupted((1, 4, 0), 0.5), r"log_probs\[1, 4, 0\] is no log-probability: 0.5"),
        (corrupted((2, 3), np.log(0.3)), r"exp\(log_probs\)\[2, 3\] does not sum to 1: 1.2"),
        (corrupted((5, 0), -np.inf), r"exp\(log_probs\)\[5, 0\] does not sum to 1: 0"),
        (corrupted((), -1.0)[0], "must have 3 axes"),
        (corrupted((), -1.0)[:1], "has 1 member"),
        (corrupted((), -1.0)[:, :, :1], "has 1 class"),
        (corrupted((), -1.0)[:, :0], "is empty"),
    ],
)
def test_bad_log_probabilities_are_named(fit, log_probs, message):
    with pytest.raises(ValueError, match=message):
        fit(log_probs)


@pytest.mark.parametrize("noise", [1e-7, 1e-4])
def test_streams_keep_the_digits_of_concentrated_ensembles(noise):
    log_probs = softmax_ensemble(members=7, inputs=1, classes=5, noise=noise)
    stream = MomentAccumulator()
    for member in log_probs:
        stream.add(log_probs=member)
    alpha = stream.fit_mle().alpha[0]
    assert relative_error(alpha, reference(log_probs[:, 0], alpha)) < 1e-12
