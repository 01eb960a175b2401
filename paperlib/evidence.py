"""From logits to Dirichlet concentrations: the evidence activations and the heads of the recipes."""

import torch
from torch import nn

from paperlib import checks
from paperlib.recipes import RECIPES, Recipe

MIN_ALPHA = 1e-6  # D05
CLAMP = 10.0  # D06


def softplus(z):
    """Softplus log(1 + exp(z)).

    Paper: phi_SP (Section sec:edl).
    Shapes: any; float64 inside, returned in the dtype of z, at least float32.
    Errors: none.
    """
    return _log_add_exp(z, z.new_zeros((), dtype=torch.float64), z.double())


def exponential(z):
    """Exponential exp(z) with z clamped to [-10, 10]; the gradient passes the clamp as if it were not there.

    The gradient is exp(clamp(z)): a logit outside the range can still move back into it.

    Paper: phi_EXP (Section sec:edl) with the clamp of D06.
    Shapes: any; returned in the dtype of z, at least float32.
    Errors: none.
    """
    z = z.to(_working_dtype(z))
    return (z.detach().clamp(-CLAMP, CLAMP) + (z - z.detach())).exp()


class AdaptiveSoftplus(nn.Module):
    """Adaptive softplus log(beta_k + gamma_k exp(z_k)), with beta_k >= 1 and gamma_k > 0 learned per class.

    beta_k = 1 + |b_k| and gamma_k = exp(c_k), with b and c started at 0: exactly plain softplus. The slope of
    |b| at 0 is taken as +1, so that b learns from the first step; a smooth parametrisation would have slope 0
    where beta is smallest. Weight decay on b and c pulls towards plain softplus.

    Paper: phi_SA (Section sec:edl); D07.
    Shapes: maps (inputs, classes) to (inputs, classes); float64 inside, at least float32 outside.
    Errors: ValueError for fewer than two classes, or logits whose last axis is not `classes`.
    """

    def __init__(self, classes):
        super().__init__()
        if classes < 2:
            raise ValueError(f"classes must be at least 2, got {classes}")
        self.b = nn.Parameter(torch.zeros(classes))
        self.c = nn.Parameter(torch.zeros(classes))

    @property
    def beta(self):
        """beta_k of each class, shape (classes,)."""
        return 1 + self._excess()

    @property
    def gamma(self):
        """gamma_k of each class, shape (classes,)."""
        return self.c.exp()

    def forward(self, z):
        if z.shape[-1] != len(self.b):
            raise ValueError(f"logits have {z.shape[-1]} classes, but the activation has {len(self.b)}")
        return _log_add_exp(z, self._excess().double().log1p(), z.double() + self.c.double())

    def _excess(self):
        return torch.where(self.b >= 0, self.b, -self.b)


def to_alpha(logits, recipe, activation=None):
    """Concentrations of an evidential recipe: max(phi(z), 1e-6) for delta = 0, phi(z) + 1 for delta = 1.

    `activation` is the learned AdaptiveSoftplus of the recipe that has one; without it, its start (softplus).
    `ce` has no concentrations of its own: its probabilities are the softmax of the logits.

    Paper: alpha_k = e_k + delta (Section sec:edl) and Table tab:dirichlet_formulations; D05, D06, D07.
    Shapes: logits (inputs, classes); returns the same, at least float32.
    Errors: ValueError for logits that are not finite with two axes, an unknown recipe, `ce`, or an activation
        where the recipe has none to learn.
    """
    recipe = _recipe(recipe)
    if recipe.activation is None:
        raise ValueError(f"recipe {recipe.name!r} has no concentrations; its probabilities are softmax(logits)")
    if activation is not None and recipe.activation != "adaptive_softplus":
        raise ValueError(f"recipe {recipe.name!r} has no learned activation, but one was passed")
    checks.finite_tensor(logits, "logits", ("inputs", "classes"))
    activations = {
        "softplus": softplus,
        "adaptive_softplus": activation or softplus,
        "exponential": exponential,
    }
    evidence = activations[recipe.activation](logits)
    return evidence + 1 if recipe.delta == 1 else evidence.clamp(min=MIN_ALPHA)


class Head(nn.Module):
    """What follows the last linear layer of a recipe: logits to alpha; for `ce` the logits pass unchanged.

    Paper: Fig. fig:edl_arch and Table tab:dirichlet_formulations.
    Shapes: maps (inputs, classes) to (inputs, classes).
    Errors: ValueError for an unknown recipe, and as to_alpha.
    """

    def __init__(self, recipe, classes):
        super().__init__()
        self.recipe = _recipe(recipe)
        self.activation = AdaptiveSoftplus(classes) if self.recipe.activation == "adaptive_softplus" else None

    def forward(self, logits):
        if self.recipe.activation is None:
            return logits
        return to_alpha(logits, self.recipe, self.activation)


def _recipe(recipe):
    return recipe if isinstance(recipe, Recipe) else RECIPES[checks.choice("recipe", recipe, tuple(RECIPES))]


def _working_dtype(z):
    return torch.promote_types(z.dtype, torch.float32)


def _log_add_exp(z, first, second):
    return torch.logaddexp(first, second).to(_working_dtype(z))
