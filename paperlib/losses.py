"""Training losses of Dirichlet classifiers, per sample, and the weight of their KL term.

Every loss takes concentrations of any floating dtype and returns float64. It works in float64 inside, which
autocast leaves alone, and has its own gradient where automatic differentiation would subtract nearly equal
numbers. The gamma functions enter only through remainders that keep their digits for every a > 0:

    psi(a)  = log(a + 10) - s(a)       g(a)  = log Gamma(a) - (a - 1) psi(a) + a
    psi'(a) = 1/a + w(a)               g'(a) = 1 - (a - 1) psi'(a)

Each is a sum over a, a + 1, ... a + 9 (its recurrence) and an asymptotic series at a + 10. The gamma functions of
torch do not serve: their differences cancel, and its trigamma is good to 5e-10 only.
"""

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paperlib import checks

SCHEDULES = ("linear", "warmup", "constant", "constant_per_class", "flipped", "none")

_SHIFT = 10
_STEPS = torch.arange(_SHIFT + 1, dtype=torch.float64)
_BERNOULLI = torch.tensor((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730), dtype=torch.float64)
_POWERS = 2 * len(_BERNOULLI) + 1


def _weights():
    """Weights of 1/(a + i), of 1/((a + i)^2 (a + i + 1)) for i = 0..9, and of u^1..u^13, for five sums."""
    ranks = _STEPS[1:]
    ones, none = torch.ones_like(ranks), torch.zeros_like(ranks)
    v, g, w, no_tail = torch.zeros(4, _POWERS, dtype=torch.float64)  # asymptotic series in u = 1/(a + 10)
    double_k = 2 * _STEPS[1 : len(_BERNOULLI) + 1]
    v[0] = w[1] = 1 / 2
    v[1::2] = _BERNOULLI / double_k
    g[:-1:2] = _BERNOULLI / (double_k - 1)
    w[2::2] = _BERNOULLI
    rows = (
        (ones, none, v),  # s
        (-ranks, none, g - (_SHIFT + 1) * v),  # g, but for its logarithms
        (none, ones, w),  # w
        (none, none, w),  # w(a + 10)
        (none, ranks, no_tail),  # the recurrence terms of g'
    )
    return torch.stack([torch.cat(row) for row in rows])


_WEIGHTS = _weights()


@dataclass(frozen=True)
class LossParts:
    """A recipe's loss per sample: the total, and its unweighted parts (None: not in the recipe)."""

    total: torch.Tensor
    fit: torch.Tensor
    kl: torch.Tensor | None = None
    log_evidence: torch.Tensor | None = None

    def named(self):
        """Pairs of name and values of the total and of the parts that the recipe has."""
        return [(name, values) for name, values in vars(self).items() if values is not None]


def mse(alpha, y):
    """Expected squared distance between the one-hot label and p ~ Dir(alpha).

    Paper: eq. mseloss (derived in eq. appmseloss).
    Shapes: alpha (inputs, classes), y (inputs,) class indices; returns (inputs,) float64.
    Errors: ValueError for alpha that is not finite and positive with two axes, or labels out of range.
    """
    return _PerSample.apply(_mse, _concentrations(alpha), _labels(y, alpha))


def digamma(alpha, y):
    """Expected cross-entropy -log p_y under p ~ Dir(alpha): psi(alpha_0) - psi(alpha_y).

    Paper: eq. digammaloss (derived in eq. appdigammaloss).
    Shapes: alpha (inputs, classes), y (inputs,) class indices; returns (inputs,) float64.
    Errors: ValueError for alpha that is not finite and positive with two axes, or labels out of range.
    """
    return _PerSample.apply(_digamma, _concentrations(alpha), _labels(y, alpha))


def kl_to_uniform(alpha):
    """Divergence KL[Dir(alpha) || Dir(1)], on the full alpha: the true class is not removed.

    Paper: the closed form after eq. dirloss; D04.
    Shapes: alpha (inputs, classes); returns (inputs,) float64.
    Errors: ValueError for alpha that is not finite and positive with two axes.
    """
    return _PerSample.apply(_kl_to_uniform, _concentrations(alpha))


