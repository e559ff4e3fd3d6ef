"""Memory: formulas against published figures, against each other, and monotone where they must."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import truths
from finetune.host import OTHER, PROCESS, RANK, disk_space, host_memory
from finetune.memory import (
    CUDA,
    LIVE,
    NF4_BITS,
    NF4_DOUBLE_BITS,
    Job,
    predicted,
    training_memory,
    weight_update,
)
from finetune.merge_check import rows_compared, tokens_compared
from truths import PAGE, job, llama, page

LLAMA = llama("LLaMA 7B")
ADAPTER = 159_907_840
"""What peft prints for QLoRA's LLaMA 7B, r 64."""
LAUNCHES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")
ZERO3 = LAUNCHES[3:]


def parts(method: str, launch: str = "ddp", world: int = 1, **more) -> dict[str, int]:
    return training_memory(LLAMA, job(method, launch, world, **{"rank": 64} | more))


@pytest.mark.parametrize("truth", truths.truths(), ids=lambda t: f"{t.source}: {t.what}")
def test_published_figures(truth) -> None:
    """Within 15 %, and what differs from what the source did is named."""
    assert abs(truth.error) <= 0.15
    assert bool(truth.why) == (truth.plain != truth.alike)


def test_the_table_in_the_docs_is_the_one_that_is_true() -> None:
    """`make memory` writes it again."""
    assert PAGE.read_text() == page(PAGE.read_text())


def test_bits_a_parameter_of_the_qlora_paper() -> None:
    """Section 3: constants cost 0.5 bit a parameter, and 0.127 when they are quantized too."""
    assert NF4_BITS == 4.5
    assert round(NF4_DOUBLE_BITS, 3) == 4.127


@pytest.mark.parametrize(("double", "base"), [(True, 3_865_591_808), (False, 4_167_573_504)])
def test_quantized_weights(double, base) -> None:
    """4-bit linear layers; 16-bit embeddings, head and norms; fp32 adapters."""
    found = parts("qlora", double=double)
    assert found["weights"] == base
    assert found["adapters"] == ADAPTER * 4
    assert found["temporary"] == 4096 * 11008 * 2


@pytest.mark.parametrize(
    ("launch", "weights", "adapters", "gradients", "optimizer"),
    [
        ("ddp", 13_476_831_232, ADAPTER * 4, ADAPTER * 4, ADAPTER * 8),
        ("zero1", 13_476_831_232, ADAPTER * 2, ADAPTER * 2, ADAPTER * 3),
        ("zero2", 13_476_831_232, ADAPTER * 2, ADAPTER / 2, ADAPTER * 3),
        ("zero3", 13_476_831_232 / 4, ADAPTER / 2, ADAPTER / 2, ADAPTER * 3),
        ("zero3-offload", 0, 0, 0, 0),
    ],
)
def test_states_of_lora_on_four_gpus(launch, weights, adapters, gradients, optimizer) -> None:
    found = parts("lora", launch, 4)
    names = ("weights", "adapters", "gradients", "optimizer")
    assert [found[name] for name in names] == [weights, adapters, gradients, optimizer]


@pytest.mark.parametrize(
    ("method", "launch", "moments"),
    [
        ("qlora", "ddp", ADAPTER * 2.03125),
        # embeddings keep moments of 8 bytes
        ("full", "ddp", (6_738_415_616 - 32_000 * 4096) * 2.03125 + 32_000 * 4096 * 8),
        ("full", "zero1", 6_738_415_616 * 12),  # it has no such optimizer
    ],
)
def test_moments_in_8_bit(method, launch, moments) -> None:
    assert parts(method, launch, optimizer="adamw_8bit")["optimizer"] == moments


@pytest.mark.parametrize(
    ("method", "launch", "world", "buffers"),
    [
        ("qlora", "ddp", 1, 0),  # no DDP wraps a single process
        ("qlora", "ddp", 2, ADAPTER * 4),
        ("full", "ddp", 2, 6_738_415_616 * 4),
        ("full", "zero1", 2, 500_000_000 * 2),  # DeepSpeed's default size
        ("full", "zero2", 2, 500_000_000 * 2 * 2),  # overlap_comm
        ("full", "zero3", 2, 4096**2 * 2),  # "auto"
    ],
)
def test_buckets(method, launch, world, buffers) -> None:
    assert parts(method, launch, world, micro=8)["buffers"] == buffers


