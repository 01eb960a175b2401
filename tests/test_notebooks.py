"""Notebooks are thin and agree with the catalogue; executed ones still say what their code says (nbval)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from paperlib import catalogue, notebooks

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXECUTED = sorted((ROOT / "results").glob("cpu/notebooks/*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def source(request):
    return nbformat.read(request.param, as_version=4)


def test_every_notebook_of_the_catalogue_is_there_and_no_other():
    assert {path.stem for path in SOURCES} == set(catalogue.NOTEBOOKS)


def test_sources_are_thin_and_without_outputs(source):
    lines = [line for cell in code_cells(source) for line in cell.source.splitlines() if line.strip()]
    assert len(lines) <= 120
    assert not any(re.match(r"\s*(def|class)\s", line) for line in lines)
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code_cells(source))
    assert source.metadata.kernelspec.name == "python3"


def test_parameters_are_those_that_a_run_passes(source):
    tagged = [cell for cell in code_cells(source) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert re.findall(r"^(\w+) =", tagged[0].source, re.MULTILINE) == ["scale", "dataset"]


def test_every_table_is_checked_when_a_notebook_runs_again(source):
    written = [cell for cell in code_cells(source) if "tables.write(" in cell.source]
    assert all("nbval-check-output" in cell.metadata.get("tags", []) for cell in written)


def test_a_notebook_begins_with_a_title_and_has_a_computed_paragraph(source):
    assert source.cells[0].source.startswith("# ")
    checked = [cell for cell in code_cells(source) if "nbval-check-output" in cell.metadata.get("tags", [])]
    assert any("Markdown(" in cell.source for cell in checked)


@pytest.mark.parametrize("item", catalogue.ITEMS, ids=lambda item: f"{item.kind}-{item.stem}")
def test_each_item_is_written_by_its_notebook(item):
    source = (ROOT / "notebooks" / f"{item.notebook}.ipynb").read_text()
    assert f'\\"{item.stem}\\"' in source


# Every figure and table environment of the paper, appendices included.
PAPER_LABELS = [
    "fig:softmaxfreq",
    "fig:ensemble_flow_figure",
    "fig:edl_arch",
    "fig:fail_demo",
    "fig:rel_hist_diagram",
    "fig:failvariance",
    "fig:50CE_riskcov_curves",
    "fig:C100_EDL_metrics",
    "fig:c100_EDL_sum",
    "fig:DM_EDL_metrics",
    "fig:DM_EDL_sum",
    "fig:C100_mom_metrics",
    "fig:C100_MoM_rel",
    "fig:C100_mom_conf",
    "fig:DM_mom_metrics",
    "fig:DM_MoM_rel",
    "fig:DM_mom_conf",
    "fig:DM_MoM_sel",
    "fig:DM_EDL_sel",
    "fig:c10_EDL_metrics",
    "fig:c10_EDL_sum",
    "fig:APT_EDL_metrics",
    "fig:APT_EDL_sum",
    "fig:c10_mom_metrics",
    "fig:C10_MoM_rel",
    "fig:C10_mom_conf",
    "fig:APT_mom_metrics",
    "fig:APT_MoM_rel",
    "fig:APT_mom_conf",
    "tab:dirichlet_formulations",
    "tab:dataset_summary",
    "tab:dm_sel_summary",
]


def test_no_figure_or_table_of_the_paper_is_left_out():
    labels = [label for item in catalogue.ITEMS for label in item.labels.values()]
    assert sorted(labels) == sorted(PAPER_LABELS)


def test_formulas_become_mathml_and_code_stays():
    text = "so $\\alpha_0$ and\n$$\\frac{a}{b}$$\nbut `$HOME$` stays"
    page = notebooks.formulas_to_mathml(text)
    assert page.count("<math ") == 2 and 'display="block"' in page and "`$HOME$`" in page
    assert "mfrac" in page and "$$" not in page


def nbval(path, **environment):
    """Run a notebook again and compare the outputs of its checked cells."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    return subprocess.run(
        [*command, "--nbval-lax", "--nbval-current-env", str(path)],
        cwd=path.parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def with_another_number(path):
    """Change one digit of one table of an executed notebook."""
    content = json.loads(path.read_text())
    cell = next(cell for cell in content["cells"] if "tables.write" in "".join(cell["source"]))
    data = cell["outputs"][-1]["data"]
    text = "".join(data["text/markdown"])
    digit = re.search(r"\d(?=\d* \|)", text)
    data["text/markdown"] = text[: digit.start()] + str((int(digit.group()) + 1) % 10) + text[digit.end() :]
    path.write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_released_notebooks_still_give_the_same_tables(path):
    done = nbval(path)
    assert done.returncode == 0, done.stdout[-3000:]
