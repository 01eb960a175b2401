"""Every figure and table of the paper: its notebook, file and label in the paper; and the datasets' names."""

from dataclasses import dataclass, field

from paperlib.recipes import RECIPES

DOMAINS = {
    "digits": ("Noisy digits", "Handwritten digits"),
    "cifar10": ("CIFAR-10", "Natural images"),
    "cifar100": ("CIFAR-100", "Natural images"),
    "dermamnist": ("DermaMNIST", "Dermatology images"),
    "aptos": ("APTOS 2019", "Retinal fundus images"),
}


def title(dataset):
    """A dataset's name for readers."""
    return DOMAINS[dataset][0] if dataset in DOMAINS else dataset


PREFIX = {"cifar100": "C100", "dermamnist": "DM", "cifar10": "c10", "aptos": "APT"}


@dataclass(frozen=True)
class Item:
    """One figure or table; labels says where it stands in the paper, by dataset (`*`: whichever dataset)."""

    notebook: str
    stem: str
    kind: str
    title: str
    labels: dict = field(default_factory=dict)

    def label(self, dataset):
        """Label in the paper; an item that the paper does not show for this dataset names the one it mirrors."""
        if dataset in self.labels:
            return self.labels[dataset]
        if "*" in self.labels:
            return self.labels["*"]
        shown = sorted(set(self.labels.values()))
        return f"as {', '.join(shown)}" if shown else "not in the paper"

    def files(self, scale, dataset):
        """Paths of its files below the repository."""
        if self.kind == "figure":
            return [f"figures/{scale}/{dataset}/{self.stem}.{ending}" for ending in ("pdf", "png")]
        return [f"results/{scale}/tables/{dataset}/{self.stem}.{ending}" for ending in ("csv", "tex", "md")]


def _by_dataset(pattern, **exceptions):
    return {name: pattern.format(prefix) for name, prefix in PREFIX.items()} | exceptions


ITEMS = (
    Item("claims", "claims", "figure", "Does the paper hold? Verdicts by section"),
    Item("claims", "claims", "table", "Does the paper hold? Published against measured"),
    Item("claims", "claims_summary", "table", "Verdicts by section of the paper"),
    Item("claims", "claims_sensitivity", "table", "Sensitivity to bins, target risk, aggregation and split"),
    Item("claims", "claims_protocol", "table", "The paper's protocol and this scale's"),
    Item(
        "fig1_softmax_variability",
        "fig1_softmax_variability",
        "figure",
        "Softmax score of the true class over the members",
        {"cifar10": "fig:softmaxfreq"},
    ),
    Item(
        "method_overview",
        "mom_construction",
        "figure",
        "From softmax vectors to a Dirichlet",
        {"*": "fig:ensemble_flow_figure"},
    ),
    Item("method_overview", "edl_network", "figure", "An evidential network", {"*": "fig:edl_arch"}),
    Item(
        "method_overview",
        "confidence_example",
        "figure",
        "Reading confidence diagnostics",
        {"*": "fig:rel_hist_diagram"},
    ),
    Item("method_overview", "recipes", "table", "Evidential formulations", {"*": "tab:dirichlet_formulations"}),
    Item("method_overview", "datasets", "table", "Datasets", {"*": "tab:dataset_summary"}),
    Item(
        "fig_training_collapse",
        "training_collapse",
        "figure",
        "Training with and without KL annealing",
        {"cifar100": "fig:fail_demo"},
    ),
    Item(
        "fig_training_collapse",
        "collapse_variance",
        "figure",
        "Total variance by correctness, success against collapse",
        {"cifar100": "fig:failvariance"},
    ),
    Item("fig_training_collapse", "collapse_runs", "table", "The last epoch of each run"),
    Item(
        "fig_single_model_risk_coverage",
        "single_model_risk_coverage",
        "figure",
        "Risk and coverage of single models",
        {"dermamnist": "fig:50CE_riskcov_curves"},
    ),
    Item(
        "exp1_edl_calibration",
        "exp1_metrics",
        "figure",
        "Predictive performance of the evidential recipes",
        _by_dataset("fig:{}_EDL_metrics"),
    ),
    Item("exp1_edl_calibration", "exp1_metrics", "table", "Single runs: mean and standard deviation over seeds"),
    Item(
        "exp1_edl_calibration",
        "exp1_diagnostics",
        "figure",
        "Confidence diagnostics of the evidential recipes",
        _by_dataset("fig:{}_EDL_sum", cifar100="fig:c100_EDL_sum"),
    ),
    Item(
        "exp2_ensemble_dirichlet",
        "exp2_metrics",
        "figure",
        "Predictive performance by ensemble size",
        _by_dataset("fig:{}_mom_metrics"),
    ),
    Item("exp2_ensemble_dirichlet", "exp2_metrics", "table", "Metrics by ensemble size and estimator"),
    Item(
        "exp2_ensemble_dirichlet",
        "exp2_reliability",
        "figure",
        "Reliability by ensemble size",
        _by_dataset("fig:{}_MoM_rel", cifar10="fig:C10_MoM_rel"),
    ),
    Item(
        "exp2_ensemble_dirichlet",
        "exp2_histograms",
        "figure",
        "Confidence histograms by ensemble size",
        _by_dataset("fig:{}_mom_conf", cifar10="fig:C10_mom_conf"),
    ),
    Item("exp2_ensemble_dirichlet", "exp2_convergence", "figure", "Are the paper's fixed-point steps enough?"),
    Item("exp2_ensemble_dirichlet", "exp2_convergence", "table", "Error of the fixed-point steps"),
    Item("exp2_ensemble_dirichlet", "exp2_estimators", "table", "Estimators and aggregations compared"),
    Item("exp2_ensemble_dirichlet", "exp2_orderings", "figure", "Does alpha_0 add anything?"),
    Item("exp2_ensemble_dirichlet", "exp2_orderings", "table", "Ordering statistics compared"),
    Item(
        "exp3_selective_classification",
        "exp3_mom",
        "figure",
        "Selective classification with the method of moments",
        {"dermamnist": "fig:DM_MoM_sel"},
    ),
    Item(
        "exp3_selective_classification",
        "exp3_evidential",
        "figure",
        "Selective classification with evidential models",
        {"dermamnist": "fig:DM_EDL_sel"},
    ),
    Item(
        "exp3_selective_classification",
        "exp3_summary",
        "table",
        "Full and retained test",
        {"dermamnist": "tab:dm_sel_summary"},
    ),
    Item("exp3_selective_classification", "exp3_runs", "table", "Retained test: mean and deviation over all runs"),
    Item("exp3_selective_classification", "exp3_guaranteed", "table", "Empirical and guaranteed thresholds"),
)

ALL = "all"  # where a notebook is about every dataset of a scale

NOTEBOOKS = tuple(dict.fromkeys(item.notebook for item in ITEMS))


def notebooks(scale):
    """(notebook, dataset) pairs that a scale asks for: every dataset, or the one that a notebook is about."""
    only = {"fig_training_collapse": [scale.collapse.dataset], "claims": [ALL]}
    return [(notebook, dataset) for notebook in NOTEBOOKS for dataset in only.get(notebook, scale.datasets)]


def runs(notebook, scale, dataset):
    """The runs whose predictions a notebook reads of a dataset."""
    if notebook == "fig_training_collapse":
        return [run for run in scale.runs(dataset) if run.startswith("collapse_")]
    if notebook == "claims":
        return scale.runs(dataset)
    if notebook in ("exp1_edl_calibration", "exp3_selective_classification"):
        return list(RECIPES)
    return ["ce"]
