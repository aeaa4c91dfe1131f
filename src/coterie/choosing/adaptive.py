"""Adaptive averaging: whom to listen to, and how much, chosen from user 0's own examples.

The weights that suit a user depend on constants nobody knows, and gradients at a point that was fitted to the own
examples say too little about them. So user 0's examples are split into folds, and models are trained that are
each blind to one. What such a model's gradients lack of the gradient on its unseen fold tells *whom* to listen to
(cross-fitting); its loss on that fold tells *how much* (cross-validation). See docs/adaptive.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.choosing.chooser import Choice
from coterie.choosing.cross_fitting import Array, cross_validate, fit_weights, split
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine
from coterie.errors import KnobError
from coterie.gradients.parameters import Parameters
from coterie.learners.side_by_side import why_one_by_one
from coterie.learners.spec import RunSpec
from coterie.rules import Alone, Rule, WeightedAveraging
from coterie.rules.knobs import weights_over
from coterie.rules.streams import StreamAveraging


@dataclass(frozen=True)
class Plan:
    """How thoroughly to choose.

    Args:
        folds: into how many parts user 0's examples are split.
        alphas: the candidates for α beside 0.
        equal: whether equal weights are candidates beside the fitted weights.
    """

    folds: int
    alphas: tuple[float, ...]
    equal: bool = True

    @property
    def candidates(self) -> int:
        """How many pairs of α and τ are compared, Alone among them."""
        return 1 + len(self.alphas) * (1 + self.equal)

    @property
    def cost(self) -> int:
        """How many runs it takes: for each fold one to find τ, and one for every candidate."""
        return self.folds * (1 + self.candidates)


PLANS = (
    Plan(5, (0.1, 0.3, 0.6, 0.9, 0.99)),
    Plan(4, (0.2, 0.5, 0.9)),
    Plan(3, (0.3, 0.9)),
    Plan(2, (0.3, 0.9), equal=False),
    Plan(2, (0.5,), equal=False),
)
"""From thorough to cheap: 60, 32, 18, 8 and 6 runs."""


@dataclass(frozen=True)
class AdaptiveAveraging:
    """Average with weights chosen from the data: no knob has to be set.

    Before the first step, `coterie.train` lets this rule choose α and τ, and then trains once by

        d_t = (1 − α) g_0 + α Σ τ_k g_k

    *Whom*: user 0's examples are split into folds, and a model is trained blind to each. With the rows of G_q the
    gradients of user 0 (on the other folds) and of the peers at model q, and h_q the gradient on fold q,

        H = running mean over steps and q of (G_q − 1h_qᵀ)(G_q − 1h_qᵀ)ᵀ,   κ = argmin over the simplex of κᵀHκ

    is the combination of gradients that comes nearest to the true one; all models step by it, and τ is its part on
    the peers, averaged over the last third of the run. *How much*: α from a short grid, with this τ and with equal
    weights, by cross-validation of user 0's own loss. α = 0, `Alone`, is always a candidate. Where user 0 has a
    stream of fresh samples (`User.stream`), there is no overfitting to guard against: `StreamAveraging` serves.

    Args:
        budget: what choosing may cost, in runs; at least 6. It bounds the number of folds and of candidates (see
            `PLANS`). None: 60 for models of up to 10⁵ parameters, 32 up to 10⁷, 8 beyond.

    Example:
        >>> import torch, coterie
        >>> _ = torch.manual_seed(0)
        >>> inputs = torch.randn(90, 3)
        >>> targets = inputs.sum(1, keepdim=True)
        >>> me = coterie.User("me", inputs[:6], targets[:6])
        >>> peers = [
        ...     coterie.User("alike", inputs[6:50], targets[6:50]),
        ...     coterie.User("contrary", inputs[50:], -targets[50:]),
        ... ]
        >>> model, rule = torch.nn.Linear(3, 1), AdaptiveAveraging(budget=8)
        >>> run = coterie.train(model, torch.nn.functional.mse_loss, me, peers, rule, steps=60, lr=0.1)
        >>> run.record.configuration.choice["tau"]["alike"] > 0.9
        True
    """

    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget >= PLANS[-1].cost:
            raise KnobError(f"`budget` must be at least {PLANS[-1].cost} runs, got {self.budget!r}")

    def choose(self, spec: RunSpec, engine: Engine, progress: bool | None = None) -> Choice:
        """Choose α and τ; see `Chooser`. The users must be in this process.

        The account holds `alpha` and `tau`; `candidates`, each with its cross-validated `loss`, the `difference` to
        Alone and the paired standard `error` of that; `own_weight` and `weights`, κ at `steps`; and `sentence`.
        """
        require(engine, "local", "`AdaptiveAveraging`")
        weights_over(None, engine.names)  # refuses a run without peers
        account = self._account(spec, progress)
        return Choice(self.rule_from(account), account)

    def _account(self, problem: RunSpec, progress: bool | None) -> dict[str, Any]:
        """Return the choice with its account, as plain data."""
        if problem.me.is_stream:
            return {
                "regime": "stream: weights from the bias Gram matrix, anew as the run goes",
                "horizon": problem.steps,
                "sentence": "peers are weighed as the run goes, by the bias that fresh samples show",
            }
        usable, left_out = _usable(problem)
        plan = plan_for(self.budget, Parameters(problem.model).size, len(problem.me))
        about = {
            "regime": "finite own data: whom by cross-fitting, how much by cross-validation",
            "left_out": left_out,
            "folds": plan.folds,
            "cost": plan.cost,
        }
        if not usable.peers or plan.folds < 2:
            why = "no peer's gradient is finite" if left_out else "there is one own example"
            return about | {
                "alpha": 0.0,
                "tau": {},
                "sentence": f"peers weigh nothing: {why}, nothing to choose by",
            }
        folds = split(usable.me, plan.folds, problem.seed)
        fitted = fit_weights(usable, folds, progress)
        candidates = _candidates(plan, fitted.tau)
        losses = cross_validate(usable, folds, np.array([c.weights for c in candidates]), progress)
        account = _account(candidates, losses if problem.me.validation is not None else losses[-1:])
        best = min(range(len(candidates)), key=lambda c: (account[c]["loss"], c))
        names = [peer.name for peer in usable.peers]
        tau = dict(zip(names, candidates[best].tau.tolist(), strict=True))
        choice = about | {
            "runs": why_one_by_one(usable) or "one program",
            "alpha": candidates[best].alpha,
            "tau": {name: weight for name, weight in tau.items() if weight > 0 and candidates[best].alpha},
            "candidates": account,
            "steps": fitted.steps,
            "own_weight": fitted.kappa[:, 0].tolist(),
            "weights": dict(zip(names, fitted.kappa[:, 1:].T.tolist(), strict=True)),
        }
        return choice | {"sentence": _sentence(choice, account[best])}

    def rule_from(self, account: Mapping[str, Any]) -> Rule:
        """Return the rule that an account stands for."""
        if "horizon" in account:
            return StreamAveraging(account["horizon"])
        return WeightedAveraging(account["alpha"], account["tau"]) if account["alpha"] else Alone()


@dataclass(frozen=True, eq=False)
class Candidate:
    """A pair of α and τ to compare.

    Args:
        alpha: the peers' weight.
        tau: the weight of each peer among the peers.
        whose: what τ is: `"equal"` or `"fitted"`.
    """

    alpha: float
    tau: Array
    whose: str

    @property
    def weights(self) -> Array:
        """The weight of the own gradient and of each peer's."""
        return np.append(1 - self.alpha, self.alpha * self.tau)


