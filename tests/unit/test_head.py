"""The loss in pieces of the logits: the same loss and gradients, and less memory."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune import head, modeling
from finetune.encoding import IGNORED
from finetune.scores import batch_scores, scores_in_pieces

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "initializer_range": 0.5},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.3},
    "phi": {},  # its head has a bias
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "opt": {
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "dropout": 0.0,
    },  # calls the decoder of its decoder
    "falcon_h1": {  # asks its decoder for a multiplier of the head
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "lm_head_multiplier": 0.3,
    },
}


def made(family):
    torch.manual_seed(0)
    shape = {"vocab_size": 61} if family == "gpt2" else SHAPE
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = AutoConfig.for_model(family, **shape | special | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def batch():
    ids = torch.randint(1, 61, (3, 11), generator=torch.manual_seed(1))
    kept = torch.tensor([2, 3, 5, 6, 7, 8, 9])
    labels = ids[:, kept + 1].clone()
    labels[0, :3] = labels[2, 5:] = IGNORED
    mask = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    return inputs | {"logits_to_keep": kept, "shift_labels": labels}


def losses(model, **more):
    outputs = model(**batch(), labels=batch()["input_ids"], **more)
    outputs.loss.backward()
    return outputs.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("items", [None, torch.tensor(40)])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_all_logits_at_once(monkeypatch, family, items):
    more = {} if items is None else {"num_items_in_batch": items}
    wanted, gradients = losses(made(family), **more)
    model = made(family)
    monkeypatch.setattr(head, "PIECE", 3 * 61 * 2)  # two positions
    assert len(head.pieces(model, batch())) == 4
    head.lose_in_pieces(model)
    found, ours = losses(model, **more)
    torch.testing.assert_close(found, wanted)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_decoder_runs_once_and_only_its_own_layers_are_left_behind(monkeypatch, family):
    model = made(family)
    names, calls = [n for n, _ in model.named_parameters()], []
    model.get_decoder().layers[0].register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(head, "PIECE", 1)
    head.lose_in_pieces(model)
    losses(model)
    assert len(calls) == 1
    assert [n for n, _ in model.named_parameters()] == names


def test_nothing_that_comes_out_holds_logits_of_one_piece(monkeypatch):
    model = made("llama")
    monkeypatch.setattr(head, "PIECE", 1)
    head.lose_in_pieces(model)
    outputs = model(**batch(), labels=batch()["input_ids"])
    assert outputs.logits is outputs["logits"] is None  # accelerate makes all items fp32


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
def test_validation_scores_are_the_same(monkeypatch, family):
    model = made(family).eval()
    with torch.no_grad():
        wanted, _ = batch_scores(model, batch())
        monkeypatch.setattr(head, "PIECE", 3 * 61 * 3)
        torch.testing.assert_close(scores_in_pieces(model, batch()), wanted)


def test_a_loss_of_routers_is_not_cut(monkeypatch):
    model = made("llama")
    monkeypatch.setattr(head, "PIECE", 1)
    model.config.output_router_logits = True
    assert len(head.pieces(model, batch())) == 1


def test_packs_lose_what_they_lose_at_once(monkeypatch):
    """Three samples in the first pack, two in the others: their positions restart."""
    starts = [[0, 4, 9], [0, 6], [0, 5]]
    positions = torch.arange(11).repeat(3, 1)
    for pack, row in zip(starts, positions, strict=True):
        for start in pack:
            row[start:] = torch.arange(11 - start)
    packs = {**batch(), "position_ids": positions}
    del packs["attention_mask"]
    found = []
    for size in (10**9, 3 * 61 * 2):
        monkeypatch.setattr(head, "PIECE", size)
        head.lose_in_pieces(model := made("llama"))
        outputs = model(**packs, labels=batch()["input_ids"])
        outputs.loss.backward()
        found.append((outputs.loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found)
    assert not torch.isclose(found[0][0], losses(made("llama"))[0])  # samples are kept apart


def test_a_head_that_is_trained_whole_gets_its_gradient(monkeypatch):
    found = []
    for size in (10**9, 3 * 61 * 2):
        monkeypatch.setattr(head, "PIECE", size)
        head.lose_in_pieces(base := made("llama"))
        lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        torch.manual_seed(0)
        loss, gradients = losses(get_peft_model(base, lora))
        found.append((loss, {n: g for n, g in gradients.items() if g is not None}))
    torch.testing.assert_close(*found)
    assert sum("modules_to_save" in name and bool(g.any()) for name, g in found[0][1].items()) == 1


def test_adapters_train_through_it(tiny_model, monkeypatch):
    lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["q_proj", "lm_head"]}
    settings = {"method": "lora", "launch": "ddp", "attention": None, "trust_remote_code": False}
    found = []
    for size in (10**9, 3 * 384 * 2):
        monkeypatch.setattr(head, "PIECE", size)
        torch.manual_seed(0)
        model = modeling.load_for_training(tiny_model, settings | {"lora": lora}, 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.05)
        found.append(losses(model.train()))
    (one, gradients), (other, ours) = found
    torch.testing.assert_close(one, other, rtol=1e-3, atol=0)
    trained = [name for name, gradient in gradients.items() if gradient is not None]
    assert len(trained) == 2 * 2 + 2
    for name in trained:
        both = ours[name].flatten(), gradients[name].flatten()
        assert torch.cosine_similarity(*both, dim=0) > 0.999, name
