"""The released results: metrics recomputed from the raw arrays without paperlib, and what the release promises.

Whatever scale has been run in this folder is checked too; what is not there is skipped.
"""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TABLES = sorted(ROOT.glob("results/*/tables/*/exp2_metrics.csv"))
RECIPES = ("mse_only", "mse_clamp", "mse_softadapt", "mse_plusone", "exponential", "digamma")
PRINTED = 5e-5  # half of the last of four printed digits
MEGABYTES = 60  # predictions and all that belongs to them
MEGABYTES_OF_PAGES = 20  # executed notebooks and their pages

pytestmark = pytest.mark.skipif(not TABLES, reason="nothing is released or has been run here")


@pytest.fixture(params=TABLES, ids=lambda path: f"{path.parts[-4]}-{path.parts[-2]}", scope="module")
def raw(request):
    return Raw(request.param.parts[-4], request.param.parts[-2])


class Raw:
    """One dataset of one scale as docs/data.md describes the files, by numpy alone."""

    def __init__(self, scale, dataset):
        self.scale, self.dataset = scale, dataset
        split = np.load(ROOT / "results" / scale / "splits" / f"{dataset}.npz")
        self.labels = {part: split[f"{part}_labels"] for part in ("calibration", "test")}

    def probs(self, run, part="test"):
        """Predictive means of all models of a run, (models, inputs, classes)."""
        found = []
        for path in sorted((ROOT / "results" / self.scale / "predictions" / self.dataset / run).glob("seed_*.npz")):
            planes = np.load(path)[part]
            values = np.moveaxis(planes, 0, -1).copy().view("<f2")[..., 0].astype(float)
            found.append(np.exp(values) / np.exp(values).sum(axis=1, keepdims=True))
        return np.array(found)

    def alpha0(self, run, part, seed=0):
        path = ROOT / "results" / self.scale / "predictions" / self.dataset / run / f"seed_{seed:03d}.npz"
        return np.exp(np.load(path)[f"{part}_log_alpha0"].astype(float))

    def table(self, name):
        with (ROOT / "results" / self.scale / "tables" / self.dataset / f"{name}.csv").open() as lines:
            return list(csv.DictReader(lines))


def metrics(probs, labels):
    """The scalar metrics of the tables, straight from their definitions."""
    predicted, sure = probs.argmax(axis=1), probs.max(axis=1)
    right = predicted == labels
    f1 = []
    for k in range(probs.shape[1]):
        hits, mentions = ((predicted == k) & (labels == k)).sum(), (predicted == k).sum() + (labels == k).sum()
        f1.append(2 * hits / mentions if mentions else 0.0)
    ece = 0.0
    for lower in range(10):
        inside = (sure > lower / 10) & (sure <= (lower + 1) / 10)
        if inside.any():
            ece += abs(right[inside].mean() - sure[inside].mean()) * inside.mean()
    return {
        "Accuracy": right.mean(),
        "Macro F1": np.mean(f1),
        "NLL": -np.log(probs[np.arange(len(labels)), labels]).mean(),
        "ECE": ece,
        "Wrong if sure": (~right & (sure > 0.8)).sum() / max((sure > 0.8).sum(), 1),
        "Sure if wrong": (~right & (sure > 0.8)).sum() / max((~right).sum(), 1),
    }


def agree(cell, value):
    return abs(float(cell) - value) < PRINTED


def test_single_runs(raw):
    table = raw.table("exp1_metrics")
    for row, run in zip(table, RECIPES, strict=False):
        found = [metrics(probs, raw.labels["test"]) for probs in raw.probs(run)]
        for name in ("Accuracy", "Macro F1", "NLL", "ECE", "Sure if wrong"):
            values = [each[name] for each in found]
            assert agree(row[f"{name} mean"], np.mean(values)), (run, name)
            assert agree(row[f"{name} std"], np.std(values, ddof=1)), (run, name)


def test_ensembles_by_size(raw):
    members, checked = raw.probs("ce"), 0
    for row in raw.table("exp2_metrics"):
        if row["Model"] not in ("MoM", "Plain ensemble"):
            continue
        found = metrics(members[: int(row["M"])].mean(axis=0), raw.labels["test"])
        for name in ("Accuracy", "Macro F1", "NLL", "ECE", "Wrong if sure", "Sure if wrong"):
            assert agree(row[name], found[name]), (row["Model"], row["M"], name)
        checked += 1
    assert checked >= 4


