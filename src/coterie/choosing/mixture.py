"""`Mixture`: linear models in closed form, by honest candidates and one mixture of them.

See docs/mixture.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.choosing.adaptive.adaptive_averaging import AdaptiveAveraging
from coterie.choosing.chooser import Algorithm, Choice, check_local_steps
from coterie.engines.capabilities import require
from coterie.engines.engine import Answers, Engine
from coterie.evaluation.losses import PerExample
from coterie.gradients.parameters import copied
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.mixture.families import LOGISTIC, POISSON, SOFTMAX, SQUARED, Array, Family
from coterie.mixture.fit import Fitted, asks_here, driven, fit
from coterie.mixture.mixing import Entry
from coterie.mixture.posterior import Rows
from coterie.mixture.scaling import Scaling
from coterie.mixture.served import give
from coterie.recording.costs import Costs, Traffic
from coterie.recording.result import GuardDecision
from coterie.users.examples import Examples, InMemory
from coterie.users.sampling import random_key
from coterie.users.user import Loss

FEWEST = 6
"""With fewer own examples no loss by cross-validation is told."""

_WITHOUT_NUMBERS = (nn.Sequential, nn.Flatten, nn.Identity)


@dataclass(frozen=True)
class Mixture(Algorithm):
    """Fit a linear model in closed form: no step size, no number of steps, no initial weights.

    Candidates are made of the own rows alone, of the peers pooled, and of a prior over users that
    is found from weighted sums of what peers answer, each for ten strengths. They are mixed by
    their losses on own rows that they did not see, with one half of the prior on those that ask no
    peer. The whole is one step of the run, in which peers are asked 27 times. See docs/mixture.md.

    Args:
        single: serve the best candidate in the place of the mixture.

    For a model that is not one `nn.Linear`, or for another loss than cross entropy, binary cross
    entropy with logits, squared or Poisson loss, `AdaptiveAveraging` serves.

    Example:
        >>> import torch, coterie
        >>> _ = torch.manual_seed(0)
        >>> inputs = torch.randn(170, 3)
        >>> targets = inputs.sum(1, keepdim=True) + torch.randn(170, 1)
        >>> me = coterie.User("me", inputs[:20], targets[:20])
        >>> rows = [slice(20, 70), slice(70, 120), slice(120, 170)]
        >>> peers = [coterie.User(str(k), inputs[part], targets[part]) for k, part in enumerate(rows)]
        >>> loss = torch.nn.functional.mse_loss
        >>> run = coterie.train(torch.nn.Linear(3, 1), loss, me, peers, coterie.Mixture(), measure=False)
        >>> bool((run.model.weight - 1).abs().max() < 0.3), run.record.end.account["exchanges"]
        (True, 27)
    """

    single: bool = False

    guards_itself = plans_by_steps = True

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return the run with one step, in which all is done; refuse local steps."""
        check_local_steps(spec)
        return replace(spec, steps=1) if self.fallback(spec) is None else spec

    def check(self, spec: RunSpec, engine: Engine) -> None:
        """Refuse an engine whose peers are elsewhere."""
        require(engine, "local", "`Mixture`")

    def fallback(self, spec: RunSpec) -> Choice | None:
        """Return adaptive averaging where the model is not linear, else None."""
        why = why_not_linear(spec)
        if why is None:
            return None
        gradients = AdaptiveAveraging()
        other = gradients.fallback(spec) or Choice(gradients, {})
        return Choice(
            other.rule, {**other.account, "sentence": f"trained by gradient steps: {why}"}
        )

    def learner(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        *,
        guarded: bool,
    ) -> "ClosedForm":
        """Return the learner of a run that is prepared."""
        return ClosedForm(spec, engine, costs, single=self.single)


