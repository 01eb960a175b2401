"""Records: what is written is read back, to the digits that are reported; damage of any kind is found and named."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paperlib import calibration, config, dirichlet, paths, records, runs, scores, selective, training
from paperlib.recipes import RECIPES


def outputs(inputs, classes, seed, evidential):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(inputs, classes))
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return records.Outputs(log_probs, rng.normal(3, 2, inputs) if evidential else None)


def prediction(evidential=True, digest="0123456789abcdef", inputs=40, classes=10):
    parts = {part: outputs(inputs, classes, seed, evidential) for seed, part in enumerate(records.PARTS)}
    history = pd.DataFrame({"epoch": [1, 2], "loss": [0.5, 0.25]})
    return records.Prediction(**parts, history=history, provenance={"digest": digest, "threads": 1})


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "digits" / "ce" / "seed_000.npz"
    records.write_prediction(path, prediction())
    return path


# ---------------------------------------------------------------- what goes in comes out


@pytest.mark.parametrize("evidential", [True, False])
def test_a_prediction_is_read_back(tmp_path, evidential):
    path, given = tmp_path / "a" / "b.npz", prediction(evidential)
    records.write_prediction(path, given)
    found = records.read_prediction(path, digest="0123456789abcdef")
    for part in records.PARTS:
        before, after = getattr(given, part), getattr(found, part)
        assert after.log_probs.dtype == np.float64
        np.testing.assert_allclose(after.probs.sum(-1), 1, rtol=0, atol=1e-12)
        gaps = before.log_probs - before.log_probs.max(-1, keepdims=True)
        np.testing.assert_allclose(
            after.log_probs - after.log_probs.max(-1, keepdims=True), gaps, rtol=2.0**-11, atol=2.0**-25
        )
        if evidential:
            np.testing.assert_array_equal(after.log_alpha0, before.log_alpha0.astype(np.float32))
            np.testing.assert_allclose(after.alpha.sum(-1), np.exp(after.log_alpha0))
        else:
            assert after.log_alpha0 is None
            with pytest.raises(records.RecordError, match="softmax outputs of cross-entropy"):
                after.alpha  # noqa: B018
    pd.testing.assert_frame_equal(found.history, given.history.astype(np.float64))
    assert found.provenance == given.provenance
    assert [file.name for file in path.parent.iterdir()] == ["b.npz"]


def test_a_prediction_can_be_read_with_numpy_alone(written):
    with np.load(written) as arrays:
        low, high = arrays["test"].astype(np.uint16)
        gaps = (high << 8 | low).view(np.float16).astype(np.float64)
        assert json.loads(str(arrays["provenance"]))["digest"] == "0123456789abcdef"
    probs = np.exp(gaps) / np.exp(gaps).sum(-1, keepdims=True)
    np.testing.assert_allclose(probs, records.read_prediction(written).test.probs, rtol=1e-12)


def test_a_near_tie_keeps_its_winner(tmp_path):
    """0.5 + 1e-6 against 0.5 - 1e-6 would be equal in float16; the second class must stay the first choice."""
    log_probs = np.log(np.tile([0.5 - 1e-6, 0.5 + 1e-6], (4, 1)))
    tie = records.Outputs(log_probs)
    records.write_prediction(tmp_path / "a.npz", records.Prediction(tie, tie, pd.DataFrame({"epoch": [1]}), {}))
    found = records.read_prediction(tmp_path / "a.npz").test
    assert (found.log_probs.argmax(-1) == 1).all()
    np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-8)


def test_log_probabilities_of_several_models_are_stacked(home):
    for seed in range(3):
        records.write_prediction(records.prediction_path("demo", "digits", "ce", seed), prediction(digest=str(seed)))
    stacked = records.read_log_probs("demo", "digits", "ce", range(3), "test")
    assert stacked.shape == (3, 40, 10)


def test_paths_carry_the_scale(home):
    path = records.prediction_path("cpu", "aptos", "digamma", 7)
    assert path == home / "results" / "cpu" / "predictions" / "aptos" / "digamma" / "seed_007.npz"
    assert paths.root() == home


def test_a_split_is_read_back(tmp_path):
    rng = np.random.default_rng(0)
    names = ("train", "validation", *records.PARTS)
    parts = {name: rng.permutation(100)[:10] for name in names}
    labels = {name: rng.integers(0, 3, 10) for name in names}
    records.write_split(tmp_path / "s.npz", records.SplitRecord(**parts, labels=labels, class_names=("a", "b", "c")))
    found = records.read_split(tmp_path / "s.npz")
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), parts[name])
        np.testing.assert_array_equal(found.labels[name], labels[name])
    assert found.class_names == ("a", "b", "c")


# ---------------------------------------------------------------- damage


def test_a_file_of_another_configuration_is_named_with_both_digests(written):
    with pytest.raises(records.RecordError) as error:
        records.read_prediction(written, digest="ffffffffffffffff")
    for part in (str(written), "another configuration", "0123456789abcdef", "ffffffffffffffff"):
        assert part in str(error.value)
    with pytest.raises(records.RecordError, match="another configuration"):
        records.is_done(written, "ffffffffffffffff")


def test_a_missing_file_says_what_makes_it(home):
    with pytest.raises(records.RecordError, match=r"seed_009\.npz is not there; train it with: (.*)") as error:
        records.read_prediction(records.prediction_path("cpu", "aptos", "digamma", 9))
    assert "python -m paperlib train --scale cpu --dataset aptos --recipe digamma --seeds 9 --replace" in str(
        error.value
    )
    assert "git checkout -- results/cpu/predictions/aptos/digamma/seed_009.npz" in str(error.value)
    with pytest.raises(
        records.RecordError, match=r"is not there; .* python -m paperlib train --scale cpu --dataset aptos"
    ):
        records.read_split(records.split_path("cpu", "aptos"))
    assert records.is_done(records.prediction_path("cpu", "aptos", "digamma", 9), "x") is False


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_a_file_of_another_kind_is_named(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(records.RecordError, match=re.escape(str(path))):
        records.read_prediction(path)
    with open(path, "wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(records.RecordError, match=re.escape(str(path))):
        records.read_prediction(path)


def test_a_split_is_no_prediction_and_the_other_way_round(written, tmp_path):
    np.savez(tmp_path / "s.npz", train=np.arange(3))
    with pytest.raises(records.RecordError, match="is no prediction file: it lacks calibration, test, history"):
        records.read_prediction(tmp_path / "s.npz")
    with pytest.raises(records.RecordError, match="is no split file: it lacks train, validation, train_labels"):
        records.read_split(written)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(written, monkeypatch):
    before = written.read_bytes()

    def disk_full(path, **arrays):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", disk_full)
    with pytest.raises(records.RecordError, match=r"seed_000\.npz could not be written: No space left on device"):
        records.write_prediction(written, prediction())
    assert written.read_bytes() == before
    assert [file.name for file in written.parent.iterdir()] == ["seed_000.npz"]


def test_a_process_killed_while_it_writes_leaves_no_record(tmp_path):
    path = tmp_path / "seed_000.npz"
    script = """
