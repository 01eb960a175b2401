"""The paper's equations and algorithms, each checked against something independent of the code under test.

| in the paper | test | checked against |
|---|---|---|
| eq:logits | test_eq_logits | literal loop |
| eq:celoss | test_eq_celoss | literal loop |
| eq:softmax | test_eq_softmax | literal loop |
| eq:dirpdf | test_eq_dirpdf | numerical integration, math.gamma |
| eq:mvbfunc | test_eq_mvbfunc | numerical integration |
| eq:meanvar | test_eq_meanvar | numerical integration, Monte Carlo |
| eq:mseloss | test_eq_mseloss | Monte Carlo, literal loop |
| eq:digammaloss | test_eq_digammaloss | Monte Carlo |
| eq:digammafunc | test_eq_digammafunc | finite differences of log Gamma |
| eq:dirloss | test_eq_dirloss | literal loop, Monte Carlo |
| KL to Dir(1), after eq:dirloss | test_eq_kl_to_uniform | numerical integration, literal formula |
| warm-up min(1, t/T), before eq:annealkl | test_eq_warmup | by hand |
| eq:annealkl | test_eq_annealkl | literal loop |
| L_LOGEV | test_eq_logev | literal loop |
| alpha_k = e_k + delta | test_eq_alpha_offset | literal loop |
| phi_SP | test_eq_softplus | literal loop, finite differences |
| phi_SA | test_eq_adaptive_softplus | literal loop, finite differences |
| phi_EXP | test_eq_exponential | literal loop, finite differences |
| confidence c(x) | test_eq_confidence | literal loop |
| correctness R(x) | test_eq_correctness | literal loop |
| eq:calibrated | test_eq_calibrated | Monte Carlo |
| bins I_b and index sets S_b | test_eq_bins, test_eq_acc_conf | exact fractions, literal loop |
| acc(S_b), conf(S_b) | test_eq_acc_conf | literal loop |
| ECE (in words) | test_ece | literal loop |
| LL(alpha) | test_eq_log_likelihood | literal formula, scipy.stats |
| dLL/dalpha_j | test_eq_log_likelihood_gradient | finite differences |
| psi(alpha_j) = psi(alpha_0) + log p_j | test_eq_stationarity | numerical optimisation |
| eq:fpi | test_eq_fpi | root search |
| empirical moments | test_eq_moments | literal loop |
| class-wise alpha_0 | test_eq_classwise_alpha0 | exact fractions, Monte Carlo |
| average over valid classes | test_eq_aggregation | literal loop |
| alpha_k = mu_k alpha_0 | test_eq_alpha_k | literal loop |
| Algorithm 1 (alg:mom-dirichlet) | test_algorithm_1_mom_dirichlet | literal loop |
| Algorithm 2 (alg:mle-dirichlet) | test_algorithm_2_mle_dirichlet | literal loop |
| collapse: p_k = 1/K, eq:alphakfail | test_eq_alphakfail | by hand |
| collapse: variance (K - 1)/(K^2 (alpha_0 + 1)) | test_eq_collapse_variance | exact fractions |
| eq:totalvar | test_eq_totalvar | Monte Carlo |
| dL_CE/dz_k = p_k - y_k | test_eq_ce_gradient | finite differences |
| dL_CE/dz_k in [-1, 1] | test_eq_ce_gradient_bound | search |
| choice of tau | test_threshold | literal loop |
| decision rule | test_eq_decision_rule | literal loop |
| eq:appmseloss | test_eq_appmseloss | numerical integration |
| appendix: digamma loss as an integral | test_eq_app_digamma_integral | numerical integration |
| appendix: derivative of B(alpha) | test_eq_app_beta_derivative | numerical integration, finite differences |
| appendix: digamma loss by log B | test_eq_app_log_beta_derivative | finite differences |
| appendix: psi as a derivative | test_eq_digammafunc | finite differences of log Gamma |
| eq:appdigammaloss | test_eq_appdigammaloss | harmonic numbers |
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from paperlib import calibration, dirichlet, evidence, losses, scores, selective
from paperlib.recipes import RECIPES

ALPHA = np.array([2.5, 4.0, 3.5])  # above 1, so that the integrands vanish at the border of the simplex


def simplex_rule(points=200):
    """Gauss-Legendre points (P, 3) and weights (P,) of the simplex of three classes."""
    x, w = np.polynomial.legendre.leggauss(points)
    x, w = (x + 1) / 2, w / 2
    first, share = (axis.ravel() for axis in np.meshgrid(x, x, indexing="ij"))
    second = (1 - first) * share
    return np.stack((first, second, 1 - first - second), axis=1), np.outer(w * (1 - x), w).ravel()


POINTS, WEIGHTS = simplex_rule()


def draws(alpha, samples=200_000, seed=0):
    return np.random.default_rng(seed).dirichlet(alpha, samples)


def assert_is_mean_of(samples, expected):
    """The expected value lies within five standard errors of the samples' mean."""
    error = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(axis=0) - expected) < 5 * error)


