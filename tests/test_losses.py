"""The losses against 50-digit arithmetic, their assembly by recipe, and the schedules of the KL weight."""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paperlib import losses
from paperlib.evidence import Head
from paperlib.recipes import RECIPES, Recipe

MAGNITUDES = np.float32(10.0) ** np.arange(-6, 9, dtype=np.float32)
mpmath_context = mpmath.mp.clone()
mpmath_context.dps = 50
log_gamma = functools.cache(mpmath_context.loggamma)
polygamma = functools.cache(mpmath_context.psi)


def exact_mse(alpha, y):
    total = mpmath_context.fsum(alpha)
    p = [a / total for a in alpha]
    squares = mpmath_context.fsum(q * q for q in p)
    value = 1 - 2 * p[y] + squares + (1 - squares) / (total + 1)
    gradient = [
        2 * (p[y] - (k == y) + total / (total + 1) * (q - squares)) / total - (1 - squares) / (total + 1) ** 2
        for k, q in enumerate(p)
    ]
    return value, gradient


def exact_digamma(alpha, y):
    total = mpmath_context.fsum(alpha)
    value = polygamma(0, total) - polygamma(0, alpha[y])
    return value, [polygamma(1, total) - (k == y) * polygamma(1, a) for k, a in enumerate(alpha)]


def exact_kl(alpha, _):
    total, classes = mpmath_context.fsum(alpha), len(alpha)
    value = log_gamma(total) - log_gamma(mpmath_context.mpf(classes))
    value += mpmath_context.fsum((a - 1) * (polygamma(0, a) - polygamma(0, total)) - log_gamma(a) for a in alpha)
    return value, [(a - 1) * polygamma(1, a) - (total - classes) * polygamma(1, total) for a in alpha]


def exact_log_evidence(alpha, _):
    total = mpmath_context.fsum(alpha)
    return mpmath_context.log1p(total), [1 / (1 + total)] * len(alpha)


LOSSES = {
    "mse": (losses.mse, exact_mse),
    "digamma": (losses.digamma, exact_digamma),
    "kl": (lambda alpha, y: losses.kl_to_uniform(alpha), exact_kl),
    "log_evidence": (lambda alpha, y: losses.log_evidence(alpha), exact_log_evidence),
}


