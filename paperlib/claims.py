"""Published against measured: every number and claim of the paper, tested on stored predictions.

config/published.yaml holds the claims with their rules. Whatever the rule, a test ends in one contrast (a number
computed from the predictions) and the range in which the paper is right. The contrast is drawn again for bootstrap
samples of the inputs and, where there are several runs, of the runs. The test holds where the whole 95 % interval lies
in that range, holds in part where only the estimate does (or where one run gives no interval), and does not hold
otherwise.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

import numpy as np
import pandas as pd

from paperlib import analysis, catalogue, checks, config, dirichlet, quantities, records, wording
from paperlib.recipes import EVIDENTIAL

LEVEL = 0.95
UNBOUNDED = (-np.inf, np.inf)
HOLDS, IN_PART, FAILS, UNTESTABLE = VERDICTS = ("holds", "holds in part", "does not hold", "not testable")
IN_SHORT = {HOLDS: "hold", IN_PART: "in part", FAILS: "not"}
FIELDS = {"id", "kind", "section", "where", "text", "datasets", "decided_by", "tests"}
OPTIONAL = {"headline", "published", "printed", "measure", "settled", "because", "hangs_on", "untestable", "rehearsed"}


# ------------------------------------------------------------------------------------------- what the paper says


def load():
    """The claims of config/published.yaml, checked; every cell of the published tables is one of them."""
    content = quantities.published()
    claims = content["claims"] + [claim for table in content["tables"] for claim in _cells(table)]
    seen = set()
    for claim in claims:
        name = claim.get("id")
        if name in seen:
            raise ValueError(f"published.yaml: {name} stands there twice")
        seen.add(name)
        if missing := FIELDS - {"tests"} - set(claim):
            raise ValueError(f"published.yaml: {name} lacks {', '.join(sorted(missing))}")
        if unknown := set(claim) - FIELDS - OPTIONAL:
            raise ValueError(f"published.yaml: {name} has unknown keys {', '.join(sorted(unknown))}")
        for test in claim.get("tests", []):
            checks.choice(f"rule of {name}", test.get("rule"), tuple(RULES))
        for measure in [*claim.get("tests", []), *([claim["measure"]] if "measure" in claim else [])]:
            checks.choice(f"quantity of {name}", measure.get("quantity"), tuple(quantities.QUANTITIES))
    return claims


def _cells(table):
    """One claim for each number of a published table: its place in its column is what another backbone should keep."""
    for column in table["columns"]:
        values, quantity = column["values"], column["measure"]
        for row, value in values.items():
            others = {name: other for name, other in values.items() if name != row}
            yield {
                "id": f"{table['id']}.{column['id']}.{row}",
                "kind": "number",
                "section": table["section"],
                "where": table["where"],
                "text": f"{column['text']}, {table['rows'][row]}",
                "datasets": table["datasets"],
                "published": value,
                "printed": column.get("printed", {}).get(row, [str(value)]),
                "decided_by": table["decided_by"],
                "measure": {**quantity, "of": row},
                "tests": [
                    {"rule": "less" if value < other else "greater", **quantity, "of": row, "than": name}
                    for name, other in others.items()
                ],
            }


def protocol(scale):
    """The settings that the paper prints beside those of a scale."""
    settings, rows = config.load(scale), []
    for entry in quantities.published()["protocol"]:
        here, published = reduce(_member, entry["setting"].split("."), settings), entry["published"]
        here = list(here) if isinstance(here, tuple) else here
        missing = here is None and published is not None
        rows.append(
            {
                "setting": entry["text"],
                "where": entry["where"],
                "published": _shown(published),
                "here": "not at this scale" if missing else _shown(here),
                "same": "yes" if here == published else "no",
            }
        )
    return pd.DataFrame(rows)


def _shown(value):
    words = {None: "none", True: "yes", False: "no"}
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _member(node, name):
    return node.get(name) if isinstance(node, dict) else getattr(node, name, None)


# ------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Outcome:
    """One test on one dataset: what was measured, its interval and whether it lies where the paper says."""

    dataset: str
    quantity: str
    value: float
    low: float
    high: float
    lower: float
    upper: float
    verdict: str | None
    draws: np.ndarray

    @property
    def inside(self):
        """How far the estimate lies within the range in which the paper is right; negative outside."""
        return min(self.value - self.lower, self.upper - self.value)

    @property
    def clearly_outside(self):
        """Whether the whole interval lies outside that range."""
        return self.high < self.lower or self.low > self.upper

    def __str__(self):
        name = f" on {catalogue.title(self.dataset)}" if self.dataset else ""
        claimed = wording.claimed(self.lower, self.upper)
        number = wording.number(self.value, self.low, self.high)
        return f"{self.quantity}{name}: {number}" + (f", claimed {claimed}" if claimed else "")


def measured(evidence, measure, side=None):
    """Draws of a quantity; a side (a name or a mapping) adds to its parameters."""
    parameters = {key: value for key, value in measure.items() if key not in NOT_PARAMETERS}
    parameters |= side if isinstance(side, dict) else {} if side is None else {"of": side}
    found = quantities.QUANTITIES[measure["quantity"]](evidence, **parameters)
    return np.atleast_1d(np.asarray(found, float))


# Keys of a test that belong to its rule.
NOT_PARAMETERS = {"rule", "quantity", "of", "than", "by", "margin", "low", "high", "place", "others"}


def _difference(evidence, test):
    """The difference to the other side with limit 0; against a number, the value itself with that limit."""
    found = measured(evidence, test, test.get("of"))
    if isinstance(test["than"], int | float):
        return found, test["than"]
    return found - measured(evidence, test, test["than"]), 0.0


def _less(evidence, test):
    contrast, limit = _difference(evidence, test)
    return contrast, -np.inf, np.nextafter(limit - test.get("by", 0.0), -np.inf)


def _greater(evidence, test):
    contrast, limit = _difference(evidence, test)
    return contrast, np.nextafter(limit + test.get("by", 0.0), np.inf), np.inf


def _within(evidence, test):
    return measured(evidence, test, test.get("of")), test["low"], test["high"]


def _range(evidence, test):
    return np.ptp([measured(evidence, test, name) for name in test["of"]], axis=0)


def _similar(evidence, test):
    return _range(evidence, test), -np.inf, test["margin"]


def _differ(evidence, test):
    return _range(evidence, test), test["margin"], np.inf


def _lowest(evidence, test):
    """The named ones stay below the others; place n: below the n-th lowest of the others."""
    named = np.max([measured(evidence, test, name) for name in test["of"]], axis=0)
    others = np.sort(_others(evidence, test, np.inf), axis=0)
    return named - others[test.get("place", 1) - 1], -np.inf, np.nextafter(0.0, -1.0)


def _highest(evidence, test):
    named = np.min([measured(evidence, test, name) for name in test["of"]], axis=0)
    others = np.sort(_others(evidence, test, -np.inf), axis=0)
    return named - others[-test.get("place", 1)], np.nextafter(0.0, 1.0), np.inf


def _others(evidence, test, no_value):
    """Draws of the models to compare with; where one has no value (nothing above 0.8, say) it cannot win."""
    names = [name for name in test.get("others", EVIDENTIAL) if name not in test["of"]]
    return np.nan_to_num(
        [measured(evidence, test, name) for name in names], nan=no_value, posinf=np.inf, neginf=-np.inf
    )


def _falling(evidence, test):
    values = [measured(evidence, test, {"of": test["of"], "size": size}) for size in evidence.sizes]
    return np.diff(values, axis=0).max(axis=0), -np.inf, np.nextafter(0.0, -1.0)


def _varies(evidence, test):
    """Decided over datasets (see _across): here only the draws are kept."""
    return measured(evidence, test), -np.inf, np.inf


RULES = {
    "less": _less,
    "greater": _greater,
    "within": _within,
    "similar": _similar,
    "differ": _differ,
    "lowest": _lowest,
    "highest": _highest,
    "falling": _falling,
    "varies": _varies,
}


def interval(draws, bounds=UNBOUNDED):
    """95 % interval: quantiles of the draws, moved so that their mean is the estimate, within the quantity's bounds.

    A drawn ECE, range, extreme or deviation over runs is biased, since a sample repeats inputs and runs; moving
    them takes the bias out. A number without draws is exact; one whose draws have no value has no interval.
    """
    value, rest = draws[0], draws[1:]
    if rest.size == 0:
        return value, value
    rest = rest[np.isfinite(rest)]
    if rest.size == 0:
        return np.nan, np.nan
    edges = np.quantile(rest, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return tuple(float(edge) for edge in np.clip(edges + value - rest.mean(), *bounds))


def _bounds(test):
    """Between which a contrast can lie: a share as it is, a range over models, or a difference."""
    if test["rule"] in ("similar", "differ"):
        return 0.0, np.inf
    plain = test["rule"] == "within" or isinstance(test.get("than"), int | float)
    kind = test.get("metric") if test["quantity"] == "score" else test["quantity"]
    return quantities.BOUNDS.get(kind, UNBOUNDED) if plain else UNBOUNDED


def verdict(value, low, high, lower, upper):
    """Whether an estimate with its interval lies between two limits, which belong to the range."""
    if lower <= low and high <= upper:
        return HOLDS
    return IN_PART if lower <= value <= upper else FAILS


def try_test(evidence, test, dataset):
    """The outcome of one test on one dataset."""
    draws, lower, upper = RULES[test["rule"]](evidence, test)
    if not np.isfinite(draws[0]):
        raise quantities.NotTestable(f"{wording.describe(test)} has no finite value on {dataset}")
    low, high = interval(draws, _bounds(test))
    judged = verdict(draws[0], low, high, lower, upper)
    return Outcome(dataset, wording.describe(test), float(draws[0]), low, high, lower, upper, judged, draws)


def expanded(test, sizes):
    """The single tests behind one with lists: of metrics, of what it is compared with, and of all sizes."""
    choices = {}
    if isinstance(test.get("metric"), list):
        choices["metric"] = test["metric"]
    if test["rule"] in ("less", "greater", "within"):
        choices |= {key: test[key] for key in ("of", "than") if isinstance(test.get(key), list)}
    if test.get("size") == "each":
        choices["size"] = sizes
    return [test | dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


# ------------------------------------------------------------------------------------------- verdicts


def evaluate(scale, draws=quantities.DRAWS, seed=0):
    """Every claim with its verdict at a scale: one row a claim, the dataset that decides it in `dataset`.

    A claim is tested on the datasets it names. At a scale that has none of them (`demo`) it is rehearsed on those
    there are, and its reason says so.
    """
    settings = config.load(scale)
    claims = load()
    outcomes = {claim["id"]: {} for claim in claims}
    for dataset in (*settings.datasets, None):
        evidence = _evidence(settings, dataset, draws, seed)
        for claim in claims:
            if dataset in _datasets(claim, settings):
                outcomes[claim["id"]][dataset] = _outcomes(claim, evidence, dataset)
    return pd.DataFrame([_row(claim, outcomes[claim["id"]], settings) for claim in claims])


def _evidence(settings, dataset, draws, seed):
    """Evidence of a dataset; None without a dataset; a NotTestable where its split is not there."""
    if dataset is None:
        return None
    if not records.split_path(settings.scale, dataset).exists():
        return quantities.NotTestable(f"{dataset} is not released at scale {settings.scale}")
    return quantities.Evidence(analysis.Study(settings, dataset), draws, seed)


def _datasets(claim, settings):
    """Datasets on which a claim is tested: those it names, all of the scale's where it has none, [None] for no data."""
    if not claim["datasets"]:
        return [None]
    named = [name for name in claim["datasets"] if name in settings.datasets]
    return named or (list(settings.datasets) if claim.get("rehearsed", True) else [])


