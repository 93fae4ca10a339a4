"""Rules of `sordino lint`: known differences between what a library accounts and what its code runs.

A rule is a frozen value: for which settings it holds, what is wrong, where it can be read, and one change that mends
it. Each was confirmed with the installed library of the named version (benchmarks/peers/lint_claims.py) or, where that
does not install, in its published code (docs/lint.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sordino.accounting.rounding import upto
from sordino.lint.known_calls import Settings
from sordino.lint.library_prices import PROTOCOLS, MissingError, Price


@dataclass(frozen=True)
class Rule:
    """A known difference: `holds` decides, `message` says what is wrong, `mend` what to change, `source` where."""

    name: str
    library: str
    version: str
    call: str
    holds: Callable[[Settings], bool]
    message: str
    mend: str
    source: str

    def applies(self, settings: Settings) -> bool:
        return (settings.library, settings.call) == (self.library, self.call) and self.holds(settings)


def _always(settings: Settings) -> bool:
    return True


def _sampled(settings: Settings) -> bool:
    return bool(settings.get("sampling") == "without_replacement")


def _resized(settings: Settings) -> bool:
    """Return whether one record more or less changes the rate or the denominator of Opacus (it may, if not stated)."""
    if not settings.get("poisson", True):
        return False
    if not settings.has("records", "batch_size"):
        return True
    records, batch = settings.get("records"), settings.get("batch_size")
    sizes = {(steps, int(n / steps)) for n in (records - 1, records, records + 1) if (steps := math.ceil(n / batch))}
    return len(sizes) > 1


_FLOWER, _FIXED = "1.41.0, 1.42.0", "flwr/serverapp/strategy/dp_fixed_clipping.py"
RULES: tuple[Rule, ...] = (
    Rule(
        "flower-fixed-cohort", "flower", _FLOWER, "fixed_clipping",
        lambda s: s.get("accounted", True) and not _sampled(s),
        "A round has a fixed number of clients, so nobody is added or removed: another client comes instead, and the "
        "sum moves by 2C. The accountant is told add-or-remove-one, with C.",
        "state zero-out neighbours (a client's update becomes empty), for which C is right, or double noise_multiplier",
        f"{_FIXED}, _prepare_accounting; github.com/flwrlabs/flower/issues/7884",
    ),
    Rule(
        "flower-no-accountant", "flower", _FLOWER, "fixed_clipping",
        lambda s: s.get("accounted") is False,
        "Without an accountant FedAvg weights updates by example counts while the noise is for equal weights 1/n, and "
        "missing replies only warn: one client may move the mean by more than C/n. No epsilon is printed or proved.",
        "pass accountant=RdpAccountant(...): equal weights and all replies are then required",
        f"{_FIXED}, _validate_uniform_weights and validate_replies return early if accountant is None",
    ),
    Rule(
        "flower-without-replacement", "flower", _FLOWER, "accountant", _sampled,
        "Sampling without replacement is for replaced clients, which move the sum by 2C; the noise multiplier z is "
        "handed on as if they moved it by C (dp-accounting 0.6.0 does not halve it).",
        "pass noise_multiplier / 2 to GaussianPrivacyEvent",
        "flwr/supercore/privacy_accounting/rdp_accountant.py, _to_backend_event; dp_accounting "
        "_compute_rdp_sample_wor_gaussian",
    ),
    Rule(
        "flower-adaptive-order", "flower", _FLOWER, "adaptive_clipping", _always,
        "The clipping norm is updated before the noise is added: updates are clipped by the old norm and noised for "
        "the new one. If more are clipped than asked for, the noise is too small by that step, exp(-clip_norm_lr * "
        "(clipped - target)): .905 if all are clipped, at the defaults.",
        "draw the noise before the norm is updated",
        "flwr/serverapp/strategy/dp_adaptive_clipping.py, aggregate_train: _geometric_update stands before "
        "_add_noise_to_aggregated_arrays",
    ),
    Rule(
        "flower-local-sensitivity", "flower", _FLOWER, "local",
        lambda s: s.has("sensitivity", "clip_norm") and s.get("sensitivity") < 2 * s.get("clip_norm"),
        "Noise is for `sensitivity`, which is not tied to clipping_norm: another client's update differs by up to "
        "2 clipping_norm. A smaller value needs a proof that one record moves the update by no more, and nothing here "
        "clips records.",
        "set sensitivity = 2 * clipping_norm",
        "flwr/clientapp/mod/localdp_mod.py; the same mod in FLIP (github.com/londonaicentre/FLIP/pull/833), whose "
        "own text says that its defaults are no defensible budget",
    ),
    Rule(
        "flower-local-large-epsilon", "flower", _FLOWER, "local", lambda s: s.get("epsilon", 0) > 1,
        "sqrt(2 ln(1.25 / delta)) / epsilon is proved for epsilon below 1 only.",
        "take the noise of the analytic Gaussian mechanism (Balle, Wang 2018) at the same epsilon",
        "flwr/clientapp/mod/localdp_mod.py, std_dev; Dwork, Roth 2014, Theorem A.1",
    ),
    Rule(
        "flower-local-rounds", "flower", _FLOWER, "local", lambda s: s.get("rounds", 1) > 1,
        "epsilon is spent by each message; rounds are not composed.",
        "divide the budget by rounds: account sensitivity / std once per round",
        "flwr/clientapp/mod/localdp_mod.py: no accountant",
    ),
    Rule(
        "opacus-shuffled", "opacus", "1.6.0", "dp_sgd", lambda s: s.get("poisson") is False,
        "Batches come from a shuffled loader, and the accountant composes Poisson samples at 1 / len(data_loader).",
        "leave poisson_sampling=True",
        "opacus/privacy_engine.py, make_private: get_optimizer_hook_fn(sample_rate=...) does not ask for "
        "poisson_sampling; github.com/meta-pytorch/opacus/pull/128; Lebeda et al. 2024, arXiv 2405.20769",
    ),
    Rule(
        "opacus-size-is-public", "opacus", "1.6.0", "dp_sgd", _resized,
        "Rate 1 / len(data_loader) and denominator int(N * rate) follow the number of records N, so one record more or "
        "less can change the scale of the noise, which whoever sees the steps can measure. The epsilon holds for "
        "neighbours of one size.",
        "state zero-out neighbours with a public N, or fix rate and expected_batch_size by hand",
        "opacus/privacy_engine.py, make_private: expected_batch_size; github.com/meta-pytorch/opacus/issues/571",
    ),
    Rule(
        "opacus-gdp", "opacus", "1.6.0", "dp_sgd", lambda s: s.get("accountant") == "gdp",
        'accountant="gdp" is a central limit estimate, not a bound; it errs on the low side.',
        'PrivacyEngine(accountant="prv"), the default',
        "opacus/accountants/analysis/gdp.py; Gopi, Lee, Wutschitz 2021, arXiv 2106.02848",
    ),
    Rule(
        "pfl-banded-factor", "pfl", "0.6.0", "banded", _always,
        "C is taken as the lower Cholesky factor of X = C^T C, for which C C^T = X: its columns are longer than the 1 "
        "that is accounted. Measured on five settings (rounds, min_separation), one user moves C X by 1.10 to 1.60 "
        "times what is accounted; other settings are not examined.",
        "take the factor with C^T C = X: reverse rows and columns of X, factor, transpose, reverse again",
        "pfl/privacy/ftrl_mechanism.py, BandedMatrixFactorizationMechanism; docs/errata.md of Sordino",
    ),
    Rule(
        "pfl-noise-scale", "pfl", "0.6.0", "accountant", lambda s: s.get("noise_scale", 1.0) < 1,
        "noise_scale shrinks the noise that is added; epsilon is that of the noise before. It stands for a larger "
        "cohort than the one that ran, and is true of no run with this one.",
        "report epsilon for noise_scale=1, or say that the run simulates a larger cohort",
        "pfl/privacy/privacy_accountant.py, cohort_noise_parameter",
    ),
    Rule(
        "pfl-cohorts-are-not-poisson", "pfl", "0.6.0", "accountant", lambda s: s.get("rate", 1.0) < 1,
        "The accountant composes Poisson samples; a simulation draws a fixed number of users, by default with "
        "repetitions, so its epsilon is that of a deployment that draws by Poisson.",
        "draw cohorts by Poisson sampling where the epsilon is to hold",
        "pfl/data/sampling.py, get_user_sampler; pfl/privacy/privacy_accountant.py, sampling_prob",
    ),
    Rule(
        "pfl-single-iteration", "pfl", "0.6.0", "single_iteration", lambda s: s.get("rounds", 1) > 1,
        "construct_single_iteration is for one release, as its documentation says; a client in several rounds pays "
        "for each.",
        "GaussianMechanism.from_privacy_accountant with num_compositions = rounds",
        "pfl/privacy/gaussian_mechanism.py, construct_single_iteration",
    ),
    Rule(
        "jax-keras-shuffled", "jax_privacy", "2.0.0", "keras", lambda s: s.get("poisson") is False,
        "poisson_sampling_in_fit is off by default: fit() takes batches of a shuffled pass, and the noise is "
        "calibrated for Poisson samples.",
        "poisson_sampling_in_fit=True",
        "jax_privacy/keras_api.py, DPKerasConfig and update_with_calibrated_noise_multiplier",
    ),
    Rule(
        "jax-keras-accumulation", "jax_privacy", "2.0.0", "keras",
        lambda s: s.has("noise_multiplier") and s.get("accumulation", 1) > 1,
        "A given noise_multiplier is checked with batch_size, though a step takes batch_size * "
        "gradient_accumulation_steps records: the rate is too low by that factor.",
        "leave noise_multiplier=None, which calibrates with the effective batch size",
        "jax_privacy/keras_api.py, DPKerasConfig._validate_params: batch_size=self.batch_size",
    ),
    Rule(
        "jax-fixed-batch", "jax_privacy", "2.0.0", "dp_sgd", lambda s: s.get("sampling") == "fixed_batch_size",
        "Fixed batches are accounted as Poisson samples at half the noise multiplier. One pair of neighbours reaches "
        "that loss (all other records opposite to the replaced one); that no pair exceeds it is not proved, and no "
        "proof is named. The bound that is proved is larger.",
        "SamplingMethod.POISSON with Poisson batches, or account by Balle, Barthe, Gaboardi 2018, Theorem 9",
        "jax_privacy/accounting/analysis.py, DpsgdTrainingAccountant._compute_epsilon; Lebeda et al. 2024, "
        "arXiv 2405.20769",
    ),
    Rule(
        "fl4health-product-of-rates", "fl4health", "0.4.2", "records", lambda s: s.get("client_rate", 1.0) < 1,
        "Client rate and batch rate are multiplied, as if every step drew its clients anew. A client is in a whole "
        "round or in none, and the server sees which: against it clients' sampling amplifies nothing.",
        "account each client's own steps at its batch rate, for the rounds in which it took part",
        "fl4health/privacy/fl_accountants.py, FlInstanceLevelAccountant.__init__",
    ),
    Rule(
        "fl4health-without-replacement", "fl4health", "0.4.2", "without_replacement", _always,
        "Sampling without replacement is for replaced clients, which move the sum by 2C; the noise multiplier is "
        "handed on as if they moved it by C (dp-accounting 0.6.0 does not halve it).",
        "pass noise_multiplier / 2",
        "fl4health/privacy/moments_accountant.py, FixedSamplingWithoutReplacement; dp_accounting "
        "_compute_rdp_sample_wor_gaussian",
    ),
    Rule(
        "nvflare-svt-release", "nvflare", "2.9.0", "svt", _always,
        "`epsilon` pays for choosing coordinates only. The values cost n_upload * noise_var more, which the filter "
        "logs and no argument limits; parameters that are scalars are sent without noise.",
        "set epsilon_release, and noise that suits it",
        "nvflare/app_common/filters/svt_privacy.py, _compute_release_epsilon",
    ),
    Rule(
        "nvflare-percentile", "nvflare", "2.9.0", "percentile", _always,
        "PercentilePrivacy truncates and drops small values; it adds no noise, so no epsilon can be stated.",
        "add a filter that clips the whole update and adds Gaussian noise",
        "nvflare/app_common/filters/percentile_privacy.py, process_dxo",
    ),
)  # fmt: skip


def with_call(settings: Settings) -> Settings:
    """Return the settings with a protocol: that of plain numbers is the first of the library."""
    if settings.library == "flower" and not settings.call and _sampled(settings):
        return replace(settings, call="accountant")
    known = [call for library, call in PROTOCOLS if library == settings.library]
    return settings if settings.call in known else replace(settings, call=known[0])


def check(settings: Settings) -> dict[str, Any]:
    """Return claim, proved prices and findings of one run's settings, and what is missing or was not examined."""
    settings = with_call(settings)
    claim_of, proved_of = PROTOCOLS[settings.library, settings.call]
    claim: Price | None = None
    proved: list[Price] = []
    missing: set[str] = set()
    try:
        claim = claim_of(settings)
    except MissingError as error:
        missing |= set(error.keys)
    try:
        proved = proved_of(settings)
    except MissingError as error:
        missing |= set(error.keys)
    found = [rule for rule in RULES if rule.applies(settings)]
    return {
        "library": settings.library,
        "call": settings.call,
        "where": settings.where,
        "settings": dict(settings.values),
        "claims": None if claim is None else _entry(claim),
        "proved": [_entry(price) for price in proved],
        "missing": sorted(missing),
        "not_examined": list(settings.unread),
        "findings": [
            {
                "rule": rule.name,
                "version": rule.version,
                "message": rule.message,
                "mend": rule.mend,
                "source": rule.source,
            }
            for rule in found
        ],
    }


