"""What the papers claim: every claim once, in the paper's direction, judged in the paper's regime or not at all.

The regime of a noised update is its noise-to-signal ratio

    z sqrt(d) / S       z noise multiplier, d parameters, S expected cohort
    z sqrt(d) / b       for batches of b records
    z sqrt(d / S)       where each of S clients adds noise of its own

A claim is decided by its slices: rows of `verdicts` of one table or study whose text begins as `slices` says. Where our
ratio is outside a factor of two of the paper's, the verdict is "not tested here", whatever the slices say. A slice that
belongs to no claim of a paper is a claim of our own.
"""

# ruff: noqa: E501  (rows of tables)

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sordino_papers import ratios

Row = dict[str, Any]
Span = tuple[float, float]
NOT_TESTED = "not tested here"
FACTOR = 2.0
FEW = 3  # comparisons that are named one by one


@dataclass(frozen=True)
class Regime:
    """The noise-to-signal ratio, least and largest, of the paper's runs and of ours.

    `run` names an entry of `ratios.OURS`, which computes it from our plans.
    """

    paper: Span
    run: str

    @property
    def ours(self) -> Span:
        """The ratio of our runs."""
        return ratios.ours(self.run)

    @property
    def same(self) -> bool:
        """Ours is inside the paper's range, widened by a factor of two (to three digits) at both ends."""
        low, high = self.paper[0] / FACTOR, self.paper[1] * FACTOR
        return self.ours[0] >= 0.995 * low and self.ours[1] <= 1.005 * high

    def __str__(self) -> str:
        return f"{_span(self.paper)} / {_span(self.ours)}"


def _span(span: Span) -> str:
    low, high = (f"{one:.2g}" for one in span)
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class PaperClaim:
    """One claim: `slices` are beginnings of texts (of paper `paper`), `turned` where they say the contrary.

    `published` is the paper's figure, `cause` why ours is another. `title` is how the table of headlines names it; a
    claim without one is on the page of its paper only.
    """

    paper: str
    text: str
    slices: tuple[str, ...]
    regime: Regime | None = None
    published: str = "-"
    title: str = ""
    cause: str = ""
    turned: bool = False
    untrained: bool = False  # our models learned nothing: no verdict follows
    own_setting: str = ""  # how the setting differs though the ratio is the same
    beside: str = ""  # beginning of a claim of our own that a reader of this one must know

    def mine(self, rows: Iterable[Row]) -> list[Row]:
        """The slices of this claim."""
        starts = tuple(f"{self.paper}: {one}" if one else self.paper for one in self.slices)
        return [row for row in rows if row["text"].startswith(starts)]

    def judged(self, rows: Iterable[Row]) -> Row:
        """The claim as one row; without slices it is "not run"."""
        rows = list(rows)
        mine = self.mine(rows)
        answers = [_turn(row["verdict"]) if self.turned else row["verdict"] for row in mine]
        verdict = self._verdict(answers)
        return {
            "text": self.text,
            "published": self.published,
            "measured": _measured(mine, answers),
            "regime": "-" if self.regime is None else str(self.regime),
            "verdict": verdict,
            "seeds": min((row["seeds"] for row in mine if row["seeds"]), default=None),
            "cause": "; ".join(filter(None, [self._why(verdict, mine, answers), self._beside(rows)])),
        }

    def _why(self, verdict: str, mine: Sequence[Row], answers: Sequence[str]) -> str:
        """Why it is not a yes: what is still to run, or the cause, and the comparisons that went another way."""
        if verdict == "yes":
            return ""
        if verdict == "not run" and self.regime is not None:
            return f"not run yet: `sordino papers run {self.regime.run.partition(',')[0]}`"
        odd = "" if verdict == NOT_TESTED else self._open(mine, answers)
        return "; ".join(filter(None, [self.cause, odd]))

    def _open(self, mine: Sequence[Row], answers: Sequence[str]) -> str:
        """The comparisons that are not decided as most are, where they are few: one with its interval, or what is common."""
        odd = [(row, one) for row, one in zip(mine, answers, strict=True) if one != "yes"]
        if not 0 < len(odd) <= FEW or len(odd) == len(mine):
            return ""
        start = len(_common([f"{self.paper}: {one}" for one in self.slices]))
        names = [row["text"][start:].strip(" ,:") for row, _ in odd]
        if len(odd) == 1:
            return f"{odd[0][1]}: {names[0]}, {odd[0][0]['measured']}"
        went = " or ".join(dict.fromkeys(one for _, one in odd))
        measured = _measured([row for row, _ in odd], [one for _, one in odd]).partition(";")[0]
        return f"{went}: {_common(names).strip(' ,:') or f'{len(odd)} comparisons'} ({measured})"

    def _beside(self, rows: Iterable[Row]) -> str:
        found = [row for row in rows if self.beside and row["text"].startswith(f"{self.paper}: {self.beside}")]
        return "; ".join(f"{row['text'].partition(': ')[2]}: {row['measured']}" for row in found)

    def _verdict(self, answers: Sequence[str]) -> str:
        if not answers:
            return "not run"
        if self.untrained or (self.regime is not None and not self.regime.same):
            return NOT_TESTED
        if set(answers) == {"yes"}:
            return "yes"
        if "no" in answers:
            return "in part" if "yes" in answers else "no"
        return "undecided" if "yes" not in answers else "in part"


