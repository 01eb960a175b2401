"""One frame, three files: the same numbers, the right ones bold, LaTeX that holds together."""

import io
import re

import numpy as np
import pandas as pd
import pytest

from paperlib import tables


@pytest.fixture
def selective():
    """The shape of the paper's table of full and retained test, with its published numbers."""
    columns = pd.MultiIndex.from_product([["Full test", "Retained test"], ["N", "Accuracy", "NLL"]])
    frame = pd.DataFrame(
        [
            [1002, 0.7605, 1.7061, 634, 0.9132, 1.1109],
            [1002, 0.7515, 0.7215, 559, 0.91414, 0.3496],
            [1002, 0.7974, 0.5552, 701, 0.8987, np.nan],
        ],
        index=pd.Index(["Digamma", "Exponential", "MoM ($M=50$)"], name="Model"),
        columns=columns,
    )
    return frame.astype({("Full test", "N"): int, ("Retained test", "N"): int})


BOLD = {
    ("Full test", "Accuracy"): "max",
    ("Full test", "NLL"): "min",
    ("Retained test", "N"): "max",
    ("Retained test", "Accuracy"): "max",
    ("Retained test", "NLL"): "min",
}


def latex_rows(text):
    body = text.split(r"\begin{tabular}")[1].split(r"\bottomrule")[0]
    return [line.removesuffix(r" \\").split(" & ") for line in body.splitlines() if line.endswith(r"\\")]


def markdown_rows(text):
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")
    ]


def unmarked(cell):
    return cell.replace("**", "").replace(r"\textbf{", "").replace("}", "").replace("--", "–")


def test_writes_three_files_beside_each_other(tmp_path, selective):
    stem = tmp_path / "deep" / "table_0.8"
    paths = tables.write(selective, stem, "Caption.", "tab:x", bold=BOLD)
    assert [path.name for path in paths] == ["table_0.8.csv", "table_0.8.tex", "table_0.8.md"]
    assert sorted(path.name for path in stem.parent.iterdir()) == sorted(path.name for path in paths)


def test_same_frame_gives_the_same_bytes(tmp_path, selective):
    first, second = (tables.write(selective, tmp_path / name, "Caption.", "tab:x", bold=BOLD) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_csv_gives_back_every_number_in_ten_digits():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=50) * 10.0 ** rng.integers(-12, 12, 50), "n": rng.integers(0, 9, 50)})
    _, *rows = (line.split(",") for line in tables.to_csv(frame).splitlines())
    np.testing.assert_allclose([float(x) for x, _ in rows], frame["x"], rtol=5e-10)
    assert tables.to_csv(frame.assign(x=frame["x"] * (1 + 4e-16))) == tables.to_csv(frame)  # sums in another order
    assert [n for _, n in rows] == [str(n) for n in frame["n"]]


def test_markdown_and_latex_show_the_csv_rounded(selective):
    csv = pd.read_csv(io.StringIO(tables.to_csv(selective)))
    header, _, *markdown = markdown_rows(tables.to_markdown(selective, digits=3, bold=BOLD))
    *_, first, second, third = latex_rows(tables.to_latex(selective, "c", "l", digits=3, bold=BOLD))
    assert header == list(csv.columns)
    for row, (shown, latex) in enumerate(zip(markdown, (first, second, third), strict=True)):
        assert [unmarked(cell) for cell in shown] == [unmarked(cell) for cell in latex]
        for column, cell in zip(csv.columns[1:], shown[1:], strict=True):
            value = csv.at[row, column]
            expected = "–" if np.isnan(value) else str(value) if column.endswith(" N") else f"{value:.3f}"
            assert unmarked(cell) == expected


def test_bold_marks_the_best_and_no_other(selective):
    markdown = markdown_rows(tables.to_markdown(selective, bold=BOLD))[2:]
    bold = {(row, column) for row, cells in enumerate(markdown) for column, cell in enumerate(cells) if "**" in cell}
    assert bold == {(2, 2), (2, 3), (2, 4), (1, 5), (1, 6)}
    latex = latex_rows(tables.to_latex(selective, "c", "l", bold=BOLD))[2:]
    assert bold == {(r, c) for r, cells in enumerate(latex) for c, cell in enumerate(cells) if r"\textbf" in cell}


def test_values_that_look_equal_are_equally_best():
    frame = pd.DataFrame({"x": [0.81234, 0.81231, 0.8120, np.nan]})
    cells = [row[0] for row in markdown_rows(tables.to_markdown(frame, digits=4, bold={"x": "max"}))[2:]]
    assert cells == ["**0.8123**", "**0.8123**", "0.8120", "–"]


def test_column_without_numbers_has_no_best():
    assert "**" not in tables.to_markdown(pd.DataFrame({"x": [np.nan, np.nan]}), bold={"x": "min"})


