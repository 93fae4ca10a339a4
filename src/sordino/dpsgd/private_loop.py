"""Entry point of DP-SGD: `make_private` returns private versions of a model, an optimizer and a loader."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from sordino import codec
from sordino.certificate.facts import EarlierRun
from sordino.data import lineage
from sordino.data.program import check_labels, refuse_layers, trial_outputs
from sordino.dpsgd import refuse_mixing
from sordino.dpsgd.account import Account, LedgerAccount
from sordino.dpsgd.loader import PendingBatch, PrivateLoader, check_collate, grade_collate, rows_hash
from sordino.dpsgd.memory import largest_batch, parse_bytes
from sordino.dpsgd.model_graphs import ModelGraphs
from sordino.dpsgd.optimizer import PrivateOptimizer
from sordino.dpsgd.own_code import PerRecord, RecordLoss, RecordTransform, given_loss
from sordino.dpsgd.pieces import KEPT
from sordino.dpsgd.processes import Ranks, Shards, group_options, refuse_wrapping, unwrapped
from sordino.dpsgd.recording import RecordedForward, Recording, parameter_names
from sordino.dpsgd.settings import (
    ClipNorm,
    NoiseMultiplier,
    Reduction,
    Sampling,
    Settings,
    batches,
    calibrate_noise,
    checked_delta,
    clip_norms,
    loop_plan,
    noise_schedule,
)
from sordino.dpsgd.standardise import Standardise, Standardiser
from sordino.dpsgd.users import Users, padded
from sordino.errors import ConfigError, DataError, PlanError
from sordino.graph import UntraceableError
from sordino.ledger.ledger import Ledger
from sordino.parts.strategies import Strategy
from sordino.rng import Mode


@codec.check_keywords
def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    clip_norm: ClipNorm = 1.0,
    clip: Literal["flat", "per_layer"] = "flat",
    smoothing: float = 0.0,
    noise: Mode = "simulation",
    seed: int = 0,
    noise_multiplier: NoiseMultiplier | None = None,
    strategy: Strategy | None = None,
    max_physical_batch_size: int | None = None,
    memory: str | int | None = None,
    reduction: Reduction = "mean",
    loss: str | PerRecord | None = None,
    allow_large_delta: bool = False,
    ledger: Ledger | str | Path | None = None,
    dataset: str | None = None,
    own_code: Literal["trusted"] | None = None,
    transform: Callable[[Any], Any] | None = None,
    prepare: Standardise | None = None,
    users: Any = None,
    sampling: Sampling = "poisson",
) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
    """Make a training loop DP-SGD: (epsilon, delta) for `epochs` passes over the data, add or remove one record.

    `steps` plans a number of steps instead of `epochs`. The noise multiplier z is calibrated to `epsilon`, or given by
    `noise_multiplier`. `delta` is by default min(records^-1.1, 1e-3); 1e-5 is accepted while records * 1e-5 < 1.

    The gradient of every record over all parameters is clipped to norm C = `clip_norm`; with clip="per_layer" each of L
    layers is clipped to C / sqrt(L). A dict {"layer or prefix": C_l} names groups of parameters, each clipped to its
    own C_l; then C = sqrt(sum C_l^2). In all cases the noise is N(0, (z C)^2) per coordinate. With
    `clip_norm=Adaptive(start)`, C follows a quantile of the norms, which costs one more noised coordinate.
    `noise_multiplier` may change from step to step: it is then a function of the step, a schedule, or a number per step
    or epoch, and each step is charged by its own; with `epsilon` as well, it is scaled by the smallest factor that
    meets epsilon.

    `smoothing` is the strength of Laplacian smoothing (0: DP-SGD, DP-Adam; above 0: DP-LSSGD, DP-LSAdam). The loader's
    batch_size becomes the expected size of a Poisson batch; `max_physical_batch_size` limits the number of records
    computed at once, and `memory` ("2 GB") chooses that number. `reduction` is that of the loop's loss. With `loss`,
    which is a function (output, target) -> one value per record, or the name of a loss ("cross_entropy", "tokens"), the
    loop calls optimizer.loss(model(x), y).backward() instead. Use noise="secure" for a model that is to be released.
    Parameters that the optimizer does not hold are frozen.

    Records run through graphs of the model, of `loss` and of `transform`, captured on synthetic records; the
    certificate's `own_code` states what is proved about them. `transform` is applied to the inputs of every batch,
    before the loop gets them. A model, loss or loop of which no graph can be captured is refused, unless
    own_code="trusted": then you guarantee that the records of a batch are independent, and the certificate states it.

    `prepare=Standardise(...)` centres and scales the records by a mean and a scale that are released with noise at the
    first batch; both are part of epsilon, and `loader.scaler.moments()` returns them.

    `users` has the id (a whole number or a text) of each record's user, in the data set's order. The unit is then the
    user: batch_size is the expected number of users of a step, a drawn user brings all records, the mean of the user's
    gradients is clipped once, the mean over users divides by batch_size, delta is by the number of users, and the
    guarantee is for adding or removing one user with all records. `max_physical_batch_size` counts records.

    sampling="allocation" puts each record into exactly one batch of every pass of round(records / batch_size) steps, a
    secret one that is drawn anew for every pass (random allocation): a shuffled loader whose epsilon is true. Each pass
    that is begun is charged as a whole; a loop that is resumed in the middle of a pass begins another one.

    `ledger` is a file to which all runs on the same data are charged, and `dataset` the name of the data in it. A loop
    that exceeds the data set's limit is refused by this call. All planned steps are charged before the first noise is
    drawn; further steps, and steps repeated after an older checkpoint, are charged before they are taken.

    With a `strategy` (Banded(10), ...) the noise is correlated: later steps cancel a part of earlier noise. Batches
    follow one random order, the same in every epoch; each record is read once per epoch, and records that fill no
    batch are never read. There is no amplification by sampling, neighbours replace one record, and no step can be taken
    after the planned ones. The noise state is in the optimizer's state_dict, which must stay secret.

    If torch.distributed is initialised (torchrun), all ranks call this with the same arguments: batch_size counts the
    records of all ranks, each rank gets its part of every batch, and the step sums over ranks before adding noise. A
    model in DistributedDataParallel is returned without this wrapper.
    """
    _check_choices(noise, reduction, own_code, loss is not None)
    _refuse_prepared(model, optimizer, loader)
    owners = _read_users(users, loader, prepare)
    model, size = unwrapped(model), _check_loader(loader, owners)
    shards, trusted = Shards(model), own_code == "trusted"
    _check_layers(model)
    _check_optimizer(model, optimizer, shards)
    _check_labels(model, loader.dataset)
    check_collate(loader)
    if _chosen_by_memory(memory, max_physical_batch_size):
        held, raw = _parameters_of(optimizer, shards), transform is None
        max_physical_batch_size = _physical_size(model, held, loader, memory, raw, owners is not None)
    delta = checked_delta(delta, size, allow_large_delta, "records" if owners is None else "users")
    chosen = batches(loader.batch_size or 0, size, strategy, sampling)
    norms = clip_norms(clip, clip_norm, parameter_names(model, _trained(optimizer, shards)))
    schedule = noise_schedule(noise_multiplier, chosen, epochs, steps, scaled=epsilon is not None)
    records = lineage.tensors_of(loader.dataset)
    parts = Standardiser.parts_of(prepare, records, transform is not None or Ranks.of(model).size > 1)
    bare = loop_plan(epochs, chosen, norms, float(smoothing), optimizer, strategy, steps, parts, schedule)
    plan, own_seed = calibrate_noise(bare, epsilon, noise_multiplier, delta), seed if noise == "simulation" else 0
    unit: dict[str, Any] = {} if owners is None else {"users": True}
    settings = Settings(
        plan=plan, delta=delta, noise=noise, seed=own_seed, reduction=reduction, epsilon=epsilon, **unit
    )
    options = [max_physical_batch_size, own_code, str(ledger), dataset]
    ranks = _join_ranks(model, optimizer, loader, settings, owners, options)
    charged_to, earlier = LedgerAccount.of(ledger, dataset, settings, ranks), lineage.runs_of_model(model, records)
    account = Account(settings, charged_to, earlier, ranks)
    _attach_lineage(model, account)
    _freeze_others(model, optimizer, shards)
    refuse_wrapping(model)
    pending, rng, count = PendingBatch(), ranks.streams(noise, seed), settings.records.count
    most = max_physical_batch_size if owners is None else None
    expected = min(count, (most or count) * ranks.size)  # that one unit more moves: a piece of each rank, or all users
    recording = Recording(model, pending, rng.at(0, "mixing"), expected, trusted)
    recording.prepare(() if transform else records)
    own = None if loss is None else RecordLoss(*given_loss(loss, model), trusted)
    change = None if transform is None else RecordTransform(transform, trusted)
    collate = grade_collate(loader, own_code is None and noise == "secure")
    private = PrivateOptimizer(optimizer, recording, account, pending, rng, own)
    private.records, private.shards, private.scaler = records, shards, Standardiser.of(account, records, rng)
    private.in_pieces = max_physical_batch_size is not None
    private.batch_code = lambda: [collate, *([] if change is None else [change.grade])]
    others = change, private.scaler, owners
    return model, private, PrivateLoader(loader, account, pending, rng, max_physical_batch_size, *others)


def _attach_lineage(model: nn.Module, account: Account) -> None:
    """Store the loop's privacy cost in the model, so that a run which starts from these weights adds it."""
    settings = account.settings
    planned = EarlierRun.of_cost(settings.forecast, settings.delta, account.run, lineage.IN_PROCESS)
    lineage.attach_lineage(model, (*account.earlier, planned))
    lineage.register_loop(account.run, account.cost)


