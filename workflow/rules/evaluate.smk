"""How good is it, on the test split.

evaluate_run       results/runs/{run}/model -> results/runs/{run}/evaluation/
evaluate_baseline  the base model -> results/baselines/{model}/{dataset}/
Both write metrics.json and predictions.jsonl, by the same script. Where rows have labels, the
baseline is the share of each class in the training rows: an untrained head knows nothing.
The baseline waits for no plan: it is the same whatever runs are added or refused.
"""


rule evaluate_run:
    input:
        model="results/runs/{run}/model",
        data=for_run("results/data/{dataset}/test.parquet"),
        tokens=for_run("results/tokens/{dataset}/{model}/test"),
        lint=for_run("results/tokens/{dataset}/{model}/lint.json"),
    output:
        metrics="results/runs/{run}/evaluation/metrics.json",
        predictions="results/runs/{run}/evaluation/predictions.jsonl",
    log:
        "logs/evaluate_run/{run}.log",
    benchmark:
        "benchmarks/evaluate_run/{run}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 4
    resources:
        gpu=lambda w: dataset_of(w).evaluation.gpus,
        nodes=1,  # else SLURM would be free to take its GPUs from several
        mem_mb=evaluation_mb,
        runtime=240,
    params:
        settings=settings_of(stages.evaluate_settings, dataset_of, model_of),
    message:
        "Evaluating {wildcards.run}"
    shell:
        'python "$SCRIPTS"/evaluate_model.py --settings {params.settings:q}'
        " --gpus {resources.gpu} --model {input.model} --data {input.data}"
        " --tokens {input.tokens} --lint {input.lint}"
        " --metrics {output.metrics} --predictions {output.predictions} 2> {log}"


use rule evaluate_run as evaluate_baseline with:
    input:
        model="results/models/{model}/pretrained",
        data="results/data/{dataset}/test.parquet",
        tokens="results/tokens/{dataset}/{model}/test",
        lint="results/tokens/{dataset}/{model}/lint.json",
    output:
        metrics="results/baselines/{model}/{dataset}/metrics.json",
        predictions="results/baselines/{model}/{dataset}/predictions.jsonl",
    log:
        "logs/evaluate_baseline/{model}/{dataset}.log",
    benchmark:
        "benchmarks/evaluate_baseline/{model}/{dataset}.tsv"
    resources:
        gpu=lambda w: dataset_of(w).evaluation.gpus,
        nodes=1,
        mem_mb=evaluation_mb,
        runtime=240,
    message:
        "Evaluating base model {wildcards.model} on {wildcards.dataset}"