def _entry(price: Price) -> dict[str, Any]:
    return {
        "epsilon": price.epsilon, "delta": price.delta, "relation": price.relation, "against": price.against,
        "of": price.words,
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """Return the result of `check` as lines."""
    lines = [", ".join(filter(None, (f"{found['library']}: {found['call']}", found["where"])))]
    lines.append(f"  claims  {_line(found['claims']) if found['claims'] else 'no epsilon'}")
    lines += [f"  proved  {_line(price)}" for price in found["proved"]]
    if not found["proved"]:
        lines.append("  proved  not computed" if found["missing"] else "  proved  no guarantee")
    if found["missing"]:
        lines.append(f"  missing {', '.join(found['missing'])}: give them as options or by --set key=value")
    if found["not_examined"]:
        lines.append(f"  not examined: {', '.join(found['not_examined'])} (not literal)")
    for one in found["findings"]:
        lines += [f"  {one['rule']} ({found['library']} {one['version']})", f"    {one['message']}"]
        lines += [f"    mend: {one['mend']}", f"    source: {one['source']}"]
    return "\n".join(lines if found["findings"] else [*lines, "  no known difference"])


def _line(price: dict[str, Any]) -> str:
    epsilon = "no guarantee" if price["epsilon"] is None else f"epsilon {upto(price['epsilon'], 4)}"
    return f"{epsilon}, delta {upto(price['delta'])}, {price['relation']}, to {price['against']}: {price['of']}"
