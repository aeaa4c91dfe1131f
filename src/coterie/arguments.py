"""Arguments: what may be given, said in one place.

A check takes a value as it is meant, or refuses it.

What has arguments says by a table of checks what they may be; `check_fields` goes through it.

    LIMITS = {"steps": COUNT, "lr": optional(POSITIVE)}

A description is a dataclass whose fields say it themselves, with their help under `Args:` in the
docstring. Functions, commands and files that take such a description take its fields.

    steps: Annotated[int, COUNT] = 1000
"""

import functools
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, replace
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_type_hints
from unicodedata import category

from coterie.errors import CoterieError, KnobError

MAX_SHOWN = 80
"""How many characters of a value a message shows."""

Remedies: TypeAlias = Mapping[type | tuple[type, ...], str]
"""What to do instead, by the type of what was given."""


@dataclass(frozen=True)
class Check:
    """What an argument must be.

    Args:
        words: how it goes on after "`name` must".
        read: returns the value as it is meant; a TypeError or ValueError refuses it.
        error: the kind of error.
        remedies: what to do instead, for mistakes that are often made.

    Example:
        >>> COUNT("steps", 5)
        5
        >>> COUNT("steps", 1.9)
        Traceback (most recent call last):
        ...
        coterie.errors.KnobError: `steps` must be a whole number, at least 1, got 1.9
    """

    words: str
    read: Callable[[Any], Any]
    error: type[CoterieError] = KnobError
    remedies: Remedies | None = None

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value as it is meant, or refuse it."""
        try:
            return self.read(value)
        except (TypeError, ValueError, OverflowError):
            remedy = next(
                (
                    f"; {do}"
                    for kind, do in (self.remedies or {}).items()
                    if isinstance(value, kind)
                ),
                "",
            )
            raise self.error(f"`{name}` must {self.words}, got {shown(value)}{remedy}") from None


def whole(least: int, most: int | None = None) -> Check:
    """Return the check of a whole number, of Python, NumPy or torch.

    True is none, and neither is 5.0.
    """
    words = f"at least {least}" if most is None else f"from {least} to {most}"
    last = math.inf if most is None else most
    read = where(lambda number: least <= number <= last, operator.index, bool)
    return Check(f"be a whole number, {words}", read)


def real(words: str, fits: Callable[[float], bool]) -> Check:
    """Return the check of a finite number in a range."""
    finite = where(lambda number: math.isfinite(number) and fits(number), float, bool | str | bytes)
    return Check(words, finite)


def where(
    fits: Callable[[Any], bool], meant: Callable[[Any], Any] | None = None, refused: Any = ()
) -> Callable[[Any], Any]:
    """Return what takes a value as it is `meant`, and refuses what does not fit, or is of some types."""

    def read(value: Any) -> Any:
        if isinstance(value, refused):
            raise TypeError
        taken = value if meant is None else meant(value)
        if not fits(taken):
            raise ValueError
        return taken

    return read


def one_of(*values: Any) -> Check:
    """Return the check of a value that must be one of a few."""
    names = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    texts = {value for value in values if isinstance(value, str)}
    return Check(
        f"be {', '.join(names[:-1])} or {names[-1]}",
        where(
            lambda value: (
                value in texts if isinstance(value, str) else any(value is each for each in values)
            )
        ),
    )


def instance(
    kinds: type | tuple[type, ...],
    words: str,
    remedies: Remedies | None = None,
    error: type[CoterieError] = KnobError,
) -> Check:
    """Return the check of an object of some class."""
    return Check(f"be {words}", where(lambda value: isinstance(value, kinds)), error, remedies)


def function(
    words: str, remedies: Remedies | None = None, error: type[CoterieError] = KnobError
) -> Check:
    """Return the check of what is called; a class whose mistake has a remedy is refused."""
    refused = tuple(kind for kind in remedies or {} if isinstance(kind, type))
    fits = where(lambda value: callable(value) and not isinstance(value, refused))
    return Check(f"be {words}", fits, error, remedies)


def either(first: Check, second: Check) -> Check:
    """Return the check of what one of two takes; words and remedies are those of the second."""

    def read(value: Any) -> Any:
        try:
            return first.read(value)
        except (TypeError, ValueError):
            return second.read(value)

    return replace(second, read=read)


def optional(check: Check) -> Check:
    """Return the same check, with None for what is left out."""
    return replace(
        check, words=f"{check.words}, or None", read=lambda v: None if v is None else check.read(v)
    )


def listed(check: Check, words: str, remedies: Remedies | None = None) -> Check:
    """Return the check of a sequence, each entry by a check of its own; it becomes a tuple."""

    def read(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            raise TypeError
        return tuple(check.read(each) for each in value)

    return Check(f"be {words}", read, check.error, remedies)


def mapped(check: Check, words: str, remedies: Remedies | None = None) -> Check:
    """Return the check of a mapping from names to values, each by a check of its own."""

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) and name for name in value
        ):
            raise TypeError
        for each in value.values():
            check.read(each)
        return value

    return Check(f"be {words}", read, check.error, remedies)


COUNT = whole(1)
"""A number of things: 1, 2, 3, …"""
SEED = whole(-(2**63), 2**63 - 1)
"""What random numbers are drawn from, as torch takes it."""
SHARE = real("lie in [0, 1]", lambda value: 0 <= value <= 1)
"""A part of a whole."""
POSITIVE = real("be a finite number above 0", lambda value: value > 0)
"""A size: a step, a penalty, a norm."""
NOT_NEGATIVE = real("be a finite number, at least 0", lambda value: value >= 0)
"""A size that may be nothing."""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{unit[0]}iB": 2 ** (10 * power) for power, unit in enumerate(_UNITS, 1)}


def bytes_of(size: str) -> int:
    """Return how many bytes a size in words is.

    Example:
        >>> bytes_of("8GB"), bytes_of("1.5 MiB")
        (8000000000, 1572864)
    """
    number, unit = size.strip()[:-2], size.strip()[-2:]
    if size.strip()[-3:] in _UNITS:
        number, unit = size.strip()[:-3], size.strip()[-3:]
    if unit not in _UNITS or not 0 < float(number) < math.inf:
        raise ValueError
    return int(float(number) * _UNITS[unit])


MEMORY = Check(
    'be a size, such as "8GB" or "500MB"',
    where(lambda value: isinstance(value, str) and bytes_of(value) >= 0),
    remedies={(int, float): "add a unit"},
)
"""How much memory something may take."""
ANYTHING = Check("be anything", lambda value: value)
"""What is checked elsewhere."""
FLAG = one_of(*(True, False))
"""Yes or no."""


def check_fields(thing: object, checks: Mapping[str, Check]) -> None:
    """Let the fields of a frozen dataclass be what they are meant to be, or refuse them."""
    for name, check in checks.items():
        object.__setattr__(thing, name, check(name, getattr(thing, name)))


Checked = TypeVar("Checked", bound=type)


def checked(**checks: Check) -> Callable[[Checked], Checked]:
    """Return a decorator that lets a dataclass check fields when it is made.

    It stands below `dataclass`; what a class that it inherits from checks is checked too.

    Example:
        >>> @dataclass(frozen=True)
        ... @checked(steps=COUNT)
        ... class Walk:
        ...     steps: int = 1
        >>> Walk(0)
        Traceback (most recent call last):
            ...
        coterie.errors.KnobError: `steps` must be a whole number, at least 1, got 0
    """

    def mark(kind: Checked) -> Checked:
        before: Any = getattr(kind, "__post_init__", None)

        def check_all(self: Any) -> None:
            if before is not None:
                before(self)
            for name, check in checks.items():
                check(name, getattr(self, name))

        kind.__post_init__ = check_all  # type: ignore[attr-defined]  # what `dataclass` looks for
        return kind

    return mark


@dataclass(frozen=True)
class Setting:
    """What a field of a description says of itself."""

    help: str  # what it does, as the documentation of functions and commands says it
    check: Check = ANYTHING  # what it may be


def documented(described: Any) -> dict[str, str]:
    """Return what is said of each argument, or field, under `Args:` in a docstring and those that it inherits."""
    about = {}
    for each in reversed(getattr(described, "__mro__", (described,))):
        _, _, text = inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")
        for match in re.finditer(r"^    (\w+): (.*(?:\n {5,}.*)*)", text, re.MULTILINE):
            about[match[1]] = " ".join(match[2].split())
    return about


@functools.cache
def settings_of(description: Callable[..., Any]) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by name, inherited ones among them: the fields under `Args:`.

    What one may be is a `Check` in its annotation.

    Example:
        >>> from typing import Annotated
        >>> @dataclass
        ... class Steps:
        ...     '''Steps.
        ...
        ...     Args:
        ...         steps: Steps to take.
        ...     '''
        ...     steps: Annotated[int, COUNT] = 1000
        >>> settings_of(Steps)["steps"].help
        'Steps to take.'
    """
    hints = get_type_hints(description, include_extras=True)
    about = documented(description)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: Setting(about[name], *(note for note in notes[name] if isinstance(note, Check)))
        for name in hints
        if name in about
    }


