"""`Mixture`: linear models in closed form, by honest candidates and one mixture of them.

See docs/mixture.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from coterie.choosing.chooser import Algorithm, RuleChoice, check_local_steps
from coterie.choosing.e_steps import ESteps, sums_of
from coterie.choosing.memory import check_memory
from coterie.engines.engine import Answers, Engine
from coterie.engines.peer.linear_rows import linear_of
from coterie.errors import DataError, KnobError, did_you_mean
from coterie.evaluation.evaluate import example_losses
from coterie.evaluation.losses import PerExample, value_and_weight
from coterie.gradients.parameters import copied
from coterie.learners.learner import Learner, NextStep
from coterie.learners.spec import RunSpec
from coterie.mixture.answers import TOLD
from coterie.mixture.candidates import ALONE_KINDS, FOLDS, JUDGING, Candidates
from coterie.mixture.families import FAMILIES, LOGISTIC, POISSON, SOFTMAX, SQUARED, Array, Family
from coterie.mixture.fit import Fitted, driven, fit, fit_here
from coterie.mixture.mixing import MixtureEntry
from coterie.mixture.posterior import Rows, believed
from coterie.mixture.prior import (
    EXCHANGES,
    FEWEST_PEERS,
    JOINT,
    POOLED,
    TIMES,
)
from coterie.mixture.scaling import ManyRows, Scaling
from coterie.mixture.served import give
from coterie.recording.configuration import StepSettings
from coterie.recording.costs import Costs, Traffic
from coterie.recording.result import GuardDecision
from coterie.trees.boosting import Growth
from coterie.trees.histograms import Histograms
from coterie.users.examples import Examples, InMemory
from coterie.users.sampling import random_key
from coterie.users.user import Loss

T = TypeVar("T")

FEWEST = 6
"""With fewer own examples no loss by cross-validation is told."""


GROWTH = Growth()
A_FIT = POOLED + JOINT + EXCHANGES
"""In how many exchanges linear models are found."""


@dataclass(frozen=True)
class Mixture(Algorithm):
    """Fit a linear model in closed form: no step size, no number of steps, no initial weights.

    Candidates are made of the own rows alone, of the peers pooled, and of a prior over users that
    is found from weighted sums of what peers answer, each for ten strengths. They are mixed by
    their losses on own rows that they did not see, with one half of the prior on those that ask no
    peer. The whole is one step of the run, in which peers are asked 39 times. See docs/mixture.md.

    Args:
        single: serve the best candidate in the place of the mixture.
        trees: take boosted trees and a forest as further candidates, or as the only ones. What is
            served is then a module that mixes predictions. "personal" takes trees with a last layer
            of user 0's own too, where the peers are in this process. See docs/trees.md.
        rates: as in `AdaptiveAveraging`, which serves where the model is not linear.
        monotonic_cst: columns in which what is predicted never falls (1) or never rises (-1), by
            their numbers; for a table by their names. For numbers and two classes, whose second
            one's probability is meant. Linear candidates that do otherwise are left out.

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
        (True, 39)
    """

    single: bool = False
    trees: Literal[True, False, "only", "personal"] = False
    rates: tuple[float, ...] | None = None
    monotonic_cst: Mapping[Any, int] | None = None

    def __post_init__(self) -> None:
        if self.trees not in {True, False, "only", "personal"}:
            raise KnobError(f'`trees` is True, False, "only" or "personal", got {self.trees!r}')
        for column, sign in (self.monotonic_cst or {}).items():
            if sign not in {-1, 0, 1}:
                raise KnobError(
                    f"`monotonic_cst` is 1, -1 or 0 for each column, got {sign!r} for {column!r}"
                )

    def signs(self, columns: int, outputs: int, family: Family) -> tuple[int, ...]:
        """Return the sign of each of a model's columns; nothing where there is no constraint."""
        given = {column: sign for column, sign in (self.monotonic_cst or {}).items() if sign}
        if not given:
            return ()
        for column in given:
            if not isinstance(column, int) or not 0 <= column < columns:
                raise KnobError(
                    f"`monotonic_cst` names columns from 0 to {columns - 1}, got {column!r}"
                )
        if outputs > (2 if family.name == "softmax" else 1):
            raise KnobError(
                f"`monotonic_cst` is for one number or two classes; there are {outputs} outputs"
            )
        return tuple(given.get(column, 0) for column in range(columns))

    guards_itself = plans_by_steps = keeps_memory = True
    needs_rows = False

    def completed(self, spec: RunSpec) -> RunSpec:
        """Return the run with one step, in which all is done; refuse local steps."""
        check_local_steps(spec)
        other = self.fallback(spec)
        if other is None:
            layer = linear_of(spec.model)
            numbers = 0 if layer is None else (layer.in_features + 1) * layer.out_features
            check_memory(spec, 8 * 3 * len(spec.peers) * len(TIMES) * (1 + FOLDS) * numbers)
            return replace(spec, steps=1)
        if not isinstance(other.rule, Algorithm):
            return spec
        spec = other.rule.completed(spec)
        return replace(spec, rule=replace(self, rates=getattr(spec.rule, "rates", None)))

    def check(self, spec: RunSpec, engine: Engine) -> None:
        """Refuse what `AdaptiveAveraging` refuses where it serves, since a peer answers no E-step."""
        if engine.capabilities.no_e_steps:
            self._by_steps().check(spec, engine)

    def choose(
        self, spec: RunSpec, engine: Engine, earlier: Mapping[str, Any], progress: bool | None
    ) -> RuleChoice | None:
        """Return adaptive averaging where the model is not linear, or a peer answers no E-step."""
        return self._gradients(spec, why_not_linear(spec) or engine.capabilities.no_e_steps)

    def fallback(self, spec: RunSpec) -> RuleChoice | None:
        """Return adaptive averaging where the model is not linear, else None."""
        return self._gradients(spec, why_not_linear(spec))

    def _gradients(self, spec: RunSpec, why: str | None) -> RuleChoice | None:
        if not why:
            return None
        if self.monotonic_cst:
            raise KnobError(f"`monotonic_cst` is for models in closed form, but {why}")
        gradients = self._by_steps()
        other = gradients.fallback(spec) or RuleChoice(gradients, {})
        return RuleChoice(
            other.rule, {**other.account, "sentence": f"trained by gradient steps: {why}"}
        )

    def _by_steps(self) -> Algorithm:
        """Return what takes gradient steps; it mixes its candidates as this does."""
        from coterie.choosing.adaptive.adaptive_averaging import AdaptiveAveraging

        return AdaptiveAveraging(self.single, self.rates)

    def gradients_asked(self, me: str, peers: Sequence[str], settings: StepSettings) -> int:
        """Return as how many gradients the E-steps of a fit count, and the levels of its trees, at most."""
        levels = GROWTH.trees * GROWTH.depth * 2 * (1 + FOLDS) if self.trees else 0
        return levels + (gradients_of_a_fit(len(peers)) if self.trees != "only" else 0)

    def learner(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
    ) -> "ClosedForm":
        """Return the learner of a run that is prepared."""
        return ClosedForm(spec, engine, costs, self)


