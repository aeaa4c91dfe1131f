"""Estimators of scikit-learn whose users are the groups in a column of X."""

try:
    import sklearn.utils.validation
except ImportError as error:
    raise ImportError('scikit-learn is not installed; `pip install "coterie[sklearn]"`') from error
if not hasattr(sklearn.utils.validation, "validate_data"):
    raise ImportError(
        f'scikit-learn {sklearn.__version__} is installed, 1.6 or later is needed; `pip install "coterie[sklearn]"`'
    )

from coterie.sklearn.estimators import CoterieClassifier, CoterieRegressor

__all__ = ["CoterieClassifier", "CoterieRegressor"]
