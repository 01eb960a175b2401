"""One model: trained, watched and asked for its predictions. The loop is read once, downward."""

import os
import time
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import nn

from paperlib import calibration, checks, evidence, losses, networks, scores
from paperlib.recipes import RECIPES

EVALUATION_BATCH = 500


class TrainingError(RuntimeError):
    """Training that cannot go on; the message names the model, the epoch and the batch."""


@dataclass(frozen=True)
class Part:
    """One part of a split: inputs (an ImageInputs or FeatureInputs) and labels on the same device."""

    inputs: object
    labels: torch.Tensor


class Model(nn.Module):
    """A network and what follows its logits: nothing for cross-entropy, else the map to concentrations."""

    def __init__(self, job, classes, channels):
        super().__init__()
        self.recipe = RECIPES[job.recipe]
        self.network = networks.build(job.inputs.network, classes, channels, job.pretrained)
        self.outputs = evidence.Head(self.recipe, classes)

    def forward(self, inputs):
        """Logits (cross-entropy) or alpha, in float32 or better whatever autocast does in the network."""
        return self.outputs(self.network(inputs).float())

    def parameter_groups(self, job):
        groups = self.network.parameter_groups(job.lr_backbone, job.lr_head)
        groups[1]["params"] += list(self.outputs.parameters())
        return groups


@dataclass(frozen=True)
class Settings:
    """How to compute; recorded in the provenance, and no part of what is computed."""

    device: str = "cpu"
    amp: bool = False
    tf32: bool = False
    deterministic: bool = False

    def apply(self):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32
        if self.deterministic:  # read when cuBLAS starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.deterministic, warn_only=True)
        torch.backends.cudnn.benchmark = not self.deterministic

    def autocast(self):
        if self.device == "cpu":
            return torch.autocast("cpu", enabled=self.amp)
        return torch.autocast("cuda", torch.bfloat16 if _has_bfloat16() else torch.float16, enabled=self.amp)


def _has_bfloat16():
    return torch.cuda.is_bf16_supported(including_emulation=False)  # emulated, it is slower than float32


def fit(job, train, validation, classes, channels, settings, on_epoch=None):
    """Train one model by the paper's protocol. Returns it with its history, one row an epoch.

    The seed fixes initialisation, order and augmentation, each by a generator of its own, so that neither
    other models nor evaluation can change what is drawn.
    """
    seeds = [int(state) for state in np.random.SeedSequence(job.seed).generate_state(3)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds[0])
        model = Model(job, classes, channels)
    model = model.to(settings.device, memory_format=torch.channels_last)
    order = torch.Generator().manual_seed(seeds[1])
    augmentation = torch.Generator(device=settings.device).manual_seed(seeds[2])
    optimiser = torch.optim.Adam(model.parameter_groups(job), weight_decay=job.weight_decay, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=settings.amp and not _has_bfloat16())
    rows, best = [], None
    for epoch in range(1, job.epochs + 1):
        started = time.perf_counter()
        row = {"epoch": epoch, "lambda_kl": _kl_weight(job, epoch, classes)}
        row |= _train_epoch(
            model, job, train, optimiser, scaler, order, augmentation, settings, row["lambda_kl"], epoch
        )
        try:
            row |= _watch(predict(model, validation.inputs, settings), validation.labels)
        except ValueError as error:  # the last step may have left weights that are not finite
            raise TrainingError(f"{job}: validation after epoch {epoch}: {error}") from error
        row["seconds"] = time.perf_counter() - started
        rows.append(row)
        if job.keep == "best_val_nll" and (best is None or row["val_nll"] < best[0]):
            best = row["val_nll"], {name: value.clone() for name, value in model.state_dict().items()}
        if on_epoch is not None:
            on_epoch(row)
    if best is not None:
        model.load_state_dict(best[1])
    return model, pd.DataFrame(rows)


def _train_epoch(model, job, train, optimiser, scaler, order, augmentation, settings, lambda_kl, epoch):
    """One pass over the training split; returns the mean of the loss, its parts and the accuracy."""
    model.train()
    sums, correct = {}, 0
    batches = torch.randperm(len(train.labels), generator=order).to(train.labels.device).split(job.batch_size)
    if len(batches[-1]) == 1:  # batch normalisation cannot take a single sample
        batches = batches[:-1]
    for number, batch in enumerate(batches, start=1):
        labels = train.labels[batch]
        try:
            with settings.autocast():
                outputs = model(train.inputs.training_batch(batch, augmentation))
            parts = losses.recipe_loss(model.recipe, outputs, labels, lambda_kl=lambda_kl, lambda_ev=job.lambda_ev)
        except ValueError as error:
            raise TrainingError(f"{job}: epoch {epoch}, batch {number}: {error}") from error
        loss = parts.total.mean()
        if not torch.isfinite(loss):
            raise TrainingError(f"{job}: the loss is {loss.item()} in epoch {epoch}, batch {number}")
        optimiser.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        correct += (outputs.argmax(-1) == labels).sum()
        for name, value in vars(parts).items():
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value.detach().sum()
    seen = sum(map(len, batches))
    means = {name: float(value) / seen for name, value in sums.items()}
    return {"loss": means.pop("total"), **means, "train_accuracy": int(correct) / seen}


def _kl_weight(job, epoch, classes):
    if job.kl_schedule is None:
        return 0.0
    return losses.kl_weight(job.kl_schedule, epoch, job.epochs, classes, job.lambda0 or 0.0)


@torch.inference_mode()
def predict(model, inputs, settings):
    """(log of the predictive mean (inputs, classes), log alpha_0 (inputs,) or None), float64 numpy.

    Outputs that are not finite are a ValueError that names the first.
    """
    model.eval()
    outputs = []
    for batch in torch.arange(len(inputs)).split(EVALUATION_BATCH):
        with settings.autocast():
            outputs.append(model(inputs.plain_batch(batch.to(settings.device))).double())
    outputs = torch.cat(outputs)
    checks.finite_tensor(outputs, "outputs", ("inputs", "classes"))
    if model.recipe.name == "ce":
        return outputs.log_softmax(-1).cpu().numpy(), None
    log_alpha = outputs.log()
    log_alpha0 = log_alpha.logsumexp(-1)
    return (log_alpha - log_alpha0[:, None]).cpu().numpy(), log_alpha0.cpu().numpy()


def _watch(predicted, labels):
    """What is followed over the epochs on the validation split."""
    log_probs, log_alpha0 = predicted
    probs, labels = np.exp(log_probs), labels.cpu().numpy()
    row = {
        "val_accuracy": scores.accuracy(probs, labels),
        "val_nll": -log_probs[np.arange(len(labels)), labels].mean(),
        "val_ece": calibration.ece(probs, labels),
    }
    if log_alpha0 is not None:
        alpha0 = np.exp(log_alpha0)
        row |= {
            "alpha0_mean": alpha0.mean(),
            "alpha0_median": np.median(alpha0),
            "alpha0_max": alpha0.max(),
        }
    return row
