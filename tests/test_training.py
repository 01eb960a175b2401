"""One model: gradients, overfitting, the paper's setting, bitwise repetition, and errors that name their place."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from paperlib import config, datasets, inputs, losses, training
from paperlib.evidence import Head
from paperlib.recipes import EVIDENTIAL, RECIPES
from paperlib.training import Part, Settings, TrainingError

SETTINGS = Settings()
KL_RECIPES = [name for name, recipe in RECIPES.items() if recipe.regulariser == "kl"]


def demo_job(recipe="ce", seed=0, **changes):
    return replace(config.load("demo").job("digits", recipe, seed), **changes)


def digits_part(first, last, augment=False):
    digits = datasets.load("digits")
    source = inputs.ImageInputs(digits.images[first:last], "tiny", 8, augment)
    return Part(source, torch.from_numpy(digits.labels[first:last]))


def fitted(job, train=None, validation=None, **options):
    train, validation = train or digits_part(0, 128), validation or digits_part(1000, 1100)
    return training.fit(job, train, validation, classes=10, channels=1, settings=SETTINGS, **options)


def bits(model, part=None):
    """Predictions as bytes."""
    log_probs, log_alpha0 = training.predict(model, (part or digits_part(1200, 1300)).inputs, SETTINGS)
    return log_probs.tobytes() + (b"" if log_alpha0 is None else log_alpha0.tobytes())


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All of this file with one thread, as models are trained."""