def _common(names: Sequence[str]) -> str:
    """What all names begin with, up to a comma or a colon."""
    if len(set(names)) == 1:
        return names[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in alike)
    return shared[: max(shared.rfind(", "), shared.rfind(": ")) + 2] if ", " in shared or ": " in shared else ""


def _turn(answer: str) -> str:
    return {"yes": "no", "no": "yes"}.get(answer, answer)


def _measured(rows: Sequence[Row], answers: Sequence[str]) -> str:
    """One slice as it is; of several the range of their means, and how they went."""
    if len(rows) <= 1:
        return rows[0]["measured"] if rows else "-"
    means = [
        float(found[1]) for row in rows if (found := re.match(r"(?:least |most )?([+-][\d.e+-]+) \[", row["measured"]))
    ]
    unit = re.search(r"\] ([a-zA-Z(][^,;(]*)", rows[0]["measured"])
    count = {one: answers.count(one) for one in ("yes", "no", "undecided") if one in answers}
    went = ", ".join(f"{many} {one}" for one, many in count.items())
    if len(means) < len(rows):
        return f"{went}, of {len(rows)} comparisons"
    return f"{min(means):+.3g} to {max(means):+.3g} {unit[1].strip() if unit else ''}; {went}"


TABLE3 = Regime((33, 44), "000-regime")
SMALL = Regime((33, 44), "000-small")
LSTM = Regime((3.7, 6.5), "000-regime-lstm")
SAM = Regime((64, 64), "003-mnist")
SAM_CIFAR = Regime((64, 64), "003-cifar10-regime")
SAM_PROTOCOL = Regime((64, 64), "003-protocol")
SAM_MNIST = Regime((64, 64), "003-mnist-regime")
SAM_BOTH = Regime((64, 64), "003-cifar10-regime, 003-mnist-regime")
CIFAR = "CIFAR-10 at the paper's ratio, Dirichlet 0.6,"
MNIST = tuple(f"MNIST at the paper's ratio, {skew}," for skew in ("Dirichlet 0.6", "Dirichlet 0.3", "iid"))