def _check_choices(noise: str, reduction: str, own_code: str | None, own_loss: bool) -> None:
    if noise not in ("simulation", "secure") or reduction not in ("mean", "sum"):
        needed = 'noise "simulation" or "secure", reduction "mean" or "sum"'
        raise ConfigError(f"noise = {noise!r}, reduction = {reduction!r}", needed, "correct the value, or leave it out")
    if own_code not in ("trusted", None):
        fix = 'set own_code="trusted" if you guarantee that records are independent'
        raise ConfigError(f"own_code = {own_code!r}", 'None or "trusted"', fix)
    if own_loss and reduction != "mean":
        needed = "no reduction: optimizer.loss is a mean"
        raise ConfigError(f"loss and reduction = {reduction!r}", needed, "remove reduction=")


def _read_users(ids: Any, loader: DataLoader[Any], prepare: Standardise | None) -> Users | None:
    if ids is None:
        return None
    if prepare is not None:
        found, needed = "users= with prepare=", "one of the two: prepare= protects records, not users"
        raise ConfigError(found, needed, "standardise by public constants, with transform=")
    return Users.of(ids, len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0)


def _refuse_prepared(*parts: Any) -> None:
    for part in parts:
        if type(part).__module__.startswith("accelerate.") or "_original_forward" in vars(part):
            found = f"a {type(part).__name__} that accelerator.prepare has prepared"
            fix = "call accelerator.prepare(*make_private(model, optimizer, loader, ...)), in this order"
            raise ConfigError(found, "the model, the optimizer and the DataLoader before accelerator.prepare", fix)


