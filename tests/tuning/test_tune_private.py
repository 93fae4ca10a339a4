"""Promises of `sordino tune --private`: all trials in one cost, nothing but the best left, their number secret."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event as de
from dp_accounting import rdp
from dp_accounting.privacy_accountant import NeighboringRelation
from tests import tiny
from tests.commands import Said, federation, sordino

from sordino.accounting.composition import Selection
from sordino.accounting.events import GaussianNoise, PubliclySampled, Tuned
from sordino.accounting.renyi import Trials
from sordino.certificate.facts import Facts, run_cost
from sordino.config import load_config
from sordino.errors import ConfigError, DivergedError
from sordino.ledger.ledger import Ledger
from sordino.parts.encoding import Clip
from sordino.parts.releases import NoiseShares
from sordino.parts.samplers import FixedSize
from sordino.runs.execution import execute
from sordino.runs.folder import RunFolder
from sordino.tuning import private_selection

OVER = ("--over", "recipe.lr=[0.1, 0.5, 2.0]")
DELTA = 1e-3


def tuned(file: Path, out: Path, *words: object) -> Said:
    return sordino("tune", file, "--private", *OVER, "--trials", 3, "--out", out, *words)


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    said = tuned(federation(folder), folder / "best", "--json")
    (folder / "said.json").write_text(said.out)
    assert said.code == 0, said.err
    return folder


def oracle(noise_multiplier: float, mean: float) -> float:
    """Google's accountant, of four Poisson rounds repeated a geometric number of times."""
    accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    rounds = de.SelfComposedDpEvent(de.PoissonSampledDpEvent(0.5, de.GaussianDpEvent(noise_multiplier)), 4)
    accountant.compose(de.RepeatAndSelectDpEvent(rounds, mean, 1.0))
    return float(accountant.get_epsilon(DELTA))


def test_the_certificate_charges_all_trials_and_one_trial_would_be_caught(won: Path) -> None:
    made, truth = RunFolder.open(won / "best").certify(), oracle(2.0, 3.0)
    assert made["epsilon"] == pytest.approx(truth, rel=0.01)  # the library gives up on some orders
    (event,) = made["adversaries"][0]["events"]
    assert (event["count"], event["event"]["kind"], event["event"]["trials"]["mean"]) == (1, "tuned", 3.0)
    (once,) = [line["epsilon"] for line in sordino("plan", won / "fed.toml", "--json").json["adversaries"][:1]]
    assert once < 0.6 * truth  # sabotage: the cost of the run that is shown, alone
    assert made["statement"]["tuning"].startswith("accounted")
    assert "whoever runs the tuning sees every trial" in made["statement"]["data_curator"]
    assert any("stayed secret" in text for text in made["assumptions"])
    assert not any("tuning is not accounted" in text for text in made["not_covered"])


def test_a_budget_is_met_by_the_whole_search(tmp_path: Path) -> None:
    file = federation(tmp_path)
    made = json.loads(tuned(file, tmp_path / "best", "--epsilon", 2, "--json").out)["certificate"]
    z = load_config(tmp_path / "best" / "plan.toml").plan.release.mechanism.noise_multiplier  # type: ignore[attr-defined]
    assert 0.98 * 2 < made["epsilon"] <= 2
    assert oracle(z, 3.0) == pytest.approx(2, rel=0.01)


def test_the_folder_says_nothing_of_the_other_trials(won: Path, tmp_path: Path) -> None:
    told = json.loads((won / "said.json").read_text())
    assert set(told) == {"out", "metric", "best", "chosen", "reported", "certificate"}
    assert sorted(path.name for path in won.iterdir()) == ["best", "data.npz", "fed.toml", "said.json"]
    assert "15 test rows of data.npz, the validation part" in told["chosen"]["by"]
    assert "the test part" in told["reported"]["rows"]
    assert "nothing but this run is left" in tuned(won / "fed.toml", tmp_path / "b").out