def test_gathered_weights_are_bounded_by_what_deepspeed_keeps_live() -> None:
    assert parts("full", "zero3", 8, micro=64)["gathered"] == 2 * LIVE
    small = replace(LLAMA, parameters=10_000_000)
    found = training_memory(small, job("full", "zero3", 8, micro=64))
    assert found["gathered"] == 2 * (LLAMA.block + LLAMA.persistent)
    assert parts("full", "zero2", 8, micro=64)["gathered"] == 0


def test_logits_are_those_of_supervised_positions() -> None:
    """Each of 16 bit and with its gradient; a chunk in fp32, twice."""
    assert parts("qlora", supervised=100)["logits"] == 100 * 32_000 * (4 + 8)
    # positions of several rows may differ, and no row has more than its length
    assert parts("qlora", micro=3, supervised=100)["logits"] == 3 * 300 * 32_000 * 4 + 2**24 * 8
    # above 2**25 of them in pieces, of which there are two at once
    assert parts("qlora", micro=9, supervised=100)["logits"] == 2 * 2**25 * 4 + 2**24 * 8
    assert parts("qlora", cpu=True, supervised=100)["logits"] == 100 * 32_000 * 4 + 2**17 * 8
    assert parts("lora", micro=9, classes=5)["logits"] == 9 * 5 * 10


def test_the_peak_is_the_backward_pass_or_the_update() -> None:
    update = parts("full", "zero2", 2, length=64, supervised=64)
    assert update["update"] == 6_738_415_616 * 4 // 2  # gradients in fp32; AdamW is fused
    assert "activations" not in update
    backward = parts("full", "zero2", 64, micro=16, length=2048, supervised=2048)
    assert "update" not in backward
    assert backward["activations"] > 0


