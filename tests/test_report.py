"""The report: what it warns of, and in a real browser that its numbers are those of the Python functions."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest

from paperlib import ensembles, policy, report, selective

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--no-first-run"),
]
NAMES = ("ant", "bee", "<b>cow</b>", "doe")
HOSTILE = "</script><script>document.title='broken'</script>"


def simulate(inputs=3000, members=8, shift=0.0, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(NAMES), inputs)
    hard = rng.gamma(2, 0.5, inputs)[:, None] + shift * (np.arange(inputs) >= inputs // 2)[:, None]
    shared = 3 * np.eye(len(NAMES))[labels] + hard * rng.normal(size=(inputs, len(NAMES)))
    return shared + 0.5 * hard * rng.normal(size=(members, inputs, len(NAMES))), labels


def halves(inputs):
    return np.where(np.arange(inputs) < inputs // 2, "calibration", "test")


def fitted_on(logits, labels=None, split=None, **options):
    ensemble = ensembles.from_arrays(logits, "logits", labels, split, class_names=NAMES)
    return policy.fit(ensemble, aggregate="trace", **options), ensemble


def warned(logits, labels=None, split=None, **options):
    return " ".join(report.warnings(*fitted_on(logits, labels, split, **options)))


def test_an_ordinary_ensemble_has_no_warning():
    logits, labels = simulate()
    assert warned(logits, labels, halves(3000)) == ""


def test_degenerate_members_are_named():
    logits, _ = simulate(inputs=400)
    logits[2] = logits[0]
    logits[3] = logits[3, 0]
    logits[4] = logits[4][:, [1, 2, 3, 0]]
    logits[5] *= 1e4
    found = warned(logits)
    assert "member 2 says the same as predictions, member 0" in found
    assert "member 3 says the same of every input" in found
    assert "member 4 agrees with the ensemble on" in found
    assert "member 5 gives mostly probabilities of exactly 0 and 1" in found
    assert "member 1 " not in found
    assert "Only 2 members" in warned(simulate(inputs=400)[0][:2])


def test_flags_are_counted_and_explained():
    logits, _ = simulate(inputs=400)
    logits[:, :40] = logits[0, :40]
    assert "Flag NO_SPREAD on 10.0\u00a0% of the inputs" in warned(logits)


def test_small_samples_and_unreachable_targets():
    logits, labels = simulate(inputs=200)
    found = warned(logits, labels, halves(200), risk=0.01)
    assert "Only 100 calibration inputs" in found
    assert "No threshold can be guaranteed" in found


def test_a_test_set_that_differs_is_told():
    logits, labels = simulate(shift=2)
    found = warned(logits, labels, halves(3000))
    assert "test inputs are not like the calibration inputs" in found
    assert "clearly more than 10.0\u00a0%" in found


def test_an_order_worse_than_confidence_is_told():
    logits, labels = simulate()
    ensemble = ensembles.from_arrays(logits, "logits", labels)
    fitted = policy.fit(ensemble)
    mixed = np.random.default_rng(0).permutation(fitted.decisions.uncertainty)
    assert "errors come too early" in " ".join(
        report.warnings(fitted._replace(decisions=fitted.decisions._replace(uncertainty=mixed)), ensemble)
    )


def test_slider_steps_are_those_of_the_python_functions():
    logits, labels = simulate()
    fitted, _ = fitted_on(logits, labels, halves(3000), risk=0.07)
    grid = report.risk_grid(fitted)
    assert 0.07 in [step["risk"] for step in grid]
    assert len(grid) <= report.SLIDER_STEPS + 1
    u, c = fitted.decisions.uncertainty, fitted.correct
    for step in grid[:: len(grid) // 6]:
        for name, choose in (
            ("guaranteed", lambda *s: selective.guaranteed_threshold(*s, delta=0.1)),
            ("empirical", selective.select_threshold),
        ):
            tau = choose(u[:1500], c[:1500], step["risk"])
            kept = u[1500:] <= tau
            assert step[name]["tau"] == (None if np.isinf(tau) else tau)
            assert step[name]["coverage"] == kept.mean()
            assert step[name]["accuracy"] == (pytest.approx(c[1500:][kept].mean(), rel=1e-12) if kept.any() else None)


@pytest.mark.parametrize(
    "options", [{}, {"coverage": 0.7}, {"threshold": "empirical"}, {"risk": 1e-6}, {"temperature": True}]
)
def test_every_kind_of_policy_has_a_report(options):
    logits, labels = simulate(inputs=600)
    fitted, ensemble = fitted_on(logits, labels, **options)
    page, summary = report.render(fitted, ensemble)
    assert summary.headline in page
    assert fitted.policy.promise in page
    assert "no independent test" in page


def test_without_labels_the_report_ranks():
    page, summary = report.render(*fitted_on(simulate(inputs=100)[0]))
    assert "No labels" in summary.headline
    assert "<input" not in page.split("<main>")[1].split("</main>")[0]


def test_plot_is_a_figure_in_plain_colours():
    logits, labels = simulate(inputs=600)
    figure = report.plot(fitted_on(logits, labels)[0])
    assert [trace.name for trace in figure.data] == ["calibration", "guaranteed threshold", "empirical threshold"]
    assert "var(" not in figure.to_json()


def test_curves_of_many_inputs_stay_small():
    logits, labels = simulate(inputs=40_000, members=2)
    page, _ = report.render(*fitted_on(logits, labels, halves(40_000)))
    scripts = re.findall(r'<script type="application/json" class="figure".*?</script>', page, re.DOTALL)
    assert len(scripts) == 5
    assert sum(map(len, scripts)) < 200_000


def luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("theme", report.PALETTES)
def test_text_and_marks_have_enough_contrast(theme):
    palette = report.PALETTES[theme]
    pairs = itertools.product(("ground", "surface"), ("ink", "muted", "first", "second", "good", "bad"))
    for below, above in pairs:
        low, high = sorted(luminance(palette[name]) for name in (below, above))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (below, above)


# ------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    logits, labels = simulate()
    ids = np.array([f"case-{i}" for i in range(3000)])
    probe = policy.fit(ensembles.from_arrays(logits, "logits"), aggregate="trace").decisions.uncertainty
    ids = ids.astype(object)
    ids[probe.argmax()] = HOSTILE
    ensemble = ensembles.from_arrays(logits, "logits", labels, halves(3000), ids, NAMES)
    fitted = policy.fit(ensemble, aggregate="trace", temperature=True)
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(path, fitted, ensemble)
    return path, fitted


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome to drive")
    sync_api = pytest.importorskip("playwright.sync_api", reason="the playwright package is not installed")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, example):
    """Opens the report; at the end of the test nothing but the file was asked for, and the page had no error."""
    contexts, requests, errors = [], [], []

    def opened(width=1100, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(example[0].as_uri())
        page.wait_for_selector("#classes .main-svg")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
    assert set(requests) == {example[0].as_uri()}


def shown(page, name):
    cells = page.locator(f"#readout-{name} [data-field]")
    return {
        cell.get_attribute("data-field"): (json.loads(cell.get_attribute("data-value")), cell.text_content())
        for cell in cells.all()
    }


def test_slider_moved_by_keyboard_shows_the_numbers_of_the_python_functions(open_page, example):
    page, (_, fitted) = open_page(), example
    u, c = fitted.decisions.uncertainty, fitted.correct
    slider = page.get_by_role("slider")
    slider.focus()
    seen = set()
    for keys in ([], ["ArrowRight"] * 3, ["ArrowLeft"] * 9, ["End"], ["Home"]):
        for key in keys:
            page.keyboard.press(key)
        risk_text = page.locator("#target-text").text_content()
        risk = float(risk_text.split()[0]) / 100
        assert slider.get_attribute("aria-valuetext").startswith(f"{risk_text}; guaranteed: coverage ")
        for name, tau in (
            ("guaranteed", selective.guaranteed_threshold(u[:1500], c[:1500], risk, 0.1)),
            ("empirical", selective.select_threshold(u[:1500], c[:1500], risk)),
        ):
            found, kept = shown(page, name), u[1500:] <= tau
            assert found["tau"][0] == (None if np.isinf(tau) else tau)
            assert found["coverage"] == (kept.mean(), f"{100 * kept.mean():.1f}\u00a0%")
            if kept.any():
                accuracy = 1 - np.sum(kept & ~c[1500:]) / kept.sum()
                assert found["accuracy"] == (accuracy, f"{100 * accuracy:.1f}\u00a0%")
                assert found["tau"][1] == f"{tau:.5g}"
            mark = page.evaluate(
                "name => { const t = document.getElementById('risk').data.find(t => t.name === name + ' threshold');"
                " return [t.x[0], t.y[0]]; }",
                name,
            )
            assert mark[0] == kept.mean()
            seen.add((risk, tuple(found["coverage"])))
    assert len({risk for risk, _ in seen}) == 5
    assert len({coverage for _, coverage in seen}) > 3


def test_report_is_readable_on_a_phone(open_page):
    page = open_page(width=380)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    for svg in page.locator(".plot .main-svg").all():
        assert svg.bounding_box()["width"] <= 380


def test_theme_follows_the_system_and_the_button(open_page):
    def grounds(page):
        return page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, document.getElementById('risk').layout.font.color]"
        )

    light, dark = open_page(), open_page(scheme="dark")
    on_light, on_dark = grounds(light), grounds(dark)
    assert on_light[1] == report.PALETTES["light"]["ink"]
    assert on_dark[1] == report.PALETTES["dark"]["ink"]
    assert on_light[0] != on_dark[0]
    light.get_by_role("button", name="Dark").press("Enter")
    assert grounds(light) == on_dark
    assert light.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"


def test_every_figure_has_a_text_and_ids_are_only_text(open_page):
    page = open_page()
    plots = page.locator("[role=img][aria-describedby]").all()
    assert len(plots) == 5
    for plot in plots:
        text = page.locator(f"#{plot.get_attribute('aria-describedby')}").text_content()
        assert re.search(r"\d", text)
        assert page.locator(f"#{plot.get_attribute('aria-labelledby')}").text_content()
    assert page.title() != "broken"
    assert HOSTILE in page.locator("main").text_content()
    assert page.locator("main b").count() == 0
