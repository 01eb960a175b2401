"""Does the guaranteed threshold keep its promise, and what does it cost? Writes docs/benchmarks/guarantee.md.

Scores are uniform on (0, 1) (some then made to tie), errors have a known probability given the score, so the true
risk and coverage of every threshold are known. Run: python benchmarks/guarantee.py
"""

from pathlib import Path

import numpy as np
from scipy import special

from paperlib.selective import guaranteed_threshold, risk_coverage, select_threshold

GRID = (np.arange(200_000) + 0.5) / 200_000


def twelve_levels(v):
    return np.ceil(12 * v) / 12


def saturated(v):
    return np.maximum(v, 0.4)


def unchanged(v):
    return v


# Error probability given the score before ties, and the ties; the last four are hard cases.
SCENARIOS = {
    "smooth": (lambda v: 0.03 + 0.35 * v, unchanged),
    "steep": (lambda v: 0.01 + 0.6 * v**2, unchanged),
    "few errors": (lambda v: 0.1 * v**2, unchanged),
    "12 levels": (lambda v: 0.01 + 0.6 * v**2, twelve_levels),
    "40 % tied": (lambda v: 0.02 + 0.5 * v**3, saturated),
    "confident errors": (lambda v: np.where(v < 0.05, 0.3, 0.01) + 0.4 * v**2, unchanged),
    "just above r": (lambda v: np.full_like(v, 0.101), unchanged),
    "just above r, 12 levels": (lambda v: np.full_like(v, 0.101), twelve_levels),
    "bad, then good": (lambda v: np.where(v < 0.25, 0.2, 0.0) + 0.06 * v, twelve_levels),
}


def truth(scenario):
    """True coverage and true risk of a threshold, as functions of it."""
    error, tie = SCENARIOS[scenario]
    scores = tie(GRID)
    cumulative = np.append(0, np.cumsum(error(GRID))) / len(GRID)

    def coverage(tau):
        return np.searchsorted(scores, tau, side="right") / len(GRID)

    def risk(tau):
        kept = np.searchsorted(scores, tau, side="right")
        return cumulative[kept] * len(GRID) / np.maximum(kept, 1)

    return coverage, risk


def thresholds(rule, scenario, inputs, draws, seed=0):
    """Threshold that rule(uncertainty, correct) chooses on each of many calibration sets."""
    rng = np.random.default_rng(seed)
    error, tie = SCENARIOS[scenario]
    scores = rng.random((draws, inputs))
    correct = rng.random((draws, inputs)) >= error(scores)
    return np.array([rule(u, c) for u, c in zip(tie(scores), correct, strict=True)])


def union_threshold(uncertainty, correct, risk, delta):
    """Exact binomial test at every cut, each with delta / N."""
    curve = risk_coverage(uncertainty, correct)
    kept = curve.coverage * len(uncertainty)
    passed = np.flatnonzero(
        special.bdtr(np.rint(curve.risk * kept), np.rint(kept).astype(int), risk) <= delta / len(uncertainty)
    )
    return curve.threshold[passed[-1]] if passed.size else -np.inf


def binary_search_threshold(uncertainty, correct, risk, delta):
    """Exact binomial test at the cuts a binary search visits, each with delta / log2 N."""
    curve = risk_coverage(uncertainty, correct)
    kept = np.rint(curve.coverage * len(uncertainty)).astype(int)
    steps = int(np.ceil(np.log2(len(kept) + 1)))
    low, high = -1, len(kept)
    for _ in range(steps):
        middle = (low + high) // 2
        if middle > low:
            passed = special.bdtr(np.rint(curve.risk[middle] * kept[middle]), kept[middle], risk) <= delta / steps
            low, high = (middle, high) if passed else (low, middle)
    return curve.threshold[low] if low >= 0 else -np.inf


def main(draws=2000):
    rules = {
        "empirical": lambda u, c, r, d: select_threshold(u, c, r),
        "guaranteed": guaranteed_threshold,
        "union bound": union_threshold,
        "binary search": binary_search_threshold,
    }
    header = [
        "scores",
        "n",
        "r",
        "delta",
        *(f"{name}: broken" for name in rules),
        *(f"{name}: coverage" for name in rules),
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for inputs, risk, delta in [(1001, 0.1, 0.1), (300, 0.1, 0.1), (1001, 0.05, 0.05)]:
        for scenario in SCENARIOS:
            true_coverage, true_risk = truth(scenario)
            broken, coverage = [], []
            for rule in rules.values():
                taus = thresholds(lambda u, c, rule=rule, r=risk, d=delta: rule(u, c, r, d), scenario, inputs, draws)
                broken.append(np.mean(true_risk(taus) > risk))
                coverage.append(np.mean(true_coverage(taus)))
            cells = [scenario, inputs, risk, delta, *(f"{value:.3f}" for value in broken + coverage)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    page = Path(__file__).parents[1] / "docs" / "benchmarks" / "guarantee.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        "# The guaranteed threshold: promise and price\n\n"
        f"Written by `python benchmarks/guarantee.py`: {draws:,} simulated calibration sets of n inputs a row, the\n"
        "true risk and coverage of every threshold known. *Broken* is the share of the sets whose threshold has\n"
        "a true risk above r; the guaranteed rule, the union bound and the binary search promise at most delta.\n"
        "*Coverage* is the mean true coverage, 0 where the rule abstains on all.\n"
        "[The rule and its proof](../guarantee.md).\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