@pytest.mark.parametrize(
    ("launch", "size"),
    # a share in fp32; of ZeRO-3 a group of config/deepspeed and a largest weight, in 16 bit too
    [
        ("zero1", 6_738_415_616),
        ("zero2", 6_738_415_616),
        ("zero3", (20_000_000 + 32_000 * 4096 // 4) * 6),
        ("ddp", 0),
    ],
)
def test_an_update_takes_gradients_in_fp32(launch, size) -> None:
    assert weight_update(LLAMA, job("full", launch, 4)) == size


def test_a_small_share_is_one_group() -> None:
    small = replace(LLAMA, parameters=10_000_000)
    assert weight_update(small, job("full", "zero3", 4)) == 2_500_000 * 6


def test_a_part_is_a_whole_number_of_bytes_and_fragments_are_a_twentieth() -> None:
    found = parts("qlora")
    rest = predicted(found) - found["allowance"]
    assert found["allowance"] == pytest.approx(0.05 * rest, abs=1)
    assert found["context"] == CUDA
    assert parts("qlora", cpu=True)["context"] == PROCESS + 6_738_415_616 * 2
    assert all(type(value) is int for value in found.values())


def test_scores_cost_the_square_of_the_length_only_where_they_exist() -> None:
    def kept(attention: str, length: int) -> int:
        run = {"attention": attention, "length": length, "checkpointing": False}
        return parts("qlora", **run)["activations"]

    assert kept("flash_attention_2", 4096) == 4 * kept("flash_attention_2", 1024)
    assert kept("sdpa", 4096) < 4.02 * kept("sdpa", 1024)  # its mask
    assert kept("eager", 4096) > 9 * kept("eager", 1024)


JOBS = st.builds(
    Job,
    method=st.sampled_from(["qlora", "lora", "full"]),
    launch=st.sampled_from(LAUNCHES),
    world=st.integers(1, 64),
    per_node=st.just(1),
    micro=st.integers(1, 16),
    length=st.integers(2, 8192),
    supervised=st.integers(1, 8192),
    checkpointing=st.booleans(),
    attention=st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    cpu=st.booleans(),
    classes=st.sampled_from([None, 2]),
)
SLACK = 16
"""Bytes, for rounding the parts."""


def total(run: Job, **changes) -> int:
    return predicted(training_memory(LLAMA, replace(run, **changes)))


@given(JOBS)
def test_what_should_save_memory_never_costs_any(run) -> None:
    now = total(run) + SLACK
    assert total(run) <= total(run, micro=run.micro + 1) + SLACK
    assert total(run) <= total(run, length=run.length + 1) + SLACK
    assert total(run, checkpointing=True) <= total(run, checkpointing=False) + SLACK
    if run.launch != "ddp":  # DDP gets buckets with the second process
        assert total(run, world=run.world + 1) <= now
    assert total(run, attention="flash_attention_2") <= total(run, attention="eager") + SLACK


def states(run: Job, **changes) -> int:
    found = training_memory(LLAMA, replace(run, **changes))
    return sum(found[name] for name in ("weights", "adapters", "gradients", "optimizer"))


@given(JOBS)
def test_each_stage_of_zero_shards_more(run) -> None:
    sizes = [states(run, launch=launch) for launch in LAUNCHES[1:]]
    assert all(later <= earlier + SLACK for earlier, later in pairwise(sizes))


@given(JOBS)
def test_qlora_holds_less_than_lora_and_lora_less_than_full(run) -> None:
    """But adapters keep more activations: each drops out its own copy of its input."""
    sizes = [states(run, launch="ddp", method=method) for method in ("qlora", "lora", "full")]
    assert sizes == sorted(sizes)


WHOLE = 6_738_415_616
SCORES = 8192 * 32_000 * 10


@pytest.mark.parametrize(
    ("method", "launch", "train", "merge"),
    [
        # a rank each; weights are built in host memory in both, as fp32 adapters are
        ("lora", "ddp", 2 * (RANK + WHOLE * 2 + ADAPTER * 4), WHOLE * 2 + SCORES),
        ("full", "ddp", 2 * (RANK + WHOLE * 4), 0),
        # rank 0 reads the files
        ("full", "zero3", 2 * RANK + WHOLE * 2, 0),
        # 16-bit weights; masters, moments and gradients; what rank 0 collects to save
        ("full", "zero3-offload", 2 * RANK + WHOLE * (2 + 18 + 2), 0),
        # the best merged model and the one that is tried
        ("qlora", "ddp", 2 * (RANK + 32_000 * 4096 * 2), WHOLE * 4 + SCORES),
    ],
)
def test_host_memory_on_two_gpus(method, launch, train, merge) -> None:
    found = host_memory(LLAMA, job(method, launch, 2, rank=64))
    assert found == {"train": train, "merge": PROCESS + merge}


def test_rows_that_a_merge_is_compared_on() -> None:
    """Up to 16, and 8192 tokens with their padding; or one that is longer."""
    assert [rows_compared([9] * n) for n in (0, 1, 5, 50)] == [0, 1, 5, 16]
    assert rows_compared([512] * 20) == rows_compared([1] * 15 + [512]) == 16
    assert rows_compared([513] * 20) == rows_compared([1] * 15 + [513]) == 15
    assert rows_compared([9000, 1]) == rows_compared([1, 9000]) == 1
    assert [tokens_compared(n) for n in (100, 512, 513, 9000)] == [1600, 8192, 8192, 9000]


def test_cpu_processes_take_host_memory() -> None:
    run = job("full", "ddp", 2, cpu=True, attention="eager")
    assert host_memory(LLAMA, run)["train"] == 2 * predicted(training_memory(LLAMA, run))


def test_cpu_processes_offload_nothing() -> None:
    """What would be offloaded stays in the memory that they share."""
    kept, offloaded = (job("full", x, 2, cpu=True, attention="eager") for x in ZERO3)
    assert training_memory(LLAMA, offloaded) == training_memory(LLAMA, kept)
    assert host_memory(LLAMA, offloaded) == host_memory(LLAMA, kept)


def test_offload_is_shared_among_nodes() -> None:
    one, two = (
        host_memory(LLAMA, replace(job("full", "zero3-offload", 8), per_node=per_node))["train"]
        for per_node in (8, 4)
    )
    assert one - two == 4 * RANK + WHOLE * 20 // 2


@pytest.mark.parametrize(
    ("method", "launch", "checkpoint", "trained"),
    [
        ("full", "zero3", WHOLE * 14, WHOLE * 2),
        ("full", "ddp", WHOLE * 12, WHOLE * 2),
        ("qlora", "ddp", ADAPTER * 12, ADAPTER * 4),
    ],
)
def test_disk(method, launch, checkpoint, trained) -> None:
    """Two checkpoints are kept while a third is written."""
    assert disk_space(LLAMA, job(method, launch, rank=64)) == {
        "checkpoint": checkpoint + OTHER,
        "trained": trained + OTHER,
        "train": 3 * (checkpoint + OTHER) + trained + OTHER,
        "merge": WHOLE * 2 + OTHER,
    }
