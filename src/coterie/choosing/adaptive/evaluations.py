"""The candidates of a run by gradient steps: points of its paths, judged on rows that they did not see.

They are mixed as those of the closed form are; see `coterie.mixture.mixing`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from coterie.choosing.adaptive.closed_form import ClosedForms, last_layer
from coterie.choosing.e_steps import ESteps
from coterie.choosing.memory import give_back
from coterie.choosing.mixture import family_of
from coterie.engines.asking import GradientsAtPoints
from coterie.engines.peer.linear_rows import linear_of
from coterie.evaluation.evaluate import example_losses
from coterie.gradients.parameters import Parameters, copied
from coterie.learners.spec import RunSpec
from coterie.mixture.candidates import Candidates, guesses, sample_of
from coterie.mixture.families import LOSS, Array, Family
from coterie.mixture.fit import Fitted
from coterie.mixture.mixing import LEAST, MixtureEntry, halves, mix, weights_of
from coterie.mixture.served import Constant, Predictor, give
from coterie.users.examples import Examples, InMemory, some_of
from coterie.users.sampling import random_key
from coterie.users.trees import leaves
from coterie.users.user import User

TEMPERATURES = (1.0, 1.5, 2.0, 3.0)
"""By what outputs of classes are divided, each a candidate: fitted to few rows, networks are too sure."""

TEMPERATURE = 1.0
"""Of the mixture's weights."""


@dataclass
class Trajectory:
    """The points of one kind of copies at the evaluations, and what they give for rows that they did not see."""

    points: list[Tensor | None] = field(default_factory=list)  # None: too unlikely to be served
    outputs: list[Array] = field(default_factory=list)  # of the own rows, (n, K)
    held_out: list[Array] = field(default_factory=list)  # of the validation rows, (m, K)
    evidence: list[Array] = field(default_factory=list)  # sums of their losses, by temperature


