"""Figures: labelled, drawn from all of their data, the same bytes each time, and not told by colour alone."""

import itertools
import os
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

mpl.use("Agg")

import matplotlib.pyplot as plt

from paperlib import calibration, plots, selective

RISK = 0.1


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        plots.use_style()
        yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.figure(figsize=(plots.COLUMN_WIDTH, 2.5)).add_subplot()


@pytest.fixture(scope="module")
def members():
    """Softmax outputs (members, inputs, classes) of a task that is neither trivial nor hopeless, with labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 300)
    logits = rng.normal(size=(300, 4)) + 2 * np.eye(4)[labels] + 0.5 * rng.normal(size=(12, 300, 4))
    odds = np.exp(2 * logits)
    return odds / odds.sum(axis=-1, keepdims=True), labels


@pytest.fixture(scope="module")
def probs(members):
    return members[0].mean(axis=0)


@pytest.fixture(scope="module")
def histograms(members, probs):
    return calibration.confidence_histograms(probs, members[1])


@pytest.fixture(scope="module")
def table(members, probs):
    return calibration.reliability(probs, members[1])


@pytest.fixture(scope="module")
def variance(probs):
    return (1 - (probs**2).sum(axis=1)) / 30


@pytest.fixture(scope="module")
def correct(members, probs):
    return probs.argmax(axis=1) == members[1]


def texts(ax):
    legend = ax.get_legend()
    return [text.get_text() for text in [*ax.texts, *(legend.get_texts() if legend else [])] if text.get_text()]


def assert_labelled(ax):
    """Both axes say what they show, in sentence case, and everything can be drawn at a column's width."""
    for text in (ax.get_xlabel(), ax.get_ylabel()):
        assert text and (text[0].isupper() or text[0] == "$")
        assert text.split()[1:] == [word for word in text.split()[1:] if word in {"F1", "$M$"} or not word.istitle()]
    ax.figure.draw_without_rendering()


def heights(ax):
    return [patch.get_data().values for patch in ax.patches]


# Style and palette


def test_style_embeds_fonts_and_keeps_sizes():
    assert mpl.rcParams["pdf.fonttype"] == 42
    sizes = [mpl.rcParams[name] for name in ("font.size", "axes.labelsize", "xtick.labelsize", "legend.fontsize")]
    assert all(8 <= size <= 9 for size in sizes) and plots.SMALL == 8
    assert mpl.rcParams["figure.constrained_layout.use"]
    assert not mpl.rcParams["axes.spines.top"]
    assert mpl.rcParams["figure.figsize"][0] == plots.COLUMN_WIDTH


def test_style_cycle_is_the_palette():
    assert [to_rgb(colour) for colour in mpl.rcParams["axes.prop_cycle"].by_key()["color"]] == [
        to_rgb(colour) for colour in plots.COLOURS
    ]


def lab(linear):
    """CIE L*a*b* of linear sRGB, D65."""
    xyz = linear @ np.array([[0.4124, 0.2126, 0.0193], [0.3576, 0.7152, 0.1192], [0.1805, 0.0722, 0.9505]])
    f = np.cbrt(xyz / np.array([0.9505, 1, 1.089]) + 1e-9)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def linear(colour):
    value = np.array(to_rgb(colour))
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


# Machado, Oliveira and Fernandes (2009), full severity.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def distance(one, other, vision):
    seen = (lab(np.clip(np.asarray(VISIONS[vision]) @ linear(colour), 0, 1)) for colour in (one, other))
    return np.linalg.norm(next(seen) - next(seen))


def test_the_measure_of_distance_tells_red_from_green_only_with_normal_vision():
    red, green = "#C23B22", "#5F7A1E"
    assert distance(red, green, "normal") > 50 > 25 > distance(red, green, "deuteranopia")