def family_of(loss: Loss) -> Family | None:
    """Return the family of a loss of torch as it comes, without weights or smoothing.

    None for any other.

    Example:
        >>> family_of(nn.CrossEntropyLoss()).name, family_of(nn.CrossEntropyLoss(label_smoothing=0.1))
        ('softmax', None)
    """
    functions = nn.functional
    by_function = {
        functions.cross_entropy: SOFTMAX,
        functions.mse_loss: SQUARED,
        functions.binary_cross_entropy_with_logits: LOGISTIC,
        functions.poisson_nll_loss: POISSON,
    }
    if not isinstance(loss, nn.Module):
        return None if isinstance(loss, PerExample) else by_function.get(loss)
    by_class = {
        nn.CrossEntropyLoss: SOFTMAX,
        nn.MSELoss: SQUARED,
        nn.BCEWithLogitsLoss: LOGISTIC,
        nn.PoissonNLLLoss: POISSON,
    }
    plain = vars(type(loss)()) | {"training": loss.training}
    return (
        by_class.get(type(loss))
        if all(_same(vars(loss).get(name), plain[name]) for name in plain)
        else None
    )


def _same(one: Any, other: Any) -> bool:
    return (
        one is None and other is None
        if isinstance(one, Tensor) or isinstance(other, Tensor)
        else one == other
    )


def linear_of(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that a model is, behind nothing but a change of shape.

    None for any other model.

    Example:
        >>> linear_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
        Linear(in_features=4, out_features=2, bias=True)
        >>> linear_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU())) is None
        True
    """
    leaves = [each for each in model.modules() if not isinstance(each, _WITHOUT_NUMBERS)]
    if len(leaves) != 1 or type(leaves[0]) is not nn.Linear:
        return None
    layer = leaves[0]
    return (
        layer
        if all(p.requires_grad and p.is_floating_point() for p in layer.parameters())
        else None
    )


def why_not_linear(spec: RunSpec) -> str | None:
    """Return why a run cannot be fitted in closed form; None where it can."""
    layer, family = linear_of(spec.model), family_of(spec.loss)
    if layer is None:
        return "the model is not one `nn.Linear`"
    if family is None:
        return (
            "the loss is not cross entropy, binary cross entropy with logits, squared or Poisson"
            " loss as it comes"
        )
    held = [user.examples for user in (spec.me, *spec.peers) if not user.is_stream]
    if len(held) <= len(spec.peers):
        return "a user has a stream, not examples"
    held += [] if spec.me.validation is None else [spec.me.validation]
    if not all(_fits(each, layer, family) for each in held):
        return "not all examples are a row of numbers and its target"
    return None


def _fits(examples: Examples, layer: nn.Linear, family: Family) -> bool:
    """Say whether examples are in memory as numbers, with targets that the family knows."""
    if not isinstance(examples, InMemory):
        return False
    inputs, targets = examples.inputs, examples.targets
    if (
        not isinstance(inputs, Tensor)
        or not isinstance(targets, Tensor)
        or not inputs.is_floating_point()
    ):
        return False
    n, k = len(inputs), layer.out_features
    if family is SOFTMAX and targets.ndim == 1 and not targets.is_floating_point():
        return inputs[:1].numel() == layer.in_features and bool(
            ((targets >= 0) & (targets < k)).all()
        )
    return inputs[:1].numel() == layer.in_features and targets.numel() == n * k


class ClosedForm(Learner):
    """A linear model, fitted in the one step of its run.

    The parameters that it begins with do not matter.
    """

    can_restart = False

    def __init__(
        self, spec: RunSpec, engine: Engine, costs: Costs, *, single: bool = False
    ) -> None:
        super().__init__(spec, engine, costs)
        self.single = single
        layer, family = linear_of(spec.model), family_of(spec.loss)
        if layer is None or family is None:
            raise AssertionError("a run that is not linear was to have another rule")
        self.spec, self.layer, self.family = spec, layer, family
        self.fitted: Fitted | None = None

    @property
    def followed(self) -> Any:
        """The rule that was asked for."""
        return self.spec.rule

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Ask the peers for all that is needed, and return the step to the model served."""
        fitted = self._fit()
        own_loss = float(fitted.served.losses.mean())
        return NextStep(torch.zeros(1), own_loss, {}, partial(self._take, fitted))

    def _fit(self) -> Fitted:
        spec, family, intercept = self.spec, self.family, self.layer.bias is not None
        x, y = self._numbers(spec.me.examples)
        scaling = Scaling.of(x, y, family, intercept=intercept)
        peers = [
            scaling.clipped(scaling.rows(*self._numbers(peer.examples))) for peer in spec.peers
        ]
        validation = spec.me.validation
        held_out: Rows | None = (
            None if validation is None else scaling.rows(*self._numbers(validation))
        )
        sizes = np.array([len(peer) for peer in spec.peers], dtype=np.float64)
        seed = random_key(spec.seed, f"{spec.me.name}/folds") % 2**32
        rows = scaling.rows(x, y)
        fitting = fit(
            rows, family, scaling, sizes, seed=seed, held_out=held_out, single=self.single
        )
        return driven(fitting, asks_here(peers, family))

    def _numbers(self, examples: Examples) -> tuple[Array, Array]:
        """Return inputs (n, D) and targets (n, K) of examples."""
        inputs, targets = examples.take(torch.arange(len(examples)))
        flat = inputs.detach().cpu().double().flatten(1).numpy()
        return flat, self.family.targets(targets.detach().cpu().numpy(), self.layer.out_features)

    def _take(self, fitted: Fitted) -> None:
        """Give the model the parameters that are served."""
        self.fitted = fitted
        if fitted.served.parameters.size:
            give(self.layer, fitted.served.parameters)
        names, size = list(self.engine.names), self.x.numel()
        self.costs.compute([self.costs.me, *names], times=fitted.exchanges)
        self.costs.exchange(names, down=2 * size, up=4 * size, times=fitted.exchanges)
        self.state = {
            "step": self.step + 1,
            "weight": 1 - sum(fitted.entries[kind].weight for kind in ALONE_KINDS),
        }

    def consider(self, validation_loss: float) -> None:
        """Do nothing: what is served is found by the mixture."""

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model of the mixture."""
        return self._model(None if self.fitted is None else self.fitted.served), {}, None

    def trained_alone(self) -> nn.Module | None:
        """Return the mixture of the candidates that ask no peer."""
        return None if self.fitted is None else self._model(self.fitted.alone)

    def _model(self, entry: Entry | None) -> nn.Module:
        """Return what an entry serves; a copy of the caller's model where that is linear."""
        if entry is not None and entry.others:
            return entry.model(self.family, intercept=self.layer.bias is not None).to(
                self.layer.weight
            )
        model = copied(self.model)
        if entry is not None and (layer := linear_of(model)) is not None:
            give(layer, entry.parameters)
        return model

    def tau(self) -> Mapping[str, float]:
        """Return whom the prior listens to."""
        weights = () if self.fitted is None else self.fitted.tau.tolist()
        return dict(zip(self.engine.names, weights, strict=False))

    def account(self, travelled: Mapping[str, Traffic]) -> dict[str, Any]:
        """Return the leaderboard, and what may be said of the difference to Alone."""
        fitted = self.fitted
        return {} if fitted is None else account_of(fitted, self.tau(), len(self.spec.me))


