"""The configuration: the only source of keys, defaults and cross-field rules.

`workflow/schemas/config.schema.json` is generated from these classes (`make schema`).
Nothing heavy is imported here: the Snakefile loads this module on every call.
"""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from finetune.batch import split_batch
from finetune.gpu_models import GPU_MODELS

Method = Literal["qlora", "lora", "full"]
Launch = Literal["ddp", "zero1", "zero2", "zero3", "zero3-offload"]
Task = Literal["causal-lm", "sequence-classification"]
Format = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "text", "text-label"]
Column = Literal[
    *("messages", "conversations", "system", "tools"),
    *("instruction", "input", "output", "history"),
    *("prompt", "completion", "text", "label"),
]

QLORA_ZERO = "adapters are too small to shard, so ZeRO saves nothing; use `launch: ddp`"
QLORA_ZERO3 = (
    "4-bit weights are not partitioned at load, so every GPU would hold them all; "
    "use `launch: ddp`, or `method: lora` if the 16-bit weights must be sharded"
)
ZERO = ("zero1", "zero2", "zero3", "zero3-offload")
REFUSED: dict[tuple[str, str], str] = {
    ("qlora", "zero1"): QLORA_ZERO,
    ("qlora", "zero2"): QLORA_ZERO,
    ("qlora", "zero3"): QLORA_ZERO3,
    ("qlora", "zero3-offload"): QLORA_ZERO3,
}
"""Method and launch pairs that cannot work well, with the reason and the cure."""

QLORA_CLASSIFIER = (
    "the head is new and is trained in full precision beside a 4-bit base, and encoders are small "
    "enough without; use `method: full`, or `lora`"
)
ZERO_CLASSIFIER = "a classifier's weights and optimizer fit on one GPU; use `launch: ddp`"
ZERO_8BIT = (
    "DeepSpeed flattens and shards what an optimizer holds, which 8-bit blocks do not survive; use "
    "`launch: ddp`, or leave `optimizer: {name}` out"
)
ZERO3_COMPILED = (
    "weights are gathered by hooks on each part of a layer, at which compiled code breaks off; "
    "use `launch: zero2` or `ddp`, or leave `compile` out"
)

LORA_DEFAULTS = {
    "launch": "ddp",
    "optimizer": {"max_grad_norm": 0.3},
    "schedule": {"name": "constant_with_warmup"},
}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    # Dettmers et al. 2023 (arXiv 2305.14314), appendix B.2: constant rate, gradient norm 0.3.
    "qlora": LORA_DEFAULTS,
    "lora": LORA_DEFAULTS,
    "full": {"launch": "zero3", "schedule": {"name": "cosine"}},
}
LARGE = 14e9
"""Above a "13B" model (13.02e9 for LLaMA) the QLoRA paper halves the learning rate (table 9)."""


def default_learning_rate(method: str, task: str, parameters: int) -> float:
    """QLoRA paper for adapters, common practice for full; for full classifiers Devlin et al. 2018
    (arXiv 1810.04805, A.3: 5e-5, 3e-5 or 2e-5)."""
    if method == "full":
        return 1e-5 if task == "causal-lm" else 2e-5
    return 2e-4 if parameters <= LARGE else 1e-4


