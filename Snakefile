"""The paper, from data to every figure and table. `snakemake --cores all` is the main job; see README.md.

Targets: all (demo trained here, cpu rebuilt from released predictions), demo, cpu, paper, or any file by its path.
"""

from snakemake.utils import min_version

min_version("9.0")


include: "rules/common.smk"
include: "rules/train.smk"
include: "rules/analysis.smk"


rule all:
    default_target: True
    input:
        pages("demo"),
        pages("cpu"),


rule demo:
    input:
        pages("demo"),


rule cpu:
    input:
        pages("cpu"),


rule paper:
    input:
        pages("paper"),
