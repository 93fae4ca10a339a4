"""Audit of a run folder or a TOML file, as JSON data and as text. Called by `sordino audit` and `Result.audit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file

from sordino.accounting.rounding import atleast, upto
from sordino.audit import noise_test, sampling_and_sensitivity
from sordino.audit.mechanism import CONFIDENCE, audit_mechanism
from sordino.audit.noise_test import Finding
from sordino.audit.training_attacks import audit_canaries, audit_membership
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

Layer = Literal["mechanism", "canaries", "membership"]


def audit_target(target: Path, layer: Layer, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Run one audit layer on a run folder, whose certificate is checked first, or on a TOML file.

    `changes` are settings KEY=VALUE that replace those of the TOML file.
    """
    if changes and target.is_dir():
        found = f"--set or --seed for {target}, the folder of a finished run"
        raise ConfigError(found, "a TOML file", "drop the option, or audit the TOML file")
    if layer == "membership":
        folder, task = trained_run(target)
        return membership_layer(task, folder.config().plan, folder.facts())
    config = _certified(target).config() if target.is_dir() else load_config(target, changes)
    if layer == "mechanism":
        return mechanism_layer(config.plan, config.delta)
    return canary_layer(replace(config.plan, prepare=()), _prepared_task(config, target), config.delta)


def mechanism_layer(plan: Plan, delta: float) -> dict[str, Any]:
    """Run layer 1, which needs no data: attack one round of the plan, and compare trial rounds with the plan."""
    found, tests = audit_mechanism(plan, delta=delta), audit_behaviour(plan)
    return {
        "passed": all(audit.passed for audit in found) and all(one.passed for one in tests),
        "not_examined": [f"{one.question}: {one.worst}" for one in noise_test.unexamined(tests)],
        "mechanism": [asdict(audit) for audit in found],
        "behaviour": [{**asdict(one), "passed": one.passed} for one in tests],
        "false_alarm_at_most": {"mechanism": 1 - CONFIDENCE, "behaviour": noise_test.FALSE_ALARM},
    }


def audit_behaviour(plan: Plan, *, seed: int = 0, rounds: int = ROUNDS) -> list[Finding]:
    """Test noise, sampling and sensitivity of the plan's code on trial rounds with synthetic data.

    Correct code fails with probability at most `noise_test.FALSE_ALARM`.
    """
    if not any(event.protects for line in plan.forecast.lines for event, _ in line.entries):
        return [noise_test.not_examined("everything", "the plan has no guarantee against any adversary")]
    plan = replace(plan, prepare=())
    trials = run_trial_rounds(plan, seed, rounds)
    return [
        *noise_test.noise_tests(trials),
        *sampling_and_sensitivity.cohort_tests(plan, seed),
        *sampling_and_sensitivity.batch_tests(plan, seed),
        *sampling_and_sensitivity.trial_round_tests(trials),
        *sampling_and_sensitivity.sensitivity_tests(plan, seed),
    ]


def canary_layer(plan: Plan, task: Task, delta: float) -> dict[str, Any]:
    """Run layer 2: train once with canaries, and compare the attack's lower bounds with the certified epsilon."""
    found = audit_canaries(plan, task, delta=delta)
    return {"passed": found.passed, "canaries": asdict(found)}


def membership_layer(task: Task, plan: Plan, facts: Facts) -> dict[str, Any]:
    """Run layer 3: attack the trained model by a loss threshold, and compare the result with the certificate's limits.

    The audit fails if AUC or true-positive rate exceed their limits by three standard errors. The standard error of a
    rate over n records is at most 0.5 / sqrt(n).
    """
    found, reach = audit_membership(task.model, task), ceilings(plan, facts)["models"]
    errors = [1.5 / records**0.5 for records in (found.members, found.strangers)]
    within = found.auc <= reach.auc + max(errors), found.true_positives["0.01"] <= reach.true_positives + sum(errors)
    limits = {"auc_at_most": reach.auc, "true_positive_rate_at_1_percent_at_most": reach.true_positives}
    return {"passed": all(within), "membership": {**asdict(found), **limits}}


def _certified(target: Path) -> RunFolder:
    folder = RunFolder.open(target)
    folder.certify()
    return folder


def trained_run(target: Path) -> tuple[RunFolder, Task]:
    """Return the folder of a finished run, after checking its certificate, and its task with the trained model."""
    if not target.is_dir():
        fix = "pass the folder of a run, or add --mechanism to audit a TOML file"
        raise ConfigError(f"{target}, which is no run folder", "the folder of a finished run", fix)
    folder = _certified(target)
    task = _prepared_task(folder.config(), target)
    load_weights(task.model, load_file(target / "model.safetensors"))
    return folder, task


def _prepared_task(config: Config, target: Path) -> Task:
    task = config.build()
    if not task.waiting:
        return task
    if not target.is_dir():
        # a TOML file has no released histograms: release them as a run would
        return prepare_columns(config.plan, task, Seeded(config.run.seed), lambda t, cohort: None, State(0, {}))[0]
    return with_released_columns(task, target)


def text(found: dict[str, Any]) -> str:
    """Format audit results as text, with one line per result and the verdict: passed, FAILED, or NOT PASSED.

    NOT PASSED means that a test could not run.
    """
    attacks, tests = found.get("mechanism", []), found.get("behaviour", [])
    missing = [one for one in tests if not one["examined"]]
    odd = [one for one in tests if one["examined"] and not one["passed"]]
    lines = [_mechanism_line(audit) for audit in attacks]
    if tests:
        asked = sum(one["statistics"] for one in tests)
        lines.append(
            f"behaviour: {len(tests) - len(missing)} tests with {asked} statistics of noise, sampling and sensitivity: "
            f"{len(odd)} not as planned" + (f"; {len(missing)} more tests NOT EXAMINED" if missing else "")
        )
        lines += [f"  {one['question']}: {one['worst']} (chance {one['chance']:.1g}): NOT AS PLANNED" for one in odd]
        lines += [f"  {one['question']}: {one['worst']}: NOT EXAMINED" for one in missing]
    if "canaries" in found:
        lines.append(_canary_line(found["canaries"]))
    if "membership" in found:
        m = found["membership"]
        pairs = m["true_positives"].items()
        rates = ", ".join(f"{100 * rate:.2f}% of members at {float(at):.1%} false alarms" for at, rate in pairs)
        lines.append(f"membership: AUC {m['auc']:.4f} (certificate allows {upto(m['auc_at_most'], 4)}); {rates}")
    if found["passed"]:
        return "\n".join([*lines, "passed"])
    beaten = any(one["examined"] and not one["passed"] for one in attacks)
    silent = bool(missing) or not all(one["examined"] for one in attacks)
    lines += ["FAILED: what runs is not what the plan says"] if odd else []
    lines += ["FAILED: more was learnt than the certificate allows"] if beaten or not (odd or silent) else []
    unseen = "NOT PASSED: some of it was not examined (docs/own-parts.md says what a part can state)"
    return "\n".join([*lines, *([unseen] if silent else [])])


def _canary_line(c: dict[str, Any]) -> str:
    return (
        f"canaries: {c['canaries']} of unit {c['unit']}, {c['rounds']} rounds, {c['right']} of {c['guessed']} guessed "
        f"right: epsilon at least {atleast(c['lower_epsilon'], 4)} ({atleast(c['gaussian_epsilon'], 4)} if it is "
        f"Gaussian), certified {upto(c['upper_epsilon'], 4)} at delta {upto(c['delta'])}"
    )


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
