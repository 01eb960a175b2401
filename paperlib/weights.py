"""The loss weights that the paper does not print, chosen once a scale on validation data (D03)."""

from dataclasses import dataclass, replace

import pandas as pd

from paperlib import paths, records, runs


@dataclass(frozen=True)
class Grid:
    """Values tried for one weight, and the recipe that is trained with each."""

    name: str
    recipe: str
    values: tuple


GRIDS = (
    Grid("lambda0", "mse_clamp", (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)),
    Grid("lambda_ev", "digamma", (1e-3, 1e-2, 1e-1)),
)


def _jobs(scale):
    """Every point of the grid: (grid, dataset, value, job)."""
    for dataset in scale.datasets:
        for grid in GRIDS:
            for value in grid.values:
                yield grid, dataset, value, replace(scale.job(dataset, grid.recipe, 0), **{grid.name: value})


def _path(job):
    return paths.cache() / "loss_weights" / f"{job.digest}.npz"


def missing_tasks(scale, settings):
    """Tasks of the grid whose files are not there yet."""
    return [
        runs.Task(job, str(_path(job)), settings)
        for _, _, _, job in _jobs(scale)
        if not records.is_done(_path(job), job.digest)
    ]


def choose(scale):
    """(table of the whole grid, {weight: chosen value}): the best mean rank of validation NLL over datasets."""
    rows = []
    for grid, dataset, value, job in _jobs(scale):
        last = records.read_prediction(_path(job), job.digest).history.iloc[-1]
        rows.append(
            {
                "weight": grid.name,
                "value": value,
                "dataset": dataset,
                "recipe": grid.recipe,
                "val_accuracy": last.val_accuracy,
                "val_nll": last.val_nll,
                "val_ece": last.val_ece,
                "alpha0_median": last.alpha0_median,
            }
        )
    table = pd.DataFrame(rows)
    table["rank"] = table.groupby(["weight", "dataset"])["val_nll"].rank()
    table["mean_rank"] = table.groupby(["weight", "value"])["rank"].transform("mean")
    best = table.sort_values(["mean_rank", "value"]).groupby("weight", sort=False).first()["value"]
    table["chosen"] = table["value"] == table["weight"].map(best)
    return table, {grid.name: float(best[grid.name]) for grid in GRIDS}


def write(scale, table):
    """Write the grid to the scale's tracked table; returns its path."""
    path = paths.results(scale.scale) / "tables" / "loss_weights.csv"
    with records.replacing(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.6g")
    return path
