"""Risk-coverage, thresholds, areas and bounds against literal loops, scikit-learn and simulation."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.metrics import roc_auc_score

from paperlib import selective

guarantee = runpy.run_path(Path(__file__).parents[1] / "benchmarks" / "guarantee.py")


@st.composite
def scored(draw, smallest=1):
    """Uncertainties, with or without ties, and outcomes."""
    inputs = draw(st.integers(smallest, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 3, 10, 10**9]))
    return rng.integers(0, levels, size=inputs) / 7, rng.random(inputs) < draw(st.sampled_from([0.5, 0.9, 1.0]))


@given(scored())
def test_risk_coverage_by_a_literal_loop(case):
    uncertainty, correct = case
    curve = selective.risk_coverage(uncertainty, correct)
    assert curve.threshold.tolist() == sorted(set(uncertainty.tolist()))
    for coverage, risk, tau in zip(*curve, strict=True):
        kept = [bool(c) for u, c in zip(uncertainty, correct, strict=True) if u <= tau]
        assert coverage == len(kept) / len(uncertainty)
        assert risk == kept.count(False) / len(kept)
    assert curve.coverage[-1] == 1
    assert curve.risk[-1] == pytest.approx(1 - correct.mean())


@given(scored(), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_threshold_is_the_largest_coverage_within_the_risk(case, risk):
    uncertainty, correct = case
    tau = selective.select_threshold(uncertainty, correct, risk)
    within = [u for u in uncertainty if (~correct[uncertainty <= u]).mean() <= risk]
    assert tau == max(within, default=-math.inf)
    kept = selective.retained(uncertainty, tau)
    assert selective.coverage_at_risk(uncertainty, correct, risk) == kept.mean()
    assert not set(uncertainty[kept]) & set(uncertainty[~kept])


@given(scored(), st.randoms(use_true_random=False))
def test_order_of_inputs_and_monotone_transforms_change_nothing(case, random):
    uncertainty, correct = case
    order = random.sample(range(len(correct)), len(correct))
    for value in (selective.aurc, selective.excess_aurc, selective.augrc, selective.coverage_at_risk):
        assert value(uncertainty[order], correct[order]) == pytest.approx(value(uncertainty, correct))
        assert value(np.exp(uncertainty / 1e9), correct) == pytest.approx(value(uncertainty, correct))
    guaranteed = selective.guaranteed_threshold(uncertainty, correct, 0.5, 0.3)
    assert selective.guaranteed_threshold(uncertainty[order], correct[order], 0.5, 0.3) == guaranteed
    assert guaranteed == -math.inf or guaranteed in uncertainty


def test_a_constant_score_keeps_all_or_none():
    correct = np.array([1, 1, 1, 0])
    assert selective.select_threshold(np.zeros(4), correct, 0.3) == 0.0
    assert selective.select_threshold(np.zeros(4), correct, 0.2) == -math.inf
    assert not selective.retained(np.zeros(4), -math.inf).any()
    assert selective.retained(np.zeros(4), math.inf).all()


def test_a_risk_met_exactly_is_met():
    for errors, count in [(1, 10), (3, 30), (7, 70), (100, 1000)]:
        correct = np.arange(count) >= errors
        assert selective.select_threshold(np.zeros(count), correct, 0.1) == 0.0


@settings(max_examples=20)
@given(scored())
def test_aurc_is_the_mean_over_ways_to_break_ties(case):
    uncertainty, correct = case
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(400):
        order = np.lexsort((rng.random(len(correct)), uncertainty))
        areas.append(np.mean(np.cumsum(~correct[order]) / np.arange(1, len(correct) + 1)))
    error = np.std(areas) / np.sqrt(len(areas))
    assert selective.aurc(uncertainty, correct) == pytest.approx(np.mean(areas), abs=6 * error + 1e-9)


@given(scored())
def test_augrc_is_the_closed_form_of_the_auroc(case):
    uncertainty, correct = case
    accuracy = correct.mean()
    auroc = roc_auc_score(correct, -uncertainty) if 0 < accuracy < 1 else 0.5
    expected = (1 - auroc) * accuracy * (1 - accuracy) + (1 - accuracy) ** 2 / 2
    assert selective.augrc(uncertainty, correct) == pytest.approx(expected, abs=1e-12)


@given(scored())
def test_no_order_beats_the_best_or_is_worse_than_the_worst(case):
    uncertainty, correct = case
    assert selective.excess_aurc(~correct, correct) == 0
    assert selective.excess_aurc(uncertainty, correct) >= -1e-12
    assert selective.aurc(uncertainty, correct) <= selective.aurc(correct, correct) + 1e-12
    wrong = 1 - correct.mean()
    assert wrong**2 / 2 - 1e-12 <= selective.augrc(uncertainty, correct) <= wrong - wrong**2 / 2 + 1e-12


@pytest.mark.parametrize(("errors", "kept"), [(0, 1), (0, 50), (3, 50), (49, 50), (50, 50), (20, 100_000)])
def test_risk_bound_agrees_with_scipy(errors, kept):
    expected = stats.binomtest(errors, kept).proportion_ci(0.9, method="exact").high  # two-sided 0.1: 0.05 a side
    assert selective.risk_bound(errors, kept, 0.05) == pytest.approx(expected)
    bound = float(selective.risk_bound(errors, kept, 0.05))
    if bound < 1:
        assert stats.binom.cdf(errors, kept, bound) == pytest.approx(0.05)


def test_risk_bound_of_nothing_is_one():
    assert selective.risk_bound(np.array([0, 2]), np.array([0, 2])).tolist() == [1.0, 1.0]


def literal_guarantee(uncertainty, correct, risk, delta):
    """The search of the guaranteed threshold, step by step, for scores without ties."""
    order = np.argsort(uncertainty)
    wrong = ~correct[order]
    starts = selective._starts(len(wrong), risk, delta)
    certified, carried = -math.inf, 0.0
    for start, share in starts.items():
        following = [s for s in starts if s > start]
        last = following[0] if following else len(wrong)
        budget, carried = carried + share, carried + share
        for count in range(start, last + 1):
            if stats.binom.cdf(wrong[:count].sum(), count, risk) > budget:
                carried = 0.0
                break
            if count > start:
                certified = uncertainty[order][count - 1]
    return certified


@pytest.mark.parametrize("seed", range(40))
def test_guaranteed_threshold_by_a_literal_loop(seed):
    rng = np.random.default_rng(seed)
    uncertainty = rng.random(rng.integers(2, 250))
    correct = rng.random(len(uncertainty)) >= 0.4 * uncertainty ** rng.integers(1, 4)
    found = selective.guaranteed_threshold(uncertainty, correct, 0.15, 0.2)
    assert found == literal_guarantee(uncertainty, correct, 0.15, 0.2)


def test_starts_use_up_delta_and_never_see_the_data():
    for inputs in (1, 2, 3, 10, 50, 60, 100, 1001):
        starts = selective._starts(inputs, 0.1, 0.1)
        assert sum(starts.values()) == pytest.approx(0.1)
        assert list(starts) == sorted(starts)
        assert 1 <= min(starts) <= max(starts) <= max(inputs - 1, 1)


@given(st.integers(0, 50), st.sampled_from([1, 3, 40]))
def test_guaranteed_threshold_cuts_at_the_end_of_a_block_and_passes_its_own_test(seed, levels):
    rng = np.random.default_rng(seed)
    uncertainty = rng.integers(0, levels, size=200) / levels
    correct = rng.random(200) >= 0.3 * uncertainty
    tau = selective.guaranteed_threshold(uncertainty, correct, 0.2, 0.1)
    if tau > -math.inf:
        kept = uncertainty <= tau
        assert selective.risk_bound((~correct[kept]).sum(), kept.sum(), 0.1) <= 0.2
        assert tau <= selective.select_threshold(uncertainty, correct, 0.2)


def test_guaranteed_threshold_of_a_perfect_and_of_a_hopeless_classifier():
    uncertainty = np.linspace(0, 1, 100)
    assert selective.guaranteed_threshold(uncertainty, np.ones(100)) == 1.0
    assert selective.guaranteed_threshold(uncertainty, np.zeros(100)) == -math.inf
    assert selective.guaranteed_threshold(np.zeros(100), np.ones(100)) == 0.0
    assert selective.guaranteed_threshold(np.zeros(21), np.ones(21)) == -math.inf  # 0.9^21 > 0.1: too few
    assert selective.guaranteed_threshold(np.zeros(22), np.ones(22)) == -math.inf  # its start, one short, is not below
    assert selective.guaranteed_threshold(np.zeros(23), np.ones(23)) == 0.0


DRAWS = 2000


def broken_share(rule, scenario, inputs, risk):
    _, true_risk = guarantee["truth"](scenario)
    taus = guarantee["thresholds"](rule, scenario, inputs, DRAWS, seed=inputs)
    return np.mean(true_risk(taus) > risk)


@pytest.mark.parametrize(
    ("scenario", "inputs", "risk", "delta"),
    [
        ("smooth", 1001, 0.1, 0.1),
        ("steep", 300, 0.1, 0.1),
        ("steep", 1001, 0.05, 0.05),
        ("few errors", 300, 0.02, 0.2),
        ("12 levels", 300, 0.14, 0.1),
        ("40 % tied", 1001, 0.1, 0.1),
        ("confident errors", 300, 0.1, 0.2),
        ("just above r", 300, 0.1, 0.1),
        ("just above r, 12 levels", 300, 0.1, 0.1),
        ("bad, then good", 300, 0.1, 0.1),
    ],
)
def test_the_guarantee_holds(scenario, inputs, risk, delta):
    broken = broken_share(lambda u, c: selective.guaranteed_threshold(u, c, risk, delta), scenario, inputs, risk)
    assert broken * DRAWS <= stats.binom.ppf(0.999, DRAWS, delta)


@pytest.mark.parametrize(("scenario", "inputs"), [("smooth", 1001), ("steep", 300), ("40 % tied", 1001)])
def test_the_empirical_threshold_breaks_the_risk_in_about_half_of_the_draws(scenario, inputs):
    assert 0.45 < broken_share(lambda u, c: selective.select_threshold(u, c, 0.1), scenario, inputs, 0.1) < 0.65


def test_the_simulation_catches_a_rule_that_does_not_correct_for_its_search():
    def uncorrected(uncertainty, correct):
        return guarantee["union_threshold"](uncertainty, correct, 0.1, 0.1 * len(uncertainty))

    assert broken_share(uncorrected, "just above r", 300, 0.1) > 0.2


@pytest.mark.parametrize("scenario", ["smooth", "steep", "confident errors"])
def test_the_correction_costs_less_coverage_than_a_union_bound(scenario):
    coverage, _ = guarantee["truth"](scenario)
    kept = {}
    for rule in (selective.guaranteed_threshold, guarantee["union_threshold"]):
        taus = guarantee["thresholds"](lambda u, c, rule=rule: rule(u, c, 0.1, 0.1), scenario, 1001, 100)
        kept[rule] = coverage(taus).mean()
    assert kept[selective.guaranteed_threshold] > kept[guarantee["union_threshold"]] + 0.05


@pytest.mark.parametrize("scenario", ["smooth", "12 levels", "40 % tied", "bad, then good"])
def test_the_bound_at_a_coverage_holds(scenario):
    _, true_risk = guarantee["truth"](scenario)
    rng = np.random.default_rng(0)
    error, tie = guarantee["SCENARIOS"][scenario]
    broken = 0
    for _ in range(DRAWS):
        scores = rng.random(200)
        found = selective.risk_bound_at_coverage(tie(scores), rng.random(200) >= error(scores), 0.5, 0.1)
        broken += true_risk(found.threshold) > found.bound
    assert broken <= stats.binom.ppf(0.999, DRAWS, 0.1)


def test_bound_at_a_coverage_keeps_what_was_asked_for():
    uncertainty, correct = np.arange(10.0), np.arange(10) < 8
    found = selective.risk_bound_at_coverage(uncertainty, correct, 0.9)
    assert (found.coverage, found.risk) == (0.9, 1 / 9)
    assert found.bound == selective.risk_bound(1, 9)
    assert selective.retained(uncertainty, found.threshold).sum() == 9
    assert selective.risk_bound_at_coverage(uncertainty, correct, 0.3).coverage == 0.3
    everything = selective.risk_bound_at_coverage(uncertainty, correct, 1)
    assert (everything.threshold, everything.coverage, everything.risk) == (math.inf, 1.0, 0.2)
    tied = selective.risk_bound_at_coverage(np.array([0, 1, 1, 1]), np.ones(4), 0.5)
    assert tied.coverage == 0.25
    assert selective.risk_bound_at_coverage(np.zeros(4), np.ones(4), 0.5) == (-math.inf, 0.0, 0.0, 1.0)


def test_class_bounds_hold_together_at_a_threshold_found_on_the_same_inputs():
    rng = np.random.default_rng(0)
    rates = np.array([0.05, 0.1, 0.3])
    broken = 0
    for _ in range(DRAWS):
        predicted = rng.integers(0, 3, size=120)
        uncertainty, correct = rng.random(120), rng.random(120) >= rates[predicted]
        tau = selective.select_threshold(uncertainty, correct, 0.08)
        found = selective.class_risk_bounds(uncertainty, correct, predicted, 3, tau, 0.2)
        broken += (rates > found.bound).any()  # the score says nothing, so the true risk is the rate at any tau
    assert broken <= stats.binom.ppf(0.999, DRAWS, 0.2)


def test_class_bounds_by_hand():
    uncertainty = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    correct, predicted = np.array([1, 1, 0, 1, 1]), np.array([0, 1, 1, 0, 2])
    plain = selective.class_risk_bounds(uncertainty, correct, predicted, 4, 0.4, 0.1, searched=False)
    assert plain.kept.tolist() == [2, 2, 0, 0]
    assert plain.errors.tolist() == [0, 1, 0, 0]
    assert plain.bound[:2].tolist() == [selective.risk_bound(e, 2, 0.1 / 4) for e in (0, 1)]
    assert np.isnan(plain.bound[2:]).all()
    searched = selective.class_risk_bounds(uncertainty, correct, predicted, 4, 0.4, 0.1)
    # The right prediction of class 0 at tau is left out.
    assert searched.bound[0] == selective.risk_bound(0, 1, 0.1 / 24)
    assert searched.bound[1] == selective.risk_bound(1, 2, 0.1 / 24)
    nothing = selective.class_risk_bounds(uncertainty, correct, predicted, 4, -math.inf)
    assert nothing.kept.tolist() == [0] * 4


def test_p_values_of_large_sets_are_exact():
    assert special.bdtr(9_500.0, 100_000, 0.1) == pytest.approx(stats.binom.cdf(9_500, 100_000, 0.1), rel=1e-9)


GOOD = (np.array([0.1, 0.2]), np.array([True, False]))


@pytest.mark.parametrize(
    "function",
    [
        selective.risk_coverage,
        selective.select_threshold,
        selective.coverage_at_risk,
        selective.aurc,
        selective.excess_aurc,
        selective.augrc,
        selective.guaranteed_threshold,
        lambda u, c: selective.risk_bound_at_coverage(u, c, 0.5),
        lambda u, c: selective.class_risk_bounds(u, c, np.zeros(len(u), dtype=int), 1, 0.1),
    ],
)
def test_bad_scores_are_named(function):
    uncertainty, correct = GOOD
    for bad_uncertainty, bad_correct, message in [
        (uncertainty[None], correct, "axes"),
        (np.array([0.1, np.nan]), correct, r"uncertainty\[1\] is not finite"),
        (uncertainty, np.array([1, 2]), r"correct\[1\] is neither 0 nor 1"),
        (uncertainty, correct[:1], "correct has 1 entries"),
        (uncertainty[:0], correct[:0], "empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            function(bad_uncertainty, bad_correct)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: selective.select_threshold(*GOOD, risk=0), "risk"),
        (lambda: selective.coverage_at_risk(*GOOD, risk=1), "risk"),
        (lambda: selective.guaranteed_threshold(*GOOD, risk=10), "risk"),
        (lambda: selective.guaranteed_threshold(*GOOD, delta=0), "delta"),
        (lambda: selective.retained(GOOD[0], np.nan), "tau is NaN"),
        (lambda: selective.retained([np.inf], 0), "not finite"),
        (lambda: selective.risk_bound(3, 2), "errors"),
        (lambda: selective.risk_bound(1, 2, 1.0), "delta"),
        (lambda: selective.risk_bound_at_coverage(*GOOD, coverage=0), "coverage"),
        (lambda: selective.risk_bound_at_coverage(*GOOD, coverage=0.5, delta=2), "delta"),
        (lambda: selective.class_risk_bounds(*GOOD, np.array([0, 3]), 3, 0.1), r"predicted\[1\]"),
        (lambda: selective.class_risk_bounds(*GOOD, np.array([0, 1]), 2, 0.15), "not one of the uncertainties"),
        (lambda: selective.class_risk_bounds(*GOOD, np.array([0, 1]), 2, np.nan), "tau is NaN"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
