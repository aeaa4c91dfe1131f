"""Estimators of scikit-learn whose users are the groups in a column of X."""

from coterie.errors import not_installed

try:
    import sklearn.utils.validation
except ImportError as error:
    raise ImportError(not_installed("scikit-learn", "sklearn")) from error
if not hasattr(sklearn.utils.validation, "validate_data"):
    raise ImportError(f"version {sklearn.__version__} is too old: {not_installed('scikit-learn', 'sklearn')}")

from coterie.sklearn.estimators import CoterieClassifier, CoterieRegressor

__all__ = ["CoterieClassifier", "CoterieRegressor"]
