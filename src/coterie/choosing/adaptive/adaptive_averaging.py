"""Adaptive averaging.

Whom to listen to, and until when, found from user 0's own examples while it trains.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.arguments import POSITIVE
from coterie.choosing.adaptive.adaptive_learner import (
    EVALUATIONS,
    AdaptiveLearner,
    OwnSetting,
    Schedule,
)
from coterie.choosing.adaptive.evaluations import HeldOutEvaluations, split
from coterie.choosing.chooser import Algorithm, RuleChoice, check_local_steps
from coterie.choosing.memory import SKETCH, MemoryPlan
from coterie.choosing.mixture import gradients_of_a_fit
from coterie.engines.asking import OwnUser, asking
from coterie.engines.engine import Engine, Stackable, require
from coterie.errors import KnobError, ModelError
from coterie.gradients.norm_bound import FACTOR
from coterie.gradients.parameters import Parameters
from coterie.learners.spec import RunSpec
from coterie.mixture.candidates import JUDGING
from coterie.recording.configuration import StepSettings
from coterie.recording.costs import Costs
from coterie.rules import Alone
from coterie.rules.rule import weights_over
from coterie.rules.streams import StreamAveraging

FOLDS = 4
"""F, into how many parts user 0's examples are split."""
REACH = 2.0
"""Where nothing is said: step sizes times steps, about how far Adam can move a number."""
RATES = (0.3, 1.0, 3.0)
"""The step sizes tried where none is given, in multiples of that."""
DECAYS = (0.0, 0.03)
"""The weight decays tried: towards 0 alone, and towards where the branch began."""


@dataclass(frozen=True)
class Expected:
    """What a run is expected to cost, from two steps that change nothing."""

    runs: float  # how many gradients of each peer, in those of a run by `WeightedAveraging`
    own_runs: float  # the same of user 0
    seconds: float  # about, in this process
    averaging_seconds: float  # of the same steps by `WeightedAveraging`

    def __str__(self) -> str:
        ratio = self.seconds / max(self.averaging_seconds, 1e-9)
        return (
            f"about {self.seconds:.3g} s, {ratio:.2g} times the {self.averaging_seconds:.3g} s of"
            f" averaging ({self.runs:g} runs of the peers' gradients and {self.own_runs:g} of the"
            " own)"
        )