def with_columns(rule: T, columns: Sequence[str]) -> T:
    """Return a rule whose constraints name columns by their places among these.

    Example:
        >>> with_columns(Mixture(monotonic_cst={"age": 1}), ["dose", "age"]).monotonic_cst
        {1: 1}
    """
    if not isinstance(rule, Mixture) or not rule.monotonic_cst:
        return rule
    for column in rule.monotonic_cst:
        if column not in columns:
            raise KnobError(
                f"`monotonic_cst` names {column!r}, which is no column of numbers that is predicted"
                f" from; those are {', '.join(columns) or 'none'}{did_you_mean(str(column), columns)}"
            )
    places = {columns.index(column): sign for column, sign in rule.monotonic_cst.items()}
    return replace(rule, monotonic_cst=places)


def gradients_of_a_fit(peers: int) -> int:
    """Return as how many gradients of each peer the E-steps of a fit count, at most.

    Example:
        >>> gradients_of_a_fit(4), gradients_of_a_fit(5)
        (219, 339)
    """
    priors = 1 if peers < FEWEST_PEERS else 2 + FOLDS
    slopes = POOLED + JOINT * len(TIMES) * (1 + FOLDS)
    return slopes * TOLD["gradient"] + EXCHANGES * priors * TOLD["posterior"]


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


def weighted_family_of(loss: Loss) -> Family | None:
    """Return the same, also of one whose rows count by a weight beside their targets."""
    return family_of(loss.plain if isinstance(loss, PerExample) and loss.plain else loss)