@pytest.mark.parametrize("vision", VISIONS)
def test_palette_is_told_apart_by_every_vision(vision):
    """Distances in CIE L*a*b*: 2.3 is just noticeable; what means right, wrong and limit must be far apart."""
    for one, other in itertools.combinations(plots.COLOURS, 2):
        assert distance(one, other, vision) > 15, (one, other)
    assert distance(plots.CORRECT, plots.INCORRECT, vision) > 40
    assert distance(plots.LIMIT, plots.CORRECT, vision) > 40
    assert distance(plots.LIMIT, plots.INCORRECT, vision) > 30


def test_series_differ_without_colour():
    looks = [plots.line_style(order) for order in range(len(plots.COLOURS))]
    for name in ("marker", "linestyle", "color"):
        assert len({look[name] for look in looks}) == len(looks)


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_sequential_colours_darken_in_order(count):
    lightness = [lab(linear(colour))[0] for colour in plots.sequential(count)]
    assert len(lightness) == count and (np.diff(lightness) < 0).all() and lightness[0] < 90


# Saving


def test_saved_bytes_do_not_change(tmp_path):
    """Also in another process at another time with another hash seed, where sets have another order."""
    program = (
        "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot as plt\n"
        "from paperlib import plots; plots.use_style(); figure, ax = plt.subplots()\n"
        "plots.plot_score_frequencies(ax, [0.1, 0.2, 0.2, 0.9], 'Automobile λ₀'); plots.save(figure, stem)"
    )
    exec(program, {"stem": tmp_path / "here"})
    environment = os.environ | {"PYTHONHASHSEED": "1", "SOURCE_DATE_EPOCH": str(10**9)}
    elsewhere = f"stem = {str(tmp_path / 'there')!r}\n{program}"
    subprocess.run([sys.executable, "-c", elsewhere], check=True, env=environment)
    for kind in ("pdf", "png"):
        assert (tmp_path / f"here.{kind}").read_bytes() == (tmp_path / f"there.{kind}").read_bytes()


def test_saved_files_are_vector_and_picture(tmp_path, ax, histograms):
    plots.plot_confidence_histogram(ax, histograms, wrong_share=0.05)
    pdf, png = plots.save(ax.figure, tmp_path / "new" / "figure_0.8")
    assert (pdf.name, png.name) == ("figure_0.8.pdf", "figure_0.8.png")
    assert len(list(pdf.parent.iterdir())) == 2
    content = pdf.read_bytes()
    assert b"/Subtype /Type3" not in content and b"/FontFile2" in content and b"/CreationDate" not in content
    assert b"/Subtype /Image" not in content
    assert plt.imread(png).shape[:2] == (500, 700)


# Plots


def test_score_frequencies_count_every_member(ax):
    scores = np.random.default_rng(0).beta(2, 3, 100)
    plots.plot_score_frequencies(ax, scores, "Automobile")
    assert sum(patch.get_height() for patch in ax.patches) == 100
    assert texts(ax) == [f"mean {scores.mean():.2f}\ns.d. ${scores.std(ddof=1):.3f}$"]
    assert ax.get_title(loc="left") == "Automobile" and ax.get_xlim() == (0, 1)
    assert_labelled(ax)


def test_score_frequencies_of_one_member(ax):
    plots.plot_score_frequencies(ax, [1.0], "Deer")
    assert texts(ax) == ["mean 1.00\ns.d. –"]
    assert sum(patch.get_height() for patch in ax.patches) == 1


def test_metric_by_recipe_labels_every_value(ax):
    frame = pd.DataFrame(
        {"title": ["MSE Only", "Digamma", "Cross-entropy"], "mean": [0.7, 0.75, 0.8], "std": [0.01, 0.02, np.nan]}
    )
    plots.plot_metric_by_recipe(ax, frame, "accuracy", beside=["Cross-entropy"])
    assert texts(ax) == ["0.700 ± 0.010", "0.750 ± 0.020", "0.800"]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(frame["title"])
    points = [line for line in ax.lines if line.get_marker() in "oD"]
    assert [line.get_xdata()[0] for line in points] == list(frame["mean"])
    assert [line.get_marker() for line in points] == ["o", "o", "D"]
    rows = [line.get_ydata()[0] for line in points]
    assert rows == sorted(rows, reverse=True)
    assert ax.get_xlabel() == "Accuracy"