def _join_ranks(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    settings: Settings,
    users: Users | None,
    options: list[Any],
) -> Ranks:
    """Return the ranks that share the loop; refuse ranks with other records, settings or parameters."""
    ranks, dataset = Ranks.of(model), loader.dataset
    if ranks.size > 1:
        ranks.compare(
            {
                "numbers of records": len(dataset),  # type: ignore[arg-type]
                "settings": [codec.dump(settings), loader.num_workers, *options],
                "rows of the data set": rows_hash(dataset),
                "users": "" if users is None else users.digest().hex(),
                "settings of the optimizer": group_options(optimizer.param_groups),
                "parameters": [(name, list(p.shape), p.requires_grad) for name, p in model.named_parameters()],
            }
        )
    return ranks


def _parameters_of(optimizer: Optimizer, shards: Shards) -> set[Tensor]:
    return {shards.of(p) for group in optimizer.param_groups for p in group["params"]}


def _chosen_by_memory(memory: str | int | None, given: int | None) -> TypeGuard[str | int]:
    """Return whether `memory` chooses the physical batch size; refuse both options together, and a size below 1."""
    if given is not None and memory is not None:
        raise ConfigError("memory and max_physical_batch_size", "one of the two", "remove max_physical_batch_size")
    if given is not None and given < 1:
        found = f"max_physical_batch_size = {given}"
        raise ConfigError(found, "a whole number of at least 1", "leave it out to compute a batch at once")
    return memory is not None