def test_pairs_of_mean_and_std_become_one_column():
    frame = pd.DataFrame({("a", "mean"): [0.5], ("a", "std"): [0.25], ("b", "mean"): [2.0], ("b", "std"): [np.nan]})
    shown = tables.plus_minus_columns(frame, digits=2)
    assert list(shown.columns) == ["a", "b"] and [str(cell) for cell in shown.iloc[0]] == ["0.50 ± 0.25", "2.00"]


def test_plus_minus_is_rounded_where_shown_and_whole_in_the_csv():
    cells = [tables.plus_minus(0.76051, 0.00214, 3), tables.plus_minus(0.8, np.nan, 3)]
    frame = pd.DataFrame({"Model": ["a", "b"], "Accuracy": cells})
    assert [str(cell) for cell in cells] == ["0.761 ± 0.002", "0.800"]
    assert tables.to_csv(frame) == "Model,Accuracy mean,Accuracy std\na,0.76051,0.00214\nb,0.8,\n"
    assert r"0.761 $\pm$ 0.002 \\" in tables.to_latex(frame, "c", "l")
    assert "| b | **0.800** |" in tables.to_markdown(frame, bold={"Accuracy": "max"})
    assert "| a | **0.761 ± 0.002** |" in tables.to_markdown(frame, bold={"Accuracy": "min"})


@pytest.mark.parametrize(
    ("value", "shown", "latex"),
    [
        (3, "3", "3"),
        (np.int64(60000), "60000", "60000"),
        (3.0, "3.00", "3.00"),
        (-0.001, "-1.00e-03", r"$-$1.00$\times 10^{-3}$"),
        (-0.0, "0.00", "0.00"),
        (-1.25, "-1.25", "$-$1.25"),
        (99.704, "99.7", "99.7"),
        (44787.5481, "44788", "44788"),
        (5.2e8, "5.20e+08", r"5.20$\times 10^{8}$"),
        (np.inf, "∞", r"$\infty$"),
        (np.nan, "–", "--"),
        (None, "–", "--"),
    ],
)
def test_numbers_as_shown(value, shown, latex):
    frame = pd.DataFrame({"x": pd.Series([value], dtype=object)})
    assert markdown_rows(tables.to_markdown(frame, digits=2))[2] == [shown]
    assert latex_rows(tables.to_latex(frame, "c", "l", digits=2))[1] == [latex]


def test_latex_holds_together(selective):
    text = tables.to_latex(selective, "Risk & coverage at 10% for $r=0.1$ {a_b}", "tab:x", bold=BOLD)
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert re.sub(r"\\\$", "", text).count("$") % 2 == 0
    assert r"\caption{Risk \& coverage at 10\% for $r=0.1$ \{a\_b\}}" in text
    assert [text.count(rf"\{rule}") for rule in ("toprule", "midrule", "bottomrule")] == [1, 1, 1]
    assert r" & \multicolumn{3}{c}{Full test} & \multicolumn{3}{c}{Retained test} \\" in text
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-7}" in text
    spans = [
        sum(int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", " ".join(row))) or len(row)
        for row in latex_rows(text)
    ]
    assert spans == [6, 7, 7, 7, 7]
    assert r"\begin{tabular}{lrrrrrr}" in text


@pytest.mark.parametrize("sign", list("\\&%$#_{}~^<>"))
def test_special_signs_are_escaped_in_latex(sign):
    cell = latex_rows(tables.to_latex(pd.DataFrame({"x": [f"a{sign}b"]}), "c", "l"))[1][0]
    assert cell.startswith("a") and cell.endswith("b") and cell != f"a{sign}b"


def test_pipes_do_not_break_markdown():
    assert tables.to_markdown(pd.DataFrame({"a|b": ["c|d"]})).splitlines()[2] == r"| c\|d |"


def test_row_groups_are_ruled():
    index = pd.MultiIndex.from_product([["CIFAR-10", "APTOS"], [5, 50]], names=["Dataset", "M"])
    text = tables.to_latex(pd.DataFrame({"x": [1, 2, 3, 4]}, index=index), "c", "l")
    assert text.count(r"\midrule") == 2
    assert text.index("CIFAR-10 & 50") < text.rindex(r"\midrule") < text.index("APTOS & 5 ")


def test_mistakes_are_named():
    frame = pd.DataFrame({"x": [1.0], "t": ["a"]})
    with pytest.raises(ValueError, match="'y'"):
        tables.to_markdown(frame, bold={"y": "max"})
    with pytest.raises(ValueError, match="'best'"):
        tables.to_markdown(frame, bold={"x": "best"})
    with pytest.raises(ValueError, match="cannot rank 'a'"):
        tables.to_markdown(frame, bold={"t": "max"})
    with pytest.raises(ValueError, match="same name: x"):
        tables.to_csv(pd.DataFrame([[1, 2]], columns=["x", "x"]))


def test_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    frame = pd.DataFrame({"x": [1.0]})
    paths = tables.write(frame, tmp_path / "t", "c", "l")
    before = [path.read_bytes() for path in paths]
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ValueError, match="could not be written"):
        tables.write(frame + 1, tmp_path / "t", "c", "l")
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 3
