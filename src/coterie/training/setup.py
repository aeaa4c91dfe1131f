"""Set up a run whose specification is checked.

The engine is opened, the learner and its guard are made.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import cast

from coterie.arguments import shown
from coterie.choosing import Mixture
from coterie.engines.capabilities import LimitsExchanges
from coterie.engines.engine import Engine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD
from coterie.errors import KnobError
from coterie.gradients.parameters import copied, frozen_digest
from coterie.learners.captured import Captured, warn_not_captured
from coterie.learners.learner import Learner, RuleLearner
from coterie.learners.spec import RunSpec
from coterie.recording.configuration import Configuration, StepSettings, UserSummary, describe
from coterie.recording.costs import Costs
from coterie.rules import Alone
from coterie.training.algorithm import algorithm_of
from coterie.training.guard import Guard
from coterie.users.examples import Examples
from coterie.users.user import User


def opened(spec: RunSpec, stack: ExitStack) -> Engine:
    """Return the engine once it can give what the rule needs.

    One that is made here is closed with the stack.
    """
    engine = spec.engine
    if engine is InProcess:
        engine = partial(InProcess, forward_options=spec.forward_options)
    elif spec.forward_options != DEFAULT_FORWARD:
        raise KnobError(
            "`forward_options` is for users in this process; leave `engine` out, or give them to"
            " the engine"
        )
    if callable(engine):
        users = spec.me, spec.peers
        engine = engine(spec.model, spec.loss, *users, batch_size=spec.batch_size, seed=spec.seed)
        if not hasattr(engine, "gradients"):
            raise KnobError(
                f"`engine` must make an engine, got {shown(engine)}; see `coterie.Engine`"
            )
        stack.callback(engine.close)
    algorithm_of(spec.rule).check(spec, engine)
    if isinstance(engine, LimitsExchanges) and not isinstance(spec.rule, Alone | Mixture):
        engine.check_exchanges(-(-spec.steps // spec.exchange_every))
    return engine


def configuration_of(
    spec: RunSpec, engine: Engine, *, guard: str = "off", data: str = "", frozen: str = ""
) -> Configuration:
    """Return what the record and a resumed run should know of what was asked for."""
    me, groups, algorithm = spec.me, spec.made_optimizer.param_groups, algorithm_of(spec.rule)
    rates = list(dict.fromkeys(float(group["lr"]) for group in groups))
    clipped = "" if spec.clip_norm is None else f", clip_norm={spec.clip_norm:g}"
    held_out = {part: len(getattr(me, part) or ()) for part in ("validation", "test")}
    steps = {each.name: getattr(spec, each.name) for each in fields(StepSettings)}
    # of a run that is prepared the optimizer has it
    steps["lr"] = rates[0] if len(rates) == 1 else None
    return Configuration(
        rule=describe(spec.rule),
        alone=algorithm.alone,
        optimizer=(
            f"{type(spec.made_optimizer).__name__}(lr={'/'.join(f'{rate:g}' for rate in rates)}{clipped})"
        ),
        parameter_groups=[
            {k: str(v) for k, v in group.items() if k != "params"} for group in groups
        ],
        scheduler=describe(spec.scheduler),
        loss=describe(spec.loss),
        model=describe(spec.model),
        me=UserSummary(name=me.name, examples=_count(me), **held_out),
        peers={peer.name: _count(peer) for peer in spec.peers},
        **steps,
        counts=algorithm.counts,
        evaluate_every=spec.every,
        norm_bound=spec.norm_bound,
        guard=guard,
        data=data,
        frozen=frozen,
    ).with_engine(engine.describe())


def frozen_part(spec: RunSpec) -> str:
    """Return a digest of the frozen parameters; empty where there are none."""
    return (
        "" if all(p.requires_grad for p in spec.model.parameters()) else frozen_digest(spec.model)
    )


def costs_of(spec: RunSpec, names: Sequence[str], peers: Mapping[str, int | str]) -> Costs:
    """Return where what is asked of the users is counted.

    `peers` has how many examples those have that tell.
    """
    size = spec.batch_size
    examples = {spec.me.name: _count(spec.me), **dict.fromkeys(names, size), **peers}
    return Costs(
        {name: size if isinstance(n, str) else min(size, n) for name, n in examples.items()}
    )


def guard_mode(spec: RunSpec) -> tuple[bool, str]:
    """Say whether there is to be a guard, and why or why not."""
    n = 0 if spec.me.validation is None else len(spec.me.validation)
    asked = algorithm_of(spec.rule)
    other = asked.fallback(spec)
    algorithm = asked if other is None else algorithm_of(other.rule)
    if spec.guard == "off" or algorithm.alone:
        return False, "off"
    if not n and spec.guard == "held-out":
        raise KnobError(
            f"a guard compares on a validation set, but {spec.me.name!r} has no validation examples"
        )
    if algorithm.guards_itself:
        further = f" and {n} validation examples" if n else ""
        return False, f"none: candidates are judged by own examples held out in turn{further}"
    if not n:
        return False, "off: no validation examples"
    return True, f"held-out: {n} validation examples"


def guard_of(spec: RunSpec, costs: Costs) -> Guard:
    """Return a guard whose shadow starts where the model does, with an optimizer and batches like its own.

    Beside a method it takes a plain step for each gradient that user 0 computes in a round.
    """
    model, optimizer = copied((spec.model, spec.made_optimizer), spec.model)
    own_steps = spec.local_steps * algorithm_of(spec.rule).gradients_a_round
    alone = replace(spec, model=model, optimizer=optimizer, peers=(), local_steps=own_steps)
    engine = alone.in_process(forward_options=spec.forward_options)
    shadow = RuleLearner(alone, Alone(), engine, costs)
    return Guard(
        shadow,
        spec.loss,
        cast("Examples", spec.me.validation),
        spec.every,
        2 + spec.steps // spec.every,
    )


def captured(
    capture: bool | None, learner: Learner, guard: Guard | None
) -> tuple[Captured | None, str]:
    """Return the steps as one program where that is wanted and possible, and what a record should say of it."""
    if capture is False or (capture is None and not learner.x.is_cuda):
        return None, "off"
    blocks = []
    for each in [learner] if guard is None else [learner, guard.shadow]:
        block = each.block()
        if isinstance(block, str):
            if capture or learner.can_capture:  # else nobody asked for what never is
                warn_not_captured(block)
            return None, f"off: {block}"
        blocks.append(block)
    return Captured(*blocks), "a CUDA graph" if learner.x.is_cuda else "one program"


def _count(user: User) -> int | str:
    return "a stream" if user.is_stream else len(user)
