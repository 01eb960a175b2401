"""Figures: each function draws given numbers on given axes; none computes a metric (bins of histograms apart).

One palette and one style. Nothing is told by colour alone: marker, line style or hatch differ as well.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.colors import to_rgba
from matplotlib.patches import Circle, FancyBboxPatch, Polygon
from matplotlib.ticker import LogLocator, NullFormatter

from paperlib import checks, records

# Widths in inches of one column and of the text block of a two-column journal page.
COLUMN_WIDTH, PAGE_WIDTH = 3.5, 7.16

# Okabe and Ito's colours, in an order whose neighbours differ most for every kind of colour vision.
PALETTE = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
}
CORRECT, INCORRECT, DARK_INCORRECT = PALETTE["blue"], PALETTE["orange"], "#8A5A00"
LIMIT, QUIET = "#C00000", "#707070"
SMALL = 8  # points; nothing is set smaller
COLOURS = tuple(PALETTE.values())
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
DASHED = (0, (4, 2.5))

METRIC_LABELS = {
    "accuracy": "Accuracy",
    "macro_f1": "Macro F1",
    "nll": "NLL (nats)",
    "ece": "Expected calibration error",
    "aurc": "Area under the risk–coverage curve",
    "coverage": "Coverage",
    "risk": "Risk",
    "alpha0": r"Total concentration $\alpha_0$",
    "loss": "Training loss",
}


class Band(NamedTuple):
    """Mean reliability curve of several runs with its standard deviation, one entry a bin."""

    confidence: np.ndarray
    accuracy: np.ndarray
    std: np.ndarray


def use_style():
    """Make the package's style the one of all figures drawn from here on."""
    plt.style.use(Path(__file__).with_name("paper.mplstyle"))


