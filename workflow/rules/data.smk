"""From sources to tokens.

make_intents   installed packages -> results/examples/intents.jsonl (the default data set)
fetch_model    hub, folder, GGUF or package -> results/models/{model}/: pretrained/, model.json
prepare_data   source files or hub -> results/data/{dataset}/: parquet per split, rejects, stats
tokenize_data  those two -> results/tokens/{dataset}/{model}/: Arrow folder per split, lint.json
check_data     lint.json -> lint.html, the data check to read
"""


# On the submitting host: both may ask the hub, and compute nodes often have no network.
localrules:
    fetch_model,
    prepare_data,


rule make_intents:
    output:
        "results/examples/intents.jsonl",
    log:
        "logs/make_intents.log",
    benchmark:
        "benchmarks/make_intents.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    message:
        "Making the example data set {output}"
    shell:
        'python "$SCRIPTS"/make_intents.py --rows 450 --seed 7 --output {output} 2> {log}'


rule fetch_model:
    input:
        lambda w: model_inputs(model_of(w)),
    output:
        pretrained=directory("results/models/{model}/pretrained"),
        record="results/models/{model}/model.json",
    log:
        "logs/fetch_model/{model}.log",
    benchmark:
        "benchmarks/fetch_model/{model}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 1
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        settings=settings_of(stages.fetch_settings, model_of),
    message:
        "Fetching model {wildcards.model}"
    shell:
        'python "$SCRIPTS"/fetch_model.py --settings {params.settings:q}'
        " --pretrained {output.pretrained} --record {output.record} 2> {log}"


rule prepare_data:
    input:
        lambda w: data_inputs(source.path for source in dataset_of(w).source),
    output:
        expand("results/data/{{dataset}}/{split}.parquet", split=SPLITS),
        stats="results/data/{dataset}/stats.json",
    log:
        "logs/prepare_data/{dataset}.log",
        # no output: those are deleted when a job fails, and it can fail for too many rejects
        rejects="results/data/{dataset}/rejects.jsonl",
    benchmark:
        "benchmarks/prepare_data/{dataset}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 8
    resources:
        mem_mb=4000,
        runtime=60,
    params:
        settings=settings_of(stages.prepare_settings, dataset_of),
        folder=subpath(output.stats, parent=True),
    message:
        "Preparing data set {wildcards.dataset}"
    shell:
        'python "$SCRIPTS"/prepare_data.py --settings {params.settings:q}'
        " --output {params.folder} --rejects {log.rejects} --threads {threads} 2> {log[0]}"


rule tokenize_data:
    input:
        expand("results/data/{{dataset}}/{split}.parquet", split=SPLITS),
        stats="results/data/{dataset}/stats.json",
        model="results/models/{model}/pretrained",
    output:
        directory(expand("results/tokens/{{dataset}}/{{model}}/{split}", split=SPLITS)),
        lint="results/tokens/{dataset}/{model}/lint.json",
    log:
        "logs/tokenize_data/{dataset}/{model}.log",
    benchmark:
        "benchmarks/tokenize_data/{dataset}/{model}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 8
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        settings=settings_of(stages.tokenize_settings, dataset_of, model_of),
        data=subpath(input.stats, parent=True),
        folder=subpath(output.lint, parent=True),
    message:
        "Tokenizing {wildcards.dataset} for {wildcards.model}"
    shell:
        'python "$SCRIPTS"/tokenize_data.py --settings {params.settings:q}'
        " --data {params.data} --model {input.model} --output {params.folder}"
        " --threads {threads} 2> {log}"


# No plan_run waits for it: it only has to be there when one of them refuses the data.
rule check_data:
    input:
        "results/tokens/{dataset}/{model}/lint.json",
    output:
        report(
            "results/tokens/{dataset}/{model}/lint.html",
            caption="../report/data.rst",
            category="Data",
            labels={"data set": "{dataset}", "model": "{model}"},
        ),
    log:
        "logs/check_data/{dataset}/{model}.log",
    benchmark:
        "benchmarks/check_data/{dataset}/{model}.tsv"
    priority: 1
    conda:
        "../../envs/finetune.yaml"
    threads: 1
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        settings=settings_of(stages.check_settings, dataset_of),
        title="{dataset} for {model}",
    message:
        "Checking the tokens of {wildcards.dataset} for {wildcards.model}"
    shell:
        'python "$SCRIPTS"/check_data.py --settings {params.settings:q} --lint {input}'
        " --title {params.title:q} --output {output} 2> {log}"
