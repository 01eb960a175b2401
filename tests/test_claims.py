"""The published numbers and claims: complete, consistent, and judged by rules that can come out each way."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import change_config
from sklearn.metrics import roc_auc_score

from paperlib import analysis, calibration, claims, config, losses, quantities, records, scores, selective, wording
from paperlib.recipes import EVIDENTIAL, RECIPES

LABELS = """
    sec:momintro fig:softmaxfreq fig:ensemble_flow_figure sec:mombackground sec:edl eq:logits eq:celoss eq:softmax
    eq:dirpdf eq:mvbfunc eq:meanvar eq:mseloss eq:digammaloss eq:digammafunc eq:dirloss eq:annealkl fig:edl_arch
    sec:momcalibration fig:success_plots fig:fail_plots fig:fail_demo eq:calibrated fig:rel_hist_diagram
    sec:mommethodology sec:momalphas eq:fpi alg:mom-dirichlet alg:mle-dirichlet eq:alphakfail eq:totalvar
    fig:failvariance fig:50CE_riskcov_curves sec:momresults sec:exp1 tab:dirichlet_formulations tab:dataset_summary
    fig:C100_EDL_metrics fig:c100_mse_only fig:c100_mse_softadapt fig:c100_mse_clamp fig:c100_digamma
    fig:c100_mse_plusone fig:c100_exponential fig:c100_EDL_sum fig:DM_EDL_metrics fig:dm_mse_only fig:dm_mse_softadapt
    fig:dm_mse_clamp fig:dm_digamma fig:dm_mse_plusone fig:dm_exponential fig:DM_EDL_sum sec:exp2 fig:C100_mom_metrics
    fig:C100_MoM_rel fig:C100_mom_conf fig:DM_mom_metrics fig:DM_MoM_rel fig:DM_mom_conf sec:exp3 fig:DM_MoM_sel
    fig:DM_EDL_riskcurve fig:DM_EDL_varhist fig:DM_EDL_sel tab:dm_sel_summary sec:momdiscussion sec:lossders
    eq:appmseloss eq:appdigammaloss sec:append_exp1 fig:c10_EDL_metrics fig:c10_mse_only fig:c10_mse_softadapt
    fig:c10_mse_clamp fig:c10_digamma fig:c10_mse_plusone fig:c10_exponential fig:c10_EDL_sum fig:APT_EDL_metrics
    fig:apt_mse_only fig:apt_mse_softadapt fig:apt_mse_clamp fig:apt_digamma fig:apt_mse_plusone fig:apt_exponential
    fig:APT_EDL_sum sec:append_exp2 fig:c10_mom_metrics fig:C10_MoM_rel fig:C10_mom_conf fig:APT_mom_metrics
    fig:APT_MoM_rel fig:APT_mom_conf"""
# Every result that the paper prints as a number.
PRINTED = """
    0.7605 0.3963 1.7061 634 0.9132 0.4346 1.1109 0.7515 0.4366 0.7215 559 0.9141 0.5204 0.3496 0.7974 0.5916 0.5552 701
    0.8987 0.6292 0.3124 89.9 70 91.4 56 91.3 63 5.3 18.2 56.39 69.26 12.87 0.0025 0.075 10^7 1 1002 60,000 10,015
    3,662 10 100 7 5 0.1"""
MODELS = {*RECIPES, *analysis.ESTIMATORS, "min", "max", "range"}


@pytest.fixture(scope="module")
def all_claims():
    return claims.load()


def measures(claim):
    return [*claim.get("tests", []), *([claim["measure"]] if "measure" in claim else [])]


def names_in(side):
    """Names of models in one side of a test."""
    if isinstance(side, dict):
        return names_in(side.get("of"))
    return [name for each in side for name in names_in(each)] if isinstance(side, list) else [side]


# ------------------------------------------------------------------------------------------- published.yaml


def test_claims_are_many_and_come_from_every_part_of_the_paper(all_claims):
    assert len(all_claims) > 100
    assert {claim["section"] for claim in all_claims} == {
        "Abstract and introduction",
        "Background",
        "Methodology",
        "Experiment 1",
        "Appendix, experiment 1",
        "Experiment 2",
        "Appendix, experiment 2",
        "Experiment 3",
    }


def test_every_claim_is_complete(all_claims):
    assert len({claim["id"] for claim in all_claims}) == len(all_claims)
    for claim in all_claims:
        name = claim["id"]
        assert re.fullmatch(r"[a-z0-9]+(\.[a-z0-9-]+)+", name), name
        assert claim["kind"] in ("number", "claim"), name
        assert claim["where"] and set(claim["where"]) <= {"abstract", *LABELS.split()}, name
        assert claim["text"] and claim["decided_by"], name
        assert set(claim["datasets"]) <= {"cifar10", "cifar100", "dermamnist", "aptos"}, name
        assert (claim["kind"] == "number") == ("published" in claim) == ("measure" in claim), name
        assert ("tests" in claim) + ("settled" in claim) + ("untestable" in claim) == 1, name
        assert "because" in claim if "settled" in claim else True, name
        assert claim.get("settled", claims.HOLDS) in claims.VERDICTS[:3], name


def test_every_measure_can_be_called(all_claims):
    for claim in all_claims:
        for measure in measures(claim):
            function = quantities.QUANTITIES[measure["quantity"]]
            common = {key: value for key, value in measure.items() if key not in claims.NOT_PARAMETERS}
            sides = [measure[key] for key in ("of", "than") if key in measure] or [{}]
            for side in [each for entry in sides for each in (entry if isinstance(entry, list) else [entry])]:
                if not isinstance(side, int | float):
                    extra = side if isinstance(side, dict) else {"of": side}
                    inspect.signature(function).bind(None, **common, **extra)
            for name in names_in([s for s in sides if not isinstance(s, int | float)]):
                known = name in MODELS or name is None or isinstance(name, float)
                assert known or name.removeprefix("collapse_") in analysis.COLLAPSE_TITLES, claim["id"]
            metrics = measure.get("metric", [])
            assert set(metrics if isinstance(metrics, list) else [metrics]) <= set(quantities.METRICS), claim["id"]


def test_every_printed_result_is_there(all_claims):
    shown = " ".join(text for claim in all_claims for text in claim.get("printed", []))
    assert set(re.findall(r"[\d.,^]*\d", shown)) == set(PRINTED.split())


def test_printed_and_published_agree(all_claims):
    for claim in all_claims:
        for text in claim.get("printed", []):
            if percent := re.fullmatch(r"([\d.]+) (%|percentage points)", text):
                decimals = len(percent[1].partition(".")[2])
                assert round(100 * claim["published"], decimals) == float(percent[1]), claim["id"]


@pytest.mark.parametrize("key", ["id", "text", "decided_by", "where"])
def test_a_claim_that_lacks_a_key_is_refused(monkeypatch, key):
    content = quantities.published()
    del content["claims"][3][key]
    monkeypatch.setattr(quantities, "published", lambda: content)
    with pytest.raises(ValueError, match=key):
        claims.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[1].update(id=c[0]["id"]), "twice"),
        (lambda c: c[0].update(verdict="holds"), "unknown keys verdict"),
        (lambda c: c[0]["tests"][0].update(rule="smaller"), "unknown rule"),
        (lambda c: c[0]["tests"][0].update(quantity="spread"), "unknown quantity"),
    ],
)
def test_a_wrong_claim_is_refused(monkeypatch, change, message):
    content = quantities.published()
    change(content["claims"])
    monkeypatch.setattr(quantities, "published", lambda: content)
    with pytest.raises(ValueError, match=message):
        claims.load()


# ------------------------------------------------------------------------------------------- the paper's arithmetic


def table_values():
    table = quantities.published()["tables"][0]
    return {column["id"]: column["values"] for column in table["columns"]}


@pytest.mark.parametrize(("model", "retained"), [("digamma", 634), ("exponential", 559), ("mom", 701)])
def test_the_published_table_comes_from_whole_numbers(model, retained):
    values = table_values()
    assert values["coverage"][model] == round(retained / 1002, 4)
    for accuracy, inputs in ((values["full-accuracy"][model], 1002), (values["retained-accuracy"][model], retained)):
        assert round(round(accuracy * inputs) / inputs, 4) == accuracy


def test_the_published_retained_risk_is_above_its_target():
    assert quantities.table_risk(None, "mom") == 71 / 701 > 0.1
    assert quantities.table_risk(None, "digamma") == 55 / 634 < 0.1


def test_the_published_coverages_of_single_models_are_shares_of_the_dermamnist_test_set(all_claims):
    found = {claim["id"].rpartition("-")[2]: claim["published"] for claim in all_claims if "single-cov" in claim["id"]}
    assert found == {"smallest": round(565 / 1002, 4), "largest": round(694 / 1002, 4), "range": round(129 / 1002, 4)}


def test_the_paper_scale_is_the_printed_protocol():
    assert set(claims.protocol("paper")["same"]) == {"yes"}


def test_a_setting_that_a_scale_has_not_is_named():
    found = claims.protocol("demo").set_index("setting")
    assert found.loc["Cross-entropy models elsewhere", "here"] == "not at this scale"
    assert found.loc["Batch size", "same"] == "yes"


def test_the_balancing_kl_weight_makes_the_loss_flat_in_alpha0():
    alpha0 = torch.tensor(1e7, dtype=torch.float64, requires_grad=True)
    alpha = (alpha0 / 100).expand(1, 100)
    label = torch.zeros(1, dtype=torch.long)
    fall, rise = (
        torch.autograd.grad(loss.sum(), alpha0, retain_graph=True)[0].item()
        for loss in (losses.mse(alpha, label), losses.kl_to_uniform(alpha))
    )
    weight = quantities.balancing_kl_weight(None, 100, 1e7)
    assert fall < 0 < rise
    assert weight == pytest.approx(-fall / rise, rel=1e-4)
    assert weight == pytest.approx(2 / (100 * 1e7), rel=1e-3)  # what the claim's reason says


# ------------------------------------------------------------------------------------------- rules and verdicts


class Bench:
    """Stands in for an Evidence: quantities come from a table of draws."""

    sizes = (2, 5)


@pytest.fixture
def bench(monkeypatch):
    def install(**draws):
        def quantity(_, of=None, size=None):
            return np.asarray(draws[of if size is None else f"{of}{size}"])

        monkeypatch.setitem(quantities.QUANTITIES, "score", quantity)
        return Bench()

    return install


def around(value, width):
    """An estimate with draws whose 95 % interval is value -+ width."""
    rest = np.linspace(-1, 1, 2001) * width / 0.95
    return np.append(value, value + rest)


@pytest.mark.parametrize(
    ("value", "width", "expected"),
    [
        (-0.2, 0.1, claims.HOLDS),
        (-0.2, 0.3, claims.IN_PART),
        (0.1, 0.05, claims.FAILS),
        (0.1, 0.3, claims.FAILS),
        (0.0, 0.0, claims.FAILS),
    ],
)
def test_less_and_greater_respect_the_interval(bench, value, width, expected):
    evidence = bench(a=around(value, width), b=np.zeros(2002))
    less = claims.try_test(evidence, {"rule": "less", "quantity": "score", "of": "a", "than": "b"}, "x")
    greater = claims.try_test(evidence, {"rule": "greater", "quantity": "score", "of": "b", "than": "a"}, "x")
    assert (less.verdict, greater.verdict) == (expected, expected)
    assert (less.value, less.low, less.high) == pytest.approx((value, value - width, value + width), abs=1e-3)


@pytest.mark.parametrize(("by", "expected"), [(0.05, claims.HOLDS), (0.15, claims.IN_PART), (0.25, claims.FAILS)])
def test_by_moves_the_limit(bench, by, expected):
    evidence = bench(a=around(0.2, 0.1))
    test = {"rule": "greater", "quantity": "score", "of": "a", "than": 0.0, "by": by}
    assert claims.try_test(evidence, test, "x").verdict == expected
    tolerant = {"rule": "less", "quantity": "score", "of": "a", "than": 0.0, "by": -0.35}
    assert claims.try_test(evidence, tolerant, "x").verdict == claims.HOLDS


def test_without_draws_a_number_is_exact_and_one_run_has_no_interval(bench):
    test = {"rule": "greater", "quantity": "score", "of": "a", "than": 0}
    exact = claims.try_test(bench(a=[1.0]), test, "x")
    assert (exact.low, exact.high, exact.verdict) == (1.0, 1.0, claims.HOLDS)
    single = claims.try_test(bench(a=[1.0, np.nan, np.nan]), test, "x")
    assert np.isnan([single.low, single.high]).all() and single.verdict == claims.IN_PART
    assert claims._line("x", [single]) == "x: the estimate agrees, one run has no interval"
    assert claims.try_test(bench(a=[-1.0, np.nan, np.nan]), test, "x").verdict == claims.FAILS


@pytest.mark.parametrize(
    ("test", "claimed"),
    [
        ({"rule": "less", "of": "a", "than": "b"}, "< 0"),
        ({"rule": "greater", "of": "a", "than": 0.7}, "> 0.7"),
        ({"rule": "less", "of": "a", "than": "b", "by": -0.02}, "< 0.02"),
        ({"rule": "within", "of": "a", "low": 0.4, "high": 0.6}, "0.4 to 0.6"),
        ({"rule": "within", "of": "a", "low": 7, "high": 7}, "7"),
        ({"rule": "similar", "of": ["a", "b"], "margin": 0.03}, "< 0.03"),
    ],
)
def test_what_is_claimed_is_shown(bench, test, claimed):
    evidence = bench(a=around(1, 0.1), b=around(1, 0.1))
    found = claims.try_test(evidence, {"quantity": "score", **test}, "x")
    assert wording.claimed(found.lower, found.upper) == claimed and str(found).endswith(f", claimed {claimed}")


def test_against_a_number_the_value_itself_is_shown(bench):
    found = claims.try_test(
        bench(a=around(0.8, 0.05)), {"rule": "greater", "quantity": "score", "of": "a", "than": 0.7}, "x"
    )
    assert (found.value, found.verdict) == (0.8, claims.HOLDS)


@pytest.mark.parametrize(
    ("rule", "limits", "expected"),
    [
        ("within", {"low": 0.0, "high": 1.0}, claims.HOLDS),
        ("within", {"low": 0.45, "high": 1.0}, claims.IN_PART),
        ("within", {"low": 0.6, "high": 1.0}, claims.FAILS),
    ],
)
def test_within(bench, rule, limits, expected):
    evidence = bench(a=around(0.5, 0.1))
    found = claims.try_test(evidence, {"rule": rule, "quantity": "score", "of": "a", **limits}, "x")
    assert found.verdict == expected


@pytest.mark.parametrize(
    ("margin", "similar", "differ"),
    [
        (0.15, claims.FAILS, claims.HOLDS),
        (0.25, claims.FAILS, claims.IN_PART),
        (0.35, claims.IN_PART, claims.FAILS),
        (0.5, claims.HOLDS, claims.FAILS),
    ],
)
def test_similar_and_differ_look_at_the_range(bench, margin, similar, differ):
    evidence = bench(a=around(0.3, 0.1), b=np.zeros(2002), c=np.full(2002, 0.1))
    for rule, expected in (("similar", similar), ("differ", differ)):
        test = {"rule": rule, "quantity": "score", "of": ["a", "b", "c"], "margin": margin}
        assert claims.try_test(evidence, test, "x").verdict == expected


def test_lowest_and_highest_with_places(bench):
    evidence = bench(a=around(1, 0.1), b=around(2, 0.1), c=around(3, 0.1), d=np.full(2002, np.nan))

    def judge(rule, of, place=1):
        test = {"rule": rule, "quantity": "score", "of": of, "others": ["a", "b", "c", "d"], "place": place}
        return claims.try_test(evidence, test, "x").verdict

    assert judge("lowest", ["a"]) == judge("highest", ["c"]) == claims.HOLDS
    assert judge("lowest", ["b"]) == judge("highest", ["b"]) == claims.FAILS
    assert judge("lowest", ["b"], 2) == judge("highest", ["b"], 2) == claims.HOLDS
    assert judge("lowest", ["a", "b"]) == judge("highest", ["b", "c"]) == claims.HOLDS
    with pytest.raises(quantities.NotTestable, match="no finite value"):
        judge("lowest", ["d"])


def test_falling_needs_every_step(bench):
    test = {"rule": "falling", "quantity": "score", "of": "a"}
    assert claims.try_test(bench(a2=around(2, 0), a5=around(1, 0.1)), test, "x").verdict == claims.HOLDS
    assert claims.try_test(bench(a2=around(1, 0), a5=around(2, 0.1)), test, "x").verdict == claims.FAILS


def test_an_interval_contains_its_estimate_even_where_draws_are_biased():
    draws = np.append(0.02, np.random.default_rng(0).normal(0.05, 0.005, 500))
    low, high = claims.interval(draws)
    assert low < 0.02 < high
    assert high - low == pytest.approx(4 * 0.005, rel=0.15)


@pytest.mark.parametrize(
    ("quantity", "rule", "bounds"),
    [
        ("score", {"rule": "within", "low": 0, "high": 1}, (0, 1)),
        ("score", {"rule": "less", "than": 0.5}, (0, 1)),
        ("score", {"rule": "less", "than": "b"}, (-np.inf, np.inf)),
        ("change", {"rule": "less", "than": 0}, (-np.inf, np.inf)),
        ("score", {"rule": "similar", "margin": 0.1}, (0, np.inf)),
    ],
)
def test_an_interval_stays_where_its_quantity_can_be(quantity, rule, bounds):
    assert claims._bounds({"quantity": quantity, "metric": "accuracy", "of": "a", **rule}) == bounds
    low, high = claims.interval(np.append(0.5, np.linspace(-9, 9, 100)), bounds)
    assert bounds[0] <= low < 0.5 < high <= bounds[1]


def test_expansion_covers_metrics_models_and_sizes():
    test = {"rule": "less", "metric": ["nll", "ece"], "of": "a", "than": ["b", "c"], "size": "each"}
    found = claims.expanded(test, [5, 10, 20])
    assert len(found) == 12
    assert {(t["metric"], t["than"], t["size"]) for t in found} == {
        (m, b, s) for m in ("nll", "ece") for b in ("b", "c") for s in (5, 10, 20)
    }
    together = {"rule": "lowest", "of": ["a", "b"], "metric": "nll"}
    assert claims.expanded(together, [5]) == [together]


def outcome(verdict, dataset="x"):
    return claims.Outcome(dataset, "q", 1.0, 0.5, 1.5, 0.0, np.inf, verdict, np.ones(3))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"x": [claims.HOLDS], "y": [claims.HOLDS]}, claims.HOLDS),
        ({"x": [claims.HOLDS], "y": [claims.FAILS]}, claims.IN_PART),
        ({"x": [claims.HOLDS], "y": "not released"}, claims.IN_PART),
        ({"x": [claims.FAILS], "y": "not released"}, claims.FAILS),
        ({"x": "not released", "y": "not released"}, claims.UNTESTABLE),
        ({"x": [claims.IN_PART]}, claims.IN_PART),
        ({"x": [claims.HOLDS, claims.FAILS]}, claims.IN_PART),
        ({"x": [claims.HOLDS, claims.FAILS, claims.FAILS]}, claims.FAILS),
        ({"x": [claims.FAILS], "y": [claims.FAILS]}, claims.FAILS),
    ],
)
def test_verdicts_of_tests_and_datasets_are_joined(found, expected):
    outcomes = {
        name: each if isinstance(each, str) else [outcome(verdict, name) for verdict in each]
        for name, each in found.items()
    }
    claim = {"datasets": list(found), "tests": [{"rule": "less"}]}
    result, reason, shown = claims._decide(claim, outcomes)
    assert result == expected
    assert all(name in reason or "not released" in reason for name in found)
    assert (shown is None) == (expected == claims.UNTESTABLE)
    by_dataset = claims._by_dataset(claim, outcomes)
    assert by_dataset.keys() == {name for name, each in found.items() if not isinstance(each, str)}
    assert len(by_dataset) != 1 or expected in (*by_dataset.values(), claims.IN_PART)


def test_a_claim_without_verdicts_of_datasets_shows_none():
    outcomes = {name: [outcome(claims.HOLDS, name)] for name in ("x", "y")}
    for claim in ({"tests": [{"rule": "varies"}]}, {"settled": claims.HOLDS}, {"untestable": "no data"}):
        assert claims._by_dataset(claim, outcomes) == {}


def measured(dataset, value, verdict, half_width=0.1):
    """An outcome of one quantity, of which the paper says that it is below 0."""
    low, high = value - half_width, value + half_width
    return claims.Outcome(dataset, "q", value, low, high, -np.inf, 0.0, verdict, np.ones(3))


def test_the_least_favourable_dataset_is_shown():
    outcomes = {
        "x": [measured("x", -1, claims.HOLDS)],
        "y": [measured("y", 0.2, claims.FAILS)],
        "z": [measured("z", 0.4, claims.FAILS)],
        "w": [measured("w", 0.3, claims.FAILS)],
    }
    assert claims._decide({"tests": [{"rule": "less"}]}, outcomes)[2].dataset == "z"


def test_a_number_says_what_decides_it():
    shown = claims.Outcome("x", "shown", 7.0, 6.0, 8.0, -np.inf, np.inf, None, np.ones(3))
    reason = claims._decide({"tests": [{"rule": "less"}]}, {"x": [shown, measured("x", 0.2, claims.FAILS)]})[1]
    assert reason.endswith("decided by q on x: 0.2 [0.1, 0.3], claimed < 0")


@pytest.mark.parametrize(
    ("found", "clear"),
    [
        ({"x": [0.2]}, True),
        ({"x": [0.05]}, False),
        ({"x": [0.2, 0.05]}, False),
        ({"x": [0.2, 0.2, 0.05]}, True),
        ({"x": [0.2], "y": [0.05]}, False),
        ({"x": [0.2], "y": "not released"}, True),
    ],
)
def test_a_failure_is_clear_where_whole_intervals_disagree(found, clear):
    outcomes = {
        name: each if isinstance(each, str) else [measured(name, value, claims.FAILS) for value in each]
        for name, each in found.items()
    }
    assert claims._clearly({}, outcomes) == clear


@pytest.mark.parametrize(
    ("winners", "expected"),
    [([[0, 0, 0, 0], [1, 1, 1, 1]], claims.HOLDS), ([[0] * 4, [0] * 4], claims.FAILS), ([[0] * 4], claims.UNTESTABLE)],
)
def test_varies_compares_datasets(winners, expected):
    outcomes = {
        str(number): [claims.Outcome(str(number), "q", 0, 0, 0, -np.inf, np.inf, claims.HOLDS, np.array(codes, float))]
        for number, codes in enumerate(winners)
    }
    claim = {"datasets": list(outcomes), "tests": [{"rule": "varies"}]}
    assert claims._decide(claim, outcomes)[0] == expected


# ------------------------------------------------------------------------------------------- measured on predictions


@pytest.fixture
def released(home):
    """Made-up predictions of all runs of the demo scale: six members, two seeds, 80 inputs, 4 classes."""

    def shrink(content):
        content["datasets"]["digits"] = {"members": 6, "seeds": 2, "subset": 600}

    change_config(home, "demo", shrink)
    scale, rng = config.load("demo"), np.random.default_rng(1)
    labels = {part: rng.integers(4, size=80) for part in ("train", "validation", *records.PARTS)}
    split = records.SplitRecord(
        **{part: np.arange(80) for part in labels}, labels=labels, class_names=("a", "b", "c", "d")
    )
    for run in ("ce", "split_1"):
        records.write_split(records.split_path("demo", "digits", run), split)
    base = {part: rng.normal(size=(80, 4)) + 2 * np.eye(4)[labels[part]] for part in records.PARTS}
    for run in scale.runs("digits"):
        for job in scale.jobs("digits", run):
            outputs = {}
            for part, logits in base.items():
                logits = logits * rng.uniform(1, 2) + rng.normal(size=logits.shape)
                log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                outputs[part] = records.Outputs(log_probs, None if run == "ce" else rng.normal(3, 1, 80))
            history = pd.DataFrame(rng.random((4, 3)), columns=["loss", "val_accuracy", "alpha0_mean"])
            path = records.prediction_path("demo", "digits", run, job.seed)
            records.write_prediction(
                path, records.Prediction(**outputs, history=history, provenance={"digest": job.digest})
            )
    return scale


@pytest.fixture
def evidence(released):
    return quantities.Evidence(analysis.Study(released, "digits"), draws=20)


def test_the_first_row_is_what_the_tables_show(evidence):
    study, size = evidence.study, evidence.size("last")
    table = analysis.ensemble_metrics(study).set_index(["estimator", "size"])
    for estimator in ("mom", "fixed_point"):
        for metric in ("accuracy", "macro_f1", "nll", "ece", "high_confidence_error"):
            found = quantities.score(evidence, estimator, metric)[0]
            assert found == pytest.approx(table.loc[(estimator, size), metric]), metric
    single = analysis.single_run_metrics(study)
    means = single.groupby("run")[["accuracy", "macro_f1", "nll", "ece"]].mean().loc["digamma"]
    deviations = single.groupby("run")["nll"].std(ddof=1)
    for metric, value in means.items():
        assert quantities.score(evidence, "digamma", metric)[0] == pytest.approx(value)
    assert quantities.stability(evidence, "digamma", "nll")[0] == pytest.approx(deviations["digamma"])
    pooled = analysis.mean_prediction(evidence.predictions("exponential"))
    wanted = calibration.high_confidence_error(pooled, study.labels["test"])
    assert quantities.pooled_error(evidence, "exponential")[0] == pytest.approx(wanted)


def test_selective_metrics_are_those_of_the_analysis(evidence):
    study, size = evidence.study, evidence.size("last")
    selection = analysis.select(study.forecast("mom", size), study.labels, study.settings)
    row = selection.table_row()
    wanted = {
        "coverage": selection.coverage,
        "retained_risk": selection.risk,
        "retained_accuracy": row["Retained test", "Acc"],
        "retained_f1": row["Retained test", "F1"],
        "retained_nll": row["Retained test", "NLL"],
        "aurc": selective.aurc(selection.uncertainty, selection.right),
        "variance_auroc": roc_auc_score(~selection.right, selection.uncertainty),
    }
    for metric, value in wanted.items():
        assert quantities.score(evidence, "mom", metric)[0] == pytest.approx(value), metric
    _, coverages = analysis.single_model_curves(study, 6)
    for of, value in (("min", min(coverages)), ("max", max(coverages)), ("range", max(coverages) - min(coverages))):
        assert quantities.single_coverage(evidence, of)[0] == pytest.approx(value)


def test_a_draw_is_the_metric_of_the_repeated_inputs(evidence):
    study, size = evidence.study, evidence.size("last")
    forecast, draw = study.forecast("mom", size), 7
    chosen = {part: np.repeat(np.arange(80), evidence.weights[part][draw].astype(int)) for part in records.PARTS}
    probs = {part: forecast.probs[part][chosen[part]] for part in records.PARTS}
    labels = {part: study.labels[part][chosen[part]] for part in records.PARTS}
    uncertainty = {part: forecast.uncertainty[part][chosen[part]] for part in records.PARTS}
    right = {part: calibration.correctness(probs[part], labels[part]) for part in records.PARTS}
    kept = uncertainty["test"] <= selective.select_threshold(uncertainty["calibration"], right["calibration"], 0.1)
    wanted = {
        "accuracy": scores.accuracy(probs["test"], labels["test"]),
        "macro_f1": scores.macro_f1(probs["test"], labels["test"]),
        "nll": scores.nll(probs["test"], labels["test"]),
        "ece": calibration.ece(probs["test"], labels["test"]),
        "high_confidence_error": calibration.high_confidence_error(probs["test"], labels["test"]),
        "aurc": selective.aurc(uncertainty["test"], right["test"]),
        "variance_auroc": roc_auc_score(~right["test"], uncertainty["test"]),
        "coverage_at_risk": selective.coverage_at_risk(uncertainty["test"], right["test"]),
        "coverage": kept.mean(),
        "retained_f1": scores.macro_f1(probs["test"][kept], labels["test"][kept]),
        "kept_of_wrong": kept[~right["test"]].mean(),
    }
    for metric, value in wanted.items():
        assert quantities.score(evidence, "mom", metric)[draw] == pytest.approx(value), metric


def test_a_draw_of_runs_is_the_mean_of_the_repeated_runs(evidence):
    values, drawn = evidence.over_runs("digamma", "nll")
    assert drawn[:, 0].tolist() == [1, 1] and set(drawn.sum(axis=0)) == {2}
    draw = next(number for number in range(21) if drawn[0, number] == 2)
    assert quantities.score(evidence, "digamma", "nll")[draw] == values[0, draw]
    assert quantities.stability(evidence, "digamma", "nll")[draw] == 0


def test_disjoint_ensembles_are_the_next_members(evidence):
    study = evidence.study
    second = np.exp(study.members["test"][2:4]).mean(axis=0)
    values, _ = evidence.over_runs("mom", "nll", 2, "all")
    assert len(values) == 3
    assert values[1, 0] == pytest.approx(scores.nll(second, study.labels["test"]))
    mom, refined = (evidence.over_runs(name, "nll", 2, "all")[1] for name in ("mom", "fixed_point"))
    assert np.array_equal(mom, refined)


def test_the_means_of_moments_and_ensemble_are_one(evidence):
    assert quantities.mean_gap(evidence) < 1e-12


def test_evaluate_gives_each_claim_one_verdict(released, all_claims):
    frame = claims.evaluate("demo", draws=20)
    assert frame["id"].tolist() == [claim["id"] for claim in all_claims]
    assert set(frame["verdict"]) <= set(claims.VERDICTS)
    judged = frame[frame["low"].notna()]
    assert (judged["low"] <= judged["high"]).all() and len(judged) > 90
    single = frame[frame["low"].isna() & frame["measured"].notna()]
    assert set(single["id"]) <= {"collapse.annealed-succeeds", "collapse.loss-decreases"}
    assert claims.HOLDS not in set(single["verdict"])
    rehearsed = frame.set_index("id").loc["exp3.mom-best-full"]
    assert rehearsed["reason"].startswith("rehearsal; Noisy digits") and rehearsed["dataset"] == "digits"
    assert rehearsed["digits"] == rehearsed["verdict"]
    assert set(frame["digits"]) <= {*claims.VERDICTS[:3], ""} and (frame["digits"] != "").sum() > 90
    facts = frame[frame["id"].str.startswith("exp1.dataset")]
    assert set(facts["verdict"]) == {claims.UNTESTABLE} and facts["reason"].str.contains("does not have").all()
    published = frame.set_index("id").loc["exp3.risk-enforced-published"]
    assert (published["verdict"], published["measured"]) == (claims.FAILS, 71 / 701)
    counts = claims.summary(frame).set_index("section")
    assert counts.loc["All", "claims"] == len(frame) == counts["claims"].iloc[:-1].sum()
    pd.testing.assert_frame_equal(frame, claims.evaluate("demo", draws=20))


def test_missing_predictions_leave_the_rest_testable(released):
    records.prediction_path("demo", "digits", "digamma", 1).unlink()
    frame = claims.evaluate("demo", draws=5).set_index("id")
    assert frame.loc["exp3.mom-best-full", "verdict"] == claims.UNTESTABLE
    assert "1 of 2 predictions of digits/digamma" in frame.loc["exp3.mom-best-full", "reason"]
    assert frame.loc["exp2.twenty-steps", "verdict"] != claims.UNTESTABLE
    assert claims.released("demo") == [] and claims.released("demo", ("ce",)) == ["digits"]


def test_without_any_release_only_mathematics_is_settled(home):
    frame = claims.evaluate("demo", draws=5).set_index("id")
    settled = frame[frame["verdict"] != claims.UNTESTABLE]
    assert {"exp2.refinement-cost", "collapse.alpha0-under-kl", "exp3.risk-enforced-published"} <= set(settled.index)
    assert settled["reason"].str.contains("settled without data|Dir|71/701").all()


def test_sensitivity_moves_one_choice_at_a_time(released):
    frame = claims.sensitivity("demo", "digits", draws=5)
    found = frame.set_index(["choice", "value", "model", "metric"])["measured"]
    study = analysis.Study(released, "digits")
    size = max(released.ensemble["sizes"])
    probs, labels = study.mean_of("mom", "test", size), study.labels["test"]
    assert found["bins B", "20", "mom", "ece"] == pytest.approx(calibration.ece(probs, labels, 20))
    assert found["risk r", "0.1", "mom", "coverage"] == found["aggregate", "mean", "mom", "coverage"]
    for split_seed, run in (("0", "ce"), ("1", "split_1")):
        other = analysis.Study(released, "digits", run)
        assert found["split seed, 2 members", split_seed, "mom", "accuracy"] == pytest.approx(
            scores.accuracy(other.mean_of("mom", "test", 2), labels)
        )
    by_risk = [found["risk r", risk, "mom", "coverage"] for risk in ("0.05", "0.1", "0.15", "0.2")]
    assert by_risk == sorted(by_risk)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ((0.56389, 0.4833, 0.6511), "0.5639 [0.483, 0.651]"),
        ((10015.0, 10015.0, 10015.0), "10015"),
        ((0.0813, np.nan, np.nan), "0.0813"),
        ((1e7, 1e7, 1e7), "1e+07"),
    ],
)
def test_a_number_is_told_with_its_interval(number, told):
    assert wording.number(*number) == told


def test_sensitivity_in_words():
    name = "aptos", "risk r", "0.1", "mom"
    rows = [(*name, "coverage", 0.5, 0.4, 0.6), (*name, "retained_risk", np.nan, np.nan, np.nan)]
    told = claims.in_words(pd.DataFrame(rows, columns=claims.SENSITIVITY))
    assert told["here"].tolist() == ["0.5 [0.4, 0.6]", "nothing is kept"]
    assert told.loc[0, ["dataset", "model", "metric"]].tolist() == ["APTOS 2019", "MoM", "coverage"]
    assert claims.in_words(pd.DataFrame(columns=claims.SENSITIVITY)).empty


def test_every_quantity_and_metric_has_words():
    named = {*quantities.METRICS, *quantities.QUANTITIES, *analysis.ESTIMATORS, *EVIDENTIAL} - {"score", "dataset_fact"}
    assert named - {"ensemble", "mle"} <= {*wording.WORDS, *wording.OF_A_METRIC}


def test_every_test_of_a_claim_is_told_in_words():
    for claim in claims.load():
        for test in claim.get("tests", []):
            for each in claims.expanded(test, (5, 50)):
                told = wording.describe(each)
                assert told and "_" not in told and "{" not in told, (claim["id"], told)
    size = {"rule": "greater", "quantity": "score", "metric": "nll", "size": 5, "of": "fixed_point", "than": "mom"}
    assert wording.describe(size) == "NLL (M = 5): fixed point − MoM"
