"""Plain tools: what a user has without coterie, in a few lines of scikit-learn and SciPy each.

They see user 0's training and validation rows and, but for `sklearn-alone` and `-forest`, the peers' rows as they
are. Nothing of coterie's training is used. The strength of regularisation is chosen by
cross-validation on user 0's rows.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from coterie.benchmark.tasks import Numbers, Population, SetTask
from coterie.benchmark.tuning import Outcome, held_out, outcome_of
from coterie.mixture.candidates import Candidates
from coterie.mixture.families import SOFTMAX, SQUARED
from coterie.mixture.fit import fit_here
from coterie.users.examples import Examples

FOLDS = 5
STRENGTHS = tuple(float(s) for s in np.logspace(-3, 3, 9))
"""The least to the most freedom.

`C` of logistic regression, 1/`alpha` of ridge, or the prior's scale.
"""


@dataclass(frozen=True)
class ToolRows:
    """The rows of one user, or of several."""

    x: Numbers  # a row an example
    y: Numbers  # class numbers, or numbers


Predict: TypeAlias = Callable[[Numbers], Numbers]
"""From inputs to log-probabilities of all classes, or to numbers."""

Fit: TypeAlias = Callable[[ToolRows, float], Predict]
"""From user 0's rows and a strength to what predicts for it."""


@dataclass(frozen=True)
class Tool:
    """A plain tool under its name.

    From the peers' rows and the number of classes (0: numbers) to what fits.
    """

    name: str
    start: Callable[[Sequence[ToolRows], int], Fit]
    strengths: tuple[float, ...] = STRENGTHS
    asks_gradients_only: ClassVar[bool] = False

    def fits(self, people: Population) -> bool:
        """Say whether it can learn from these examples.

        From rows with one target each, not from texts.
        """
        return people.targets.ndim == 1

    def outcome(self, task: SetTask) -> Outcome:
        """Return what the tool reaches on a task, its strength chosen by cross-validation on user 0's rows."""
        began = time.process_time()
        n_classes = task.n_outputs if task.n_outputs > 1 else 0
        training, validation = _rows(task.me.examples), _rows(held_out(task.me.validation))
        own = _joined([training, validation])
        fit = self.start([_rows(peer.examples) for peer in task.peers], n_classes)
        losses = dict.fromkeys(self.strengths, 0.0)
        fold = _folds(own.y, n_classes)
        for strength in self.strengths if len(self.strengths) > 1 else ():
            for k in range(FOLDS):
                predict = fit(_taken(own, fold != k), strength)
                losses[strength] += _loss(
                    predict(own.x[fold == k]), own.y[fold == k], n_classes
                ) / len(own.y)
        best = min(losses, key=lambda strength: losses[strength])
        outputs = torch.from_numpy(fit(own, best)(_rows(held_out(task.me.test)).x))
        return outcome_of(
            *(task, outputs.double() if n_classes else outputs[:, None].double()),
            validation_loss=losses[best],
            setting=f"strength {best:.3g}" if len(losses) > 1 else "as it comes",
            settings=len(losses),
            wrong_weight=None,
            seconds=time.process_time() - began,
        )


