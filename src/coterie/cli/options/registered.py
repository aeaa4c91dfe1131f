"""Options whose values are registered names or knobs of registered things, read when a command is called."""

import ast
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer import Option

from coterie.aggregators import AGGREGATORS, Aggregator
from coterie.arguments import settings_of
from coterie.data.table import ColumnSettings
from coterie.engines.attacks import ATTACKS
from coterie.errors import KnobError, did_you_mean
from coterie.evaluation import METRICS
from coterie.methods import METHODS
from coterie.registry import Computed, Entry
from coterie.rules import RULES
from coterie.training.hooks import TRACKERS

CONTAINERS: dict[Any, Any] = {
    **dict.fromkeys((tuple, list, Sequence), Sequence),
    **dict.fromkeys((Mapping, dict), Mapping),
}
"""What a knob's type is called, and what is written for it."""

NAMES: Mapping[str, Iterable[str]] = {
    **{"{rules}": RULES, "{methods}": METHODS, "{attacks}": ATTACKS},
    **{"{metrics}": METRICS, "{trackers}": TRACKERS},
}
"""What stands for names that are known in the help of an option."""


ID = Option("--id", metavar="COLUMN", help=settings_of(ColumnSettings)["ids"].help)


@dataclass(frozen=True, kw_only=True)
class KnobOptions:
    """A rule or a method, with its knobs.

    Args:
        alpha: The peers' weight, for wga and bc, in [0, 1]; 0.5 if left out. auto: what the
            theory advises for the noise and bias that a few batches show before the first step.
        beta: How fast bc's estimate of the bias follows, in [0, 1]; 0.01 if left out. auto: as
            for --alpha.
        knob: Any knob of the rule or method, e.g. aggregator=median, or local_steps=5; repeat
            it.
    """

    rule: Annotated[str, Option(metavar="NAME")] = "auto"
    alpha: Annotated[str | None, Option(metavar="NUMBER|auto")] = None
    beta: Annotated[str | None, Option(metavar="NUMBER|auto")] = None
    knob: Annotated[list[str], Option(metavar="NAME=VALUE")] = field(default_factory=list)


def knobs_of(entry: Entry[Any], pairs: Sequence[str], **options: str | None) -> dict[str, Any]:
    """Return the knobs that the command line gives, by the types that the thing says they have.

    The pairs are NAME=VALUE, of `--knob`; the options are knobs with an option of their own, None
    where left out.
    """
    texts = [(f"--{name}", name, text) for name, text in options.items() if text is not None]
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise KnobError(f"`--knob` must be NAME=VALUE, got {pair!r}")
        texts.append((f"--knob {name}", name, text))
    once([name for _, name, _ in texts])
    return {name: _knob(entry, option, name, text) for option, name, text in texts}


def once(names: Sequence[str]) -> None:
    """Refuse a name that is given two values, of which one would have no effect."""
    for name in names:
        if names.count(name) > 1:
            raise KnobError(f"{name!r} is given {names.count(name)} times; give it once")


def _knob(entry: Entry[Any], option: str, name: str, text: str) -> Any:
    if name not in entry.parameters:
        raise KnobError(
            f"`{option}` does not fit {entry.name!r}, which takes"
            f" {', '.join(entry.parameters) or 'no knobs'}{did_you_mean(name, entry.parameters)}"
        )
    try:
        hint = get_type_hints(entry.thing).get(name, Any)
    except NameError:  # a type that is known to type checkers alone
        hint = Any
    kinds = _members(hint)
    # `none` names no aggregator
    for kind in sorted(kinds, key=lambda kind: kind is not type(None)):
        try:
            return _read(kind, text)
        except KnobError:
            raise
        except ValueError:
            continue
    words = dict.fromkeys(word for kind in kinds for word in _words(kind))
    raise KnobError(f"`{option}` must be {' or '.join(words) or 'set in Python'}, got {text!r}")


def _members(hint: Any) -> list[Any]:
    """Return the members of a union, text and names last, since any text is one."""
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    members = (kind for part in get_args(hint) for kind in _members(part))
    return sorted(members, key=lambda kind: kind is str or _is_names(kind))


def _is_names(kind: Any) -> bool:
    """Say whether a kind of value is a list of texts."""
    return CONTAINERS.get(get_origin(kind)) is Sequence and get_args(kind)[0] is str


def _read(kind: Any, text: str) -> Any:
    """Return the value of a kind that a text stands for; ValueError where it stands for none."""
    origin = get_origin(kind)
    if kind in (int, float, str):
        return kind(text)
    if isinstance(kind, type) and issubclass(kind, Aggregator):
        return _aggregator(text)
    if _is_names(kind) and text[:1] not in ("(", "["):
        return tuple(name.strip() for name in text.split(","))
    if kind is Any or origin in CONTAINERS:
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text
        if kind is Any or (isinstance(value, CONTAINERS[origin]) and not isinstance(value, str)):
            return value
        raise ValueError(text)
    words: dict[str, Any] = {"true": True, "false": False} if kind is bool else {}
    words |= {"none": None} if kind is type(None) else {}
    words |= {str(value): value for value in get_args(kind)} if origin is Literal else {}
    if text not in words:
        raise ValueError(text)
    return words[text]


def _aggregator(text: str) -> Computed:
    """Return what makes an aggregator for a run from `name` or `name(knob=value, …)`."""
    match = re.fullmatch(r"([\w-]+)(?:\((.*)\))?", text)
    if match is None:
        raise ValueError(text)
    entry = AGGREGATORS.entry(match[1])
    inner = [pair.strip() for pair in re.split(r",(?![^(]*\))", match[2] or "") if pair.strip()]
    knobs = knobs_of(entry, inner)
    return Computed(lambda run: entry.build(knobs, run))


def _words(kind: Any) -> list[str]:
    """Say what a kind of value is written as."""
    if get_origin(kind) is Literal:
        return [f'"{value}"' for value in get_args(kind)]
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    known |= {type(None): "none", Aggregator: f"an aggregator ({', '.join(AGGREGATORS)})"}
    kinds = {
        tuple: "a list like (1, 2)",
        Sequence: "a list like (1, 2)",
        Mapping: 'a mapping like {"a": 1}',
    }
    word = known.get(kind) or kinds.get(get_origin(kind))
    return [word] if word else []
