"""Train one run (Algorithm 1, with any optimizer of `torch.optim`).

Set up, choose, take the steps, finish.
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.arguments import takes_fields_of
from coterie.choosing import Mixture
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.cpu_threads import cpu_threads, threads_for
from coterie.learners.spec import RunSpec
from coterie.recording.claim import Claim, claimed
from coterie.recording.configuration import Configuration
from coterie.recording.progress import interruptible
from coterie.training import setup
from coterie.training.algorithm import choose, with_estimates
from coterie.training.hooks import ProgressHook
from coterie.training.loop import Loop
from coterie.training.ongoing import OngoingRun, with_earlier_choice
from coterie.training.run import Run
from coterie.training.setup import check, with_rule, with_usable_peers
from coterie.training.trackers import trackers_of


@takes_fields_of(RunSpec)
def train(spec: RunSpec) -> Run:
    """Train a personal model for user 0 with its peers' gradients.

    At every step all users compute a gradient at the same point, the rule makes a direction of
    them, and the optimizer follows it (Algorithm 1). The model that is passed in is not changed;
    the one returned shares its frozen parameters. Ctrl-C ends the run after the step it is in, with
    everything saved; pressed twice it stops at once. Before the first step of a rule that has knobs
    the theory's constants are measured, in sixteen passes that change nothing; see
    docs/estimates.md.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import coterie
        >>> inputs = torch.eye(4).repeat(5, 1)
        >>> me, *peers = (coterie.User(name, inputs, inputs.sum(1, keepdim=True)) for name in ("me", "a", "b"))
        >>> rule = coterie.WeightedAveraging(alpha=0.5)
        >>> run = train(nn.Linear(4, 1), nn.functional.mse_loss, me, peers, rule, lr=0.1)
        >>> run.record.points[-1].own_loss < 1e-3
        True
    """
    return train_spec(spec)


def train_spec(spec: RunSpec) -> Run:
    """Train a run that is described; see `train`."""
    began = time.monotonic()
    with ExitStack() as held, ExitStack() as stack:
        run = set_up(spec, held, stack)
        interrupted = stack.enter_context(interruptible())
        run.open()
        # whom the engine has asked need not wait for the end
        loop = Loop({0: run.ongoing}, began=began, close=stack.close, raises=True)
        loop.run(interrupted)
        return loop.ended[0]


@dataclass(frozen=True, eq=False)
class SetUpRun:
    """A run that is set up; once it is open its steps can be taken."""

    spec: RunSpec  # prepared
    ongoing: OngoingRun
    configuration: Configuration
    claim: Claim | None

    def open(self) -> None:
        """Begin the record, or resume the run that was left in the folder."""
        self.ongoing.open(self.configuration, self.claim, self.spec.resume)


def set_up(
    spec: RunSpec, held: ExitStack, stack: ExitStack, *, known: dict[str, OnParts] | None = None
) -> SetUpRun:
    """Set a run up: check, open the engine, claim the folder, choose, measure, make the learner and its guard.

    `held` keeps the folder and the number of threads, `stack` the engine and the progress bar. Runs
    that start at one point share `known`; see `before_training`.
    """
    folder = None if spec.out is None else Path(spec.out)
    check(spec)
    spec = with_usable_peers(spec)
    trackers = [] if folder is None else trackers_of(folder, spec.trackers)
    asked, spec = spec, with_rule(spec).prepared()
    guarded, guard = setup.guard_mode(spec)
    engine = setup.opened(spec, stack)
    if isinstance(spec.rule, Mixture) and engine.capabilities.no_e_steps:
        spec = replace(spec, steps=asked.steps)  # gradient steps are taken instead
    held.enter_context(cpu_threads(threads_for(spec.threads, engine)))
    data = "" if folder is None else " ".join(user.fingerprint() for user in (spec.me, *spec.peers))
    frozen = "" if folder is None else setup.frozen_part(spec)
    configuration = setup.configuration_of(spec, engine, guard=guard, data=data, frozen=frozen)
    claim = None if folder is None else held.enter_context(claimed(folder))
    configuration = with_earlier_choice(configuration, folder, spec.resume)

    algorithm, configuration = choose(spec, engine, configuration)
    if spec.measure is not False:
        everywhere = spec.measure is True
        configuration = with_estimates(
            configuration, spec, engine, algorithm, anywhere=everywhere, known=known
        )

    costs = setup.costs_of(spec, engine.names, configuration.peers)
    watch = setup.guard_of(spec, costs) if guarded else None
    learner = algorithm.learner(spec, engine, costs)
    captured, capture = setup.captured(spec.capture, learner, watch)
    hooks = [*trackers, ProgressHook(spec.progress, stack), *spec.hooks]
    watched: dict[str, Any] = {"guard": watch, "captured": captured, "asked": asked}
    ongoing = OngoingRun(spec, learner, hooks, save_every=spec.save_every, **watched)
    return SetUpRun(spec, ongoing, replace(configuration, capture=capture), claim)