def alone(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Fit ridge or logistic regression to the own rows."""
    return lambda own, strength: _linear(own, n_classes, strength)


def pooled(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Fit it to everybody's rows."""
    return lambda own, strength: _linear(_joined([own, *peers]), n_classes, strength)


def users(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Fit it to everybody's rows with a column for each user."""
    marked = [_with_users(rows, k + 1, len(peers) + 1) for k, rows in enumerate(peers)]

    def fit(own: ToolRows, strength: float) -> Predict:
        mine = _with_users(own, 0, len(peers) + 1)
        predict = _linear(_joined([mine, *marked]), n_classes, strength)
        return lambda x: predict(_with_users(ToolRows(x, x), 0, len(peers) + 1).x)

    return fit


def towards(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Fit the own rows, with the distance to the peers' solution penalised in the place of the distance to 0."""
    centre = _around(_joined(peers), np.zeros(_shape(peers[0], n_classes)), np.ones(1), n_classes)
    return lambda own, strength: _predicting(
        _around(own, centre, np.array([strength]), n_classes), n_classes
    )


def bayes(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Find the mean and the variance of each coefficient over the peers by EM, and take them as the prior."""
    mean = _around(_joined(peers), np.zeros(_shape(peers[0], n_classes)), np.ones(1), n_classes)
    variance = np.full(mean.shape, 0.05)
    for _ in range(10):
        each = [_around(rows, mean, variance, n_classes) for rows in peers]
        spreads = [
            1 / (_curvature(rows, w, n_classes) + 1 / variance)
            for rows, w in zip(peers, each, strict=True)
        ]
        mean = np.mean(each, 0)
        variance = np.clip(
            np.mean([(w - mean) ** 2 + v for w, v in zip(each, spreads, strict=True)], 0), 1e-6, 10
        )
    return lambda own, strength: _predicting(
        _around(own, mean, strength * variance, n_classes), n_classes
    )


def trees(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Boost trees on everybody's rows, with the user as a category."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    def marked(x: Numbers, user: int) -> Numbers:
        return np.column_stack([x, np.full(len(x), user)])

    def fit(own: ToolRows, strength: float) -> Predict:
        rows = _joined(
            [ToolRows(marked(rows.x, k), rows.y) for k, rows in enumerate([own, *peers])]
        )
        kind = HistGradientBoostingClassifier if n_classes else HistGradientBoostingRegressor
        model = kind(categorical_features=[rows.x.shape[1] - 1], random_state=0).fit(rows.x, rows.y)
        return lambda x: _outputs(model, marked(x, 0), n_classes, len(rows.y))

    return fit


def forest(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Grow a random forest on the own rows."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    def fit(own: ToolRows, strength: float) -> Predict:
        kind = RandomForestClassifier if n_classes else RandomForestRegressor
        model = kind(random_state=0).fit(own.x, own.y)
        return lambda x: _outputs(model, x, n_classes, len(own.y))

    return fit


def closed_form(
    peers: Sequence[ToolRows],
    n_classes: int,
    *,
    trees: bool | Callable[..., Sequence[Candidates]] = False,
    **growing: Any,
) -> Fit:
    """Fit coterie's own linear models in closed form, as `coterie.Mixture` does.

    With trees as further candidates where it is asked for, and what `growing` says of them; or with
    what a function like `coterie.trees.tree_candidates.candidates` makes. It has no strength to
    choose.
    """
    from coterie.trees.tree_candidates import candidates

    make = trees if callable(trees) else candidates
    family = SOFTMAX if n_classes else SQUARED

    def fit(own: ToolRows, strength: float) -> Predict:
        others = [(rows.x, rows.y) for rows in peers]
        mine, *others_rows = (
            (x, family.targets(y, n_classes or 1)) for x, y in [(own.x, own.y), *others]
        )

        def grown(folds: Numbers) -> Sequence[Candidates]:
            return make(mine, others_rows, family, folds, **growing) if trees else ()

        fitted = fit_here(own.x, own.y, others, family, n_classes or 1, others=grown)
        model = fitted.served.model(family, intercept=True)

        def predict(x: Numbers) -> Numbers:
            with torch.no_grad():
                outputs = model(torch.as_tensor(x, dtype=torch.float32)).double().numpy()
            return np.asarray(log_softmax(outputs, axis=1) if n_classes else outputs[:, 0])

        return predict

    return fit


def with_trees(peers: Sequence[ToolRows], n_classes: int) -> Fit:
    """Fit the default for tables: linear models and trees, mixed."""
    return closed_form(peers, n_classes, trees=True)


OURS = {
    tool.name: tool
    for tool in (
        Tool("mixture", closed_form, strengths=(1.0,)),
        Tool("mixture-trees", with_trees, strengths=(1.0,)),
    )
}
"""Not plain tools, but they see what these see, and need no tuning either."""

TOOLS = {
    tool.name: tool
    for tool in (
        Tool("sklearn-alone", alone),
        Tool("sklearn-pooled", pooled),
        Tool("sklearn-users", users),
        Tool("sklearn-towards", towards),
        Tool("sklearn-bayes", bayes),
        Tool("sklearn-trees", trees, strengths=(1.0,)),
        Tool("sklearn-forest", forest, strengths=(1.0,)),
    )
}


def _rows(examples: Examples) -> ToolRows:
    x, y = examples.take(torch.arange(len(examples)))
    return ToolRows(x.flatten(1).double().numpy(), y.flatten().numpy())


def _joined(parts: Sequence[ToolRows]) -> ToolRows:
    return ToolRows(
        np.concatenate([rows.x for rows in parts]), np.concatenate([rows.y for rows in parts])
    )


def _taken(rows: ToolRows, which: Numbers) -> ToolRows:
    return ToolRows(rows.x[which], rows.y[which])


def _with_users(rows: ToolRows, user: int, n_users: int) -> ToolRows:
    return ToolRows(np.hstack([rows.x, np.tile(np.eye(n_users)[user], (len(rows.x), 1))]), rows.y)


def _folds(y: Numbers, n_classes: int) -> Numbers:
    """Return a fold for each row, the classes in equal shares."""
    order = np.random.default_rng(0).permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")] if n_classes else order
    fold = np.empty(len(y), int)
    fold[order] = np.arange(len(y)) % FOLDS
    return fold


def _loss(outputs: Numbers, y: Numbers, n_classes: int) -> float:
    return float(-outputs[np.arange(len(y)), y].sum() if n_classes else ((outputs - y) ** 2).sum())


def _linear(rows: ToolRows, n_classes: int, strength: float) -> Predict:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge

    if n_classes and len(np.unique(rows.y)) == 1:  # which scikit-learn refuses
        return lambda x: np.tile(_floored(np.eye(n_classes)[rows.y[:1]], len(rows.y)), (len(x), 1))
    model = LogisticRegression(C=strength, max_iter=300) if n_classes else Ridge(alpha=1 / strength)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the last digits do not matter here
        model.fit(rows.x, rows.y)
    return lambda x: _outputs(model, x, n_classes, len(rows.y))


def _outputs(model: Any, x: Numbers, n_classes: int, n_rows: int) -> Numbers:
    """Return what a model of scikit-learn predicts.

    Numbers, or log-probabilities of all classes.
    """
    if not n_classes:
        return np.asarray(model.predict(x))
    shares = np.zeros((len(x), n_classes))
    shares[:, model.classes_] = model.predict_proba(x)
    return _floored(shares, n_rows)


def _floored(shares: Numbers, n_rows: int) -> Numbers:
    """Return log-probabilities, where a class that was in none of n rows is as probable as one more row."""
    return np.asarray(np.log((n_rows * shares + 1 / shares.shape[1]) / (n_rows + 1)))


def _around(rows: ToolRows, centre: Numbers, variance: Numbers, n_classes: int) -> Numbers:
    """Return the coefficients, intercepts last, of least Σ loss + Σ (w − centre)²/(2 variance)."""
    x = np.column_stack([rows.x, np.ones(len(rows.x))])
    precision = np.broadcast_to(1 / variance, centre.shape)
    if not n_classes:
        moved = np.linalg.solve(
            x.T @ x + np.diag(precision[:, 0]), x.T @ (rows.y[:, None] - x @ centre)
        )
        return np.asarray(centre + moved)
    truth, root = np.eye(n_classes)[rows.y], precision**-0.5

    def objective(z: Numbers) -> tuple[float, Numbers]:
        moved = z.reshape(centre.shape)
        logs = log_softmax(x @ (centre + root * moved), axis=1)
        gradient = root * (x.T @ (np.exp(logs) - truth)) + moved
        return float(-(logs * truth).sum() + 0.5 * (moved**2).sum()), gradient.ravel()

    found = minimize(
        objective, np.zeros(centre.size), jac=True, method="L-BFGS-B", options={"maxiter": 300}
    )
    return np.asarray(centre + root * found.x.reshape(centre.shape))


def _curvature(rows: ToolRows, w: Numbers, n_classes: int) -> Numbers:
    """Return the second derivatives of Σ loss in each coefficient."""
    x = np.column_stack([rows.x, np.ones(len(rows.x))])
    if not n_classes:
        return np.asarray((x**2).sum(0)[:, None])
    shares = np.exp(log_softmax(x @ w, axis=1))
    return np.asarray((x**2).T @ (shares * (1 - shares)))


def _predicting(w: Numbers, n_classes: int) -> Predict:
    def predict(x: Numbers) -> Numbers:
        outputs = x @ w[:-1] + w[-1]
        return np.asarray(log_softmax(outputs, axis=1) if n_classes else outputs[:, 0])

    return predict


def _shape(rows: ToolRows, n_classes: int) -> tuple[int, int]:
    return rows.x.shape[1] + 1, n_classes or 1
