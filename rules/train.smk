# Training: one job trains a few models of one run and lists them; what is there already is skipped.


rule train:
    output:
        "results/{scale}/{place}/{dataset}/{run}-{first}.json",
    wildcard_constraints:
        scale="|".join(TRAINED),
    params:
        # What determines these models, and nothing else: another recipe's weight retrains nothing here.
        digests=lambda w: [job.digest for job in portion(w)],
        anew=lambda w: "--anew" if w.place != "manifests" else "",
        seeds=lambda w: ",".join(str(job.seed) for job in portion(w)),
    log:
        "logs/{scale}/{place}/{dataset}-{run}-{first}.log",
    message:
        "training {wildcards.run} on {wildcards.dataset}, seeds {params.seeds}"
    threads: lambda w: side_by_side(w.scale)
    resources:
        gpu=lambda w: int(on_gpu(w.scale)),
        mem_mb=lambda w, attempt: attempt * side_by_side(w.scale) * (8000 if w.scale == "paper" else 2000),
        runtime=lambda w: 24 * 60 if w.scale == "paper" else 120,
    shell:
        "{PYTHON} -m paperlib train --scale {wildcards.scale} --dataset {wildcards.dataset} --recipe {wildcards.run}"
        " --seeds {params.seeds} --workers {threads} {DEVICE} --replace {params.anew} --manifest {output} 2>&1 | tee {log}"
