"""What training, merging and evaluating ask for: told by files that may be made in the same call,
the plan of the run among them. Until they are there Snakemake shows <TBD>, and it asks again before
it starts, or submits, the job. What a profile sets with `set-resources` wins.
"""

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import WorkflowError

from finetune import resources

PLAN = "results/runs/{run}/plan.json"
MODEL = "results/models/{model}/model.json"
LINT = "results/tokens/{dataset}/{model}/lint.json"


def told_by(record, compute):
    """A resource function: `compute` from the content of a JSON file, and the attempt."""
    return lambda wildcards, attempt: told(
        [record.format(run=wildcards.run)], lambda content: compute(content, attempt)
    )


def told(paths, compute):
    """What `compute` makes of the content of JSON files."""
    if not all(map(os.path.exists, paths)):
        return TBDString()
    try:
        return compute(*(json.loads(Path(path).read_text()) for path in paths))
    except KeyError as key:
        raise WorkflowError(
            f"{' or '.join(paths)} lacks {key}: other code wrote it. Remove it and run again: rm "
            f"{' '.join(paths)}"
        ) from None


def evaluation_mb(wildcards, attempt):
    """A resource function, for tuned and base models alike."""
    one = run_of(wildcards) if "run" in wildcards.keys() else wildcards
    evaluation, cpu = dataset_of(wildcards).evaluation, evaluated_on_cpu(wildcards)
    return told(
        [x.format(model=one.model, dataset=one.dataset) for x in (MODEL, LINT)],
        lambda *found: resources.evaluation_mb(*found, evaluation, cpu, attempt),
    )


def evaluated_on_cpu(wildcards):
    """As the run is trained; a base model as the first of its runs. What no plan says yet is taken
    for true: a CPU takes more."""
    name = wildcards.get("run") or first_run_on(wildcards.model, wildcards.dataset)
    if name is None:
        return True
    if CONFIG.runs[name].gpu_memory_gb or CONFIG.runs[name].gpu_model:
        return False
    cpu = told([PLAN.format(run=name)], lambda plan: plan["memory"]["cpu"])
    return isinstance(cpu, TBDString) or cpu


def first_run_on(model, dataset):
    for name, run in CONFIG.runs.items():
        if (run.model, run.dataset) == (model, dataset):
            return name
    return None


def train_runtime(wildcards, **given):
    """From earlier runs of the kind; without any, what the profile sets for rules that say
    nothing. Snakemake takes that by itself only for a resource that a rule does not name.
    """
    expected = told_by(PLAN, lambda plan, _: resources.train_minutes(plan))
    minutes, profile = expected(wildcards, given["attempt"]), workflow.resource_settings
    if minutes is None and profile.default_resources:
        default = profile.default_resources.get("runtime")
        return default.evaluate(wildcards, **given).value
    return minutes