import os, signal, sys
from paperlib import records
with records.replacing(sys.argv[1]) as temporary:
    temporary.write_bytes(b"half of a prediction")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert records.is_done(path, "x") is False
    assert all(name.startswith(".") for name in os.listdir(tmp_path))  # no glob for results meets it


# ---------------------------------------------------------------- float16 keeps what is reported


def reported(calibration_outputs, test_outputs, labels):
    """Every metric that is reported of a single model."""
    probs, true = test_outputs.probs, labels["test"]
    uncertainty = [_total_variance(part) for part in (calibration_outputs, test_outputs)]
    correct = calibration.correctness(calibration_outputs.probs, labels["calibration"])
    kept = selective.retained(uncertainty[1], selective.select_threshold(uncertainty[0], correct, risk=0.1))
    return {
        "accuracy": scores.accuracy(probs, true),
        "f1": scores.macro_f1(probs, true),
        "nll": scores.nll(probs, true),
        "ece": calibration.ece(probs, true),
        "high_confidence_error": calibration.high_confidence_error(probs, true),
        "retained": kept.sum(),
        "retained_accuracy": scores.accuracy(probs[kept], true[kept]) if kept.any() else np.nan,
    }


def _total_variance(part):
    if part.log_alpha0 is None:
        return (part.probs * (1 - part.probs)).sum(-1)  # D01
    return dirichlet.total_variance(part.alpha)


@pytest.mark.parametrize("recipe", RECIPES)
def test_storage_keeps_every_reported_metric_to_four_digits(recipe, tmp_path, one_thread):
    """Against float64 outputs of a trained demo model that were never stored."""
    settings = training.Settings()
    job = replace(config.load("demo").job("digits", recipe, 1), epochs=5, lr_backbone=3e-3, lr_head=3e-3)
    parts, split, _ = runs._parts(job.inputs, "cpu")
    model, history = training.fit(job, parts["train"], parts["validation"], 10, 1, settings)
    exact = [records.Outputs(*training.predict(model, parts[part].inputs, settings)) for part in records.PARTS]
    records.write_prediction(tmp_path / "a.npz", records.Prediction(*exact, history=history, provenance={}))
    stored = records.read_prediction(tmp_path / "a.npz")
    expected = reported(*exact, split.labels)
    found = reported(stored.calibration, stored.test, split.labels)
    assert expected["accuracy"] > 0.5
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0, abs=5e-5, nan_ok=True), name


def test_the_record_of_a_model_is_small(written):
    assert written.stat().st_size < 2 * 40 * 10 * 2 + 2 * 40 * 4 + 3000  # 2 bytes a probability, 4 an alpha_0