def tensor(values):
    return torch.tensor(np.atleast_2d(values), dtype=torch.float64)


def per_class(loss, alpha):
    """Value of a loss for each true class, shape (K,)."""
    classes = len(alpha)
    return loss(tensor(np.tile(alpha, (classes, 1))), torch.arange(classes)).numpy()


def log_beta(alpha):
    """log B(alpha) of eq:mvbfunc."""
    return sum(math.lgamma(a) for a in alpha) - math.lgamma(sum(alpha))


def derivative(function, x, step=1e-5):
    return (function(x + step) - function(x - step)) / (2 * step)


def partial(function, x, j, step=1e-5):
    """Derivative of a function of a vector with respect to entry j."""
    unit = np.eye(len(x))[j]
    return derivative(lambda t: function(x + t * unit), 0.0, step)


def ensemble(members=8, inputs=6, classes=4, seed=0, concentration=20.0):
    """Probability vectors (M, N, K) of members that agree more on some inputs than on others."""
    rng = np.random.default_rng(seed)
    centres = rng.dirichlet(np.ones(classes), inputs)
    spread = concentration * 2.0 ** np.arange(inputs)
    return np.stack([rng.dirichlet(s * c + 0.05, members) for s, c in zip(spread, centres, strict=True)], axis=1)


# ---------------------------------------------------------------------------------------- evidential learning


def test_eq_logits():
    rng = np.random.default_rng(1)
    weight, bias, hidden = rng.normal(size=(3, 5)), rng.normal(size=3), rng.normal(size=5)
    layer = torch.nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    z = [sum(weight[k, i] * hidden[i] for i in range(5)) + bias[k] for k in range(3)]
    expected = [math.log(1 + math.exp(value)) + 1 for value in z]
    head = torch.nn.Sequential(layer, evidence.Head("mse_plusone", 3))
    np.testing.assert_allclose(head(tensor(hidden)).detach()[0], expected, rtol=1e-12)


def test_eq_celoss():
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=(6, 4)), np.array([0, 3, 1, 2, 2, 0])
    expected = []
    for z, j in zip(logits, labels, strict=True):
        p = [math.exp(value) / sum(math.exp(other) for other in z) for value in z]
        y = [1 if k == j else 0 for k in range(4)]
        expected.append(-sum(y[k] * math.log(p[k]) for k in range(4)))
    parts = losses.recipe_loss(RECIPES["ce"], tensor(logits), torch.tensor(labels), lambda_kl=None, lambda_ev=None)
    np.testing.assert_allclose(parts.total, expected, rtol=1e-12)
    probs = calibration.apply_temperature(logits, 1.0)
    assert scores.nll(probs, labels) == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_eq_softmax(temperature):
    logits = np.random.default_rng(3).normal(size=(5, 4)) * 3
    probs = calibration.apply_temperature(logits, temperature)
    for z, p in zip(logits, probs, strict=True):
        total = sum(math.exp(other / temperature) for other in z)
        np.testing.assert_allclose(p, [math.exp(value / temperature) / total for value in z], rtol=1e-12)
    assert (probs.argmax(1) == logits.argmax(1)).all()


def test_eq_dirpdf():
    density = np.exp(dirichlet.log_density(POINTS, ALPHA))
    assert WEIGHTS @ density == pytest.approx(1, rel=1e-6)
    p = (0.2, 0.5, 0.3)
    beta = math.prod(math.gamma(a) for a in ALPHA) / math.gamma(sum(ALPHA))
    literal = math.prod(q ** (a - 1) for q, a in zip(p, ALPHA, strict=True)) / beta
    assert math.exp(dirichlet.log_density(np.array(p), ALPHA)) == pytest.approx(literal, rel=1e-12)


def test_eq_mvbfunc():
    """B(alpha), which the density divides by, is the integral of prod p_k^(alpha_k - 1)."""
    p = np.array([0.2, 0.5, 0.3])
    from_density = np.prod(p ** (ALPHA - 1)) / np.exp(dirichlet.log_density(p, ALPHA))
    assert from_density == pytest.approx(WEIGHTS @ np.prod(POINTS ** (ALPHA - 1), axis=1), rel=1e-6)
    assert dirichlet.precision(ALPHA) == sum(ALPHA)