def _same(one: Any, other: Any) -> bool:
    return (
        one is None and other is None
        if isinstance(one, Tensor) or isinstance(other, Tensor)
        else one == other
    )


def why_not_linear(spec: RunSpec) -> str | None:
    """Return why a run cannot be fitted in closed form; None where it can."""
    layer, family = linear_of(spec.model), weighted_family_of(spec.loss)
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
    if not all(fits(each, layer.in_features, layer.out_features, family) for each in held):
        return "not all examples are a row of numbers and its target"
    return None


def row_size(examples: Examples) -> int:
    """Return how many numbers the inputs of an example have; 0 where these are no numbers in memory."""
    inputs = examples.inputs if isinstance(examples, InMemory) else None
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not len(inputs):
        return 0
    return inputs[:1].numel()


def fits(examples: Examples, columns: int, outputs: int, family: Family) -> bool:
    """Say whether examples are rows of so many numbers, with targets that the family knows."""
    known = _FITS.setdefault(examples, {})
    if (about := (columns, outputs, family.name)) not in known:
        held = isinstance(examples, InMemory) and row_size(examples) == columns
        targets = examples.targets if isinstance(examples, InMemory) and held else None
        if family.name in FAMILIES:
            targets, _ = value_and_weight(targets)
        known[about] = isinstance(targets, Tensor) and family.fits(targets, outputs)
    return known[about]


_FITS: WeakKeyDictionary[Examples, dict[tuple[int, int, str], bool]] = WeakKeyDictionary()
"""What was found of examples, which many runs look at."""


def numbers_of(examples: Examples, family: Family, outputs: int) -> Rows:
    """Return inputs (n, D) and targets (n, K) of examples, and what each counts."""
    flat, targets, counts = held_numbers(examples, family, outputs)
    return Rows(flat.astype(np.float64), targets, counts)


def held_numbers(examples: Examples, family: Family, outputs: int) -> Rows:
    """Return the same, inputs in the precision that they have, and where they are if possible."""
    if isinstance(examples, InMemory):
        inputs, targets = examples.inputs, examples.targets
    else:
        inputs, targets = examples.take(torch.arange(len(examples)))
    flat = inputs.detach().cpu().flatten(1)
    flat = flat.double() if flat.dtype == torch.bfloat16 else flat
    values, weights = value_and_weight(targets)
    counts = None if weights is None else believed(weights.detach().cpu().double().numpy())
    numbers = family.targets(values.detach().cpu().numpy(), outputs)
    return Rows(flat.numpy(), numbers, counts)


def linear_losses(spec: RunSpec) -> Callable[[frozenset[str]], Array]:
    """Return what gives the out-of-fold losses of the own rows with a coalition of peers, in closed form."""
    layer, family = linear_of(spec.model), weighted_family_of(spec.loss)
    if layer is None or family is None:
        raise AssertionError("a run that is not linear has other losses")
    k, intercept = layer.out_features, layer.bias is not None
    x, y, counts = numbers_of(spec.me.examples, family, k)
    rows = {peer.name: numbers_of(peer.examples, family, k) for peer in spec.peers}

    def losses(who: frozenset[str]) -> Array:
        peers = [rows[name] for name in rows if name in who]
        settings: dict[str, Any] = {"weights": counts, "intercept": intercept}
        return fit_here(x, y, peers, family, k, **settings).served.losses

    return losses


