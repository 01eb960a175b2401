"""What claims are decided by: numbers computed from stored predictions, in the data and in every bootstrap draw.

Draws are of the inputs and, where there are several runs, of the runs; row 0 is the data themselves.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import yaml
from scipy.special import polygamma

from paperlib import analysis, dirichlet, paths, records

DRAWS = 1000
PLACES = {"first": 0, "second": 1, "last": -1}  # of the ensemble sizes of a scale
EXTREME = 0.95  # the paper's "top 5 % confidence region"
MIDDLE = (0.3, 0.8)  # "mid-range" confidence: up to the paper's threshold of high confidence


class NotTestable(Exception):
    """The predictions that a claim needs are not there, or the quantity has no value; the message says which."""


def published():
    """The file as it is: protocol, tables, claims."""
    return yaml.safe_load((paths.root() / "config" / "published.yaml").read_text())


# ------------------------------------------------------------------------------------------- models and their draws


@dataclass(frozen=True)
class Part:
    """What one model says of the inputs of one split, and what is true."""

    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    surprise: np.ndarray
    classes: int
    uncertainty: np.ndarray
    log_alpha0: np.ndarray | None

    @property
    def right(self):
        return self.predicted == self.labels


class Model:
    """One classifier; its splits are computed when first asked for. fetch(part): means, uncertainty, log alpha_0."""

    def __init__(self, fetch: Callable, labels: dict):
        self._fetch, self._labels, self._thresholds = fetch, labels, {}

    def _part(self, name):
        probs, uncertainty, log_alpha0 = self._fetch(name)
        labels = self._labels[name]
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs[np.arange(len(labels)), labels])
        return Part(labels, probs.argmax(axis=1), probs.max(axis=1), surprise, probs.shape[1], uncertainty, log_alpha0)

    @cached_property
    def calibration(self):
        return self._part("calibration")

    @cached_property
    def test(self):
        return self._part("test")

    def threshold(self, weights, risk):
        """Threshold on the calibration split at a target risk, in every draw of one Evidence."""
        if risk not in self._thresholds:
            self._thresholds[risk] = _threshold(self.calibration, weights["calibration"], risk)
        return self._thresholds[risk]


class Evidence:
    """The predictions of one dataset with its bootstrap draws, as counts; row 0 of all draws is the data themselves."""

    def __init__(self, study, draws=DRAWS, seed=0):
        self.study, self.draws, self.seed, self.settings = study, draws, seed, study.settings
        self.sizes = study.scale.ensemble["sizes"]
        self.weights = {part: self.counts(part, len(study.labels[part])) for part in records.PARTS}
        self._stored, self._models, self._fits, self._scores = {}, {}, {}, {}

    def counts(self, name, items):
        """How often each of some items is in each draw, (draws + 1, items); the same for one name always."""
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        drawn = generator.multinomial(items, np.full(items, 1 / items), size=self.draws)
        return np.vstack([np.ones(items), drawn])

    def predictions(self, run):
        """Stored predictions of a run (of `ce`: the members' log-probabilities by split), or NotTestable."""
        if run in self._stored:
            return self._stored[run]
        scale, dataset = self.study.scale, self.study.dataset
        if run not in scale.runs(dataset):
            raise NotTestable(f"{dataset} has no run {run} at scale {scale.scale}")
        wanted = [records.prediction_path(scale.scale, dataset, run, job.seed) for job in scale.jobs(dataset, run)]
        missing = sum(not path.exists() for path in wanted)
        if missing:
            raise NotTestable(f"{missing} of {len(wanted)} predictions of {dataset}/{run} are not there")
        self._stored[run] = self.study.members if run == "ce" else self.study.predictions(run)
        return self._stored[run]

    def fit(self, estimator, part, size, group=0):
        """Dirichlets of an ensemble: group 0 is the first `size` members, as in the paper, 1 the next, and so on."""
        key = estimator, part, size, group
        if key not in self._fits:
            self.predictions("ce")
            self._fits[key] = self.study.fit(estimator, part, size, start=group * size)
        return self._fits[key]

    def size(self, place):
        return self.sizes[PLACES[place]] if isinstance(place, str) else place

    def models(self, of, size, groups):
        """The classifiers behind a name: runs of a recipe, single members, or ensembles of the moments or the MLE."""
        key = (of, size, groups) if of in analysis.ESTIMATORS else of
        if key not in self._models:
            self._models[key] = [Model(fetch, self.study.labels) for fetch in self._fetchers(of, size, groups)]
        return self._models[key]

    def _fetchers(self, of, size, groups):
        if of == "ce":
            members = self.predictions("ce")
            return [lambda part, m=m: _single(members[part][m]) for m in range(len(members["test"]))]
        if of in analysis.ESTIMATORS:
            count = len(self.predictions("ce")["test"]) // size if groups == "all" else 1
            return [lambda part, g=g: fitted(self.fit(of, part, size, g)) for g in range(count)]
        return [lambda part, p=p: _evidential(getattr(p, part)) for p in self.predictions(of)]

    def over_runs(self, of, metric, size="last", groups="first"):
        """A metric of each run of a name in every draw, and how often each run is drawn: both (runs, draws + 1)."""
        size = self.size(size)
        key = of, metric, size, groups
        if key not in self._scores:
            models = self.models(of, size, groups)
            self._scores[key] = np.array([METRICS[metric](model, self.weights, self.settings) for model in models])
        values = self._scores[key]
        # All estimators see the same ensembles, so they are drawn together.
        drawn = self.counts("ensembles" if of in analysis.ESTIMATORS else of, len(values)).T
        return values, drawn if len(values) > 1 else np.ones_like(values)


def _single(log_probs):
    probs = np.exp(log_probs)
    return probs, analysis.shared_concentration_variance(probs), None


def fitted(fit):
    return fit.mean, fit.total_variance, np.log(fit.alpha0)


def _evidential(outputs):
    return outputs.probs, dirichlet.total_variance(outputs.alpha), outputs.log_alpha0


# ------------------------------------------------------------------------------------------- metrics in every draw
# Each takes a model, the counts of both splits and the settings, and returns (draws + 1,). Where there is nothing to
# take a share of the value is NaN.


def _share(weights, some, of):
    with np.errstate(invalid="ignore", divide="ignore"):
        return weights @ some.astype(float) / (weights @ of.astype(float))


def _mean(weights, values):
    return _share(weights, values, np.ones(len(values)))


def _macro_f1(part, weights):
    columns = np.arange(part.classes)
    predicted, true = part.predicted[:, None] == columns, part.labels[:, None] == columns
    hits = weights @ (predicted & true).astype(float)
    mentions = weights @ (predicted.astype(float) + true)
    scores = (2 * hits / np.maximum(mentions, 1)).mean(axis=1)
    return np.where(weights.any(axis=1), scores, np.nan)


def bin_tables(part, weights, bins):
    """Inputs, right ones and summed confidence of each confidence bin in every draw: three (draws + 1, bins)."""
    edges = np.arange(bins + 1) / bins
    index = np.clip(np.searchsorted(edges, part.confidence) - 1, 0, bins - 1)
    member = (index[:, None] == np.arange(bins)).astype(float)
    return (weights @ (member * column[:, None]) for column in (np.ones(len(index)), part.right, part.confidence))


def binned_ece(part, weights, bins):
    _, right, confidence = bin_tables(part, weights, bins)
    return np.abs(right - confidence).sum(axis=1) / weights.sum(axis=1)


def _blocks(uncertainty, right, weights):
    """Distinct uncertainties, with the inputs and the wrong ones of each in every draw."""
    order = np.argsort(uncertainty, kind="stable")
    values, starts = np.unique(uncertainty[order], return_index=True)
    kept = weights[:, order]
    wrong = kept * ~right[order]
    if len(values) < len(order):
        kept, wrong = (np.add.reduceat(table, starts, axis=1) for table in (kept, wrong))
    return values, kept, wrong


def _threshold(part, weights, risk):
    """Threshold of the largest coverage at that empirical risk in every draw (D15)."""
    values, count, wrong = _blocks(part.uncertainty, part.right, weights)
    kept, errors = count.cumsum(axis=1), wrong.cumsum(axis=1)
    within = (count > 0) & (errors / np.maximum(kept, 1) <= risk)
    last = len(values) - 1 - within[:, ::-1].argmax(axis=1)
    return np.where(within.any(axis=1), values[last], -np.inf)


def _auroc(score, right, weights):
    """Probability that a wrong prediction scores above a right one, ties counted half."""
    _, count, wrong = _blocks(score, right, weights)
    good = count - wrong
    below = good.cumsum(axis=1) - good / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        return (wrong * below).sum(axis=1) / (wrong.sum(axis=1) * good.sum(axis=1))


def _aurc(part, weights):
    _, count, wrong = _blocks(part.uncertainty, part.right, weights)
    kept, errors = (np.pad(table.cumsum(axis=1), ((0, 0), (1, 0))) for table in (count, wrong))
    counts = np.arange(1, len(part.labels) + 1)
    return np.array([np.mean(np.interp(counts, *curve) / counts) for curve in zip(kept, errors, strict=True)])


def kept_weights(model, weights, settings):
    """Counts of the test inputs that the threshold of the calibration split keeps, both splits drawn anew."""
    return weights["test"] * (model.test.uncertainty <= model.threshold(weights, settings.risk)[:, None])


def _on_test(function):
    return lambda model, weights, settings: function(model.test, weights["test"], settings)


def _on_kept(function):
    return lambda model, weights, settings: function(model.test, kept_weights(model, weights, settings), settings)


def _accuracy(part, weights, _):
    return _mean(weights, part.right)


def _nll(part, weights, _):
    return _mean(weights, part.surprise)


def _coverage(model, weights, settings):
    return kept_weights(model, weights, settings).sum(axis=1) / weights["test"].sum(axis=1)


def _coverage_at_risk(part, weights, settings):
    tau = _threshold(part, weights, settings.risk)
    return (weights * (part.uncertainty <= tau[:, None])).sum(axis=1) / weights.sum(axis=1)


def _kept_of(outcome):
    """Share kept of the right (True) or the wrong (False) test predictions."""

    def share(model, weights, settings):
        chosen = (model.test.right == outcome).astype(float)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (kept_weights(model, weights, settings) @ chosen) / (weights["test"] @ chosen)

    return share


def _sure(part, settings):
    return part.confidence > settings.high_confidence


METRICS = {
    "accuracy": _on_test(_accuracy),
    "macro_f1": _on_test(lambda part, w, s: _macro_f1(part, w)),
    "nll": _on_test(_nll),
    "ece": _on_test(lambda part, w, s: binned_ece(part, w, s.bins)),
    "high_confidence_error": _on_test(lambda part, w, s: _share(w, ~part.right & _sure(part, s), _sure(part, s))),
    "confident_and_wrong": _on_test(lambda part, w, s: _mean(w, ~part.right & _sure(part, s))),
    "wrong_extreme": _on_test(lambda part, w, s: _share(w, ~part.right & (part.confidence > EXTREME), ~part.right)),
    "underconfidence": _on_test(lambda part, w, s: _mean(w, part.right - part.confidence)),
    "right_confidence": _on_test(lambda part, w, s: _share(w, part.right * part.confidence, part.right)),
    "top_share": _on_test(lambda part, w, s: _mean(w, part.confidence > EXTREME)),
    "middle_share": _on_test(
        lambda part, w, s: _mean(w, (part.confidence > MIDDLE[0]) & (part.confidence <= MIDDLE[1]))
    ),
    "separation": _on_test(lambda part, w, s: _auroc(-part.confidence, part.right, w)),
    "variance_auroc": _on_test(lambda part, w, s: _auroc(part.uncertainty, part.right, w)),
    "aurc": _on_test(lambda part, w, s: _aurc(part, w)),
    "coverage_at_risk": _on_test(_coverage_at_risk),
    "accuracy_over_chance": _on_test(lambda part, w, s: _accuracy(part, w, s) * part.classes),
    "confidence_over_uniform": _on_test(lambda part, w, s: _mean(w, part.confidence) * part.classes),
    "alpha0_mean": _on_test(lambda part, w, s: _mean(w, np.exp(part.log_alpha0))),
    "log10_alpha0": _on_test(lambda part, w, s: _mean(w, part.log_alpha0) / math.log(10)),
    "coverage": _coverage,
    "retained_accuracy": _on_kept(_accuracy),
    "retained_f1": _on_kept(lambda part, w, s: _macro_f1(part, w)),
    "retained_nll": _on_kept(_nll),
    "retained_risk": _on_kept(lambda part, w, s: 1 - _accuracy(part, w, s)),
    "abstention_gain": lambda model, w, s: METRICS["retained_accuracy"](model, w, s) - METRICS["accuracy"](model, w, s),
    "kept_of_right": _kept_of(True),
    "kept_of_wrong": _kept_of(False),
}


# ------------------------------------------------------------------------------------------- quantities
# What a test of published.yaml names. Each takes an Evidence and the test's parameters, and returns (draws + 1,).


def score(evidence, of, metric, size="last", groups="first"):
    """Mean of a metric over the runs of a model; over the models of a list; over all sizes with size="average"."""
    if isinstance(of, list):
        return np.mean([score(evidence, name, metric, size, groups) for name in of], axis=0)
    if size == "average":
        return np.mean([score(evidence, of, metric, each, groups) for each in evidence.sizes], axis=0)
    values, drawn = evidence.over_runs(of, metric, size, groups)
    return (values * drawn).sum(axis=0) / drawn.sum(axis=0)


def stability(evidence, of, metric, size="last", groups="first"):
    """Standard deviation of a metric over the runs of a model, or over disjoint ensembles of one size."""
    values, drawn = evidence.over_runs(of, metric, size, groups)
    if len(values) < 2:
        raise NotTestable(f"a standard deviation needs two runs, {of} has {len(values)}")
    return _deviation(values, drawn)


def _deviation(values, drawn):
    """Standard deviation over the first axis with counts."""
    total = drawn.sum(axis=0)
    average = (values * drawn).sum(axis=0) / total
    return np.sqrt((drawn * (values - average) ** 2).sum(axis=0) / (total - 1))


def band(evidence, of, below=1.0):
    """Width of the reliability band: deviation over runs of a bin's accuracy, mean over filled bins up to `below`."""
    if isinstance(of, list):
        return np.mean([band(evidence, name, below) for name in of], axis=0)
    bins = evidence.settings.bins
    tables = []
    for model in evidence.models(of, None, "first"):
        count, right, _ = bin_tables(model.test, evidence.weights["test"], bins)
        with np.errstate(invalid="ignore", divide="ignore"):
            tables.append(right / count)
    accuracy = np.array(tables)[..., : round(below * bins)]
    drawn = evidence.counts(of, len(accuracy)).T[..., None] * np.isfinite(accuracy)
    with np.errstate(invalid="ignore", divide="ignore"):
        width = _deviation(np.nan_to_num(accuracy), drawn)
    # Bins that fewer than two of the drawn runs fill have no deviation.
    usable = drawn.sum(axis=0) > 1
    return _row_means(np.where(usable, width, 0), usable)


def _row_means(values, usable):
    with np.errstate(invalid="ignore", divide="ignore"):
        return (values * usable).sum(axis=1) / usable.sum(axis=1)


def pooled_error(evidence, of):
    """High-confidence error of the predictive means averaged over the runs (D16, D17)."""
    labels, weights = evidence.study.labels["test"], evidence.weights["test"]
    probs = np.stack([prediction.test.probs for prediction in evidence.predictions(of)])
    drawn = evidence.counts(of, len(probs)) / len(probs)
    found = []
    for chosen, counted in zip(drawn, weights, strict=True):
        mean = np.tensordot(chosen, probs, axes=1)
        sure = mean.max(axis=1) > evidence.settings.high_confidence
        wrong = mean[sure].argmax(axis=1) != labels[sure]
        total = counted[sure].sum()
        found.append(counted[sure] @ wrong / total if total else np.nan)
    return np.array(found)


def relative_range(evidence, metric, among):
    """(largest - smallest) / mean of a metric over the models of a list."""
    values = np.array([score(evidence, name, metric) for name in among])
    return np.ptp(values, axis=0) / values.mean(axis=0)


def change(evidence, of, metric):
    """Largest ensemble's value less the smallest ensemble's."""
    return score(evidence, of, metric, "last") - score(evidence, of, metric, "first")


def setbacks(evidence, of, metric):
    """Sum of the falls of a metric from one ensemble size to the next: 0 for a steady rise."""
    values = np.array([score(evidence, of, metric, size) for size in evidence.sizes])
    return np.maximum(-np.diff(values, axis=0), 0).sum(axis=0)


def winner(evidence, metric, among, best="lowest"):
    """Place in the list of the model with the lowest (or highest) value."""
    values = np.array([score(evidence, name, metric) for name in among])
    return values.argmin(axis=0) if best == "lowest" else values.argmax(axis=0)


def score_spread(evidence, quantile):
    """Quantile over the test inputs of the deviation, over the members, of the true class's softmax score."""
    evidence.predictions("ce")
    spread = analysis.true_class_scores(evidence.study).std(axis=0, ddof=1)
    return _quantile(spread, evidence.weights["test"], quantile)


def agreed_range(evidence):
    """Median range over the members of the predicted class's score, over inputs on whose class all members agree."""
    probs = np.exp(evidence.predictions("ce")["test"])
    top = probs.argmax(axis=2)
    agreed = (top == top[0]).all(axis=0)
    if not agreed.any():
        raise NotTestable("there is no test input on which all members agree")
    return _quantile(np.ptp(probs.max(axis=2), axis=0), evidence.weights["test"] * agreed, 0.5)


def _quantile(values, weights, share):
    order = np.argsort(values)
    reached = weights[:, order].cumsum(axis=1)
    return values[order][(reached >= share * reached[:, -1:]).argmax(axis=1)]


def sample_spread(evidence, which):
    """Deviation over the members of the true class's score, for the hard or the easy sample of D19."""
    evidence.predictions("ce")
    chosen = dict(zip(("hard", "easy"), analysis.two_samples(evidence.study), strict=True))[which]
    values = analysis.true_class_scores(evidence.study)[:, chosen, None]
    return _deviation(values, evidence.counts("ce", len(values)).T)


def single_coverage(evidence, of, members=50):
    """Smallest, largest or range of the single models' coverage at the target risk; `mom`: the whole ensemble's."""
    if of == "mom":
        return score(evidence, "mom", "coverage_at_risk")
    values, _ = evidence.over_runs("ce", "coverage_at_risk")
    values = values[:members]
    return {"min": values.min, "max": values.max, "range": lambda axis: np.ptp(values, axis=axis)}[of](axis=0)


def risk_spread(evidence, coverage, members=50):
    """Deviation over the single models of the risk at a given coverage."""
    weights, risks = evidence.weights["test"], []
    for model in evidence.models("ce", None, "first")[:members]:
        _, count, wrong = _blocks(model.test.uncertainty, model.test.right, weights)
        kept = count.cumsum(axis=1)
        at = (kept >= coverage * kept[:, -1:]).argmax(axis=1)
        rows = np.arange(len(kept))
        risks.append(wrong.cumsum(axis=1)[rows, at] / kept[rows, at])
    return np.std(risks, axis=0, ddof=1)


def ece_over_bins(evidence, of, bins):
    """Largest over smallest ECE, over several numbers of bins."""
    part = evidence.models(of, evidence.size("last"), "first")[0].test
    values = np.array([binned_ece(part, evidence.weights["test"], number) for number in bins])
    return values.max(axis=0) / values.min(axis=0)


def history(evidence, of, column, at):
    """A column of the training history at the first or the last epoch, or its largest value; mean over runs.

    One run says nothing of others: its draws are NaN, and so is its interval.
    """
    values = np.array([prediction.history[column].to_numpy() for prediction in evidence.predictions(of)])
    found = {"first": values[:, 0], "last": values[:, -1], "max": values.max(axis=1)}[at]
    if len(found) == 1:
        return np.append(found, np.full(evidence.draws, np.nan))
    return evidence.counts(of, len(found)) @ found / len(found)


def epochs_to(evidence, of, share=0.98):
    """Epochs until that share of the best validation accuracy is reached, mean over runs (and over a list)."""
    if isinstance(of, list):
        return np.mean([epochs_to(evidence, name, share) for name in of], axis=0)
    evidence.predictions(of)
    runs = evidence.study.predictions(of)
    accuracy = np.array([prediction.history["val_accuracy"].to_numpy() for prediction in runs])
    epochs = 1 + (accuracy >= share * accuracy.max(axis=1, keepdims=True)).argmax(axis=1)
    return evidence.counts(of, len(epochs)) @ epochs / len(epochs)


def variance_ratio(evidence):
    """Median ratio of the moment Dirichlet's total variance to the members' own total variance."""
    size = evidence.size("last")
    fit = evidence.fit("mom", "test", size)
    own = np.exp(evidence.study.members["test"][:size]).var(axis=0, ddof=1).sum(axis=1)
    usable = own > 0
    ratio = np.divide(fit.total_variance, own, out=np.zeros_like(own), where=usable)
    return _quantile(ratio, evidence.weights["test"] * usable, 0.5)


def disagreement_rank(evidence):
    """Rank correlation of alpha_0 with the one that reproduces the members' total variance (`trace`)."""
    size = evidence.size("last")
    log_probs = evidence.predictions("ce")["test"][:size]
    pair = evidence.fit("mom", "test", size), dirichlet.fit_moments(np.exp(log_probs), "trace")
    ranks = np.array([pd.Series(fit.alpha0).rank() for fit in pair])
    weights = evidence.weights["test"] / evidence.weights["test"].sum(axis=1, keepdims=True)
    first, second = ranks - ranks.mean(axis=1, keepdims=True)
    moments = [weights @ column for column in (first, second, first * second, first**2, second**2)]
    a, b, ab, aa, bb = moments
    return (ab - a * b) / np.sqrt((aa - a**2) * (bb - b**2))


def converged_share(evidence, of):
    """Share of the test inputs whose fit is determined (mom) or has converged (fixed_point)."""
    return _mean(evidence.weights["test"], evidence.fit(of, "test", evidence.size("last")).converged)


def variance_decades(evidence, of):
    """Decades between the 5 % and the 95 % quantile of the total variance over the test inputs."""
    uncertainty = evidence.models(of, evidence.size("last"), "first")[0].test.uncertainty
    low, high = (_quantile(uncertainty, evidence.weights["test"], share) for share in (0.05, 0.95))
    return np.log10(high / low)


def mean_gap(evidence):
    """Largest difference between the moment Dirichlet's mean and the plain average of the members."""
    size = evidence.size("last")
    return np.abs(evidence.fit("mom", "test", size).mean - evidence.study.mean_of("ensemble", "test", size)).max()


def dataset_fact(evidence, fact):
    """Samples, classes or test inputs of a dataset that is used in full."""
    split, scale, dataset = evidence.study.split, evidence.study.scale, evidence.study.dataset
    if fact == "classes":
        return len(split.class_names)
    if subset := scale.datasets[dataset].subset:
        raise NotTestable(f"scale {scale.scale} uses a stratified subset of {subset} of {dataset}")
    return len(split.test) if fact == "test" else sum(map(len, split.labels.values()))


def table_risk(_, of):
    """Retained risk that the published table implies: wrong ones among the retained, as whole numbers."""
    columns = {column["id"]: column["values"][of] for column in published()["tables"][0]["columns"]}
    count = round(columns["coverage"] * published()["tables"][0]["test_inputs"])
    return (count - round(columns["retained-accuracy"] * count)) / count


def balancing_kl_weight(_, classes, alpha0):
    """Constant KL weight at which, at a uniform mean, the loss no longer falls as alpha_0 grows beyond this one."""
    fall = (1 - 1 / classes) / (alpha0 + 1) ** 2
    rise = (alpha0 / classes - 1) * polygamma(1, alpha0 / classes) - (alpha0 - classes) * polygamma(1, alpha0)
    return fall / rise


QUANTITIES = {
    function.__name__: function
    for function in (
        score,
        stability,
        band,
        pooled_error,
        relative_range,
        change,
        setbacks,
        winner,
        score_spread,
        agreed_range,
        sample_spread,
        single_coverage,
        risk_spread,
        ece_over_bins,
        history,
        epochs_to,
        variance_ratio,
        disagreement_rank,
        converged_share,
        variance_decades,
        mean_gap,
        dataset_fact,
        table_risk,
        balancing_kl_weight,
    )
}


# Between which a metric or quantity can lie, and so can its interval; the others are not bounded.
BOUNDS = (
    dict.fromkeys(METRICS, (0.0, 1.0))
    | dict.fromkeys(
        ("nll", "retained_nll", "accuracy_over_chance", "confidence_over_uniform", "alpha0_mean"), (0.0, np.inf)
    )
    | dict.fromkeys(("pooled_error", "single_coverage", "converged_share", "score_spread", "agreed_range"), (0.0, 1.0))
    | dict.fromkeys(("stability", "band", "relative_range", "setbacks", "sample_spread", "risk_spread"), (0.0, np.inf))
    | dict.fromkeys(("underconfidence", "abstention_gain", "disagreement_rank"), (-1.0, 1.0))
    | {"log10_alpha0": (-np.inf, np.inf), "ece_over_bins": (1.0, np.inf), "variance_ratio": (0.0, np.inf)}
)
