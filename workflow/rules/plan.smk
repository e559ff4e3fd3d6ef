"""Before a GPU is asked for.

plan_run  model.json, config.json + lint.json -> results/runs/{run}/plan.json: batch split, memory,
          refusals, neighbours
"""


rule plan_run:
    input:
        model=for_run("results/models/{model}/model.json"),
        pretrained=for_run("results/models/{model}/pretrained"),
        lint=for_run("results/tokens/{dataset}/{model}/lint.json"),
    output:
        "results/runs/{run}/plan.json",
    log:
        "logs/plan_run/{run}.log",
    benchmark:
        "benchmarks/plan_run/{run}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
    params:
        settings=plan_settings,
    message:
        "Planning run {wildcards.run}"
    shell:
        'python "$SCRIPTS"/plan_run.py --settings {params.settings:q}'
        " --model {input.model} --pretrained {input.pretrained} --lint {input.lint}"
        " --calibration results/calibration.jsonl --output {output} 2> {log}"