# ---------------------------------------------------------------- gradients, overfitting, the paper's setting


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_through_head_and_loss_to_the_logits(recipe):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6, 4, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 1, 2, 3, 0, 2])
    head = Head(recipe, classes=4).double()
    learned = list(head.parameters())
    with torch.no_grad():
        for parameter in learned:  # away from the kink of |b| at 0
            parameter += 0.3 + torch.rand(parameter.shape, dtype=torch.float64, generator=generator)

    def total(logits, *_):
        return losses.recipe_loss(RECIPES[recipe], head(logits), labels, lambda_kl=0.3, lambda_ev=0.05).total

    assert torch.autograd.gradcheck(total, (logits.requires_grad_(), *learned))
    assert len(learned) == (2 if recipe == "mse_softadapt" else 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_64_images_are_learned_by_heart(recipe):
    part = digits_part(0, 64)
    job = demo_job(recipe, epochs=60, lr_backbone=1e-2, lr_head=1e-2, batch_size=32)
    model, history = fitted(job, part, part)
    log_probs, _ = training.predict(model, part.inputs, SETTINGS)
    assert (log_probs.argmax(-1) == part.labels.numpy()).mean() == 1.0
    assert history.val_accuracy.iloc[-1] == 1.0
    assert history.loss.iloc[-1] < history.loss.iloc[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_step_at_the_setting_of_the_paper(recipe):
    """ResNet-18 at 224 x 224, dual learning rates, augmentation; random weights stand in for ImageNet's."""
    job = replace(config.load("paper").job("cifar10", recipe, 0), pretrained=False, epochs=1)
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    source = inputs.ImageInputs(images, job.inputs.network, job.inputs.image_size, job.inputs.augment)
    assert source.plain_batch(torch.arange(2)).shape == (2, 3, 224, 224)
    part = Part(source, torch.tensor([0, 1, 2, 3, 4, 5]))
    model, history = training.fit(job, part, part, classes=10, channels=3, settings=SETTINGS)
    seed = int(np.random.SeedSequence(job.seed).generate_state(3)[0])
    torch.manual_seed(seed)
    start = dict(training.Model(job, 10, 3).named_parameters())
    for name, value in model.named_parameters():
        assert value.isfinite().all()
        assert not torch.equal(value, start[name]), f"{name} did not move"
        # The first step of Adam is the learning rate in every coordinate whose gradient is not negligible.
        rate = job.lr_backbone if name.startswith("network.backbone") else job.lr_head
        assert (value - start[name]).abs().max().item() == pytest.approx(rate, rel=0.02)
    assert math.isfinite(history.loss.iloc[0])
    log_probs, log_alpha0 = training.predict(model, source, SETTINGS)
    assert log_probs.shape == (6, 10)
    assert (log_alpha0 is None) == (recipe == "ce")


# ---------------------------------------------------------------- a seed fixes everything


@pytest.mark.parametrize("recipe", ["ce", "mse_softadapt"])
def test_a_seed_gives_the_same_bits_whatever_was_done_before(recipe):
    job = demo_job(recipe, epochs=2)
    part = digits_part(0, 128, augment=True)
    first = bits(fitted(job, part)[0])
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.rand(1000)
    other = bits(fitted(replace(job, seed=1), part)[0])
    fitted(demo_job("digamma", seed=7, epochs=1))
    again = bits(fitted(job, part)[0])
    assert first == again
    assert first != other


def test_a_seed_gives_the_same_bits_while_another_thread_computes():
    job = demo_job("mse_clamp", epochs=2)
    alone = bits(fitted(job)[0])
    stop = threading.Event()

    def disturb():
        own = torch.Generator()  # the global one belongs to whoever builds a model: processes share none
        while not stop.is_set():
            torch.rand(10, 10, generator=own) @ torch.rand(10, 10, generator=own)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        beside = bits(fitted(job)[0])
    finally:
        stop.set()
        thread.join()
    assert alone == beside


def test_training_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fitted(demo_job(epochs=1))
    assert torch.equal(torch.rand(4), expected)


def test_watching_does_not_change_the_model():
    job = demo_job(epochs=2)
    assert bits(fitted(job, validation=digits_part(1000, 1100))[0]) == bits(
        fitted(job, validation=digits_part(1100, 1400), on_epoch=lambda row: torch.rand(5))[0]
    )


def test_initialisation_order_and_augmentation_come_from_the_seed(monkeypatch):
    def seen(seed):
        batches = []
        source = inputs.ImageInputs(datasets.load("digits").images[:64], "tiny", 8, augment=True)
        original = source.training_batch

        def spy(index, generator):
            batch = original(index, generator)
            batches.append((index.tolist(), batch.numpy().tobytes()))
            return batch

        monkeypatch.setattr(source, "training_batch", spy)
        fitted(demo_job(seed=seed, epochs=2), Part(source, torch.from_numpy(datasets.load("digits").labels[:64])))
        return batches

    first, again, other = seen(0), seen(0), seen(1)
    assert first == again
    assert [index for index, _ in first] != [index for index, _ in other]
    assert sorted(first[0][0] + first[1][0]) == list(range(64))  # an epoch sees every image once
    assert first[:2] != first[2:]  # and the next one in another order


# ---------------------------------------------------------------- what is followed


COLUMNS = {"epoch", "lambda_kl", "loss", "fit", "train_accuracy", "val_accuracy", "val_nll", "val_ece", "seconds"}
ALPHA0 = {"alpha0_mean", "alpha0_median", "alpha0_max"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_history_tells_loss_parts_and_validation_metrics(recipe):
    validation = digits_part(1000, 1100)
    job = demo_job(recipe, epochs=3)
    seen = []
    model, history = fitted(job, validation=validation, on_epoch=seen.append)
    parts = {"kl": {"kl"}, "log_evidence": {"log_evidence"}, None: set()}[RECIPES[recipe].regulariser]
    assert set(history.columns) == COLUMNS | parts | (ALPHA0 if recipe in EVIDENTIAL else set())
    assert list(history.epoch) == [1, 2, 3]
    assert seen == history.to_dict("records")
    assert (history.seconds > 0).all()

    last = history.iloc[-1]
    log_probs, log_alpha0 = training.predict(model, validation.inputs, SETTINGS)
    labels = validation.labels.numpy()
    assert last.val_nll == pytest.approx(-np.mean([row[label] for row, label in zip(log_probs, labels, strict=True)]))
    assert last.val_accuracy == np.mean(log_probs.argmax(-1) == labels)
    if recipe in EVIDENTIAL:
        alpha0 = np.exp(log_alpha0)
        assert [last.alpha0_mean, last.alpha0_median, last.alpha0_max] == pytest.approx(
            [alpha0.mean(), np.median(alpha0), alpha0.max()]
        )
    weighted = history.fit + history.get("kl", 0) * history.lambda_kl
    weighted += history.get("log_evidence", 0) * (job.lambda_ev or 0)
    np.testing.assert_allclose(history.loss, weighted)


@pytest.mark.parametrize("recipe", KL_RECIPES)
def test_the_weight_of_the_kl_term_grows_to_its_value_in_the_last_epoch(recipe):
    _, history = fitted(demo_job(recipe, epochs=4, lambda0=0.8))
    np.testing.assert_allclose(history.lambda_kl, 0.8 / 10 * np.arange(1, 5) / 4)


def test_predictions_of_cross_entropy_are_log_softmax():
    model, _ = fitted(demo_job(epochs=1))
    part = digits_part(1200, 1230)
    model.eval()
    with torch.inference_mode():
        logits = model(part.inputs.plain_batch(torch.arange(30))).double()
    log_probs, log_alpha0 = training.predict(model, part.inputs, SETTINGS)
    assert log_alpha0 is None
    assert log_probs.dtype == np.float64
    np.testing.assert_allclose(np.exp(log_probs), torch.softmax(logits, -1), rtol=1e-12)


@pytest.mark.parametrize("recipe", EVIDENTIAL)
def test_predictions_of_a_dirichlet_are_its_mean_and_alpha0(recipe):
    model, _ = fitted(demo_job(recipe, epochs=1))
    part = digits_part(1200, 1230)
    model.eval()
    with torch.inference_mode():
        alpha = model(part.inputs.plain_batch(torch.arange(30))).double().numpy()
    log_probs, log_alpha0 = training.predict(model, part.inputs, SETTINGS)
    np.testing.assert_allclose(np.exp(log_alpha0), alpha.sum(-1), rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_probs), alpha / alpha.sum(-1, keepdims=True), rtol=1e-12)


def test_prediction_in_several_batches_is_that_of_one(monkeypatch):
    model, _ = fitted(demo_job(epochs=1))
    part = digits_part(1000, 1100)
    whole, _ = training.predict(model, part.inputs, SETTINGS)
    monkeypatch.setattr(training, "EVALUATION_BATCH", 33)
    pieces, _ = training.predict(model, part.inputs, SETTINGS)
    np.testing.assert_allclose(pieces, whole, atol=1e-5)


# ---------------------------------------------------------------- the protocol


def test_the_learned_activation_has_the_learning_rate_of_the_head():
    job = demo_job("mse_softadapt", lr_backbone=1e-4, lr_head=1e-3)
    model = training.Model(job, 10, 1)
    backbone, head = model.parameter_groups(job)
    assert (backbone["lr"], head["lr"]) == (1e-4, 1e-3)
    activation = model.outputs.activation
    assert {id(activation.b), id(activation.c)} <= {id(parameter) for parameter in head["params"]}
    grouped = [id(parameter) for group in (backbone, head) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_the_last_epoch_or_the_best_one_is_kept():
    validation = digits_part(1000, 1100)
    # A rate this large makes the validation loss jump up and down, so that the best epoch is not the last.
    changes = {"epochs": 6, "lr_backbone": 0.05, "lr_head": 0.05}
    last, history = fitted(demo_job(**changes), validation=validation)
    best, same_history = fitted(demo_job(**changes, keep="best_val_nll"), validation=validation)
    columns = ["loss", "val_nll"]
    np.testing.assert_array_equal(history[columns], same_history[columns])
    assert history.val_nll.idxmin() != len(history) - 1

    def nll(model):
        log_probs, _ = training.predict(model, validation.inputs, SETTINGS)
        return -log_probs[np.arange(100), validation.labels].mean()

    assert nll(last) == pytest.approx(history.val_nll.iloc[-1])
    assert nll(best) == pytest.approx(history.val_nll.min())


def test_a_single_image_left_over_is_no_batch():
    part = digits_part(0, 33)
    _, history = fitted(demo_job(epochs=1, batch_size=32), part)
    assert history.train_accuracy.iloc[0] * 32 == pytest.approx(round(history.train_accuracy.iloc[0] * 32))


# ---------------------------------------------------------------- losses that are not finite


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_explode_stop_the_model_and_name_the_place(recipe):
    job = demo_job(recipe, seed=3, epochs=2, lr_backbone=1e38, lr_head=1e38)
    with pytest.raises(TrainingError, match=rf"^digits/{recipe}/seed 3: epoch 1, batch 2: .*not finite"):
        fitted(job)


def test_an_infinite_loss_names_the_place():
    job = demo_job("digamma", seed=2, lambda_ev=1e308)
    with pytest.raises(TrainingError, match=r"^digits/digamma/seed 2: the loss is inf in epoch 1, batch 1$"):
        fitted(job)


@pytest.mark.parametrize("recipe", ["ce", "mse_clamp"])
def test_weights_that_explode_in_the_last_step_are_found_by_validation(recipe):
    job = demo_job(recipe, epochs=1, lr_backbone=1e38, lr_head=1e38)
    with pytest.raises(TrainingError, match=rf"^digits/{recipe}/seed 0: validation after epoch 1: .*not finite"):
        fitted(job, digits_part(0, 32))


@pytest.mark.parametrize("recipe", ["ce", "mse_clamp"])
def test_outputs_that_are_not_finite_are_no_prediction(recipe):
    model, _ = fitted(demo_job(recipe, epochs=1))
    with torch.no_grad():
        model.network.head.bias[3] = math.nan
    with pytest.raises(ValueError, match=r"\[0, 3\] is not finite"):
        training.predict(model, digits_part(0, 5).inputs, SETTINGS)