def _physical_size(
    model: nn.Module, held: set[Tensor], loader: DataLoader[Any], memory: str | int, raw: bool, users: bool
) -> int:
    """Return the number of records that can be computed at once in `memory`, from the shape of a record alone."""
    bound, fix = parse_bytes(memory) * 9 // 10, "use max_physical_batch_size instead"  # a tenth for libraries
    if loader.collate_fn is not default_collate or not raw:
        found = "memory with a collate_fn or a transform, where shapes may depend on records"
        raise ConfigError(found, "records of one shape", fix)
    batch = lineage.tensors_of(loader.dataset) or tree_leaves(default_collate([loader.dataset[0]]))
    device, others = next(iter(held)).device, [p for p in model.parameters() if p.requires_grad and p not in held]
    x = torch.zeros_like(batch[0][:1], device=device)  # of which only the shape counts
    each = 12 + 28 * users  # bytes of the sum of a batch, in float64 and float32; and of a user in several pieces
    shared = each * sum(p.numel() for p in held if p.requires_grad)

    def peak(size: int, kept: int) -> int:
        copies = 2 * size * sum(part[:1].nbytes for part in batch)  # the loader's batch, and what it is compared with
        forms = [padded(size, 1 << k) for k in range(size.bit_length())] if users else []
        return shared + copies + max(graphs.live_bytes((x,), {}, [True], size, kept, form) for form in [None, *forms])

    for p in others:  # they will be frozen
        p.requires_grad_(False)
    try:
        graphs = ModelGraphs(model)
        most = len(loader.dataset) if users else loader.batch_size or 1  # type: ignore[arg-type]
        small = largest_batch(lambda size: peak(size, KEPT), bound, most)
        size = max(small, largest_batch(lambda size: peak(size, 0) + 4 * KEPT, bound, most))
        one = 0 if size else peak(1, KEPT)
    except (UntraceableError, PlanError, DataError, RuntimeError, TypeError, ValueError, IndexError) as error:
        found = f"memory= with a model that does not run as model(x) on synthetic records ({error})"
        raise ConfigError(found, "a model whose memory can be measured on such records", fix) from None
    finally:
        for p in others:
            p.requires_grad_(True)
    if not size:
        found = f"memory = {memory!r}, where a pass over one record takes {one:,} bytes"
        raise ConfigError(found, "memory for at least one record", "raise memory, or take a smaller model")
    return size