class ClosedForm(Learner):
    """A linear model, fitted in the one step of its run.

    The parameters that it begins with do not matter.
    """

    can_restart = False

    def __init__(
        self,
        spec: RunSpec,
        engine: Engine,
        costs: Costs,
        asked: Mixture,
    ) -> None:
        super().__init__(spec, engine, costs)
        self.single, self.trees = asked.single, asked.trees
        layer, family = linear_of(spec.model), weighted_family_of(spec.loss)
        if layer is None or family is None:
            raise AssertionError("a run that is not linear was to have another rule")
        self.spec, self.layer, self.family = spec, layer, family
        self.signs = asked.signs(layer.in_features, layer.out_features, family)
        self.fitted: Fitted | None = None
        levels = GROWTH.trees * GROWTH.depth if self.trees else 0
        whole = (self.trees != "only") * A_FIT + levels
        self.e_steps = ESteps(engine, costs, self.x, whole)
        self._roots = dict[tuple[str, ...], Array]()  # of each peer, or all: rows in the last root

    @property
    def followed(self) -> Any:
        """The rule that was asked for."""
        return self.spec.rule

    def next_step(self, answers: Answers | None = None) -> NextStep:
        """Ask the peers for all that is needed, and return the step to the model served."""
        fitted = self._fit()
        own_loss = float(fitted.served.losses.mean())
        return NextStep(
            torch.zeros(1), own_loss, self.e_steps.left_out, partial(self._take, fitted)
        )

    def _fit(self) -> Fitted:
        spec, family, intercept = self.spec, self.family, self.layer.bias is not None
        x, y, counts = held_numbers(spec.me.examples, family, self.layer.out_features)
        scaling = Scaling.of(x, y, family, intercept=intercept)
        validation = spec.me.validation
        held_out: Rows | None = (
            None if validation is None else scaling.rows(*self._rows(validation))
        )
        seed = random_key(spec.seed, f"{spec.me.name}/folds") % 2**32
        how: dict[str, Any] = {"seed": seed, "held_out": held_out, "single": self.single}
        how["signs"] = self.signs
        if self.trees:
            others = partial(self._trees, Rows(x.astype(np.float64), y, counts), seed)
            how |= {"others": others, "linear": self.trees != "only"}
        many = len(x) > JUDGING and not self.trees
        rows = ManyRows.of(x, y, scaling, counts) if many else scaling.rows(x, y, counts)
        fitting = fit(rows, family, scaling, len(self.engine.names), **how)
        return driven(fitting, self.e_steps.asking(family, scaling))

    def _trees(self, own: Rows, seed: int, folds: Array) -> Sequence[Candidates]:
        from coterie.trees.tree_candidates import candidates

        here = self.engine.capabilities.local
        peers = [peer.examples for peer in self.spec.peers if here]
        validation = self.spec.me.validation
        held_out = None if validation is None else self._rows(validation).finite().inputs
        given = [self._rows(each).finite() for each in peers]
        elsewhere = None if here or not self.engine.names else self._histograms
        settings: dict[str, Any] = {"held_out": held_out, "seed": seed, "elsewhere": elsewhere}
        settings["growth"] = GROWTH._replace(signs=self.signs)
        settings["layer"] = self.trees == "personal"
        return candidates(own.finite(), given, self.family, folds, **settings)

    def _histograms(self, asked: Histograms) -> Array | None:
        """Ask peers elsewhere about a level of trees; return sums over those whose histograms can be."""
        asked = replace(asked, examples=self.e_steps.largest)
        answers, sums = self.e_steps.exchange(asked, asked.numbers), list[Array]()
        left_out, given = dict(answers.left_out), answers.rows
        if given is None:  # under masks: of weights that are one over the number of peers
            given = (sums_of(answers) * len(self.engine.names))[None]
        every = [(name,) for name in self.engine.names]
        for names, numbers in zip(
            every if answers.rows is not None else [self.engine.names], given[0], strict=True
        ):
            if names[0] in left_out or not answers.answered.any():
                continue
            try:
                root = self._roots.get(names)
                sums.append(asked.checked(numbers.cpu().numpy(), root, len(names)))
            except DataError as error:
                left_out |= dict.fromkeys(names, str(error))
                continue
            if not asked.level.levels:
                self._roots[names] = asked.rows_in(sums[-1])
        self.e_steps.note(left_out)
        return sum(sums[1:], sums[0]) if sums else None

    def _rows(self, examples: Examples) -> Rows:
        return numbers_of(examples, self.family, self.layer.out_features)

    def _take(self, fitted: Fitted) -> None:
        """Give the model the parameters that are served."""
        self.fitted = fitted
        if fitted.served.parameters.size:
            give(self.layer, fitted.served.parameters)
        self.costs.compute([self.costs.me], len(self.spec.me), times=self.e_steps.exchanges)
        self.state = {
            "step": self.step + 1,
            "out_of_fold": torch.from_numpy(fitted.served.losses),
            "weight": 1
            - sum(fitted.entries[kind].weight for kind in ALONE_KINDS if kind in fitted.entries),
        }

    def consider(self, validation_loss: float) -> None:
        """Do nothing: what is served is found by the mixture."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: parameters are in it, trees are grown again, to the same bits."""
        super().load_state_dict(state)
        if self.trees and self.step:
            self.fitted = self._fit()

    def served(self) -> tuple[nn.Module, dict[str, Any], GuardDecision | None]:
        """Return the model of the mixture."""
        return self._model(None if self.fitted is None else self.fitted.served), {}, None

    def trained_alone(self) -> nn.Module | None:
        """Return the mixture of the candidates that ask no peer."""
        return None if self.fitted is None else self._model(self.fitted.alone)

    def out_of_fold(self) -> Array | None:
        """Return the losses of the own rows by mixtures that did not see their fold."""
        losses: Tensor | None = self.state.get("out_of_fold")
        return None if losses is None else losses.numpy()

    def _model(self, entry: MixtureEntry | None) -> nn.Module:
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
        if fitted is None:
            return {}
        on_test = None if self.spec.me.test is None else partial(self._on, self.spec.me.test)
        account = account_of(fitted, self.tau(), len(self.spec.me), on_test)
        return account | {"exchanges": self.e_steps.exchanges}

    def _on(self, examples: Examples, entry: MixtureEntry) -> Array:
        """Return the losses of what an entry would serve."""
        losses = example_losses(self._model(entry), self.spec.loss, examples).numpy()
        counts = self._rows(examples).weights
        return losses if counts is None else losses * counts / counts.mean()


