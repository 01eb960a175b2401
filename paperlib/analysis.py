"""From stored predictions to the numbers behind every figure and table. No plots, no files but through `records`.

An estimator is named in tables as it is here: `ensemble` is the plain average of the members, `mom` the method of
moments, `fixed_point` the paper's likelihood refinement (a few steps), `mle` the converged maximum likelihood.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from paperlib import calibration, catalogue, dirichlet, records, scores, selective
from paperlib.config import COLLAPSE
from paperlib.recipes import EVIDENTIAL, RECIPES

ESTIMATORS = {
    "mom": "MoM",
    "ensemble": "Plain ensemble",
    "fixed_point": "MLE (fixed point)",
    "mle": "MLE (converged)",
}


@dataclass(frozen=True)
class Forecast:
    """What a classifier says of the calibration and the test split: predictive means and uncertainties."""

    probs: dict
    uncertainty: dict


class Study:
    """One dataset of one scale: its labels and predictions, read when first asked for.

    members_from names the run of the ensemble's members: `ce`, or one on another split, whose labels are then used.
    """

    def __init__(self, scale, dataset, members_from="ce"):
        self.scale, self.dataset, self.settings, self.members_from = scale, dataset, scale.analysis, members_from
        self.split = records.read_split(records.split_path(scale.scale, dataset, members_from))
        self.labels = self.split.labels

    def predictions(self, run):
        """Predictions of all seeds of a run, checked against the configuration."""
        return [
            records.read_prediction(records.prediction_path(self.scale.scale, self.dataset, run, job.seed), job.digest)
            for job in self.scale.jobs(self.dataset, run)
        ]

    @cached_property
    def members(self):
        """Log-probabilities of all cross-entropy models: part -> (members, inputs, classes)."""
        found = self.predictions(self.members_from)
        return {part: np.stack([getattr(p, part).log_probs for p in found]) for part in records.PARTS}

    @cached_property
    def evidential(self):
        """Predictions of the six evidential recipes: run -> list over seeds."""
        return {run: self.predictions(run) for run in EVIDENTIAL}

    def fit(self, estimator, part, size, aggregate=None, start=0):
        """The Dirichlets that mom, fixed_point or mle fits to `size` members from number `start` on."""
        log_probs = self.members[part][start : start + size]
        if estimator == "mom":
            return dirichlet.fit_moments(np.exp(log_probs), aggregate or self.settings.aggregate)
        if estimator == "fixed_point":
            return dirichlet.fit_fixed_point(
                log_probs,
                iterations=self.settings.fixed_point_iterations,
                tol=self.settings.fixed_point_tolerance,
            )
        if estimator == "mle":
            return dirichlet.fit_mle(log_probs)
        raise ValueError(f"{estimator!r} fits no Dirichlet; choose mom, fixed_point or mle")

    def mean_of(self, estimator, part, size):
        """Predictive means of an estimator, (inputs, classes)."""
        if estimator == "ensemble":
            return np.exp(self.members[part][:size]).mean(axis=0)
        return self.fit(estimator, part, size).mean

    def forecast(self, estimator, size, aggregate=None):
        """Predictive means and total variances of a fitted ensemble."""
        fits = {part: self.fit(estimator, part, size, aggregate) for part in records.PARTS}
        return Forecast(
            {part: fit.mean for part, fit in fits.items()},
            {part: fit.total_variance for part, fit in fits.items()},
        )

    def confidence_forecast(self, size):
        """The plain ensemble, its inputs ordered by the confidence of its mean: what needs no Dirichlet."""
        probs = {part: self.mean_of("ensemble", part, size) for part in records.PARTS}
        return Forecast(probs, {part: 1 - mean.max(axis=1) for part, mean in probs.items()})

    def evidential_forecast(self, run, seed=0):
        """The same of one evidential run (D23: the first seed)."""
        prediction = self.evidential[run][seed]
        outputs = {part: getattr(prediction, part) for part in records.PARTS}
        return Forecast(
            {part: found.probs for part, found in outputs.items()},
            {part: dirichlet.total_variance(found.alpha) for part, found in outputs.items()},
        )


# ------------------------------------------------------------------------------------------- scores of predictions


def metrics(probs, labels, settings):
    """Every scalar metric of one set of predictive means."""
    return {
        "accuracy": scores.accuracy(probs, labels),
        "macro_f1": scores.macro_f1(probs, labels),
        "nll": scores.nll(probs, labels),
        "ece": calibration.ece(probs, labels, settings.bins),
        "high_confidence_error": calibration.high_confidence_error(probs, labels, settings.high_confidence),
        "wrong_above": calibration.high_confidence_error(probs, labels, settings.high_confidence, among="wrong"),
    }


def single_run_metrics(study):
    """Test metrics of every single model: the evidential runs, and CE with and without temperature scaling."""
    rows = []
    for run, predictions in study.evidential.items():
        for seed, prediction in enumerate(predictions):
            variance = dirichlet.total_variance(prediction.test.alpha)
            rows.append(_row(study, run, RECIPES[run].title, seed, prediction.test.probs, variance))
    for seed in range(len(next(iter(study.evidential.values())))):
        logits = {part: study.members[part][seed] for part in records.PARTS}
        temperature = calibration.fit_temperature(logits["calibration"], study.labels["calibration"])
        scaled = calibration.apply_temperature(logits["test"], temperature)
        for run, title, probs in (
            ("ce", "Cross-entropy", np.exp(logits["test"])),
            ("ce_scaled", "Cross-entropy, temperature scaled", scaled),
        ):
            rows.append(_row(study, run, title, seed, probs, shared_concentration_variance(probs)))
    return pd.DataFrame(rows)


def _row(study, run, title, seed, probs, variance):
    labels = study.labels["test"]
    found = metrics(probs, labels, study.settings)
    found["aurc"] = selective.aurc(variance, calibration.correctness(probs, labels))
    return {"run": run, "title": title, "seed": seed, **found}


def summary(frame):
    """Mean and standard deviation over the seeds, in order of appearance."""
    return frame.drop(columns="seed").groupby(["run", "title"], sort=False).agg(["mean", "std"])


def mean_prediction(predictions):
    """Predictive means of the test split averaged over runs (D16)."""
    return np.mean([prediction.test.probs for prediction in predictions], axis=0)


def reliability_band(predictions, labels, bins):
    """Reliability over several runs: (confidence, accuracy, its standard deviation) of each bin that any run fills."""
    tables = [calibration.reliability(prediction.test.probs, labels, bins) for prediction in predictions]
    frame = pd.concat([pd.DataFrame(table._asdict()) for table in tables])
    grouped = frame.groupby("lower")
    spread = grouped["accuracy"].std(ddof=1).fillna(0.0)
    return tuple(column.to_numpy() for column in (grouped["confidence"].mean(), grouped["accuracy"].mean(), spread))


TITLES = {
    "accuracy": "Accuracy",
    "macro_f1": "Macro F1",
    "nll": "NLL",
    "ece": "ECE",
    "high_confidence_error": "Wrong if sure",
    "wrong_above": "Sure if wrong",
    "auroc": "AUROC",
    "confidence": "Confidence",
    "run": "Run",
    "title": "Model",
    "estimator": "Estimator",
    "size": "M",
    "aurc": "AURC",
    "aurc_low": "AURC low",
    "aurc_high": "AURC high",
    "coverage": "Coverage",
    "retained_risk": "Risk, kept",
    "retained_accuracy": "Accuracy, kept",
    "retained_f1": "F1, kept",
    "retained_nll": "NLL, kept",
}


def readable(frame):
    """Column names for readers; a name without a title of its own loses its underscores."""
    return frame.rename(columns=lambda name: TITLES.get(name, name.replace("_", " ")))


# ------------------------------------------------------------------------------------------- descriptions


def recipe_table(study):
    """The six evidential formulations, as the paper's table has them, with the weights and epochs configured here."""
    rows = []
    for name in EVIDENTIAL:
        recipe, job = RECIPES[name], study.scale.job(study.dataset, name, 0)
        schedule = "annealed" if job.kl_schedule == "linear" else job.kl_schedule
        words = {None: "None", "kl": f"KL ({schedule})", "log_evidence": "Log-evidence"}
        weights = {None: "", "kl": f"{job.lambda0}", "log_evidence": f"{job.lambda_ev}"}
        rows.append(
            {
                "Model": recipe.title,
                "Base loss": {"mse": "MSE", "digamma": "Digamma"}[recipe.base_loss],
                "Regularization": words[recipe.regulariser],
                "Weight": weights[recipe.regulariser],
                "Activation": recipe.activation.replace("_", " ").capitalize(),
                "alpha": "e + 1" if recipe.delta else "> 1e-6",
                "Epochs": job.epochs,
            }
        )
    return pd.DataFrame(rows)


