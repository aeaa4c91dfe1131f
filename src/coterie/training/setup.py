"""Set up a run: its specification is checked, the engine opened, the learner and its guard made."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from coterie.arguments import Check, optional, shown
from coterie.choosing import AdaptiveAveraging, Chooser, MakesLearner
from coterie.engines.capabilities import require
from coterie.engines.engine import Engine
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.forward_options import DEFAULT_FORWARD, ForwardOptions
from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, KnobError, ModelError, blaming
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import ignored_class, is_over_classes
from coterie.evaluation.metrics import binary_accuracy, metrics_for
from coterie.gradients.trained_part import copied, frozen_digest
from coterie.learners.learner import Learner
from coterie.learners.spec import RunSpec
from coterie.methods.averaging.fine_tuning import FineTuning
from coterie.methods.averaging.sampled import Sampled
from coterie.methods.clients import Clients
from coterie.methods.elsewhere import ClientsElsewhere
from coterie.methods.rounds import Method, Rounds
from coterie.recording.configuration import Configuration, UserSummary
from coterie.recording.costs import Costs
from coterie.recording.describe import describe
from coterie.rules import Alone, Rule
from coterie.training.captured import Captured, block_of, warn_not_captured
from coterie.training.choose import Followed
from coterie.training.guard import Guard
from coterie.training.hooks import as_hook
from coterie.training.run import RunOptions
from coterie.users.examples import Examples, InMemory, plain_targets
from coterie.users.user import Loss, User


def _rule(value: Any) -> Any:
    """Return what can be followed; a class has all methods of its instances, and is none."""
    if isinstance(value, type) or not isinstance(value, Rule | Chooser | Method | MakesLearner):
        raise TypeError
    return value


RULE = optional(
    Check(
        "be a rule such as `coterie.WeightedAveraging(0.5)`, or a method",
        _rule,
        remedies={type: "give it its knobs: `Rule(…)`", str: "names are for the command line"},
    )
)


def with_rule(spec: RunSpec, guard: str) -> RunSpec:
    """Return the run with the rule that None stands for; a method's run with plain SGD for its step size."""
    RULE("rule", spec.rule)
    _check_exchanges(spec)
    if not isinstance(spec.rule, Method):
        return replace(spec, rule=AdaptiveAveraging()) if spec.rule is None else spec
    if spec.clip_norm is not None:
        raise KnobError("a method takes plain gradient steps of its own: leave `clip_norm` out")
    if spec.optimizer not in (None, torch.optim.SGD):
        raise KnobError("a method takes plain gradient steps of its own: leave `optimizer` out, and give `lr`")
    method = spec.rule.method if isinstance(spec.rule, Sampled) else spec.rule
    if isinstance(method, FineTuning) and method.rounds >= spec.steps:
        never = f"`FineTuning(rounds={method.rounds})` would never tune in {spec.steps} rounds"
        raise KnobError(f"{never}; lower `rounds`, or raise `steps`")
    if guard == "held-out":
        raise KnobError('a guard watches over a rule, not over a method: leave `guard` out, or set it to "off"')
    return replace(spec, optimizer=torch.optim.SGD, lr=0.1 if spec.lr is None else spec.lr)


def _check_exchanges(spec: RunSpec) -> None:
    """Refuse fewer exchanges where what is followed has a say in when users exchange what."""
    if max(spec.exchange_every, spec.local_steps) == 1:
        return
    if isinstance(spec.rule, Method):
        raise KnobError(
            "a method has rounds of its own: leave `exchange_every` and `local_steps` out, and give its own knobs"
        )
    if spec.local_steps > 1 and (spec.rule is None or isinstance(spec.rule, MakesLearner)):
        raise KnobError(
            "adaptive averaging judges its peers by gradients, not by local steps: leave `local_steps` out for "
            "`exchange_every`, or give a rule with its weights set, such as `WeightedAveraging`"
        )


def check(spec: RunSpec) -> None:
    """Refuse hooks that are none, a loss that is a sum, and examples that nothing can be learned from."""
    for hook in spec.hooks:
        as_hook(hook)
    if _reduction(spec.loss) == "sum":
        raise ModelError(
            'the loss adds up over the batch (`reduction="sum"`), so its size would depend on the batch size; use '
            '`reduction="mean"`'
        )
    _check_classes(spec.me, spec)
    for part, held_out in (("validation", spec.me.validation), ("test", spec.me.test)):
        _check_numbers(spec, part, held_out)


