"""DP-SGD in the Trainer of Hugging Face's transformers (`PrivateTrainer`). No other module imports this one.

The Trainer's own loop runs: its optimizer, schedule, evaluation, callbacks and checkpoints. Batches are those of the
private loader, the loss is `optimizer.loss`, and a step of the Trainer (`global_step`) is one noised step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from sordino.data.clients import is_causal
from sordino.dpsgd.loader import PrivateLoader
from sordino.dpsgd.optimizer import PrivateOptimizer
from sordino.dpsgd.private_loop import make_private
from sordino.errors import ConfigError

CERTIFICATE = "certificate.json"
_PIECES = 'set per_device_train_batch_size to the batch of a step, and private={"max_physical_batch_size": ...}'
_LOSS = 'pass private={"loss": f} with f(output, labels) -> one value per record'
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {  # accepted values, and the fix for all others
    "gradient_accumulation_steps": ((1,), _PIECES),
    "max_grad_norm": ((0, 0.0, 1.0, None), 'set private={"clip_norm": ...}: every record is clipped, not the mean'),
    "fp16": ((False,), "load the model in float32 or bfloat16: a GradScaler skips steps depending on gradients"),
    "bf16": ((False,), "use from_pretrained(..., dtype=torch.bfloat16): gradients are clipped in float32 anyway"),
    "max_steps": ((-1,), "set num_train_epochs: the noise is calibrated for whole epochs"),
    "label_smoothing_factor": ((0, 0.0), _LOSS),
    "torch_compile": ((False,), "set torch_compile=False: training passes run uncompiled anyway"),
    "gradient_checkpointing": ((False,), _PIECES),
    "auto_find_batch_size": ((False,), "set a fixed batch size: this option would start again with another one"),
    "train_sampling_strategy": (("random", "sequential"), "leave it out: batches are drawn as the cost assumes"),
    "group_by_length": ((False,), "leave it out: batches are drawn as the cost assumes"),
    "neftune_noise_alpha": ((None,), "leave it out"),
    "include_num_input_tokens_seen": ((False, "no"), "leave it out: the number of tokens drawn is not private"),
    "deepspeed": ((None,), "run one process without it"),
    "world_size": ((1,), "run one process"),
    "n_gpu": ((0, 1), "use one device: CUDA_VISIBLE_DEVICES=0"),
}


class _Steps:
    """Iterator over the private loader with one item per step: the first piece of each batch."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self.pieces: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.pieces = iter(self.loader)
        yield from self.pieces


