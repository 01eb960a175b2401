"""The decision policy of an ensemble: from its predictions to Dirichlets, an order, a threshold and a promise.

`fit` makes it from an Ensemble (paperlib.ensembles), `apply` uses it on new predictions of the same ensemble, `save`
and `load` keep it as JSON (docs/own-ensemble.md lists the fields). Inputs are worked on in blocks and do not affect
each other, so the same predictions give the same decisions.

The order of the inputs comes from the members alone, never from labels: only therefore may the threshold be chosen
on all calibration inputs and keep its promise. A temperature is fitted to the labels; it rescales the confidence
that is reported and touches neither order nor decisions.
"""

import json
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special

from paperlib import calibration, checks, dirichlet, selective
from paperlib.errors import UserError

FORMAT = "paperlib policy 1"
ESTIMATORS = ("mom", "mle")
ORDERS = ("total_variance", "mutual_information", "entropy", "least_confidence")
THRESHOLDS = ("guaranteed", "empirical")
# Inputs whose member outputs are kept, spread over all: for telling degenerate members.
SAMPLED = 2000


class PolicyError(UserError):
    """A policy that cannot be made or does not go with the predictions; the message says why."""


@dataclass(frozen=True)
class Policy:
    """How to decide, and what was promised; the fields of the JSON file. Without labels there is no threshold."""

    kind: str
    members: int
    classes: int
    class_names: tuple | None
    estimator: str
    aggregate: str
    order: str
    temperature: float | None = None
    threshold: str | None = None
    tau: float | None = None
    promise: str = "none: there were no labels"
    risk: float | None = None
    delta: float | None = None
    coverage: float | None = None
    calibration: dict | None = None
    thresholds: dict | None = None
    class_bounds: tuple | None = None
    versions: dict | None = None


class Decisions(NamedTuple):
    """What the policy says of N inputs; kept is None without a threshold. alpha is alpha_0 times mean."""

    order: str
    predicted: np.ndarray
    confidence: np.ndarray
    alpha_0: np.ndarray
    mean: np.ndarray
    total_variance: np.ndarray
    mutual_information: np.ndarray
    flags: np.ndarray
    uncertainty: np.ndarray
    kept: np.ndarray | None

    def flag_names(self, rows=slice(None)):
        """Flags of some inputs as text, '' for an ordinary one."""
        values, index = np.unique(self.flags[rows], return_inverse=True)
        names = ["|".join(flag.name for flag in dirichlet.Flag if flag & int(value)) for value in values]
        return np.array(names)[index]


class Fitted(NamedTuple):
    """A policy, its decisions on the inputs it was fitted with, and which of these had what part in it.

    correct (N,) is False where there is no label; calibration and test (N,) mark labelled inputs only. sample
    (M, S, K) are member probabilities of inputs spread over all.
    """

    policy: Policy
    decisions: Decisions
    correct: np.ndarray
    calibration: np.ndarray
    test: np.ndarray
    sample: np.ndarray


# ------------------------------------------------------------------------------------------- fit and apply


def fit(
    ensemble,
    estimator="mom",
    aggregate="mean",
    order="total_variance",
    risk=0.1,
    delta=0.1,
    threshold="guaranteed",
    coverage=None,
    temperature=False,
    progress=iter,
):
    """Policy of an ensemble: threshold at a target risk, or at a coverage if one is given, from its labelled inputs.

    Without a split all labelled inputs are for calibration. progress wraps the list of blocks, e.g. tqdm.
    """
    try:
        for name, value, allowed in (
            ("estimator", estimator, ESTIMATORS),
            ("aggregate", aggregate, tuple(dirichlet.AGGREGATES)),
            ("order", order, ORDERS),
            ("threshold", threshold, THRESHOLDS),
        ):
            checks.choice(name, value, allowed)
        checks.inside(risk, "risk", 0, 1)
        checks.inside(delta, "delta", 0, 1)
        if coverage is not None and not 0 < coverage <= 1:
            raise ValueError(f"coverage must lie in (0, 1], got {coverage}")
    except ValueError as error:
        raise PolicyError(str(error)) from None
    members, inputs, classes = ensemble.shape
    policy = Policy(
        *(ensemble.kind, members, classes, ensemble.class_names if ensemble.classes_are_named else None),
        *(estimator, aggregate, order),
        versions={name: version(name) for name in ("paperlib", "numpy", "scipy")}
        | {"python": platform.python_version()},
    )
    decisions, sample = _statistics(policy, ensemble, progress)
    labelled = np.zeros(inputs, bool) if ensemble.labels is None else ensemble.labels >= 0
    correct = labelled & (decisions.predicted == (-1 if ensemble.labels is None else ensemble.labels))
    parts = (labelled, np.zeros(inputs, bool))
    if ensemble.calibration is not None:
        parts = (labelled & ensemble.calibration, labelled & ensemble.test)
    if not parts[0].any():
        if labelled.any() or ensemble.calibration is not None:
            raise PolicyError(
                "no calibration input has a label, so no threshold can be chosen; give labels, or no split"
            )
        return Fitted(policy, decisions, correct, *parts, sample)

    rows = parts[0]
    policy = _with_threshold(
        policy, decisions.uncertainty[rows], correct[rows], decisions.predicted[rows], risk, delta, threshold, coverage
    )
    if temperature:
        policy = replace(
            policy, temperature=calibration.fit_temperature(_log(decisions.mean[rows]), ensemble.labels[rows])
        )
    return Fitted(policy, _decided(policy, decisions), correct, *parts, sample)


