"""One place to compare.

compare  all evaluations and training records -> results/report/: table and figures, which
         `snakemake --report results/report.html` collects into one page
"""

BASELINES = stages.baselines(CONFIG)
RUN_FILES = ["train.json", "metrics.jsonl", "evaluation/metrics.json"]


rule compare:
    input:
        expand("results/runs/{run}/{file}", run=CONFIG.runs, file=RUN_FILES),
        [f"results/baselines/{m}/{d}/metrics.json" for m, d in BASELINES],
    output:
        "results/report/summary.tsv",
        report(
            "results/report/summary.html",
            caption="../report/summary.rst",
            category="Comparison",
        ),
        report(
            "results/report/loss.svg",
            caption="../report/loss.rst",
            category="Training",
        ),
        report(
            "results/report/memory.svg",
            caption="../report/memory.rst",
            category="Training",
        ),
    log:
        "logs/compare.log",
    benchmark:
        "benchmarks/compare.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        runs=[f"--run {r}:results/runs/{r}" for r in CONFIG.runs],
        baselines=[
            f"--baseline {m}/{d}:results/baselines/{m}/{d}" for m, d in BASELINES
        ],
    message:
        "Comparing all runs"
    shell:
        'python "$SCRIPTS"/compare.py {params.runs} {params.baselines}'
        " --output results/report 2> {log}"
