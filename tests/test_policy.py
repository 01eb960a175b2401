"""The policy: what fit decides, apply reproduces; what does not go with it is refused, and nothing is left behind."""

import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from scipy import special

from paperlib import calibration, ensembles, policy, scores, selective
from paperlib.__main__ import main

MEMBERS, INPUTS, CLASSES = 6, 900, 4
NAMES = ("ant", "bee", "cow", "doe")


def simulate(inputs=INPUTS, seed=0):
    """Logits of an ensemble whose members disagree more on inputs that are harder, and the true classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, inputs)
    hard = rng.gamma(2, 0.5, inputs)[:, None]
    shared = 3 * np.eye(CLASSES)[labels] + hard * rng.normal(size=(inputs, CLASSES))
    return shared + 0.5 * hard * rng.normal(size=(MEMBERS, inputs, CLASSES)), labels


LOGITS, LABELS = simulate()
SPLIT = np.repeat(["calibration", "test", ""], [500, 300, 100])


def ensemble_of(kind="logits", rows=slice(None), **options):
    log_probs = special.log_softmax(LOGITS, axis=-1)
    values = {"logits": LOGITS, "log_probs": log_probs, "probs": np.exp(log_probs)}[kind][:, rows]
    options = {"labels": LABELS[rows], "split": SPLIT[rows], "class_names": NAMES} | options
    return ensembles.from_arrays(values, kind, **options)


def assert_same(first, second):
    for name, a, b in zip(first._fields, first, second, strict=True):
        assert np.array_equal(a, b), name


@pytest.mark.parametrize("kind", ensembles.KINDS)
@pytest.mark.parametrize("estimator", policy.ESTIMATORS)
@pytest.mark.parametrize("order", ["total_variance", "least_confidence"])
def test_apply_reproduces_fit_exactly(tmp_path, kind, estimator, order, monkeypatch):
    ensemble = ensemble_of(kind)
    fitted = policy.fit(ensemble, estimator, "trace", order, coverage=0.7, temperature=True)
    policy.save(fitted.policy, tmp_path / "policy.json")
    loaded = policy.load(tmp_path / "policy.json")
    assert loaded == fitted.policy
    assert 0 < fitted.decisions.kept.mean() < 1
    assert_same(policy.apply(loaded, ensemble), fitted.decisions)
    # Inputs do not affect each other: other blocks, or a part of the inputs, give the same.
    monkeypatch.setattr(ensembles, "BLOCK_VALUES", 37 * MEMBERS * CLASSES)
    assert_same(policy.apply(loaded, ensemble), fitted.decisions)
    part = policy.apply(loaded, ensemble_of(kind, slice(101, 240)))
    assert np.array_equal(part.kept, fitted.decisions.kept[101:240])
    assert np.array_equal(part.uncertainty, fitted.decisions.uncertainty[101:240])


def test_statistics_are_those_of_the_members():
    probs = special.softmax(LOGITS, axis=-1)
    fitted = policy.fit(ensemble_of(), aggregate="trace")
    found, mean = fitted.decisions, probs.mean(axis=0)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(found.total_variance, probs.var(axis=0, ddof=1).sum(axis=1), rtol=1e-9)
    np.testing.assert_allclose(found.alpha_0, (1 - (mean**2).sum(axis=1)) / found.total_variance - 1, rtol=1e-8)
    assert np.array_equal(found.predicted, mean.argmax(axis=1))
    assert np.array_equal(fitted.correct, mean.argmax(axis=1) == LABELS)
    assert fitted.sample.shape == (MEMBERS, INPUTS, CLASSES)


def test_the_sample_is_spread_over_all_blocks(monkeypatch):
    monkeypatch.setattr(policy, "SAMPLED", 50)
    monkeypatch.setattr(ensembles, "BLOCK_VALUES", 37 * MEMBERS * CLASSES)
    assert np.array_equal(policy.fit(ensemble_of()).sample, special.softmax(LOGITS[:, ::18], axis=-1))


@pytest.mark.parametrize("one_file", [True, False])
def test_an_ensemble_on_disk_is_never_whole_in_memory(tmp_path, monkeypatch, one_file):
    monkeypatch.setattr(ensembles, "BLOCK_VALUES", 2**16)
    monkeypatch.setattr(policy, "SAMPLED", 200)
    probs = np.random.default_rng(0).dirichlet(np.ones(5), (60, 10_000)).astype(np.float32)
    paths = [tmp_path / "all.npy"] if one_file else [tmp_path / f"{member}.npy" for member in range(60)]
    for path, values in zip(paths, [probs] if one_file else probs, strict=True):
        np.save(path, values)
    size = probs.nbytes
    policy.fit(ensembles.from_arrays(probs[:, :10]))  # compiles
    del probs, values
    tracemalloc.start()
    policy.fit(ensembles.read(paths))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * size


@pytest.mark.parametrize("threshold", policy.THRESHOLDS)
def test_threshold_is_that_of_the_calibration_inputs_alone(threshold):
    fitted = policy.fit(ensemble_of(), aggregate="trace", risk=0.07, delta=0.05, threshold=threshold)
    u, c = fitted.decisions.uncertainty[:500], fitted.correct[:500]
    expected = {
        "guaranteed": selective.guaranteed_threshold(u, c, 0.07, 0.05),
        "empirical": selective.select_threshold(u, c, 0.07),
    }
    assert fitted.policy.tau == expected[threshold]
    assert {name: found["tau"] for name, found in fitted.policy.thresholds.items()} == expected
    assert np.array_equal(fitted.decisions.kept, fitted.decisions.uncertainty <= expected[threshold])
    assert fitted.policy.calibration == {"inputs": 500, "errors": int(np.sum(~c))}
    bounds = selective.class_risk_bounds(u, c, fitted.decisions.predicted[:500], CLASSES, fitted.policy.tau, 0.05)
    assert [row["bound"] for row in fitted.policy.class_bounds] == list(bounds.bound)
    changed = LABELS.copy()
    changed[500:] = 0
    assert (
        policy.fit(ensemble_of(labels=changed), aggregate="trace", risk=0.07, delta=0.05).policy.tau
        == expected["guaranteed"]
    )


def test_a_coverage_asked_for_comes_with_its_bound():
    fitted = policy.fit(ensemble_of(), coverage=0.8, delta=0.05)
    expected = selective.risk_bound_at_coverage(fitted.decisions.uncertainty[:500], fitted.correct[:500], 0.8, 0.05)
    assert fitted.policy.tau == expected.threshold
    assert fitted.policy.thresholds["coverage"]["bound"] == expected.bound
    assert fitted.decisions.kept[:500].mean() == 0.8
    assert f"{expected.bound:.6g}" in fitted.policy.promise


def test_temperature_improves_confidence_and_leaves_decisions():
    plain, scaled = (policy.fit(ensemble_of(), aggregate="trace", temperature=on) for on in (False, True))
    assert plain.policy.temperature is None
    assert scaled.policy.temperature != 1
    for name in ("predicted", "uncertainty", "kept", "mean", "alpha_0"):
        assert np.array_equal(getattr(plain.decisions, name), getattr(scaled.decisions, name))
    before, after = (
        scores.nll(policy.scaled_mean(f.policy, f.decisions, slice(500)), LABELS[:500]) for f in (plain, scaled)
    )
    assert after < before
    tempered = calibration.apply_temperature(np.log(plain.decisions.mean), scaled.policy.temperature)
    np.testing.assert_allclose(scaled.decisions.confidence, tempered.max(axis=1), rtol=1e-12)


def test_without_labels_there_is_a_ranking_but_no_threshold(tmp_path):
    fitted = policy.fit(ensemble_of(labels=None, split=None))
    assert fitted.policy.tau is None
    assert fitted.decisions.kept is None
    policy.save(fitted.policy, tmp_path / "policy.json")
    assert policy.apply(policy.load(tmp_path / "policy.json"), ensemble_of()).kept is None
    assert "decision" not in ensembles.table(ensemble_of(), fitted.decisions)


def test_without_a_split_all_labelled_inputs_calibrate():
    labels = np.where(np.arange(INPUTS) < 700, LABELS, -1)
    fitted = policy.fit(ensemble_of(labels=labels, split=None))
    assert fitted.calibration.sum() == 700
    assert not fitted.test.any()


def test_a_split_without_labels_is_an_error():
    with pytest.raises(policy.PolicyError, match="no calibration input has a label"):
        policy.fit(ensemble_of(labels=np.where(SPLIT == "calibration", -1, LABELS)))


def test_no_threshold_abstains_on_all_and_survives_json(tmp_path):
    fitted = policy.fit(ensemble_of(), risk=1e-6)
    assert fitted.policy.tau == -np.inf
    assert not fitted.decisions.kept.any()
    assert "abstains on every input" in fitted.policy.promise
    policy.save(fitted.policy, tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text())["tau"] == "-inf"
    assert policy.load(tmp_path / "policy.json") == fitted.policy


@pytest.mark.parametrize(
    "options",
    [{"risk": 0}, {"risk": 1.5}, {"delta": 1}, {"coverage": 0}, {"order": "x"}, {"estimator": "x"}, {"aggregate": "x"}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(policy.PolicyError, match=next(iter(options))):
        policy.fit(ensemble_of(), **options)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "paperlib policy 1"}', '{"format": "paperlib policy 9"}'])
def test_a_file_that_is_no_policy(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(policy.PolicyError, match=r"policy\.json"):
        policy.load(path)
    policy.save(policy.fit(ensemble_of()).policy, path)
    path.write_text(path.read_text().replace('"trace"', '"x"').replace('"mom"', '"x"'))
    with pytest.raises(policy.PolicyError, match="estimator"):
        policy.load(path)


# ------------------------------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def fitted_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    arrays = {"labels": LABELS, "split": SPLIT, "class_names": np.array(NAMES)}
    np.savez(folder / "predictions.npz", logits=LOGITS, **arrays)
    command = ["fit", str(folder / "predictions.npz"), "-o", str(folder / "out"), "--aggregate", "trace"]
    assert main(command) == 0
    return folder


def test_one_command_from_npz_to_report(fitted_folder):
    out = fitted_folder / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(ensembles.OUTPUTS)
    table = pd.read_parquet(out / "inputs.parquet")
    expected = policy.fit(ensembles.read(fitted_folder / "predictions.npz"), aggregate="trace")
    assert list(table["decision"] == "kept") == list(expected.decisions.kept)
    assert policy.load(out / "policy.json") == expected.policy


def test_apply_command_gives_the_same_table(fitted_folder, tmp_path):
    policy_file, predictions = fitted_folder / "out" / "policy.json", fitted_folder / "predictions.npz"
    assert main(["apply", str(policy_file), str(predictions), "-o", str(tmp_path / "again")]) == 0
    for name in ("inputs.csv", "inputs.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (fitted_folder / "out" / name).read_bytes()


def with_nan(logits):
    logits = logits.copy()
    logits[3, 5, 1] = np.nan
    return logits


@pytest.mark.parametrize(
    "logits, names, words",
    [
        (LOGITS[:, :, :3], NAMES[:3], "3 classes, but the policy is for 4"),
        (LOGITS[:, :, [1, 0, 2, 3]], ("bee", "ant", "cow", "doe"), "class 0 is 'bee', but 'ant' in the policy"),
        (with_nan(LOGITS), NAMES, "member 3, input 5"),
        (LOGITS[1:], NAMES, "5 members, but the policy is for 6"),
    ],
)
def test_apply_refuses_other_predictions_and_leaves_nothing(fitted_folder, tmp_path, capsys, logits, names, words):
    np.savez(tmp_path / "new.npz", logits=logits, class_names=np.array(names))
    command = ["apply", str(fitted_folder / "out" / "policy.json"), str(tmp_path / "new.npz")]
    assert main([*command, "-o", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["new.npz"]


def test_fit_refuses_nan_and_keeps_an_earlier_output(fitted_folder, tmp_path, capsys):
    np.savez(tmp_path / "bad.npz", logits=with_nan(LOGITS))
    assert main(["fit", str(tmp_path / "bad.npz"), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    before = (fitted_folder / "out" / "policy.json").read_bytes()
    assert main(["fit", str(tmp_path / "bad.npz"), "-o", str(fitted_folder / "out")]) == 2
    assert (fitted_folder / "out" / "policy.json").read_bytes() == before
    assert "member 3, input 5" in capsys.readouterr().err


def test_fit_says_what_it_recognised_and_that_there_is_no_test(tmp_path, capsys):
    np.save(tmp_path / "p.npy", special.softmax(LOGITS, axis=-1))
    np.save(tmp_path / "y.npy", LABELS)
    assert main(["fit", str(tmp_path / "p.npy"), "--labels", str(tmp_path / "y.npy"), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "6 members, 900 inputs, 4 classes; probs (recognised from the values)" in said
    assert "no independent test" in said
    assert main(["fit", str(tmp_path / "p.npy"), "-o", str(tmp_path / "out")]) == 0
    assert "No labels were given" in capsys.readouterr().out


def test_coverage_and_threshold_do_not_go_together(fitted_folder, tmp_path, capsys):
    command = ["fit", str(fitted_folder / "predictions.npz"), "-o", str(tmp_path / "out"), "--coverage", "0.8"]
    assert main([*command, "--threshold", "empirical"]) == 2
    assert "--coverage" in capsys.readouterr().err
    assert main(command) == 0
    assert policy.load(tmp_path / "out" / "policy.json").threshold == "coverage"