class HeldOutEvaluations:
    """All candidates so far; after each evaluation the model is the best of them.

    Of many own rows a sample judges, as in the closed form.

    Args:
        spec: of the run, prepared.
        points: what passes examples through the model at points.
        folds: of each own row, (n,).
        single: serve the best candidate in the place of the mixture.
        most: how many points are kept at most; all that may be served when None.
    """

    def __init__(
        self,
        spec: RunSpec,
        points: GradientsAtPoints,
        folds: Tensor,
        *,
        single: bool = False,
        most: int | None = None,
    ) -> None:
        self.most = most
        self.spec, self.points, self.folds_of_all = spec, points, folds.numpy()
        judges = sample_of(len(folds))
        self.folds, self.rows = self.folds_of_all[judges], some_of(spec.me.examples, judges)
        self.paths: dict[str, Trajectory] = {}
        self.closed = list[Candidates]()  # what has a closed form
        self.trunk: Tensor | None = None  # the point behind whose layers some of these are
        self._behind: nn.Module | None = None  # the model there
        rows, validation = self.rows, spec.me.validation
        outputs = None  # of a loss that has no family they may be anything
        if family_of(spec.loss) is not None:
            outputs = points.outputs(points.start()[None], rows)
        self.family = _family(spec, outputs)
        k = 1 if outputs is None or self.family is LOSS else outputs.shape[2]
        self.targets = self._targets(rows, k)
        self.held_out = np.zeros((0, k)) if validation is None else self._targets(validation, k)
        self.single = single or self.family is LOSS  # else nothing says how to mix predictions
        self.temperatures = TEMPERATURES if self.family.name in ("softmax", "logistic") else (1.0,)
        self._fitted: Fitted | None = None  # of the candidates there are

    def add(self, copies: Mapping[str, Tensor]) -> None:
        """Judge the points of each kind's copies, (settings, copies, numbers of a point).

        Of a setting the copy that sees all rows comes first, then those blind to each fold, where
        there are any. A point whose outputs are not finite is no candidate.
        """
        n = np.arange(len(self.folds))
        for kind, points in copies.items():
            if not len(points):
                continue
            given = self.judged(points.flatten(0, 1), self.rows)
            given = given.reshape(*points.shape[:2], *given.shape[1:])
            blind = given[:, 1 + self.folds, n] if points.shape[1] > 1 else given[:, 0]
            held_out = np.zeros((len(points), *self.held_out.shape))
            if self.spec.me.validation is not None:
                held_out = self.judged(points[:, 0], self.spec.me.validation)
            for point, own, further in zip(points[:, 0], blind, held_out, strict=True):
                self._add(kind, point, own, further)
        self._forget()

    def add_point(self, kind: str, point: Tensor, own: Array) -> None:
        """Take up a point, by the outputs that copies blind to each own row gave for it, (n, K)."""
        held_out = np.zeros(self.held_out.shape)
        if self.spec.me.validation is not None:
            held_out = self.judged(point[None], self.spec.me.validation)[0]
        self._add(kind, point, own, held_out)
        self._forget()

    def _add(self, kind: str, point: Tensor, own: Array, further: Array) -> None:
        path = self.paths.setdefault(kind, Trajectory())
        if np.isfinite(own).all() and np.isfinite(further).all():
            path.points.append(point.clone())
            path.outputs.append(own)
            path.held_out.append(further)
            path.evidence.append(
                np.array([self._evidence(own / t, further / t) for t in self.temperatures])
            )

    def _evidence(self, own: Array, further: Array) -> float:
        return float(
            self.family.losses(own, self.targets).sum()
            + self.family.losses(further, self.held_out).sum()
        )

    def weights(self) -> dict[str, Array]:
        """Return the weights of all candidates, by kind and point; none where there is none yet."""
        if not any(path.points for path in self.paths.values()):
            return {}
        shape = -1, len(self.temperatures)
        totals = {kind: np.reshape(path.evidence, shape) for kind, path in self.paths.items()}
        flat = np.concatenate([each.ravel() for each in totals.values()])
        alone = np.repeat([k == "alone" for k in totals], [e.size for e in totals.values()])
        count = len(self.targets) + len(self.held_out)
        given = weights_of(
            flat, count, self.targets.shape[1], halves(alone), self.family, temperature=TEMPERATURE
        )
        ends = np.cumsum([each.size for each in totals.values()])[:-1]
        parts = np.split(given, ends)
        return {
            kind: np.asarray(part.reshape(each.shape).sum(1))
            for (kind, each), part in zip(totals.items(), parts, strict=True)
        }

    def _forget(self) -> None:
        """Serve the best point, and forget those that will not be served.

        Losses of a point do not change, so that its share of its half of the mixture, and of its
        kind, only falls. A kind by itself is served where its loss on the test set is told.
        """
        self._fitted = None
        weights = {kind: each for kind, each in self.weights().items() if len(each)}
        if not weights:
            return
        best = max(weights, key=lambda kind: float(weights[kind].max()))
        point = self.paths[best].points[int(weights[best].argmax())]
        if point is not None:
            self.points.serve(point)
        groups = [[kind] for kind in weights]
        if self.spec.me.test is None:
            groups = [["alone"], [kind for kind in weights if kind != "alone"]]
        for group in groups:
            shares = {kind: weights[kind] for kind in group if kind in weights}
            least = LEAST * max((float(each.max()) for each in shares.values()), default=0.0)
            for kind, each in shares.items():
                path = self.paths[kind]
                path.points = [
                    None if weight < least and not self._is_linear else kept
                    for weight, kept in zip(each.tolist(), path.points, strict=True)
                ]
        if self.most is not None:
            self._keep_best(weights, groups, self.most)

    def _keep_best(
        self, weights: Mapping[str, Array], groups: Sequence[Sequence[str]], most: int
    ) -> None:
        """Leave so many points, and the best of each group; the others are no candidates any more."""
        ranked = sorted(
            (
                (float(weight), kind, at)
                for kind in weights
                for at, weight in enumerate(weights[kind])
            ),
            reverse=True,
        )
        held = [(kind, at) for _, kind, at in ranked if self.paths[kind].points[at] is not None]
        firsts = (next((one for one in held if one[0] in group), None) for group in groups)
        dropped = {*held} - {*held[:most], *firsts}
        for kind in {kind for kind, _ in dropped}:
            path = self.paths[kind]
            for each in vars(path).values():
                each[:] = [one for at, one in enumerate(each) if (kind, at) not in dropped]

    @property
    def _is_linear(self) -> bool:
        return linear_of(self.spec.model) is not None and self.family is not LOSS

    def fitted(self) -> Fitted:
        """Return the mixture of all candidates, and that of each kind."""
        if self._fitted is None:
            self._fitted = self._mixed()
        return self._fitted

    def _mixed(self) -> Fitted:
        blocks = [self._block(kind, path) for kind, path in self.paths.items() if path.points]
        if self.family is not LOSS:
            blocks += [*self.closed, self._constant()]
        served, alone, entries = mix(
            *(self.family, self.targets, self.folds, blocks),
            held_out=self.held_out if len(self.held_out) else None,
            single=self.single,
            temperature=TEMPERATURE,
        )
        folds = int(self.folds.max()) + 1
        return Fitted.of(served, alone, entries, np.zeros(0), folds=folds, family=self.family)

    def _block(self, kind: str, path: Trajectory) -> Candidates:
        """Return the candidates of a kind: each point at each temperature."""
        divisors = np.array(self.temperatures)[:, None]

        def by_temperature(outputs: list[Array]) -> Array:
            each = np.stack(outputs, 1)[:, :, None] / divisors  # (n, J, temperatures, K)
            return np.reshape(each, (len(each), len(outputs) * len(divisors), each.shape[-1]))

        about: dict[str, Any] = {
            "kind": kind,
            "outputs": by_temperature(path.outputs),
            "held_out": by_temperature(path.held_out),
            "alone": kind == "alone",
        }
        if self._is_linear:
            points = torch.stack([point for point in path.points if point is not None])
            numbers = self._numbers(points)[:, :, None] / divisors
            return Candidates(
                parameters=numbers.reshape(len(numbers), -1, numbers.shape[-1]), **about
            )
        # one that was forgotten has too little weight to be served
        models = [
            nn.Identity() if point is None else self.points.model_at(point) for point in path.points
        ]
        return Candidates(
            predictors=[Predictor(model, t) for model in models for t in self.temperatures], **about
        )

    def _numbers(self, points: Tensor) -> Array:
        """Return the parameters of linear models at points, (D, J, K), the intercept last."""
        weight, *bias = Parameters(self.spec.model).unflatten(points).values()
        whole = torch.cat([weight.movedim(2, 0), *(each[None] for each in bias)])
        return np.asarray(whole.double().cpu().numpy())

    def _constant(self) -> Candidates:
        """Return the constant, found without each fold."""
        outputs = guesses(self.family, self.targets, self.folds)
        about: dict[str, Any] = {
            "kind": "constant",
            "outputs": outputs[1 + self.folds][:, None],
            "held_out": np.repeat(outputs[None, :1], len(self.held_out), 0),
            "alone": True,
        }
        layer = linear_of(self.spec.model)
        if not self._is_linear or layer is None or layer.bias is None:
            like = next(self.spec.model.parameters())
            served = Constant(torch.from_numpy(outputs[0])).to(like)
            return Candidates(predictors=[Predictor(served)], **about)
        parameters = np.zeros((layer.in_features + 1, 1, len(outputs[0])))
        parameters[-1, 0] = outputs[0]
        return Candidates(parameters=parameters, **about)

    def model(self, entry: MixtureEntry) -> nn.Module:
        """Return what an entry of the leaderboard serves."""
        model = copied(self.spec.model)
        layer = linear_of(model)
        if entry.others or layer is None:
            mixed = entry.model(self.family, intercept=layer is None or layer.bias is not None)
            return mixed.to(next(self.spec.model.parameters()))
        give(layer, entry.parameters)
        return model

    def losses(self, examples: Examples, entry: MixtureEntry) -> Array:
        """Return the losses of what an entry of the leaderboard serves."""
        return np.asarray(example_losses(self.model(entry), self.spec.loss, examples).numpy())

    def judged(self, points: Tensor, examples: Examples) -> Array:
        """Return the outputs at each point for each row, (R, n, K); losses where there is no family."""
        if self.family is LOSS:
            return np.asarray(self.points.losses(points, examples).numpy())[..., None]
        outputs = self.points.outputs(points, examples)
        if outputs is None:
            raise AssertionError("outputs of own rows were numbers before")
        return np.asarray(outputs.double().cpu().numpy())

    def targets_of_all(self) -> Array:
        """Return the targets of all own rows, (n, K), of which `targets` are those that judge."""
        return self._targets(self.spec.me.examples, self.targets.shape[1])

    def _targets(self, examples: Examples, k: int) -> Array:
        if self.family is LOSS:
            return np.zeros((len(examples), 1))
        _, targets = examples.take(torch.arange(len(examples)))
        return self.family.targets(targets.detach().cpu().double().numpy(), k)

    def find_closed(self, forms: ClosedForms, e_steps: ESteps, trunk: Tensor | None) -> None:
        """Find what has a closed form; the last layer behind those of a model at `trunk`."""
        self._fitted = None
        if self.most is not None:
            give_back()
        self.closed = forms.of_inputs(e_steps)
        if trunk is not None and linear_of(self.spec.model) is None:
            if self.most is not None:
                give_back()
            self.trunk, self._behind = trunk, None
            of_last = forms.of_last_layer(
                self.points.model_at(self.trunk), e_steps, self.with_last_layer
            )
            self.closed += of_last

    def with_last_layer(self, parameters: Array) -> nn.Module:
        """Return the model at `trunk` with another last layer."""
        if self.trunk is None:
            raise AssertionError("last layers are behind a trunk")
        if self._behind is None:
            self._behind = self.points.model_at(self.trunk)
        name = last_layer(self._behind)
        own = {id(each) for each in self._behind.get_submodule(name).parameters()}
        # all are behind the same layers, which are held once
        shared = {id(each): each for each in self._behind.parameters() if id(each) not in own}
        model = copy.deepcopy(self._behind, shared)
        give(cast("nn.Linear", model.get_submodule(name)), parameters)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return all candidates."""
        return {
            "paths": {kind: _saved(vars(path)) for kind, path in self.paths.items()},
            "closed": [_saved(vars(block)) for block in self.closed],
            "trunk": self.trunk,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up saved candidates."""
        self._fitted = None
        self.paths = {kind: Trajectory(**_taken(path)) for kind, path in state["paths"].items()}
        self.trunk = state["trunk"]
        self.closed = [Candidates(**_taken(block)) for block in state["closed"]]
        self.closed = [
            replace(one, behind=self.with_last_layer if one.behind else None) for one in self.closed
        ]