def log_evidence(alpha):
    """Log-evidence log(1 + alpha_0), without its weight lambda_EV.

    Paper: the log-evidence regularizer L_LOGEV (Section sec:edl).
    Shapes: alpha (inputs, classes); returns (inputs,) float64.
    Errors: ValueError for alpha that is not finite and positive with two axes.
    """
    return _concentrations(alpha).sum(-1).log1p()


def kl_weight(schedule, epoch, epochs, classes, lambda0, warmup=10):
    """Weight lambda_KL of the KL term in epoch t; epochs count from 1, so that the last one has t = epochs.

    `linear`: lambda0/K t/T with T = epochs; `flipped`: the same with a minus, a reward for leaving Dir(1);
    `constant`: lambda0; `constant_per_class`: lambda0/K; `warmup`: min(1, t/T) with T = warmup; `none`: 0.
    The last two do not read lambda0.

    Paper: eq. annealkl (`linear`); the warm-up schedule before it (`warmup`); D12 for the others.
    Shapes: scalars; returns a float.
    Errors: ValueError for an unknown schedule, epoch outside 0..epochs, or a bad classes, lambda0 or warmup.
    """
    checks.choice("KL schedule", schedule, SCHEDULES)
    if epochs < 1 or not 0 <= epoch <= epochs:
        raise ValueError(f"epoch must lie in 0..epochs with epochs >= 1, got epoch {epoch} of {epochs}")
    if classes < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    if not warmup > 0:
        raise ValueError(f"warmup must be a positive number of epochs, got {warmup}")
    if schedule == "none":
        return 0.0
    if schedule == "warmup":
        return min(1.0, epoch / warmup)
    if lambda0 is None or not 0 <= lambda0 < math.inf:
        raise ValueError(f"lambda0 must be finite and not negative, got {lambda0}")
    if schedule == "constant":
        return float(lambda0)
    if schedule == "constant_per_class":
        return lambda0 / classes
    linear = lambda0 / classes * epoch / epochs
    return -linear if schedule == "flipped" else linear


def recipe_loss(recipe, outputs, y, *, lambda_kl, lambda_ev):
    """Training loss of a recipe with its parts; outputs are logits for cross-entropy, else alpha.

    Only recipe.base_loss and recipe.regulariser are read. A recipe uses the weight of its own regulariser and
    ignores the other, which may be None; the parts come unweighted.

    Paper: eq. celoss, eq. dirloss and Table tab:dirichlet_formulations.
    Shapes: outputs (inputs, classes), y (inputs,) class indices; every part (inputs,) float64.
    Errors: ValueError as the single losses, for an unknown base loss or regulariser, or for a weight that the
        recipe needs and is not a finite number.
    """
    base_loss = checks.choice("base loss", recipe.base_loss, ("cross_entropy", "mse", "digamma"))
    regulariser = checks.choice("regulariser", recipe.regulariser, (None, "kl", "log_evidence"))
    if base_loss == "cross_entropy":
        checks.finite_tensor(outputs, "logits", ("inputs", "classes"))
        fit = functional.cross_entropy(outputs.double(), _labels(y, outputs), reduction="none")
        return LossParts(total=fit, fit=fit)
    alpha = _concentrations(outputs)
    fit = _PerSample.apply(_mse if base_loss == "mse" else _digamma, alpha, _labels(y, alpha))
    if regulariser == "kl":
        _weight(lambda_kl, "lambda_kl")
        kl = _PerSample.apply(_kl_to_uniform, alpha)
        return LossParts(total=fit + lambda_kl * kl, fit=fit, kl=kl)
    if regulariser == "log_evidence":
        _weight(lambda_ev, "lambda_ev")
        log_ev = alpha.sum(-1).log1p()
        return LossParts(total=fit + lambda_ev * log_ev, fit=fit, log_evidence=log_ev)
    return LossParts(total=fit, fit=fit)


def _weight(value, name):
    if value is None or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number for this recipe, got {value}")