def dataset_table(scale):
    """The datasets of a scale: domain, classes and the sizes of the parts, for those whose split is there."""
    rows = []
    for dataset in scale.datasets:
        path = records.split_path(scale.scale, dataset)
        if not path.exists():
            continue
        split = records.read_split(path)
        sizes = {part.capitalize(): len(labels) for part, labels in split.labels.items()}
        title, domain = catalogue.DOMAINS[dataset]
        rows.append(
            {
                "Dataset": title,
                "Domain": domain,
                "Samples": sum(sizes.values()),
                "Classes": len(split.class_names),
                **sizes,
            }
        )
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------- single models


def true_class_scores(study):
    """Softmax score of the true class, (members, test inputs)."""
    labels = study.labels["test"]
    return np.exp(study.members["test"][:, np.arange(len(labels)), labels])


def two_samples(study, hard="automobile", easy="deer"):
    """Test inputs of the first figure (D19): the widest spread of one class, the highest mean of another."""
    scores, labels = true_class_scores(study), study.labels["test"]
    names = study.split.class_names
    of_hard, of_easy = (
        labels == names.index(name) if name in names else np.ones(len(labels), bool) for name in (hard, easy)
    )
    spread = np.where(of_hard, scores.std(axis=0, ddof=1), -1)
    return int(spread.argmax()), int(np.where(of_easy, scores.mean(axis=0), -1).argmax())


