"""The tests of claims in words, for tables that are read without the code."""

import math

from paperlib.recipes import EVIDENTIAL, RECIPES

# How the tables call what would not be understood by its name in the code.
WORDS = {
    **{recipe.name: recipe.title for recipe in RECIPES.values()},
    "mom": "MoM",
    "fixed_point": "fixed point",
    "ce": "single models",
    "collapse_annealed": "annealed KL",
    "collapse_constant_one": "constant KL weight 1",
    "collapse_constant_per_class": "constant KL weight λ₀/K",
    "macro_f1": "F1",
    "retained_f1": "retained F1",
    "nll": "NLL",
    "retained_nll": "retained NLL",
    "ece": "ECE",
    "aurc": "area under the risk-coverage curve",
    "high_confidence_error": "wrong above confidence 0.8",
    "pooled_error": "wrong above confidence 0.8",
    "confident_and_wrong": "share wrong and above confidence 0.8",
    "wrong_extreme": "share of the wrong above confidence 0.95",
    "separation": "AUROC of confidence for right against wrong",
    "variance_auroc": "AUROC of variance for wrong against right",
    "accuracy_over_chance": "accuracy over chance",
    "confidence_over_uniform": "mean confidence times K",
    "alpha0_mean": "mean α₀",
    "log10_alpha0": "mean log₁₀ α₀",
    "abstention_gain": "accuracy gained by abstaining",
    "kept_of_right": "share of the right that is kept",
    "kept_of_wrong": "share of the wrong that is kept",
    "band": "width of the reliability band",
    "score_spread": "standard deviation over members of the true class's score",
    "sample_spread": "standard deviation over members of the true class's score",
    "agreed_range": "range of the score where all members agree",
    "single_coverage": "coverage of single models",
    "risk_spread": "standard deviation of the risk over single models",
    "ece_over_bins": "largest over smallest ECE",
    "epochs_to": "epochs to 98 % of the best accuracy",
    "variance_ratio": "variance of the Dirichlet over that of the members",
    "disagreement_rank": "rank correlation of α₀ with the members' agreement",
    "converged_share": "share of inputs with a converged estimate",
    "variance_decades": "decades of total variance",
    "mean_gap": "largest difference to the plain mean",
    "table_risk": "retained risk of the published table",
    "balancing_kl_weight": "KL weight that balances the squared error at a uniform mean",
    "history": "in training",
    "val_accuracy": "validation accuracy",
    "samples": "number of images",
    "classes": "number of classes",
    "test": "number of test images",
    "accuracy": "accuracy",
    "coverage": "coverage",
    "coverage_at_risk": "coverage at risk r",
    "retained_accuracy": "retained accuracy",
    "retained_risk": "retained risk",
    "underconfidence": "accuracy less mean confidence",
    "right_confidence": "mean confidence of the right",
    "top_share": "share above confidence 0.95",
    "middle_share": "share with confidence 0.3 to 0.8",
    "relative_range": "range relative to the mean",
}

# Quantities that are something of a metric.
OF_A_METRIC = {
    "stability": "standard deviation over runs of {}",
    "change": "{}, largest less smallest ensemble",
    "setbacks": "setbacks of {} as the ensemble grows",
    "winner": "best recipe by {}",
}

# Parameters of which the value alone says too little.
NOTES = {
    ("size", "first"): "smallest M",
    ("size", "second"): "second smallest M",
    ("size", "last"): "largest M",
    ("size", "average"): "mean over M",
    ("groups", "all"): "disjoint ensembles",
    "size": "M = {}",
    ("quantile", "0.5"): "median over inputs",
    "quantile": "{} quantile over inputs",
    "coverage": "at coverage {}",
    "classes": "{} classes",
    "alpha0": "α₀ = {}",
    "bins": "B = {}",
    "at": "{} epoch",
    "which": "{} sample",
}

PLACES = {1: "", 2: "second ", 3: "third ", 4: "fourth ", 5: "fifth "}


def describe(test):
    """What the contrast of a test is, in words."""
    of, metric = _words(test.get("of")), _words(test.get("metric") or test.get("fact") or test["quantity"])
    metric = OF_A_METRIC.get(test["quantity"], "{}").format(metric)
    extra = [
        _words({key: test[key]}) for key in ("size", "groups", "column", "at", "quantile", "coverage") if key in test
    ]
    where = f" ({', '.join(extra)})" if extra else ""
    rule = test["rule"]
    if rule in ("lowest", "highest"):
        place = test.get("place", 1)
        rank = f"{PLACES[place]}{rule}"
        return f"{metric}{where}: {of} − {rank} of the others"
    if rule in ("similar", "differ"):
        return f"{metric}{where}: range over {of}"
    if rule in ("less", "greater") and not isinstance(test["than"], int | float):
        return f"{metric}{where}: {of} − {_words(test['than'])}"
    if rule == "falling":
        return f"{metric}: {of}, largest step from one size to the next"
    return f"{metric}{where}: {of}" if of else f"{metric}{where}"


def claimed(lower, upper):
    """The range in which the paper is right, in signs: of a limit that is open by one float, the limit."""
    lower, upper = (round(limit, 12) + 0.0 for limit in (lower, upper))
    if math.isinf(lower) and math.isinf(upper):
        return ""
    if math.isinf(lower):
        return f"< {upper:g}"
    if math.isinf(upper):
        return f"> {lower:g}"
    return f"{lower:g} to {upper:g}" if lower < upper else f"{lower:g}"


def number(value, low, high):
    """A number with its interval, where it has one."""
    whole = float(value).is_integer() and abs(value) < 1e6
    interval = "" if low == high or math.isnan(low) else f" [{low:.3g}, {high:.3g}]"
    return (f"{value:.0f}" if whole else f"{value:.4g}") + interval


def _words(side):
    if isinstance(side, dict):
        return ", ".join(_note(key, value).format(_words(value)) for key, value in side.items())
    if isinstance(side, list):
        return ", ".join(map(_words, side)) if list(side) != list(EVIDENTIAL) else "the six recipes"
    if isinstance(side, int | float):
        return f"{side:g}"
    return "" if side is None else WORDS.get(side, side.replace("_", " "))


def _note(key, value):
    return NOTES.get((key, str(value)), NOTES.get(key, "{}"))