def moments(members):
    """The paper's eqs. for the ensemble: means, and alpha_0 averaged over the classes with a valid estimate."""
    mean, variance = members.mean(axis=0), members.var(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha0 = mean * (1 - mean) / variance - 1
    valid = (variance > 0) & (alpha0 > 0) & np.isfinite(alpha0)
    return mean, np.where(valid, alpha0, 0).sum(axis=1) / np.maximum(valid.sum(axis=1), 1)


def total_variance(mean, alpha0):
    return (mean * (1 - mean)).sum(axis=1) / (alpha0 + 1)


def selected(forecast, labels, risk=0.1):
    """Which test inputs are kept: the largest coverage whose calibration risk is at most r."""
    mean, variance = forecast["calibration"]
    wrong = (mean.argmax(axis=1) != labels["calibration"])[np.argsort(variance, kind="stable")]
    ordered = np.sort(variance)
    within = np.cumsum(wrong) / np.arange(1, len(wrong) + 1) <= risk
    ends = np.append(ordered[1:] > ordered[:-1], True)  # ties are kept or left together
    cuts = np.flatnonzero(within & ends)
    return forecast["test"][1] <= (ordered[cuts[-1]] if len(cuts) else -np.inf)


@pytest.mark.parametrize("model", ["Digamma", "Exponential", "MoM"])
def test_selective_classification(raw, model):
    row = next(row for row in raw.table("exp3_summary") if row["Model"].startswith(model))
    forecast = {}
    for part in ("calibration", "test"):
        if model == "MoM":
            members = raw.probs("ce", part)[: int(re.search(r"M = (\d+)", row["Model"])[1])]
            mean, alpha0 = moments(members)
        else:
            mean, alpha0 = raw.probs(model.lower(), part)[0], raw.alpha0(model.lower(), part)
        forecast[part] = mean, total_variance(mean, alpha0)
    mean, labels = forecast["test"][0], raw.labels["test"]
    kept = selected(forecast, raw.labels)
    assert int(row["Full test N"]) == len(labels)
    assert int(row["Retained test N"]) == kept.sum()
    for name, of in (("Full test", np.full(len(labels), True)), ("Retained test", kept)):
        found = metrics(mean[of], labels[of]) if of.any() else None
        for column, metric in (("Acc", "Accuracy"), ("F1", "Macro F1"), ("NLL", "NLL")):
            cell = row[f"{name} {column}"]
            assert agree(cell, found[metric]) if found else cell == "", (name, column)


@pytest.mark.skipif(not (ROOT / "results/cpu/manifests/dermamnist").exists(), reason="DermaMNIST is not released")
def test_coverages_that_agree_with_the_published_ones_by_chance():
    raw = Raw("cpu", "dermamnist")
    claims = {row["id"]: row for row in csv.DictReader((ROOT / "results/cpu/tables/all/claims.csv").open())}
    labels, coverages = raw.labels["test"], []
    for probs in raw.probs("ce")[:50]:  # the figure reads the threshold off the test part itself
        ordered = probs, (probs * (1 - probs)).sum(axis=1)
        coverages.append(selected({"calibration": ordered, "test": ordered}, {"calibration": labels}).mean())
    means = {part: raw.probs("digamma", part) for part in ("calibration", "test")}
    kept = []
    for seed in range(len(means["test"])):
        forecast = {
            part: (probs[seed], total_variance(probs[seed], raw.alpha0("digamma", part, seed)))
            for part, probs in means.items()
        }
        kept.append(selected(forecast, raw.labels).mean())
    found = {"method.single-coverage-smallest": min(coverages), "exp3.table.coverage.digamma": np.mean(kept)}
    for name, value in found.items():
        assert agree(claims[name]["measured"], value)
        assert agree(claims[name]["published"], value)
        assert float(claims[name]["high"]) - float(claims[name]["low"]) > 0.1


# ------------------------------------------------------------------------------------------- what the release promises

RELEASE = ROOT / "results" / "cpu"
in_the_release = pytest.mark.skipif(
    not (RELEASE / "manifests").exists(), reason="no dataset of the cpu scale is released yet"
)


def megabytes(files):
    return sum(path.stat().st_size for path in files) / 1e6


@in_the_release
def test_the_release_is_small_and_holds_no_images():
    files = [path for path in RELEASE.rglob("*") if path.is_file() and ".built" not in path.parts]
    pages = [path for path in files if path.is_relative_to(RELEASE / "notebooks")]
    assert megabytes(pages) < MEGABYTES_OF_PAGES
    assert megabytes(files) - megabytes(pages) < MEGABYTES
    assert {path.suffix for path in files} <= {".npz", ".json", ".csv", ".tex", ".md", ".ipynb", ".html"}


@in_the_release
def test_every_listed_prediction_is_there_with_its_provenance():
    for manifest in RELEASE.rglob("manifests/*/*.json"):
        for entry in json.loads(manifest.read_text()):
            provenance = json.loads(str(np.load(ROOT / entry["file"])["provenance"]))
            assert provenance["digest"] == entry["digest"]
            assert provenance["threads"] == 1
            assert {"versions", "hardware", "weights", "data", "seconds", "commit"} <= set(provenance)
            assert not provenance["commit"].endswith("+changes")


@in_the_release
def test_what_readme_says_in_short_is_true_of_every_released_dataset():
    checked = 0
    for path in RELEASE.glob("tables/*/exp2_orderings.csv"):
        orderings = {row["Ordered by"]: row for row in csv.DictReader(path.open())}
        assert float(orderings["1 - largest mean probability"]["difference high"]) < 0, path
        estimators = {row["Estimator"]: row for row in csv.DictReader((path.parent / "exp2_estimators.csv").open())}
        assert float(estimators["MoM, trace"]["AURC"]) < float(estimators["MoM, mean (the paper)"]["AURC"]), path
        ensemble = estimators["MoM, mean (the paper)"]
        single = {row["Model"]: row for row in csv.DictReader((path.parent / "exp1_metrics.csv").open())}
        members = single["Cross-entropy"]
        assert float(ensemble["Accuracy"]) > float(members["Accuracy mean"]), path
        assert float(ensemble["Macro F1"]) > float(members["Macro F1 mean"]), path
        assert float(ensemble["NLL"]) < min(float(row["NLL mean"]) for row in single.values()), path
        if path.parent.name.startswith("cifar"):
            assert float(ensemble["Accuracy"]) < float(single["MSE Clamp"]["Accuracy mean"])
        checked += 1
    assert checked


@in_the_release
def test_what_is_said_in_readme_and_docs_is_what_the_tables_say():
    from paperlib import showcase

    documents = showcase.documents("cpu")
    if not documents:
        pytest.skip("no dataset of the cpu scale is complete yet")
    for file, blocks in documents.items():
        text = (ROOT / file).read_text()
        for name, content in blocks.items():
            assert showcase.insert(text, name, content, file) == text, (file, name)
