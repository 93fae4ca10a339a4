"""DP-SGD in the Trainer of transformers: a tiny BERT with random weights, so it runs offline and learns little.

With from_pretrained and your own records nothing else changes. `python examples/trainer.py [folder]`.
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from sordino.dpsgd.integrations import PrivateTrainer

torch.manual_seed(0)
ids = torch.randint(3, 32, (200, 8))
records = [{"input_ids": row, "labels": (row[0] > 16).long()} for row in ids]
size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=8, num_labels=2, **size))

arguments = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "trained",
    num_train_epochs=3,
    per_device_train_batch_size=20,  # the expected size of a Poisson batch
    learning_rate=1e-2,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = PrivateTrainer(
    model,
    arguments,
    train_dataset=records,  # type: ignore[arg-type]
    private={"epsilon": 4.0, "clip_norm": 0.5, "max_physical_batch_size": 16},  # as make_private takes them
)
trainer.train()
certificate = trainer.private.certificate()  # also in certificate.json of the folder
print({key: certificate[key] for key in ("epsilon", "delta", "unit", "relation", "counts")})
