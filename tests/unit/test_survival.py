"""The small decisions behind a run that survives: micro-batches, jumps, lines, first words."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from finetune import head
from finetune.advice import last_remedies
from finetune.backoff import fitting_micro, smaller_micro
from finetune.counters import RestoreCounters, save_counters, share_of
from finetune.history import (
    backed_off,
    note_kill,
    peaks_reached,
    read_history,
    record,
    seconds_spent,
)
from finetune.metric_lines import cut_back, lacks_validation, read_lines
from finetune.out_of_memory import is_out_of_memory
from finetune.outcome import claim, read_outcome
from finetune.peaks import highest
from finetune.progress import usual_before_jump
from finetune.stopping import Stopper


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.distributed.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:2028, unhandled cuda error\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Failed to CUDA calloc async 6291456 bytes"
        ),
        MemoryError(),
    ],
)
def test_out_of_memory_is_known(error):
    assert is_out_of_memory(error)


def test_the_cpu_allocators_words_are_known():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50)
    assert is_out_of_memory(error.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: invalid"), OSError("out of memory")])
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("batch", "world", "micro", "smaller"),
    [(16, 2, 8, 4), (16, 2, 1, None), (24, 2, 3, 1), (24, 2, 12, 6), (10, 2, 5, 1), (18, 2, 9, 3)],
)
def test_the_next_smaller_micro_batch_splits_the_batch(batch, world, micro, smaller):
    assert smaller_micro(batch, world, micro) == smaller


@pytest.mark.parametrize(("most", "fits"), [(8, 6), (5, 4), (1, 1), (100, 12)])
def test_a_micro_batch_of_before_that_no_longer_divides(most, fits):
    assert fitting_micro(24, 2, most) == fits


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (
            {"method": "full", "launch": "zero3", "recomputed": False},
            "`gradient_checkpointing: true`, a shorter max_length, `launch: zero3-offload`, more",
        ),
        ({"method": "qlora", "launch": "ddp"}, "order: a shorter max_length."),
        ({"method": "lora", "launch": "ddp", "gpus": 2}, "max_length, `launch: zero3`, `method: q"),
    ],
)
def test_what_is_left_with_one_row_at_a_time(settings, advice):
    again = settings.pop("recomputed", True)
    plan = {"settings": {"task": "causal-lm"} | settings, "gradient_checkpointing": again}
    assert advice in last_remedies(plan)


def test_a_jump_is_far_above_what_was_usual():
    noisy = [2.0, 2.3, 1.8, 2.1, 1.9, 2.2, 2.0, 1.7, 2.1, 1.9]
    assert usual_before_jump(noisy, 2.5) is None
    assert usual_before_jump(noisy, 4.0) == pytest.approx(2.0)
    assert usual_before_jump(noisy[:5], 9.0) is None  # too few to know
    assert usual_before_jump([1.0] * 10, 1.2) is None  # a curve that hardly moves
    assert usual_before_jump([5.0 - 0.2 * i for i in range(20)], 1.0) is None  # it falls


def write_lines(path, lines, tail=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logged = [{"step": 2, "loss": 3.0}, {"step": 2, "eval_loss": 3.1}, {"step": 4, "loss": 2.0}]
    write_lines(path, [*logged, {"step": 2, "train_loss": 1.0}], tail='{"step": 6, "lo')
    cut_back(path, 2)
    assert read_lines(path) == logged[:2]
    cut_back(path, 0)
    assert path.read_text() == ""
    cut_back(tmp_path / "new.jsonl", 0)
    assert read_lines(tmp_path / "new.jsonl") == []


@pytest.mark.parametrize(
    ("step", "every", "logged", "lacks"),
    [
        (4, 2, [2], True),
        (4, 2, [2, 4], False),
        (5, 2, [2, 4], False),
        (7, None, [], True),  # the end of an epoch
        (6, None, [], False),
        (9, None, [7], True),  # the end of the run
        (0, 2, [], False),
    ],
)
def test_a_validation_that_the_end_came_before_is_known(tmp_path, step, every, logged, lacks):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [{"step": at, "eval_loss": 1.0} for at in logged])
    plan = {"steps": 9, "steps_per_epoch": 7}
    assert lacks_validation(path, step, plan, every) is lacks


def test_the_history_of_a_run(tmp_path):
    record(tmp_path, "started", 0, micro_batch=4)
    note_kill(tmp_path, 7, {"host": 5, "host_node": 9})
    record(tmp_path, "resumed", 5, micro_batch=4)
    ended = {"next_micro_batch": 2, "seconds": 10.5, "peak_memory": {"host": 6, "host_node": 7}}
    record(tmp_path, "out of memory", 6, micro_batch=4, **ended)
    note_kill(tmp_path, 9, {})  # it ended by itself
    events = read_history(tmp_path)
    assert [(e["event"], e["step"]) for e in events] == [
        ("started", 0),
        ("killed", 7),
        ("resumed", 5),
        ("out of memory", 6),
    ]
    assert (backed_off(events), backed_off(events[:3])) == (2, None)
    assert seconds_spent(events) == 10.5
    assert highest(peaks_reached(events)) == {"host": 6, "host_node": 9}


def test_only_the_first_tells(tmp_path):
    assert read_outcome(tmp_path) == {}
    assert claim(tmp_path, "error", rank=1)
    assert not claim(tmp_path, "died", rank=0)
    assert read_outcome(tmp_path) == {"kind": "error", "rank": 1}


def test_sums_of_ranks_go_to_as_many_or_keep_mean_and_total():
    saved = [{"loss": 1.0, "counts": [3.0, 1.0]}, {"loss": 2.0, "counts": [5.0, 2.0]}]
    assert [share_of(saved, rank, 2) for rank in (0, 1)] == [(1.0, [3.0, 1.0]), (2.0, [5.0, 2.0])]
    assert share_of(saved, 0, 1) == (1.5, [8.0, 3.0])
    assert share_of(saved, 2, 4) == (1.5, [0.0, 0.0])


def test_a_checkpoint_holds_what_was_counted(tmp_path, monkeypatch):
    def trainer(loss, counts, last, total, tokens, seconds):
        return SimpleNamespace(
            args=SimpleNamespace(process_index=0, world_size=1),
            counts=torch.tensor(counts),
            total_tokens=tokens,
            training_seconds=seconds,
            since=time.monotonic(),
            _tr_loss=torch.tensor(loss),
            _globalstep_last_logged=last,
            _total_loss_scalar=total,
        )

    monkeypatch.setattr(head, "most_pieces", 3)
    save_counters(trainer(1.5, [3.0, 1.0, 4.0], 7, 2.5, 30, 9.0), tmp_path)
    monkeypatch.setattr(head, "most_pieces", 1)
    new = trainer(0.0, [0.0, 0.0, 0.0], 0, 0.0, 0, 0.0)
    RestoreCounters(new, tmp_path).on_train_begin()
    assert (new._tr_loss.item(), new.counts.tolist()) == (1.5, [3.0, 1.0, 4.0])
    assert (new._globalstep_last_logged, new._total_loss_scalar) == (7, 2.5)
    assert (new.total_tokens, new.training_seconds, head.most_pieces) == (30, 9.0, 3)


@pytest.fixture
def control():
    return TrainerControl()


def test_a_stop_saves_and_leaves_validations_for_later(tmp_path, control):
    """The end of an epoch is said at the end of a stop, too: nothing is validated then."""
    stopper = Stopper(tmp_path, minutes=15, device=torch.device("cpu"))
    state = TrainerState(global_step=3, max_steps=9)
    stopper.on_train_begin(None, state, control)
    control.should_evaluate = True
    stopper.on_step_end(None, state, control)
    assert (control.should_save, control.should_training_stop) == (False, False)
    assert control.should_evaluate
    (tmp_path / "stop").touch()
    stopper.on_step_end(None, state, control)
    assert (control.should_save, control.should_training_stop) == (True, True)
    assert not control.should_evaluate
    control.should_evaluate = True  # as DefaultFlowCallback does
    stopper.on_epoch_end(None, state, control)
    assert not control.should_evaluate


def test_a_checkpoint_is_due_by_the_clock_and_not_after_the_last_step(tmp_path, control):
    stopper = Stopper(tmp_path, minutes=1, device=torch.device("cpu"))
    state = TrainerState(global_step=3, max_steps=9)
    stopper.on_train_begin(None, state, control)
    stopper.saved -= 59
    stopper.on_step_end(None, state, control)
    assert not control.should_save
    stopper.saved -= 1
    stopper.on_step_end(None, TrainerState(global_step=9, max_steps=9), control)
    assert not control.should_save
    stopper.on_step_end(None, state, control)
    assert control.should_save
    stopper.on_save(None, state, control)
    control.should_save = False
    stopper.on_step_end(None, state, control)
    assert not control.should_save


RANK = """
import pathlib, time
from finetune.processes import answer_signals, die_with_parent
die_with_parent()
answer_signals(pathlib.Path("stop").touch)
pathlib.Path("ready").touch()
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path):
    """A process that answers signals as a rank does; this process stands for the agent."""
    scripts = next(path for path in sys.path if path.endswith("workflow/scripts"))
    env = os.environ | {"PYTHONPATH": scripts, "FINETUNE_PARENT": str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_from_anyone_is_a_wish_and_from_the_agent_an_order(tmp_path, rank, number):
    code = f"import os; os.kill({rank.pid}, {int(number)})"
    subprocess.run([sys.executable, "-c", code], check=True)
    for _ in range(500):
        if (tmp_path / "stop").exists():
            break
        time.sleep(0.01)
    assert (tmp_path / "stop").exists()
    assert rank.poll() is None
    rank.send_signal(number)
    assert rank.wait(timeout=5) == 1


def test_a_rank_shows_its_stacks_and_lives_on(rank):
    rank.send_signal(signal.SIGUSR2)
    assert "thread" in rank.stderr.readline().lower()
    assert rank.poll() is None


def test_a_rank_whose_agent_has_gone_before_it_looks_ends(tmp_path):
    scripts = next(path for path in sys.path if path.endswith("workflow/scripts"))
    env = os.environ | {"PYTHONPATH": scripts, "FINETUNE_PARENT": "1"}
    done = subprocess.run([sys.executable, "-c", RANK], cwd=tmp_path, env=env, timeout=20)
    assert done.returncode == 1
    assert not (tmp_path / "ready").exists()
