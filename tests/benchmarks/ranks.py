"""What training.py starts in each rank: train.py of this workflow, or TRL's SFTTrainer, measured.

Both build a transformers.Trainer, and so take the same callback. Nothing is imported before they
import it themselves: how long that takes is measured too.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))
import train  # noqa: E402


def measure() -> None:
    """Have every Trainer write what this rank took: until it begins to train, and between the end
    of the first step, which warms up, and the end of the last."""
    from transformers import TrainerCallback, trainer

    trainer.DEFAULT_CALLBACKS.append(type("Measure", (Measured, TrainerCallback), {}))


class Measured:
    def __init__(self) -> None:
        self.facts: dict = {}
        self.start: tuple[float, float] | None = None

    def on_train_begin(self, args, state, control, **_: object) -> None:
        self.facts["setup"] = time.time() - float(os.environ["BENCHMARK_STARTED"])

    def on_step_end(self, args, state, control, **_: object) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic(), time.process_time()
        if self.start is None:
            self.start = now
        self.facts["seconds"], self.facts["cpu"] = (
            b - a for a, b in zip(self.start, now, strict=True)
        )

    def on_train_end(self, args, state, control, **_: object) -> None:
        import torch

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_reserved()
        losses = [line["loss"] for line in state.log_history if "loss" in line]
        facts = self.facts | {"peak": peak, "loss": losses[-1]}
        folder = Path(os.environ["BENCHMARK_OUTPUT"])
        (folder / f"rank{args.process_index}.json").write_text(json.dumps(facts))


def train_with_trl(settings: dict) -> None:
    """As its documentation does: the model by name, a LoraConfig, rows of ids and labels."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    adapters, load = None, {"dtype": torch.bfloat16}
    if settings["method"] == "qlora":
        adapters = LoraConfig(task_type="CAUSAL_LM", **settings["lora"])
        load["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        if torch.cuda.is_available():
            load["device_map"] = {"": int(os.environ["LOCAL_RANK"])}
    args = SFTConfig(
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        model_init_kwargs=load,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        **settings["arguments"],
    )
    rows = Dataset.load_from_disk(settings["rows"])
    sft = SFTTrainer(settings["model"], args=args, train_dataset=rows, peft_config=adapters)
    sft.train()


@contextmanager
def then_measure(imports=train.in_rank) -> Iterator[None]:
    """What train.py imports its Trainer in, and after it the callback."""
    with imports():
        yield
    measure()


if __name__ == "__main__":
    if sys.argv[1] == "trl":
        measure()
        train_with_trl(json.loads(sys.argv[2]))
    else:
        train.in_rank = then_measure
        train.run_script(train.main)