def with_usable_peers(spec: RunSpec) -> RunSpec:
    """Return the run without the peers that cannot be used, each told in a warning; an error where none is left."""
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
        raise DataError("no peer can be used: all are left out; give peers whose examples are like user 0's")
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
    with torch.no_grad(), evaluation_mode(spec.model), blaming("the model"):
        output = spec.model(examples.inputs[bad].to(device))
    if isinstance(output, Tensor) and not bool(output.isfinite().all()):
        raise DataError(
            f"the inputs of {spec.me.name!r} are NaN or infinite in {part} example {int(bad)}, and so is the "
            "model's output; fill them in, or drop the example"
        )


def _check_classes(user: User, spec: RunSpec) -> None:
    """Refuse a user whose examples are all of one class, or have no target that the loss does not ignore."""
    for examples in (user.examples, user.validation, user.test):
        targets = plain_targets(examples)
        if targets is not None and is_over_classes(spec.loss) and bool((targets == ignored_class(spec.loss)).all()):
            raise DataError(
                f"user {user.name!r} has a set whose targets are all {ignored_class(spec.loss)}, which the loss "
                "ignores: nothing to learn from; leave it out, or give it targets"
            )
    targets = plain_targets(user.examples)
    if targets is not None and is_over_classes(spec.loss):
        targets = targets[targets != ignored_class(spec.loss)] if targets.ndim == 1 else targets
    if targets is None or targets.numel() > len(targets) or len(torch.unique(targets)) > 1:
        return
    if targets.is_floating_point() and metrics_for(spec.loss).get("accuracy") is not binary_accuracy:
        return  # numbers, not classes
    raise DataError(
        f"user {user.name!r} has examples of one class only ({targets.flatten()[0].item()}), which says "
        "nothing about telling classes apart; give it examples of another, or leave it out"
    )


def opened(spec: RunSpec, options: RunOptions, stack: ExitStack) -> Engine:
    """Return the engine once it can give what the rule needs; one that is made here is closed with the stack."""
    engine = options.engine
    if engine is InProcess:
        engine = partial(InProcess, forward_options=options.forward_options)
    elif options.forward_options != DEFAULT_FORWARD:
        raise KnobError(
            "`forward_options` is for users in this process; leave `engine` out, or give them to the engine"
        )
    if callable(engine):
        users = spec.me, spec.peers
        engine = engine(spec.model, spec.loss, *users, batch_size=spec.batch_size, seed=spec.seed)
        if not hasattr(engine, "gradients"):
            raise KnobError(f"`engine` must make an engine, got {shown(engine)}; see `coterie.Engine`")
        stack.callback(engine.close)
    check_rule(spec.rule, engine)
    if spec.local_steps > 1 and not isinstance(spec.rule, Alone):
        require(engine, "local_work", "`local_steps`")
    return engine


def check_rule(rule: Rule | Chooser | Method | MakesLearner, engine: Engine) -> None:
    """Refuse a rule that needs what this engine cannot give; a chooser says so when it chooses."""
    whose = f"`{type(rule).__name__}`"
    if isinstance(rule, Method):
        if not engine.capabilities.local_work:  # else what it asks for is seen in its first round
            require(engine, "own_points", whose)
    elif isinstance(rule, MakesLearner):
        rule.check(engine)
    elif not isinstance(rule, Chooser):
        rule.weights(engine.names)  # an unknown name in `tau`
        if rule.needs_rows:
            require(engine, "rows", whose)


def configuration_of(
    spec: RunSpec, engine: Engine, *, guard: str = "off", data: str = "", frozen: str = ""
) -> Configuration:
    """Return what the record and a resumed run should know of what was asked for."""
    me, groups = spec.me, spec.made_optimizer.param_groups
    rates = "/".join(dict.fromkeys(f"{group['lr']:g}" for group in groups))
    clipped = "" if spec.clip_norm is None else f", clip_norm={spec.clip_norm:g}"
    held_out = {part: len(getattr(me, part) or ()) for part in ("validation", "test")}
    return Configuration(
        rule=describe(spec.rule),
        alone=isinstance(spec.rule, Alone),
        optimizer=f"{type(spec.made_optimizer).__name__}(lr={rates}{clipped})",
        parameter_groups=[{k: str(v) for k, v in group.items() if k != "params"} for group in groups],
        scheduler=describe(spec.scheduler),
        loss=describe(spec.loss),
        model=describe(spec.model),
        me=UserSummary(name=me.name, examples=_count(me), **held_out),
        peers={peer.name: _count(peer) for peer in spec.peers},
        batch_size=spec.batch_size,
        seed=spec.seed,
        steps=spec.steps,
        evaluate_every=spec.every,
        norm_bound=spec.norm_bound,
        exchange_every=spec.exchange_every,
        local_steps=spec.local_steps,
        guard=guard,
        data=data,
        frozen=frozen,
    ).with_engine(engine.describe())