def check_settings(thing: Any) -> None:
    """Let the settings of a frozen dataclass be what they are meant to be, or refuse them."""
    for name, setting in settings_of(thing.__class__).items():
        object.__setattr__(thing, name, setting.check(name, getattr(thing, name)))


def default_of(field: Field[Any]) -> Any:
    """Return what a field is where it is left out.

    `inspect.Parameter.empty` where it may not be.
    """
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default


P = ParamSpec("P")
Described = TypeVar("Described")
Result = TypeVar("Result")


def takes_fields_of(
    description: Callable[P, Described],
) -> Callable[[Callable[[Described], Result]], Callable[P, Result]]:
    """Let a function of a description take the fields of it.

    Type checkers, editors and `help` see those.

    The fields are documented by what their settings say, before the example in the docstring.

    Example:
        >>> from typing import Annotated
        >>> @dataclass
        ... class Steps:
        ...     '''Steps.
        ...
        ...     Args:
        ...         steps: Steps to take.
        ...     '''
        ...     steps: Annotated[int, COUNT] = 1000
        >>> @takes_fields_of(Steps)
        ... def walk(described: Steps) -> int:
        ...     '''Take steps.'''
        ...     return described.steps
        >>> walk(steps=3), inspect.signature(walk)
        (3, <Signature (steps: int = 1000) -> int>)
        >>> print(walk.__doc__)
        Take steps.
        <BLANKLINE>
        Args:
            steps: Steps to take.
        <BLANKLINE>
    """

    def taking(function: Callable[[Described], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(description(*args, **kwargs))

        hints, returned = get_type_hints(description), inspect.signature(function).return_annotation
        seen = inspect.signature(description)
        parameters = [
            each.replace(annotation=hints[name]) for name, each in seen.parameters.items()
        ]
        seen = seen.replace(parameters=parameters, return_annotation=returned)
        call.__signature__ = seen  # type: ignore[attr-defined]  # what `inspect` looks for
        call.__doc__ = _documented(
            inspect.getdoc(function) or "", settings_of(description), list(seen.parameters)
        )
        return call

    return taking


def _documented(text: str, settings: Mapping[str, Setting], names: list[str]) -> str:
    """Return a docstring with a description of the arguments before its example."""
    about, example, code = text.partition("\nExample:\n")
    lines = [f"{name}: {settings[name].help}" for name in names]
    wrapped = [
        textwrap.fill(line, 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for line in lines
    ]
    return "\n".join([about.rstrip(), "", "Args:", *wrapped, example + code])


def is_text(value: str) -> bool:
    """Say whether a text can be written to a file and shown in one line.

    No half characters, no control ones.
    """
    return not any(category(character) in ("Cc", "Cs") for character in value)


def shown(value: Any) -> str:
    """Return a value as a message shows it: short, on one line, whatever the value is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value of one's own may not even be shown
        text = ""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if text and len(text) <= MAX_SHOWN else f"an object of type {type(value).__name__}"
