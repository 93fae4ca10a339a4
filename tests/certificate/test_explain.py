"""Promises of the explanation: the certificate's own numbers, in sentences that hide nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.commands import sordino, spelt_out

from sordino.accounting.profiles import ceiling
from sordino.accounting.rounding import upto
from sordino.certificate.build import certificate
from sordino.certificate.explain import ceilings, explain, page
from sordino.certificate.facts import Facts, participation
from sordino.config import load_config
from sordino.runs.folder import RunFolder

LOCAL = 'release = { kind = "local_noise", mechanism = { kind = "gaussian", noise_multiplier = 9.0 } }'
SHUFFLED = (
    'release = { kind = "shuffled_noise", mechanism = { kind = "gaussian", noise_multiplier = 9.0 }, at_least = 20 }'
)
SHARES = 'release = { kind = "noise_shares", noise_multiplier = 9.0, at_least = 20 }'
NONE = 'release = { kind = "no_noise" }'
CENTRAL = 'release = { kind = "central_noise", mechanism = { kind = "gaussian", noise_multiplier = 2.0 } }'


def ran(folder: Path, *changes: tuple[str, str]) -> Path:
    """The folder of a finished run of the plan, written out, with changes."""
    out = folder / "run"
    said = sordino("run", spelt_out(folder, *changes), "--out", out)
    assert said.code == 0, said.err
    return out


@cache
def explained(out: Path) -> dict[str, Any]:
    """Once per run: nothing in its folder changes."""
    folder = RunFolder.open(out)
    return explain(folder.certify(), ceilings(folder.config().plan, folder.facts()))


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("central"))


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("silent"), (CENTRAL, NONE))


def test_it_says_what_is_protected_and_names_the_unit(central: Path) -> None:
    found = explained(central)
    assert "one client contributed" in found["protected"]
    assert "all rounds" in found["protected"]


def test_every_adversary_is_named_with_the_epsilon_and_delta_of_the_certificate(central: Path) -> None:
    made, found = RunFolder.open(central).certify(), explained(central)
    assert [entry["adversary"] for entry in found["against"]] == ["models", "cohort", "messages"]
    for line, entry in zip(made["adversaries"], found["against"], strict=True):
        if line["epsilon"] is None:
            assert entry["sentence"].endswith("nothing is guaranteed.")
        else:
            assert f"epsilon {upto(line['epsilon'])} at delta {line['delta']:.2g}" in entry["sentence"]
    assert made["adversaries"][0]["epsilon"] is not None
    assert made["adversaries"][2]["epsilon"] is None


def test_the_change_that_a_number_speaks_of_is_said_with_it(central: Path) -> None:
    models, cohort, _ = explained(central)["against"]
    assert "adding or removing all the data of one client" in models["sentence"]
    assert "with its data or with an empty message" in cohort["sentence"]


def test_the_ceilings_are_those_of_what_was_billed(central: Path) -> None:
    folder, found = RunFolder.open(central), explained(central)
    plan = folder.config().plan
    cost = plan.cost(participation(plan, folder.facts()))
    for line, entry in zip(cost.lines, found["against"], strict=True):
        reach = ceiling(line)
        assert entry["true_positive_rate_at_1_percent"] == reach.true_positives
        assert entry["auc_at_most"] == reach.auc
    sentence = found["against"][0]["sentence"]
    assert f"{upto(100 * ceiling(cost.lines[0]).true_positives)}% of the members" in sentence
    assert f"AUC is at most {ceiling(cost.lines[0]).auc:.3f}" in sentence
    assert found["against"][2]["auc_at_most"] == 1


def test_rounds_run_again_lower_no_number(central: Path) -> None:
    folder = RunFolder.open(central)
    config, facts = folder.config(), folder.facts()
    more = type(facts)(**{**vars(facts), "charged": facts.charged + 50})
    before, after = (ceilings(config.plan, one)["models"] for one in (facts, more))
    assert after.true_positives > before.true_positives
    assert after.auc > before.auc


def test_a_simulation_is_said_not_to_be_for_release(central: Path) -> None:
    assert "must not be released" in explained(central)["noise"]


def test_secure_noise_is_not_called_a_simulation(tmp_path: Path) -> None:
    out = ran(tmp_path, ('kind = "sgd" }\n\n[run]', 'kind = "sgd" }\n\n[privacy]\nnoise = "secure"\n\n[run]'))
    said = explained(out)["noise"]
    assert "cryptographic generator" in said
    assert "must not be released" not in said


def test_every_assumption_and_every_gap_of_the_certificate_is_a_sentence(central: Path) -> None:
    made, found = RunFolder.open(central).certify(), explained(central)
    for texts, sentences in ((made["assumptions"], found["assumed"]), (made["not_covered"], found["not_covered"])):
        assert len(texts) >= 3
        assert [sentence.lower() for sentence in sentences] == [f"{text}.".lower() for text in texts]
        assert all(sentence[0].isupper() for sentence in sentences)
    assert any("random draws" in sentence for sentence in found["assumed"])
    assert any("tuning is not accounted" in sentence for sentence in found["not_covered"])


def test_rounds_are_counted_as_in_the_certificate(central: Path) -> None:
    said = explained(central)["counted"]
    assert said.startswith("4 rounds were planned, 4 were charged")
    assert said.endswith("this certificate covers 4.")


def test_without_noise_nothing_is_guaranteed_to_anybody(silent: Path) -> None:
    found = explained(silent)
    assert "no guarantee" in found["noise"]
    for entry in found["against"]:
        assert entry["sentence"].endswith("nothing is guaranteed.")
        assert entry["true_positive_rate_at_1_percent"] == entry["auc_at_most"] == 1
    assert "epsilon" not in page(found)


@pytest.mark.parametrize("release", [LOCAL, SHUFFLED, SHARES], ids=["local", "shuffled", "shares"])
def test_every_release_can_be_explained_and_who_sees_less_learns_no_more(tmp_path: Path, release: str) -> None:
    models, cohort, messages = explained(ran(tmp_path, (CENTRAL, release)))["against"]
    for name in ("auc_at_most", "true_positive_rate_at_1_percent"):
        assert 0 < models[name] <= cohort[name] <= messages[name] < 1


def test_the_page_holds_every_sentence(central: Path) -> None:
    found = explained(central)
    said = page(found).splitlines()
    for sentence in [found["protected"], found["noise"], found["counted"]]:
        assert sentence in said
    against = [entry["sentence"] for entry in found["against"]]
    assert all(f"- {sentence}" in said for sentence in [*against, *found["assumed"], *found["not_covered"]])


def test_the_command_prints_the_page_or_one_object(central: Path) -> None:
    found = explained(central)
    assert sordino("explain", central).out == page(found) + "\n"
    assert sordino("explain", central, "--json").json == found


def test_a_certificate_that_was_touched_is_not_explained(tmp_path: Path) -> None:
    out = ran(tmp_path)
    file = out / "certificate.json"
    file.write_text(file.read_text().replace('"rounds_charged": 4', '"rounds_charged": 3'))
    said = sordino("explain", out, "--json")
    assert (said.code, said.out) == (1, "")
    assert "rounds_charged" in said.err


def test_a_folder_without_a_run_is_a_users_mistake(tmp_path: Path) -> None:
    assert "plan.toml" in sordino("explain", tmp_path / "nothing").sentence


@pytest.mark.parametrize(
    ("release", "model", "curator"),
    [
        (CENTRAL, "central", "the server: it is trusted"),
        (LOCAL, "local", "each client noises its own messages"),
        (SHUFFLED, "shuffle", "a trusted shuffler"),
        (SHARES, "distributed", "secure aggregation hides the single messages"),
    ],
)
def test_the_statement_says_whom_one_has_to_trust(release: str, model: str, curator: str, tmp_path: Path) -> None:
    stated = stated_of(tmp_path, release)
    assert stated["trust_model"] == model
    assert curator in stated["data_curator"]
    assert stated["unit_of_privacy"] == "user level: all data of one client"


def stated_of(folder: Path, release: str) -> dict[str, str]:
    config = load_config(spelt_out(folder, (CENTRAL, release)))
    found: dict[str, str] = certificate(config.plan, Facts(config.delta, "simulation", config.plan.rounds))["statement"]
    return found


def test_the_statement_of_a_run_counts_what_is_not_protected(central: Path) -> None:
    made = RunFolder.open(central).certify()
    rows = sum(one["rows"] for one in made["declared_public"] if one["what"] != "number of classes")
    assert made["statement"]["not_protected"].startswith(f"{rows} rows that are declared public; number of classes")
    assert str(made["counts"]["rounds_accounted"]) in made["statement"]["releases"]
    assert made["statement"]["tuning"].startswith("not accounted")
    last = RunFolder.open(central).history()[-1]
    assert {name: last[name] for name in made["utility"]} == made["utility"]
    assert {"accuracy", "loss"} <= set(made["utility"])
    assert "The questions of NIST SP 800-226" in sordino("explain", central).out
