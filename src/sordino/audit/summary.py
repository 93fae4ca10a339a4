"""`sordino audit` and `Result.audit`: every layer of the audit for a run or a file, as plain data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sordino.accounting.rounding import atleast, upto
from sordino.audit.mechanism import CONFIDENCE, audit_mechanism
from sordino.audit.membership import audit_membership
from sordino.audit.noise_test import FALSE_ALARM, Finding, noise_tests, not_examined, unexamined
from sordino.audit.sampling_test import batch_tests, cohort_tests, trial_round_tests
from sordino.audit.sensitivity_test import sensitivity_tests
from sordino.audit.trial_rounds import ROUNDS, run_trial_rounds
from sordino.certificate.explain import ceilings
from sordino.certificate.facts import Facts
from sordino.config import Config, load_config
from sordino.engines.checks import prepare_columns
from sordino.errors import ConfigError
from sordino.outcome import load_weights
from sordino.plan import Plan, State
from sordino.rng import Seeded
from sordino.runs.execution import with_released_columns
from sordino.runs.folder import RunFolder
from sordino.task import Task


def check_changes(target: Path, changes: Sequence[str]) -> None:
    """Refuse --set and --seed for the folder of a run: only a file can be changed."""
    if changes and target.is_dir():
        raise ConfigError(f"--set or --seed for {target}, which has run", "a TOML file", "drop it, or audit a file")


def mechanism(target: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Layer 1: one round of the plan against its certificate, and trial rounds against the plan; needs no data."""
    config = config_of(target, changes)
    return of_plan(config.plan, config.delta)


def of_plan(plan: Plan, delta: float) -> dict[str, Any]:
    """The same of a plan."""
    found, ran = audit_mechanism(plan, delta=delta), audit_behaviour(plan)
    return {
        "passed": all(audit.passed for audit in found) and all(one.passed for one in ran),
        "not_examined": [f"{one.question}: {one.worst}" for one in unexamined(ran)],
        "mechanism": [asdict(audit) for audit in found],
        "behaviour": [{**asdict(one), "passed": one.passed} for one in ran],
        "false_alarm_at_most": {"mechanism": 1 - CONFIDENCE, "behaviour": FALSE_ALARM},
    }