def _trained(optimizer: Optimizer, shards: Shards) -> set[Tensor]:
    return {shards.of(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _freeze_others(model: nn.Module, optimizer: Optimizer, shards: Shards) -> None:
    held = _parameters_of(optimizer, shards)
    for parameter in model.parameters():
        if parameter not in held:
            parameter.requires_grad_(False)


def _check_layers(model: nn.Module) -> None:
    """Refuse layers that mix records, and gradient checkpointing, whose second forward pass is not recorded."""
    refuse_layers(model, statistics=False)
    for name, part in model.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True:
            found = f"layer '{name}' with gradient checkpointing, which runs again in the backward pass"
            fix = "call model.gradient_checkpointing_disable(), and set max_physical_batch_size to save memory"
            raise PlanError("per-record", found, "layers that run once for each batch", fix)
    refuse_mixing(model)


def _check_loader(loader: DataLoader[Any], users: Users | None = None) -> int:
    """Return the number of records, or of users; refuse a loader whose data set does not allow Poisson batches."""
    dataset: Any = loader.dataset
    if isinstance(loader, PrivateLoader):
        found, fix = "a loader that make_private has already returned", "pass the DataLoader that you built"
        raise ConfigError(found, "the original DataLoader", fix)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        needed = "a data set with __len__ and __getitem__"
        raise DataError("a data set that can only be iterated", needed, "read it into a list")
    if loader.batch_size is None:
        fix = "pass DataLoader(dataset, batch_size=...); make_private draws the batches itself"
        raise DataError("a loader with a batch_sampler, or without batches", "a loader with a batch_size", fix)
    sampler = loader.sampler
    drawn = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    if not drawn and not isinstance(sampler, SequentialSampler):
        found = f"a loader with sampler {type(sampler).__name__}, which would not be used"
        fix = "to leave records out, pass a Subset as the data set"
        if isinstance(sampler, DistributedSampler):
            fix = "remove the sampler: batch_size counts all ranks together, and each rank gets its part of a batch"
        raise DataError(found, "no sampler: every record may be drawn", fix)
    size, units = (len(dataset), "records") if users is None else (len(users), "users")
    if not 0 < loader.batch_size <= size:
        found = f"a batch_size of {loader.batch_size} for {size} {units}"
        raise DataError(found, f"at most the number of {units}", "lower batch_size")
    return size


def _check_optimizer(model: nn.Module, optimizer: Optimizer, shards: Shards) -> None:
    hooks = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    if any(
        isinstance(part, PrivateOptimizer | RecordedForward) for part in (optimizer, vars(model).get("forward"), *hooks)
    ):
        found = "a model or an optimizer that make_private has already returned"
        raise ConfigError(found, "an ordinary model and optimizer", "call optimizer.detach() first")
    if isinstance(optimizer, LBFGS):
        raise ConfigError("LBFGS, which evaluates the loss many times per step", "one gradient per step", "use SGD")
    held, fix = _parameters_of(optimizer, shards), "pass model.parameters() to the optimizer"
    if not held <= set(model.parameters()):
        found = "an optimizer that holds a parameter of another module"
        raise ConfigError(found, "only parameters of the model", fix)
    if not any(p.requires_grad for p in held):
        found = "an optimizer without a trainable parameter of the model"
        raise ConfigError(found, "at least one trained parameter", fix)
    check_devices({p.device for p in model.parameters()})


def check_devices(devices: Collection[torch.device]) -> None:
    """Refuse parameters on several devices, on the meta device, or on a device without float64 for clipped sums."""
    found = f"a model with parameters on {' and '.join(sorted(str(device) for device in devices))}"
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise PlanError("engine", found, "all parameters on one device with memory", "call model.to(device) first")
    if any(device.type == "mps" for device in devices):
        needed = "a device with float64, in which gradients are summed"
        raise PlanError("engine", found, needed, "call model.to('cpu')")


def _check_labels(model: nn.Module, dataset: Any) -> None:
    """Refuse class labels outside the model's number of scores, if records and labels are tensors."""
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return
    x, y = dataset.tensors
    if y.dtype != torch.int64 or y.dim() != 1:
        return
    try:
        synthetic = torch.zeros_like(x[:1], device=next(model.parameters()).device)  # no record of the data set
        scores = trial_outputs(model, synthetic)
    except DataError:
        return  # the loop may convert the records before it calls the model
    if isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] > 1:
        check_labels(y, scores.shape[1], "the data set")
