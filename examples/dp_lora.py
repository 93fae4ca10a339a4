"""Federated DP-LoRA that learns: a tiny Llama, pretrained on a few roles of Shakespeare, tuned on many others.

    python examples/dp_lora.py [--seeds 1] [--rounds 10] [--epsilon 8]

The roles of the pretraining and of the test are declared public; the clients are the other roles, and one of them is
what is protected. Only the adapters are sent, clipped, noised and stored; the frozen base is on the certificate by its
hash. Without the plays (SORDINO_DATA, or the cache) the roles speak a made-up language.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import sordino as so
from sordino.accounting.rounding import upto
from sordino.data.files import find_source
from sordino.data.shakespeare import ALPHABET, ROLES, encode, role_texts

WINDOW, EACH = 64, 8  # characters of a record, records of a client
PUBLIC, TEST = 10, 60  # roles that are declared public
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def roles() -> list[Tensor]:
    """What each role says, as numbers of characters."""
    texts = role_texts(1015, 100) if find_source(ROLES) is not None else made_up()
    return [torch.from_numpy(encode(text)) for text in texts]


def made_up(count: int = 400) -> list[str]:
    """Roles that draw their words from one dictionary; the first few, which are public, know little of it."""
    coins = torch.Generator().manual_seed(1)
    letters, lengths = torch.randint(26, (120, 7), generator=coins), torch.randint(2, 8, (120,), generator=coins)
    words = ["".join(chr(97 + int(c)) for c in row[:n]) for row, n in zip(letters, lengths, strict=True)]
    known = [30 if i < PUBLIC else 120 for i in range(count)]
    return [" ".join(words[int(k)] for k in torch.randint(n, (150,), generator=coins)) for n in known]


def windows(text: Tensor, most: int) -> Tensor:
    """At most so many records [m, WINDOW] of a text, evenly spread."""
    count = min(most, len(text) // WINDOW)
    starts = torch.linspace(0, len(text) - WINDOW, max(count, 1)).long()[:count]
    return text[starts[:, None] + torch.arange(WINDOW)]


def pretrained(public: list[Tensor], steps: int) -> nn.Module:
    """A Llama of 87 thousand parameters that has read the public roles."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {"vocab_size": len(ALPHABET), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**size, **words, max_position_embeddings=WINDOW, tie_word_embeddings=True))
    read = torch.cat([windows(text, 1000) for text in public])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        batch = read[torch.randint(len(read), (32,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
    return model


def adapted(base: nn.Module) -> nn.Module:
    """The base, frozen, with LoRA in every linear layer.

    The first factor stays as it was drawn (FFA-LoRA, Sun et al. 2024): half the numbers to noise, and the mean of the
    clients' products is the product of the mean.
    """
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def planned(clients: int, cohort: int, rounds: int) -> so.Plan:
    """One step of every client on all it has said; Adam on the server, which sees noised means only."""
    return so.Plan(
        rounds=rounds,
        clients=so.Poisson(clients, cohort / clients),
        local=so.parts.LocalSgd(epochs=1, batch=EACH, lr=1.0),
        encode=(so.parts.Clip(0.4),),
        release=so.parts.CentralNoise(so.parts.Gaussian(1.0)),
        server=so.parts.Adam(lr=0.02),
    )


def tuned(seed: int, asked: argparse.Namespace) -> dict[str, float]:
    """Accuracy of the next character in roles that nobody has trained on: before, with and without noise."""
    torch.manual_seed(seed)
    texts = roles()
    public, private, test = texts[:PUBLIC], texts[PUBLIC:-TEST], texts[-TEST:]
    model = adapted(pretrained(public, asked.steps))
    held = {"input_ids": torch.cat([windows(text, EACH) for text in test])}
    task = so.Task.of(model, [{"input_ids": windows(text, EACH)} for text in private], test=held)
    plan = planned(len(private), asked.cohort, asked.rounds)
    first = task.evaluate(task.layout.flatten(task.model))
    found = {"before": first["accuracy"]}
    print(f"seed {seed}: before {first['accuracy']:.4f}, loss {first['loss']:.4f}", flush=True)
    for name, own in {"after": so.calibrate(plan, epsilon=asked.epsilon), "without noise": quiet(plan)}.items():
        result = so.train(own, task, seed=seed, eval_every=asked.rounds)
        found[name] = result.history[-1]["accuracy"]
        print(f"seed {seed}: {name} {found[name]:.4f}, loss {result.history[-1]['loss']:.4f}", flush=True)
        if name == "after":
            said = result.certificate
            cost = f"epsilon {upto(said['epsilon'])}, delta {upto(said['delta'])}, unit {said['unit']}"
            print(f"seed {seed}: {cost}; sent: "
                  f"{task.layout.size} numbers; frozen: {said['declared_public'][-1]}")  # fmt: skip
    return found


def quiet(plan: so.Plan) -> so.Plan:
    """The same plan without noise: no guarantee, for comparison."""
    return replace(plan, release=so.parts.NoNoise())


def main(*words: str) -> list[dict[str, float]]:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"seeds": 1, "steps": 300, "rounds": 10, "cohort": 200}.items():
        asked.add_argument(f"--{name}", type=int, default=value)
    asked.add_argument("--epsilon", type=float, default=8.0)
    given = asked.parse_args(words or None)
    found = []
    for seed in range(given.seeds):
        found.append(tuned(seed, given))
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.4f}" for name, value in found[-1].items()), flush=True)
    return found


if __name__ == "__main__":
    main()
