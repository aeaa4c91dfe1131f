"""What can go wrong, by kind. Every message names the value at fault and the remedy."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Self


class CoterieError(Exception):
    """Any error that coterie raises on purpose."""


class KnobError(CoterieError, ValueError):
    """A setting outside its range: `alpha`, `beta`, `tau`, a peer's name, a number of steps."""


class DataError(CoterieError, ValueError):
    """Examples that cannot be learned from.

    Empty, of one class, of unequal lengths, without a target.
    """


class ModelError(CoterieError, ValueError):
    """A model that does not fit the data, the loss or the optimizer."""


class RunError(CoterieError):
    """An error that a run ended with, and that run."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run


class FileError(RunError, OSError):
    """A file that cannot be written or is not as it was written, or a folder that another process uses.

    Args:
        message: which file, what is wrong with it, and what to do.
        run: the `coterie.Run` that could not be written, where there is one.
    """


class CheckpointError(FileError):
    """A checkpoint that is truncated, altered, or of another run."""


class GradientError(RunError, ArithmeticError):
    """User 0's own gradient, or what the rule makes of all, is NaN or infinite.

    Nothing sensible can follow.

    Args:
        message: what happened and where the state is.
        run: the `coterie.Run` as of the last good step.
    """


class PeerLost(RunError, ConnectionError):  # noqa: N818  # it says what happened
    """Peers that the run cannot do without are gone, or have not answered in time.

    Args:
        message: who, and where the state is.
        peers: their names, as far as they are known.
        run: the `coterie.Run` as of the last whole step; None where there is none yet.
    """

    def __init__(self, message: str, peers: Sequence[str] = (), run: Any = None) -> None:
        super().__init__(message, run)
        self.peers = tuple(peers)


class MaskError(CoterieError, ArithmeticError):
    """A masked sum that cannot be had.

    A part that is not finite or too large, keys or masks that do not fit.
    """


class UserCodeError(RunError, RuntimeError):
    """Code of your own raised.

    A hook, metric, stream, data set, model, loss, optimizer, scheduler or rule.

    What it raised is this error's `__cause__`.

    Args:
        message: whose code it was, what it raised, and where the state is.
        run: the `coterie.Run` as of the last whole step; None where there is none yet.
    """

    @classmethod
    def of(cls, whose: str, error: Exception) -> Self:
        """Return the error that says whose code raised another."""
        made = cls(f"{whose} raised {type(error).__name__}: {error}")
        made.__cause__ = error
        return made


@contextmanager
def attributing_errors_to(whose: str) -> Iterator[None]:
    """Let an error that code of somebody else raises inside say whose it is.

    Example:
        >>> with attributing_errors_to("the metric 'odd'"):
        ...     1 / 0
        Traceback (most recent call last):
        ...
        coterie.errors.UserCodeError: the metric 'odd' raised ZeroDivisionError: division by zero
    """
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        raise UserCodeError.of(whose, error) from error


def printable(text: object, most: int = 200) -> str:
    r"""Return a text that comes from elsewhere as it can stand in a message.

    One line, no codes for a terminal.

    Example:
        >>> printable("a\x1b[2J\nb")
        'a?[2J?b'
    """
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])


def few_of(names: Iterable[object], most: int = 12) -> str:
    """Return names between commas, the first of them where they are many."""
    shown = [repr(str(name)) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def did_you_mean(name: object, names: Iterable[object]) -> str:
    """Return the end of a message about a name that is not there: the one that may be meant.

    Example:
        >>> did_you_mean("Hopsital", ["age", "hospital"]), did_you_mean("x", ["age", "hospital"])
        ("; did you mean 'hospital'?", '')
    """
    there = {str(each).casefold(): str(each) for each in names}
    near = difflib.get_close_matches(str(name).casefold(), there, n=1)
    return f"; did you mean {there[near[0]]!r}?" if near else ""


def not_installed(package: str, extra: str) -> str:
    """Say that a package is missing, and the command that brings what this extra of coterie needs.

    The command names the packages themselves: coterie is in no package index, and its name there
    may be anybody's.

    Example:
        >>> not_installed("NVFLARE", "flare")
        'NVFLARE is not installed; `pip install "nvflare<2.10,>=2.9"`'
    """
    try:
        needs = [each.partition(";") for each in metadata.requires("coterie") or ()]
    except metadata.PackageNotFoundError:  # coterie runs from a clone that nobody installed
        return f"{package} is not installed; `pip install '.[{extra}]'` in a clone of coterie"
    names = [
        f'"{need.strip()}"' for need, _, marker in needs if f'"{extra}"' in marker.replace("'", '"')
    ]
    return f"{package} is not installed; `pip install {' '.join(names)}`"
