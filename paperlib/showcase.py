"""Blocks of README.md and docs/, written from the tables that the notebooks wrote: no number in them is typed by hand.

A block begins with <!-- begin NAME --> and ends with <!-- end NAME -->; what stands between is replaced.
"""

import re
from collections import Counter

import pandas as pd

from paperlib import catalogue, claims, config, paths, records, tables, wording
from paperlib.errors import UserError

RELEASED = "cpu"  # the scale that is tracked, and that README speaks of
FIGURES = {
    "exp3_mom": "Selective classification on {name}: risk and coverage with the paper's and a guaranteed threshold, "
    "and the total variance of right and wrong predictions.",
    "exp2_orderings": "Does the Dirichlet order inputs better than the ensemble's plain confidence? "
    "Area under the risk-coverage curve with 95 % intervals, on {name}.",
}
MARKS = {claims.HOLDS: "●", claims.IN_PART: "◐", claims.FAILS: "○"}
WHAT_VERDICTS_MEAN = (
    "On each dataset that a claim is about: ● holds, the whole 95 % interval of every test lies where the paper says; "
    "◐ holds in part, the estimate does, or at least half of the tests; ○ does not hold. A claim holds where it holds "
    "on all of its datasets, and in part where they differ; it fails beyond chance where on every dataset the whole "
    "interval of most tests disagrees. The last column has the least favourable test, where it is "
    "furthest off, with its 95 % interval and the range in which the paper would be right. The rules were written "
    "before the results were looked at; those mended afterwards are in the [changelog](CHANGELOG.md), under Errata."
)
EXPERIMENT_3 = "results/{}/notebooks/exp3_selective_classification-dermamnist.ipynb"
ROWS = {"mom": "MoM ensemble", "exponential": "Exponential", "digamma": "Digamma"}
COLUMNS = {
    "full-accuracy": "accuracy",
    "full-f1": "F1",
    "full-nll": "NLL",
    "coverage": "coverage",
    "retained-accuracy": "accuracy, kept",
    "retained-f1": "F1, kept",
    "retained-nll": "NLL, kept",
}


class BlockError(UserError):
    """A document without the place that a block belongs in; the message names both."""


def write(scale):
    """Bring every block of README.md and docs/ up to date with the tables of the released scale."""
    for file, blocks in documents(scale).items():
        path = paths.root() / file
        text = path.read_text()
        for name, content in blocks.items():
            text = insert(text, name, content, file)
        with records.replacing(path) as temporary:
            temporary.write_text(text)


def documents(scale):
    """{file: {block: text}} as the tables of a scale have it; nothing where nothing is released."""
    if scale != RELEASED or not _released(scale):
        return {}
    cost = costs(scale)
    return {
        "README.md": {"answer": answer(scale, cost), "verdict": verdict(scale), "figures": figures(scale)},
        "docs/results.md": {
            "trained": tables.to_markdown(cost, digits=1),
            "deviations": deviations(scale),
            "orderings": orderings(scale),
        },
        "docs/datasets.md": {"parts": parts(scale)},
    }


def insert(text, name, content, file):
    """The text with the content of one block replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    found, count = re.subn(f"{begin}.*?{end}", lambda _: f"{begin}\n{content.strip()}\n{end}", text, flags=re.DOTALL)
    if count != 1:
        raise BlockError(f"{file} must have one block {begin} ... {end}, it has {count}")
    return found


def _released(scale):
    """{dataset: its name} of those that are complete."""
    return {dataset: catalogue.title(dataset) for dataset in claims.released(scale, needed=None)}


def _table(scale, name, dataset="all"):
    return pd.read_csv(paths.results(scale) / "tables" / dataset / f"{name}.csv", keep_default_na=False, na_values=[""])


# ------------------------------------------------------------------------------------------- README


def answer(scale, cost):
    """How many claims hold and what it cost to find out; and what the ensemble's Dirichlet buys, by dataset."""
    frame = _table(scale, "claims")
    counts = Counter(frame["verdict"])
    judged = frame[frame["verdict"] != claims.UNTESTABLE]
    measured = judged[list(_released(scale))].notna().any(axis=1) | judged["dataset"].notna()
    sentence = (
        f"**Of {len(frame)} numbers and claims of the paper, {len(judged)} can be judged here, {measured.sum()} on "
        f"data and {(~measured).sum()} without: {counts[claims.HOLDS]} hold, {counts[claims.IN_PART]} hold in part, "
        f"{counts[claims.FAILS]} do not**, {(judged['clear'] == 'yes').sum()} of these beyond chance. A printed number "
        f"holds where its order among the others does. It took {cost.models.sum():,} trained models and "
        f"{cost.hours.sum():.1f} processor hours to find out; to rebuild all of it from the released predictions takes "
        f"minutes."
    )
    columns = {name: _compared(scale, dataset) for dataset, name in _released(scale).items()}
    table = pd.DataFrame(columns).rename_axis("test part").reset_index()
    return f"{sentence}\n\n{tables.to_markdown(table)}"