def _saved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays, also those in lists, as tensors."""

    def saved(value: Any) -> Any:
        if isinstance(value, list):
            return [saved(each) for each in value]
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    fields = {name: value if name != "behind" else bool(value) for name, value in fields.items()}
    return {name: saved(value) for name, value in fields.items()}


def _taken(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_saved` made as it was; points of paths stay tensors."""

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [taken(each) for each in value]
        return value.cpu().numpy() if isinstance(value, Tensor) else value

    return {
        name: list(value) if name == "points" else taken(value) for name, value in fields.items()
    }


def _family(spec: RunSpec, outputs: Tensor | None) -> Family:
    """Return the family by which predictions are mixed; `LOSS` where nothing says how."""
    family, held = family_of(spec.loss), [spec.me.examples, spec.me.validation]
    if family is None or outputs is None or outputs.ndim != 3:
        return LOSS
    fits = (
        family.fits(examples.take(torch.arange(len(examples)))[1], outputs.shape[2])
        for examples in held
        if examples is not None
    )
    return family if all(fits) else LOSS


def split(me: User, folds: int, seed: int) -> Tensor:
    """Return the fold of each of a user's examples, equal in size and, as far as they go, in targets."""
    random = np.random.default_rng(random_key(seed, f"{me.name}/folds"))
    targets = np.zeros(len(me))
    held = leaves(me.examples.targets) if isinstance(me.examples, InMemory) else []
    if held:  # of a target of several numbers, the first
        first = held[0].cpu().reshape(len(me), -1)[:, 0]
        # NumPy has no bfloat16
        targets = (first.double() if first.is_floating_point() else first).numpy()
    dealt = np.arange(len(me)) % folds
    if np.issubdtype(targets.dtype, np.floating):  # numbers have one order only: shuffle each round
        dealt = np.concatenate([random.permutation(folds) for _ in range(-(-len(me) // folds))])[
            : len(me)
        ]
    fold = np.empty(len(me), dtype=np.int64)
    fold[np.lexsort((random.random(len(me)), targets))] = dealt
    return torch.from_numpy(fold)
