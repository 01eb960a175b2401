"""The command line: help, choice of models, exit codes, and messages for the user without a traceback."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import change_config
from PIL import Image

from paperlib import config, datasets, networks, paths, records, runs, weights
from paperlib.__main__ import _clock, _parse_seeds, main


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """One thread, as models are trained."""


def train(*arguments):
    return main(["train", "--scale", "demo", "--workers", "1", *arguments])


def prediction_file(run="ce", seed=0):
    return records.prediction_path("demo", "digits", run, seed)


# ---------------------------------------------------------------- help


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], ["train", "choose-weights", "data"]),
        (
            ["train"],
            [
                "skip what is there",
                "examples",
                "--seeds",
                "0-9 or 0,3,7",
                "--replace",
                "--workers",
                "one a core",
                "seed_NNN",
            ],
        ),
        (["choose-weights"], ["lambda_0", "lambda_EV", "validation NLL", "loss_weights.csv"]),
        (["data"], ["check", "fetch"]),
        (["data", "check"], ["contact sheet", "PAPERLIB_DATA"]),
        (["data", "fetch"], ["Kaggle", "by hand", "--scale"]),
    ],
)
def test_help_says_what_a_reader_needs(command, says, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert [word for word in says if word not in out] == []


def test_help_needs_no_torch():
    script = "import sys; from paperlib.__main__ import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"
    loaded = subprocess.run(
        [sys.executable, "-c", script + "print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.endswith("False\n")


# ---------------------------------------------------------------- which models


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0-9", list(range(10))), ("0,3,7", [0, 3, 7]), ("2", [2]), ("0-2,2,5-6", [0, 1, 2, 5, 6]), ("4-4", [4])],
)
def test_seeds(text, seeds):
    assert _parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["a", "-3", "1-", "0..9", "1,,2", "9-0"])
def test_bad_seeds(home, text, capsys):
    assert train("--recipe", "ce", f"--seeds={text}") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paperlib: --seeds {text!r}")
    assert err.count("\n") == 1


def test_what_is_there_is_skipped_and_what_is_missing_is_trained(home, capsys):
    assert train("--recipe", "ce", "digamma", "--seeds", "0") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "demo: 2 models asked for, 0 there, 2 to train"
    assert out[1].startswith("[1/2] digits/ce/seed 0: validation accuracy 0.")
    assert out[1].endswith("s left")
    assert out[2].startswith("[2/2] digits/digamma/seed 0: ")
    times = {run: prediction_file(run).stat().st_mtime_ns for run in ("ce", "digamma")}
    assert train("--recipe", "ce", "digamma", "--seeds", "0,1") == 0
    assert "4 models asked for, 2 there, 2 to train" in capsys.readouterr().out
    assert {run: prediction_file(run).stat().st_mtime_ns for run in times} == times
    assert records.split_path("demo", "digits").is_file()


def test_without_a_choice_everything_the_scale_asks_for_is_trained(home, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(runs, "run", lambda tasks, workers: asked.extend(tasks) or iter(()))
    assert train() == 0
    scale = config.load("demo")
    expected = [job for run in scale.runs("digits") for job in scale.jobs("digits", run)]
    assert [task.job for task in asked] == expected
    assert len(expected) == 3 + 6 * 2 + 5 + 2


def test_a_run_named_twice_is_trained_once(home, capsys):
    assert train("--dataset", "digits", "digits", "--recipe", "ce", "ce", "--seeds", "0,0") == 0
    assert "1 models asked for" in capsys.readouterr().out


def test_a_manifest_lists_the_predictions(home):
    manifest = home / "logs" / "manifest.json"
    assert train("--recipe", "ce", "--seeds", "0-1", "--manifest", str(manifest)) == 0
    scale = config.load("demo")
    assert json.loads(manifest.read_text()) == [
        {
            "file": f"results/demo/predictions/digits/ce/seed_00{seed}.npz",
            "digest": scale.job("digits", "ce", seed).digest,
        }
        for seed in (0, 1)
    ]


# ---------------------------------------------------------------- files that do not belong


def test_a_file_of_another_configuration_is_an_error_until_replaced(home, capsys):
    train("--recipe", "ce", "--seeds", "0")
    before = prediction_file().read_bytes()
    change_config(home, "demo", lambda c: c["training"].update(weight_decay=0.5))
    capsys.readouterr()
    assert train("--recipe", "ce", "--seeds", "0") == 2
    err = capsys.readouterr().err
    assert str(prediction_file()) in err
    assert "another configuration" in err
    assert "--replace" in err
    assert prediction_file().read_bytes() == before
    assert train("--recipe", "ce", "--seeds", "0", "--replace") == 0
    records.read_prediction(prediction_file(), config.load("demo").job("digits", "ce", 0).digest)


def test_a_damaged_file_is_an_error_until_replaced(home, capsys):
    train("--recipe", "ce", "--seeds", "0")
    whole = records.read_prediction(prediction_file()).test.log_probs
    content = prediction_file().read_bytes()
    prediction_file().write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    assert train("--recipe", "ce", "--seeds", "0") == 2
    err = capsys.readouterr().err
    assert f"{prediction_file()} is damaged" in err
    assert train("--recipe", "ce", "--seeds", "0", "--replace") == 0
    np.testing.assert_array_equal(records.read_prediction(prediction_file()).test.log_probs, whole)


def test_a_temporary_file_of_a_killed_run_is_not_taken_for_a_prediction(home, capsys):
    train("--recipe", "ce", "--seeds", "0")
    prediction_file().rename(prediction_file().parent / ".seed_000-abc.npz")
    train("--recipe", "ce", "--seeds", "0")
    assert "0 there, 1 to train" in capsys.readouterr().out


def test_another_split_than_the_stored_one_is_an_error(home, capsys):
    train("--recipe", "ce", "--seeds", "0")
    change_config(home, "demo", lambda c: c["split"].update(seed=3))
    assert train("--recipe", "mse_only", "--seeds", "0") == 2
    assert "holds another split" in capsys.readouterr().err


# ---------------------------------------------------------------- exit codes and messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "cifar10"], "scale demo has no dataset 'cifar10'; it has: digits"),
        (["--recipe", "mse"], "digits has no run 'mse' at scale demo; it has: ce, mse_only"),
        (["--device", "gpu"], "unknown device 'gpu'; choose one of: cpu, cuda, cuda:N"),
    ],
)
def test_a_wrong_choice_is_one_line_and_code_2(home, capsys, arguments, message):
    assert train(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paperlib: {message}")
    assert err.count("\n") == 1
    assert not (home / "results").exists()


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_workers_are_a_positive_number(workers, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--scale", "demo", f"--workers={workers}"])
    assert end.value.code == 2
    assert f"must be a whole number from 1 up, got {workers!r}" in capsys.readouterr().err


def test_one_worker_a_core_or_as_many_as_a_gpu_takes(home, monkeypatch):
    used = []
    monkeypatch.setattr(runs, "run", lambda tasks, workers: used.append(workers) or iter(()))
    main(["train", "--scale", "demo", "--recipe", "ce"])
    monkeypatch.setattr(runs, "settings_for", lambda hardware, device: runs.training.Settings("cuda:0"))
    main(["train", "--scale", "demo", "--recipe", "ce"])
    assert used[0] == os.cpu_count()
    assert used[-1] == config.load("demo").hardware.models_per_gpu == 1


def test_a_misspelt_key_is_one_message_and_code_2_of_a_real_process(home):
    change_config(home, "demo", lambda c: c["training"].update(epoch_ce=3))
    run = subprocess.run(
        [sys.executable, "-m", "paperlib", "train", "--scale", "demo"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr == ("paperlib: demo.yaml: unknown key 'epoch_ce' in training; did you mean 'epochs_ce'?\n")


def test_missing_data_says_what_to_put_where(home, capsys, monkeypatch):
    monkeypatch.setenv("PAPERLIB_DATA", str(home / "nothing"))
    runs._dataset.cache_clear()
    assert main(["train", "--scale", "cpu", "--dataset", "dermamnist", "--recipe", "ce", "--workers", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paperlib: no data for dermamnist in {home / 'nothing'}")
    assert f"{home / 'nothing'}/dermamnist.npz" in err
    assert "python -m paperlib data fetch dermamnist" in err


def test_missing_weights_are_one_message(home, capsys, monkeypatch):
    def none(*arguments, **options):
        raise networks.WeightsError("get the weights so and so")

    monkeypatch.setattr(networks, "build", none)
    assert train("--recipe", "ce", "--seeds", "0") == 1
    assert "get the weights so and so" in capsys.readouterr().err


def test_a_model_that_fails_is_told_at_the_end_and_the_others_go_on(home, capsys):
    change_config(home, "demo", lambda c: c.update(recipes={"digamma": {"lambda_ev": 1e308}}))
    assert train("--recipe", "digamma", "ce", "--seeds", "0", "--manifest", str(home / "m.json")) == 1
    captured = capsys.readouterr()
    assert "FAILED: digits/digamma/seed 0: the loss is inf in epoch 1, batch 1" in captured.out
    assert captured.err == ("1 of 2 models failed:\n  digits/digamma/seed 0: the loss is inf in epoch 1, batch 1\n")
    assert prediction_file("ce").exists()
    assert not prediction_file("digamma").exists()
    assert not (home / "m.json").exists()


def test_a_fault_of_ours_keeps_its_traceback(home, monkeypatch):
    def fault(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "write_split", fault)
    with pytest.raises(ZeroDivisionError):
        train()


def test_an_interrupt_has_its_own_code(home, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "write_split", interrupted)
    assert train() == 130
    assert "the same command goes on from there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (29, "29 s"), (95, "2 min"), (3600, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_time_left(seconds, text):
    assert _clock(seconds) == text


# ---------------------------------------------------------------- choose-weights and data


def test_choose_weights_writes_the_grid_and_prints_the_choice(home, capsys, monkeypatch):
    monkeypatch.setattr(
        weights,
        "GRIDS",
        (weights.Grid("lambda0", "mse_clamp", (0.1, 1.0)), weights.Grid("lambda_ev", "digamma", (0.01,))),
    )
    arguments = ["choose-weights", "--scale", "demo", "--workers", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "demo: 3 models of the grid to train" in out
    assert "lambda0: " in out
    assert "lambda_ev: 0.01 (" in out
    table = (paths.results("demo") / "tables" / "loss_weights.csv").read_text()
    assert main(arguments) == 0
    assert "demo: 0 models of the grid to train" in capsys.readouterr().out
    assert (paths.results("demo") / "tables" / "loss_weights.csv").read_text() == table


def test_data_check_digits(home, capsys):
    assert main(["data", "check", "digits"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("digits:\n")
    assert "count: 1797" in out
    assert "'7': 179" in out
    assert f"digest: {datasets.load('digits').digest}" in out
    sheet = home / ".cache" / "contact_sheets" / "digits.png"
    assert str(sheet) in out
    with Image.open(sheet) as image:
        assert image.format == "PNG"
        assert np.asarray(image).std() > 10


def test_data_check_of_what_is_not_there(home, capsys):
    assert main(["data", "check", "digits", "aptos", "--root", str(home)]) == 1
    captured = capsys.readouterr()
    assert "count: 1797" in captured.out
    assert captured.err.startswith(f"aptos: no data for aptos in {home}")
    assert "train.csv" in captured.err


@pytest.mark.parametrize("action", ["check", "fetch"])
def test_data_of_an_unknown_dataset(home, capsys, action):
    assert main(["data", action, "cifar"]) == 2
    expected = "paperlib: unknown dataset 'cifar'; choose one of: digits, cifar10, cifar100, dermamnist, aptos\n"
    assert capsys.readouterr().err == expected


def test_data_fetch_of_what_cannot_be_fetched(home, capsys):
    assert main(["data", "fetch", "aptos", "--root", str(home)]) == 1
    assert "aptos cannot be fetched" in capsys.readouterr().err
    assert main(["data", "fetch", "--scale", "demo", "--root", str(home)]) == 0
    assert capsys.readouterr().out.startswith("digits: <digits: 1797 images")


@pytest.mark.slow
def test_data_check_of_real_data(real_data, home, capsys):
    assert main(["data", "check", "--root", str(real_data)]) == 0
    out = capsys.readouterr().out
    assert [name for name in datasets.NAMES if f"{name}:\n" not in out] == []