def test_confidence_histogram_shows_counts_threshold_and_share(ax, histograms):
    plots.plot_confidence_histogram(ax, histograms, threshold=0.8, wrong_share=0.0532)
    shown = heights(ax)
    np.testing.assert_array_equal(shown, [histograms.correct, histograms.incorrect])
    assert [bool(patch.get_hatch()) for patch in ax.patches] == [False, True]
    (line,) = ax.lines
    assert line.get_xdata()[0] == 0.8 and line.get_color() == plots.LIMIT and line.is_dashed()
    assert texts(ax) == ["5.3% wrong\nabove 0.8", "Correct", "Incorrect"]
    assert ax.get_ylim()[1] > max(histograms.correct.max(), histograms.incorrect.max())
    assert_labelled(ax)


def test_confidence_histogram_without_confident_or_any_wrong_predictions(ax):
    empty = calibration.Histograms(np.linspace(0, 1, 11), np.zeros(10, int), np.zeros(10, int))
    plots.plot_confidence_histogram(ax, empty, wrong_share=float("nan"), legend=False)
    assert texts(ax) == ["none\nabove 0.8"]
    assert_labelled(ax)


def test_reliability_with_intervals(ax, table):
    plots.plot_reliability(ax, table, intervals=calibration.accuracy_intervals(table), label="MoM")
    diagonal, curve = ax.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_array_equal(curve.get_xydata(), np.column_stack([table.confidence, table.accuracy]))
    assert len(ax.collections[0].get_segments()) == len(table.count)
    assert ax.get_aspect() == 1
    assert_labelled(ax)


def test_reliability_band_is_one_standard_deviation_and_stays_in_the_square(ax):
    plots.plot_reliability(ax, plots.Band(np.array([0.3, 0.6, 0.9]), np.array([0.2, 0.6, 0.98]), np.full(3, 0.1)))
    edges = ax.collections[0].get_paths()[0].vertices
    for confidence, low, high in ((0.3, 0.1, 0.3), (0.6, 0.5, 0.7), (0.9, 0.88, 1.0)):
        found = edges[np.isclose(edges[:, 0], confidence), 1]
        assert (found.min(), found.max()) == pytest.approx((low, high))


def test_reliability_by_size_has_a_curve_a_size(ax, table):
    plots.plot_reliability_by_size(ax, {5: table, 50: table})
    assert texts(ax) == ["$M=5$", "$M=50$"]
    assert len(ax.lines) == 3 and ax.lines[1].get_marker() != ax.lines[2].get_marker()
    assert_labelled(ax)


def test_metric_by_size_keeps_equal_estimators_visible(ax):
    sizes = [5, 10, 50]
    frame = pd.concat(
        pd.DataFrame({"estimator": name, "M": sizes, "mean": [0.7, 0.75, 0.8]}) for name in ("MoM", "Plain")
    )
    plots.plot_metric_by_size(ax, frame, "nll")
    front, back = ax.lines
    assert front.get_zorder() > back.get_zorder() and front.get_markersize() < back.get_markersize()
    assert back.get_markerfacecolor() == "none"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["5", "10", "50"]
    assert texts(ax) == ["MoM", "Plain"]
    assert_labelled(ax)


def test_history_draws_every_run_and_chance(ax):
    frame = pd.DataFrame({"epoch": [1, 2, 3], "alpha0": [10.0, 1e3, 1e7]})
    plots.plot_history(ax, {"Annealed": frame, "No KL": frame.head(1)}, "alpha0", log=True, chance=0.01)
    assert texts(ax) == ["Annealed", "No KL", "Chance"]
    assert ax.get_yscale() == "log"
    assert ax.lines[1].get_marker() != ""  # a single epoch is a point, not an invisible line
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
    assert_labelled(ax)