def account_of(
    fitted: Fitted,
    tau: Mapping[str, float],
    n: int,
    on_test: Callable[[MixtureEntry], Array] | None = None,
) -> dict[str, Any]:
    """Return the account of a fit, as plain data: its leaderboard, and what may be told.

    Losses are those of own rows by models, and weights, that did not see their fold. A line's
    difference is that of what is served to it, with its interval of 95 %.

    Args:
        fitted: what was found.
        tau: whom the prior listens to.
        n: how many own rows there are.
        on_test: from a line to its losses on the test set, where there is one.
    """
    entries = fitted.entries
    # where nothing says how predictions are mixed there is no constant
    first = {kind: one for kind, one in entries.items() if kind == "constant"}
    lines = {**first, "alone": fitted.alone}
    lines |= {kind: one for kind, one in entries.items() if kind not in lines}
    ours = None if on_test is None else on_test(fitted.served)
    board = {}
    for name, one in {**lines, "served": fitted.served}.items():
        weight = 1.0 if name == "served" else entries[name].weight if name in entries else 0.0
        line: dict[str, Any] = {"loss": float(one.losses.mean()), "weight": weight}
        if n >= FEWEST and name != "served":
            line |= fitted.served.less(one, fitted.folds)._asdict()
        if on_test is not None and ours is not None:
            line["test"] = float(on_test(one).mean())
        board[name] = line
    account: dict[str, Any] = {
        "leaderboard": board,
        "constant": fitted.is_constant,
        "tau": {name: weight for name, weight in tau.items() if weight},
        "folds": fitted.folds,
    }
    if n >= FEWEST:
        change = fitted.served.losses - fitted.alone.losses
        account |= {
            "out_of_fold": float(fitted.served.losses.mean()),
            "difference": board["alone"]["difference"],
            "low": board["alone"]["low"],
            "high": board["alone"]["high"],
            "error": float(change.std(ddof=1)) / len(change) ** 0.5,
        }
    sentence, judges = _sentence(fitted), len(fitted.served.losses)
    if judges < n and judges == JUDGING:
        sentence += f"; a sample of {judges:,} of the {n:,} own examples judges"
    return account | {"sentence": sentence}


def _sentence(fitted: Fitted) -> str:
    """Say what is served."""
    served, constant = fitted.served.losses.mean(), fitted.entries.get("constant")
    guess = math.inf if constant is None else constant.losses.mean()
    if fitted.is_constant:
        return (
            f"a constant is served; its loss is {guess:.4g} on own examples that were held out"
            " in turn"
        )
    no_worse = "" if served < guess else f"; the constant has a loss of {guess:.4g}"
    weights = ", ".join(
        f"{kind} {one.weight:.0%}" for kind, one in fitted.entries.items() if one.weight >= 0.005
    )
    return (
        f"a mixture is served, of {weights}; loss {served:.4g} on own examples that were held out"
        f" in turn{no_worse}"
    )
