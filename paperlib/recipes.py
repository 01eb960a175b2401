"""The seven recipes by name: what each is made of. Apart from `evidence`, so that no torch is needed to read it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A row of Table tab:dirichlet_formulations; delta is the additive prior (None: no concentrations)."""

    name: str
    title: str
    base_loss: str
    regulariser: str | None
    activation: str | None
    delta: int | None


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("ce", "Cross-entropy", "cross_entropy", None, None, None),
        Recipe("mse_only", "MSE Only", "mse", None, "softplus", 0),
        Recipe("mse_clamp", "MSE Clamp", "mse", "kl", "softplus", 0),
        Recipe("mse_softadapt", "MSE Soft Adapt", "mse", "kl", "adaptive_softplus", 0),
        Recipe("mse_plusone", "MSE Plus One", "mse", "kl", "softplus", 1),
        Recipe("exponential", "Exponential", "mse", "kl", "exponential", 1),
        Recipe("digamma", "Digamma", "digamma", "log_evidence", "softplus", 1),
    )
}
EVIDENTIAL = tuple(name for name in RECIPES if name != "ce")