def _outcomes(claim, evidence, dataset):
    """Outcomes of a claim's tests on one dataset, the shown measure first (verdict None), or the reason for none."""
    if isinstance(evidence, quantities.NotTestable):
        return str(evidence)
    try:
        tests = [each for test in claim.get("tests", []) for each in expanded(test, getattr(evidence, "sizes", ()))]
        found = [try_test(evidence, test, dataset) for test in tests]
        if "measure" in claim:
            shown = {"rule": "within", "low": -np.inf, "high": np.inf, **claim["measure"]}
            outcome = try_test(evidence, shown, dataset)
            found.insert(0, replace(outcome, verdict=None))
    except quantities.NotTestable as reason:
        return str(reason)
    return found


def _row(claim, outcomes, settings):
    result, reason, shown = _decide(claim, outcomes)
    by_dataset = _by_dataset(claim, outcomes)
    rehearsed = claim["datasets"] and not set(claim["datasets"]) & set(settings.datasets)
    if rehearsed and result != UNTESTABLE and not claim.get("settled"):
        reason = f"rehearsal; {reason}"
    return {
        "id": claim["id"],
        "kind": claim["kind"],
        "section": claim["section"],
        "where": ", ".join(claim["where"]),
        "claim": claim["text"],
        "rule": claim["decided_by"],
        "published": claim.get("published", np.nan),
        "dataset": (shown.dataset or "") if shown else "",
        "quantity": shown.quantity if shown else "",
        "measured": shown.value if shown else np.nan,
        "low": shown.low if shown else np.nan,
        "high": shown.high if shown else np.nan,
        "claimed": wording.claimed(shown.lower, shown.upper) if shown else "",
        "verdict": result,
        **{name: by_dataset.get(name, "") for name in settings.datasets},
        "clear": "yes" if result == FAILS and _clearly(claim, outcomes) else "",
        "reason": reason,
    }


