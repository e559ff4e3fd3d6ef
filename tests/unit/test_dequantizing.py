"""Models that are published quantized: made 16-bit where that can be done, else refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fetch_model import fetch

from finetune.cli import UserError
from finetune.dequantizing import dequantize, refuse_quantized
from finetune.weights import expected_shapes, verify
from project import make_tiny_model, tiny_tokenizer

BLOCK = 32
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}


def claim_format(folder: Path, section: dict) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block of 32 x 32 by its own scale, as DeepSeek-V3 was published."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scaled = (blocks / scale[:, None, :, None]).view(rows, columns)
    return scaled.to(torch.float8_e4m3fn), scale


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    folder = tmp_path / "fp8"
    make_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and "layers" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    claim_format(folder, FP8)
    return folder


def test_fp8_becomes_bf16_and_the_source_stays_as_it_was(
    fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in fp8.iterdir()}
    record = fetch(fp8, tmp_path / "out", monkeypatch)
    assert record["repairs"][0] == "weights fp8 -> bf16"
    assert {path.name: path.read_bytes() for path in fp8.iterdir()} == before
    pretrained, original = tmp_path / "out" / "pretrained", tmp_path / "original"
    assert "quantization_config" not in json.loads((pretrained / "config.json").read_text())
    make_tiny_model(original)
    found, wanted = (load_file(x / "model.safetensors") for x in (pretrained, original))
    assert found.keys() == wanted.keys()
    assert (pretrained / "model.safetensors").stat().st_mode & 0o777 == 0o644
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        # e4m3 has 3 bits after the point: half of 2^-3, and bf16 rounds once more
        close = {"rtol": 2**-4 + 2**-8, "atol": wanted[name].float().abs().max().item() * 2**-9}
        torch.testing.assert_close(tensor, wanted[name], **close)


def test_mxfp4_becomes_bf16(tmp_path: Path) -> None:
    """gpt-oss: two elements a byte, low half first, a shared exponent for each 32 of them
    (OCP Microscaling formats 1.0, section 5.2)."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = GptOssForCausalLM(GptOssConfig(vocab_size=300, num_experts_per_tok=1, **shape))
    source, made = tmp_path / "source", tmp_path / "made"
    model.to(torch.bfloat16).save_pretrained(source)
    claim_format(source, {"quant_method": "mxfp4"})
    tensors = load_file(source / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        experts, rows, columns = tensors.pop(name).shape
        blocks = experts, columns, rows // 32
        tensors[f"{name}_blocks"] = torch.full((*blocks, 16), 0x42, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(blocks, 126, dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    refuse_quantized(source)
    assert dequantize(source, made, False) == "weights mxfp4 -> bf16"
    verify(made, expected_shapes(made, False), made)
    weight = load_file(made / "model.safetensors")["model.layers.0.mlp.experts.down_proj"]
    # code 2 is 1.0, code 4 is 2.0; 126 means 2 ** (126 - 127)
    assert weight[0, :, 0].tolist() == [0.5, 1.0] * 32


def test_other_formats_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes leaves them."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_tiny_model(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    ).save_pretrained(tmp_path / "nf4")
    tiny_tokenizer().save_pretrained(tmp_path / "nf4")
    with pytest.raises(UserError) as error:
        fetch(tmp_path / "nf4", tmp_path / "out", monkeypatch)
    assert str(error.value) == (
        "this model is already quantized (bitsandbytes), and training starts from 16-bit weights. "
        "Give the model that it was made from as `source`; `method: qlora` quantizes it to 4 bit "
        "as it loads. Of quantized models, mxfp4 and fp8 can be read."
    )