def test_eq_meanvar():
    density = np.exp(dirichlet.log_density(POINTS, ALPHA))
    first, second = (WEIGHTS * density) @ POINTS, (WEIGHTS * density) @ POINTS**2
    np.testing.assert_allclose(dirichlet.mean(ALPHA), first, rtol=1e-6)
    np.testing.assert_allclose(dirichlet.variance(ALPHA), second - first**2, rtol=1e-5)
    alpha = np.array([0.3, 1.0, 7.0, 0.9])
    p = draws(alpha)
    assert_is_mean_of(p, dirichlet.mean(alpha))
    assert_is_mean_of((p - dirichlet.mean(alpha)) ** 2, dirichlet.variance(alpha))


@pytest.mark.parametrize("alpha", [(0.4, 2.0, 1.0, 5.0), (30.0, 1.0, 9.0), (0.1, 0.2)])
def test_eq_mseloss(alpha):
    classes, total = len(alpha), sum(alpha)
    values, p = per_class(losses.mse, alpha), draws(alpha)
    for j in range(classes):
        assert_is_mean_of(((np.eye(classes)[j] - p) ** 2).sum(axis=1), values[j])
        literal = 0.0
        for k in range(classes):
            literal += ((k == j) - alpha[k] / total) ** 2
            literal += alpha[k] * (total - alpha[k]) / (total**2 * (total + 1))
        assert values[j] == pytest.approx(literal, rel=1e-12)


@pytest.mark.parametrize("alpha", [(0.4, 2.0, 1.0, 5.0), (30.0, 1.0, 9.0), (0.5, 0.7)])
def test_eq_digammaloss(alpha):
    assert_is_mean_of(-np.log(draws(alpha)), per_class(losses.digamma, alpha))


def test_eq_digammafunc():
    """psi is the derivative of log Gamma, in the digamma loss and in the inverse that the estimators use."""
    for u in (0.3, 1.0, 2.7, 40.0):
        psi = derivative(math.lgamma, u)
        other = derivative(math.lgamma, u + 1.5)
        loss = losses.digamma(tensor([u, 1.5]), torch.tensor([0])).item()
        assert loss == pytest.approx(other - psi, rel=1e-7)
        assert dirichlet.inverse_digamma(psi) == pytest.approx(u, rel=1e-7)