def single_model_curves(study, members):
    """Risk-coverage curve of each single model on the test split, and its largest coverage at the target risk."""
    curves, coverages = [], []
    for member in range(members):
        forecast = single_model_forecast(study, member)
        uncertainty = forecast.uncertainty["test"]
        right = calibration.correctness(forecast.probs["test"], study.labels["test"])
        curves.append(selective.risk_coverage(uncertainty, right))
        coverages.append(selective.coverage_at_risk(uncertainty, right, study.settings.risk))
    return curves, coverages


# ------------------------------------------------------------------------------------------- collapse


COLLAPSE_TITLES = {
    "annealed": "Annealed",
    "constant_one": "Constant 1",
    "constant_per_class": "Constant λ₀/K",
    "no_kl": "No KL",
    "flipped": "Flipped sign",
}


def collapse_runs(study):
    """The runs of the collapse figure: title -> prediction."""
    return {
        COLLAPSE_TITLES.get(name, name): study.predictions(COLLAPSE + name)[0] for name in study.scale.collapse.runs
    }


def variance_and_correctness(study, prediction):
    """Total variance of each test input and whether it is classified right."""
    right = calibration.correctness(prediction.test.probs, study.labels["test"])
    return dirichlet.total_variance(prediction.test.alpha), right


def collapse_table(study, runs):
    """Test metrics and evidence of each collapse run; auroc: how well the variance tells right from wrong."""
    rows = {}
    for title, prediction in runs.items():
        variance, right = variance_and_correctness(study, prediction)
        alpha0 = np.exp(prediction.test.log_alpha0)
        found = metrics(prediction.test.probs, study.labels["test"], study.settings)
        rows[title] = {
            **{name: found[name] for name in ("accuracy", "nll", "ece")},
            "alpha0_mean": alpha0.mean(),
            "alpha0_median": np.median(alpha0),
            "confidence": prediction.test.probs.max(axis=1).mean(),
            "auroc": roc_auc_score(~right, variance) if 0 < right.mean() < 1 else np.nan,
        }
    return pd.DataFrame(rows).T.rename_axis("run")


# ------------------------------------------------------------------------------------------- ensembles


def ensemble_metrics(study):
    """Test metrics by ensemble size and estimator."""
    rows = []
    for size in study.scale.ensemble["sizes"]:
        for estimator in ESTIMATORS:
            probs = study.mean_of(estimator, "test", size)
            rows.append(
                {
                    "estimator": estimator,
                    "title": ESTIMATORS[estimator],
                    "size": size,
                    **metrics(probs, study.labels["test"], study.settings),
                }
            )
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------- selective classification


def select(forecast, labels, settings, threshold="empirical"):
    """A threshold from the calibration split, applied unchanged to the test split."""
    right = {part: calibration.correctness(forecast.probs[part], labels[part]) for part in records.PARTS}
    if threshold == "empirical":
        tau = selective.select_threshold(forecast.uncertainty["calibration"], right["calibration"], settings.risk)
    else:
        tau = selective.guaranteed_threshold(
            forecast.uncertainty["calibration"], right["calibration"], settings.risk, settings.delta
        )
    kept = selective.retained(forecast.uncertainty["test"], tau)
    return Selection(tau, kept, right["test"], forecast, labels["test"])