def test_the_best_of_all_trials_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, int | None]] = []

    def watched(config: Any, path: Path, tried: bool) -> Any:
        assert path.parent.name == ".best.trials"
        assert path.parent.stat().st_mode & 0o077 == 0  # only its owner
        done = execute(config, path, tried=tried)
        seen.append((done.history[-1]["accuracy"], config.run.draw_seed))
        return done

    monkeypatch.setattr(private_selection, "execute", watched)
    monkeypatch.setattr(Trials, "draw", lambda self, coins: 5)
    told = json.loads(tuned(federation(tmp_path), tmp_path / "best", "--json").out)
    assert len(seen) == 5
    assert len({seed for _, seed in seen}) == 5  # each with its own random draws
    assert told["chosen"]["accuracy"] == max(score for score, _ in seen)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_whose_cost_was_made_smaller_is_refused(won: Path, tmp_path: Path) -> None:
    import shutil

    for found, instead in (("mean = 3.0", "mean = 2.0"), ("[privacy.selected.trials]", "[privacy.forgotten]")):
        out = tmp_path / instead.strip("[]")
        shutil.copytree(won / "best", out)
        file = out / "plan.toml"
        assert file.read_text().count(found) == 1
        file.write_text(file.read_text().replace(found, instead))
        assert sordino("certify", out).code == 1
    assert sordino("certify", won / "best").code == 0
    assert "best, by accuracy" in sordino("explain", won / "best").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--over", "recipe.rounds=[2, 4]"), "changes the privacy cost of a trial"),
        (("--over", "recipe.noise_multiplier=[1.0, 2.0]"), "changes the privacy cost of a trial"),
        (("--over", "recipe.clients.rate={low=0.1, high=0.5}"), "changes the privacy cost of a trial"),
        (("--over", "run.seed=[1, 2]"), "in the search space"),
        (("--over", "privacy.delta=[0.01, 0.001]"), "in the search space"),
        (("--over", "task.partition=[1]"), "in the search space"),
        (("--over", "recipe.lrr=[1]"), "did you mean 'lr'?"),
        ((*OVER, "--trials", 0.5), "a mean above 1"),
        ((*OVER, "--law", "poison"), "did you mean 'poisson'?"),
        ((*OVER, "--epsilon", 1, "--epsilon", 2), "several --epsilon"),
        ((*OVER, "--metric", "accurate"), "did you mean 'accuracy'?"),
        ((), "without --over"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(tmp_path: Path, words: tuple[object, ...], said: str) -> None:
    assert said in sordino("tune", federation(tmp_path), "--private", *words, "--out", tmp_path / "best").sentence
    assert not (tmp_path / "best").exists()
    assert not list(tmp_path.glob(".*"))


def test_who_was_in_the_winner_does_not_lower_the_cost() -> None:
    """The cohorts of the trials that lost are seen by nobody, and may have had somebody in more rounds."""
    plan = tiny.plan(rounds=5, clients=FixedSize(6, 2), release=NoiseShares(1.0, 2), encode=(Clip(1.0),))
    selection = Selection(id="a", trials=Trials(3.0), over=("recipe.lr",), by="accuracy")
    seen = Facts(0.01, "simulation", 5, max_participations=1)
    alone, best = (run_cost(plan, facts).line("cohort").entries for facts in (seen, replace(seen, selection=selection)))
    assert [count for _, count in alone] == [1]
    trial_of_five = Tuned(PubliclySampled(2 / 6, GaussianNoise(1.0)), 5, selection.trials)  # averaged over all coins
    assert best == ((trial_of_five, 1),)
    often = Facts(0.01, "simulation", 5, max_participations=5, selection=selection)
    assert run_cost(plan, often).line("cohort").entries == best


def test_rows_to_choose_by_are_needed(tmp_path: Path) -> None:
    from tests.commands import arrays

    data = {name: value for name, value in arrays().items() if not name.startswith("test")}
    assert "without public test rows" in tuned(federation(tmp_path, data=data), tmp_path / "best").sentence


def test_a_ledger_pays_once_for_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ours.ledger"
    words = ["ledger", "limit", ledger, "study", "--delta", DELTA, "--unit", "client", "--relation", "add_remove"]
    assert sordino(*words, "--epsilon", 1.5).code == 0
    where = f'[privacy]\nledger = "{ledger}"\ndataset = "study"\n\n[run]'
    file = federation(tmp_path, ("[run]", where))
    monkeypatch.setattr(Trials, "draw", lambda self, coins: 3)
    assert tuned(file, tmp_path / "best").code == 1  # one trial could be paid for
    assert not (tmp_path / "best").exists()
    assert sordino(*words, "--epsilon", 20).code == 0
    made = json.loads(tuned(file, tmp_path / "best", "--json").out)["certificate"]
    with Ledger.open(ledger) as book:
        spent = book.statement("study")
    assert (spent.runs, [type(item.event) for item in spent.items]) == (1, [Tuned])
    assert spent.epsilon == pytest.approx(made["epsilon"], rel=1e-4)
    assert sordino("certify", tmp_path / "best").code == 0


def test_no_trial_releases_nothing_and_a_stop_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = federation(tmp_path), tmp_path / "best"
    monkeypatch.setattr(Trials, "draw", lambda self, coins: 0)
    said = tuned(file, out, "--law", "poisson")
    assert (said.code, out.exists()) == (1, False)
    assert "nothing is released" in said.err
    left = tmp_path / ".best.trials" / "trial"
    left.mkdir(parents=True)
    (left / "history.jsonl").write_text("{}")  # what a killed tuning left
    monkeypatch.setattr(Trials, "draw", lambda self, coins: 2)

    def stopped(config: Any, path: Path, tried: bool) -> None:
        assert not left.exists()
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(private_selection, "execute", stopped)
    assert tuned(file, out).code == 130
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_the_winner_is_not_run_again_as_if_it_were_one_run(won: Path, tmp_path: Path) -> None:
    said = sordino("run", won / "best" / "plan.toml", "--out", tmp_path / "again").sentence
    assert "another run is another release" in said
    file = tmp_path / "sweep.toml"
    grid = '[sweep]\n[sweep.grid]\n"plan.local.lr" = [0.1, 0.5]\n'
    file.write_text(f'base = "{won}/best/plan.toml"\n{grid}')  # its runs would be paid for by the tuning
    assert "another run is another release" in sordino("sweep", file, "--out", tmp_path / "again").sentence
    with pytest.raises(ConfigError, match="another run is another release"):
        execute(load_config(won / "best" / "plan.toml"), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_neither_time_nor_fate_of_a_trial_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    for first_diverges in (False, True):
        count = iter(range(9))

        def watched(config: Any, path: Path, tried: bool, lost: bool = first_diverges, count: Any = count) -> Any:
            done = execute(config, path, tried=tried)
            if lost and next(count) == 0:
                raise DivergedError("not finite")
            return done

        monkeypatch.setattr(private_selection, "execute", watched)
        monkeypatch.setattr(Trials, "draw", lambda self, coins: 2)
        said = tuned(federation(tmp_path), tmp_path / f"best{first_diverges}")
        assert said.code == 0
        told.append(said.out.split("best:")[0].splitlines())
    assert told[0] == told[1]


def test_for_release_the_number_of_trials_is_drawn_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    real = Trials.draw

    def watched(self: Trials, coins: Any) -> int:
        kinds.append(type(coins.bit_generator).__name__)
        return min(real(self, coins), 2)

    monkeypatch.setattr(Trials, "draw", watched)
    file = federation(tmp_path, ("[run]", '[privacy]\nnoise = "secure"\n[run]'))
    assert tuned(file, tmp_path / "best").code == 0
    assert kinds == ["AESCounter"]
    assert load_config(tmp_path / "best" / "plan.toml").run.draw_seed is None


def test_a_comparison_of_recipes_is_no_private_search(tmp_path: Path) -> None:
    file = federation(tmp_path)
    file.write_text(file.read_text() + '\n[sweep]\nepsilon = 8\nrecipe = ["dp_fed_avg", "dp_fed_ls"]\n')
    said = sordino("tune", file, "--private", "--out", tmp_path / "best").sentence
    assert "recipe or epsilon with --private" in said
