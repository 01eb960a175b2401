"""README and docs take their numbers from the tables: the blocks against the tables they come from."""

import numpy as np
import pytest
from conftest import REPOSITORY, change_config
from synthetic import write_release

from paperlib import analysis, claims, config, paths, records, selective, showcase, tables


@pytest.fixture
def released(home):
    """A small drawn release of the cpu scale with the tables that its claims notebook would write."""

    def shrink(content):
        content["datasets"] = {"dermamnist": {"members": 4, "seeds": 2}}
        content["collapse"]["dataset"] = "dermamnist"
        content["ensemble"]["sizes"] = [2, 4]
        content["split_sensitivity"]["members"] = 2

    change_config(home, "cpu", shrink)
    write_release(config.load("cpu"), inputs=60, classes=4)
    folder = paths.results("cpu") / "tables" / "all"
    frame = claims.evaluate("cpu", draws=5)
    tables.write(frame, folder / "claims", "c", "l")
    tables.write(claims.protocol("cpu"), folder / "claims_protocol", "c", "l")
    study, beside = analysis.Study(config.load("cpu"), "dermamnist"), folder.parent / "dermamnist"
    orderings = analysis.compare_orderings(study, 4, draws=5).rename(columns={"title": "Ordered by"})
    tables.write(analysis.readable(orderings), beside / "exp2_orderings", "c", "l")
    estimators = analysis.estimator_comparison(study, 4)
    tables.write(analysis.readable(estimators), beside / "exp2_estimators", "c", "l")
    over_runs = analysis.selection_over_runs(study).rename(index={"ensemble": "Plain ensemble"}).rename_axis("Model")
    tables.write(analysis.readable(tables.plus_minus_columns(over_runs)), beside / "exp3_runs", "c", "l")
    single = analysis.summary(analysis.single_run_metrics(study)).droplevel("run").rename_axis("Model")
    tables.write(analysis.readable(tables.plus_minus_columns(single)), beside / "exp1_metrics", "c", "l")
    return frame


def test_the_answer_counts_what_the_table_says(released):
    text = showcase.answer("cpu", showcase.costs("cpu"))
    counts = released["verdict"].value_counts()
    judged = len(released) - counts[claims.UNTESTABLE]
    without_data = released["rule"].str.startswith(("Mathematics", "Arithmetic", "A fact")) & (
        released["dataset"] == ""
    )
    without_data &= released["verdict"] != claims.UNTESTABLE
    assert f"Of {len(released)} numbers and claims of the paper, {judged} can be judged here" in text
    assert f"{judged - without_data.sum()} on data and {without_data.sum()} without" in text
    assert f"{counts[claims.HOLDS]} hold, {counts[claims.IN_PART]} hold in part, {counts[claims.FAILS]} do not" in text


def test_the_answer_compares_the_ensemble_with_what_one_would_use_instead(released):
    rows = dict(
        line.strip("| ").split(" | ")
        for line in showcase.answer("cpu", showcase.costs("cpu")).splitlines()
        if line.startswith("| ")
    )
    study = analysis.Study(config.load("cpu"), "dermamnist")
    labels, fit = study.labels["test"], study.fit("mom", "test", 4)
    right = fit.mean.argmax(axis=1) == labels
    single = analysis.single_run_metrics(study).groupby("title")[["ece", "aurc"]].mean()
    recipes = single.drop(index=["Cross-entropy", "Cross-entropy, temperature scaled"])
    wanted = {
        "**AURC**: MoM ensemble": f"{selective.aurc(fit.total_variance, right):.3f}",
        "AURC: the same ensemble by plain confidence": f"{selective.aurc(1 - fit.mean.max(axis=1), right):.3f}",
        "AURC: best evidential recipe": f"{recipes.aurc.min():.3f} ({recipes.aurc.idxmin()})",
        "ECE: one cross-entropy model": f"{single.ece['Cross-entropy']:.3f}",
        "ECE: the same, temperature scaled": f"{single.ece['Cross-entropy, temperature scaled']:.3f}",
    }
    for name, value in wanted.items():
        assert rows[name].replace("**", "") == value
    for metric, best in (("Accuracy", max), ("NLL", min), ("ECE", min), ("AURC", min)):
        cells = [cell for name, cell in rows.items() if metric in name]
        numbers = [float(cell.replace("**", "").split(" (")[0]) for cell in cells]
        assert all(number == best(numbers) for cell, number in zip(cells, numbers, strict=True) if "**" in cell)
        assert any("**" in cell for cell in cells)