@dataclass(frozen=True)
class AdaptiveAveraging(Algorithm):
    """Find out while training whom to listen to and until when: no knob has to be set.

    In the first half of the steps models follow the peers only. User 0's examples judge them there:
    the weights are those whose combination of the peers' gradients comes nearest to user 0's own.
    In the second half copies go on from there with the own examples; others follow the own examples
    from the start. Copies that are blind to a fold of the own examples show on it how well each
    predicts. What is served is a mixture of all these models at all evaluations, with one half of
    the prior on those that asked no peer. See docs/adaptive.md. Where user 0 has a stream of fresh
    samples (`User.stream`), `StreamAveraging` serves: nothing is held out.

    Args:
        single: serve the best single model in the place of the mixture.
        rates: step sizes to try, in multiples of the optimizer's. When None: 0.3, 1 and 3 where
            neither `lr` nor an optimizer or a schedule is given, and the step size that is given.
        linear: take linear models in closed form, as `Mixture` makes them, as further candidates.

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
        >>> run = coterie.train(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, me, peers, steps=60, lr=0.1)
        >>> run.record.end.account["weights"]["alike"][-1] > 0.9
        True
    """

    single: bool = False
    rates: tuple[float, ...] | None = None
    linear: bool = True

    guards_itself = plans_by_steps = keeps_memory = True

    def __post_init__(self) -> None:
        if self.rates is not None:
            for rate in self.rates:
                POSITIVE("rates", rate)
            object.__setattr__(self, "rates", tuple(self.rates))

    def cost_in_words(self) -> str:
        """Return in a line what this asks of the peers."""
        return (
            f"adaptive averaging asks the peers for {(FOLDS + 2) / 2:g} times the gradients of one"
            " run"
        )

    def expected_cost(self, spec: RunSpec) -> Expected:
        """Return what a run by this rule will cost, without running it.

        Passes of two steps are timed.

        Example:
            >>> import torch, coterie
            >>> users = [coterie.User(name, torch.randn(9, 2), torch.randn(9, 1)) for name in ("me", "a", "b")]
            >>> loss = torch.nn.functional.mse_loss
            >>> spec = coterie.RunSpec(torch.nn.Linear(2, 1), loss, users[0], users[1:], steps=100)
            >>> expected = AdaptiveAveraging().expected_cost(spec)
            >>> expected.runs, expected.own_runs, expected.seconds > expected.averaging_seconds > 0
            (3.0, 45.0, True)
        """
        ready = spec.prepared()
        engine, x = ready.in_process(), Parameters(ready.model).vector()
        weights = weights_over(None, engine.names)
        own, whole = (_seconds(engine, x, asked) for asked in ({}, weights))
        averaging = spec.steps * whole
        if self.fallback(spec) is not None:
            # `StreamAveraging` asks everybody once a step, `Alone` nobody
            runs = float(spec.me.is_stream)
            return Expected(runs, 1.0, averaging if runs else spec.steps * own, averaging)
        folds = self._n_folds(spec)
        # Trunks for half of the steps and pooled for all; Alone's copies for all, the branch's for
        # half.
        runs, copies = (folds + 2) / 2, (folds + 1) * len(self.settings(spec))
        judging = min(len(spec.me), JUDGING) + (
            0 if spec.me.validation is None else len(spec.me.validation)
        )
        # forward passes only
        many = 2 * EVALUATIONS * (1.5 * copies + 1) * judging / min(spec.batch_size, len(spec.me))
        seconds = spec.steps * (1.5 * copies * own + runs * max(whole - own, 0.0)) + many / 3 * own
        return Expected(runs, 1.5 * copies, seconds, averaging)

    def settings(self, spec: RunSpec) -> list[OwnSetting]:
        """Return how the copies of Alone, and of the branch, follow the own examples."""
        return [
            OwnSetting(rate, decay, from_pooled=bool((i + j) % 2))
            for i, rate in enumerate(self._rates(spec))
            for j, decay in enumerate(DECAYS)
        ]

    def _rates(self, spec: RunSpec) -> tuple[float, ...]:
        said = (spec.lr, spec.optimizer, spec.scheduler) != (None, None, None)
        return self.rates or ((1.0,) if said else RATES)

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return the run with a step size, where none is said; refuse what has no effect here."""
        check_local_steps(spec)
        if self.fallback(spec) is not None:
            return spec
        if spec.norm_bound not in (None, FACTOR):
            raise KnobError(
                "`norm_bound` as a number is for rules such as `WeightedAveraging`:"
                " `AdaptiveAveraging` leaves out gradients more than 10 times as long as is usual;"
                " leave it out, or give None to leave out nothing"
            )
        if spec.lr is not None or spec.optimizer is not None:
            return spec
        return replace(spec, rule=replace(self, rates=self._rates(spec)), lr=REACH / spec.steps)

    def check(self, spec: RunSpec, engine: Engine) -> None:
        """Refuse an engine that has no peers, or cannot give what this needs."""
        weights_over(None, engine.names)
        if engine.capabilities.sketch is None:  # it is by sketches that peers are weighed elsewhere
            require(engine, "rows", "`AdaptiveAveraging`")

    def fallback(self, spec: RunSpec) -> RuleChoice | None:
        """Return another rule where user 0's examples cannot be split into folds, else None."""
        if spec.me.is_stream:
            account = {
                "regime": "stream: weights from the bias Gram matrix, anew as the run goes",
                "sentence": (
                    "peers are weighed as the run goes, by the bias that fresh samples show"
                ),
            }
            return RuleChoice(StreamAveraging(spec.steps), account)
        if len(spec.me) < 2:
            why = "peers weigh nothing: there is one own example, nothing to judge by"
            return RuleChoice(Alone(), {"tau": {}, "sentence": why})
        return None

    def learner(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
    ) -> AdaptiveLearner:
        """Return the learner of a run that is prepared."""
        settings, most = self.settings(spec), self._n_folds(spec)
        here = isinstance(engine, Stackable) and engine.capabilities.not_stacked is None
        plan = MemoryPlan.of(spec, most, len(settings), whole=not here)
        folds, parts = self.parts(spec, plan.folds)
        try:
            me = OwnUser(
                spec.model, spec.loss, spec.me, spec.batch_size, spec.seed, spec.forward_options
            )
            points, own = asking(engine, me, parts), None
            if plan.one_by_one:
                points.sketched = SKETCH and max(1, min(SKETCH, points.d // 2))
                own = asking(me.engine(torch.ones_like(parts[0])), me, parts)
        except ModelError as error:  # with all examples it was tried before
            raise ModelError(
                f"{error}. Adaptive averaging trains on parts of the {len(spec.me)} own examples"
                f" too, the least of {int(parts.sum(1).min())}; give more own examples, or a rule"
                " such as `Alone()`"
            ) from error
        looks = HeldOutEvaluations(spec, points, folds, single=self.single, most=plan.points)
        settled: dict[str, Any] = {
            "linear": self.linear,
            "own": own,
            "apart": plan.one_by_one and here,
            "told": plan.account(spec, most),
        }
        return AdaptiveLearner(spec, engine, costs, looks, settings, **settled)

    def parts(self, spec: RunSpec, count: int) -> tuple[Tensor, Tensor]:
        """Return the fold of each own example, (n,), and which examples copies see, (P, n).

        All, all but each.
        """
        folds = split(spec.me, count, spec.seed)
        blind = folds != torch.arange(int(folds.max()) + 1)[:, None]
        return folds, torch.cat([torch.ones(1, len(folds), dtype=torch.bool), blind])

    def gradients_asked(self, me: str, peers: Sequence[str], settings: StepSettings) -> int:
        """Return how many gradients a run asks of each peer elsewhere, at most."""
        first, second = Schedule.of(settings.steps).exchanges(settings.exchange_every)
        return first * (FOLDS + 1) + second + self.linear * gradients_of_a_fit(len(peers))

    def _n_folds(self, spec: RunSpec) -> int:
        """Return into how many folds user 0's examples are split, each of two or more where there are enough."""
        return max(2, min(FOLDS, len(spec.me) // 2))


def _seconds(engine: Engine, x: Tensor, weights: Mapping[str, float]) -> float:
    """Return how long a step takes, the faster of two; the first may set things up."""
    times = []
    for step in range(2):
        began = time.perf_counter()
        float(engine.gradients(x, step, weights).own.sum())  # waits for a GPU
        times.append(time.perf_counter() - began)
    return min(times)