CLAIMS: tuple[PaperClaim, ...] = (
    # ---- 000 ----
    PaperClaim("000", "Table 2: smoothing beats none at every epsilon, sigma 1, 2 and 3, both ways of sampling",
               ("Table 2: smoothing",), Regime((2.8, 4.8), "000-table2"), "+.3 to +1.9 (sigma 1)",
               "Table 2, logistic regression: smoothing wins"),
    PaperClaim("000", "Table 2: the accuracies themselves", ("Table 2 reproduces",), Regime((2.8, 4.8), "000-table2"),
               "82.9 to 87.2", cause="one cell of 32 is 2.06 [1.09, 3.04] lower: the interval passes the margin of 2.5"),
    PaperClaim("000", "Table 3: smoothing beats none at every z and sigma, Poisson and uniform cohorts",
               ("Table 3 at the paper's noise-to-signal ratio",), TABLE3, "+1.5 to +4.9",
               "Table 3, CNN: smoothing wins", "undecided at the least noise, z = 1.8 (three of Poisson, one of uniform cohorts)", own_setting="MNIST, d = 144,554"),
    PaperClaim("000", "Table 3 with 8,394 parameters (000-small)", ("Table 3 scaled",), SMALL, "+1.5 to +4.9",
               cause="a fourth of the paper's ratio: below the crossing, where smoothing loses"),
    PaperClaim("000", "Table 3 with 55,338 parameters (000-cnn)", ("CNN by writer",), Regime((33, 44), "000-cnn"),
               "+4.9 (z = 2.4)"),
    PaperClaim("000", "Table 4: smoothing beats none on the LSTM (models above the constant predictor)",
               ("Table 4 at the paper's noise-to-signal ratio",), LSTM, "+.9 to +2.8",
               "Table 4, LSTM: smoothing wins", "five seeds: the interval holds 0", own_setting="200 roles, one layer of 64, T = 40, Poisson, z = 1"),
    PaperClaim("000", "Table 4, one layer of 32 (000-figure5): below the constant predictor of 17.0",
               ("Table 4 scaled",), Regime((3.7, 6.5), "000-figure5"), "+.9 to +2.8",
               untrained=True, cause="the models score 14.5 to 16.3 where always answering a space scores 17.0: nothing was learned"),
    PaperClaim("000", "Table 5: the order of flattening hardly matters", ("Table 5 scaled",), Regime((37, 37), "000-small, z = 2"),
               "within .8", cause="task of 000-small"),
    PaperClaim("000", "Table 6: James-Stein and soft threshold are far behind smoothing",
               ("smoothing (sigma 1) beats",), Regime((33, 44), "000-cnn"), "+42 to +66"),
    PaperClaim("000", "Figure 7: noise lowers the AUC of the membership attack", ("Figure 7 scaled, the AUC",), Regime((33, 41), "000-figure7"),
               "AUC lower under DP", "Figure 7: noise defeats the membership attack", own_setting="500 MNIST images"),
    PaperClaim("000", "Figure 7: smoothing leaks no more than none", ("Figure 7 scaled, smoothing leaks no more",), Regime((33, 41), "000-figure7"),
               "AUC equal or lower"),
    PaperClaim("000", "Table H.12: smoothing beats none in the attack's setting", ("Table H.12 scaled, z = 1", "Table H.12 scaled, z = 2"),
               Regime((33, 41), "000-figure7"), "+1.2 to +4.1", own_setting="500 MNIST images, a perceptron"),
    PaperClaim("000", "Figure 6, Table H.11: at large noise smoothing wins at every step", ("Figure 6 scaled",),
               Regime((55, 74), "000-figure6"), "by a large margin", cause="task of 000-small"),
    PaperClaim("000", "Figure 3: smoothing is behind at first", (
        "Figures 3, 4, logistic, uniform: smoothing (sigma 1) is behind",
        "Figures 3, 4, logistic, poisson: smoothing (sigma 1) is behind"), Regime((2.8, 4.8), "000-figures34"), "slower start", cause="smoothing leads from the second round on"),
    PaperClaim("000", "Figure 3: smoothing is ahead at the end", (
        "Figures 3, 4, logistic, uniform: smoothing (sigma 1) is ahead",
        "Figures 3, 4, logistic, poisson: smoothing (sigma 1) is ahead"), Regime((2.8, 4.8), "000-figures34"), "ahead"),
    PaperClaim("000", "Figure 4: the same for the CNN", ("Figures 3, 4, CNN",), Regime((37, 37), "000-small, z = 2"), "ahead",
               cause="task of 000-small"),
    PaperClaim("000", "Tables H.8, H.9: smoothing wins at other clips, epochs and batches", ("Tables H.8, H.9",),
               Regime((28, 28), "000-small, z = 2"), "-3.8 to +2.0", cause="task of 000-small"),
    PaperClaim("000", "Table H.10: smoothing wins at other steps of the LSTM", ("Table H.10",),
               Regime((7.4, 7.4), "000-table-h10"), "+.1 to +2.0", own_setting="one layer of 32, T = 20"),
    PaperClaim("000", "Figure 1: smoothing trades bias for variance", ("Figure 1,",), None, "drawn"),
    PaperClaim("000", "Figures 2, G.10, G.11: updates are smooth in every order of flattening",
               ("Figure 2 scaled", "Figure G.10", "Figure G.11"), None, "drawn", own_setting="task of 000-small"),
    PaperClaim("000", "Figure E.8: Theorem 1 at T = 1000 falls with epsilon at the accountant's rate",
               ("Figure E.8",), None, "slope -.80, intercept 3.31", "Figure E.8: the noise of Theorem 1"),
    PaperClaim("000", "Figure F.9: the path of LSGD is smoother", ("Figure F.9",), None, "drawn"),
    PaperClaim("000", "Theorems 4 to 6: convergence bounds", ("",), None, "bound"),
    # ---- 001 ----
    PaperClaim("001", "Figures 3, 6: noisy minibatch SGD beats noisy Local SGD at every epsilon and M",
               tuple(f"Figure 3 under H.1, M = {m}: noisy minibatch" for m in (25, 18, 12)),
               Regime((.04, .97), "001-figure3-h1"), "below at every epsilon",
               "Figures 3, 6: minibatch SGD beats Local SGD, both private"),
    PaperClaim("001", "Figures 3, 6: private minibatch SGD beats NON-private Local SGD at epsilon 12 and 18 (true)",
               tuple(f"Figure 3 under H.1, M = {m}, the noise of a true" for m in (25, 18, 12)),
               Regime((.04, .061), "001-figure3-h1, epsilon 12 and 18"), "below for epsilon >= 12",
               "Figures 3, 6: private minibatch SGD beats NON-private Local SGD",
               "no with the noise of H.1 as written, which is more than epsilon 12 and 18 need"),
    PaperClaim("001", "the same with the noise of H.1 as written (true epsilon 7.6 for 12, 12.5 for 18)",
               tuple(f"Figure 3 under H.1, M = {m}, the paper's noise" for m in (25, 18, 12)),
               Regime((.04, .061), "001-figure3-h1, its noise"), "below for epsilon >= 12",
               cause="its L is twice the Lipschitz constant: more noise than epsilon 12 needs"),
    PaperClaim("001", "Figures 3, 6: at epsilon 18 privacy costs almost nothing",
               tuple(f"Figure 3 under H.1, M = {m}: at epsilon 18" for m in (25, 18, 12)),
               Regime((.04, .04), "001-figure3-h1, epsilon 18"), "almost 0"),
    PaperClaim("001", "Figure 5: on silos alike minibatch SGD is below Local SGD up to epsilon 1.5",
               tuple(f"digits, silos alike, M = 12, epsilon {e}: noisy minibatch SGD is below noisy Local SGD"
                     for e in (.75, 1.5)), None, "below", own_setting="components scaled to length 1"),
    PaperClaim("001", "Figure 5: on silos alike the two are the same above epsilon 1.5",
               tuple(f"digits, silos alike, M = 12, epsilon {e}: noisy minibatch SGD and" for e in (3, 12)), None,
               "the same", cause="Local SGD with one record a step is behind, with large batches it is the same",
               own_setting="components scaled to length 1"),
    PaperClaim("001", "Figures 4, 7, 8: minibatch SGD beats Local SGD at epsilon up to 2",
               tuple(f"charges, N = {n}, M = {m}, epsilon {e:g}: noisy minibatch SGD is below"
                     for n, m in ((3, 3), (10, 10), (10, 5)) for e in (.125, .25, .5, 1, 2)), Regime((.14, 5.1), "001-figure4, epsilon to 2"),
               "below for most", "Figures 4, 7, 8: minibatch SGD beats Local SGD up to epsilon 2",
               "at epsilon 2 private Local SGD is ahead where all silos take part; elsewhere the interval holds 0",
               own_setting="noise by tight accounting, full batches"),
    PaperClaim("001", "Figures 4, 7, 8: at epsilon >= 2 minibatch SGD is as good as NON-private Local SGD",
               tuple(f"charges, N = {n}, M = {m}, epsilon {e}: noisy minibatch SGD, momentum, is at most"
                     for n, m in ((3, 3), (10, 10), (10, 5)) for e in (2, 3)), Regime((.14, .63), "001-figure4, epsilon 2 and 3"), "essentially as well",
               "Figures 4, 7, 8: near NON-private Local SGD from epsilon 2 on",
               "margin .03 of relative RMSE, 20 splits",
               own_setting="noise by tight accounting, full batches"),
    PaperClaim("001", "Theorem 2.3, E.1: rates of one pass and stages in n, M, epsilon", ("one pass, multi-stage",), None,
               "-2, -1, -2"),
    PaperClaim("001", "Theorem 3.1: nothing is below the lower bound", ("Theorem 3.1",), None, "bound"),
    # ---- 002 ----
    PaperClaim("002", "Figure 1: the loss is the larger the smaller epsilon is", ("loans, Figure 1",),
               Regime((.42, 2.1), "002-loans"), "drawn", cause="S = 100 clients of 1,000 where the paper has 500 of 5,000"),
    PaperClaim("002", "Figure 3: some T is best, more is worse (Laplace)",
               tuple(f"loans, epsilon {e}: T*" for e in (1, 3, 5)), Regime((.42, 2.1), "002-loans"), "10, 30, 30",
               cause="S = 100 clients of 1,000 where the paper has 500 of 5,000"),
    PaperClaim("002", "Figure 3 at 500 of 5,000 clients: some T is best, more is worse (Laplace)",
               tuple(f"5,000 silos, epsilon {e}: T*" for e in (1, 3, 5)), Regime((.42, 2.1), "002-loans-5000"), "T* = 10, 30, 30",
               "Figure 3, loans: an interior T is best", own_setting="8,000 loans, 1 or 2 in a silo"),
    PaperClaim("002", "Figure 3: the best T grows with epsilon", ("5,000 silos, the best T grows",),
               Regime((.42, 2.1), "002-loans-5000"), "T* = 10, 30, 30, 100"),
    PaperClaim("002", "Figure 5: smaller epsilon wants larger E", ("5,000 silos, smaller epsilon wants",),
               Regime((.42, 2.1), "002-loans-5000"), "larger E"),
    PaperClaim("002", "Figure 7: E = T^(2/3) has the lowest loss", ("5,000 silos, Figure 7, b = N: E = T^(2/3) has lower losses over T >= 10 than the best",),
               Regime((.443, .443), "002-loans-5000, Figure 7"), "lowest", "Figure 7, loans: E = T^(2/3) is best", own_setting="8,000 loans, 1 or 2 in a silo"),
    PaperClaim("002", "Figure 7: E = T^(2/3) beats E = 1", ("5,000 silos, Figure 7, b = N: E = T^(2/3) has lower losses over T >= 10 than E = 1",),
               Regime((.443, .443), "002-loans-5000, Figure 7"), "lowest"),
    PaperClaim("002", "Figures 3, 5, 7 with 1,000 silos", ("loans, the best T grows", "loans, smaller epsilon", "loans, T = 120",
               "loans, Figure 7"), Regime((.42, 2.1), "002-loans"), "as above", cause="S = 100 clients of 1,000"),
    PaperClaim("002", "Figure 6: smaller epsilon wants larger E (FEMNIST, epsilon 10 to 30)",
               ("FEMNIST at the paper's epsilons,",), Regime((3.6, 24), "002-femnist-30"), "E* = 24, 12, 12, 2",
               "Figure 6, FEMNIST: smaller epsilon wants larger E",
               "E hardly matters here: with Gaussian noise the variance of a run is the same for every E", own_setting="105 writers, d = 8,350"),
    PaperClaim("002", "Figures 2, 4, 6 at epsilon 50 to 800", ("FEMNIST, ",), None, "drawn",
               cause="other epsilons than the paper's, at about its ratio"),
    PaperClaim("002", "Theorem 3: no distance is above the bound", ("Theorem 3",), None, "bound"),
    PaperClaim("002", "Corollary 5.1: with Laplace noise a finite T is best", ("Corollary 5.1",), None, "finite"),
    # ---- 003 ----
    PaperClaim("003", "Table 1: DP-FedSAM gains 4 points and more on DP-FedAvg (CIFAR-10; MNIST, three splits)",
               tuple(f"{one} DP-FedSAM gains" for one in (CIFAR, *MNIST)), SAM_BOTH, "+4 to +6", "Table 1: DP-FedSAM gains 4 points on DP-FedAvg",
               "less than 4 points in all four; whether it gains at all is undecided; tuning chose the least rho tried",
               own_setting="CIFAR-10 at 16x16 with 5 local steps, MNIST with 60"),
    PaperClaim("003", "Table 1: DP-FedSAM gains on DP-FedAvg at all (the same runs)",
               tuple(f"{one} DP-FedSAM beats DP-FedAvg" for one in (CIFAR, *MNIST)), SAM_BOTH, "+4 to +6"),
    PaperClaim("003", "Table 1: top_k beats DP-FedSAM (the best sound form; CIFAR-10, MNIST)", tuple(f"{one} top_k" for one in (CIFAR, MNIST[0])),
               SAM_BOTH, "+.9 to +3.2", "Table 1: top_k improves DP-FedSAM",
               "the published top_k masks its own noise: not private (003-protocol)", own_setting="a sound form, the same tasks"),
    PaperClaim("003", "Table 1: DP-FedSAM beats Fed-SMP-rand_k", (f"{CIFAR} DP-FedSAM beats Fed-SMP",), SAM_CIFAR, "+2.8 to +5.8"),
    PaperClaim("003", "Figure 4: DP-FedSAM has the smaller updates (CIFAR-10)", (f"{CIFAR} DP-FedSAM has the smaller updates",), SAM_CIFAR, "smaller"),
    PaperClaim("003", "Figures 1, 3: DP-FedSAM lies flatter (CIFAR-10)", (f"{CIFAR} DP-FedSAM lies flatter",), SAM_CIFAR, "flatter"),
    PaperClaim("003", "Table 4: DP-FedSAM has the smaller gap between train and test (CIFAR-10)", (f"{CIFAR} DP-FedSAM has the smaller gap",), SAM_CIFAR,
               "smaller"),
    PaperClaim("003", "Figure 4 on MNIST at the paper's ratio: DP-FedSAM has the smaller updates",
               tuple(f"{one} DP-FedSAM has the smaller updates" for one in MNIST), SAM_MNIST, "smaller"),
    PaperClaim("003", "Figures 1, 3 on MNIST at the paper's ratio: DP-FedSAM lies flatter",
               tuple(f"{one} DP-FedSAM lies" for one in MNIST), SAM_MNIST, "flatter"),
    PaperClaim("003", "Table 4 on MNIST at the paper's ratio: DP-FedSAM has the smaller gap",
               tuple(f"{one} DP-FedSAM has the smaller gap" for one in MNIST), SAM_MNIST, "smaller"),
    PaperClaim("003", "Table 1 by its own protocol (not private, best round): DP-FedSAM beats DP-FedAvg",
               ("its protocol (not private), best round: DP-FedSAM beats",), SAM_PROTOCOL, "+4 to +6", own_setting="MNIST, C .2, rho .5"),
    PaperClaim("003", "Table 1 by its own protocol (not private, best round): top_k as published beats DP-FedSAM",
               ("its protocol (not private), best round: top_k as published",), SAM_PROTOCOL, "+.9 to +3.2",
               cause="its mask takes more of the signal than of the noise's size (columns signal and noise, which is energy, of 003-protocol)",
               beside="its protocol (not private), best round: a C smaller"),
    PaperClaim("003", "Table 1 on MNIST (003-mnist): DP-FedSAM beats DP-FedAvg",
               tuple(f"{skew}, DP-FedSAM beats DP-FedAvg" for skew in ("Dirichlet 0.6", "Dirichlet 0.3", "iid")), SAM,
               "+4 to +6 (CIFAR-10)", cause="a tenth of the ratio"),
    PaperClaim("003", "Table 1 on MNIST (003-mnist): DP-FedSAM beats Fed-SMP, BLUR and BLUR+LUS",
               ("Dirichlet 0.6, Fed-SMP", "Dirichlet 0.6, BLUR", "Dirichlet 0.3, Fed-SMP", "iid, Fed-SMP"), SAM, "+.03 to +6.3 (CIFAR-10)",
               turned=True, cause="a tenth of the ratio"),
    PaperClaim("003", "Table 1 on MNIST (003-mnist): top_k beats DP-FedSAM (sound forms)", ("Dirichlet 0.6, top_k",), SAM, "+.9 to +3.2 (CIFAR-10)",
               cause="a tenth of the ratio"),
    PaperClaim("003", "Figure 4 on MNIST: DP-FedSAM has the smaller updates",
               tuple(f"{skew}, DP-FedSAM has the smaller updates" for skew in ("Dirichlet 0.6", "Dirichlet 0.3", "iid")), SAM,
               "smaller", cause="a tenth of the ratio"),
    PaperClaim("003", "Figures 1, 3 on MNIST: DP-FedSAM lies flatter",
               tuple(f"{skew}, DP-FedSAM lies flatter" for skew in ("Dirichlet 0.6", "Dirichlet 0.3", "iid")), SAM, "flatter", "",
               "a tenth of the ratio"),
    PaperClaim("003", "Table 4 on MNIST: DP-FedSAM has the smaller gap",
               tuple(f"{skew}, DP-FedSAM has the smaller gap" for skew in ("Dirichlet 0.6", "Dirichlet 0.3", "iid")), SAM,
               "smaller"),
    PaperClaim("003", "Tables 2, 3, Figure 5: the gain at every epsilon, rho, K, M", ("Table 2,", "Table 3,", "Table 4,", "E (", "M ("),
               SAM, "gain everywhere", cause="MNIST at a tenth of the ratio, T = 30"),
    PaperClaim("003", "Theorem 2: Eq. 16 is the epsilon of the protocol that ran (cohorts of exactly 50)",
               ("T = 200, cohorts", "T = 300, cohorts"), None, "8.51, 10.79",
               "Theorem 2: Eq. 16 is the epsilon of what ran", "the true epsilons are 43.2 and 57.8: fixed cohorts were billed as Poisson"),
    PaperClaim("003", "Theorem 2 of Poisson cohorts with one clip", ("T = 200, Poisson", "T = 300, Poisson"), None, "8.51, 10.79"),
    PaperClaim("003", "Theorem 2 of the authors' code (a clip per tensor)", ("T = 200, each", "T = 300, each"), None, "8.51, 10.79",
               cause="sensitivity C sqrt(tensors)"),
    # ---- 004 ----
    PaperClaim("004", "Table 2 by the paper's protocol (not private): smoothing beats none at every epsilon",
               ("the paper's protocol (not private)",), Regime((10, 31), "004-protocol"), "+1.5 to +3.8",
               "Table 2, logistic regression: smoothing wins (its protocol)",
               "10 epochs, for which the noise was computed, where the paper trains 50", own_setting="NOT private, 10 epochs"),
    PaperClaim("004", "Table 2 by the paper's protocol with its 50 epochs (not private)",
               ("the paper's protocol, 50 epochs (not private)",), Regime((10, 31), "004-protocol"), "+1.5 to +3.8"),
    PaperClaim("004", "Figure 4: at every step size", ("Figure 4 (not private)",), Regime((15, 31), "004-protocol, Figure 4"), "at every step"),
    PaperClaim("004", "Table 2 with records clipped, at a true epsilon", ("Table 2, smoothing",), Regime((10, 31), "004-table2"),
               "+1.5 to +3.8", cause="records clipped and batches of 2,000: a sixteenth of the ratio; there smoothing wins too"),
    PaperClaim("004", "Figures 5, 7: DP-LSSGD beats DP-SGD at z = 10 in the long run",
               ("MNIST CNN at z = 10, step 0.15, after 3,000 steps", "MNIST CNN at z = 10, each at the step"), Regime((6.3, 6.3), "004-regime"),
               "+3.2 to +5.0", "Figures 5, 7, CNN: smoothing wins late", "yes at the paper's step (.15)",
               own_setting="14x14, 3,000 steps of 14,000"),
    PaperClaim("004", "Figure 5: DP-SGD is ahead at first", ("MNIST CNN at z = 10, step 0.15, after 250",),
               Regime((6.3, 6.3), "004-regime"), "ahead"),
    PaperClaim("004", "Figures 5, 7 at 120 steps (004-cnn)", ("MNIST CNN (scaled)",), Regime((6.3, 6.3), "004-cnn"), "+3.2 to +5.0",
               cause="a tenth of the ratio, 120 steps of 14,000"),
    PaperClaim("004", "Figure 6: smoothing wins on CIFAR-10", ("CIFAR-10 CNN",), Regime((8.1, 8.1), "004-cifar10"), "drawn",
               cause="a fiftieth of the ratio, 72 steps"),
    PaperClaim("004", "Figure 2: smoothing removes noise from a signal and a picture", ("Figure 2",), None, "drawn"),
    PaperClaim("004", "Theorems 4, 7: utility bounds", ("",), None, "bound"),
)  # fmt: skip


def of_paper(paper: str, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(the paper's claims, judged once each; the rows that are claims of our own)."""
    said = [claim for claim in CLAIMS if claim.paper == paper and any(claim.slices)]
    theirs = [claim.judged(rows) for claim in said if claim.mine(rows) or claim.title]
    slices = {row["text"] for claim in said for row in claim.mine(rows)}
    return theirs, [row for row in rows if row["text"] not in slices]


def headlines(rows: dict[str, list[Row]]) -> list[Row]:
    """The claims of the front page."""
    found = []
    for claim in [one for one in CLAIMS if one.title]:
        row = claim.judged(rows.get(claim.paper, []))
        same = "-" if claim.regime is None else ("yes" if claim.regime.same else "**no**")
        note = f" ({claim.own_setting})" if claim.own_setting else ""
        ratio = "" if claim.regime is None else f"; {claim.regime}"
        found.append({**row, "title": f"{claim.paper} {claim.title}", "same": f"{same}{note}{ratio}"})
    return found