def canaries(target: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Layer 2: one training with planted canaries."""
    config = config_of(target, changes)
    return of_canaries(replace(config.plan, prepare=()), prepared(config, target), config.delta)


def of_canaries(plan: Plan, task: Task, delta: float) -> dict[str, Any]:
    """The same of a plan and a task."""
    from sordino.audit.canaries import audit_canaries

    found = audit_canaries(plan, task, delta=delta)
    return {"passed": found.passed, "canaries": asdict(found)}


def config_of(target: Path, changes: Sequence[str] = ()) -> Config:
    """A run's own configuration, once the run is certified, or a file's."""
    if not target.is_dir():
        return load_config(target, changes)
    folder = RunFolder.open(target)
    folder.certify()
    return folder.config()


def trained_run(target: Path) -> tuple[RunFolder, Task]:
    """A certified run and its task, the model loaded with what was trained."""
    if not target.is_dir():
        fix = "add --mechanism to audit a file's plan"
        raise ConfigError(f"{target}, which is no run folder", "a finished run", fix)
    folder = RunFolder.open(target)
    folder.certify()
    task = prepared(folder.config(), target)
    load_weights(task.model, load_file(target / "model.safetensors"))
    return folder, task


def prepared(config: Config, target: Path) -> Task:
    """The task as its rounds see it: columns scaled by what the run has released of them, or by trial rounds."""
    task = config.build()
    if not task.waiting:
        return task
    if not target.is_dir():
        return prepare_columns(config.plan, task, Seeded(config.run.seed), lambda t, cohort: None, State(0, {}))[0]
    return with_released_columns(task, target)


def membership(target: Path) -> dict[str, Any]:
    """Layer 3: loss-threshold membership inference beside the ceiling that the certificate gives."""
    folder, task = trained_run(target)
    return of_model(task, folder.config().plan, folder.facts())


def of_model(task: Task, plan: Plan, facts: Facts) -> dict[str, Any]:
    """The same of a task whose module holds what was trained."""
    found = audit_membership(task.model, task)
    reach = ceilings(plan, facts)["models"]
    few, luck = min(found.members, found.strangers), _noise(found.members) + _noise(found.strangers)
    lower = found.auc <= reach.auc + _noise(few), found.true_positives["0.01"] <= reach.true_positives + luck
    limits = {"auc_at_most": reach.auc, "true_positive_rate_at_1_percent_at_most": reach.true_positives}
    return {"passed": all(lower), "membership": {**asdict(found), **limits}}


def _noise(records: int) -> float:
    """Three standard errors, at most, of a rate measured on so many records; of an AUC, on the smaller side's."""
    return float(1.5 / records**0.5)


def text(found: dict[str, Any]) -> str:
    """The findings as text, a line each."""
    lines = [_mechanism_line(audit) for audit in found.get("mechanism", [])]
    if found.get("behaviour"):
        lines += _behaviour_lines(found["behaviour"])
    if "canaries" in found:
        lines.append(_canary_line(found["canaries"]))
    if "membership" in found:
        m = found["membership"]
        rates = ", ".join(
            f"{100 * rate:.2f}% of members at {float(at):.1%} false alarms" for at, rate in m["true_positives"].items()
        )
        lines.append(f"membership: AUC {m['auc']:.4f} (certificate allows {upto(m['auc_at_most'], 4)}); {rates}")
    return "\n".join([*lines, *_verdicts(found)])


def _behaviour_lines(ran: list[dict[str, Any]]) -> list[str]:
    """One line for all that is as planned, one for each thing that is not, or that nobody could look at."""
    silent = [one for one in ran if not one["examined"]]
    odd = [one for one in ran if one["examined"] and not one["passed"]]
    asked = sum(one["statistics"] for one in ran)
    lines = [
        f"behaviour: {len(ran) - len(silent)} tests with {asked} statistics of noise, sampling and sensitivity: "
        f"{len(odd)} not as planned" + (f"; {len(silent)} more tests NOT EXAMINED" if silent else "")
    ]
    lines += [f"  {one['question']}: {one['worst']} (chance {one['chance']:.1g}): NOT AS PLANNED" for one in odd]
    return lines + [f"  {one['question']}: {one['worst']}: NOT EXAMINED" for one in silent]


def _canary_line(c: dict[str, Any]) -> str:
    return (
        f"canaries: {c['canaries']} of unit {c['unit']}, {c['rounds']} rounds, {c['right']} of {c['guessed']} guessed "
        f"right: epsilon at least {atleast(c['lower_epsilon'], 4)} ({atleast(c['gaussian_epsilon'], 4)} if it is "
        f"Gaussian), certified {upto(c['upper_epsilon'], 4)} at delta {upto(c['delta'])}"
    )


def _verdicts(found: dict[str, Any]) -> list[str]:
    """One line for each way not to pass: a bound exceeded, a test that failed, a test that could not be made."""
    if found["passed"]:
        return ["passed"]
    attacks, asked = found.get("mechanism", []), found.get("behaviour", [])
    beaten = any(one["examined"] and not one["passed"] for one in attacks)
    odd = any(one["examined"] and not one["passed"] for one in asked)
    silent = not all(one["examined"] for one in (*attacks, *asked))
    lines = ["FAILED: what runs is not what the plan says"] if odd else []
    lines += ["FAILED: more was learnt than the certificate allows"] if beaten or not (odd or silent) else []
    unseen = "NOT PASSED: some of it was not examined (docs/own-parts.md says what a part can state)"
    return lines + ([unseen] if silent else [])


def _mechanism_line(audit: dict[str, Any]) -> str:
    if not audit["examined"]:
        return f"{audit['adversary']:<9} {audit['relation']:<12} {audit['attack']}: NOT EXAMINED"
    verdict = "ok" if audit["passed"] else "TOO MUCH"
    rounds, _, several = audit["attack"].partition(" rounds at once")
    what = f"{rounds} rounds" if several else "one round"
    return (
        f"{audit['adversary']:<9} {audit['relation']:<12} {what}: mu at least {atleast(audit['lower_mu'], 4)}, "
        f"certified {upto(audit['upper_mu'], 4)}; epsilon at least {atleast(audit['lower_epsilon'], 4)}, "
        f"certified {upto(audit['upper_epsilon'], 4)}: {verdict}"
    )


def audit_behaviour(plan: Plan, *, seed: int = 0, rounds: int = ROUNDS) -> list[Finding]:
    """All tests; a false alarm among them has probability at most `noise_test.FALSE_ALARM`."""
    if not promises(plan):
        return [not_examined("everything", "the plan promises nothing to anybody")]
    plan = replace(plan, prepare=())  # its rounds
    trials = run_trial_rounds(plan, seed, rounds)
    return [
        *noise_tests(trials),
        *cohort_tests(plan, seed),
        *batch_tests(plan, seed),
        *trial_round_tests(trials),
        *sensitivity_tests(plan, seed),
    ]


def promises(plan: Plan) -> bool:
    """Whether the cost of the plan guarantees anything to any adversary."""
    return any(event.protects for line in plan.forecast.lines for event, _ in line.entries)
