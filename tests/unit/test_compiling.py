"""Compiled layers: what is compiled, when, and that it computes the same."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import cpp_builder

from finetune import compiling, head
from finetune.cli import UserError
from finetune.collator import restarting_positions
from finetune.compiling import CompiledSteps, check_compiler, compile_layers
from finetune.config import Run, complete_run
from finetune.guards import GradientGuard
from finetune.modeling import load_for_training
from plan_run import check_compile

SETTINGS = {
    "attention": "sdpa",
    "trust_remote_code": False,
    "launch": "ddp",
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.3, "target_modules": "all-linear"},
    "quantization": {"type": "nf4", "double": True},
}
LENGTHS = (12, 17, 23)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def counter():
    """A backend that counts graphs. As inductor it takes them from AOTAutograd, but in seconds."""
    return CompileCounterWithBackend("eager")


def load(folder, method, labels=None):
    torch.manual_seed(0)
    model = load_for_training(folder, SETTINGS | {"method": method}, 0, labels)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start
            parameter.data.normal_(std=0.05)
    return model.train()


def batch(length, packed=False):
    ids = torch.randint(5, 300, (2, length), generator=torch.manual_seed(length))
    kept = torch.arange(length - 1)
    given = {"input_ids": ids, "labels": ids, "logits_to_keep": kept}
    given["shift_labels"] = ids[:, 1:].contiguous()
    if packed:
        lengths = [[length - 5, 5], [length - 9, 4, 3]]
        return given | {"position_ids": restarting_positions(lengths, length), "use_cache": False}
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return given | {"attention_mask": mask}


def learned(model, batches):
    """Losses, and the gradients that they add up to."""
    losses = []
    for number, given in enumerate(batches):
        torch.manual_seed(number)  # of dropout
        loss = model(**given).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-3)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        both = found[1][name].flatten().float(), gradient.flatten().float()
        assert torch.cosine_similarity(*both, dim=0) > 0.999, name


@pytest.mark.parametrize(
    ("method", "recompute", "packed", "backend"),
    [
        ("full", False, False, "eager"),
        pytest.param("qlora", True, True, "aot_eager", marks=pytest.mark.slow),
        pytest.param("lora", False, False, "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_the_plain_model(
    tiny_model, monkeypatch, method, recompute, packed, backend
):
    monkeypatch.setattr(head, "PIECE", 5_000)  # a batch has several pieces
    counter = CompileCounterWithBackend(backend)
    batches, results, names = [batch(length, packed) for length in LENGTHS], [], []
    for compiled in (False, True):
        model = load(tiny_model, method)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            compile_layers(model, counter)
        results.append(learned(model, batches))
        names.append(list(model.state_dict()))
    assert_same(results[1], results[0])
    assert names[0] == names[1]
    # full: no graph for a length. Others: the input of the first layer needs no gradient
    assert counter.frame_count == 1 if method == "full" else 2 <= counter.frame_count < 6


def test_a_classifier_is_compiled_too(tiny_model, counter):
    given = {k: v for k, v in batch(12).items() if k in ("input_ids", "attention_mask")}
    given |= {"labels": torch.tensor([0, 2])}
    results = []
    for compiled in (False, True):
        model = load(tiny_model, "full", ["a", "b", "c"])
        model.config.pad_token_id = 0
        if compiled:
            compile_layers(model, counter)
        results.append(learned(model, [given]))
    assert_same(results[1], results[0])
    assert counter.frame_count == 1


def test_validations_and_steps_that_a_guard_looks_into_are_not_compiled(
    tiny_model, counter, monkeypatch
):
    monkeypatch.setattr(compiling.compile_layers, "__defaults__", (counter,))
    model, compiled = load(tiny_model, "full"), []
    guard = GradientGuard(model)
    steps = CompiledSteps(model, guard)

    def train(evaluate):
        if evaluate:
            model.eval()(**batch(12))
            guard.on_evaluate()
        steps.on_step_begin()
        model.train()(**batch(12)).loss.backward()
        for callback in (guard, steps):
            callback.on_step_end()
        compiled.append(counter.frame_count)

    guard.on_train_begin()
    for evaluate in (False, False, True, False):
        train(evaluate)
    assert guard.checks == 2
    assert compiled == [0, 1, 1, 1]


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(UserError, match=r"Linear has no layers .* leave `compile` out"):
        compile_layers(torch.nn.Linear(2, 2))


def test_without_a_compiler_a_run_ends_in_its_plan(monkeypatch):
    settings = {"compile": True, "gpu_memory_gb": None, "gpu_model": None}
    check_compile(settings)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    uncached = cpp_builder.cpp_compiler_search.__wrapped__
    monkeypatch.setattr(cpp_builder, "cpp_compiler_search", uncached)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and none was found"):
        check_compile(settings)
    check_compile(settings | {"compile": False})
    check_compile(settings | {"gpu_model": "h100"})


@pytest.mark.parametrize(
    ("triton", "names", "fine"), [(True, ["gcc"], True), (True, [], False), (False, ["gcc"], False)]
)
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch, tmp_path, triton, names, fine):
    import torch.utils._triton

    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: triton)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in names:
        (tmp_path / name).touch(mode=0o755)
    if fine:
        check_compiler(cpu=False)
    else:
        with pytest.raises(UserError, match=r"needs Triton, a GPU of compute capability 7\.0"):
            check_compiler(cpu=False)


@pytest.mark.parametrize("cpu", [True, False])
def test_what_compilers_build_includes_the_headers_of_python(monkeypatch, tmp_path, cpu):
    """Inductor's kernels for a CPU do, and Triton's launchers. Debian has them in python3-dev."""
    monkeypatch.setattr(compiling, "triton", lambda: True)
    check_compiler(cpu)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(UserError, match=rf"needs {tmp_path}/Python\.h, .* python3-dev"):
        check_compiler(cpu)


@pytest.mark.parametrize("launch", ["zero3", "zero3-offload"])
def test_zero3_is_refused_with_what_to_use(launch):
    run = {"model": "m", "dataset": "d", "method": "full", "launch": launch, "compile": True}
    with pytest.raises(
        ValueError, match=f"`compile` under `{launch}` is refused: .*`launch: zero2`"
    ):
        Run.model_validate(complete_run({}, run))
