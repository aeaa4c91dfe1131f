"""Set up a run: what was asked for is refused or completed first, then engine, learner and guard are made."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coterie.arguments import Check, optional, shown
from coterie.choosing import AdaptiveAveraging, Mixture
from coterie.choosing.mixture import why_not_linear
from coterie.engines.capabilities import LimitsExchanges
from coterie.engines.engine import Engine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD
from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, KnobError, ModelError, attributing_errors_to
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import ignored_class, is_over_classes
from coterie.evaluation.metrics import binary_accuracy, metrics_for
from coterie.gradients.parameters import copied, frozen_digest
from coterie.learners.captured import Captured, warn_not_captured
from coterie.learners.learner import Learner, RuleLearner
from coterie.learners.spec import RunSpec
from coterie.methods import build
from coterie.recording.configuration import Configuration, StepSettings, UserSummary, describe
from coterie.recording.costs import Costs
from coterie.registry import RunSizes
from coterie.rules import Alone
from coterie.training.algorithm import algorithm_of
from coterie.training.guard import Guard
from coterie.training.hooks import as_hook
from coterie.users.examples import Examples, InMemory, plain_targets
from coterie.users.user import Loss, User


def _rule(value: Any) -> Any:
    """Return what can be followed."""
    algorithm_of(value)
    return value


RULE = optional(
    Check(
        "be a rule such as `coterie.WeightedAveraging(0.5)`, or a method",
        _rule,
        remedies={type: "give it its knobs: `Rule(…)`"},
    )
)


def with_rule(spec: RunSpec) -> RunSpec:
    """Return the run with the rule that it follows, and the settings that the rule needs."""
    spec = with_named_rule(spec)
    return algorithm_of(spec.rule).completed(spec)


def with_named_rule(spec: RunSpec) -> RunSpec:
    """Return the run with the rule or method that its name stands for; "auto" is as None, the default."""
    if isinstance(spec.rule, str) and spec.rule != "auto":
        sizes = {peer.name: None if peer.is_stream else len(peer) for peer in spec.peers}
        facts = RunSizes(0 if spec.me.is_stream else len(spec.me), sizes, spec.steps)
        return replace(spec, rule=build(spec.rule, {}, facts))
    if spec.rule in (None, "auto"):
        return replace(spec, rule=default_rule(spec))
    RULE("rule", spec.rule)
    return spec


_OF_STEPS = (
    "lr",
    "steps",
    "optimizer",
    "scheduler",
    "clip_norm",
    "norm_bound",
    "exchange_every",
    "local_steps",
)
_UNSET = {each.name: each.default for each in fields(RunSpec) if each.name in _OF_STEPS}


def default_rule(spec: RunSpec) -> AdaptiveAveraging | Mixture:
    """Return what a run follows where no rule is given.

    The closed form where it applies and no step is described.

    Who sets a step size, an optimizer or a number of steps means gradient steps. So does an engine
    whose peers answer no E-steps, private ones for example; that is found out once it is open.
    """
    plain = all(getattr(spec, name) == default for name, default in _UNSET.items())
    asks = spec.engine is not InProcess or bool(spec.peers)
    return Mixture() if plain and asks and why_not_linear(spec) is None else AdaptiveAveraging()


def check(spec: RunSpec) -> None:
    """Refuse hooks that are none, a loss that is a sum, and examples that nothing can be learned from."""
    for hook in spec.hooks:
        as_hook(hook)
    if _reduction(spec.loss) == "sum":
        raise ModelError(
            'the loss adds up over the batch (`reduction="sum"`), so its size would depend on the'
            ' batch size; use `reduction="mean"`'
        )
    _check_classes(spec.me, spec)
    for part, held_out in (("validation", spec.me.validation), ("test", spec.me.test)):
        _check_numbers(spec, part, held_out)


def with_usable_peers(spec: RunSpec) -> RunSpec:
    """Return the run without the peers that cannot be used, each told in a warning.

    An error where none is left.
    """
    kept, named = [], getattr(spec.rule, "tau", None) or {}
    for peer in spec.peers:
        try:
            _check_classes(peer, spec)
            check_alike(spec.me, peer.examples, f"peer {peer.name!r}")
            kept.append(peer)
        except DataError as error:
            if peer.name in named or len(spec.peers) == 1:
                raise
            warnings.warn(f"the peer {peer.name!r} is left out: {error}", stacklevel=4)
    if spec.peers and not kept:
        raise DataError(
            "no peer can be used: all are left out; give peers whose examples are like user 0's"
        )
    return replace(spec, peers=tuple(kept)) if len(kept) < len(spec.peers) else spec


def _reduction(loss: Loss) -> object:
    """Return how a loss of torch is reduced, also one that `functools.partial` sets."""
    keywords = loss.keywords if isinstance(loss, partial) else {}
    return keywords.get("reduction", getattr(loss, "reduction", "mean"))


def _check_numbers(spec: RunSpec, part: str, examples: Examples | None) -> None:
    """Refuse inputs that are not finite, unless the model makes a finite output of them."""
    if not isinstance(examples, InMemory) or not isinstance(examples.inputs, Tensor):
        return
    if not examples.inputs.is_floating_point():
        return
    bad = (~examples.inputs.isfinite()).flatten(1).any(1).nonzero().flatten()[:1]
    if not len(bad):
        return
    device = next(spec.model.parameters()).device
    with torch.no_grad(), evaluation_mode(spec.model), attributing_errors_to("the model"):
        output = spec.model(examples.inputs[bad].to(device))
    if isinstance(output, Tensor) and not bool(output.isfinite().all()):
        raise DataError(
            f"the inputs of {spec.me.name!r} are NaN or infinite in {part} example {int(bad)}, and"
            " so is the model's output; fill them in, or drop the example"
        )


def _check_classes(user: User, spec: RunSpec) -> None:
    """Refuse a user whose examples are all of one class, or have no target that the loss does not ignore."""
    for examples in (user.examples, user.validation, user.test):
        targets = plain_targets(examples)
        if (
            targets is not None
            and is_over_classes(spec.loss)
            and bool((targets == ignored_class(spec.loss)).all())
        ):
            raise DataError(
                f"user {user.name!r} has a set whose targets are all {ignored_class(spec.loss)},"
                " which the loss ignores: nothing to learn from; leave it out, or give it targets"
            )
    if isinstance(spec.rule, Mixture) or spec.rule == "mixture":
        return  # rows of one class tell how frequent it is, and the peers tell the rest
    targets = plain_targets(user.examples)
    if targets is not None and is_over_classes(spec.loss):
        targets = targets[targets != ignored_class(spec.loss)] if targets.ndim == 1 else targets
    if targets is None or targets.numel() > len(targets) or len(torch.unique(targets)) > 1:
        return
    if (
        targets.is_floating_point()
        and metrics_for(spec.loss).get("accuracy") is not binary_accuracy
    ):
        return  # numbers, not classes
    raise DataError(
        f"user {user.name!r} has examples of one class only ({targets.flatten()[0].item()}), which"
        " says nothing about telling classes apart; give it examples of another, or leave it out"
    )


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
