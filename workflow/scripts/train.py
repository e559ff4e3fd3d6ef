"""Rule train, inside each process that launch.py starts: fine-tune, save once, record.

One script for every method and launcher. Reads the frozen settings, token folders, the model
folder and plan.json; goes on from a checkpoint if launch.py names one. Rank 0 writes `trained/`
(the adapter, or all weights in 16 bit), `metrics.jsonl` and `train.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune.cli import run_script, speak_for
from finetune.faults import leave, told
from finetune.imports import in_rank
from finetune.launched import Launched
from finetune.leases import hold_locks
from finetune.outcome import STOP
from finetune.peaks import PeakMemory
from finetune.processes import answer_signals, die_with_parent


def main() -> None:
    args = parse()
    speak_for(args.output.parent.name)
    args.state.mkdir(parents=True, exist_ok=True)
    die_with_parent()
    answer_signals((args.state / STOP).touch)
    hold_locks()
    with told(args.state) as place, PeakMemory(args.state) as peaks:
        with in_rank():
            from finetune.training import train  # takes seconds, in which signals are answered

        train(Launched(**vars(args)), place, peaks)
    leave(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="frozen settings (YAML)")
    parser.add_argument("--plan", required=True, type=Path)
    parser.add_argument("--tokens", required=True, type=Path, help="folder of tokenize_data")
    parser.add_argument("--model", required=True, type=Path, help="pretrained/ of fetch_model")
    parser.add_argument("--output", required=True, type=Path, help="trained/")
    parser.add_argument("--metrics", required=True, type=Path)
    parser.add_argument("--record", required=True, type=Path)
    parser.add_argument("--state", required=True, type=Path, help="checkpoints/ and what is there")
    parser.add_argument("--world-size", required=True, type=int)
    parser.add_argument("--micro-batch", required=True, type=int)
    parser.add_argument("--resume", type=Path, help="a checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
