"""`sordino audit`: the layers of auditing that fit the target, as plain data and as text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sordino.audit.landscape import draw, landscape
from sordino.audit.mechanism import audit_mechanism
from sordino.audit.membership import audit_membership
from sordino.config import Config, load_config
from sordino.data.task import Task
from sordino.errors import ConfigError
from sordino.explain import ceilings
from sordino.runs.folder import RunFolder


def mechanism(target: Path) -> dict[str, Any]:
    """Layer 1: one round of the plan against its certificate; needs no data."""
    config = config_of(target)
    found = audit_mechanism(config.plan, delta=config.delta)
    return {"passed": all(audit.passed for audit in found), "mechanism": [asdict(audit) for audit in found]}


def config_of(target: Path) -> Config:
    """A run's own configuration, once the run is certified, or a file's."""
    if not target.is_dir():
        return load_config(target)
    folder = RunFolder.open(target)
    folder.certify()
    return folder.config()


def trained(target: Path) -> tuple[RunFolder, Task]:
    """A certified run and its task, the model loaded with what was trained."""
    if not target.is_dir():
        raise ConfigError(
            f"{target}, which is no run folder", "a finished run", "add --mechanism to audit a file's plan"
        )
    folder = RunFolder.open(target)
    folder.certify()
    task = folder.config().build()
    task.model.load_state_dict(load_file(target / "model.safetensors"))
    return folder, task


def membership(target: Path) -> dict[str, Any]:
    """Layer 3: loss-threshold membership inference beside the ceiling that the certificate gives."""
    folder, task = trained(target)
    found = audit_membership(task.model, task)
    reach = ceilings(folder.config().plan, folder.facts())["models"]
    few, luck = min(found.members, found.strangers), _noise(found.members) + _noise(found.strangers)
    lower = found.auc <= reach.auc + _noise(few), found.true_positives["0.01"] <= reach.true_positives + luck
    limits = {"auc_at_most": reach.auc, "true_positive_rate_at_1_percent_at_most": reach.true_positives}
    return {"passed": all(lower), "membership": {**asdict(found), **limits}}


def _noise(records: int) -> float:
    """Three standard errors, at most, of a rate measured on so many records; of an AUC, on the smaller side's."""
    return float(1.5 / records**0.5)


def surface(target: Path, out: Path | None) -> dict[str, Any]:
    """Loss surface and contour around the final model."""
    folder, task = trained(target)
    path = out or folder.path / "landscape.png"
    found = landscape(task.model, task)
    draw(found, path, f"loss around {folder.path.name}")
    return {"passed": True, "landscape": {"file": str(path), "mean_rise": found.sharpness}}


def text(found: dict[str, Any]) -> str:
    """All that was found, a line each."""
    lines = [_mechanism_line(audit) for audit in found.get("mechanism", [])]
    if "membership" in found:
        m = found["membership"]
        rates = ", ".join(
            f"{100 * rate:.2f}% of members at {float(at):.1%} false alarms" for at, rate in m["true_positives"].items()
        )
        lines.append(f"membership: AUC {m['auc']:.4f} (certificate allows {m['auc_at_most']:.4f}); {rates}")
    if "landscape" in found:
        lines.append(f"landscape: {found['landscape']['file']}, mean rise {found['landscape']['mean_rise']:.4g}")
    return "\n".join([*lines, "passed" if found["passed"] else "FAILED: more was learnt than the certificate allows"])


def _mechanism_line(audit: dict[str, Any]) -> str:
    verdict = "ok" if audit["passed"] else "TOO MUCH"
    return (
        f"{audit['adversary']:<9} {audit['relation']:<12} one round: mu at least {audit['lower_mu']:.3f}, "
        f"certified {audit['upper_mu']:.3f}; epsilon at least {audit['lower_epsilon']:.3f}, "
        f"certified {audit['upper_epsilon']:.3f}: {verdict}"
    )
