"""What may be asked of a run: refused or completed before anything is opened."""

import warnings
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.arguments import Check, optional
from coterie.choosing import AdaptiveAveraging, Mixture
from coterie.choosing.mixture import why_not_linear
from coterie.engines.in_process.engine import InProcess
from coterie.engines.in_process.sampler import check_alike
from coterie.errors import DataError, ModelError, blaming
from coterie.evaluation.evaluate import evaluation_mode
from coterie.evaluation.losses import ignored_class, is_over_classes
from coterie.evaluation.metrics import binary_accuracy, metrics_for
from coterie.learners.spec import RunSpec
from coterie.methods import build
from coterie.registry import RunFacts
from coterie.training.algorithm import algorithm_of
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
    """Return the run with the rule that None stands for, and the settings that the rule needs."""
    spec = with_named_rule(spec)
    RULE("rule", spec.rule)
    spec = replace(spec, rule=default_rule(spec)) if spec.rule is None else spec
    return algorithm_of(spec.rule).completed(spec)


def with_named_rule(spec: RunSpec) -> RunSpec:
    """Return the run with the rule or method that its name stands for; "auto" is None."""
    if not isinstance(spec.rule, str):
        return spec
    sizes = {peer.name: None if peer.is_stream else len(peer) for peer in spec.peers}
    facts = RunFacts(0 if spec.me.is_stream else len(spec.me), sizes, spec.steps)
    return replace(spec, rule=None if spec.rule == "auto" else build(spec.rule, {}, facts))


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
    with torch.no_grad(), evaluation_mode(spec.model), blaming("the model"):
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
