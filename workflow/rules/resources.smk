"""What training, merging and evaluating ask for: told by the plan of the run, which may be made
in the same call. Until it is there Snakemake shows <TBD>, and it asks again before it starts, or
submits, the job. What a profile sets with `set-resources` wins.
"""

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import WorkflowError

from finetune import resources

PLAN, MODEL = "results/runs/{run}/plan.json", "results/models/{model}/model.json"


def told_by(record, compute):
    """A resource function: `compute` from the content of a JSON file, and the attempt."""

    def resource(wildcards, attempt):
        path = Path(record.format(**dict(wildcards.items())))
        if not path.exists():
            return TBDString()
        try:
            return compute(json.loads(path.read_text()), attempt)
        except KeyError as key:
            raise WorkflowError(
                f"{path} lacks {key}: other code wrote it. Remove it and run again: rm {path}"
            ) from None

    return resource


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
