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
RECIPES = {
    "MSE Only": "mse_only",
    "MSE Clamp": "mse_clamp",
    "MSE Soft Adapt": "mse_softadapt",
    "MSE Plus One": "mse_plusone",
    "Exponential": "exponential",
    "Digamma": "digamma",
}
PRINTED = 5e-5  # half of the last of four printed digits
MEGABYTES = 60

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
    table = {row["Model"]: row for row in raw.table("exp1_metrics")}
    assert table.keys() == {*RECIPES, "Cross-entropy", "Cross-entropy, temperature scaled"}
    runs = len(raw.probs("digamma"))
    for title, run in (*RECIPES.items(), ("Cross-entropy", "ce")):
        found = [metrics(probs, raw.labels["test"]) for probs in raw.probs(run)[:runs]]
        for seed, (probs, each) in enumerate(zip(raw.probs(run), found, strict=False)):
            alpha0 = np.ones(len(probs)) if run == "ce" else raw.alpha0(run, "test", seed)
            each["AURC"] = aurc(total_variance(probs, alpha0), probs.argmax(axis=1) != raw.labels["test"])
        for name in ("Accuracy", "Macro F1", "NLL", "ECE", "Sure if wrong", "AURC"):
            values = [each[name] for each in found]
            assert agree(table[title][f"{name} mean"], np.mean(values)), (run, name)
            assert agree(table[title][f"{name} std"], np.std(values, ddof=1)), (run, name)


def aurc(uncertainty, wrong):
    """Mean over all coverages of the share of wrong ones among the kept; inputs of equal uncertainty in any order."""
    expected = np.array([wrong[uncertainty == value].mean() for value in uncertainty])
    return np.mean(np.cumsum(expected[np.argsort(uncertainty)]) / np.arange(1, len(wrong) + 1))


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


@pytest.mark.parametrize("model", ["Digamma", "Exponential", "MoM", "Plain ensemble"])
def test_selective_classification(raw, model):
    row = next(row for row in raw.table("exp3_summary") if row["Model"].startswith(model))
    forecast = {}
    for part in ("calibration", "test"):
        if model == "MoM":
            members = raw.probs("ce", part)[: int(re.search(r"M = (\d+)", row["Model"])[1])]
            mean, alpha0 = moments(members)
        elif model == "Plain ensemble":
            mean = raw.probs("ce", part)[: int(re.search(r"M = (\d+)", row["Model"])[1])].mean(axis=0)
            forecast[part] = mean, 1 - mean.max(axis=1)
            continue
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


def test_selective_classification_over_runs(raw):
    table = {row["Model"]: row for row in raw.table("exp3_runs")}
    for title, run in RECIPES.items():
        means = {part: raw.probs(run, part) for part in ("calibration", "test")}
        kept = []
        for seed in range(len(means["test"])):
            forecast = {
                part: (probs[seed], total_variance(probs[seed], raw.alpha0(run, part, seed)))
                for part, probs in means.items()
            }
            kept.append(selected(forecast, raw.labels).mean())
        assert agree(table[title]["Coverage mean"], np.mean(kept)), title
        assert agree(table[title]["Coverage std"], np.std(kept, ddof=1)), title


@pytest.mark.skipif(not (ROOT / "results/cpu/manifests/dermamnist").exists(), reason="DermaMNIST is not released")
def test_coverages_that_agree_with_the_published_ones_by_chance():
    raw = Raw("cpu", "dermamnist")
    claims = {row["id"]: row for row in csv.DictReader((ROOT / "results/cpu/tables/all/claims.csv").open())}
    labels, coverages = raw.labels["test"], []
    for probs in raw.probs("ce")[:50]:  # the figure reads the threshold off the test part itself
        ordered = probs, (probs * (1 - probs)).sum(axis=1)
        coverages.append(selected({"calibration": ordered, "test": ordered}, {"calibration": labels}).mean())
    digamma = next(row for row in raw.table("exp3_runs") if row["Model"] == "Digamma")  # checked above
    kept = float(digamma["Coverage mean"])
    found = {"method.single-coverage-smallest": min(coverages), "exp3.table.coverage.digamma": kept}
    for name, value in found.items():
        assert agree(claims[name]["measured"], value)
        assert agree(claims[name]["published"], value)
        assert float(claims[name]["high"]) - float(claims[name]["low"]) > 0.1