def plan_for(budget: float | None, n_parameters: int, n_examples: int) -> Plan:
    """Return the most thorough plan that a budget allows.

    Args:
        budget: in runs; None: by the size of the model, see `AdaptiveAveraging`.
        n_parameters: of the model.
        n_examples: of user 0, no more than which can be folds.

    Example:
        >>> plan_for(60, 10**9, 30).cost, plan_for(None, 10**6, 30).cost
        (60, 32)
    """
    if budget is None:
        budget = 60 if n_parameters <= 10**5 else 32 if n_parameters <= 10**7 else 8
    plan = next(plan for plan in PLANS if plan.cost <= budget)
    return dataclasses.replace(plan, folds=min(plan.folds, n_examples))


def _usable(problem: RunSpec) -> tuple[RunSpec, dict[str, str]]:
    """Return the problem without the peers whose gradients cannot be used at the start, and why they cannot."""
    engine = problem.in_process()
    equal = dict.fromkeys(engine.names, 1 / max(1, len(engine.names)))
    with engine.buffers_kept():
        left_out = dict(engine.gradients(Parameters(problem.model).vector(), 0, equal, rows=True).left_out)
    kept = tuple(peer for peer in problem.peers if peer.name not in left_out)
    return dataclasses.replace(problem, peers=kept), left_out


def _candidates(plan: Plan, tau: Array) -> list[Candidate]:
    """Return Alone, then every α with equal weights and with the fitted weights."""
    equal = np.full(len(tau), 1 / len(tau))
    kinds = [("equal", equal)] * plan.equal + [("fitted", tau)]
    grid = [Candidate(alpha, weights, whose) for alpha in plan.alphas for whose, weights in kinds]
    return [Candidate(0.0, equal, "equal"), *grid]


def _account(candidates: Sequence[Candidate], losses: Array) -> list[dict[str, Any]]:
    """Return each candidate's cross-validated loss and its difference to Alone, with the paired standard error.

    Args:
        candidates: Alone first.
        losses: of shape (evaluations, candidates, examples); a candidate counts where it is best.
    """
    best = losses.mean(2).argmin(0)
    each = losses[best, np.arange(len(candidates))]
    rows = []
    for candidate, own in zip(candidates, each, strict=True):
        with np.errstate(invalid="ignore"):  # the losses of a run that failed are infinite
            difference = own - each[0]
            numbers = {
                "loss": own.mean(),
                "difference": difference.mean(),
                "error": difference.std(ddof=1) / math.sqrt(len(difference)),
            }
        finite = {name: float(n) if np.isfinite(n) else math.inf for name, n in numbers.items()}
        rows.append({"alpha": candidate.alpha, "tau": candidate.whose, **finite})
    return rows


def _sentence(choice: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Say how much weight the peers have, and what speaks for it."""
    alone = choice["candidates"][0]["loss"]
    if not choice["alpha"]:
        return f"peers weigh nothing: none of {len(choice['candidates'])} candidates beat Alone's {alone:.4g}"
    return (
        f"peers weigh {choice['alpha']:g} by {choice['folds']}-fold cross-validation: loss {best['loss']:.4g}, "
        f"{best['difference']:+.3g} ± {best['error']:.2g} against Alone"
    )