def test_eq_kl_to_uniform():
    density = np.exp(dirichlet.log_density(POINTS, ALPHA))
    uniform = np.exp(dirichlet.log_density(POINTS, np.ones(3)))
    integral = WEIGHTS @ (density * np.log(density / uniform))
    assert losses.kl_to_uniform(tensor(ALPHA)).item() == pytest.approx(integral, rel=1e-6)
    for alpha in ([0.2, 3.0, 1.0, 11.0], [1.0, 1.0], [0.01] * 5):
        total, classes = sum(alpha), len(alpha)
        literal = math.log(math.gamma(total) / (math.gamma(classes) * math.prod(map(math.gamma, alpha))))
        literal += sum((a - 1) * (special.psi(a) - special.psi(total)) for a in alpha)
        assert losses.kl_to_uniform(tensor(alpha)).item() == pytest.approx(literal, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("recipe", ["mse_clamp", "mse_softadapt", "mse_plusone", "exponential"])
def test_eq_dirloss(recipe):
    rng = np.random.default_rng(4)
    alpha, labels, weight = rng.gamma(2.0, size=(5, 3)) + 0.3, np.array([0, 1, 2, 1, 0]), 0.03
    parts = losses.recipe_loss(RECIPES[recipe], tensor(alpha), torch.tensor(labels), lambda_kl=weight, lambda_ev=None)
    for i in range(5):
        total = sum(alpha[i])
        p = [a / total for a in alpha[i]]
        fit = sum(((k == labels[i]) - p[k]) ** 2 + p[k] * (1 - p[k]) / (total + 1) for k in range(3))
        assert parts.fit[i].item() == pytest.approx(fit, rel=1e-12)
        samples = draws(alpha[i], seed=i)
        ratio = stats.dirichlet.logpdf(samples.T, alpha[i]) - math.log(math.gamma(3))
        assert_is_mean_of(fit + weight * ratio, parts.total[i].item())


def test_eq_warmup():
    weights = [losses.kl_weight("warmup", t, epochs=30, classes=7, lambda0=0.5) for t in range(31)]
    assert weights == [t / 10 for t in range(10)] + [1] * 21


def test_eq_annealkl():
    for classes, lambda0, epochs in ((7, 0.5, 30), (100, 1.0, 20)):
        weights = [losses.kl_weight("linear", t, epochs, classes, lambda0) for t in range(epochs + 1)]
        assert weights == pytest.approx([lambda0 * t / (classes * epochs) for t in range(epochs + 1)])
        assert weights[-1] == pytest.approx(lambda0 / classes)


def test_eq_logev():
    alpha, labels = np.array([[1.0, 2.0, 3.5], [0.1, 0.2, 40.0]]), torch.tensor([0, 2])
    expected = [math.log(1 + sum(row)) for row in alpha]
    np.testing.assert_allclose(losses.log_evidence(tensor(alpha)), expected, rtol=1e-14)
    parts = losses.recipe_loss(RECIPES["digamma"], tensor(alpha), labels, lambda_kl=None, lambda_ev=0.3)
    np.testing.assert_allclose(parts.total - parts.fit, [0.3 * value for value in expected], rtol=1e-12)


def assert_activation(activation, literal):
    z = torch.linspace(-8, 8, 33, dtype=torch.float64).reshape(-1, 1).repeat(1, 2).requires_grad_()
    value = activation(z)
    value.sum().backward()
    points = z.detach()[:, 0].tolist()
    np.testing.assert_allclose(value.detach()[:, 0], [literal(x) for x in points], rtol=1e-9)
    np.testing.assert_allclose(z.grad[:, 0], [derivative(literal, x) for x in points], rtol=1e-5)


def test_eq_softplus():
    assert_activation(evidence.softplus, lambda z: math.log(1 + math.exp(z)))


@pytest.mark.parametrize(("b", "c"), [(0.0, 0.0), (0.5, -1.0), (-3.0, 2.0)])
def test_eq_adaptive_softplus(b, c):
    activation = evidence.AdaptiveSoftplus(2).double()
    with torch.no_grad():
        activation.b.fill_(b)
        activation.c.fill_(c)
    beta, gamma = activation.beta[0].item(), activation.gamma[0].item()
    assert beta >= 1 and gamma > 0
    assert_activation(activation, lambda z: math.log(beta + gamma * math.exp(z)))


def test_eq_exponential():
    assert_activation(evidence.exponential, math.exp)


def test_eq_alpha_offset():
    logits = [-6.0, -1.0, 0.0, 2.0, 7.0]
    for name, phi, delta in (
        ("mse_only", lambda z: math.log(1 + math.exp(z)), 0),
        ("mse_clamp", lambda z: math.log(1 + math.exp(z)), 0),
        ("mse_softadapt", lambda z: math.log(1 + math.exp(z)), 0),
        ("mse_plusone", lambda z: math.log(1 + math.exp(z)), 1),
        ("exponential", math.exp, 1),
        ("digamma", lambda z: math.log(1 + math.exp(z)), 1),
    ):
        alpha = evidence.to_alpha(tensor(logits), name)[0]
        np.testing.assert_allclose(alpha, [phi(z) + delta for z in logits], rtol=1e-12)


# ------------------------------------------------------------------------------------------------ calibration


def predictions(inputs=400, classes=5, seed=5):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(classes, 0.5), inputs)
    return probs, rng.integers(classes, size=inputs)


def test_eq_confidence():
    probs, _ = predictions()
    assert calibration.confidence(probs).tolist() == [max(row) for row in probs.tolist()]


def test_eq_correctness():
    probs, labels = predictions()
    expected = [row.index(max(row)) == k for row, k in zip(probs.tolist(), labels, strict=True)]
    assert calibration.correctness(probs, labels).tolist() == expected


def test_eq_calibrated():
    """Labels drawn from the predicted probabilities are calibrated in every bin; sharpened ones are not."""
    rng = np.random.default_rng(6)
    probs = rng.dirichlet(np.full(4, 0.7), 40_000)
    labels = (rng.random((len(probs), 1)) < probs.cumsum(axis=1)).argmax(axis=1)
    table = calibration.reliability(probs, labels)
    error = np.sqrt(table.confidence * (1 - table.confidence) / table.count)
    assert (np.abs(table.accuracy - table.confidence) < 5 * error).all()
    sharpened = probs**2 / (probs**2).sum(axis=1, keepdims=True)
    table = calibration.reliability(sharpened, labels)
    assert (table.accuracy - table.confidence)[-3:-1].max() < -0.05


