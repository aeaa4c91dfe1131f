"""Registries: a rule, method, aggregator, data set, metric or tracker becomes known everywhere by one line.

The command line, the benchmark and the docs read names from here. Another package adds its own by
an entry point of the registry's group, for instance `coterie.rules`; a script or a notebook by a
decorator or a call.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from coterie.errors import CoterieError, KnobError, UserCodeError, did_you_mean

T = TypeVar("T")

IMPORTS = "COTERIE_IMPORT"
"""The environment variable that names the user's own files and modules, as `coterie --import` does."""


@dataclass(frozen=True)
class RunSizes:
    """What is known of a run before it starts, for knobs that depend on it."""

    own_examples: int  # how many examples user 0 trains on
    peers: Mapping[str, int | None]  # how many each peer has, by name; None where it does not say
    steps: int  # how many the run takes; for a method, how many gradients user 0 computes

    @property
    def sizes(self) -> dict[str, int]:
        """How many examples each peer has; an error where one does not say."""
        if silent := [name for name, n in self.peers.items() if n is None]:
            raise KnobError(
                f"the rule needs the number of examples of {silent[0]!r}, which it does not tell"
            )
        return {name: n for name, n in self.peers.items() if n is not None}

    @property
    def peer_examples(self) -> int:
        """How many examples the peers have together."""
        return sum(self.sizes.values())


@dataclass(frozen=True)
class Computed:
    """A knob's value as a function of the run's sizes."""

    value: Callable[[RunSizes], Any]