def apply(policy, ensemble, progress=iter):
    """Decisions of a policy on predictions of the ensemble it was fitted for."""
    members, _, classes = ensemble.shape
    if classes != policy.classes:
        raise PolicyError(f"{ensemble.files[0]}: {classes} classes, but the policy is for {policy.classes}")
    if ensemble.classes_are_named and policy.class_names:
        for position, (found, expected) in enumerate(zip(ensemble.class_names, policy.class_names, strict=True)):
            if found != expected:
                raise PolicyError(
                    f"{ensemble.files[0]}: class {position} is {found!r}, but {expected!r} in the policy; "
                    f"bring the classes into the order {', '.join(policy.class_names)}"
                )
    if members != policy.members:
        raise PolicyError(
            f"{ensemble.files[0]}: {members} members, but the policy is for {policy.members}; "
            "concentrations of another ensemble are not comparable: give all its members, or fit anew"
        )
    return _decided(policy, _statistics(policy, ensemble, progress)[0])


def _statistics(policy, ensemble, progress):
    """Decisions without temperature and threshold, and the sampled member probabilities."""
    _, inputs, classes = ensemble.shape
    found = Decisions(
        policy.order,
        np.empty(inputs, np.int64),
        *(np.empty(inputs) for _ in range(2)),
        np.empty((inputs, classes)),
        *(np.empty(inputs) for _ in range(2)),
        np.empty(inputs, np.int64),
        np.empty(inputs),
        None,
    )
    stride, sample = -(-inputs // SAMPLED), []
    for rows in progress(ensemble.blocks):
        values = ensemble.read(rows)
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                fitted = _dirichlets(values, ensemble.kind, policy)
        except ValueError as error:
            raise ensemble.first_problem(rows, values) or error from None
        mean = fitted.mean
        found.predicted[rows], found.confidence[rows] = mean.argmax(axis=1), mean.max(axis=1)
        found.alpha_0[rows], found.mean[rows], found.flags[rows] = fitted.alpha0, mean, fitted.flags
        found.total_variance[rows] = fitted.total_variance
        found.mutual_information[rows] = fitted.mutual_information
        found.uncertainty[rows] = (
            1 - mean.max(axis=1) if policy.order == "least_confidence" else getattr(fitted, policy.order)
        )
        # A copy: a view would keep the block.
        sample.append(_probs(values[:, -rows.start % stride :: stride].copy(), ensemble.kind))
    return found, np.concatenate(sample, axis=1)


def _dirichlets(values, kind, policy):
    if policy.estimator == "mom":
        return dirichlet.fit_moments(_probs(values, kind), policy.aggregate)
    if kind == "probs":
        return dirichlet.MomentAccumulator().add(values).fit_mle()
    return dirichlet.fit_mle(values if kind == "log_probs" else special.log_softmax(values.astype(np.float64), axis=-1))


def _probs(values, kind):
    if kind == "probs":
        return values
    return np.exp(values) if kind == "log_probs" else special.softmax(values.astype(np.float64), axis=-1)


def _log(mean):
    return np.log(np.maximum(mean, np.finfo(float).tiny))


def _decided(policy, decisions):
    if policy.temperature is not None:
        sure = scaled_mean(policy, decisions).max(axis=1)
        decisions = decisions._replace(confidence=sure)
    if policy.tau is None:
        return decisions
    return decisions._replace(kept=selective.retained(decisions.uncertainty, policy.tau))


def scaled_mean(policy, decisions, rows=slice(None)):
    """Predictive means of some inputs after the policy's temperature, if it has one."""
    mean = decisions.mean[rows]
    return mean if policy.temperature is None else calibration.apply_temperature(_log(mean), policy.temperature)


# ------------------------------------------------------------------------------------------- threshold and promise


def threshold_at(name, uncertainty, correct, risk, delta):
    """Threshold of a calibration set by name: "guaranteed" or "empirical"."""
    if name == "guaranteed":
        return selective.guaranteed_threshold(uncertainty, correct, risk, delta)
    return selective.select_threshold(uncertainty, correct, risk)


def achieved(uncertainty, correct, tau):
    """Inputs, kept, errors among the kept, coverage, risk and retained accuracy of a threshold (None: none kept)."""
    kept = selective.retained(uncertainty, tau)
    count, errors = int(kept.sum()), int(np.count_nonzero(kept & ~correct))
    return {
        "tau": tau,
        "inputs": len(kept),
        "kept": count,
        "errors": errors,
        "coverage": count / len(kept),
        "risk": errors / count if count else None,
        "accuracy": 1 - errors / count if count else None,
    }


def _with_threshold(policy, uncertainty, correct, predicted, risk, delta, threshold, coverage):
    thresholds = {
        name: achieved(uncertainty, correct, threshold_at(name, uncertainty, correct, risk, delta))
        for name in THRESHOLDS
    }
    if coverage is not None:
        threshold = "coverage"
        bound = selective.risk_bound_at_coverage(uncertainty, correct, coverage, delta)
        thresholds[threshold] = achieved(uncertainty, correct, bound.threshold) | {"bound": bound.bound}
    tau = thresholds[threshold]["tau"]
    bounds = selective.class_risk_bounds(
        *(uncertainty, correct, predicted, policy.classes, tau, delta), searched=coverage is None
    )
    names = policy.class_names or tuple(map(str, range(policy.classes)))
    return replace(
        policy,
        threshold=threshold,
        tau=tau,
        promise=_promise(threshold, thresholds[threshold], risk, delta),
        risk=risk,
        delta=delta,
        coverage=coverage,
        calibration={"inputs": len(correct), "errors": int(np.count_nonzero(~correct))},
        thresholds=thresholds,
        class_bounds=tuple(
            {"class": name, "kept": int(kept), "errors": int(errors), "bound": float(bound) if kept else None}
            for name, kept, errors, bound in zip(names, *bounds, strict=True)
        ),
    )


def _promise(threshold, found, risk, delta):
    draw = "over the draw of the calibration inputs, for independent inputs like them"
    if found["kept"] == 0:
        return "abstains on every input: no threshold meets the target on these calibration inputs"
    if threshold == "guaranteed":
        return f"the error rate among kept inputs is at most {risk:g} with probability at least {1 - delta:g} {draw}"
    if threshold == "coverage":
        return (
            f"the error rate among kept inputs is at most {found['bound']:.6g} with probability at least "
            f"{1 - delta:g} {draw}"
        )
    return (
        f"none: the error rate among kept calibration inputs is at most {risk:g}, but on new inputs it is above that "
        "in about half of all cases"
    )


# ------------------------------------------------------------------------------------------- JSON


def to_json(policy):
    """The text of a policy file; infinite thresholds are written as "inf" and "-inf"."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return str(value) if isinstance(value, float) and np.isinf(value) else value

    return json.dumps({"format": FORMAT} | plain(asdict(policy)), indent=1, allow_nan=False) + "\n"


def save(policy, path):
    """Write a policy to a JSON file."""
    Path(path).write_text(to_json(policy), encoding="utf-8")


def load(path):
    """Read a policy from a JSON file."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        for holder in (fields, *(fields.get("thresholds") or {}).values()):
            holder["tau"] = None if holder["tau"] is None else float(holder["tau"])
        for name in ("class_names", "class_bounds"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        policy = Policy(**fields)
        checks.choice("estimator", policy.estimator, ESTIMATORS)
        checks.choice("aggregate", policy.aggregate, tuple(dirichlet.AGGREGATES))
        checks.choice("order", policy.order, ORDERS)
    except FileNotFoundError:
        raise PolicyError(f"{path} is not there; paperlib fit writes policy.json") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise PolicyError(f"{path} is no policy file of paperlib fit: {error}") from None
    return policy