def _compared(scale, dataset):
    """One dataset's column of the comparison: text by row, the best of each metric in bold."""
    single = _table(scale, "exp1_metrics", dataset).set_index("Model")
    ensemble = _table(scale, "exp2_estimators", dataset).set_index("Estimator").loc["MoM, mean (the paper)"]
    confidence = _table(scale, "exp2_orderings", dataset).set_index("Ordered by").loc["1 - largest mean probability"]
    recipes = single[~single.index.str.startswith("Cross-entropy")]
    cells = {}
    for metric, better in (("Accuracy", "max"), ("NLL", "min"), ("ECE", "min"), ("AURC", "min")):
        means = recipes[f"{metric} mean"]
        best = means.idxmax() if better == "max" else means.idxmin()
        rows = {
            f"**{metric}**: MoM ensemble": (ensemble[metric], ""),
            f"{metric}: best evidential recipe": (means[best], f" ({best})"),
            f"{metric}: one cross-entropy model": (single.loc["Cross-entropy", f"{metric} mean"], ""),
        }
        if metric in ("NLL", "ECE"):
            scaled = single.loc["Cross-entropy, temperature scaled", f"{metric} mean"]
            rows[f"{metric}: the same, temperature scaled"] = scaled, ""
        if metric == "AURC":
            rows["AURC: the same ensemble by plain confidence"] = confidence["AURC"], ""
        winner = {"max": max, "min": min}[better](value for value, _ in rows.values())
        for row, (value, note) in rows.items():
            cells[row] = f"**{value:.3f}**{note}" if value == winner else f"{value:.3f}{note}"
    return pd.Series(cells)


def verdict(scale):
    """The headline claims with their verdicts by dataset, and the paper's table of experiment 3."""
    frame = _table(scale, "claims").set_index("id")
    headlines = frame.loc[[claim["id"] for claim in claims.load() if claim.get("headline")]]
    names = _released(scale)
    rows = [
        {
            "the paper says": row.claim,
            "verdict": f"**{row.verdict}**",
            **{name: MARKS.get(getattr(row, dataset), "") for dataset, name in names.items()},
            "least favourable": _measured(row),
        }
        for row in headlines.itertuples()
    ]
    return "\n\n".join(
        [
            tables.to_markdown(pd.DataFrame(rows)).strip(),
            WHAT_VERDICTS_MEAN,
            "Experiment 3 (the paper's table on DermaMNIST, r = 0.1), each cell *published → here*; evidential models "
            f"here: mean over their runs. The [notebook]({EXPERIMENT_3.format(scale)}) has the first run, too.",
            _selective_table(scale, frame),
        ]
    )


def _measured(row):
    if pd.isna(row.measured):
        return row.reason
    names = [] if pd.isna(row.dataset) else [catalogue.title(name) for name in row.dataset.split(", ")]
    where = f", {names[0]}" if len(names) == 1 else ""
    claimed = "" if pd.isna(row.claimed) else f"; claimed {row.claimed}"
    return f"{row.quantity}{where}: {wording.number(row.measured, row.low, row.high)}{claimed}"


