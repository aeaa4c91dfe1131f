"""Train your model with your peers' gradients: personalized collaborative learning in PyTorch.

The public names are those of `coterie.public`. They and the packages are imported when they are
first used, so that `coterie --help` does not wait for torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.public import *  # noqa: F403  # so that type checkers and editors see them

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a package, or the public names, when one is first asked for."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    if name != "__all__" and importlib.util.find_spec(f"coterie.{name}"):
        return importlib.import_module(f"coterie.{name}")
    public = importlib.import_module("coterie.public")
    if not hasattr(public, name):
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    globals()[name] = getattr(public, name)
    return globals()[name]


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("coterie.public").__all__]
