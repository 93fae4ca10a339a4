"""Tiny models of transformers, and LoRA on top of them: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.parts.losses import IGNORED

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

WORDS, LENGTH, CLASSES = 32, 8, 3
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert(dropout: float = 0.0) -> nn.Module:
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**SMALL, **TEXT, **drop, num_labels=CLASSES)
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def distilbert(dropout: float = 0.0) -> nn.Module:
    size = {"n_layers": 2, "n_heads": 2, "dim": 16, "hidden_dim": 24}
    drop = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    config = transformers.DistilBertConfig(**size, **TEXT, **drop, num_labels=CLASSES)
    return transformers.DistilBertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2(dropout: float = 0.0) -> nn.Module:
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 16}
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    words = {name: TEXT[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **words, **drop))  # type: ignore[no-any-return]


def llama(dropout: float = 0.0) -> nn.Module:
    more = {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_dropout": dropout}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TEXT, **more))  # type: ignore[no-any-return]


def vit(dropout: float = 0.0) -> nn.Module:
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **image, **drop))  # type: ignore[no-any-return]


def adapted(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """LoRA of rank 2, with a second factor that is not zero: at zero the first has no gradient."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, **options))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found  # type: ignore[no-any-return]


def lora_bert() -> nn.Module:
    return adapted(bert(), ["query", "value"], task_type="SEQ_CLS")


def lora_gpt2() -> nn.Module:
    return adapted(gpt2(), ["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    **{"bert": bert, "distilbert": distilbert, "gpt2": gpt2, "llama": llama, "vit": vit},
}
ADAPTED: dict[str, Callable[[], nn.Module]] = {"bert with lora": lora_bert, "gpt2 with lora": lora_gpt2}
EVERY = FAMILIES | ADAPTED


def built(name: str, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return EVERY[name]().train()


def is_language(name: str) -> bool:
    return name.startswith(("gpt2", "llama"))


def records(name: str, count: int = 30) -> dict[str, Tensor]:
    """Columns as a tokenizer and a collator leave them: padded, masked, and labels of padding left out."""
    coins = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (count,), generator=coins)
    if name == "vit":
        return {"pixel_values": torch.randn(count, 1, 8, 8, generator=coins), "labels": labels}
    ids = torch.randint(3, WORDS, (count, LENGTH), generator=coins)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (count, 1), generator=coins)).long()
    tokens = (ids * mask).masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": tokens if is_language(name) else labels}


def rows(columns: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same as a data set of dicts."""
    return [{field: column[i] for field, column in columns.items()} for i in range(len(columns["labels"]))]


def kind_of_loss(name: str) -> str:
    return "tokens" if is_language(name) else "cross_entropy"


def by_the_model(model: nn.Module, columns: dict[str, Tensor]) -> Tensor:
    """What transformers itself calls the loss."""
    return model(**columns).loss  # type: ignore[no-any-return]