def _decide(claim, outcomes):
    """Verdict of a claim, the reason in words, and the outcome to show."""
    notes = [claim[key] for key in ("because", "hangs_on") if key in claim]
    if "untestable" in claim:
        return UNTESTABLE, claim["untestable"], None
    untested = {name: found for name, found in outcomes.items() if isinstance(found, str)}
    tested = {name: found for name, found in outcomes.items() if not isinstance(found, str)}
    if "settled" in claim:
        shown = next((outcome for found in tested.values() for outcome in found), None)
        return claim["settled"], "; ".join(["settled without data", *notes]), shown
    if not tested:
        missing = f"this scale does not have {', '.join(claim['datasets'])}"
        return UNTESTABLE, "; ".join(untested.values()) or missing, None
    if any(test["rule"] == "varies" for test in claim["tests"]):
        return _across(tested, list(untested.values()), notes)
    verdicts = _by_dataset(claim, tested)
    everywhere = set(verdicts.values())
    result = everywhere.pop() if len(everywhere) == 1 else IN_PART
    if untested and result == HOLDS:
        result = IN_PART
    deciding = _least_favourable(tested, verdicts)
    shown = next((found[0] for found in tested.values() if found[0].verdict is None), deciding)
    lines = [_line(name, found) for name, found in tested.items()]
    if shown is not deciding:
        lines.append(f"decided by {deciding}")
    return result, "; ".join([*lines, *untested.values(), *notes]), shown


