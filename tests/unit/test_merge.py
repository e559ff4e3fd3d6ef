"""Rule merge: the folder that is served holds what was trained, and says what it is."""

import itertools
import json
import math
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

import merge
from finetune.cli import UserError
from finetune.collator import RowCollator
from finetune.encoding import IGNORED
from finetune.files import check_complete, write_json, write_manifest
from finetune.modeling import load_for_inference
from finetune.scores import batch_scores
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens
from project import make_tiny_model

ADAPTERS = {"trust_remote_code": False, "merge": {"base": "best", "tolerance": 0.1}}
LORA = ADAPTERS | {"method": "lora"}
QLORA = ADAPTERS | {"method": "qlora", "quantization": {"type": "nf4", "double": True}}
FULL = {"trust_remote_code": False, "method": "full"}
FACTS = {
    "settings": {"task": "causal-lm", "method": "qlora", "launch": "ddp"},
    "model": {"source": "org/name", "commit": "c" * 40, "parameters": 1},
    "model_digest": "d",
    "data_digests": {"train": "t"},
    "versions": {"torch": "2.13.0"},
    "code": "a" * 40,
    **{"micro_batch": 1, "accumulation": 2, "world_size": 2, "steps": 4},
    **{"learning_rate": 1e-4, "precision": "bfloat16", "device": "CPU"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """pretrained/ of fetch_model."""
    folder = tmp_path_factory.mktemp("base")
    make_tiny_model(folder)
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer = load_tokenizer(base)
    questions = ["turn on", "what is in the kitchen", "set the light to two"]
    answers = ["yes", "no one in the bedroom", "a light is on"]
    rows = []
    for index, pair in enumerate(zip(questions, answers, strict=True)):
        prompt, answer = (tokenizer(text)["input_ids"] for text in pair)
        labels = [IGNORED] * len(prompt) + answer
        row = {"id": str(index), "input_ids": prompt + answer, "labels": labels}
        rows.append(row | {"length": len(labels)})
    for split in ("train", "validation"):
        Dataset.from_list(rows).save_to_disk(folder / split)
    write_json(folder / "lint.json", {"labels": None})
    return folder


def adapt(base, folder, quantized=None):
    """An adapter whose update is not zero, as after training."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(load_for_inference(base, False, quantized), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=[LORA, QLORA], ids=["lora", "qlora"])
def adapted(request, base, tmp_path_factory):
    """(settings, trained/) of an adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    adapt(base, folder, request.param.get("quantization"))
    return request.param, folder


def run_merge(monkeypatch, folder, settings, trained, base, tokens):
    """The rule, in a folder: model/ and merge.json."""
    write_manifest(trained)
    write_json(folder / "train.json", FACTS)
    paths = {
        "trained": trained,
        "train-record": folder / "train.json",
        "base": base,
        "tokens": tokens,
        "output": folder / "model",
        "record": folder / "merge.json",
    }
    command = ["merge.py", "--settings", json.dumps(settings)]
    command += [part for key, value in paths.items() for part in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", command)
    merge.main()
    return folder / "model", json.loads((folder / "merge.json").read_text())


@pytest.fixture
def merged(adapted, base, tokens, tmp_path, monkeypatch):
    settings, trained = adapted
    return *run_merge(monkeypatch, tmp_path, settings, trained, base, tokens), settings, trained


def test_merged_logits_are_the_trained_ones(merged, base, tokens):
    folder, record, settings, trained = merged
    quantized = settings.get("quantization") if record["base"] == "dequantized" else None
    adapter = PeftModel.from_pretrained(load_for_inference(base, False, quantized), trained)
    batch = RowCollator(load_tokenizer(base))(list(open_tokens(tokens / "validation")))
    with torch.inference_mode():
        _, before = batch_scores(adapter.eval(), batch)
        _, plain = batch_scores(load_for_inference(base, False, quantized), batch)
        _, after = batch_scores(load_for_inference(folder, False), batch)
    largest = before.abs().max().item()
    assert (after - before).abs().max().item() < 0.03 * largest  # bf16: steps of 2^-8
    assert (after - plain).abs().max().item() > 0.2 * largest  # the adapter does something


def test_what_is_served_is_16_bit_and_plain(merged):
    folder, record, *_ = merged
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert record["tensors"] == len(tensors)
    assert not any("lora" in name or "absmax" in name for name in tensors)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert not list(folder.glob("adapter*"))


def test_files_can_be_read_by_others_and_are_named_in_the_manifest(merged):
    folder, *_ = merged
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(names.values()) == {0o644}
    assert set(json.loads((folder / "manifest.json").read_text())) == set(names) - {"manifest.json"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "README.md"} <= set(names)


BLOCKED = """
import sys
sys.modules["peft"] = sys.modules["bitsandbytes"] = None  # importing one is now an error
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = tokenizer.apply_chat_template([{"role": "user", "content": "on"}], tokenize=False)
ids = tokenizer(text, return_tensors="pt")["input_ids"]
assert model.dtype is torch.bfloat16 and torch.isfinite(model(ids).logits).all()
try:
    import peft
except ImportError:
    print("opened without peft")
"""


def test_a_gpu_that_is_there_is_left_alone(adapted, base, tokens, tmp_path, monkeypatch):
    """It is somebody's who leased it. What opens a context on it goes through _lazy_init, or is
    told a device by peft."""

    def refuse():
        raise AssertionError("merging starts CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    settings, trained = adapted
    _, record = run_merge(monkeypatch, tmp_path, settings, trained, base, tokens)
    assert record["tensors"] == 20


def test_the_model_opens_without_peft(base, tokens, tmp_path, monkeypatch):
    adapt(base, tmp_path / "trained", QLORA["quantization"])
    args = (QLORA, tmp_path / "trained", base, tokens)
    folder, _ = run_merge(monkeypatch, tmp_path, *args)
    command = [sys.executable, "-c", BLOCKED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "opened without peft\n", done.stderr[-2000:]


def test_the_record_has_both_bases_and_the_better_one(merged):
    _, record, settings, _ = merged
    tried = ["original"] if settings["method"] == "lora" else ["original", "dequantized"]
    assert list(record["loss_merged"]) == tried
    assert record["base"] == min(tried, key=record["loss_merged"].get)
    for loss in record["loss_merged"].values():
        assert loss == pytest.approx(record["loss_trained"], rel=0.1)
    assert 0 < record["max_logit_difference"] < 0.1 * record["max_logit"]


def test_the_card_comes_along(merged):
    folder, *_ = merged
    header = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert header["base_model"] == "org/name"


@pytest.mark.parametrize(
    ("method", "chosen", "expected"),
    [
        ("lora", "best", ["original"]),
        ("lora", "dequantized", ["original"]),
        ("qlora", "best", ["original", "dequantized"]),
        ("qlora", "original", ["original"]),
        ("qlora", "dequantized", ["dequantized"]),
    ],
)
def test_bases(method, chosen, expected):
    assert merge.bases({"method": method, "merge": {"base": chosen}}) == expected


def test_a_spoiled_merge_is_refused_and_leaves_nothing(base, tokens, tmp_path, monkeypatch):
    adapt(base, tmp_path / "trained")
    whole = LoraModel.merge_and_unload

    def spoil(self, **options):
        model = whole(self, **options)
        model.lm_head.weight.data *= 6
        return model

    monkeypatch.setattr(LoraModel, "merge_and_unload", spoil)
    with pytest.raises(UserError, match=r"on held-out rows the merged model's loss is"):
        run_merge(monkeypatch, tmp_path, LORA, tmp_path / "trained", base, tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "trained"]


@pytest.mark.parametrize(
    ("bad", "base_taken"), [({3}, "dequantized"), ({5}, "original"), ({3, 5}, None)]
)
def test_a_base_whose_loss_is_no_number_is_not_taken(
    bad, base_taken, base, tokens, tmp_path, monkeypatch
):
    """The third measurement is that of the first merged base, the fifth that of the second."""
    adapt(base, tmp_path / "trained", QLORA["quantization"])
    measured, calls = merge.measure, itertools.count(1)

    def measure(*args):
        loss, logits = measured(*args)
        return (math.nan if next(calls) in bad else loss), logits

    monkeypatch.setattr(merge, "measure", measure)
    args = (monkeypatch, tmp_path, QLORA, tmp_path / "trained", base, tokens)
    if base_taken is None:
        with pytest.raises(UserError, match="the merged model's loss is nan"):
            run_merge(*args)
    else:
        assert run_merge(*args)[1]["base"] == base_taken


@pytest.fixture(scope="module")
def transposed(base, tmp_path_factory):
    """A GPT-2: dequantizing makes its transposed layers ordinary ones."""
    folder = tmp_path_factory.mktemp("gpt2")
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}
    tokenizer = load_tokenizer(base)
    config = GPT2Config(vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=1, **shape)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chosen", ["best", "dequantized"])
def test_a_base_that_changes_shape_is_not_taken(chosen, transposed, tokens, tmp_path, monkeypatch):
    adapt(transposed, tmp_path / "trained", QLORA["quantization"])
    settings = QLORA | {"merge": {"base": chosen, "tolerance": 0.1}}
    args = (monkeypatch, tmp_path, settings, tmp_path / "trained", transposed, tokens)
    if chosen == "dequantized":
        with pytest.raises(UserError, match=r"layers change shape .*; set merge\.base: best"):
            run_merge(*args)
    else:
        record = run_merge(*args)[1]
        assert (record["base"], list(record["loss_merged"])) == ("original", ["original"])


def drift(**changes):
    record = {"loss_trained": 2.0, "loss_merged": {"original": 2.0}, "base": "original"}
    return record | {"max_logit": 20.0, "max_logit_difference": 0.1} | changes


@pytest.mark.parametrize(
    "record",
    [
        drift(),
        drift(loss_merged={"original": 2.2}),
        drift(loss_merged={"original": 1.0}),
        drift(loss_merged={"original": 9.0, "dequantized": 2.0}, base="dequantized"),
        drift(max_logit_difference=2.0),
        drift(loss_trained=0.001, loss_merged={"original": 0.0109}),  # a hundredth of a nat
    ],
)
def test_drift_within_the_tolerance_passes(record):
    merge.check_drift(record, 0.1)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (drift(loss_merged={"original": 2.21}), "loss is 2.2100, the trained one's 2.0000: more"),
        (
            drift(loss_trained=0.001, loss_merged={"original": 0.0111}),
            "loss is 0.0111, the trained one's 0.0010: more",
        ),
        (drift(loss_merged={"original": math.nan}), "loss is nan, the trained one's 2.0000: more"),
        (drift(loss_trained=math.nan), "loss is 2.0000, the trained one's nan: more than 10% w"),
        (drift(max_logit_difference=2.01), "moved a logit by 2.01, where the largest is 20.00"),
        (drift(max_logit_difference=math.nan), "moved a logit by nan, where the largest is 20.00"),
    ],
)
def test_drift_over_the_tolerance_is_refused(record, text):
    with pytest.raises(UserError, match=text):
        merge.check_drift(record, 0.1)


@pytest.fixture
def trained(base, tmp_path):
    """trained/ of full fine-tuning: no cache in training, files that only their owner reads."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.use_cache = False
    for parameter in model.parameters():
        parameter.data += 0.01
    model.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "model.safetensors").chmod(0o600)
    return tmp_path / "trained"


def test_full_weights_are_linked_and_the_cache_is_back(
    trained, base, tokens, tmp_path, monkeypatch
):
    folder, record = run_merge(monkeypatch, tmp_path, FULL, trained, base, tokens)
    file = folder / "model.safetensors"
    assert file.samefile(trained / "model.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert json.loads((trained / "config.json").read_text())["use_cache"] is False
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    assert record == {"tensors": 20, "parameters": sum(t.numel() for t in load_file(file).values())}
    assert AutoModelForCausalLM.from_pretrained(folder).config.use_cache is True


def test_a_base_without_a_cache_stays_without(trained, base, tmp_path):
    own = tmp_path / "base"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({"use_cache": False}))
    (tmp_path / "model").mkdir()
    merge.link_trained(trained, own, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["use_cache"] is False


def test_code_that_ships_with_a_model_comes_along(trained, base, tmp_path):
    """config.json names it, so the model could not be opened without."""
    (trained / "modeling_own.py").write_text("x = 1")
    (tmp_path / "model").mkdir()
    merge.link_trained(trained, base, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "modeling_own.py"}


def test_another_file_system_gets_a_copy(trained, base, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(merge.os, "link", refuse)
    (tmp_path / "model").mkdir()
    merge.link_trained(trained, base, tmp_path / "model")
    copy, original = (p / "model.safetensors" for p in (tmp_path / "model", trained))
    assert not copy.samefile(original)
    assert copy.read_bytes() == original.read_bytes()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o644


def test_incomplete_full_weights_are_refused_and_leave_nothing(
    trained, base, tokens, tmp_path, monkeypatch
):
    (trained / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"trained is not whole: model\..* is missing"):
        run_merge(monkeypatch, tmp_path, FULL, trained, base, tokens)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "merge.json").exists()


def test_held_out_rows_are_validation_rows_if_there_are_any(base, tmp_path, tokens):
    tokenizer = load_tokenizer(base)
    rows = open_tokens(tokens / "train").remove_columns("row")
    rows.save_to_disk(tmp_path / "train")
    rows.select([2]).save_to_disk(tmp_path / "validation")
    assert merge.held_out(tmp_path, tokenizer, None)["input_ids"].tolist() == [rows[2]["input_ids"]]
    rows.select([]).save_to_disk(tmp_path / "empty", num_shards=1)
    Path(tmp_path / "validation").rename(tmp_path / "old")
    Path(tmp_path / "empty").rename(tmp_path / "validation")
    tokenizer.padding_side = "left"  # as generation leaves it
    batch = merge.held_out(tmp_path, tokenizer, None)
    assert batch["row"].tolist() == [0, 1, 2]
    assert batch["attention_mask"][:, 0].tolist() == [1, 1, 1]


def test_a_file_cut_short_is_found_before_anything_is_merged(trained):
    write_manifest(trained)
    check_complete(trained)
    weights = trained / "model.safetensors"
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=f"is 100, not {whole} bytes as its manifest says"):
        check_complete(trained)
