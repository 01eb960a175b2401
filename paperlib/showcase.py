"""Numbers in README.md and docs/, taken from the tables that the notebooks wrote: no number there is typed by hand.

A block begins with <!-- begin NAME --> and ends with <!-- end NAME -->; what stands between is replaced.
"""

import re
from collections import Counter

import pandas as pd

from paperlib import analysis, claims, config, paths, records, tables
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
    "◐ holds in part, the estimate does, or at least half of the tests; ○ does not hold. A claim holds where it holds on "
    "all of its datasets, and in part where they differ. The last column is the number that decides: of the least "
    "favourable test, with its 95 % interval. The rules were written before the results were looked at."
)
ROWS = {"mom": "MoM ensemble", "exponential": "Exponential", "digamma": "Digamma"}
COLUMNS = {
    "full-accuracy": "accuracy",
    "full-f1": "F1",
    "full-nll": "NLL",
    "coverage": "kept",
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
    return {
        "README.md": {"verdict": verdict(scale), "figures": figures(scale)},
        "docs/results.md": {"trained": trained(scale), "deviations": deviations(scale), "orderings": orderings(scale)},
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
    return {dataset: analysis.DOMAINS[dataset][0] for dataset in claims.released(scale, needed=None)}


def _table(scale, name, dataset="all"):
    return pd.read_csv(paths.results(scale) / "tables" / dataset / f"{name}.csv", keep_default_na=False, na_values=[""])


# ------------------------------------------------------------------------------------------- README


def verdict(scale):
    """What the paper claims and what holds, in one sentence and two tables, and what it cost to find out."""
    frame = _table(scale, "claims").set_index("id")
    counts = Counter(frame["verdict"])
    judged = len(frame) - counts[claims.UNTESTABLE]
    headlines = frame.loc[[claim["id"] for claim in claims.load() if claim.get("headline")]]
    names = _released(scale)
    rows = [
        {
            "the paper says": row.claim,
            "verdict": f"**{row.verdict}**",
            **{name: MARKS.get(getattr(row, dataset), "") for dataset, name in names.items()},
            "decided by": _measured(row),
        }
        for row in headlines.itertuples()
    ]
    cost = costs(scale)
    return "\n\n".join(
        [
            f"**Of {len(frame)} numbers and claims of the paper, {judged} can be judged on {', '.join(names.values())}: "
            f"{counts[claims.HOLDS]} hold, {counts[claims.IN_PART]} hold in part, {counts[claims.FAILS]} do not.** "
            f"It took {cost.models.sum():,} trained models and {cost.hours.sum():.1f} processor hours to find out; to "
            f"rebuild all of it from the released predictions takes minutes.",
            tables.to_markdown(pd.DataFrame(rows)).strip(),
            WHAT_VERDICTS_MEAN,
            "Experiment 3 (the paper's table on DermaMNIST, r = 0.1), each cell *published → here*; "
            "evidential models here: mean over their runs.",
            _selective_table(frame),
        ]
    )


def _measured(row):
    if pd.isna(row.measured):
        return row.reason
    interval = "" if row.low == row.high or pd.isna(row.low) else f" [{row.low:.3g}, {row.high:.3g}]"
    names = [] if pd.isna(row.dataset) else [analysis.DOMAINS[name][0] for name in row.dataset.split(", ")]
    where = f" ({', '.join(names)})" if names else ""
    return f"{row.quantity}{where}: {row.measured:.3g}{interval}"


def _selective_table(frame):
    rows = []
    for of, title in ROWS.items():
        cells = {"": title}
        for column, name in COLUMNS.items():
            row = frame.loc[f"exp3.table.{column}.{of}"]
            here = "–" if pd.isna(row.measured) else f"{row.measured:.4f}"
            cells[name] = f"{row.published:.4f} → {here}"
        rows.append(cells)
    return tables.to_markdown(pd.DataFrame(rows)).strip()


def figures(scale):
    """Two figures of the dataset that experiment 3 is about, or of the first that is released."""
    names = _released(scale)
    dataset = "dermamnist" if "dermamnist" in names else next(iter(names))
    captions = {figure: caption.format(name=names[dataset]) for figure, caption in FIGURES.items()}
    return "\n\n".join(
        f"![{caption}](figures/{scale}/{dataset}/{figure}.png)\n*{caption}*" for figure, caption in captions.items()
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


def trained(scale):
    """What was trained and what it cost."""
    return tables.to_markdown(costs(scale), digits=1)


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
