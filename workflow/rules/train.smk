"""The GPU hours.

train  tokens, model, plan -> results/runs/{run}/: trained/ (adapter or weights), metrics.jsonl,
       train.json; train.yaml holds the settings it froze
merge  trained/ + base -> results/runs/{run}/model/ (16 bit, ready to serve), merge.json
"""


# Another split of the same batch makes the same model, so a finished run stays finished: the
# number of GPUs is a resource and no parameter, and the plan is ancient to it.
rule train:
    input:
        plan=plan_of,
        model=for_run("results/models/{model}/pretrained"),
        tokens=for_run("results/tokens/{dataset}/{model}/lint.json"),
    output:
        trained=directory("results/runs/{run}/trained"),
        metrics="results/runs/{run}/metrics.jsonl",
        record="results/runs/{run}/train.json",
    log:
        "logs/train/{run}.log",
    benchmark:
        "benchmarks/train/{run}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: lambda w: 4 * run_of(w).gpus
    resources:
        gpu=lambda w: run_of(w).gpus * run_of(w).nodes,
        mem_mb=told_by(PLAN, lambda plan, n: resources.mem_mb(plan, "train", n)),
        disk_mb=told_by(PLAN, lambda plan, _: resources.disk_mb(plan, "train")),
        runtime=train_runtime,
        # for a run of one node as well: SLURM would be free to take its GPUs from several
        nodes=lambda w: run_of(w).nodes,
        # launch.py calls srun itself: `mpi` has the rule start once, on the first node
        gres=on_nodes(lambda run: f"gpu:{run.gpus}"),
        mpi=on_nodes(lambda run: "srun"),
        tasks=on_nodes(lambda run: run.nodes),
        tasks_per_gpu=on_nodes(lambda run: 0),
    params:
        settings=settings_of(stages.train_settings, run_of, model_of),
        tokens=subpath(input.tokens, parent=True),
        frozen="results/runs/{run}/train.yaml",
    message:
        "Training {wildcards.run} on {resources.gpu} GPUs (CPU processes where there is none)"
    shell:
        'python "$SCRIPTS"/launch.py --settings {params.settings:q} --config {params.frozen}'
        " --gpus {resources.gpu} --threads {threads} --plan {input.plan}"
        " --model {input.model} --tokens {params.tokens} --output {output.trained}"
        " --metrics {output.metrics} --record {output.record}"
        " --calibration results/calibration.jsonl 2> {log}"


rule merge:
    input:
        trained="results/runs/{run}/trained",
        record="results/runs/{run}/train.json",
        base=for_run("results/models/{model}/pretrained"),
        tokens=for_run("results/tokens/{dataset}/{model}/lint.json"),
    output:
        model=directory("results/runs/{run}/model"),
        record="results/runs/{run}/merge.json",
    log:
        "logs/merge/{run}.log",
    benchmark:
        "benchmarks/merge/{run}.tsv"
    conda:
        "../../envs/finetune.yaml"
    threads: 4
    resources:
        gpu=0,
        mem_mb=told_by(PLAN, lambda plan, n: resources.mem_mb(plan, "merge", n)),
        disk_mb=told_by(PLAN, lambda plan, _: resources.disk_mb(plan, "merge")),
        runtime=told_by(PLAN, lambda plan, _: resources.merge_minutes(plan)),
    params:
        settings=settings_of(stages.merge_settings, run_of, model_of),
        tokens=subpath(input.tokens, parent=True),
    message:
        "Merging and verifying {wildcards.run}"
    shell:
        'python "$SCRIPTS"/merge.py --settings {params.settings:q} --trained {input.trained}'
        " --train-record {input.record} --base {input.base} --tokens {params.tokens}"
        " --output {output.model} --record {output.record} 2> {log}"
