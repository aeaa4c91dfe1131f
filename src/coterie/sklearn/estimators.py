"""The estimators: `fit` trains a model for every group, `predict` sends each row to its group's model."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from coterie.choosing import Algorithm, Chooser, Mixture
from coterie.data.preparation import Kind
from coterie.errors import DataError, KnobError, few_of
from coterie.recording.configuration import StepSettings
from coterie.rules import Rule
from coterie.sklearn.group_models import (
    Array,
    Column,
    Module,
    fit_groups,
    groups_in,
    name_of,
    named,
    table,
    unused,
)


class GroupEstimator(BaseEstimator):
    """What both estimators have: a model for every group, and the way to it."""

    _kind: Kind

    def __init__(
        self,
        group: Column | None = None,
        *,
        module: Module | None = None,
        rule: Rule | Chooser | Algorithm | str | None = None,
        me: Any = None,
        categorical: Sequence[Column] | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int = 32,
        validation: float | None = None,
        monotonic_cst: Mapping[Column, int] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.group = group
        self.module = module
        self.rule = rule
        self.me = me
        self.categorical = categorical
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.validation = validation
        self.monotonic_cst = monotonic_cst
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Say that X may have missing values, and columns of categories."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **refused: Any) -> Self:  # noqa: N803  # scikit-learn's name
        """Train a model for every group, with the other groups as its peers, and one for all rows alike.

        Args:
            X: the rows, a DataFrame or an array, with the group of each in the column `group`.
            y: the target of each row.
            sample_weight: how much each row counts in the loss. Rows of weight 0 are left out.
                What all weights of a group are multiplied by does not matter.
            refused: nothing; in particular no `groups`, which `predict` would not be given.
        """
        for name in refused:
            remedy = (
                "; the group is a column of X: say by `group` which" if name == "groups" else ""
            )
            raise TypeError(f"`fit` takes no `{name}`{remedy}")
        rows, y = self._rows(X, y, ensure_min_samples=2, y_numeric=self._kind == "regression")
        if sample_weight is not None:
            sample_weight = _check_sample_weight(
                sample_weight, rows, dtype=float, ensure_non_negative=True
            )
            if not sample_weight.any():
                raise DataError("`sample_weight` gives no row any weight; let some be above 0")
            rows, y, sample_weight = (each[sample_weight > 0] for each in (rows, y, sample_weight))
            if len(set(sample_weight.tolist())) < 2:  # all rows count alike
                sample_weight = None
        group = (
            unused("group", rows) if self.group is None else name_of("group", self.group, X, rows)
        )
        self._numeric = {name: pd.api.types.is_numeric_dtype(rows[name]) for name in rows.columns}
        self._group = None if self.group is None else group
        categorical = [name_of("categorical", column, X, rows) for column in self.categorical or ()]
        if self.group is None:
            self.groups_, rows[group] = np.array([]), "everybody"
        else:
            self.groups_, rows[group] = named(groups_in(rows[group]))
        if self.me is not None and self.me not in self.groups_.tolist():
            raise DataError(
                f"`me` names no group: those of the rows are {few_of(self.groups_)}, got"
                f" {self.me!r}"
            )
        target = unused("y", rows)
        weights = None
        if sample_weight is not None:
            weights = unused("weight", rows)
            rows[weights] = sample_weight
        settings = (self.rule, self.steps, self.lr)
        trees: Literal[True, "only"] = "only" if self.module == "trees" else True
        closed = self.module in (None, "trees") and all(each is None for each in settings)
        # it judges by folds, and needs no rows held out
        folds = self.rule is None or getattr(self.rule, "guards_itself", False)
        if self.module == "trees" and not closed:
            raise KnobError('`module="trees"` takes no steps: leave out `rule`, `steps` and `lr`')
        signs = {
            name_of("monotonic_cst", column, X, rows): sign
            for column, sign in (self.monotonic_cst or {}).items()
        }
        if signs and not closed:
            raise KnobError(
                "`monotonic_cst` is for models in closed form: leave out `rule`, `steps`, `lr` and"
                " another `module` than trees"
            )
        self.group_models_ = fit_groups(
            rows.assign(**{target: self._targets(y)}),
            group=group,
            target=target,
            kind=self._kind,
            rule=Mixture(trees=trees, monotonic_cst=signs) if closed else self.rule,
            module="linear" if closed else self.module or "linear",
            me=None if self.me is None else str(self.me),
            categorical=categorical,
            validation=(0.0 if folds else 0.2) if self.validation is None else self.validation,
            seed=self._seed(),
            weights=weights,
            **{"steps": StepSettings.steps if self.steps is None else self.steps, "lr": self.lr},
            batch_size=self.batch_size,
        )
        return self

    @property
    def models_(self) -> dict[Any, nn.Module]:
        """The model of each group that has one of its own."""
        models = self.group_models_.models
        return {
            group: models[str(group)] for group in self.groups_.tolist() if str(group) in models
        }

    @property
    def pooled_(self) -> nn.Module:
        """The model of all rows alike, for rows of groups that have no model of their own."""
        return self.group_models_.pooled

    @property
    def weights_(self) -> pd.DataFrame:
        """Who listens to whom.

        In a group's row, each other group's share of the weight that its peers have.
        """
        whose = {str(group): group for group in self.groups_.tolist()}
        return self.group_models_.weights.rename(index=whose, columns=whose)

    @property
    def verdict_(self) -> dict[Any, str]:
        """The verdict on each group's model, beside one trained alone."""
        return self._said("verdict")

    @property
    def whom_(self) -> dict[Any, str]:
        """Whom each group's model listens to, in a sentence."""
        return self._said("whom")

    @property
    def leaderboard_(self) -> pd.DataFrame:
        """Of each group (a row) the loss of each candidate; empty for a rule that has none."""
        return pd.DataFrame.from_dict(self._said("leaderboard"), orient="index")

    def _said(self, what: str) -> dict[Any, Any]:
        said = self.group_models_.said
        return {g: said[str(g)][what] for g in self.groups_.tolist() if str(g) in said}

    def _rows(self, X: Any, y: Any = "no_validation", **checks: Any) -> tuple[pd.DataFrame, Any]:  # noqa: N803
        """Return X as a table, and y, where it is given, as it was checked."""
        fitting = not isinstance(y, str)
        checks |= {"reset": fitting, "dtype": None, "ensure_all_finite": "allow-nan"}
        checked = validate_data(self, X, y, **checks)
        array, y = checked if fitting else (checked, None)
        return table(X, array, None if fitting else self._numeric), y

    def _outputs(self, X: Any) -> Tensor:  # noqa: N803
        """Return for each row the outputs of its group's model, or of the pooled one."""
        check_is_fitted(self)
        rows, _ = self._rows(X)
        if self._group is None:
            return self.group_models_.outputs(rows, [None] * len(rows))
        # 1 and 1.0 are the same group
        names = {group: str(group) for group in self.groups_.tolist()}
        groups = groups_in(rows[self._group])
        return self.group_models_.outputs(rows, [names.get(group, str(group)) for group in groups])

    def _targets(self, y: Array) -> Array:
        return y

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31))