@dataclass(frozen=True, eq=False)
class Entry(Generic[T]):
    """A registered thing and what is said of it."""

    name: str
    thing: T
    description: str = ""  # one line
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of knobs; a value may be `Computed`
    fixed: Sequence[str] = ()  # knobs that make it what it is, whose defaults cannot be changed
    benchmark_settings: Sequence[Mapping[str, Any]] | None = None
    """The knobs that `coterie bench` tries, one mapping for each setting.

    None leaves the choice to the benchmark,
    and an empty sequence keeps the thing out of it."""

    def build(self, knobs: Mapping[str, Any], run: RunSizes) -> Any:
        """Call the thing with its defaults and these knobs.

        One that it does not take is refused.
        """
        taken = self.parameters
        for knob in knobs:
            if knob not in taken:
                raise KnobError(
                    f"{self.name!r} takes no `{knob}`; it takes {', '.join(taken) or 'no knobs'}"
                    f"{did_you_mean(knob, taken)}"
                )
        values = {**self.defaults, **knobs}
        values = {
            k: value.value(run) if isinstance(value, Computed) else value
            for k, value in values.items()
        }
        if missing := [
            p.name for p in taken.values() if p.default is p.empty and p.name not in values
        ]:
            raise KnobError(f"{self.name!r} needs `{missing[0]}`")
        return self.thing(**values)  # type: ignore[operator]  # what has knobs can be called

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The knobs that the thing takes."""
        taken = inspect.signature(self.thing).parameters  # type: ignore[arg-type]  # as above
        return {name: parameter for name, parameter in taken.items() if name not in self.fixed}


class Registry(Generic[T]):
    """Things of one kind by name, in the order in which they were registered.

    `kind` is what messages call the things. By entry points of `group` other packages add theirs;
    they are loaded when a name is asked for that is not there, or all names are.

    Example:
        >>> shapes: Registry[type] = Registry("shape", "example.shapes")
        >>> @shapes.register("disc")
        ... class Disc:
        ...     "A circle and what is in it."
        >>> list(shapes), shapes["disc"] is Disc, shapes.entry("disc").description
        (['disc'], True, 'A circle and what is in it.')
        >>> shapes["square"]
        Traceback (most recent call last):
        ...
        coterie.errors.KnobError: unknown shape 'square'; the shapes are disc
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._entries: dict[str, Entry[T]] = {}
        self._looked_for_entry_points = False

    @overload
    def register(self, name: str, thing: T, /, **about: Any) -> T: ...
    @overload
    def register(self, name: str, /, **about: Any) -> Callable[[T], T]: ...
    def register(self, name: str, thing: T | None = None, /, **about: Any) -> T | Callable[[T], T]:
        """Make a thing known by name: as a call with the thing, or as a decorator without.

        A name is taken once. The same thing may be registered again, and so may one with the same
        qualified name: a cell of a notebook that is run twice replaces what it registered. `about`
        are fields of `Entry`; the description is the first line of the docstring when left out.
        """
        if (
            not isinstance(name, str)
            or not name
            or any(sign.isspace() or sign == "," for sign in name)
        ):
            raise KnobError(
                f"the name of a {self.kind} must be a text without blanks and commas, got {name!r}"
            )
        if thing is None:
            return lambda thing: self.register(name, thing, **about)
        before = self._entries.get(name)
        if before is not None and _source(before.thing) != _source(thing):
            taken = f"the {self.kind} {name!r} is already {before.thing!r}"
            raise KnobError(f"{taken}; choose another name for {thing!r}")
        description = (inspect.getdoc(_origin(thing)) or "").partition("\n")[0]
        self._entries[name] = Entry(name, thing, **{"description": description, **about})
        return thing

    def entry(self, name: str) -> Entry[T]:
        """Return a thing with what is said of it."""
        if name not in self._entries:
            self._load_entry_points()
        if name not in self._entries:
            raise KnobError(
                f"unknown {self.kind} {name!r}; the {self.kind}s are {', '.join(self._entries)}"
                f"{did_you_mean(name, self._entries)}"
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> T:
        return self.entry(name).thing

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in list(self)

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(list(self._entries))

    def __len__(self) -> int:
        self._load_entry_points()
        return len(self._entries)

    def _load_entry_points(self) -> None:
        """Load what other packages offer.

        One that fails is a warning, since it must not stop the others.
        """
        if self._looked_for_entry_points:
            return
        self._looked_for_entry_points = True
        for point in metadata.entry_points(group=self.group):
            package = point.dist.name if point.dist else point.value
            try:
                self.register(point.name, point.load())
            except Exception as error:  # another package's code may raise anything
                offer = f"the package {package!r} offers the {self.kind} {point.name!r}"
                warnings.warn(f"{offer}, which cannot be used: {error}", stacklevel=3)


def import_user_code(name: str) -> None:
    """Import a file, `….py`, or a module, also of the current folder, so that what it registers is known."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise KnobError(
                f"`--import` names {name!r}, which is not there; name a Python file or a module"
            )
        module = f"coterie_imported_{path.stem}"
        if module in sys.modules and sys.modules[module].__file__ == str(path.resolve()):
            return
        spec = importlib.util.spec_from_file_location(module, path.resolve())
        if spec is None or spec.loader is None:
            raise KnobError(f"`--import` names {name!r}, which Python cannot read as a module")
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            with _blaming_import(name):
                spec.loader.exec_module(sys.modules[module])
        except BaseException:
            del sys.modules[module]  # or the next import would find half of it
            raise
        return
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with _blaming_import(name):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        raise KnobError(f"`--import` names the module {name!r}, which cannot be found") from error


@contextmanager
def _blaming_import(name: str) -> Iterator[None]:
    """Let an error say that it is of the code which `--import` names.

    A package that is missing is its own.
    """
    try:
        yield
    except (CoterieError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise UserCodeError(
            f"`--import` of {name!r} raised {type(error).__name__}: {error}"
        ) from error


def import_from_environment() -> None:
    """Import what `COTERIE_IMPORT` names, separated as in `PATH`.

    Processes started by a command inherit it.
    """
    for name in os.environ.get(IMPORTS, "").split(os.pathsep):
        if name:
            import_user_code(name)


def _origin(thing: object) -> object:
    """Return what has the docstring and the name: the function that a thing wraps, or the thing."""
    return getattr(thing, "__wrapped__", thing)


def _source(thing: object) -> object:
    """Return what tells a thing from others.

    Where it is defined, or the thing itself where it has no name.
    """
    origin = _origin(thing)
    name = getattr(origin, "__qualname__", "<lambda>")
    return origin if "<lambda>" in name else (origin.__module__, name)