def _selective_table(scale, frame):
    """The paper's table, and below it the same ensemble without its Dirichlet, which the paper does not have."""
    rows = []
    for of, title in ROWS.items():
        cells = {"": title}
        for column, name in COLUMNS.items():
            row = frame.loc[f"exp3.table.{column}.{of}"]
            here = "–" if pd.isna(row.measured) else f"{row.measured:.4f}"
            cells[name] = f"{row.published:.4f} → {here}"
        rows.append(cells)
    if "dermamnist" not in _released(scale):
        return tables.to_markdown(pd.DataFrame(rows)).strip()
    runs = _table(scale, "exp3_runs", "dermamnist").set_index("Model")
    plain = runs[runs.index.str.startswith("Plain ensemble")].iloc[0]
    kept = {
        "coverage": "Coverage",
        "accuracy, kept": "Accuracy, kept",
        "F1, kept": "F1, kept",
        "NLL, kept": "NLL, kept",
    }
    same = {name: "" if name in kept else "the same" for name in COLUMNS.values()}
    rows.append(
        {"": "same ensemble, by plain confidence", **same}
        | {name: f"{plain[f'{column} mean']:.4f}" for name, column in kept.items()}
    )
    return tables.to_markdown(pd.DataFrame(rows)).strip()


def figures(scale):
    """Two figures of the dataset that experiment 3 is about, or of the first that is released."""
    names = _released(scale)
    dataset = "dermamnist" if "dermamnist" in names else next(iter(names))
    captions = {figure: caption.format(name=names[dataset]) for figure, caption in FIGURES.items()}
    return "\n\n".join(
        f"![{caption}](figures/{scale}/{dataset}/{figure}.png)\n\n*{caption}*" for figure, caption in captions.items()
    )


# ------------------------------------------------------------------------------------------- cards


def costs(scale):
    """Models and processor hours of every released dataset, from the provenance of its predictions."""
    settings, rows = config.load(scale), []
    for dataset, name in _released(scale).items():
        found = [
            records.read_prediction(records.job_path(scale, job)).provenance
            for run in settings.runs(dataset)
            for job in settings.jobs(dataset, run)
        ]
        rows.append(
            {
                "dataset": name,
                "models": len(found),
                "hours": sum(each.get("seconds", 0.0) for each in found) / 3600,
                "hardware": ", ".join(sorted({each.get("hardware", "unknown") for each in found})),
                "torch": ", ".join(sorted({each.get("versions", {}).get("torch", "unknown") for each in found})),
            }
        )
    return pd.DataFrame(rows)


def deviations(scale):
    """The settings in which the scale is not the paper's."""
    frame = _table(scale, "claims_protocol")
    return tables.to_markdown(frame[frame["same"] == "no"][["setting", "published", "here"]])


def orderings(scale):
    """Area under the risk-coverage curve by what orders the inputs of the largest ensemble, and two alpha_0."""
    rows = []
    for dataset, name in _released(scale).items():
        plain = _table(scale, "exp2_orderings", dataset).set_index("Ordered by")["AURC"]
        fits = _table(scale, "exp2_estimators", dataset).set_index("Estimator")
        rows.append(
            {
                "dataset": name,
                "confidence": plain["1 - largest mean probability"],
                **fits["AURC"],
                "median α₀, mean": f"{fits['alpha0 median']['MoM, mean (the paper)']:.0f}",
                "median α₀, trace": f"{fits['alpha0 median']['MoM, trace']:.0f}",
            }
        )
    return tables.to_markdown(pd.DataFrame(rows), digits=3)


def parts(scale):
    """Sizes of the parts of every released dataset, and how often each class is there."""
    rows = []
    for dataset, name in _released(scale).items():
        split = records.read_split(records.split_path(scale, dataset))
        rows.append(
            {
                "dataset": name,
                "classes": len(split.class_names),
                **{part: len(labels) for part, labels in split.labels.items()},
                "rarest class in test": int(pd.Series(split.labels["test"]).value_counts().min()),
            }
        )
    return tables.to_markdown(pd.DataFrame(rows))