def _least_favourable(tested, verdicts):
    """Of the datasets with the worst verdict, the test with the worst; of that test, where it is furthest off."""
    worst = max(verdicts.values(), key=VERDICTS.index)
    judged = [o for name, found in tested.items() if verdicts[name] == worst for o in found if o.verdict]

    def rank(outcome):
        return VERDICTS.index(outcome.verdict), outcome.clearly_outside

    first = max(judged, key=rank)
    alike = [outcome for outcome in judged if (outcome.quantity, rank(outcome)) == (first.quantity, rank(first))]
    return min(alike, key=lambda outcome: outcome.inside)


def _clearly(claim, outcomes):
    """Whether a claim fails beyond chance: on every dataset most tests have their whole interval outside."""
    return "settled" in claim or all(
        np.mean([outcome.clearly_outside for outcome in found if outcome.verdict]) > 0.5
        for found in outcomes.values()
        if not isinstance(found, str)
    )


def _by_dataset(claim, outcomes):
    """Verdict of a claim on each dataset that tests it; none where datasets are compared or nothing is measured."""
    if claim.keys() & {"settled", "untestable"} or any(test["rule"] == "varies" for test in claim.get("tests", [])):
        return {}
    return {
        name: _together([outcome.verdict for outcome in found if outcome.verdict])
        for name, found in outcomes.items()
        if not isinstance(found, str)
    }


