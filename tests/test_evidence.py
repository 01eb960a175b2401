"""The activations, the recipes' heads and what they refuse."""

import mpmath
import pytest
import torch

from paperlib import evidence
from paperlib.recipes import RECIPES

EVIDENTIAL = [name for name, recipe in RECIPES.items() if recipe.activation is not None]
LOGITS = [
    -1e4,
    -200.0,
    -88.0,
    -50.0,
    -17.0,
    -14.0,
    -5.0,
    -0.5,
    0.0,
    1e-3,
    0.7,
    5.0,
    15.0,
    17.0,
    30.0,
    50.0,
    88.0,
    1e4,
]


def exact(function, z):
    """Value and derivative of an mpmath function at the float z, 50 digits inside."""
    with mpmath.workdps(50):
        point = mpmath.mpf(z)
        return float(function(point)), float(mpmath.diff(function, point, h=mpmath.mpf(10) ** -20))


def value_and_gradient(function, z, dtype):
    z = torch.tensor(z, dtype=dtype, requires_grad=True)
    value = function(z)
    value.sum().backward()
    return value.detach(), z.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.float64, 1e-14)])
def test_softplus_is_right_for_extreme_logits(dtype, tolerance):
    value, gradient = value_and_gradient(evidence.softplus, LOGITS, dtype)
    assert value.dtype == gradient.dtype == dtype
    # The smallest normal number is all that can be asked of a value that underflows.
    tiny = torch.finfo(dtype).tiny
    for z, found, slope in zip(LOGITS, value, gradient, strict=True):
        z = torch.tensor(z, dtype=dtype).item()
        expected, expected_slope = exact(lambda x: mpmath.log1p(mpmath.exp(x)), z)
        assert found.item() == pytest.approx(expected, rel=tolerance, abs=tiny)
        assert slope.item() == pytest.approx(expected_slope, rel=tolerance, abs=tiny)


def test_softplus_keeps_half_precision_logits_from_losing_digits():
    z = torch.tensor([-3.0, 0.0, 9.0], dtype=torch.bfloat16)
    assert torch.equal(evidence.softplus(z), evidence.softplus(z.float()))


def test_exponential_inside_and_outside_the_clamp():
    z = [-1e4, -10.5, -10.0, -3.0, 0.0, 9.9, 10.0, 10.001, 1e4 + 0.3]
    value, gradient = value_and_gradient(evidence.exponential, z, torch.float32)
    expected = torch.tensor(z).clamp(-10, 10).exp()
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected), "the gradient passes the clamp as if it were not there"


def test_adaptive_softplus_starts_at_softplus_and_learns_from_the_first_step():
    activation = evidence.AdaptiveSoftplus(5)
    assert torch.equal(activation.beta, torch.ones(5)) and torch.equal(activation.gamma, torch.ones(5))
    z = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0)) * 20
    assert torch.equal(activation(z), evidence.softplus(z))
    activation(z).sum().backward()
    assert (activation.b.grad > 0).all() and (activation.c.grad > 0).all()


@pytest.mark.parametrize("b", [0.0, 0.4, -0.4, 30.0])
@pytest.mark.parametrize("c", [0.0, -3.0, 2.0])
def test_adaptive_softplus_values_and_all_three_gradients(b, c):
    activation = evidence.AdaptiveSoftplus(2)
    with torch.no_grad():
        activation.b.fill_(b)
        activation.c.fill_(c)
    assert (activation.beta >= 1).all() and (activation.gamma > 0).all()
    beta, gamma = activation.beta[0].item(), activation.gamma[0].item()
    for value in LOGITS:
        z = torch.full((1, 2), value, requires_grad=True)
        activation.zero_grad()
        phi = activation(z)[0, 0]
        phi.backward()
        with mpmath.workdps(50):
            grown = mpmath.mpf(gamma) * mpmath.exp(z[0, 0].item())
            inside = beta + grown
            expected = float(mpmath.log(inside))
            by_z, by_beta = float(grown / inside), float(1 / inside)
        assert phi.item() == pytest.approx(expected, rel=3e-7, abs=1e-37)
        assert z.grad[0, 0].item() == pytest.approx(by_z, rel=1e-6, abs=1e-37)
        assert activation.c.grad[0].item() == pytest.approx(by_z, rel=1e-6, abs=1e-37)
        assert activation.b.grad[0].item() == pytest.approx(by_beta if b >= 0 else -by_beta, rel=1e-6, abs=1e-37)


def test_adaptive_softplus_keeps_its_bounds_while_it_learns():
    """Gradients that want beta below 1 leave it at the bound, and it can leave the bound again."""
    activation = evidence.AdaptiveSoftplus(2)
    optimiser = torch.optim.SGD(activation.parameters(), lr=0.05)
    z = torch.zeros(4, 2)
    for sign, steps in ((1, 200), (-1, 200)):
        for _ in range(steps):
            optimiser.zero_grad()
            (sign * activation(z)).mean().backward()
            optimiser.step()
            assert (activation.beta >= 1).all() and (activation.gamma > 0).all()
        if sign == 1:
            assert (activation.beta < 1.1).all()
    assert (activation.beta > 1.5).all()