def frozen_part(spec: RunSpec) -> str:
    """Return a digest of the frozen parameters; empty where there are none."""
    return "" if all(p.requires_grad for p in spec.model.parameters()) else frozen_digest(spec.model)


def costs_of(spec: RunSpec, names: Sequence[str], peers: Mapping[str, int | str]) -> Costs:
    """Return where what is asked of the users is counted; `peers` has how many examples those have that tell."""
    size = spec.batch_size
    examples = {spec.me.name: _count(spec.me), **dict.fromkeys(names, size), **peers}
    return Costs({name: size if isinstance(n, str) else min(size, n) for name, n in examples.items()})


def learner_of(
    spec: RunSpec, rule: Followed, engine: Engine, costs: Costs, *, guarded: bool, forward_options: ForwardOptions
) -> Learner:
    """Return the learner of a run: of a rule, of a method, which takes rounds, or one of its own kind."""
    if isinstance(rule, Method):
        return Rounds(spec, rule, _clients(spec, engine, costs))
    if isinstance(rule, MakesLearner):
        return rule.learner(spec, engine, costs, guarded=guarded, forward_options=forward_options)
    return Learner(spec, rule, engine, costs)


def _clients(spec: RunSpec, engine: Engine, costs: Costs) -> Clients:
    """Return the users of a method, wherever they are."""
    if engine.capabilities.own_points:
        return Clients(engine, spec.me, spec.peers, costs)
    return ClientsElsewhere(engine, spec.me, costs, own=replace(spec, peers=()).in_process())


def guard_mode(guard: str, spec: RunSpec) -> tuple[bool, str]:
    """Say whether there is to be a guard, and why or why not."""
    n = 0 if spec.me.validation is None else len(spec.me.validation)
    if guard == "off" or isinstance(spec.rule, Alone | Method):
        return False, "off"
    if not n and guard == "held-out":
        raise KnobError(f"a guard compares on a validation set, but {spec.me.name!r} has no validation examples")
    if not n:
        return False, "off: no validation examples" + _crossed(spec)
    return True, f"held-out: {n} validation examples"


def _crossed(spec: RunSpec) -> str:
    """Say what takes a guard's place without validation examples, where anything does."""
    return ", own examples held out in turn instead" if isinstance(spec.rule, MakesLearner) else ""


def guard_of(spec: RunSpec, costs: Costs, forward_options: ForwardOptions) -> Guard:
    """Return a guard whose shadow starts where the model does, with an optimizer and batches like its own."""
    model, optimizer = copied((spec.model, spec.made_optimizer), spec.model)
    alone = replace(spec, model=model, optimizer=optimizer, peers=())
    engine = alone.in_process(forward_options=forward_options)
    shadow = Learner(alone, Alone(), engine, costs)
    return Guard(shadow, spec.loss, cast("Examples", spec.me.validation), spec.every, 2 + spec.steps // spec.every)


def captured(capture: bool | None, learner: Learner, guard: Guard | None) -> tuple[Captured | None, str]:
    """Return the steps as one program where that is wanted and possible, and what a record should say of it."""
    if capture is False or (capture is None and not learner.x.is_cuda):
        return None, "off"
    blocks = []
    for each in [learner] if guard is None else [learner, guard.shadow]:
        block = block_of(each)
        if isinstance(block, str):
            if capture or not isinstance(learner, Rounds):  # nobody asked to capture what never is: methods
                warn_not_captured(block)
            return None, f"off: {block}"
        blocks.append(block)
    return Captured(*blocks), "a CUDA graph" if learner.x.is_cuda else "one program"


def _count(user: User) -> int | str:
    return "a stream" if user.is_stream else len(user)
