"""transformers.Trainer with exact batches, exact validation loss, throughput, and checkpoints that
prove complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from finetune import checkpoints
from finetune.cli import UserError
from finetune.counters import save_counters
from finetune.encoding import IGNORED
from finetune.guards import check_finite
from finetune.out_of_memory import is_out_of_memory
from finetune.sampling import LengthGroups, by_length
from finetune.scores import scores_in_pieces
from finetune.stopping import Stopper


class LogLastStep(TrainerCallback):
    """Logs the last step, whatever `log_every` is: no token of the run goes uncounted."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        control.should_log |= state.global_step == state.max_steps


class FinetuneTrainer(Trainer):
    """Trainer whose batches carry `row`, the index of each row in the data set."""

    row_scores = staticmethod(scores_in_pieces)
    accuracy = "token_accuracy"

    def __init__(self, *args: Any, grouped: int = 1, **kwargs: Any) -> None:
        """`grouped`: see LengthGroups."""
        super().__init__(*args, **kwargs)
        self.grouped = grouped
        self.add_callback(LogLastStep)
        # of this rank, since the last line: non-padding tokens, supervised tokens, positions
        self.counts = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        self.total_tokens = 0
        self.training_seconds = 0.0
        self.since = time.monotonic()
        self.rows_of_step: list[torch.Tensor] = []
        self.stopper: Stopper | None = None
        self.facts: dict = {}
        """What a checkpoint must have been made with to be gone on from."""

    def stop_with(self, stopper: Stopper) -> None:
        """Ask it at the end of each step, and within validations."""
        self.stopper = stopper
        self.add_callback(stopper)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> LengthGroups:
        """Whole global batches: no step is smaller than the configured batch, and accelerate
        repeats no row to even out the ranks."""
        rows = train_dataset if train_dataset is not None else self.train_dataset
        args = self.args
        size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        seed = args.data_seed if args.data_seed is not None else args.seed
        split = {"micro": args.train_batch_size, "ranks": args.world_size}
        sampler = LengthGroups(rows["length"][:], size, seed, self.grouped, **split)
        self.add_callback(sampler)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Dataset) -> list[int]:
        """Rows of like length side by side. Sums over all rows need no order."""
        return next(by_length(eval_dataset["length"][:], len(eval_dataset)))

    def training_step(self, model: Any, inputs: dict, num_items_in_batch: Any = None) -> Any:
        rows, _ = inputs.pop("row"), inputs.pop("row_of_position", None)
        tokens = inputs.pop("tokens", None)  # of packs, which have no mask
        self.counts[0] += inputs["attention_mask"].sum() if tokens is None else tokens
        self.counts[1] += self.supervised(inputs)
        self.counts[2] += inputs["input_ids"].numel()
        loss = super().training_step(model, inputs, num_items_in_batch)
        check_finite(loss, "the loss", self.state.global_step + 1, self.ids_of([rows]))
        self.rows_of_step.append(rows)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Checked at every step, and so before a checkpoint. Under fp16 the scaler skips such
        steps and goes on."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16:
            ids = self.ids_of(self.rows_of_step)
            check_finite(norm, "the gradient norm", self.state.global_step + 1, ids)
        self.rows_of_step = []
        return norm

    def ids_of(self, rows: list[torch.Tensor]) -> Callable[[], list[str]]:
        """The ids of training rows, not looked up yet."""
        return lambda: [self.train_dataset[i]["id"] for i in torch.cat(rows).tolist()]

    def supervised(self, inputs: dict) -> torch.Tensor:
        """Tokens of a batch that the loss is taken on."""
        return (inputs["shift_labels"] != IGNORED).sum()

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss averaged over supervised tokens of the whole split. The inherited one averages
        the means of batches, which weighs short rows more."""
        started = time.monotonic()
        gpu = [self.args.device] if self.args.device.type == "cuda" else []  # no other is touched
        with torch.random.fork_rng(gpu):  # loaders draw numbers: training depends on none of them
            totals = self.score(self.get_eval_dataloader(eval_dataset))
        self.since += time.monotonic() - started  # validation is no training time
        if totals is None:
            self.stopper.stop(self.control)
            return {}
        nll, tokens, correct = totals.tolist()
        step, rows = self.state.global_step, lambda: ["of validation"]
        check_finite(nll / tokens, "the validation loss", step, rows)
        metrics = {f"{metric_key_prefix}_loss": nll / tokens}
        metrics[f"{metric_key_prefix}_{self.accuracy}"] = correct / tokens
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @torch.no_grad()
    def score(self, batches: Any) -> torch.Tensor | None:
        """Summed row scores over all ranks, each row once. None if the run has to stop."""
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            if self.stopper and self.stopper.agree()[0]:
                return None
            scores = self.row_scores(self.model, batch)
            totals += self.accelerator.gather_for_metrics(scores).double().sum(0).cpu()
            self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return totals

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens seen and tokens per second, over all ranks, to training lines."""
        if "loss" in logs:
            tokens, supervised, positions = self.accelerator.reduce(self.counts, "sum").tolist()
            seconds = time.monotonic() - self.since
            self.total_tokens += int(tokens)
            self.training_seconds += seconds
            logs |= {
                "tokens": self.total_tokens,
                "tokens_per_second": tokens / seconds,
                "padding_share": 1 - tokens / positions,
            }
            if supervised:  # a classifier has no such tokens
                logs["supervised_share"] = supervised / tokens
            self.counts.zero_()
            self.since = time.monotonic()
        super().log(logs, start_time)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """No step is left of a run that stopped in its last validation, and none may be taken
        when it stops in one that it makes up for before its first step."""
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """DeepSpeed's own checkpoint holds the weights: they are not gathered for it."""
        if not (_internal_call and self.is_deepspeed_enabled):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """All ranks write their parts; then rank 0 declares the checkpoint complete."""
        started = time.monotonic()
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if self.is_world_process_zero():
            checkpoints.remove(folder)  # of a run that was killed while it saved
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            save_counters(self, folder)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                checkpoints.seal(folder, self.facts)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(
                f"{folder} could not be written: {error}. See that its disk has space; the same "
                "command goes on from the checkpoint before."
            ) from error
        if self.is_world_process_zero():
            checkpoints.rotate(folder.parent)
        seconds = time.monotonic() - started
        self.since += seconds  # nor is saving
        if self.stopper:
            self.stopper.deadline.saved(seconds)