@pytest.mark.skipif(not (ROOT / "results/cpu/manifests/dermamnist").exists(), reason="DermaMNIST is not released")
def test_members_are_as_far_apart_as_the_results_card_says():
    members = Raw("cpu", "dermamnist").probs("ce")
    distances = [
        0.5 * np.abs(one - other).sum(axis=1).mean()
        for number, one in enumerate(members)
        for other in members[number + 1 :]
    ]
    said = f"fifty members are {min(distances):.3f} to {max(distances):.3f} apart"
    assert said in " ".join((ROOT / "docs/results.md").read_text().split())


DATASETS = ("dermamnist", "cifar100", "cifar10", "aptos")
all_released = pytest.mark.skipif(
    not all((ROOT / f"results/cpu/splits/{name}.npz").exists() for name in DATASETS), reason="not all is released"
)


def ranks(values):
    return np.argsort(np.argsort(values))


@all_released
def test_alpha0_follows_the_raw_disagreement_where_the_claim_says_so():
    """hangs_on of method.concentration-is-disagreement."""
    passed = set()
    for name in DATASETS:
        members = Raw("cpu", name).probs("ce")[:50]
        agreement = -members.var(axis=0).sum(axis=1)
        if np.corrcoef(ranks(moments(members)[1]), ranks(agreement))[0, 1] > 0.7:
            passed.add(name)
    assert passed == {"cifar10", "aptos"}


@all_released
def test_by_the_runs_own_errors_the_published_order_is_met():
    """hangs_on of the two claims of CIFAR-100 about wrong predictions above 0.8."""
    raw = Raw("cpu", "cifar100")
    own = {}
    for title, run in RECIPES.items():
        if any((probs.max(axis=1) > 0.8).any() for probs in raw.probs(run)):
            own[title] = np.mean([metrics(probs, raw.labels["test"])["Wrong if sure"] for probs in raw.probs(run)])
    assert (min(own, key=own.get), max(own, key=own.get)) == ("MSE Clamp", "Exponential")


@all_released
def test_relative_to_the_mean_risk_single_models_spread_most_at_low_coverage():
    """hangs_on of method.low-coverage-unstable."""
    raw = Raw("cpu", "dermamnist")
    risks = []
    for probs in raw.probs("ce")[:50]:
        wrong = (probs.argmax(axis=1) != raw.labels["test"])[np.argsort((probs * (1 - probs)).sum(axis=1))]
        risks.append([wrong[: round(share * len(wrong))].mean() for share in (0.1, 0.5, 0.9)])
    low, middle, high = np.std(risks, axis=0, ddof=1) / np.mean(risks, axis=0)
    assert low > middle > high


@all_released
def test_calibrated_predictions_have_the_ece_that_the_claim_says():
    """hangs_on of background.softmax-uncalibrated: labels drawn from the members' own probabilities."""
    generator, found = np.random.default_rng(0), {}
    for name in DATASETS:
        raw, drawn, seen = Raw("cpu", name), [], []
        for probs in raw.probs("ce")[:10]:
            labels = (generator.random((len(probs), 1)) > probs.cumsum(axis=1)).sum(axis=1)
            labels = labels.clip(max=probs.shape[1] - 1)
            drawn.append(metrics(probs, labels)["ECE"])
            seen.append(metrics(probs, raw.labels["test"])["ECE"])
        found[name] = np.mean(drawn)
        assert np.mean(seen) > 1.3 * np.mean(drawn), name
    assert min(found.values()) > 0.0125 and max(found.values()) < 0.045, found


# ------------------------------------------------------------------------------------------- what the release promises

RELEASE = ROOT / "results" / "cpu"
in_the_release = pytest.mark.skipif(
    not (RELEASE / "manifests").exists(), reason="no dataset of the cpu scale is released yet"
)