TAKEN_OPTIONS = {
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of apply_chat_template, which would change more than the text."""


def no_bool(value: Any) -> Any:
    """YAML reads `yes` and `on` as true, which pydantic would take for the number 1."""
    if isinstance(value, bool):
        raise ValueError("is true/false, but a number belongs here")
    return value


def as_sources(value: Any) -> Any:
    """`a.jsonl` is short for `[{path: a.jsonl}]`."""
    entries = value if isinstance(value, list) else [value]
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


def path_safe(name: str) -> str:
    """Names become folders under results/."""
    if not name or name.startswith((".", "-")) or not all(c.isalnum() or c in "._-" for c in name):
        raise ValueError(
            "names may hold letters, digits, '.', '_' and '-' only, and not start with '.' or '-'"
        )
    return name


# Bounds come first: after a validator they would not reach the JSON schema.
NoBool = BeforeValidator(no_bool)
Int = Annotated[int, NoBool]
Count = Annotated[int, Field(ge=1), NoBool]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NoBool]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), NoBool]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), NoBool]
ShareOrAll = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NoBool]
Name = Annotated[str, AfterValidator(path_safe)]
Place = Annotated[str, AfterValidator(os.path.expanduser)]


class Strict(BaseModel):
    """A section in which an unknown key is an error, never a silent no-op."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def free_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse the names of what is passed to apply_chat_template beside the template's variables."""
    if taken := sorted(options.keys() & TAKEN_OPTIONS):
        raise ValueError(
            f"{', '.join(taken)}: set by the workflow; only variables of the template's own "
            "belong here"
        )
    return options


class Model(Strict):
    """A base model: where its weights are and how its text is laid out."""

    source: Place
    """Hub id (`org/name`), local folder, GGUF file, or `package:<import name>/<file>`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model. It is resolved to a commit and recorded."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Read that code first."""
    chat_template: str | None = None
    """`chatml`, `plain`, or a Jinja file. Default: the template that ships with the model."""
    template_options: Annotated[dict[str, Any], AfterValidator(free_options)] = {}
    """Variables for the chat template wherever it is used, e.g. `enable_thinking: false`."""
    pad_token: str | None = None
    """Default: the model's own, or a spare special token where that is missing or equals EOS."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """In training. Default: by device, length of rows and packing."""


class Source(Strict):
    """Where rows are, and how many of them are taken."""

    path: Place
    """A .jsonl, .json, .csv, .tsv, .parquet or .txt file (each also .gz), a glob, a folder of such
    files or of `save_to_disk`, or a hub id (`org/name`)."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset. It is resolved to a commit and recorded."""
    split: str | None = None
    """Read this split of a hub or saved dataset alone. Default: all that it has."""
    into: Literal["train", "validation", "test"] | None = None
    """Where all its rows go. Default: the splits that it has, or by hash."""
    rows: Count | None = None
    """Take the first N usable rows; of each split, where it brings several."""
    weight: Positive = 1
    """How often a training row is taken: 0.25 keeps a quarter, by hash; 2 takes each twice."""


OneOrMany = BeforeValidator(as_sources, json_schema_input_type=str | Source | list[str | Source])


class Split(Strict):
    """How rows go to train, validation and test: by hash, so new rows never move old ones."""

    validation: Share = 0.05
    """Share of the rows. 0 for none."""
    test: Share = 0.1
    """Share of the rows. 0 where a source brings a test split: every model is evaluated."""
    group: str | None = None
    """A column: rows that share its value stay in one split (say, a template or a user). A row
    in which it is null stands alone."""
    seed: Int = 0

    @model_validator(mode="after")
    def leaves_rows_to_train_on(self) -> Split:
        if self.validation + self.test >= 1:
            raise ValueError("validation + test must be below 1, or nothing is left to train on")
        return self


class Evaluation(Strict):
    """How every model is evaluated on the test split, base models included."""

    metrics: list[Literal["exact_match", "rouge", "json"]] = ["exact_match", "rouge"]
    """Metrics on generated text. Loss, perplexity and token accuracy always come too. Classifiers
    get accuracy, macro F1 and the confusion matrix instead."""
    max_new_tokens: Count = 256
    """Where generation stops if the model does not stop by itself."""
    batch_size: Count = 16
    """Rows generated at once. It changes speed and memory, and answers by rounding alone."""
    rows: Count | None = None
    """Generate for the first N test rows only. Default: all of them."""
    gpus: Count = 1
    """GPUs that hold a model together when it is evaluated: more than 1 only for models that do not
    fit on one. It changes no result but by rounding."""


class Checks(Strict):
    """What the tokens of a dataset must be like. A run whose data fails stops before a GPU is
    asked for. All are shares between 0 and 1."""

    min_supervised: Share = 0.005
    """Of the training tokens."""
    min_ended: ShareOrAll = 0.99
    """Rows, of those not cut at the end, whose last supervised token ends a turn. Below it the
    model would not learn to stop."""
    max_dropped: ShareOrAll = 0.1
    """Training rows left out: too long, or nothing in them to learn from."""
    max_truncated: ShareOrAll = 0.2
    """Training rows cut to max_length."""
    max_control_tokens: ShareOrAll = 0.01
    """Rows whose own text holds a control token of the model, such as `</s>`."""
    max_overlap: ShareOrAll = 0.05
    """Test rows whose prompt, but for case and spaces, is trained on too."""


class Dataset(Strict):
    """Rows to train and evaluate on."""

    source: Annotated[list[Source], Field(min_length=1), OneOrMany]
    """One place or several: a path, glob, folder or hub id, or these with keys of their own."""
    format: Format | None = None
    """Default: found from the columns."""
    columns: dict[Column, str] = {}
    """Our name: your column's name."""
    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What one row is in a .txt file. Paragraphs are parted by empty lines."""
    split: Split = Split()
    max_rejects: Share = 0.001
    """Share of unreadable rows above which preparation stops."""
    system_prompt: str | None = None
    """System turn put before rows that have none. Default: what the chat template does."""
    train_on: Literal["completions", "last-turn", "all"] = "completions"
    """`completions`: every assistant turn but those of `weight: 0`. `last-turn`: the last one.
    `all`: prompts too. Plain text is always trained on whole."""
    max_length: Annotated[int, Field(ge=2), NoBool] = 2048
    """Tokens per row. Plain text is cut into pieces of it."""
    truncate: Literal["drop", "start", "end", "error"] = "drop"
    """Longer rows: leave them out, cut them at the start or end, or stop. All are counted."""
    packing: bool = False
    """Put several short rows into one of max_length; no row sees another. Fewer, fuller steps:
    batch.global then counts packed rows."""
    checks: Checks = Checks()
    evaluation: Evaluation = Evaluation()

    @field_validator("columns")
    @classmethod
    def names_each_column_once(cls, columns: dict[Column, str]) -> dict[Column, str]:
        if len(set(columns.values())) < len(columns):
            raise ValueError("names one column twice: an answer would be its own question")
        return columns


class Batch(Strict):
    """Rows that make one optimizer step."""

    global_: Count = Field(default=16, alias="global")
    """Rows per optimizer step, over all GPUs and accumulation steps. It never changes by itself."""
    micro: Literal["auto"] | Count = "auto"
    """Rows a GPU holds at once. `auto`: the most that divide and fit. It changes speed and memory,
    not the result."""


class Lora(Strict):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: Count = 16
    alpha: Positive = 32
    """The update is scaled by alpha / rank."""
    dropout: Share = 0.05
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """All linear layers are needed to match full fine-tuning (QLoRA paper, section 4)."""


class Quantization(Strict):
    """4-bit base weights, for `method: qlora`."""

    type: Literal["nf4", "fp4"] = "nf4"
    double: bool = True
    """Quantize the quantization constants too: saves 0.37 bit per parameter."""


class Merge(Strict):
    """How adapters become one model."""

    base: Literal["best", "original", "dequantized"] = "best"
    """For qlora: merge into the original 16-bit weights, or into the 4-bit ones the adapter was
    trained on, written out in 16 bit. `best` measures both on held-out rows."""
    tolerance: NotNegative = 0.1
    """How much worse, as a share, the merged model's held-out loss may be; and how far merging
    may move a logit, as a share of the largest."""


class Optimizer(Strict):
    """AdamW and its settings."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: a quarter of the memory for its moments (Dettmers et al. 2021, arXiv
    2110.02861). Not under ZeRO."""
    learning_rate: Positive | None = None
    """Default: 2e-4 for LoRA up to 13B parameters, 1e-4 above; 1e-5 for full fine-tuning, 2e-5 of
    a classifier."""
    weight_decay: NotNegative = 0.0
    beta2: Share = 0.999
    max_grad_norm: Positive = 1.0


class Schedule(Strict):
    """Learning rate over the run."""

    name: Literal["constant_with_warmup", "linear", "cosine"] = "cosine"
    warmup: Share = 0.03
    """Share of the steps."""


class RunDefaults(Strict):
    """What a run can set. `defaults:` takes the same keys, for every run at once."""

    model: str | None = None
    dataset: str | None = None
    task: Task = "causal-lm"
    """`sequence-classification` needs rows of text and label, and `method: full` or `lora`."""
    method: Method = "qlora"
    """`qlora` (4-bit base), `lora` (16-bit base) or `full` (all weights)."""
    launch: Launch = "ddp"
    """A file stem of config/accelerate/. Default: ddp for adapters and classifiers, else zero3."""
    gpus: Count = 1
    """Processes on a node, one per GPU. Where there is no GPU: CPU processes."""
    nodes: Count = 1
    """Machines of a SLURM cluster, with `gpus` on each."""
    gpu_memory_gb: Positive | None = None
    """Memory of one GPU, when the plan is made on a host that cannot see it. GB = 1e9 bytes."""
    gpu_model: Literal[*GPU_MODELS] | None = None
    """The same by name: `a100-80`, `h100`, `l4`, …"""
    allow_oversubscription: bool = False
    """Start a run that is predicted not to fit, with a warning."""
    batch: Batch = Batch()
    lora: Lora = Lora()
    quantization: Quantization = Quantization()
    merge: Merge = Merge()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    epochs: Positive | None = None
    """Passes over the training rows. Default: 1, unless `steps` is set."""
    steps: Count | None = None
    """Optimizer steps, instead of epochs."""
    gradient_checkpointing: Literal["auto", True, False] = "auto"
    """Recompute activations: about 30 % slower, several times less activation memory. `auto`: only
    where no micro-batch fits without. It changes no result."""
    compile: bool = False
    """Fuse the operations of each layer (torch.compile). It changes no result but by rounding."""
    log_every: Count = 5
    """Steps between two lines of metrics.jsonl."""
    validate_every: Count | None = None
    """Steps between two evaluations of the validation split. Default: once an epoch."""
    checkpoint_minutes: Positive = 15
    """Time between two checkpoints: at most this much work is lost. It changes no result."""
    timeout_minutes: Positive = 30
    """When a rank that does nothing ends the run. It changes no result."""
    seed: Int = 0


def why_refused(task: str, method: str, launch: str) -> str | None:
    """What is wrong with the combination, and what to use instead."""
    if task == "sequence-classification":
        refused = {"qlora": QLORA_CLASSIFIER} | dict.fromkeys(ZERO, ZERO_CLASSIFIER)
        for choice in (method, launch):
            if reason := refused.get(choice):
                return f"`{choice}` for classification is refused: {reason}"
    reason = REFUSED.get((method, launch))
    return reason and f"`{method}` under `{launch}` is refused: {reason}"


class Run(RunDefaults):
    """One training run, complete."""

    model: str
    dataset: str

    @model_validator(mode="after")
    def check_combination(self) -> Run:
        if reason := why_refused(self.task, self.method, self.launch):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def check_optimizer(self) -> Run:
        if self.optimizer.name == "adamw_8bit" and self.launch in ZERO:
            raise ValueError(f"`adamw_8bit` under `{self.launch}` is refused: {ZERO_8BIT}")
        return self

    @model_validator(mode="after")
    def check_compile(self) -> Run:
        if self.compile and self.launch.startswith("zero3"):
            raise ValueError(f"`compile` under `{self.launch}` is refused: {ZERO3_COMPILED}")
        return self

    @model_validator(mode="after")
    def check_length(self) -> Run:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("set `epochs` or `steps`, not both")
        return self

    @model_validator(mode="after")
    def check_batch(self) -> Run:
        chosen, world = self.batch.micro, self.gpus * self.nodes
        split_batch(self.batch.global_, 1 if chosen == "auto" else chosen, world)
        return self

    @model_validator(mode="after")
    def check_gpu(self) -> Run:
        if self.gpu_memory_gb is not None and self.gpu_model is not None:
            raise ValueError("set `gpu_memory_gb` or `gpu_model`, not both")
        return self


class Config(Strict):
    """The whole file."""

    models: dict[Name, Model] = Field(min_length=1)
    datasets: dict[Name, Dataset] = Field(min_length=1)
    defaults: RunDefaults = RunDefaults()
    runs: dict[Name, Run] = Field(min_length=1)


def merge(base: dict, over: dict) -> dict:
    """Deep merge of two nested mappings; `over` wins."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def complete_run(defaults: dict, run: dict) -> dict:
    """Method's defaults, then the file's `defaults`, then the run's own keys."""
    chosen = merge(defaults, run)
    method = chosen.get("method", RunDefaults.model_fields["method"].default)
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if run.get(key) is not None and other not in run:
            chosen.pop(other, None)
    known = METHOD_DEFAULTS.get(method, {}) if isinstance(method, str) else {}
    if chosen.get("steps") is None and chosen.get("epochs") is None:
        chosen["epochs"] = 1
    if chosen.get("task") == "sequence-classification":
        known = merge(known, {"launch": "ddp"})
    return merge(known, chosen)