def _together(verdicts):
    """One dataset's verdict from its tests: all hold; or at least half point the right way; or not."""
    if all(found == HOLDS for found in verdicts):
        return HOLDS
    right_way = sum(found != FAILS for found in verdicts)
    return IN_PART if 2 * right_way >= len(verdicts) else FAILS


def _line(dataset, found):
    """How the tests of one dataset came out, in words."""
    tests = [outcome for outcome in found if outcome.verdict]
    name = f"{catalogue.title(dataset)}: " if dataset else ""
    if len(tests) > 1:
        counts = Counter(outcome.verdict for outcome in tests)
        told = [f"{counts[verdict]} {word}" for verdict, word in IN_SHORT.items() if counts[verdict]]
        return f"{name}{len(tests)} tests, {', '.join(told)}"
    (test,) = tests
    if test.verdict == HOLDS:
        return f"{name}the whole interval agrees"
    if test.verdict == FAILS:
        return f"{name}the {'whole interval' if test.clearly_outside else 'estimate'} disagrees"
    beyond = "one run has no interval" if np.isnan(test.low) else "its interval goes beyond"
    return f"{name}the estimate agrees, {beyond}"


def _across(tested, untested, notes):
    """Whether the winner differs between datasets, in the data and in 97.5 % of the draws, for every test."""
    if len(tested) < 2:
        return UNTESTABLE, f"a comparison between datasets needs two, there is {', '.join(tested)}", None
    results, shown, lines = [], None, []
    for outcomes in zip(*tested.values(), strict=True):
        codes = np.sort([outcome.draws for outcome in outcomes], axis=0)
        winners = 1 + (np.diff(codes, axis=0) != 0).sum(axis=0)
        low, high = np.quantile(winners[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        results.append(verdict(winners[0], low, high, 2, np.inf))
        quantity = f"different winners over {len(tested)} datasets, {outcomes[0].quantity}"
        shown = shown or Outcome(", ".join(tested), quantity, winners[0], low, high, 1, np.inf, results[0], winners)
        lines.append(f"{outcomes[0].quantity}: {int(winners[0])} different winners over {len(tested)} datasets")
    result = _together(results)
    return IN_PART if untested and result == HOLDS else result, "; ".join([*lines, *untested, *notes]), shown


def told(frame):
    """The verdicts for reading: a number with its interval in one cell, what it is and where, and why."""

    def measured(row):
        if pd.isna(row.measured):
            return ""
        names = ", ".join(catalogue.title(name) for name in row.dataset.split(", ")) if row.dataset else ""
        return wording.number(row.measured, row.low, row.high) + (f" ({names})" if names else "")

    return pd.DataFrame(
        {
            "claim": frame["claim"] + " (" + frame["where"] + ")",
            "verdict": frame["verdict"].map("**{}**".format),
            "rule": frame["rule"],
            "published": frame["published"].map(lambda value: "" if pd.isna(value) else f"{value:.5g}"),
            "here": frame.apply(measured, axis=1),
            "what": frame["quantity"],
            "claimed": frame["claimed"],
            "why": frame["reason"],
        }
    )


def summary(frame):
    """Number of claims by section of the paper and verdict, with totals."""
    counts = pd.crosstab(frame["section"], frame["verdict"]).reindex(
        index=list(dict.fromkeys(frame["section"])), columns=list(VERDICTS), fill_value=0
    )
    counts.loc["All"] = counts.sum()
    return counts.assign(claims=counts.sum(axis=1)).rename_axis("section").rename_axis(None, axis=1).reset_index()


# ------------------------------------------------------------------------------------------- sensitivity


def released(scale, needed=("ce", "digamma", "exponential")):
    """Datasets of a scale whose split and predictions of the needed runs and of other splits are all there.

    needed=None: the predictions of every run.
    """
    settings = config.load(scale)
    return [
        dataset
        for dataset in settings.datasets
        if records.split_path(scale, dataset).exists()
        and all(
            records.prediction_path(scale, dataset, run, seed).exists()
            for run in settings.runs(dataset)
            if needed is None or run in needed or run.startswith(config.OTHER_SPLIT)
            for seed in settings.seeds(dataset, run)
        )
    ]


SENSITIVITY = ["dataset", "choice", "value", "model", "metric", "measured", "low", "high"]


def sensitivity(scale, dataset, draws=quantities.DRAWS, seed=0):
    """What B, r, the aggregation of the moments and the split change: one moved at a time, the others as configured."""
    evidence = quantities.Evidence(analysis.Study(config.load(scale), dataset), draws, seed)
    settings, size, rows = evidence.settings, evidence.size("last"), []

    def add(choice, value, model, metric, found):
        low, high = interval(found, quantities.BOUNDS[metric])
        rows.append((dataset, choice, str(value), model, metric, found[0], low, high))

    for of in ("mom", "digamma", "exponential"):
        model = evidence.models(of, size, "first")[0]
        for bins in (5, 10, 15, 20, 50):
            add("bins B", bins, of, "ece", quantities.binned_ece(model.test, evidence.weights["test"], bins))
        for risk in (0.05, 0.1, 0.15, 0.2):
            moved = replace(settings, risk=risk)
            for metric in ("coverage", "retained_risk"):
                add("risk r", risk, of, metric, quantities.METRICS[metric](model, evidence.weights, moved))
    for aggregate in dirichlet.AGGREGATES:
        model = quantities.Model(
            lambda part, a=aggregate: quantities.fitted(evidence.study.fit("mom", part, size, a)), evidence.study.labels
        )
        for metric in ("variance_auroc", "aurc", "coverage", "retained_risk"):
            add("aggregate", aggregate, "mom", metric, quantities.METRICS[metric](model, evidence.weights, settings))
    if (moved := evidence.study.scale.split_sensitivity) and moved.dataset == dataset:
        for split_seed in (evidence.study.scale.split.seed, *moved.seeds):
            run = f"{config.OTHER_SPLIT}{split_seed}" if split_seed in moved.seeds else "ce"
            other = quantities.Evidence(analysis.Study(evidence.study.scale, dataset, run), draws, seed)
            model = other.models("mom", moved.members, "first")[0]
            for metric in ("accuracy", "ece", "aurc", "coverage", "retained_risk"):
                found = quantities.METRICS[metric](model, other.weights, settings)
                add(f"split seed, {moved.members} members", split_seed, "mom", metric, found)
    return pd.DataFrame(rows, columns=SENSITIVITY)


def in_words(frame):
    """The sensitivity for reading: names as in the other tables, a number with its interval in one cell."""
    numbers = zip(frame["measured"], frame["low"], frame["high"], strict=True)
    here = ["nothing is kept" if np.isnan(number[0]) else wording.number(*number) for number in numbers]
    return pd.DataFrame(
        {
            "dataset": frame["dataset"].map(catalogue.title),
            "choice": frame["choice"],
            "value": frame["value"],
            "model": frame["model"].map(wording.WORDS),
            "metric": frame["metric"].map(wording.WORDS),
            "here": here,
        }
    )
