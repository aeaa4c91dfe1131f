"""Estimators of scikit-learn whose users are the groups in a column of X."""

from coterie.sklearn.estimators import CoterieClassifier, CoterieRegressor

__all__ = ["CoterieClassifier", "CoterieRegressor"]