class CoterieClassifier(ClassifierMixin, GroupEstimator):
    """A classifier with a personal model for every group of rows, each trained with the other groups as its peers.

    Rows of a group that `fit` did not see, or that had too few rows or only one class, go to a
    model of all rows alike. A share of each group's rows is held out to choose its best model. What
    `coterie train --me all --test 0` makes of the same rows predicts the same.

    Args:
        group: the column of X that says of which group a row is, by name or position. None: there
            are no groups, and one model is trained.
        module: "linear", "trees", "mlp", or a function of the numbers of inputs and outputs that
            returns a `torch.nn.Module`. When None: linear models and trees, mixed; "linear" where
            `rule`, `steps` or `lr` is given.
        rule: as in `coterie.train`, also by name ("wga"). When None: `Mixture`, the closed form, where `module` is None
            or "trees" and `steps` and `lr` are None, else `AdaptiveAveraging`.
        me: the only group that listens to others; the others' models are trained alone. Every group
            when None.
        categorical: columns of numbers to treat as categories, by name or position; text always is
            one.
        steps: as in `coterie.train`; 1,000 when None.
        lr: Adam's step size; when None chosen, for another rule 0.01.
        batch_size: rows that each group draws for a gradient.
        validation: the share of each group's rows held out to choose its best model. When None:
            none for the default rules, which judge by folds, and else 0.2.
        monotonic_cst: of columns of numbers, by name or position: 1 where the prediction never
            falls in it, -1 where it never rises. Of two classes the last one's probability is meant.
        random_state: what splits, initial parameters and batches depend on.

    Attributes:
        classes_: all groups' classes, sorted.
        groups_: the groups, in the order of the rows.
        models_: the model of each group that has one of its own.
        pooled_: the model of all rows alike.
        weights_: who listens to whom: in a group's row, each other group's share of the weight that
            its peers have; zeros where the model trained alone is served.
        verdict_: the verdict on each group's model, beside one trained alone.
        whom_: whom each group's model listens to, in a sentence.
        leaderboard_: in a group's row, the loss of each candidate of the mixture.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = np.column_stack([np.repeat([1, 2, 3], 30), rng.normal(size=90)])
        >>> y = np.where(X[:, 1] > 0, "high", "low")
        >>> estimator = CoterieClassifier(0, steps=50, lr=0.1).fit(X, y)
        >>> estimator.predict([[1, 2.0], [3, -2.0], [4, 2.0]])
        array(['high', 'low', 'high'], dtype='<U4')
    """

    _kind = "classification"

    def predict_proba(self, X: Any) -> Array:  # noqa: N803
        """Return for each row the probability of every class, in the order of `classes_`."""
        return np.asarray(self._outputs(X).softmax(1).numpy())

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the class of each row."""
        best = self._outputs(X).argmax(1).numpy()
        return np.asarray(self.classes_[best])

    def _targets(self, y: Array) -> Array:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise DataError(
                f"y has one class only ({self.classes_[0]!r}); give rows of two classes or more"
            )
        return np.asarray(numbers)


class CoterieRegressor(RegressorMixin, GroupEstimator):
    """A regressor with a personal model for every group of rows, each trained with the other groups as its peers.

    Arguments and attributes are those of `CoterieClassifier`, but for `classes_`.

    Example:
        >>> import numpy as np
        >>> X = np.column_stack([np.repeat([1, 2, 3], 30), np.linspace(0, 1, 90)])
        >>> estimator = CoterieRegressor(0, steps=300, lr=0.1).fit(X, 10 + 2 * X[:, 1])
        >>> estimator.predict([[1, 0.2]]).round(1)
        array([10.4])
    """

    _kind = "regression"

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the target of each row, in its units."""
        outputs = self._outputs(X)
        return np.asarray(self.group_models_.preparation.predictions(outputs)["prediction"])