ALONE_KINDS = ("constant", "alone")


def account_of(fitted: Fitted, tau: Mapping[str, float], n: int) -> dict[str, Any]:
    """Return the account of a fit, as plain data.

    Losses are those of own rows by models that did not see them.
    """
    lines = {"served": fitted.served, "alone, mixed": fitted.alone, **fitted.entries}
    change = fitted.served.losses - fitted.alone.losses
    account: dict[str, Any] = {
        "leaderboard": {
            name: {"loss": float(one.losses.mean()), "weight": one.weight}
            for name, one in lines.items()
        },
        "constant": fitted.is_constant,
        "tau": {name: weight for name, weight in tau.items() if weight},
        "folds": fitted.folds,
        "exchanges": fitted.exchanges,
    }
    if n >= FEWEST:
        account |= {
            "out_of_fold": float(fitted.served.losses.mean()),
            "difference": float(change.mean()),
            "error": float(change.std(ddof=1)) / n**0.5,
        }
    return account | {"sentence": _sentence(fitted)}


def _sentence(fitted: Fitted) -> str:
    """Say what is served."""
    guess, served = fitted.entries["constant"].losses.mean(), fitted.served.losses.mean()
    if fitted.is_constant:
        return (
            "a constant is served: nothing was better than it on the own examples (loss"
            f" {guess:.4g})"
        )
    told = "" if served < guess else f"; a constant is no worse (loss {guess:.4g})"
    weights = ", ".join(
        f"{kind} {one.weight:.0%}" for kind, one in fitted.entries.items() if one.weight >= 0.005
    )
    return (
        f"a mixture is served, of {weights}; loss {served:.4g} on own examples that were held out"
        f" in turn{told}"
    )
