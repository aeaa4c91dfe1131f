"""Train one run (Algorithm 1, with any optimizer of `torch.optim`).

Set up, choose, take the steps, finish. In a set-up what was asked for is refused or completed first,
then engine, learner and guard are made.
"""

import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from coterie.arguments import Check, optional, shown, takes_fields_of
from coterie.choosing import AdaptiveAveraging, Mixture
from coterie.choosing.memory import check_rule_memory
from coterie.choosing.mixture import why_not_linear
from coterie.choosing.sampled_gradients import OnParts
from coterie.engines.cpu_threads import cpu_threads, threads_for
from coterie.engines.engine import Engine, LimitsExchanges
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
from coterie.recording.claim import claimed
from coterie.recording.configuration import Configuration, StepSettings, UserSummary, describe
from coterie.recording.costs import Costs
from coterie.recording.progress import interruptible
from coterie.registry import RunSizes
from coterie.rules import Alone
from coterie.training.algorithm import algorithm_of, choose, with_estimates
from coterie.training.guard import Guard
from coterie.training.hooks import ProgressHook, as_hook, trackers_of
from coterie.training.loop import Loop, OngoingRun
from coterie.training.resuming import with_earlier_choice
from coterie.training.run import Run
from coterie.users.examples import Examples, InMemory, plain_targets
from coterie.users.user import User


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
        loop = Loop({0: run}, began=began, close=stack.close, raises=True)
        loop.run(interrupted)
        return loop.ended[0]


def set_up(
    spec: RunSpec, held: ExitStack, stack: ExitStack, *, known: dict[str, OnParts] | None = None
) -> OngoingRun:
    """Set a run up: check, open the engine, claim the folder, choose, measure, make the learner and its guard.

    `held` keeps the folder and the number of threads, `stack` the engine and the progress bar. Runs
    that start at one point share `known`; see `before_training`.
    """
    folder = None if spec.out is None else Path(spec.out)
    check(spec)
    spec = with_usable_peers(spec)
    trackers = [] if folder is None else trackers_of(folder, spec.trackers)
    asked, spec = spec, with_rule(spec).prepared()
    guarded, guard = guard_mode(spec)
    engine = opened(spec, stack)
    if isinstance(spec.rule, Mixture) and engine.capabilities.no_e_steps:
        spec = replace(spec, steps=asked.steps)  # gradient steps are taken instead
    held.enter_context(cpu_threads(threads_for(spec.threads, engine)))
    configuration, claim = replace(configuration_of(spec, engine), guard=guard), None
    if folder is not None:
        data = " ".join(user.fingerprint() for user in (spec.me, *spec.peers))
        frozen = any(not p.requires_grad for p in spec.model.parameters())
        digest = frozen_digest(spec.model) if frozen else ""
        configuration = replace(configuration, data=data, frozen=digest)
        claim = held.enter_context(claimed(folder))
        configuration = with_earlier_choice(configuration, folder, spec.resume)

    algorithm, configuration = choose(spec, engine, configuration)
    if spec.measure is not False:
        everywhere = spec.measure is True
        configuration = with_estimates(
            configuration, spec, engine, algorithm, anywhere=everywhere, known=known
        )

    costs = costs_of(spec, engine, configuration)
    watch = guard_of(spec, costs) if guarded else None
    learner = algorithm.learner(spec, engine, costs)
    steps, capture = captured_steps(spec.capture, learner, watch)
    configuration = replace(configuration, capture=capture)
    shown = sys.stderr.isatty() if spec.progress is None else spec.progress
    hooks = [*trackers, *([ProgressHook(stack)] if shown else []), *spec.hooks]
    watched: dict[str, Any] = {"guard": watch, "captured": steps, "asked": asked}
    return OngoingRun(spec, learner, configuration, hooks, claim=claim, **watched)


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
    followed = algorithm_of(spec.rule)
    if spec.sample is not None:
        spec = followed.sampled(spec)
        followed = algorithm_of(spec.rule)
    if not followed.keeps_memory:
        check_rule_memory(spec, rows=followed.needs_rows or followed.counts == "rounds")
    return followed.completed(spec)


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
    keywords = spec.loss.keywords if isinstance(spec.loss, partial) else {}
    if keywords.get("reduction", getattr(spec.loss, "reduction", "mean")) == "sum":
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


def configuration_of(spec: RunSpec, engine: Engine) -> Configuration:
    """Return what the record and a resumed run should know of what was asked for."""
    me, groups, algorithm = spec.me, spec.made_optimizer.param_groups, algorithm_of(spec.rule)
    rates = list(dict.fromkeys(float(group["lr"]) for group in groups))
    clipped = "" if spec.clip_norm is None else f", clip_norm={spec.clip_norm:g}"
    held_out = {part: len(getattr(me, part) or ()) for part in ("validation", "test")}
    examples = {
        user.name: "a stream" if user.is_stream else len(user) for user in (me, *spec.peers)
    }
    steps = {each.name: getattr(spec, each.name) for each in fields(StepSettings)}
    # of a run that is prepared the optimizer has it
    steps["lr"] = rates[0] if len(rates) == 1 else None
    configuration = Configuration(
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
        me=UserSummary(name=me.name, examples=examples.pop(me.name), **held_out),
        peers=examples,
        **steps,
        counts=algorithm.counts,
        evaluate_every=spec.every,
        norm_bound=spec.norm_bound,
    )
    told = dict(engine.describe())  # it may know better about peers and their data
    known = {name: told.pop(name) for name in {*told} & {*vars(configuration)} - {"engine"}}
    return replace(configuration, engine=told, **known)


def costs_of(spec: RunSpec, engine: Engine, configuration: Configuration) -> Costs:
    """Return where what is asked of the users is counted; a peer may not tell how many examples it has."""
    size, me = spec.batch_size, configuration.me
    examples = {me.name: me.examples, **dict.fromkeys(engine.names, size), **configuration.peers}
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


def captured_steps(
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