def save(figure, stem):
    """Write stem.pdf (vector) and stem.png; the same drawing gives the same bytes. Returns the two paths."""
    metadata = {"pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "png": {"Software": None}}
    saved = []
    for kind, fields in metadata.items():
        path = Path(f"{stem}.{kind}")
        with records.replacing(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=fields)
        saved.append(path)
    return tuple(saved)


def line_style(order):
    """Colour, marker and line style of the series number `order` of a figure."""
    return {name: values[order % len(values)] for name, values in _CYCLES.items()}


def sequential(count):
    """Colours from light to dark for `count` steps of one quantity, such as the ensemble size."""
    return sns.color_palette("viridis_r", n_colors=count + 1)[1:]


def name_panels(axes):
    """Put (a), (b), ... before the title of each panel, in reading order."""
    for number, ax in enumerate(np.ravel(axes)):
        title = f"({chr(ord('a') + number)}) {ax.get_title(loc='left')}"
        ax.set_title(title.strip(), loc="left")


def shared_legend(figure, axes, columns=None):
    """One legend above all panels instead of one in each; a series that several panels show stands once."""
    entries = {}
    for ax in np.ravel(axes):
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
        if ax.get_legend() is not None:
            ax.get_legend().remove()
    return figure.legend(entries.values(), entries, loc="outside upper center", ncols=columns or len(entries))


def plot_score_frequencies(ax, scores, label, bins=20):
    """How often each softmax score of the true class occurs over the members, for one input (fig. softmaxfreq)."""
    scores = checks.real_array(scores, "scores", ("members",))
    counts, edges = np.histogram(scores, np.linspace(0, 1, bins + 1))
    ax.bar(edges[:-1], counts, np.diff(edges), align="edge", color=to_rgba(CORRECT, 0.55), edgecolor=CORRECT)
    _counts(ax, counts.max(), room=0.28)
    mean = scores.mean()
    spread = f"${_short(scores.std(ddof=1))}$" if len(scores) > 1 else "–"
    ax.axvline(mean, ymax=0.75, color="black", linestyle=DASHED, linewidth=1)
    side = "left" if mean > 0.5 else "right"
    place = {"left": 0.03, "right": 0.97}[side]
    text = f"mean {mean:.2f}\ns.d. {spread}"
    ax.text(place, 0.98, text, ha=side, va="top", linespacing=1, transform=ax.transAxes)
    ax.set(title=label, xlabel="Softmax score of the true class", ylabel="Number of models", xlim=(0, 1))


def plot_metric_by_recipe(ax, frame, metric, beside=(), digits=3):
    """Mean and standard deviation of a metric for each recipe, value above its point.

    Frame: columns title, mean, std (NaN: one run). Titles in `beside` are drawn as open points, to compare with.
    """
    rows = np.arange(len(frame))[::-1]
    for row, title, mean, std in zip(rows, frame["title"], frame["mean"], frame["std"], strict=True):
        reference = title in set(beside)
        colour = QUIET if reference else CORRECT
        ax.errorbar(
            mean,
            row,
            xerr=std if std > 0 else None,
            color=colour,
            marker="D" if reference else "o",
            markerfacecolor="white" if reference else colour,
            linestyle="none",
        )
        ax.annotate(
            f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if np.isfinite(std) else ""),
            (mean, row),
            xytext=(0, 3.5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=SMALL,
        )
    _rows(ax, rows, frame["title"])
    ax.set_xlabel(METRIC_LABELS.get(metric, metric))
    ax.margins(x=0.32)
    ax.locator_params(axis="x", nbins=4)


def plot_confidence_histogram(ax, histograms, threshold=0.8, wrong_share=None, legend=True):
    """Confidence of right and of wrong predictions, the threshold, and the share of wrong ones above it (D17).

    Panels narrower than about 2.3 inches have no room for a legend of their own: legend=False and shared_legend.
    """
    for name, counts, look in _by_correctness(histograms.correct, histograms.incorrect):
        ax.stairs(counts, histograms.edges, label=name, **look)
    _counts(ax, max(histograms.correct.max(), histograms.incorrect.max()), room=0.28)
    ax.axvline(threshold, ymax=0.75, color=LIMIT, linestyle=DASHED, linewidth=1)
    if wrong_share is not None:
        share = "none" if np.isnan(wrong_share) else f"{100 * wrong_share:.1f}% wrong"
        text = f"{share}\nabove {threshold:g}"
        place = {"ha": "right", "va": "top", "linespacing": 1, "transform": ax.transAxes}
        ax.text(1, 1, text, color=LIMIT, fontsize=SMALL, **place)
    ax.set(xlabel="Confidence", ylabel="Predictions", xlim=(0, 1), xticks=np.linspace(0, 1, 6))
    if legend:
        ax.legend(loc="upper left")


def plot_reliability(ax, table, intervals=None, label=None, order=0):
    """Accuracy against confidence, with the diagonal of perfect calibration.

    Table: a Reliability, or a Band whose standard deviation is shaded. Intervals: (lower, upper) of each accuracy.
    """
    _diagonal(ax)
    look = line_style(order)
    ax.plot(table.confidence, table.accuracy, label=label, zorder=3, clip_on=False, **look)
    if isinstance(table, Band):
        low, high = (np.clip(table.accuracy + sign * np.asarray(table.std), 0, 1) for sign in (-1, 1))
        ax.fill_between(table.confidence, low, high, color=look["color"], alpha=0.22, linewidth=0)
    if intervals is not None:
        ax.vlines(table.confidence, *intervals, color=look["color"], linewidth=0.8)
    if label is not None:
        ax.legend(loc="upper left")


def plot_reliability_by_size(ax, tables):
    """One reliability curve for each ensemble size (dict: size -> Reliability), light to dark with the size."""
    _diagonal(ax)
    for order, ((size, table), colour) in enumerate(zip(tables.items(), sequential(len(tables)), strict=True)):
        look = line_style(order) | {"color": colour}
        ax.plot(table.confidence, table.accuracy, label=f"$M={size}$", clip_on=False, **look)
    ax.legend(loc="upper left")


def plot_metric_by_size(ax, frame, metric):
    """A metric against the ensemble size, one line for each estimator.

    Frame: columns estimator, M, mean and, optionally, std. The first estimator is drawn over the others, whose
    markers are open and larger: one that coincides with it (the plain ensemble with MoM) stays visible.
    """
    for order, name in enumerate(dict.fromkeys(frame["estimator"])):
        rows = frame[frame["estimator"] == name].sort_values("M")
        look = line_style(order) | {"zorder": 3 - 0.1 * order, "markersize": 4 + 1.2 * order}
        if order:
            look["markerfacecolor"] = "none"
        spread = rows["std"] if "std" in rows and rows["std"].gt(0).any() else None
        ax.errorbar(rows["M"], rows["mean"], yerr=spread, label=name, elinewidth=0.8, **look)
    _sizes(ax, frame["M"])
    ax.set_ylabel(METRIC_LABELS.get(metric, metric))
    ax.legend()


def plot_history(ax, histories, column, log=False, label=None, chance=None):
    """A column of each run's history (dict: run -> frame with an epoch column) over the epochs."""
    for order, (run, frame) in enumerate(histories.items()):
        look = line_style(order)
        if len(frame) > 1:
            look["marker"] = ""
        ax.plot(frame["epoch"], frame[column], label=run, **look)
    if chance is not None:
        ax.axhline(chance, color=QUIET, linestyle=":", linewidth=0.9, label="Chance")
    if log:
        ax.set_yscale("log")
    ax.set(xlabel="Epoch", ylabel=label or METRIC_LABELS.get(column, column))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend()


def plot_variance_histogram(ax, variance, correct, tau=None, log=True, bins=40, legend=True):
    """Total variance of right and of wrong predictions, each as shares of its own group, and the threshold tau.

    On the logarithmic axis a variance of zero has no place: zeros are put into the lowest bin, and counted aloud.
    """
    variance = checks.real_array(variance, "variance", ("inputs",))
    correct = np.asarray(correct, dtype=bool)
    checks.same_length(len(variance), len(correct), "variance", "correct")
    checks.first_bad(variance < 0, variance, "variance", "is negative")
    edges = _edges(variance, bins, log)
    groups = [np.histogram(np.maximum(group, edges[0]), edges)[0] for group in (variance[correct], variance[~correct])]
    shares = [100 * counts / max(counts.sum(), 1) for counts in groups]
    for (name, share, look), counts in zip(_by_correctness(*shares), groups, strict=True):
        ax.stairs(share, edges, label=f"{name} ($n={counts.sum()}$)", **look)
    if log:
        ax.set_xscale("log")
        # Within a decade or two the usual labels of minor ticks run into each other.
        subs = (1.0, 2.0, 5.0) if edges[-1] < 20 * edges[0] else (1.0,)
        ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        ax.xaxis.set_minor_formatter(NullFormatter())
    if tau is not None and np.isfinite(tau):
        style = {"color": LIMIT, "linestyle": DASHED, "linewidth": 1}
        line = ax.axvline(tau, label=rf"$\tau={_short(tau)}$", **style)
    elif tau is not None:
        _note(ax, r"$\tau=-\infty$: abstains on all" if tau < 0 else r"$\tau=\infty$: keeps all")
    zeros = np.count_nonzero(variance == 0)
    if log and zeros:
        _note(ax, f"{zeros} at zero, in the lowest bin")
    ax.set(xlabel="Total predictive variance", ylabel="Share of the group (%)")
    room = 0.03 + 0.11 * len(ax.get_legend_handles_labels()[1]) if legend else 0.05
    _counts(ax, max(share.max() for share in shares), room, integer=False)
    if tau is not None and np.isfinite(tau):
        line.set_ydata([0, 1 - room])  # ends below the legend
    if legend:
        ax.legend(loc="upper left")


def plot_risk_coverage(ax, curve, risk, chosen=None, label=None, guaranteed=None, order=0):
    """Risk among the kept against coverage, with the target risk.

    Chosen and guaranteed: (coverage, risk) of the calibrated threshold and of the one with a guarantee.
    """
    look = line_style(order)
    ax.plot(curve.coverage, curve.risk, color=look["color"], linestyle=look["linestyle"], label=label)
    _target(ax, risk)
    points = {"Calibrated threshold": (chosen, look["marker"]), "Guaranteed threshold": (guaranteed, "*")}
    for name, (point, marker) in points.items():
        if point is not None:
            style = {"marker": marker, "markersize": 9 if marker == "*" else 6, "markeredgecolor": "black"}
            where = f"{name} ({point[0]:.2f}, {point[1]:.3f})"
            ax.plot(*point, linestyle="none", color=look["color"], markeredgewidth=0.7, zorder=4, label=where, **style)
    _risk_axes(ax, risk)


def plot_risk_coverage_many(ax, curves, risk, coverages=None):
    """One thin curve for each member; coverages (that of each member at the target risk) are marked as a range."""
    for number, curve in enumerate(curves):
        label = f"{len(curves)} models" if number == 0 else None
        ax.plot(curve.coverage, curve.risk, color=CORRECT, linewidth=0.5, alpha=0.45, label=label)
    _target(ax, risk)
    if coverages is not None:
        ends = np.array([np.min(coverages), np.max(coverages)])
        ax.fill_between(ends, 0, risk, color=INCORRECT, alpha=0.35, linewidth=0, zorder=0)
        label = "Coverage {:.1f}–{:.1f}%".format(*(100 * ends))
        ax.plot(ends, [risk, risk], color="black", marker="|", markersize=8, linewidth=1.6, zorder=4, label=label)
    _risk_axes(ax, risk)


def plot_ordering_comparison(ax, frame):
    """AURC of each ordering statistic with its interval. Frame: columns title, aurc, lower, upper."""
    rows = np.arange(len(frame))[::-1]
    around = np.abs(frame[["lower", "upper"]].to_numpy().T - frame["aurc"].to_numpy())
    ax.errorbar(frame["aurc"], rows, xerr=around, color=CORRECT, marker="o", linestyle="none")
    _rows(ax, rows, frame["title"])
    ax.set_xlabel(f"{METRIC_LABELS['aurc']} (less is better)")


def plot_convergence(ax, frame):
    """Relative error of alpha_0 after the fixed-point steps, against the converged estimate, by ensemble size.

    Frame: columns M, median, lower, upper (quantiles over the inputs, drawn as bars) and, optionally, title (one
    line each, moved aside a little so that the bars do not hide each other).
    """
    titles = list(dict.fromkeys(frame["title"])) if "title" in frame else [None]
    gap = np.diff(np.unique(frame["M"])).min(initial=5)
    for order, title in enumerate(titles):
        rows = (frame if title is None else frame[frame["title"] == title]).sort_values("M")
        around = np.abs(rows[["lower", "upper"]].to_numpy().T - rows["median"].to_numpy())
        aside = rows["M"] + 0.18 * gap * (order - (len(titles) - 1) / 2)
        ax.errorbar(aside, rows["median"], yerr=around, label=title, elinewidth=0.8, **line_style(order))
    ax.set_yscale("log")
    _sizes(ax, frame["M"])
    ax.set_ylabel(r"Relative error of $\alpha_0$")
    if titles != [None]:
        ax.legend()


def draw_mom_construction(figure, probs, alpha, class_names):
    """From the members' softmax vectors of one input, by their moments, to the Dirichlet (fig. ensemble_flow_figure).

    The simplex shows the two classes with the largest mean and the sum of all others; summing the parameters in
    the same way gives exactly the Dirichlet of those three, by its aggregation property.
    """
    probs = checks.probabilities(probs, axes=("members", "classes"))
    alpha = checks.real_array(alpha, "alpha", ("classes",))
    checks.same_length(probs.shape[1], len(alpha), "probs", "alpha")
    checks.same_length(probs.shape[1], len(class_names), "probs", "class_names")
    if probs.shape[1] < 3 or (alpha <= 0).any():
        raise ValueError("the simplex needs at least three classes, all with positive alpha")
    largest = np.argsort(-probs.mean(axis=0), kind="stable")
    corners = [class_names[largest[0]], class_names[largest[1]]]
    corners.append(class_names[largest[2]] if len(alpha) == 3 else f"{len(alpha) - 2} others")
    points = _merged(probs, largest)

    axes = figure.subplots(1, 5, width_ratios=(3, 0.8, 2.2, 0.8, 3))
    members, first_arrow, moments, second_arrow, density = axes
    for ax, title in ((members, f"{len(probs)} softmax vectors"), (density, "Fitted Dirichlet")):
        _simplex(ax, corners)
        ax.set_title(title, loc="center")
    _arrow(first_arrow, "moments")
    _arrow(second_arrow, "matching")
    members.plot(
        *_plane(points), linestyle="none", marker="o", color=CORRECT, markersize=3, alpha=0.6, markeredgewidth=0
    )

    shown = largest[:7]
    rows = np.arange(len(shown))[::-1]
    spread = probs[:, shown].std(axis=0, ddof=1) if len(probs) > 1 else None
    moments.errorbar(probs[:, shown].mean(axis=0), rows, xerr=spread, color="black", marker="o", linestyle="none")
    _rows(moments, rows, [_clipped(class_names[k], 20) for k in shown])
    part = "" if len(shown) == len(alpha) else f", {len(shown)} of {len(alpha)} classes"
    moments.set_title(f"Mean ± s.d.{part}", loc="center")
    moments.set_xlabel("Probability")

    _density(density, _merged(alpha, largest))
    density.plot(*_plane(points), linestyle="none", marker="o", color="black", markersize=2, markeredgewidth=0)
    # A large alpha_0 makes all regions smaller than a dot: the mean says where they are.
    density.plot(*_plane(_merged(alpha / alpha.sum(), largest)), marker="x", color=DARK_INCORRECT, markersize=5)
    text = rf"$\hat{{\alpha}}_0={_short(alpha.sum())}$; $\times$ mean; regions of 20, 50, 80, 95%"
    density.text(0.5, -0.3, text, ha="center", va="bottom", fontsize=SMALL)
    return axes


def draw_edl_network(ax):
    """From input features to a Dirichlet, its mean and its variance (fig. edl_arch)."""
    ax.set(xlim=(0, 14.3), ylim=(-2.95, 1.95), aspect="equal")
    ax.axis("off")
    heights = (1.35, 0.35, -1.35)
    hidden = [(2.2, height) for height in (1.6, 0.8, 0, -0.8, -1.6)]
    layers = {
        "Input": ([(0.5, height) for height in heights], (r"$x_1$", r"$x_2$", r"$x_d$"), "white"),
        "Logits": ([(4, height) for height in heights], (r"$z_1$", r"$z_2$", r"$z_K$"), "white"),
        "Evidence": ([(6.4, height) for height in heights], (r"$e_1$", r"$e_2$", r"$e_K$"), "#FBE9C0"),
        "Concentration": (
            [(8.9, height) for height in heights],
            (r"$\alpha_1$", r"$\alpha_2$", r"$\alpha_K$"),
            "#CFE4F2",
        ),
    }
    inputs, logits, evidence, concentrations = (places for places, _, _ in layers.values())
    for one, other in ((inputs, hidden), (hidden, logits)):
        for start in one:
            for end in other:
                ax.plot(*zip(start, end, strict=True), color="#BBBBBB", linewidth=0.5, zorder=1)
    for name, (places, texts, colour) in layers.items():
        for place, text in zip(places, texts, strict=True):
            ax.add_patch(Circle(place, 0.42, facecolor=colour, edgecolor="black", linewidth=0.7, zorder=2))
            ax.text(*place, text, ha="center", va="center", zorder=3)
        ax.text(places[0][0], -0.5, r"$\vdots$", ha="center", va="center")
        ax.text(places[0][0], -2.0, name, ha="center", va="top", fontsize=SMALL)
    for place in hidden:
        ax.add_patch(Circle(place, 0.2, facecolor="#888888", edgecolor="none", zorder=2))
    ax.text(2.2, -2.0, "Network", ha="center", va="top", fontsize=SMALL)
    for left, right, over in ((logits, evidence, r"$\phi$"), (evidence, concentrations, r"$+\,\delta$")):
        for (x, y), (end, _) in zip(left, right, strict=True):
            _connect(ax, (x + 0.45, y), (end - 0.45, y))
            ax.text((x + end) / 2, y + 0.1, over, ha="center", va="bottom")
    ax.text(5.2, -2.45, r"$e_k=\phi(z_k)\geq 0$", ha="center", va="top", fontsize=SMALL)
    ax.text(8.3, -2.45, r"$\alpha_k=e_k+\delta$", ha="center", va="top", fontsize=SMALL)
    for x, y in concentrations:
        _connect(ax, (x + 0.45, y), (10.0, 0.3 * y))
    _box(ax, (10.0, -0.5), 1.5, 1.0, r"$\mathrm{Dir}(\boldsymbol{\alpha})$")
    _connect(ax, (11.55, 0.15), (12.0, 0.85))
    _connect(ax, (11.55, -0.15), (12.0, -0.85))
    _box(ax, (12.05, 0.45), 2.2, 0.9, r"mean $\boldsymbol{\alpha}/\alpha_0$")
    _box(ax, (12.05, -1.35), 2.2, 0.9, "total variance")


def draw_confidence_example(figure, histograms, reliability, threshold=0.8, wrong_share=None):
    """Confidence histogram and reliability diagram with the words that say how to read them (fig. rel_hist_diagram)."""
    axes = figure.subplots(1, 2)
    plot_confidence_histogram(axes[0], histograms, threshold, wrong_share)
    plot_reliability(axes[1], reliability)
    for x, y, text in ((0.04, 0.95, "Underconfident"), (0.96, 0.05, "Overconfident")):
        side, edge = ("left", "top") if x < 0.5 else ("right", "bottom")
        axes[1].text(x, y, text, ha=side, va=edge, style="italic", color=QUIET)
    along = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    axes[1].text(0.08, 0.06, "Perfect calibration", va="top", fontsize=SMALL, color=QUIET, **along)
    return axes


_CYCLES = {"color": COLOURS, "marker": MARKERS, "linestyle": LINES}


def _by_correctness(correct, incorrect):
    """Name, heights and look of both groups: the right ones filled, the wrong ones hatched over them."""
    looks = (
        {"facecolor": to_rgba(CORRECT, 0.45), "edgecolor": CORRECT},
        {"facecolor": to_rgba(INCORRECT, 0.35), "edgecolor": DARK_INCORRECT, "hatch": "//////"},
    )
    for name, heights, look in zip(("Correct", "Incorrect"), (correct, incorrect), looks, strict=True):
        yield name, heights, look | {"fill": True, "linewidth": 0.7}


def _counts(ax, top, room, integer=True):
    """The value axis from zero, a share `room` of it left free above the bars; whole numbers where it counts."""
    ax.set_ylim(0, top / (1 - room) if top > 0 else 1)
    ax.yaxis.get_major_locator().set_params(integer=integer, nbins=5)


def _note(ax, text):
    """A line of text in the legend, where it can hide nothing."""
    ax.plot([], [], linestyle="none", marker="", label=text)


def _edges(variance, bins, log):
    positive = variance[variance > 0]
    if not positive.size:
        return np.geomspace(1e-12, 1, bins + 1) if log else np.linspace(0, 1, bins + 1)
    low, high = (positive.min(), positive.max()) if log else (0, variance.max())
    if log and high / low < 10:  # a single value, or nearly: a decade around it
        middle = np.sqrt(low * high)
        low, high = middle / np.sqrt(10), middle * np.sqrt(10)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    edges[[0, -1]] = low, high
    return edges


def _rows(ax, rows, titles):
    """One named row for each entry of a dot plot, with a faint line to lead the eye."""
    ax.set_yticks(rows, titles)
    ax.set_ylim(-0.6, len(rows) - 0.25)
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _sizes(ax, sizes):
    sizes = sorted(set(sizes))
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xlabel("Ensemble size $M$")


def _diagonal(ax):
    ax.plot([0, 1], [0, 1], color=QUIET, linestyle=DASHED, linewidth=0.8, zorder=1)
    ticks = np.linspace(0, 1, 6)
    ax.set(xlabel="Confidence", ylabel="Accuracy", xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks, aspect="equal")


def _target(ax, risk):
    label = f"Target risk $r={risk:g}$"
    if label not in ax.get_legend_handles_labels()[1]:
        ax.axhline(risk, color=LIMIT, linestyle=DASHED, linewidth=1, label=label)


def _risk_axes(ax, risk):
    """Both axes from zero; a first wrong input (risk 1 at coverage 1/N) does not squeeze the curve flat."""
    at_full_coverage = max(line.get_ydata()[-1] for line in ax.lines)
    top = min(max(2 * risk, 1.4 * at_full_coverage), 1)
    ax.set(xlabel="Coverage", ylabel="Risk among the retained", xlim=(0, 1), ylim=(0, top))
    ax.legend(loc="upper left")


def _short(value):
    """A number in three digits, as mathematics."""
    mantissa, exponent = f"{value:.2e}".split("e")
    if -3 <= int(exponent) <= 4:
        return f"{value:.{max(2 - int(exponent), 0)}f}"
    return rf"{mantissa}\times 10^{{{int(exponent)}}}"


def _clipped(name, length):
    return name if len(name) <= length else f"{name[: length - 1].rstrip()}…"


def _merged(values, largest):
    """The entries of the two largest classes and the sum of the others, over the last axis."""
    return np.concatenate([values[..., largest[:2]], values[..., largest[2:]].sum(axis=-1, keepdims=True)], axis=-1)


def _plane(barycentric):
    """Barycentric coordinates (..., 3) as x and y in an equilateral triangle of side 1."""
    _, right, top = np.moveaxis(np.asarray(barycentric), -1, 0)
    return right + top / 2, top * np.sqrt(3) / 2


def _simplex(ax, corners):
    ax.set(xlim=(-0.12, 1.12), ylim=(-0.31, 0.98), aspect="equal")
    ax.axis("off")
    ax.add_patch(Polygon(np.column_stack(_plane(np.eye(3))), closed=True, fill=False, edgecolor="#333333", zorder=3))
    for level in (0.2, 0.4, 0.6, 0.8):
        for axis in range(3):
            ends = np.zeros((2, 3))
            ends[:, axis] = level
            ends[0, axis - 1] = ends[1, axis - 2] = 1 - level
            ax.plot(*_plane(ends), color="#DDDDDD", linewidth=0.4, zorder=0)
    for side, (x, y), name in zip(
        ("left", "right", "center"), np.column_stack(_plane(np.eye(3))), corners, strict=True
    ):
        # A long name under a lower corner grows inwards, a short one is centred on it.
        if side != "center" and len(name) > 6:
            x += -0.1 if side == "left" else 0.1
        else:
            side = "center"
        ax.text(x, y + 0.03 if y else -0.11, _clipped(name, 16), ha=side, va="baseline", fontsize=SMALL)


def _density(ax, alpha, steps=400):
    """Regions of highest density that hold 95, 80, 50 and 20 % of the Dirichlet."""
    # The levels are quantiles of the log-density at draws from it, so they are right however narrow the peak is.
    draws = np.clip(np.random.default_rng(0).dirichlet(alpha, size=20_000), 1e-300, None)
    levels = np.unique(np.quantile(np.log(draws) @ (alpha - 1), (0.05, 0.2, 0.5, 0.8)))
    side = (np.arange(steps) + 0.5) / steps
    right, top = np.meshgrid(side, side)
    inside = right + top < 1
    grid = np.stack([1 - right - top, right, top], axis=-1)
    height = np.log(np.where(inside[..., None], grid, 1)) @ (alpha - 1)
    x, y = _plane(grid)
    ax.contourf(
        x,
        y,
        np.ma.array(height, mask=~inside),
        levels=[*levels, np.inf],
        colors=sns.color_palette("Blues", len(levels)),
    )


def _arrow(ax, text):
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.axis("off")
    _connect(ax, (0, 0.5), (1, 0.5))
    ax.text(0.5, 0.53, text, ha="center", va="bottom", fontsize=SMALL)


def _connect(ax, start, end):
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "linewidth": 0.7, "color": "black", "shrinkA": 0, "shrinkB": 0}
    )


def _box(ax, corner, width, height, text):
    style = {"boxstyle": "round,pad=0,rounding_size=0.15", "facecolor": "white", "edgecolor": "black", "linewidth": 0.7}
    ax.add_patch(FancyBboxPatch(corner, width, height, **style))
    ax.text(corner[0] + width / 2, corner[1] + height / 2, text, ha="center", va="center")
