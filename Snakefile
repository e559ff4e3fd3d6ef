"""Fine-tune language models: data -> tokens -> plan -> train -> merge -> evaluate -> report.

snakemake --cores all --resources gpu=2
"""

from snakemake.utils import min_version

min_version("9.27")


# A file given with --configfile replaces the default. Merged, they would train both.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/resources.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/plan.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


rule all:
    input:
        rules.compare.output,
        expand("results/runs/{run}/model", run=CONFIG.runs),
        [f"results/tokens/{d}/{m}/lint.html" for m, d in BASELINES],