@dataclass(frozen=True)
class Selection:
    """The outcome on the test split of one threshold."""

    tau: float
    kept: np.ndarray
    right: np.ndarray
    forecast: Forecast
    labels: np.ndarray

    @property
    def uncertainty(self):
        return self.forecast.uncertainty["test"]

    @property
    def coverage(self):
        return self.kept.mean()

    @property
    def risk(self):
        """Share of the kept that is wrong; NaN where nothing is kept."""
        return 1 - self.right[self.kept].mean() if self.kept.any() else np.nan

    @property
    def point(self):
        """(coverage, risk) on the test split, or None where nothing is kept."""
        return (self.coverage, self.risk) if self.kept.any() else None

    @property
    def curve(self):
        return selective.risk_coverage(self.uncertainty, self.right)

    def table_row(self):
        """The paper's table of experiment 3: full and retained test."""
        probs = self.forecast.probs["test"]
        row = {("Full test", name): value for name, value in _counted(probs, self.labels).items()}
        retained = _counted(probs[self.kept], self.labels[self.kept])
        return row | {("Retained test", name): value for name, value in retained.items()}


def _counted(probs, labels):
    if len(labels) == 0:
        return {"N": 0, "Acc": np.nan, "F1": np.nan, "NLL": np.nan}
    return {
        "N": len(labels),
        "Acc": scores.accuracy(probs, labels),
        "F1": scores.macro_f1(probs, labels),
        "NLL": scores.nll(probs, labels),
    }