def test_variance_histogram_is_by_group_and_complete(ax, variance, correct):
    plots.plot_variance_histogram(ax, variance, correct, tau=0.01)
    assert [share.sum() for share in heights(ax)] == pytest.approx([100, 100])
    assert texts(ax) == [f"Correct ($n={correct.sum()}$)", f"Incorrect ($n={(~correct).sum()}$)", r"$\tau=0.0100$"]
    assert ax.get_xscale() == "log" and ax.lines[0].get_xdata()[0] == 0.01
    assert_labelled(ax)


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    ("values", "right"), [([0, 0, 0.01], [1, 0, 1]), ([0, 0, 0], [1, 1, 0]), ([1e-9], [1]), ([0.2, 0.2], [0, 0])]
)
def test_variance_histogram_of_hard_cases_loses_nothing(ax, values, right, log):
    plots.plot_variance_histogram(ax, np.array(values), np.array(right), tau=-np.inf, log=log)
    shares = [share.sum() for share in heights(ax)]
    assert shares == pytest.approx([100.0 * (1 in right), 100.0 * (0 in right)])
    zeros = values.count(0)
    assert (f"{zeros} at zero, in the lowest bin" in texts(ax)) == (log and zeros > 0)
    assert r"$\tau=-\infty$: abstains on all" in texts(ax)
    assert_labelled(ax)


def test_variance_histogram_refuses_bad_input(ax):
    with pytest.raises(ValueError, match=r"variance\[1\] is negative"):
        plots.plot_variance_histogram(ax, [0.1, -0.1], [1, 0])
    with pytest.raises(ValueError, match="correct has 1"):
        plots.plot_variance_histogram(ax, [0.1, 0.2], [1])


def test_risk_coverage_marks_the_target_once(ax, variance, correct):
    curve = selective.risk_coverage(variance, correct)
    plots.plot_risk_coverage(ax, curve, RISK, chosen=(0.6, 0.09), label="MoM", guaranteed=(0.4, 0.05))
    plots.plot_risk_coverage(ax, curve, RISK, label="Digamma", order=1)
    assert texts(ax) == [
        "MoM",
        "Target risk $r=0.1$",
        "Calibrated threshold (0.60, 0.090)",
        "Guaranteed threshold (0.40, 0.050)",
        "Digamma",
    ]
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.column_stack([curve.coverage, curve.risk]))
    assert ax.get_xlim() == (0, 1) and ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > curve.risk[-1]
    assert_labelled(ax)


def test_first_wrong_input_does_not_squeeze_the_risk_axis(ax):
    correct = np.ones(200)
    correct[[0, 50, 90]] = 0
    plots.plot_risk_coverage(ax, selective.risk_coverage(np.arange(200.0), correct), RISK)
    assert ax.get_ylim() == (0, 0.2)


def test_many_risk_coverage_curves_and_their_range(ax, members):
    scores = 1 - (members[0] ** 2).sum(axis=2)
    right = members[0].argmax(axis=2) == members[1]
    curves = [selective.risk_coverage(*pair) for pair in zip(scores, right, strict=True)]
    plots.plot_risk_coverage_many(ax, curves, RISK, coverages=[0.5639, 0.6926])
    assert len(ax.lines) == len(curves) + 2
    assert texts(ax) == ["12 models", "Target risk $r=0.1$", "Coverage 56.4–69.3%"]
    assert_labelled(ax)


def test_ordering_comparison_draws_intervals(ax):
    frame = pd.DataFrame(
        {"title": ["Total variance", "Entropy"], "aurc": [0.08, 0.09], "lower": [0.07, 0.06], "upper": [0.1, 0.1]}
    )
    plots.plot_ordering_comparison(ax, frame)
    segments = ax.containers[0].lines[2][0].get_segments()
    assert [segment[:, 0].tolist() for segment in segments] == [pytest.approx([0.07, 0.1]), pytest.approx([0.06, 0.1])]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["Total variance", "Entropy"]


