"""Tables: one frame written as CSV (ten digits), LaTeX (booktabs) and Markdown, the last two from the same cells.

It writes through `records.replacing`, so that no half of a table is ever there.
"""

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

import pandas as pd

from paperlib import checks, records

EN_DASH = "–"
# Beyond these a fixed number of decimals says too little or too much.
LARGEST_FIXED = 1e5
CSV_FLOAT = "%.10g"  # the digits after these depend on the order of sums, and so on the number of threads

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "δ": r"$\delta$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
    "₀": "$_0$",
    "₁": "$_1$",
    EN_DASH: "--",
}
_MATHS = re.compile(r"(\$[^$]+\$)")


@dataclass(frozen=True)
class PlusMinus:
    """A mean with its standard deviation: rounded where it is shown, apart in the CSV."""

    mean: float
    std: float
    digits: int

    def __str__(self):
        if _missing(self.mean):
            return EN_DASH
        mean = _fixed(self.mean, self.digits)
        return mean if _missing(self.std) else f"{mean} ± {self.std:.{self.digits}f}"

    __repr__ = __str__


def plus_minus(mean, std, digits=4):
    """A cell that shows "mean ± std"; a NaN std (one run) leaves the mean alone."""
    return PlusMinus(float(mean), float(std), digits)


def plus_minus_columns(frame, digits=4):
    """A frame whose columns come in pairs (name, "mean") and (name, "std"), with one column of such cells a name."""
    shown = {
        name: [plus_minus(mean, std, digits) for mean, std in zip(part["mean"], part["std"], strict=True)]
        for name, part in ((name, frame[name]) for name in dict.fromkeys(frame.columns.get_level_values(0)))
    }
    return pd.DataFrame(shown, index=frame.index)


def write(frame, stem, caption, label, digits=4, bold=None):
    """Write stem.csv, stem.tex and stem.md and return the three paths.

    Columns of two levels become groups with a rule under each name (one header line, names joined, in CSV and
    Markdown). A named index comes first as columns; a change of its first level draws a rule. Text between
    dollar signs is kept as mathematics, all other text is escaped. Digits: decimals of the floats. Bold:
    {column: "max" or "min"}; equal as shown is equally best.
    """
    contents = {
        "csv": to_csv(frame),
        "tex": to_latex(frame, caption, label, digits, bold),
        "md": f"**{_plain(caption)}**\n\n{to_markdown(frame, digits, bold)}",
    }
    written = []
    for suffix, text in contents.items():
        path = Path(f"{stem}.{suffix}")
        with records.replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        written.append(path)
    return tuple(written)


def to_csv(frame):
    """CSV with ten digits of each number; "mean ± std" becomes two columns, NaN is empty."""
    frame = _with_index(frame)
    columns = {}
    for column, name in zip(frame.columns, _names(frame), strict=True):
        cells = frame[column]
        if any(isinstance(cell, PlusMinus) for cell in cells):
            for part in ("mean", "std"):
                columns[f"{name} {part}"] = [getattr(cell, part, None) for cell in cells]
        else:
            columns[name] = cells.array
    return pd.DataFrame(columns).to_csv(index=False, lineterminator="\n", float_format=CSV_FLOAT)


def to_markdown(frame, digits=4, bold=None):
    """A GitHub table: numbers to the right, the best of a column in bold."""
    shown, best, numeric = _cells(frame, digits, bold)
    header = [_plain(name) for name in _names(shown)]
    rows = [
        [f"**{cell}**" if mark else _plain(cell) for cell, mark in zip(cells, marks, strict=True)]
        for cells, marks in zip(shown.to_numpy(), best, strict=True)
    ]
    rule = ["---:" if right else ":---" for right in numeric]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, rule, *rows])