@pytest.mark.parametrize("bins", [1, 3, 10, 15])
def test_eq_bins(bins):
    """Every confidence lies in the one bin I_b = ((b - 1)/B, b/B] that contains it, borders included."""
    borders = [b / bins for b in range(bins + 1)]
    values = [v for v in [*borders, *np.nextafter(borders, 0), *np.nextafter(borders, 1)] if 0.5 <= v <= 1]
    values += np.random.default_rng(7).uniform(0.5, 1, 50).tolist()
    edges = [Fraction(border) for border in borders]
    for value in values:
        table = calibration.reliability(np.array([[value, 1 - value]]), np.array([0]), bins)
        (b,) = [b for b in range(1, bins + 1) if edges[b - 1] < Fraction(value) <= edges[b]]
        assert (table.lower.item(), table.upper.item()) == (borders[b - 1], borders[b])


def literal_bins(probs, labels, bins):
    """(count, acc, conf) of each S_b that is not empty, by loops over bins and inputs."""
    table = []
    for b in range(1, bins + 1):
        members = [i for i, row in enumerate(probs) if (b - 1) / bins < max(row) <= b / bins]
        if members:
            right = sum(int(np.argmax(probs[i]) == labels[i]) for i in members)
            table.append((len(members), right / len(members), sum(max(probs[i]) for i in members) / len(members)))
    return table


def test_eq_acc_conf():
    probs, labels = predictions()
    table = calibration.reliability(probs, labels, bins=10)
    expected = np.array(literal_bins(probs, labels, 10))
    np.testing.assert_allclose(np.stack((table.count, table.accuracy, table.confidence), 1), expected, rtol=1e-12)


def test_ece():
    probs, labels = predictions()
    expected = sum(count / len(labels) * abs(acc - conf) for count, acc, conf in literal_bins(probs, labels, 10))
    assert calibration.ece(probs, labels) == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------------------------------- estimators


def log_likelihood(members, alpha):
    """LL(alpha) as the code has it: the sum of the log density over the members."""
    return dirichlet.log_density(members, alpha).sum()


def test_eq_log_likelihood():
    members = ensemble()[:, 0]
    log_mean = np.log(members).mean(axis=0)
    for alpha in ([1.0, 1.0, 1.0, 1.0], [0.3, 2.0, 5.0, 11.0]):
        literal = len(members) * math.lgamma(sum(alpha))
        for k in range(4):
            literal += len(members) * (-math.lgamma(alpha[k]) + (alpha[k] - 1) * log_mean[k])
        assert log_likelihood(members, alpha) == pytest.approx(literal, rel=1e-11)
        assert literal == pytest.approx(sum(stats.dirichlet.logpdf(p, alpha) for p in members), rel=1e-11)


def test_eq_log_likelihood_gradient():
    """LL has the slope M (psi(alpha_0) - psi(alpha_j) + log p_j); a fit reports its norm, divided by M."""
    probs = ensemble()
    fit = dirichlet.fit_fixed_point(np.log(probs), iterations=3, tol=0)
    for i in range(probs.shape[1]):
        alpha, members = fit.alpha[i], probs[:, i]
        numeric = np.array(
            [partial(lambda a, m=members: log_likelihood(m, a), alpha, j, 1e-4 * alpha[j]) for j in range(4)]
        )
        formula = special.psi(alpha.sum()) - special.psi(alpha) + np.log(members).mean(axis=0)
        np.testing.assert_allclose(numeric, len(members) * formula, rtol=1e-5, atol=1e-6)
        assert fit.gradient_norm[i] == pytest.approx(np.linalg.norm(numeric) / len(members), rel=1e-3, abs=1e-7)