@functools.cache
def hard_alphas(classes):
    """Rows of one magnitude, of one class apart from the others, and of magnitudes mixed at random."""
    rng = np.random.default_rng(classes)
    few = {100: 2, 1000: 4}.get(classes, 1)
    rows = [np.full(classes, a) for a in MAGNITUDES[:: few + 1]] + [np.ones(classes)]
    for own in MAGNITUDES[::few]:
        for others in MAGNITUDES[:: 2 * few]:
            rows.append(np.full(classes, others))
            rows[-1][0] = own
    rows += [rng.choice(MAGNITUDES, classes) for _ in range(8 // few)]
    rows += [np.exp(rng.normal(0, spread, classes)) for spread in (1e-3, 1)] if classes <= 100 else []
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_over_the_range_of_alpha(name, classes):
    loss, exact = LOSSES[name]
    rows = hard_alphas(classes)
    # At Dir(1) the divergence and its gradient are sums that cancel to 0; the other losses are never 0.
    rounding = 1e-14 * classes * math.log(classes) if name == "kl" else 0
    for label in (0, 1):
        alpha = torch.tensor(rows, requires_grad=True)
        values = loss(alpha, torch.full((len(rows),), label))
        values.sum().backward()
        assert values.dtype == torch.float64 and alpha.grad.dtype == torch.float32
        for row, value, gradient in zip(rows, values.tolist(), alpha.grad.numpy(), strict=True):
            expected, slopes = exact([mpmath_context.mpf(float(a)) for a in row], label)
            assert value == pytest.approx(float(expected), rel=1e-8, abs=rounding)
            slopes = np.array([float(slope) for slope in slopes])
            allowed = 2e-7 * np.abs(slopes) + (1e-15 if name == "kl" else 0)
            assert (np.abs(gradient - slopes) <= allowed).all(), (row[:3], label)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name):
    alpha = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 0.1
    y = torch.tensor([0, 4, 2, 2])
    torch.autograd.gradcheck(lambda a: LOSSES[name][0](a, y), alpha.requires_grad_(), rtol=1e-6)


def test_kl_still_pulls_where_float32_has_no_gradient_left():
    alpha = torch.full((1, 100), 1e7, requires_grad=True)
    losses.kl_to_uniform(alpha).sum().backward()
    # Leading term of the asymptotic series: (K - 1/2)/alpha_0 - 1/(2 alpha_k).
    assert alpha.grad[0, 0].item() == pytest.approx(99.5 / 1e9 - 0.5 / 1e7, rel=1e-5)


def test_kl_is_zero_at_uniform_with_no_gradient():
    for classes in (2, 10, 1000):
        alpha = torch.ones(1, classes, requires_grad=True)
        value = losses.kl_to_uniform(alpha)
        value.sum().backward()
        assert abs(value.item()) < 1e-10 and alpha.grad.abs().max() < 1e-12


log_alpha = st.floats(math.log(1e-6), math.log(1e8))


@settings(max_examples=60, deadline=None)
@given(st.lists(log_alpha, min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_bounds_and_permutations(logs, random):
    alpha = torch.tensor([logs], dtype=torch.float64).exp()
    order = random.sample(range(len(logs)), len(logs))
    y = torch.tensor([random.randrange(len(logs))])
    moved = torch.tensor([order.index(y.item())])
    for loss, _ in LOSSES.values():
        value = loss(alpha, y).item()
        assert math.isfinite(value)
        assert loss(alpha[:, order], moved).item() == pytest.approx(value, rel=1e-7, abs=1e-11)
    assert 0 <= losses.mse(alpha, y).item() <= 2
    assert losses.digamma(alpha, y).item() > 0
    assert losses.kl_to_uniform(alpha).item() > -1e-12
    # Jensen: the expected cross-entropy is at least that of the mean.
    others = sum(value for k, value in enumerate(alpha[0].tolist()) if k != y.item())
    assert losses.digamma(alpha, y).item() >= math.log1p(others / alpha[0, y].item()) * (1 - 1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name):
    alpha = torch.rand(6, 4, generator=torch.Generator().manual_seed(3)) * 1e5
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    results = []
    for enabled in (False, True):
        leaf = alpha.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = LOSSES[name][0](leaf, y)
            value.mean().backward()
        results.append((value, leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", LOSSES)
def test_samples_do_not_touch_each_other(name):
    alpha = torch.tensor(hard_alphas(10))
    y = torch.arange(len(alpha)) % 10
    together = LOSSES[name][0](alpha, y)
    alone = torch.cat([LOSSES[name][0](alpha[i : i + 1], y[i : i + 1]) for i in range(len(alpha))])
    torch.testing.assert_close(together, alone, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "epoch", "expected"),
    [
        ("linear", 0, 0.0),
        ("linear", 1, 0.3 / 5 / 30),
        ("linear", 30, 0.3 / 5),
        ("flipped", 30, -0.3 / 5),
        ("flipped", 15, -0.3 / 10),
        ("warmup", 0, 0.0),
        ("warmup", 5, 0.5),
        ("warmup", 10, 1.0),
        ("warmup", 30, 1.0),
        ("constant", 1, 0.3),
        ("constant", 30, 0.3),
        ("constant_per_class", 1, 0.3 / 5),
        ("none", 30, 0.0),
    ],
)
def test_kl_weight(schedule, epoch, expected):
    assert losses.kl_weight(schedule, epoch, epochs=30, classes=5, lambda0=0.3) == pytest.approx(expected)


def test_kl_weight_options():
    assert losses.kl_weight("warmup", 5, 30, 5, lambda0=None, warmup=20) == 0.25
    assert losses.kl_weight("none", 5, 30, 5, lambda0=None) == 0
    for schedule in losses.SCHEDULES:
        assert isinstance(losses.kl_weight(schedule, 3, 30, 5, 1), float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "cosine"}, "unknown KL schedule 'cosine'; choose one of: linear, warmup"),
        ({"epoch": 31}, "epoch 31 of 30"),
        ({"epoch": -1}, "epoch -1 of 30"),
        ({"epoch": 0, "epochs": 0}, "epoch 0 of 0"),
        ({"classes": 1}, "classes must be at least 2"),
        ({"lambda0": -0.1}, "lambda0 must be finite and not negative, got -0.1"),
        ({"lambda0": None}, "lambda0 must be finite and not negative, got None"),
        ({"lambda0": math.nan}, "got nan"),
        ({"warmup": 0}, "warmup must be a positive"),
    ],
)
def test_kl_weight_says_what_is_wrong(change, message):
    arguments = {"schedule": "linear", "epoch": 3, "epochs": 30, "classes": 5, "lambda0": 0.3}
    with pytest.raises(ValueError, match=message):
        losses.kl_weight(**arguments | change)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_loss_is_the_sum_of_its_parts(name):
    recipe = RECIPES[name]
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), requires_grad=True)
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    outputs = Head(recipe, 4)(logits)
    parts = losses.recipe_loss(recipe, outputs, y, lambda_kl=0.7, lambda_ev=0.2)
    if name == "ce":
        fit = -torch.log_softmax(logits.double(), -1)[range(6), y]
    else:
        fit = (losses.digamma if name == "digamma" else losses.mse)(outputs, y)
    torch.testing.assert_close(parts.fit, fit)
    expected = fit
    if recipe.regulariser == "kl":
        torch.testing.assert_close(parts.kl, losses.kl_to_uniform(outputs))
        expected = fit + 0.7 * losses.kl_to_uniform(outputs)
    if recipe.regulariser == "log_evidence":
        torch.testing.assert_close(parts.log_evidence, losses.log_evidence(outputs))
        expected = fit + 0.2 * losses.log_evidence(outputs)
    torch.testing.assert_close(parts.total, expected)
    assert (parts.kl is not None) == (recipe.regulariser == "kl")
    assert (parts.log_evidence is not None) == (recipe.regulariser == "log_evidence")
    names = ["total", "fit"] + ([recipe.regulariser] if recipe.regulariser else [])
    assert [part for part, _ in parts.named()] == names
    assert all(torch.equal(values, getattr(parts, part)) for part, values in parts.named())
    gradients = [torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (parts.total, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_learns_a_separable_task(name):
    """A linear layer on three noisy clusters: each recipe's loss falls, and its prediction becomes right."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(90) % 3
    inputs = torch.eye(3)[y] * 3 + torch.randn(90, 3, generator=generator) * 0.3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), Head(name, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    history = []
    for _ in range(60):
        outputs = model(inputs)
        loss = losses.recipe_loss(RECIPES[name], outputs, y, lambda_kl=0.01, lambda_ev=0.01).total.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        history.append(loss.item())
    assert history[-1] < 0.8 * history[0]
    assert (outputs.argmax(-1) == y).all()


GOOD = torch.ones(3, 4)
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (torch.ones(4), r"alpha must have 2 axes \(inputs, classes\), got shape \(4,\)"),
        (torch.ones(0, 4), "alpha is empty"),
        (torch.ones(3, 4, dtype=torch.int64), "floating point"),
        (
            GOOD.clone().index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(0.0)),
            r"alpha\[2, 1\] is not positive",
        ),
        (
            GOOD.clone().index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(-1.0)),
            r"alpha\[1, 3\] is not positive",
        ),
        (
            GOOD.clone().index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(torch.nan)),
            r"alpha\[1, 0\] is not finite",
        ),
        (GOOD.bfloat16() * 0, r"alpha\[0, 0\] is not positive"),
        (torch.full((3, 4), torch.inf), r"alpha\[0, 0\] is not finite"),
    ],
)
def test_bad_alpha_is_named(name, alpha, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[name][0](alpha, LABELS[: len(alpha)])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0, 4, 1]), r"y\[1\] is outside 0..3: 4"),
        (torch.tensor([0, 1, -1]), r"y\[2\] is outside 0..3: -1"),
        (torch.tensor([0, 1]), "y has 2 entries"),
        (torch.tensor([0.0, 1.0, 2.0]), "integer class indices"),
        (torch.zeros(3, 4, dtype=torch.long), "y must have 1 axis"),
    ],
)
def test_bad_labels_are_named(y, message):
    calls = (
        losses.mse,
        losses.digamma,
        lambda alpha, y: losses.recipe_loss(RECIPES["ce"], alpha, y, lambda_kl=0, lambda_ev=0),
        lambda alpha, y: losses.recipe_loss(RECIPES["mse_clamp"], alpha, y, lambda_kl=0, lambda_ev=0),
    )
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(GOOD, y)


@pytest.mark.parametrize(
    ("recipe", "outputs", "weights", "message"),
    [
        (RECIPES["mse_clamp"], GOOD, (None, 0.1), "lambda_kl must be a finite number"),
        (RECIPES["digamma"], GOOD, (0.1, math.nan), "lambda_ev must be a finite number"),
        (RECIPES["ce"], GOOD * torch.nan, (0, 0), r"logits\[0, 0\] is not finite"),
        (RECIPES["digamma"], -GOOD, (0, 0), r"alpha\[0, 0\] is not positive"),
        (Recipe("x", "X", "hinge", None, "softplus", 0), GOOD, (0, 0), "unknown base loss 'hinge'"),
        (Recipe("x", "X", "mse", "l2", "softplus", 0), GOOD, (0, 0), "unknown regulariser 'l2'"),
    ],
)
def test_recipe_loss_says_what_is_wrong(recipe, outputs, weights, message):
    with pytest.raises(ValueError, match=message):
        losses.recipe_loss(recipe, outputs, LABELS, lambda_kl=weights[0], lambda_ev=weights[1])