class PrivateTrainer(Trainer):
    """Trainer of transformers whose train() is DP-SGD; `private` holds the arguments of make_private.

    trainer = PrivateTrainer(model, args, train_dataset=records, private={"epsilon": 2.0, "clip_norm": 0.5})
    trainer.train()
    trainer.private.certificate()["epsilon"]

    `epochs` is args.num_train_epochs; args.per_device_train_batch_size is the expected size of a Poisson batch. train()
    writes the certificate to args.output_dir, and resumes from the Trainer's own checkpoints, whose optimizer.pt holds
    the charged steps. With noise = "secure" no metric of the training records is logged or stored in a checkpoint.
    """

    model: Any
    private: PrivateOptimizer

    def __init__(self, *args: Any, private: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = {"loss": _kind_of_loss(self.model, private), **private}
        _check_arguments(self.args)
        if self.compute_loss_func is not None:
            raise ConfigError("compute_loss_func, a loss of a whole batch", "a loss per record", _LOSS)
        self.args.ignore_data_skip = True  # the private loader itself continues after the steps of a checkpoint
        self.steps: _Steps | None = None

    def get_train_dataloader(self) -> Any:
        """Return the private loader; the first call makes model and optimizer private."""
        if self.steps is None or self.optimizer is None:
            if self.train_dataset is None:
                raise ConfigError("no train_dataset", "records to train on", "use PrivateTrainer(train_dataset=...)")
            optimizer, loader = self.create_optimizer(), self._plain_loader()
            with TemporaryDirectory() as folder:  # a model of transformers changes its config when it is first saved
                self.model.save_pretrained(folder, state_dict=None if hasattr(self.model, "peft_config") else {})
            epochs = int(self.args.num_train_epochs)
            _, self.private, private = make_private(self.model, optimizer, loader, epochs=epochs, **self.settings)
            self.optimizer, self.steps = self.private, _Steps(private)
        return self.steps

    def _plain_loader(self) -> DataLoader[Any]:
        """Return the Trainer's torch DataLoader before accelerate has prepared it."""
        prepare, self.accelerator.prepare = self.accelerator.prepare, lambda loader: loader
        try:
            found: DataLoader[Any] = super().get_train_dataloader()
        finally:
            self.accelerator.prepare = prepare
        return found

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a batch, and step() on every piece except the last, on which the Trainer steps."""
        assert self.steps is not None
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        while (piece := self.private.pending.piece) is not None and not piece.last:
            self.private.step()
            loss = super().training_step(model, next(self.steps.pieces), *args, **kwargs)
        return loss

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the mean of the records' losses in training, and the Trainer's own loss in evaluation."""
        if not torch.is_grad_enabled():
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        if inputs.get("labels") is None:
            raise ConfigError("a batch without labels", "labels for each record", "use a collator that adds labels")
        output = model(**{name: column for name, column in inputs.items() if name != "labels"})
        loss = self.private.loss(output, inputs["labels"])
        return (loss, output) if return_outputs else loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and write the certificate to args.output_dir.

        With noise = "secure" the result has no loss of training records: training_loss is nan.
        """
        found = super().train(*args, **kwargs)
        if self.args.should_save and self.private.steps:
            folder = Path(str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            self.private.save_certificate(folder / CERTIFICATE)
        if self.settings.get("noise") != "secure":
            return found
        metrics = {name: value for name, value in found.metrics.items() if name != "train_loss"}
        return found._replace(training_loss=math.nan, metrics=metrics)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log metrics; with noise = "secure" the loss of training records is left out."""
        hidden = ("loss", "train_loss") if self.settings.get("noise") == "secure" else ()
        super().log({name: value for name, value in logs.items() if name not in hidden}, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the true number depends on the sampled tokens, is not private, and would be in checkpoints."""
        return 0

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the weights. The state_dict is read first, because saving changes the model's config."""
        super()._save(output_dir, self.model.state_dict() if state_dict is None else state_dict)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: step() clips every record's gradient."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Return None: before step() there is no noised gradient, and other gradients are private."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the charged steps of a checkpoint; refuse a checkpoint without them."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.private.steps < self.state.global_step:
            found = f"a checkpoint of {self.state.global_step} steps of which {self.private.steps} were charged"
            needed = "a checkpoint with its optimizer.pt and scheduler.pt, unchanged"
            raise ConfigError(found, needed, "start a new run, with save_only_model=False")


def _kind_of_loss(model: nn.Module, private: dict[str, Any]) -> Any:
    name = type(model).__name__
    if "loss" in private or is_causal(model) or name.endswith(("ForTokenClassification", "ForMaskedLM")):
        return private.get("loss", "tokens")
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return "cross_entropy"
    fix = f'set private["loss"] to "tokens", or {_LOSS}'
    raise ConfigError(f"{name}, for which no loss is implemented", "a loss per record", fix)


def _check_arguments(args: TrainingArguments) -> None:
    for name, (taken, fix) in _REFUSED.items():
        value = getattr(args, name, taken[0])
        if value not in taken:
            raise ConfigError(f"{name} = {value} in TrainingArguments", f"{name} = {taken[0]}", fix)
    if args.num_train_epochs != int(args.num_train_epochs) or args.num_train_epochs < 1:
        found = f"num_train_epochs = {args.num_train_epochs}"
        raise ConfigError(found, "a whole number of at least 1", "set num_train_epochs=3")