@in_the_release
def test_the_release_is_small_and_holds_no_images():
    files = [path for path in RELEASE.rglob("*") if path.is_file() and ".built" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MEGABYTES * 1e6
    assert {path.suffix for path in files} <= {".npz", ".json", ".csv", ".tex", ".md", ".ipynb", ".html"}


@in_the_release
def test_every_prediction_is_listed_and_there_with_its_provenance():
    manifests = list(RELEASE.rglob("manifests/*/*.json"))
    listed = {ROOT / entry["file"] for manifest in manifests for entry in json.loads(manifest.read_text())}
    assert listed == set(RELEASE.glob("predictions/*/*/*.npz")) and listed
    for manifest in manifests:
        for entry in json.loads(manifest.read_text()):
            provenance = json.loads(str(np.load(ROOT / entry["file"])["provenance"]))
            assert provenance["digest"] == entry["digest"]
            assert provenance["threads"] == 1
            assert {"versions", "hardware", "weights", "data", "seconds", "commit"} <= set(provenance)
            assert not provenance["commit"].endswith("+changes")


@in_the_release
def test_what_readme_says_in_short_is_true_of_every_released_dataset():
    best_calibrated, scaled_is_better, recipe_is_more_accurate = [], set(), set()
    nll_range, refinement_helps_nll = {}, set()
    folders = [path.parent for path in RELEASE.glob("tables/*/exp2_orderings.csv")]
    for folder in folders:
        orderings = rows_of(folder / "exp2_orderings.csv", "Ordered by")
        estimators = rows_of(folder / "exp2_estimators.csv", "Estimator")
        single = rows_of(folder / "exp1_metrics.csv", "Model")
        ensemble, members = estimators["MoM, mean (the paper)"], single["Cross-entropy"]
        confidence = orderings["1 - largest mean probability"]
        recipes = [single[title] for title in RECIPES]
        assert ensemble["NLL"] < min(row["NLL mean"] for row in single.values()), folder
        assert ensemble["Accuracy"] > members["Accuracy mean"], folder
        assert ensemble["Macro F1"] > members["Macro F1 mean"], folder
        if max(row["Accuracy mean"] for row in recipes) > ensemble["Accuracy"]:
            recipe_is_more_accurate.add(folder.name)
        best = min(RECIPES, key=lambda title: single[title]["ECE mean"])
        best_calibrated.append(best)
        assert abs(ensemble["ECE"] - single[best]["ECE mean"]) < 0.02, folder
        if single["Cross-entropy, temperature scaled"]["ECE mean"] < ensemble["ECE"] - 0.001:
            scaled_is_better.add(folder.name)
        assert min(row["AURC mean"] for row in recipes) < ensemble["AURC"], folder
        assert members["AURC mean"] < ensemble["AURC"], folder
        assert confidence["difference high"] < 0, folder
        assert confidence["AURC"] < estimators["MoM, trace"]["AURC"] < ensemble["AURC"], folder
        nll_range[folder.name] = np.ptp([row["NLL mean"] for row in recipes])
        assert estimators["MLE (fixed point)"]["AURC"] < ensemble["AURC"], folder
        if estimators["MLE (fixed point)"]["NLL"] < ensemble["NLL"]:
            refinement_helps_nll.add(folder.name)
    assert len(folders) == 4
    assert recipe_is_more_accurate == scaled_is_better == {"cifar10", "cifar100"}
    assert len(set(best_calibrated)) > 2
    assert (max(nll_range, key=nll_range.get), min(nll_range, key=nll_range.get)) == ("cifar100", "aptos")
    assert refinement_helps_nll == {"aptos"}
    verdicts = rows_of(RELEASE / "tables/all/claims.csv", "id")
    steadier = verdicts["abstract.ensemble-mitigates-variability"]
    assert {name for name in steadier if steadier[name] == "holds"} == {"cifar10"}
    assert all(steadier[folder.name] in ("holds", "holds in part") for folder in folders)
    assert verdicts["exp1.no-recipe-dominates"]["verdict"] == "holds"
    assert verdicts["exp2.twenty-steps"]["verdict"] == "does not hold"


def rows_of(path, key):
    """Rows of a table by one of its columns, numbers as such."""

    def number(cell):
        try:
            return float(cell)
        except ValueError:
            return cell

    with path.open() as lines:
        return {row[key]: {name: number(cell) for name, cell in row.items()} for row in csv.DictReader(lines)}


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


@in_the_release
def test_the_examples_of_the_documents_run(tmp_path, monkeypatch):
    from paperlib import ensembles, policy

    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    examples = [
        code
        for page in ("data.md", "own-ensemble.md")
        for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
        if "results/cpu" in code
    ]
    assert len(examples) == 2
    for code in examples:
        exec(code, {})
    kept = {}
    for order in ("total_variance", "least_confidence"):
        fitted = policy.fit(ensembles.read("predictions.npz"), risk=0.1, delta=0.1, order=order)
        decisions = policy.apply(fitted.policy, ensembles.read("predictions.npz"))
        kept[order] = decisions.kept[-1002:].mean()
    assert 1.4 < kept["least_confidence"] / kept["total_variance"] < 1.6  # "half as much again"