@pytest.mark.parametrize("titles", [None, ["CIFAR-10", "APTOS"]])
def test_convergence_is_on_a_log_axis(ax, titles):
    one = pd.DataFrame({"M": [5, 10, 50], "median": [1, 0.5, 0.1], "lower": [0.1, 0.1, 0.01], "upper": [9, 5, 1.0]})
    frame = one if titles is None else pd.concat(one.assign(title=title) for title in titles)
    plots.plot_convergence(ax, frame)
    assert len(ax.containers) == (1 if titles is None else 2)
    assert ax.get_yscale() == "log" and texts(ax) == (titles or [])
    assert_labelled(ax)


# Diagrams, legends and panel names


def test_mom_construction_shows_members_moments_and_density(members):
    figure = plt.figure(figsize=(plots.PAGE_WIDTH, 2.3))
    probs = members[0][:, 0]
    left, _, middle, _, right = plots.draw_mom_construction(figure, probs, 8 * probs.mean(axis=0), list("abcd"))
    largest = np.argsort(-probs.mean(axis=0))
    x, y = left.lines[-1].get_data()
    top = probs[:, largest[2:]].sum(axis=1)
    np.testing.assert_allclose(y, top * np.sqrt(3) / 2)
    np.testing.assert_allclose(x, probs[:, largest[1]] + top / 2)
    assert [label.get_text() for label in middle.get_yticklabels()] == [list("abcd")[k] for k in largest]
    assert right.collections and middle.get_xlabel() == "Probability"
    assert any("8.00" in text for text in texts(right)) and "2 others" in texts(left)
    figure.draw_without_rendering()


@pytest.mark.parametrize("scale", [0.5, 3, 1e6])
def test_mom_construction_of_flat_and_sharp_dirichlets(members, scale):
    probs = np.full((1, 12), 1 / 12)
    figure = plt.figure(figsize=(plots.PAGE_WIDTH, 2.3))
    plots.draw_mom_construction(figure, probs, scale * probs[0], [f"a class with a long name {k}" for k in range(12)])
    figure.draw_without_rendering()


def test_density_regions_hold_their_share(ax):
    """The outermost contour of a Dirichlet with known draws encloses 95 % of them."""
    alpha = np.array([6.0, 3.0, 2.0])
    plots._density(ax, alpha)
    draws = np.random.default_rng(1).dirichlet(alpha, 5000)
    points = np.column_stack(plots._plane(draws))
    inside = [np.zeros(len(points), bool)]
    for contours in ax.collections:
        inside += [path.contains_points(points) for path in contours.get_paths()]
    assert np.any(inside, axis=0).mean() == pytest.approx(0.95, abs=0.01)


def test_mom_construction_refuses_two_classes():
    with pytest.raises(ValueError, match="three classes"):
        plots.draw_mom_construction(plt.figure(), np.full((3, 2), 0.5), np.ones(2), ["a", "b"])


def test_edl_network_names_every_stage(ax):
    plots.draw_edl_network(ax)
    shown = " ".join(texts(ax))
    for stage in ("x_1", "Network", "z_K", r"\phi", "e_K", r"\delta", r"\alpha_K", "Dir", "mean", "variance"):
        assert stage in shown


def test_confidence_example_says_how_to_read_it(histograms, table):
    left, right = plots.draw_confidence_example(plt.figure(figsize=(5.7, 2.5)), histograms, table, wrong_share=0.05)
    places = {text.get_text(): text.get_position() for text in right.texts}
    assert places["Underconfident"][1] > places["Underconfident"][0]
    assert places["Overconfident"][1] < places["Overconfident"][0]
    for ax in (left, right):
        assert_labelled(ax)


def test_shared_legend_and_panel_names(histograms):
    figure, axes = plt.subplots(1, 2, figsize=(plots.PAGE_WIDTH, 2))
    for ax, title in zip(axes, ("MSE Only", ""), strict=True):
        plots.plot_confidence_histogram(ax, histograms)
        ax.set_title(title)
    legend = plots.shared_legend(figure, axes)
    plots.name_panels(axes)
    assert [text.get_text() for text in legend.get_texts()] == ["Correct", "Incorrect"]
    assert [ax.get_legend() for ax in axes] == [None, None]
    assert [ax.get_title(loc="left") for ax in axes] == ["(a) MSE Only", "(b)"]