def test_the_verdict_says_what_the_table_says(released):
    text = showcase.verdict("cpu")
    headlines = [claim for claim in claims.load() if claim.get("headline")]
    assert len(headlines) == 15
    for claim in headlines:
        row = next(line for line in text.splitlines() if claim["text"] in line)
        verdict = released.set_index("id").loc[claim["id"], ["verdict", "dermamnist"]]
        mark = showcase.MARKS.get(verdict.dermamnist, "")
        assert f"| **{verdict.verdict}** | {mark} |" in row
    cell = released.set_index("id").loc["exp3.table.coverage.mom"]
    assert f"{cell.published:.4f} → {cell.measured:.4f}" in text
    study = analysis.Study(config.load("cpu"), "dermamnist")
    plain = analysis.select(study.confidence_forecast(4), study.labels, study.settings)
    last = text.splitlines()[-1].strip("| ").split(" | ")
    assert last[:2] == ["same ensemble, by plain confidence", "the same"] and last[4] == f"{plain.coverage:.4f}"


def test_every_block_has_its_place_and_is_written_once(released, home):
    (home / "docs").mkdir()
    documents = showcase.documents("cpu")
    for file, blocks in documents.items():
        places = [f"<!-- begin {name} -->\nSTALE\n<!-- end {name} -->\n" for name in blocks]
        (home / file).write_text("before\n" + "".join(places) + "after\n")
    showcase.write("cpu")
    first = {file: (home / file).read_text() for file in documents}
    assert all(
        "STALE" not in text and text.startswith("before") and text.endswith("after\n") for text in first.values()
    )
    assert "| DermaMNIST |" in first["docs/results.md"] and "| DermaMNIST |" in first["docs/datasets.md"]
    assert "| Backbone | resnet18 | efficientnet_lite0 |" in first["docs/results.md"]
    showcase.write("cpu")
    assert first == {file: (home / file).read_text() for file in documents}


def test_orderings_of_the_largest_ensemble(released):
    study = analysis.Study(config.load("cpu"), "dermamnist")
    row = showcase.orderings("cpu").strip().splitlines()[-1].strip("| ").split(" | ")
    labels, fit = study.labels["test"], study.fit("mom", "test", 4)
    right = fit.mean.argmax(axis=1) == labels
    wanted = selective.aurc(1 - fit.mean.max(axis=1), right), selective.aurc(fit.total_variance, right)
    assert row[:3] == ["DermaMNIST", *(f"{value:.3f}" for value in wanted)]
    assert row[-2] == f"{np.median(fit.alpha0):.0f}"


def test_readme_and_the_cards_have_every_place(released):
    for file, blocks in showcase.documents("cpu").items():
        for name in blocks:
            showcase.insert((REPOSITORY / file).read_text(), name, "", file)


def test_a_document_without_a_place_is_named(home):
    with pytest.raises(showcase.BlockError, match=r"README\.md must have one block .* it has 0"):
        showcase.insert("nothing here", "verdict", "text", "README.md")


def test_nothing_is_said_while_a_dataset_is_incomplete(released):
    records.prediction_path("cpu", "dermamnist", "split_1", 0).unlink()
    assert showcase.documents("cpu") == {}
    assert showcase.documents("demo") == {}