def _concentrations(alpha):
    """Alpha as float64 after the checks; the gradient returns in alpha's own dtype."""
    smallest = checks.finite_tensor(alpha, "alpha", ("inputs", "classes"))
    if smallest <= 0:
        values = alpha.detach().double().cpu().numpy()
        checks.first_bad(values <= 0, values, "alpha", "is not positive")
    return alpha.double()


def _labels(y, outputs):
    checks.class_indices(y.cpu().numpy(), len(outputs), outputs.shape[-1], "y")
    return y.long()


class _PerSample(torch.autograd.Function):
    """A loss per sample from a function that returns its values and its gradient with respect to alpha."""

    @staticmethod
    def forward(ctx, values_and_gradient, alpha, *arguments):
        values, gradient = values_and_gradient(alpha, *arguments)
        ctx.save_for_backward(gradient)
        ctx.others = len(arguments)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return None, grad.unsqueeze(-1) * gradient, *[None] * ctx.others


def _mse(alpha, y):
    # 1 - p of the largest class is the share of all others: 1 - p itself has no digits left next to p = 1.
    top, y = alpha.argmax(-1, keepdim=True), y.unsqueeze(-1)
    rest = alpha.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    total = rest + alpha.gather(-1, top)
    p, top_miss = alpha / total, rest / total
    complement = (1 - p).scatter(-1, top, top_miss)
    p_y, miss = p.gather(-1, y), complement.gather(-1, y)
    wrong = p.scatter(-1, y, 0.0)
    fit = miss.square() + wrong.square().sum(-1, keepdim=True)
    variance = (p * complement).sum(-1, keepdim=True) / (total + 1)

    # Written with differences from p_y, terms of the gradient cancel only where the gradient itself is small.
    pull = wrong * (p_y - wrong)
    minor = pull.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    slope = (p + pull.gather(-1, top)).scatter(-1, top, p.gather(-1, top) * (top_miss + p_y)) + minor
    slope = (total * slope + p_y).scatter(-1, y, -(total * fit + miss))
    gradient = (slope * (2 / total) - variance) / (total + 1)
    return (fit + variance).squeeze(-1), gradient


def _digamma(alpha, y):
    y = y.unsqueeze(-1)
    own = alpha.gather(-1, y)
    rest = alpha.scatter(-1, y, 0.0).sum(-1, keepdim=True)
    total = own + rest
    s, _, w, _ = _remainders(torch.cat((own, total), dim=-1))
    values = (rest / (own + _SHIFT)).log1p().squeeze(-1) + s[:, 0] - s[:, 1]
    w_own, w_total = w.split(1, dim=-1)
    gradient = (1 / total + w_total).expand_as(alpha).scatter(-1, y, w_total - w_own - rest / (own * total))
    return values, gradient


def _kl_to_uniform(alpha):
    classes = alpha.shape[-1]
    total = alpha.sum(-1, keepdim=True)
    s, g, w, g_slope = _remainders(torch.cat((alpha, total), dim=-1))
    psi_total = (total + _SHIFT).log().squeeze(-1) - s[:, -1]
    values = g[:, -1] - g[:, :-1].sum(-1) + (classes - 1) * psi_total - math.lgamma(classes)
    gradient = (classes - 1) * (1 / total + w[:, -1:]) + g_slope[:, -1:] - g_slope[:, :-1]
    return values, gradient


def _remainders(a):
    """s(a), g(a), w(a) and g'(a) of the module's docstring, for a with two axes."""
    steps = a + _STEPS.to(a.device).view(-1, 1, 1)
    inverse = steps.reciprocal()
    x, u = steps[-1], inverse[-1]
    drops = inverse[:-1].square() * inverse[1:]
    powers = u.expand(_POWERS, *u.shape).cumprod(0)
    sums = _WEIGHTS.to(a.device) @ torch.cat((inverse[:-1], drops, powers)).flatten(1)
    s, g, w, w_tail, weighted_drops = sums.view(-1, *a.shape)
    g = g + x.log() / 2 - (steps[:-1] * u).prod(0).log() + (1 + math.log(2 * math.pi)) / 2
    return s, g, w, u + (1 - a) * w_tail + weighted_drops
