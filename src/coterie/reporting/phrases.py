"""A plan in words and tables, for the terminal and for pages."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from coterie.theory.choices import averaging_speedup, least_noise_alpha
from coterie.theory.constants import Constants
from coterie.theory.correction import hessian_gap_limit
from coterie.theory.descent import oracle
from coterie.theory.exchanges import Exchanges, alone_in_time, best_exchanges
from coterie.theory.plan import PAYS, Choice, Promise, PromiseCost

TITLES = {"alone": "Alone", "wga": "WGA", "bc_oracle": "BC, oracle", "bc": "BC"}
NO_STEP = (
    "Alone's step size is 0 because its bound is least where no step is taken: the noise outweighs"
    " what so few steps gain. Ask for more of them."
)

NOTHING = (
    "The theory's bound says nothing here: in this many steps it promises neither averaging nor"
    " training alone a loss below that of the start. It does not say that collaboration does not"
    " pay; train, and read the verdict on held-out rows."
)
SOMETHING = 0.99
"""A bound above this part of the start's excess loss promises nothing."""


def sure_speedup(wga: Choice, steps: int, doubted: Constants | None) -> float:
    """Return the speedup of averaging that is left where constants are as bad as they may be.

    See `verdict`.
    """
    if doubted is None:
        return float(wga.speedup)
    return min(float(wga.speedup), float(averaging_speedup(doubted, steps, wga.alpha)))


def verdict(
    problem: Constants, choices: Mapping[str, Choice], steps: int, doubted: Constants | None = None
) -> list[str]:
    """Say in plain words whether averaging pays, whether bias correction does, and what a step size of 0 means.

    Constants that were measured have errors: `doubted` has biases that are two standard errors
    larger, and no more is claimed of averaging than is left with these.
    """
    wga, bc, sure = choices["wga"], choices["bc"], sure_speedup(choices["wga"], steps, doubted)
    if sure > PAYS:
        unless = ", unless a bias is more than two standard errors above what was measured"
        if doubted is None:
            unless = ""
        first = (
            f"Collaboration pays: averaging with alpha = {wga.alpha:.3g} needs {sure:.3g} times"
            f" fewer steps than training alone{unless}."
        )
    elif wga.speedup > PAYS:
        first = (
            f"It is not known whether averaging pays: the speedup of {wga.speedup:.3g} takes biases"
            " that are not clear of their errors for none; with all two standard errors larger it"
            f" is {sure:.3g}."
        )
    elif min(float(wga.bound), float(choices["alone"].bound)) > SOMETHING * float(
        problem.initial_gap
    ):
        first = NOTHING
    else:
        first = (
            "Averaging does not pay: over this many steps the peers' bias outweighs the noise they"
            f" would save (speedup {wga.speedup:.3g})."
        )
    if bc.speedup > PAYS:
        second = (
            f"Bias correction pays by its bound on the mean over the run: {bc.speedup:.3g} times"
            f" fewer steps than training alone, with alpha = {bc.alpha:.3g} and beta ="
            f" {bc.beta:.3g}."
        )
    else:
        second = (
            "Bias correction is not shown to pay: by its bound on the mean over the run its"
            f" speedup is {bc.speedup:.3g}, because {_obstacle(problem, steps)}."
        )
    return [first, second, *([NO_STEP] if not choices["alone"].lr else [])]


def _obstacle(problem: Constants, steps: int) -> str:
    """Say what keeps bias correction from the linear speedup."""
    alpha = least_noise_alpha(problem)
    if not alpha:
        return "there is no noise to save"
    lr = oracle(problem, alpha).best_gradient_lr(steps)
    limit = hessian_gap_limit(problem, alpha, lr)
    if problem.hessian_gap > limit:
        return (
            "following the bias as it drifts costs more than the noise; it needs a Hessian gap"
            f" below {limit:.2g}"
        )
    return (
        "the first estimate of the bias costs more than the noise; it needs more steps or a better"
        " first estimate"
    )


def numbers(choice: Choice) -> dict[str, float | None]:
    """Return what a method has, as JSON knows it: no infinities."""
    values = {name: float(value) for name, value in asdict(choice).items() if value is not None}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def cells(name: str, row: Mapping[str, float | None]) -> dict[str, str]:
    """Return a row of the table, in words and four digits."""

    def cell(key: str) -> str:
        value = row.get(key, math.nan)
        return "∞" if value is None else "" if math.isnan(value) else f"{value:.4g}"

    columns = {
        "alpha": "alpha",
        "beta": "beta",
        "step size": "lr",
        "excess loss ≤": "bound",
        "speedup": "speedup",
    }
    return {"method": TITLES[name]} | {column: cell(key) for column, key in columns.items()}


