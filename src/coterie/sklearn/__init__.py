"""Estimators of scikit-learn whose users are the groups in a column of X."""

try:
    import sklearn.utils.validation
except ImportError as error:
    raise ImportError("`coterie.sklearn` needs scikit-learn: pip install 'coterie[sklearn]'") from error
if not hasattr(sklearn.utils.validation, "validate_data"):
    raise ImportError(
        f"`coterie.sklearn` needs scikit-learn 1.6 or later, not {sklearn.__version__}: "
        "pip install -U 'coterie[sklearn]'"
    )

from coterie.sklearn.estimators import CoterieClassifier, CoterieRegressor

__all__ = ["CoterieClassifier", "CoterieRegressor"]