def test_eq_stationarity():
    """The converged estimate solves psi(alpha_j) = psi(alpha_0) + log p_j; another optimiser agrees."""
    probs = ensemble(inputs=3)
    fit = dirichlet.fit_mle(np.log(probs))
    log_mean = np.log(probs).mean(axis=0)
    expected = special.psi(fit.alpha.sum(axis=1, keepdims=True)) + log_mean
    np.testing.assert_allclose(special.psi(fit.alpha), expected, rtol=1e-9, atol=1e-9)
    for i in range(3):
        best = optimize.minimize(
            lambda log_alpha, i=i: -log_likelihood(probs[:, i], np.exp(log_alpha)),
            np.zeros(4),
            method="Nelder-Mead",
            options={"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000},
        )
        np.testing.assert_allclose(fit.alpha[i], np.exp(best.x), rtol=1e-3)
        assert log_likelihood(probs[:, i], fit.alpha[i]) >= -best.fun - 1e-8


def literal_inverse_digamma(y):
    """Root of psi(x) = y in log x by bisection."""
    return math.exp(optimize.brentq(lambda t: special.psi(math.exp(t)) - y, -50, 50, xtol=1e-14))


def test_eq_fpi():
    probs = ensemble()
    start = np.random.default_rng(8).gamma(2.0, size=(6, 4)) + 0.1
    fit = dirichlet.fit_fixed_point(np.log(probs), init=start, iterations=1)
    for i in range(6):
        for j in range(4):
            log_mean = sum(math.log(p) for p in probs[:, i, j]) / len(probs)
            expected = literal_inverse_digamma(special.psi(sum(start[i])) + log_mean)
            assert fit.alpha[i, j] == pytest.approx(expected, rel=1e-10)


def literal_moments(members, k):
    """Mean and unbiased variance of class k over the members of one input."""
    mu = sum(p[k] for p in members) / len(members)
    return mu, sum((p[k] - mu) ** 2 for p in members) / (len(members) - 1)


def test_eq_moments():
    probs = ensemble()
    found = dirichlet.MomentAccumulator().add(probs)
    for i in range(6):
        for k in range(4):
            mu, variance = literal_moments(probs[:, i].tolist(), k)
            assert found.mean[i, k] == pytest.approx(mu, rel=1e-12)
            assert found.variance[i, k] == pytest.approx(variance, rel=1e-10)


def test_eq_classwise_alpha0():
    """Two classes share one variance, so each has the same alpha_0: mu (1 - mu) / sigma^2 - 1."""
    first = [Fraction(1, 2), Fraction(5, 8), Fraction(3, 4), Fraction(3, 8)]
    mu = sum(first) / 4
    variance = sum((p - mu) ** 2 for p in first) / 3
    expected = mu * (1 - mu) / variance - 1
    probs = np.array([[[float(p), float(1 - p)]] for p in first])
    assert dirichlet.fit_moments(probs).alpha0.item() == pytest.approx(float(expected), rel=1e-12)
    alpha = np.array([3.0, 5.0])
    assert dirichlet.fit_moments(draws(alpha)[:, None]).alpha0.item() == pytest.approx(8, rel=0.03)


def literal_algorithm_1(members):
    """Algorithm 1 for one input, line by line; returns alpha and the classes that were valid."""
    classes = range(len(members[0]))
    moments = [literal_moments(members, k) for k in classes]
    alpha0 = [mu * (1 - mu) / variance - 1 if variance > 0 else math.inf for mu, variance in moments]
    valid = [k for k in classes if 0 < alpha0[k] < math.inf]
    total = sum(alpha0[k] for k in valid) / len(valid)
    return [mu * total for mu, _ in moments], valid


def overdispersed_class():
    """One input whose first class varies more than any Dirichlet can: its own alpha_0 is negative."""
    return np.array([[[1.0, 0.0, 0.0]], [[0.0, 0.7, 0.3]], [[1.0, 0.0, 0.0]], [[0.0, 0.4, 0.6]]])


def constant_class():
    """One input whose first class is the same in all members: its own alpha_0 is infinite."""
    return np.array([[[0.5, 0.2, 0.3]], [[0.5, 0.3, 0.2]], [[0.5, 0.1, 0.4]]])


@pytest.mark.parametrize(("probs", "valid"), [(overdispersed_class(), [1, 2]), (constant_class(), [1, 2])])
def test_eq_aggregation(probs, valid):
    """Classes whose alpha_0 is not positive and finite are left out of the average."""
    expected, used = literal_algorithm_1(probs[:, 0].tolist())
    assert used == valid
    assert dirichlet.fit_moments(probs).alpha0.item() == pytest.approx(sum(expected), rel=1e-12)


def test_eq_alpha_k():
    """alpha is the ensemble's mean times alpha_0, so the predictive mean is the ensemble's mean."""
    probs = ensemble()
    fit = dirichlet.fit_moments(probs)
    for i in range(6):
        for k in range(4):
            mu, _ = literal_moments(probs[:, i].tolist(), k)
            assert fit.alpha[i, k] == pytest.approx(mu * fit.alpha0[i], rel=1e-12)
            assert fit.mean[i, k] == pytest.approx(mu, rel=1e-12)


def test_algorithm_1_mom_dirichlet():
    probs = ensemble(members=12, inputs=9, classes=5, seed=9)
    fit = dirichlet.fit_moments(probs)
    for i in range(9):
        expected, _ = literal_algorithm_1(probs[:, i].tolist())
        np.testing.assert_allclose(fit.alpha[i], expected, rtol=1e-9)


def literal_algorithm_2(members, start, iterations, tolerance):
    """Algorithm 2 for one input, line by line; returns alpha and whether the loop was left early."""
    log_mean = [sum(math.log(p[k]) for p in members) / len(members) for k in range(len(start))]
    alpha = list(start)
    for _ in range(iterations):
        new = [literal_inverse_digamma(special.psi(sum(alpha)) + value) for value in log_mean]
        small = math.dist(new, alpha) < tolerance * math.hypot(*alpha)
        alpha = new
        if small:
            return alpha, True
    return alpha, False


@pytest.mark.parametrize(("iterations", "tolerance"), [(20, 1e-6), (200, 1e-3), (3, 0.0)])
def test_algorithm_2_mle_dirichlet(iterations, tolerance):
    probs = ensemble()
    start = dirichlet.fit_moments(probs).alpha
    fit = dirichlet.fit_fixed_point(np.log(probs), iterations=iterations, tol=tolerance)
    left_early = []
    for i in range(6):
        expected, early = literal_algorithm_2(probs[:, i].tolist(), start[i].tolist(), iterations, tolerance)
        left_early.append(early)
        np.testing.assert_allclose(fit.alpha[i], expected, rtol=1e-8)
    assert fit.converged.tolist() == left_early
    if tolerance == 1e-3:
        assert any(left_early)


# --------------------------------------------------------------------------------- collapse and cross-entropy


def test_eq_alphakfail():
    """Uniform means are equal concentrations alpha_0/K, whatever alpha_0 is; the input no longer matters."""
    for classes in (2, 5, 100):
        for total in (1.0, 1e3, 1e7):
            alpha = np.full((3, classes), total / classes)
            np.testing.assert_allclose(dirichlet.mean(alpha), 1 / classes, rtol=1e-12)
            np.testing.assert_allclose(dirichlet.precision(alpha), total, rtol=1e-12)


def test_eq_collapse_variance():
    for classes in (2, 7, 100):
        for total in (1, 50, 10**7):
            expected = Fraction(classes - 1, classes**2 * (total + 1))
            alpha = np.full(classes, total / classes)
            np.testing.assert_allclose(dirichlet.variance(alpha), float(expected), rtol=1e-11)
            assert dirichlet.total_variance(alpha) == pytest.approx(float(classes * expected), rel=1e-11)


def test_eq_totalvar():
    alpha = np.array([0.6, 3.0, 1.2, 8.0])
    p = draws(alpha)
    assert_is_mean_of(((p - p.mean(axis=0)) ** 2).sum(axis=1), dirichlet.total_variance(alpha))
    literal = sum(a * (sum(alpha) - a) / (sum(alpha) ** 2 * (sum(alpha) + 1)) for a in alpha)
    assert dirichlet.total_variance(alpha) == pytest.approx(literal, rel=1e-12)


def cross_entropy(logits, label):
    parts = losses.recipe_loss(
        RECIPES["ce"], torch.atleast_2d(logits), torch.tensor([label]), lambda_kl=None, lambda_ev=None
    )
    return parts.total.sum()


def test_eq_ce_gradient():
    z = np.array([0.4, -1.0, 2.2, 0.0])
    for label in range(4):
        logits = torch.tensor(z, requires_grad=True)
        cross_entropy(logits, label).backward()
        expected = calibration.apply_temperature(z[None], 1.0)[0] - np.eye(4)[label]
        numeric = [partial(lambda x, y=label: cross_entropy(torch.tensor(x), y).item(), z, k) for k in range(4)]
        np.testing.assert_allclose(logits.grad, expected, rtol=1e-12)
        np.testing.assert_allclose(numeric, expected, rtol=1e-7)


def test_eq_ce_gradient_bound():
    rng = np.random.default_rng(10)
    largest = 0.0
    for scale in (0.1, 1, 10, 1e3, 1e6):
        logits = torch.tensor(rng.normal(size=(200, 5)) * scale, dtype=torch.float32, requires_grad=True)
        labels = torch.tensor(rng.integers(5, size=200))
        parts = losses.recipe_loss(RECIPES["ce"], logits, labels, lambda_kl=None, lambda_ev=None)
        parts.total.sum().backward()
        assert logits.grad.isfinite().all() and (logits.grad.abs() <= 1).all()
        largest = max(largest, logits.grad.abs().max().item())
    assert largest == 1, "the bound is reached"


# ----------------------------------------------------------------------------------- selective classification


def scored(inputs=200, seed=11, levels=None):
    """Uncertainties with ties and outcomes that err more often where the uncertainty is high."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.random(inputs) if levels is None else rng.integers(levels, size=inputs) / levels
    return uncertainty, rng.random(inputs) > 0.4 * uncertainty


@pytest.mark.parametrize("levels", [None, 12])
def test_threshold(levels):
    """tau keeps the most inputs of all thresholds whose retained calibration inputs err at most at rate r."""
    uncertainty, correct = scored(levels=levels)
    best, most = -math.inf, 0
    for tau in uncertainty:
        kept = [right for value, right in zip(uncertainty, correct, strict=True) if value <= tau]
        if kept.count(False) / len(kept) <= 0.1 and len(kept) > most:
            best, most = tau, len(kept)
    assert 0 < most < len(uncertainty)
    assert selective.select_threshold(uncertainty, correct, risk=0.1) == best


def test_eq_decision_rule():
    """arg max of the Dirichlet mean where the total variance is at most tau, else abstain."""
    alpha = np.random.default_rng(12).gamma(1.0, size=(50, 4)) * 4 + 0.05
    variance = dirichlet.total_variance(alpha)
    tau = np.sort(variance)[20]
    predicted, kept = dirichlet.mean(alpha).argmax(axis=1), selective.retained(variance, tau)
    decisions = [int(k) if keep else "abstain" for k, keep in zip(predicted, kept, strict=True)]
    expected = []
    for row in alpha.tolist():
        total = sum(row)
        literal = sum(a * (total - a) / (total**2 * (total + 1)) for a in row)
        expected.append(row.index(max(row)) if literal <= tau * (1 + 1e-12) else "abstain")
    assert decisions == expected
    assert decisions.count("abstain") == 29


# --------------------------------------------------------------------------------- appendix: loss derivations


def test_eq_appmseloss():
    """The integral of the first line; the last line is eq:mseloss. (The line before it lacks a plus sign.)"""
    density = np.prod(POINTS ** (ALPHA - 1), axis=1) / math.exp(log_beta(ALPHA))
    integrals = [(WEIGHTS * density) @ ((np.eye(3)[j] - POINTS) ** 2).sum(axis=1) for j in range(3)]
    np.testing.assert_allclose(per_class(losses.mse, ALPHA), integrals, rtol=1e-6)


def test_eq_app_digamma_integral():
    unnormalised = np.prod(POINTS ** (ALPHA - 1), axis=1)
    integrals = -(WEIGHTS * unnormalised) @ np.log(POINTS) / math.exp(log_beta(ALPHA))
    np.testing.assert_allclose(per_class(losses.digamma, ALPHA), integrals, rtol=1e-6)


def test_eq_app_beta_derivative():
    """dB/dalpha_k is the integral of prod p_i^(alpha_i - 1) log p_k, which is -B times the digamma loss."""
    unnormalised = np.prod(POINTS ** (ALPHA - 1), axis=1)
    integrals = (WEIGHTS * unnormalised) @ np.log(POINTS)
    slopes = [partial(lambda a: math.exp(log_beta(a)), ALPHA, k) for k in range(3)]
    np.testing.assert_allclose(integrals, slopes, rtol=1e-6)
    np.testing.assert_allclose(-math.exp(log_beta(ALPHA)) * per_class(losses.digamma, ALPHA), slopes, rtol=1e-7)


def test_eq_app_log_beta_derivative():
    for alpha in (ALPHA, np.array([0.3, 0.9]), np.array([12.0, 1.0, 0.2, 4.0, 30.0])):
        slopes = [-partial(log_beta, alpha, k) for k in range(len(alpha))]
        np.testing.assert_allclose(per_class(losses.digamma, alpha), slopes, rtol=1e-7)


def test_eq_appdigammaloss():
    """For whole numbers psi(n) - psi(m) is the harmonic sum 1/m + ... + 1/(n - 1)."""
    alpha = [3, 1, 7, 2]
    expected = [float(sum(Fraction(1, i) for i in range(a, sum(alpha)))) for a in alpha]
    np.testing.assert_allclose(per_class(losses.digamma, [float(a) for a in alpha]), expected, rtol=1e-13)
