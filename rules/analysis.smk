# Notebooks: one rule a notebook, executed by papermill once a dataset; each writes its figures, tables and page.
# Figures, tables and pages of `cpu` are tracked, so a fresh clone has them already; the stamp below .built is not
# tracked, so a fresh clone still rebuilds them once, whatever the files' times.

LIBRARY = [
    f"paperlib/{name}"
    for name in (
        "analysis.py", "calibration.py", "catalogue.py", "dirichlet.py", "_kernels.py", "notebooks.py", "page.html.j2",
        "paper.mplstyle", "plots.py", "recipes.py", "records.py", "scores.py", "selective.py", "tables.py",
    )
]  # fmt: skip
CLAIMS = ["paperlib/claims.py", "paperlib/quantities.py", "paperlib/wording.py", "config/published.yaml"]


def in_report(file, item):
    """Pictures and tables as `snakemake --report` shows them: by notebook and dataset, under their titles."""
    if not file.endswith((".png", ".csv")):
        return file
    labels = {"item": item.title, "kind": item.kind, "scale": "{scale}"}
    return report(
        file, caption="caption.rst", category=item.notebook, subcategory="{dataset}", labels=labels
    )


for notebook in catalogue.NOTEBOOKS:
    ITEMS = [item for item in catalogue.ITEMS if item.notebook == notebook]

    rule:
        name:
            notebook
        input:
            LIBRARY,
            CLAIMS if notebook == "claims" else [],
            notebook=f"notebooks/{notebook}.ipynb",
            manifests=lambda w, notebook=notebook: read_by(notebook, w.scale, w.dataset),
        output:
            [in_report(file, item) for item in ITEMS for file in item.files("{scale}", "{dataset}")],
            executed=f"results/{{scale}}/notebooks/{notebook}-{{dataset}}.ipynb",
            page=f"results/{{scale}}/notebooks/{notebook}-{{dataset}}.html",
            stamp=touch(f"results/{{scale}}/.built/{notebook}-{{dataset}}"),
        params:
            notebook=notebook,
            analysis=lambda w: str((SCALES[w.scale].analysis, SCALES[w.scale].ensemble)),
        log:
            f"logs/{{scale}}/{notebook}-{{dataset}}.log",
        message:
            f"{notebook} for {{wildcards.dataset}} at scale {{wildcards.scale}}"
        threads: 1
        resources:
            mem_mb=lambda w, attempt: attempt * (4000 if w.scale == "paper" else 2000),
            runtime=30,
        shell:
            "{PYTHON} -m paperlib notebook {params.notebook} --scale {wildcards.scale} --dataset {wildcards.dataset}"
            " 2>&1 | tee {log}"


rule index:
    localrule: True
    input:
        lambda w: [f"results/{w.scale}/.built/{notebook}-{dataset}" for notebook, dataset in wanted(w.scale)],
        "paperlib/index.html.j2",
        "paperlib/index.md.j2",
        "paperlib/showcase.py",
    output:
        "results/{scale}/notebooks/index.html",
        "results/{scale}/notebooks/index.md",
        stamp=touch("results/{scale}/.built/index"),
    params:
        shown=lambda w: " ".join(f"{notebook}:{dataset}" for notebook, dataset in wanted(w.scale)),
    shell:
        "{PYTHON} -m paperlib index --scale {wildcards.scale} {params.shown}"
