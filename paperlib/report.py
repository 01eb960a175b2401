"""The report of a fitted policy: one HTML file that opens without a network, for a person who decides.

Every number is computed here and shown as text made here; the page's script only swaps texts and moves marks when
the target risk is moved, so the page says what the Python functions say.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from scipy import stats

from paperlib import calibration, dirichlet, policy, scores, selective

# Text and marks keep a contrast of 4.5:1 on both grounds; a test measures it.
PALETTES = {
    "light": {
        "ground": "#ffffff",
        "surface": "#f4f6f8",
        "line": "#c9d1d9",
        "ink": "#1b1f24",
        "muted": "#55606b",
        "first": "#0b5cad",
        "second": "#a34708",
        "good": "#1a6e32",
        "bad": "#b3261e",
    },
    "dark": {
        "ground": "#10151b",
        "surface": "#19212a",
        "line": "#3b4652",
        "ink": "#e6edf3",
        "muted": "#a3b0bd",
        "first": "#6cb6ff",
        "second": "#f2a56e",
        "good": "#6cc283",
        "bad": "#ff9a91",
    },
}
CURVE_POINTS, LISTED_INPUTS, LISTED_CLASSES, SLIDER_STEPS = 2000, 20, 30, 50
FEW_MEMBERS, FEW_CALIBRATION = 5, 200
TITLES = {
    "total_variance": "total variance",
    "mutual_information": "mutual information",
    "entropy": "entropy of the mean",
    "least_confidence": "1 - confidence",
}


class Summary(NamedTuple):
    """What the report says first: a sentence, some more, what could mislead, what else to know."""

    headline: str
    more: str
    warnings: tuple
    notes: tuple


def write(path, fitted, ensemble):
    """Write the report of a fitted policy on its own inputs to one HTML file; returns its Summary."""
    page, summary = render(fitted, ensemble)
    Path(path).write_text(page, encoding="utf-8")
    return summary


def render(fitted, ensemble):
    """The report as HTML text, and its Summary."""
    summary = Summary(*headline(fitted), tuple(warnings(fitted, ensemble)), tuple(_notes(fitted)))
    labelled = bool(fitted.calibration.any())
    figures = [_uncertainty_figure(fitted)]
    context = {"grid": [], "facts": _facts(fitted, ensemble), "thresholds": [], "areas": None}
    if labelled:
        context["grid"] = risk_grid(fitted)
        context["thresholds"] = [
            {"name": name, **_texts(found), "bound": found.get("bound")}
            for name, found in fitted.policy.thresholds.items()
        ]
        context["areas"] = _areas(fitted)
        figures += [_risk_figure(fitted), *_calibration_figures(fitted, ensemble)]
    if fitted.decisions.kept is not None:
        figures.append(_class_figure(fitted, ensemble))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paperlib", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.j2").render(
        **context,
        policy=fitted.policy,
        summary=summary,
        notes=(*ensemble.notes, *summary.notes),
        figures={figure["id"]: figure for figure in figures},
        evaluated=_evaluated_name(fitted),
        palettes=PALETTES,
        order=TITLES[fitted.policy.order],
        uncertain=_most_uncertain(fitted, ensemble),
        start=next((i for i, step in enumerate(context["grid"]) if step["risk"] == fitted.policy.risk), 0),
        plotly=jinja2.utils.markupsafe.Markup(get_plotlyjs()),
    )
    return page, summary


def plot(fitted, theme="light"):
    """Risk against coverage with both thresholds, as a plotly figure for a notebook."""
    if not fitted.calibration.any():
        raise policy.PolicyError("without labels there is no risk to plot")
    text = _risk_figure(fitted)["json"]
    for name, colour in PALETTES[theme].items():
        text = text.replace(f"var(--{name})", colour)
    return go.Figure(json.loads(text)).update_layout(
        paper_bgcolor=PALETTES[theme]["ground"], plot_bgcolor=PALETTES[theme]["ground"]
    )


# ------------------------------------------------------------------------------------------- in words


def percent(share, digits=1):
    """A share as text, e.g. 12.5 % (the space does not break); a dash for None."""
    return "–" if share is None else f"{100 * share:.{digits}f}\u00a0%"


def _tau_text(tau):
    return {-np.inf: "none (abstains on all)", np.inf: "no limit (keeps all)"}.get(tau, f"{tau:.5g}")


def _texts(found):
    """The numbers of policy.achieved, each with its text."""
    return found | {
        "tau": None if np.isinf(found["tau"]) else found["tau"],
        "tau_text": _tau_text(found["tau"]),
        "coverage_text": percent(found["coverage"]),
        "accuracy_text": percent(found["accuracy"]),
        "risk_text": percent(found["risk"]),
        "count_text": f"{found['kept']:,} of {found['inputs']:,} kept, {found['errors']:,} wrong",
    }


def _evaluated(fitted):
    """Where results are shown: the test inputs if there are any, else those of the calibration."""
    return fitted.test if fitted.test.any() else fitted.calibration


def _evaluated_name(fitted):
    return "test inputs" if fitted.test.any() else "calibration inputs"


def _at(fitted, tau):
    rows = _evaluated(fitted)
    return policy.achieved(fitted.decisions.uncertainty[rows], fitted.correct[rows], tau)


def headline(fitted):
    """What the classifier may do alone, and what that is worth: a sentence, and some more."""
    rule = fitted.policy
    if rule.tau is None:
        return "No labels were given: inputs are ranked by uncertainty, but no threshold can be chosen.", ""
    counted = f"{rule.calibration['inputs']:,} calibration inputs"
    if rule.thresholds[rule.threshold]["kept"] == 0:
        kind = "a guaranteed" if rule.threshold == "guaranteed" else "an"
        return (
            "Abstain on every input.",
            f"{counted} allow no threshold with {kind} error rate of at most {percent(rule.risk)}.",
        )
    sure = f"with {percent(1 - rule.delta, 0)} confidence"
    bound = percent(rule.thresholds[rule.threshold].get("bound"))
    more = {
        "guaranteed": f"The error rate among these is at most {percent(rule.risk)}, {sure}.",
        "coverage": f"The error rate among these is at most {bound}, {sure}.",
        "empirical": f"At most {percent(rule.risk)} of these were wrong on {counted}. New ones carry no promise.",
    }[rule.threshold]
    found = _at(fitted, rule.tau)
    if fitted.test.any() and found["kept"]:
        more += (
            f" On {found['inputs']:,} test inputs it kept {found['kept']:,}, of which {percent(found['risk'])} were "
            f"wrong ({_interval(found['errors'], found['kept'])})."
        )
    return f"The classifier may act alone on {percent(found['coverage'])} of the inputs.", more


def _interval(successes, trials):
    one_bin = calibration.Reliability(*(np.array([value]) for value in (0, 1, trials, 0, successes / trials)))
    low, high = (float(end[0]) for end in calibration.accuracy_intervals(one_bin))
    return f"95\u00a0%: {percent(low)} to {percent(high)}"


def _notes(fitted):
    if fitted.calibration.any() and not fitted.test.any():
        yield (
            "All labelled inputs were used for calibration, so there is no independent test: accuracy, calibration and "
            "empirical risk below are those of the inputs the threshold was chosen on."
        )
    if fitted.policy.temperature is not None:
        yield (
            f"Temperature {fitted.policy.temperature:.4g}, fitted on the calibration inputs, rescales the confidence. "
            "Order, predictions and decisions do not depend on it."
        )


def _facts(fitted, ensemble):
    members, inputs, classes = ensemble.shape
    facts = [("Members", f"{members:,}"), ("Inputs", f"{inputs:,}"), ("Classes", f"{classes:,}")]
    if not fitted.calibration.any():
        return facts
    rows = _evaluated(fitted)
    mean, labels = policy.scaled_mean(fitted.policy, fitted.decisions, rows), ensemble.labels[rows]
    right, count = int(fitted.correct[rows].sum()), int(rows.sum())
    return [
        *facts,
        ("Calibration inputs", f"{fitted.calibration.sum():,}"),
        ("Test inputs", f"{fitted.test.sum():,}"),
        ("Accuracy, all kept", percent(right / count), _interval(right, count)),
        ("Macro F1", f"{scores.macro_f1(mean, labels):.3f}"),
        ("NLL", f"{scores.nll(mean, labels):.3f}"),
        ("Calibration error (ECE)", percent(calibration.ece(mean, labels))),
    ]


def _areas(fitted):
    rows = _evaluated(fitted)
    scored = fitted.decisions.uncertainty[rows], fitted.correct[rows]
    return [
        ("AURC", f"{selective.aurc(*scored):.4f}", "area under the risk-coverage curve; smaller is better"),
        ("Excess AURC", f"{selective.excess_aurc(*scored):.4f}", "above the best possible order; 0 is best"),
        (
            "AUGRC",
            f"{selective.augrc(*scored):.4f}",
            "area under the generalised risk-coverage curve; smaller is better",
        ),
    ]


def warnings(fitted, ensemble):
    """Sentences about what could mislead: members, flags, sample sizes, parts that differ, a broken target."""
    yield from _member_warnings(fitted.sample, ensemble.files)
    decisions, rule = fitted.decisions, fitted.policy
    for flag in dirichlet.Flag:
        share = float(np.mean((decisions.flags & flag) != 0))
        if share and flag not in (dirichlet.Flag.CONSTANT_CLASS, dirichlet.Flag.SENSITIVE):
            yield f"Flag {flag.name} on {percent(share)} of the inputs: {FLAG_TEXTS[flag]}"
    if rule.tau is None:
        return
    count = rule.calibration["inputs"]
    if count < FEW_CALIBRATION:
        yield (
            f"Only {count} calibration inputs: a guarantee costs much coverage, and the empirical threshold is rough. "
            "A thousand or more are better."
        )
    if rule.thresholds["guaranteed"]["kept"] == 0:
        yield (
            f"No threshold can be guaranteed at an error rate of {percent(rule.risk)} with "
            f"{percent(1 - rule.delta, 0)} confidence: {rule.calibration['errors']} of {count} calibration inputs are "
            "wrong. Ask for a higher risk, or label more inputs."
        )
    rows = _evaluated(fitted)
    scored = {
        name: selective.aurc(values[rows], fitted.correct[rows])
        for name, values in {rule.order: decisions.uncertainty, "least_confidence": -decisions.mean.max(axis=1)}.items()
    }
    if scored[rule.order] > 1.2 * scored["least_confidence"] + 0.005:
        other = ", or another --aggregate" if rule.estimator == "mom" else ""
        yield (
            f"Ordered by {TITLES[rule.order]}, errors come too early: AURC {scored[rule.order]:.3f} on the "
            f"{_evaluated_name(fitted)}, against {scored['least_confidence']:.3f} when ordered by confidence alone. "
            f"Try --order least_confidence{other}."
        )
    score = decisions.uncertainty[fitted.calibration]
    rest = ~fitted.calibration & ~fitted.test
    for rows, name in ((fitted.test, "test inputs"), (rest, "inputs without a part in calibration or test")):
        if rows.any():
            found = stats.ks_2samp(score, decisions.uncertainty[rows], method="asymp")
            if found.pvalue < 0.01 and found.statistic > 0.05:
                yield (
                    f"The {name} are not like the calibration inputs: their uncertainties differ (Kolmogorov-Smirnov "
                    f"distance {found.statistic:.2f}, p = {found.pvalue:.1g}). The promise is for inputs like those."
                )
    if fitted.test.any():
        found = _at(fitted, rule.tau)
        target = rule.thresholds[rule.threshold].get("bound", rule.risk)
        if found["kept"] and stats.binom.sf(found["errors"] - 1, found["kept"], target) < 0.05:
            yield (
                f"On the test inputs {found['errors']} of {found['kept']} kept ones were wrong "
                f"({percent(found['risk'])}), clearly more than {percent(target)}."
            )


FLAG_TEXTS = {
    dirichlet.Flag.NO_SPREAD: "all members say the same, so the concentration is at its upper limit.",
    dirichlet.Flag.OVERDISPERSED: "members contradict each other fully; the concentration is at its lower limit.",
    dirichlet.Flag.ZERO_CLASS: "a class has probability 0 in all members, so its alpha is 0. Logits avoid that.",
    dirichlet.Flag.UNDERFLOW: "a log-probability is -inf, so the likelihood has no maximum. Logits avoid that.",
    dirichlet.Flag.CLIPPED: "probabilities of 0 were raised before taking logarithms. Logits avoid that.",
}


def _member_warnings(sample, files):
    seen = {}
    agreement = np.mean(sample.argmax(axis=2) == sample.mean(axis=0).argmax(axis=1), axis=1)
    for member, values in enumerate(sample):
        twin = seen.setdefault(np.ascontiguousarray(values).tobytes(), member)
        if twin != member:
            yield f"{files[member]} says the same as {files[twin]}: a copy adds no information and hides spread."
        elif len(values) > 1 and np.ptp(values, axis=0).max() < 1e-9:
            yield f"{files[member]} says the same of every input: is it trained?"
        elif np.mean(values.max(axis=1) == 1) > 0.5:
            yield f"{files[member]} gives mostly probabilities of exactly 0 and 1: use its logits."
        elif agreement[member] < 0.5 * np.median(agreement):
            yield (
                f"{files[member]} agrees with the ensemble on {percent(agreement[member], 0)} of the inputs, the "
                f"middle member on {percent(np.median(agreement), 0)}: are its classes or inputs in another order?"
            )
    if len(sample) < FEW_MEMBERS:
        yield f"Only {len(sample)} members: their spread, and with it alpha_0, is a rough estimate."


# ------------------------------------------------------------------------------------------- slider


def risk_grid(fitted):
    """Target risks of the slider, each with both thresholds and what they do on the inputs shown."""
    rule, rows = fitted.policy, fitted.calibration
    order = np.argsort(fitted.decisions.uncertainty[rows], kind="stable")
    uncertainty, correct = fitted.decisions.uncertainty[rows][order], fitted.correct[rows][order]
    top = min(max(2 * rule.risk, 1.2 * np.mean(~correct)), 0.99)
    step = next(width for width in (0.001, 0.002, 0.005, 0.01, 0.02) if top / width <= SLIDER_STEPS or width == 0.02)
    risks = sorted({rule.risk, *(round(step * i, 6) for i in range(1, int(np.ceil(top / step)) + 1))})
    return [
        {"risk": risk, "risk_text": percent(risk)}
        | {
            name: _texts(_at(fitted, policy.threshold_at(name, uncertainty, correct, risk, rule.delta)))
            for name in policy.THRESHOLDS
        }
        for risk in risks
        if 0 < risk < 1
    ]


# ------------------------------------------------------------------------------------------- figures


def _figure(name, title, traces, alt, columns=(), rows=(), **layout):
    axis = {
        "gridcolor": "var(--line)",
        "linecolor": "var(--muted)",
        "zerolinecolor": "var(--line)",
        "ticks": "outside",
        "tickcolor": "var(--muted)",
        "automargin": True,
        "fixedrange": True,
    }
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        font={"family": "system-ui, sans-serif", "size": 14, "color": "var(--ink)"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        height=380,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"bgcolor": "var(--surface)", "font": {"color": "var(--ink)"}},
        **layout,
    )
    figure.update_xaxes(**axis, title_font_size=14)
    figure.update_yaxes(**axis, title_font_size=14)
    return {"id": name, "title": title, "json": figure.to_json(), "alt": alt, "columns": columns, "rows": rows}


def _line(x, y, name, colour, **options):
    line = {"color": f"var(--{colour})", "width": 2} | options.pop("line", {})
    return go.Scatter(x=x, y=y, name=name, mode="lines", line=line, **options)


def _risk_figure(fitted):
    rule, decisions = fitted.policy, fitted.decisions
    traces, rows = [], []
    for part, name, colour in ((fitted.calibration, "calibration", "muted"), (fitted.test, "test", "ink")):
        if part.any():
            curve = selective.risk_coverage(decisions.uncertainty[part], fitted.correct[part])
            shown = np.unique(np.linspace(0, len(curve.risk) - 1, CURVE_POINTS).astype(int))
            dash = {"dash": "dot"} if name == "calibration" and fitted.test.any() else {}
            hover = "coverage %{x:.1%}, risk %{y:.1%}"
            traces.append(_line(curve.coverage[shown], curve.risk[shown], name, colour, line=dash, hovertemplate=hover))
    last = curve
    for share in np.arange(1, 11) / 10:
        within = np.flatnonzero(last.coverage <= share + 1e-12)
        if within.size:
            rows.append((percent(share, 0), percent(last.risk[within[-1]]), f"{last.threshold[within[-1]]:.5g}"))
    for name, colour, symbol in (("guaranteed", "first", "diamond"), ("empirical", "second", "circle")):
        found = _at(fitted, rule.thresholds[name]["tau"])
        traces.append(
            go.Scatter(
                x=[found["coverage"]],
                y=[found["risk"]],
                name=f"{name} threshold",
                mode="markers",
                marker={
                    "color": f"var(--{colour})",
                    "size": 14,
                    "symbol": symbol,
                    "line": {"color": "var(--ground)", "width": 1.5},
                },
                hovertemplate="coverage %{x:.1%}, risk %{y:.1%}",
            )
        )
    # The first few inputs kept make a spike that would flatten the rest of the curve.
    top = 1.3 * max(rule.risk, *(float(trace.y[trace.x >= 0.05].max()) for trace in traces[:-2]))
    alt = (
        f"Error rate among the kept {_evaluated_name(fitted)} against the share kept, most certain first. "
        f"Keeping all, {rows[-1][1]} are wrong. "
        + " ".join(
            f"The {name} threshold for a target of {percent(rule.risk)} keeps {percent(found['coverage'])}"
            + (f", of which {percent(found['risk'])} are wrong." if found["kept"] else ".")
            for name in policy.THRESHOLDS
            for found in [_at(fitted, rule.thresholds[name]["tau"])]
        )
    )
    target = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": rule.risk, "y1": rule.risk}
    return _figure(
        *("risk", "Risk against coverage", traces, alt, ("kept", "error rate among these", "threshold"), rows),
        xaxis={"title": "coverage: share of inputs kept", "tickformat": ".0%", "range": [0, 1.02]},
        yaxis={"title": "risk: error rate among kept", "tickformat": ".0%", "range": [0, min(top, 1.02)]},
        shapes=[target | {"line": {"color": "var(--bad)", "width": 1.5, "dash": "dash"}}],
    )


def _calibration_figures(fitted, ensemble):
    rows = _evaluated(fitted)
    labels = ensemble.labels[rows]
    scaled = policy.scaled_mean(fitted.policy, fitted.decisions, rows)
    shown = [("ensemble mean" if fitted.policy.temperature is None else "after temperature", "first", scaled)]
    if fitted.policy.temperature is not None:
        shown.append(("before temperature", "second", fitted.decisions.mean[rows]))
    traces = [_line([0, 1], [0, 1], "perfect", "muted", line={"dash": "dash", "width": 1}, hoverinfo="skip")]
    for name, colour, mean in shown:
        bins = calibration.reliability(mean, labels)
        low, high = calibration.accuracy_intervals(bins)
        traces.append(
            go.Scatter(
                x=bins.confidence,
                y=bins.accuracy,
                name=name,
                mode="lines+markers",
                line={"color": f"var(--{colour})", "width": 2},
                marker={"size": 8},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": high - bins.accuracy,
                    "arrayminus": bins.accuracy - low,
                    "color": f"var(--{colour})",
                },
                customdata=bins.count,
                hovertemplate="confidence %{x:.1%}, accuracy %{y:.1%}, %{customdata:,} inputs",
            )
        )
    bins = calibration.reliability(scaled, labels)
    low, high = calibration.accuracy_intervals(bins)
    gap = float(np.average(bins.accuracy - bins.confidence, weights=bins.count))
    tendency = (
        "about as sure as it is right"
        if abs(gap) < 0.02
        else "surer than it is right"
        if gap < 0
        else "less sure than it is right"
    )
    alt = (
        f"Accuracy of the {_evaluated_name(fitted)} by confidence, with 95 % intervals. The ensemble is {tendency}: "
        f"mean confidence {percent(np.average(bins.confidence, weights=bins.count))}, "
        f"accuracy {percent(np.average(bins.accuracy, weights=bins.count))}, "
        f"expected calibration error {percent(calibration.ece(scaled, labels))}."
    )
    cells = zip(bins.lower, bins.upper, bins.count, bins.confidence, bins.accuracy, low, high, strict=True)
    yield _figure(
        *("reliability", "Does confidence mean what it says?", traces, alt),
        ("confidence", "inputs", "mean confidence", "accuracy", "95 % interval"),
        [
            (f"{a:.1f} to {b:.1f}", f"{n:,}", percent(c), percent(d), f"{percent(e)} to {percent(f)}")
            for a, b, n, c, d, e, f in cells
        ],
        xaxis={"title": "confidence", "tickformat": ".0%", "range": [0, 1.02]},
        yaxis={"title": "accuracy", "tickformat": ".0%", "range": [0, 1.02]},
    )
    yield _histogram_figure(fitted, scaled, labels)


def _histogram_figure(fitted, mean, labels):
    found = calibration.confidence_histograms(mean, labels)
    middles = (found.edges[:-1] + found.edges[1:]) / 2
    traces = [
        go.Bar(
            x=middles,
            y=counts,
            name=name,
            marker={
                "color": f"var(--{colour})",
                "pattern": {"shape": shape, "fgcolor": "var(--ground)", "size": 6, "fillmode": "overlay"},
            },
            hovertemplate="confidence about %{x:.0%}: %{y:,} inputs",
        )
        for name, counts, colour, shape in (
            ("right", found.correct, "good", ""),
            ("wrong", found.incorrect, "bad", "/"),
        )
    ]
    error = calibration.high_confidence_error(mean, labels)
    above = (
        "no prediction has a confidence above 80 %"
        if np.isnan(error)
        else f"of predictions with a confidence above 80 %, {percent(error)} are wrong"
    )
    return _figure(
        *("histogram", "Confidence of right and wrong predictions", traces),
        f"Number of right and wrong predictions by confidence: {found.correct.sum():,} right, "
        f"{found.incorrect.sum():,} wrong; {above}.",
        ("confidence", "right", "wrong"),
        [
            (f"{a:.1f} to {b:.1f}", f"{right:,}", f"{wrong:,}")
            for a, b, right, wrong in zip(
                found.edges[:-1], found.edges[1:], found.correct, found.incorrect, strict=True
            )
            if right or wrong
        ],
        barmode="stack",
        bargap=0.06,
        xaxis={"title": "confidence", "tickformat": ".0%", "range": [0, 1]},
        yaxis={"title": "inputs"},
    )


def _uncertainty_figure(fitted):
    score = fitted.decisions.uncertainty
    edges = np.histogram_bin_edges(score, 40)
    parts = [
        (fitted.calibration, "calibration", "muted"),
        (fitted.test, "test", "first"),
        (~fitted.calibration & ~fitted.test, "other inputs" if fitted.calibration.any() else "inputs", "second"),
    ]
    traces = []
    for rows, name, colour in parts:
        if rows.any():
            share = np.histogram(score[rows], edges)[0] / rows.sum()
            traces.append(
                _line(np.repeat(edges, 2)[1:-1], np.repeat(share, 2), name, colour, hovertemplate="%{x:.3g}: %{y:.1%}")
            )
    low, middle, high = np.quantile(score, (0.05, 0.5, 0.95))
    order = TITLES[fitted.policy.order]
    alt = f"Distribution of the {order}: median {middle:.3g}, 5 % of inputs are below {low:.3g}, 5 % above {high:.3g}."
    tau, shapes = fitted.policy.tau, []
    if tau is not None and np.isfinite(tau):
        alt += f" Inputs up to the threshold {tau:.5g} are kept."
        line = {"color": "var(--bad)", "width": 1.5, "dash": "dash"}
        shapes = [{"type": "line", "yref": "paper", "x0": tau, "x1": tau, "y0": 0, "y1": 1, "line": line}]
    return _figure(
        *("uncertainty", "How uncertain the inputs are", traces, alt),
        xaxis={"title": order},
        yaxis={"title": "share of inputs", "tickformat": ".0%", "rangemode": "tozero"},
        showlegend=True,
        shapes=shapes,
    )


def _class_figure(fitted, ensemble):
    decisions, classes = fitted.decisions, ensemble.shape[2]
    count = np.bincount(decisions.predicted, minlength=classes)
    abstained = np.bincount(decisions.predicted[~decisions.kept], minlength=classes)
    share = abstained / np.maximum(count, 1)
    order = np.argsort(-share, kind="stable")
    order = order[count[order] > 0][:LISTED_CLASSES]
    names = np.array(ensemble.class_names)
    bounds = fitted.policy.class_bounds
    listed = names[order[::-1]]
    traces = [
        go.Bar(
            x=share[order[::-1]],
            y=[f"{name} " for name in listed],
            orientation="h",
            marker={"color": "var(--first)"},
            hovertemplate="%{y}: %{x:.1%} abstained",
        )
    ]

    def bound(k):
        value = bounds[k]["bound"]
        return "too few kept" if value is None or value > 0.99 else f"at most {percent(value)}"

    figure = _figure(
        *("classes", "Abstention by predicted class", traces),
        f"Share of all inputs abstained on, by predicted class. Most: {names[order[0]]} ({percent(share[order[0]])}); "
        f"least: {names[order[-1]]} ({percent(share[order[-1]])}).",
        ("predicted class", "inputs", "abstained", "kept in calibration", "of these wrong", "true error rate"),
        [
            (
                names[k],
                f"{count[k]:,}",
                percent(share[k]),
                f"{bounds[k]['kept']:,}",
                f"{bounds[k]['errors']:,}",
                bound(k),
            )
            for k in order
        ],
        xaxis={"title": "share abstained", "tickformat": ".0%", "range": [0, min(1.02, max(0.1, 1.2 * share.max()))]},
        yaxis={"type": "category"},
    )
    layout = json.loads(figure["json"])
    layout["layout"]["height"] = max(220, 90 + 26 * len(order))
    return figure | {"json": json.dumps(layout)}


def _most_uncertain(fitted, ensemble):
    decisions, names = fitted.decisions, ensemble.class_names
    rows = np.argsort(-decisions.uncertainty, kind="stable")[:LISTED_INPUTS]
    flags = decisions.flag_names(rows)
    return [
        {
            "id": ensemble.ids[row],
            "uncertainty": f"{decisions.uncertainty[row]:.5g}",
            "predicted": names[decisions.predicted[row]],
            "confidence": percent(decisions.confidence[row]),
            "label": "–" if ensemble.labels is None or ensemble.labels[row] < 0 else names[ensemble.labels[row]],
            "flags": flag.replace("|", ", ").lower().replace("_", " "),
        }
        for row, flag in zip(rows, flags, strict=True)
    ]