def to_latex(frame, caption, label, digits=4, bold=None):
    """A LaTeX table environment; it needs the booktabs package."""
    shown, best, numeric = _cells(frame, digits, bold)
    levels = frame.index.nlevels if _index_shown(frame) else 0
    lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(caption)}}}", rf"\label{{{label}}}"]
    lines += [rf"\begin{{tabular}}{{{''.join('r' if right else 'l' for right in numeric)}}}", r"\toprule"]
    lines += _header(shown)
    for row, (cells, marks) in enumerate(zip(shown.to_numpy(), best, strict=True)):
        if levels > 1 and row and cells[0] != shown.iat[row - 1, 0]:
            lines.append(r"\midrule")
        texts = [_tex_cell(cell, right) for cell, right in zip(cells, numeric, strict=True)]
        lines.append(_row(rf"\textbf{{{text}}}" if mark else text for text, mark in zip(texts, marks, strict=True)))
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _cells(frame, digits, bold):
    """The cells as text, whether each is a best one, and whether each column holds numbers."""
    whole = _with_index(frame)
    shown = whole.map(lambda cell: _text(cell, digits)).astype(object)
    best = pd.DataFrame(False, index=whole.index, columns=whole.columns)
    for column, direction in (bold or {}).items():
        checks.choice("column to mark", column, list(whole.columns))
        checks.choice(f"direction of {column!r}", direction, ("max", "min"))
        values = whole[column].map(_value)
        if values.notna().any():
            winner = shown[column].loc[values.idxmax() if direction == "max" else values.idxmin()]
            best[column] = shown[column].map(_leading) == _leading(winner)
    numeric = [all(isinstance(cell, Real | PlusMinus) or _missing(cell) for cell in whole[name]) for name in whole]
    return shown, best.to_numpy(), numeric


def _text(cell, digits):
    if _missing(cell):
        return EN_DASH
    if isinstance(cell, bool) or not isinstance(cell, Real):
        return str(cell)
    return str(int(cell)) if isinstance(cell, Integral) else _fixed(float(cell), digits)


def _fixed(value, digits):
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    before = len(str(int(abs(value))))
    text = f"{value:.{max(digits + 1 - before, 0)}f}"  # digits before the point leave fewer to show after it
    if value and (abs(value) >= LARGEST_FIXED or abs(value) < 10 ** (1 - digits)):  # fewer than two digits would show
        return f"{value:.2e}"
    return text if float(text) else f"{0:.{digits}f}"  # never "-0.00"


def _missing(cell):
    return cell is None or cell is pd.NA or cell is pd.NaT or (isinstance(cell, Real) and math.isnan(cell))


def _value(cell):
    """The number by which a cell is ranked."""
    cell = cell.mean if isinstance(cell, PlusMinus) else cell
    if _missing(cell):
        return math.nan
    if isinstance(cell, str):
        raise ValueError(f"cannot rank {cell!r}: bold is for columns of numbers")
    return float(cell)


def _leading(text):
    return text.split(" ±")[0]


def _index_shown(frame):
    return any(name is not None for name in frame.index.names)


def _with_index(frame):
    whole = frame.reset_index() if _index_shown(frame) else frame.reset_index(drop=True)
    names = _names(whole)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"columns of the same name: {', '.join(repeated)}")
    return whole


def _names(frame):
    """One name a column: the levels joined, empty ones left out."""
    parts = (column if isinstance(column, tuple) else (column,) for column in frame.columns)
    return [" ".join(str(part) for part in column if part != "") for column in parts]


def _header(shown):
    if shown.columns.nlevels == 1:
        return [_row(_tex(str(name)) for name in shown.columns), r"\midrule"]
    # A column of one level (the index, which pandas pads with "") has its name on the lower line.
    pairs = [(group, name) if name != "" else ("", group) for group, name in shown.columns]
    groups, rules, start = [], [], 0
    while start < len(pairs):
        name, end = pairs[start][0], start
        while end + 1 < len(pairs) and pairs[end + 1][0] == name:
            end += 1
        width = end - start + 1
        groups.append(rf"\multicolumn{{{width}}}{{c}}{{{_tex(name)}}}" if name else " & ".join([""] * width))
        if name:
            rules.append(rf"\cmidrule(lr){{{start + 1}-{end + 1}}}")
        start = end + 1
    return [_row(groups), " ".join(rules), _row(_tex(str(name)) for _, name in pairs), r"\midrule"]


def _row(cells):
    return " & ".join(cells) + r" \\"


def _tex_cell(text, number):
    """A cell's text in LaTeX; powers of ten and minus signs of numbers as mathematics."""
    if not number:
        return _tex(text)
    text = re.sub(r"e([+-]\d+)", lambda power: rf"$\times 10^{{{int(power[1])}}}$", text)
    return _tex(re.sub(r"(?<![\d{])-(?=\d)", "−", text))


def _tex(text):
    """Text escaped for LaTeX, apart from what stands between dollar signs."""
    parts = _MATHS.split(text)
    return "".join(
        part if number % 2 else "".join(_LATEX.get(sign, sign) for sign in part) for number, part in enumerate(parts)
    )


def _plain(text):
    """Text as one cell of a Markdown table."""
    return str(text).replace("|", r"\|").replace("\n", " ")