def note(rows: Mapping[str, Mapping[str, float | None]]) -> str:
    """Say what the bounds of a table are on."""
    return (
        "Bounds are on the last step; BC's is on the mean over the run, where Alone's is "
        f"{rows['bc']['alone_bound']:.4g}."
    )


def in_short(choices: Mapping[str, Choice]) -> str:
    """Return a plan in one line."""
    shown = []
    for name in ("wga", "bc"):
        row = numbers(choices[name])
        knobs = [
            f"{key} {row[key]:.3g}"
            for key in ("alpha", "beta", "speedup")
            if row.get(key) is not None
        ]
        shown.append(f"{TITLES[name]} {', '.join(knobs)}")
    return "; ".join(shown)


def exchange_cells(problem: Constants, steps: int, cost: float) -> list[dict[str, str]]:
    """Return a table of how often to exchange where an exchange costs as much as so many gradients.

    Its bounds are on the excess loss, the mean over the points of exchange, in the time of `steps`
    steps with an exchange each.
    """
    return [
        {
            "kind": kind,
            "K": "–" if one.every == 0 else str(one.every),
            "alpha": f"{one.alpha:.3g}",
            "step size": f"{one.lr:.3g}",
            "own gradients": f"{one.steps:.0f}",
            "exchanges": "0" if one.every == 0 else f"{one.steps / one.every:.0f}",
            "excess loss ≤": f"{one.bound / (2 * float(problem.pl)):.4g}",
        }
        for kind, one in exchange_choices(problem, steps, cost).items()
    ]


def exchange_choices(problem: Constants, steps: int, cost: float) -> dict[str, Exchanges]:
    """Return what may be done in a given time.

    Ask nobody, exchange at every step, or less often in either way.
    """
    return {
        "alone": alone_in_time(problem, steps, cost),
        "at every step": best_exchanges(problem, steps, cost, "stale", every=1),
        "stale peers": best_exchanges(problem, steps, cost, "stale"),
        "local work": best_exchanges(problem, steps, cost, "local"),
    }


def exchange_sentence(choices: Mapping[str, Exchanges], cost: float) -> str:
    """Say how often to exchange, by the least bound."""
    kind, best = min(
        ((k, one) for k, one in choices.items() if one.every), key=lambda each: each[1].bound
    )
    setting = "exchange_every" if kind == "stale peers" else "local_steps"
    best_is = (
        f"{kind} with `{setting}={best.every}`" if best.every > 1 else "an exchange at every step"
    )
    said = (
        f"Where an exchange costs as much as {cost:g} gradients, the least bound with peers is that"
        f" of {best_is}."
    )
    if choices["alone"].bound >= best.bound:
        return said
    return (
        said
        + " Alone's is lower: it takes steps, each on fresh own examples, in the time of exchanges."
    )


def promise_cells(alone: Choice, cost: PromiseCost) -> list[dict[str, str]]:
    """Return a table of training alone, of averaging with plain peers, and with those that keep their promise."""
    rows = {"Alone": alone, "WGA, plain peers": cost.plain, "WGA, private peers": cost.private}
    shown = [(title, cells("wga", numbers(choice))) for title, choice in rows.items()]
    return [
        {key: cell for key, cell in (row | {"method": title}).items() if key != "beta"}
        for title, row in shown
    ]


def promise_sentences(promise: Promise, cost: PromiseCost, n_peers: int) -> list[str]:
    """Say what a promise costs, and from how many peers on collaboration pays."""
    size = min(promise.batch_size or promise.examples, promise.examples)
    first = (
        f"For this ε over {promise.gradients} gradients of {size} rows a peer adds noise of norm"
        f" {cost.noise:.3g} to each: it is worth {cost.worth:.2g} of a plain peer."
    )
    second = (
        f"With {n_peers} such peers averaging has a speedup of {cost.private.speedup:.3g} over"
        f" training alone, where plain ones would have {cost.plain.speedup:.3g}."
    )
    if cost.pays_from is None:
        third = "No number of such peers pays: their bias outweighs what they save."
    elif cost.pays_from <= n_peers:
        third = f"It pays from {_count(cost.pays_from)} on (a speedup of {PAYS:g})."
    else:
        third = (
            f"It does not pay yet: it would from {_count(cost.pays_from)} on (a speedup of"
            f" {PAYS:g})."
        )
    return [first, second, third]


def _count(peers: int) -> str:
    return "1 such peer" if peers == 1 else f"{peers} such peers"