@pytest.mark.parametrize("name", EVIDENTIAL)
def test_to_alpha_against_a_literal_loop(name):
    recipe = RECIPES[name]
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 12
    alpha = evidence.to_alpha(logits, name)
    for i in range(7):
        for k in range(4):
            z = logits[i, k].item()
            with mpmath.workdps(30):
                if recipe.activation == "exponential":
                    phi = mpmath.exp(max(-10, min(10, z)))
                else:
                    phi = mpmath.log(1 + mpmath.exp(z))
                expected = phi + 1 if recipe.delta == 1 else max(phi, mpmath.mpf("1e-6"))
            assert alpha[i, k].item() == pytest.approx(float(expected), rel=1e-13)


def test_recipes_are_the_rows_of_table_1_in_order():
    rows = [(r.title, r.base_loss, r.regulariser, r.activation, r.delta) for r in map(RECIPES.get, EVIDENTIAL)]
    assert rows == [
        ("MSE Only", "mse", None, "softplus", 0),
        ("MSE Clamp", "mse", "kl", "softplus", 0),
        ("MSE Soft Adapt", "mse", "kl", "adaptive_softplus", 0),
        ("MSE Plus One", "mse", "kl", "softplus", 1),
        ("Exponential", "mse", "kl", "exponential", 1),
        ("Digamma", "digamma", "log_evidence", "softplus", 1),
    ]


@pytest.mark.parametrize("name", EVIDENTIAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_is_finite_and_above_its_floor_with_finite_gradients(name, dtype):
    logits = torch.tensor([LOGITS, LOGITS[::-1]], dtype=dtype, requires_grad=True)
    alpha = evidence.Head(name, len(LOGITS))(logits)
    alpha.log().sum().backward()
    assert alpha.dtype == torch.float32
    assert alpha.isfinite().all() and (alpha >= (1 if RECIPES[name].delta else 1e-6)).all()
    assert logits.grad.isfinite().all() and (logits.grad >= 0).all()


def test_alpha_floor_is_a_maximum():
    logits = torch.tensor([[-20.0, -13.0]], requires_grad=True)
    alpha = evidence.to_alpha(logits, "mse_clamp")
    alpha.sum().backward()
    assert alpha[0, 0].item() == pytest.approx(1e-6) and alpha[0, 1].item() > 2e-6
    assert logits.grad[0, 0] == 0 and logits.grad[0, 1] > 0


def test_head_uses_its_learned_activation_and_ce_passes_logits():
    logits = torch.randn(3, 4)
    head = evidence.Head("mse_softadapt", 4)
    assert {name for name, _ in head.named_parameters()} == {"activation.b", "activation.c"}
    assert torch.equal(head(logits), evidence.to_alpha(logits, "mse_softadapt"))
    with torch.no_grad():
        head.activation.b.fill_(2.0)
    assert torch.equal(head(logits), evidence.to_alpha(logits, RECIPES["mse_softadapt"], head.activation))
    assert (head(logits) > evidence.to_alpha(logits, "mse_softadapt")).all()
    assert evidence.Head("ce", 4)(logits) is logits
    for name in set(RECIPES) - {"mse_softadapt"}:
        assert not list(evidence.Head(name, 4).parameters())


@pytest.mark.parametrize("name", EVIDENTIAL)
def test_alpha_follows_a_permutation_of_inputs_and_classes(name):
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)) * 5
    rows, columns = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([5, 2, 0, 1, 4, 3])
    permuted = evidence.to_alpha(logits[rows][:, columns], name)
    assert torch.equal(permuted, evidence.to_alpha(logits, name)[rows][:, columns])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.zeros(2, 3), "mse_clmp"),
            "unknown recipe 'mse_clmp'; choose one of: ce, mse_only, mse_clamp",
        ),
        ((torch.zeros(2, 3), "ce"), "'ce' has no concentrations"),
        ((torch.zeros(3), "digamma"), r"logits must have 2 axes \(inputs, classes\), got shape \(3,\)"),
        ((torch.zeros(0, 3), "digamma"), "logits is empty"),
        ((torch.zeros(2, 3, dtype=torch.long), "digamma"), "floating point"),
        ((torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), "digamma"), r"logits\[1, 1\] is not finite: nan"),
        ((torch.tensor([[0.0, torch.inf]]), "exponential"), r"logits\[0, 1\] is not finite: inf"),
        ((torch.zeros(2, 3), "mse_only", evidence.AdaptiveSoftplus(3)), "no learned activation"),
        (
            (torch.zeros(2, 3), "mse_softadapt", evidence.AdaptiveSoftplus(4)),
            "3 classes, but the activation has 4",
        ),
    ],
)
def test_to_alpha_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        evidence.to_alpha(*arguments)


def test_heads_say_what_is_wrong():
    with pytest.raises(ValueError, match="unknown recipe 'edl'"):
        evidence.Head("edl", 3)
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        evidence.AdaptiveSoftplus(1)