def threshold_table(chosen, safe, titles):
    """The paper's threshold and the guaranteed one side by side: tau, coverage and risk on the test split."""
    rows = []
    for run in chosen:
        row = {"Model": titles[run]}
        for name, selection in (("empirical", chosen[run]), ("guaranteed", safe[run])):
            row |= {
                f"{name} tau": selection.tau,
                f"{name} coverage": selection.coverage,
                f"{name} risk": selection.risk,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def single_model_forecast(study, member):
    """One cross-entropy model as a Dirichlet (D01)."""
    probs = {part: np.exp(study.members[part][member]) for part in records.PARTS}
    return Forecast(probs, {part: shared_concentration_variance(p) for part, p in probs.items()})


def shared_concentration_variance(probs):
    """Total variance, but for a factor, of a single model (D01): one concentration is shared by all inputs."""
    return (probs * (1 - probs)).sum(axis=-1)


def selection_over_runs(study):
    """What is kept: mean and standard deviation over the runs of each recipe; the ensemble by MoM and by confidence."""
    first, largest = ("digamma", "exponential", "mom", "ensemble"), max(study.scale.ensemble["sizes"])
    forecasts = {
        run: [study.evidential_forecast(run, seed) for seed in range(len(found))]
        for run, found in study.evidential.items()
    }
    forecasts |= {"mom": [study.forecast("mom", largest)], "ensemble": [study.confidence_forecast(largest)]}
    rows = []
    for run in (*first, *(name for name in EVIDENTIAL if name not in first)):
        for forecast in forecasts[run]:
            selection = select(forecast, study.labels, study.settings)
            retained = selection.table_row()
            rows.append(
                {
                    "run": run,
                    "coverage": selection.coverage,
                    "retained_risk": selection.risk,
                    "retained_accuracy": retained["Retained test", "Acc"],
                    "retained_f1": retained["Retained test", "F1"],
                    "retained_nll": retained["Retained test", "NLL"],
                }
            )
    return pd.DataFrame(rows).groupby("run", sort=False).agg(["mean", "std"])


# ------------------------------------------------------------------------------------------- the study of estimators


ORDERINGS = {
    "max_probability": "1 - largest mean probability",
    "entropy": "entropy of the mean",
    "mean_spread": r"$\sum_k \mu_k (1 - \mu_k)$ of the mean",
    "mutual_information": "mutual information of the members",
    "alpha0": r"$1 / \alpha_0$ alone",
    "total_variance": "total variance (the paper)",
}


def orderings(log_probs, fit):
    """Uncertainty of each input by each ordering statistic, larger is less certain."""
    probs = np.exp(log_probs)
    mu = probs.mean(axis=0)
    entropy = -np.where(mu > 0, mu * np.log(np.where(mu > 0, mu, 1)), 0).sum(axis=-1)
    member_entropy = -np.where(probs > 0, probs * log_probs, 0).sum(axis=-1).mean(axis=0)
    return {
        "max_probability": 1 - mu.max(axis=-1),
        "entropy": entropy,
        "mean_spread": shared_concentration_variance(mu),
        "mutual_information": entropy - member_entropy,
        "alpha0": 1 / fit.alpha0,
        "total_variance": fit.total_variance,
    }


def compare_orderings(study, size, draws=1000, seed=0):
    """AURC and coverage at the target risk of each ordering, with paired bootstrap intervals over test inputs."""
    labels = study.labels["test"]
    fit = study.fit("mom", "test", size)
    found = orderings(study.members["test"][:size], fit)
    right = calibration.correctness(fit.mean, labels)
    samples = bootstrap_indices(len(labels), draws, seed)
    rows, drawn = [], {}
    for name, uncertainty in found.items():
        drawn[name] = np.array([selective.aurc(uncertainty[i], right[i]) for i in samples])
        coverage = [selective.coverage_at_risk(uncertainty[i], right[i], study.settings.risk) for i in samples]
        rows.append(
            {
                "ordering": name,
                "title": ORDERINGS[name],
                "aurc": selective.aurc(uncertainty, right),
                **_interval("aurc", drawn[name]),
                "coverage": selective.coverage_at_risk(uncertainty, right, study.settings.risk),
                **_interval("coverage", coverage),
            }
        )
    frame = pd.DataFrame(rows)
    for row, name in enumerate(found):
        interval = _interval("difference", drawn[name] - drawn["total_variance"])
        frame.loc[row, "difference"] = frame.loc[row, "aurc"] - frame["aurc"].iloc[-1]
        frame.loc[row, list(interval)] = list(interval.values())
    return frame


def bootstrap_indices(inputs, draws, seed=0):
    """Indices of bootstrap samples of the inputs, (draws, inputs)."""
    return np.random.default_rng(seed).integers(inputs, size=(draws, inputs))


def _interval(name, values, level=0.95):
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return {f"{name}_low": low, f"{name}_high": high}


def fixed_point_error(study):
    """Relative error of the paper's fixed-point steps against the converged estimate, by ensemble size."""
    rows = []
    for size in study.scale.ensemble["sizes"]:
        steps, converged = (study.fit(name, "test", size) for name in ("fixed_point", "mle"))
        usable = converged.converged
        alpha0 = np.abs(steps.alpha0[usable] / converged.alpha0[usable] - 1)
        alpha = np.abs(steps.alpha[usable] / converged.alpha[usable] - 1).max(axis=1)
        rows.append(
            {
                "size": size,
                "inputs": int(usable.sum()),
                "share_converged": steps.converged.mean(),
                **{f"alpha0_error_{name}": np.quantile(alpha0, q) for name, q in _QUANTILES.items()},
                **{f"largest_alpha_k_error_{name}": np.quantile(alpha, q) for name, q in _QUANTILES.items()},
            }
        )
    return pd.DataFrame(rows)


def convergence_frame(errors):
    """The errors of alpha_0 as their figure takes them."""
    return pd.DataFrame(
        {
            "M": errors["size"],
            "median": errors["alpha0_error_median"],
            "lower": errors["alpha0_error_median"],
            "upper": errors["alpha0_error_q95"],
        }
    )


_QUANTILES = {"median": 0.5, "q95": 0.95, "max": 1.0}
VARIANTS = {
    **{f"MoM, {name}" + (" (the paper)" if name == "mean" else ""): ("mom", name) for name in dirichlet.AGGREGATES},
    **{ESTIMATORS[name]: (name, None) for name in ("fixed_point", "mle")},
}


def estimator_comparison(study, size):
    """Metrics and retained results of each estimator and each aggregation of the moments, at one size."""
    rows = []
    for title, (estimator, aggregate) in VARIANTS.items():
        fit = study.fit(estimator, "test", size, aggregate)
        forecast = study.forecast(estimator, size, aggregate)
        selection = select(forecast, study.labels, study.settings)
        right = selection.right
        retained = selection.table_row()
        rows.append(
            {
                "estimator": title,
                "alpha0_median": np.median(fit.alpha0),
                "flagged": (fit.flags != 0).mean(),
                **metrics(forecast.probs["test"], study.labels["test"], study.settings),
                "aurc": selective.aurc(forecast.uncertainty["test"], right),
                "coverage": selection.coverage,
                "retained_accuracy": retained["Retained test", "Acc"],
                "retained_nll": retained["Retained test", "NLL"],
            }
        )
    return pd.DataFrame(rows)
