"""Options in groups: a group is a dataclass whose fields are options, and a panel of the command's help.

A field is annotated with typer's `Option` or `Argument`, or has the `Setting` of a description that
it inherits.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer import Option

from coterie.arguments import Setting, default_of
from coterie.errors import KnobError


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes every option of its groups by itself, as typer wants them.

    The panel of a group is the first line of its docstring, unless an option names another. A list
    is empty where its option is left out.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Table:
        ...     '''The table.'''
        ...     data: Annotated[str, Option(help="A file.")]
        ...     sep: Annotated[str, Option(help="What is between columns.")] = ","
        >>> @grouped
        ... def show(table: Table) -> None:
        ...     print(table)
        >>> show(data="a.csv", sep=";")
        Table(data='a.csv', sep=';')
        >>> list(inspect.signature(show).parameters)
        ['data', 'sep']
    """
    groups = {name: group for name, group in get_type_hints(command).items() if name != "return"}
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]

    @functools.wraps(command)
    def flat(**options: Any) -> None:
        made = {
            name: group(**{f.name: options[f.name] for f in fields(group)})
            for name, group in groups.items()
        }
        command(**made)

    required = sorted(parameters, key=lambda each: each.default is not each.empty)
    flat.__signature__ = inspect.Signature(required)  # type: ignore[attr-defined]  # what `inspect` looks for
    flat.__annotations__ = {each.name: each.annotation for each in required}
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    panel = (inspect.getdoc(group) or "").partition("\n")[0].rstrip(".")
    hints = get_type_hints(group, include_extras=True)
    parameters = []
    for field in fields(group):
        kind, note = get_args(hints[field.name])
        kind, again = _as_options(kind)
        help_ = note.help + (" Repeat it." if again else "") if isinstance(note, Setting) else ""
        option = Option(help=help_) if isinstance(note, Setting) else copy.copy(note)
        option.rich_help_panel = option.rich_help_panel or panel
        annotation = Annotated[kind, option]  # type: ignore[valid-type]  # made as the program runs
        default = "" if kind is str and default_of(field) == () else default_of(field)
        made: Any = {"default": default, "annotation": annotation}
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, **made))
    return parameters


def _as_options(kind: Any) -> tuple[Any, bool]:
    """Return the type of an option for the type of a setting, and whether it may be given again."""
    union = get_origin(kind) in (Union, types.UnionType)
    members = [each for each in get_args(kind) if each is not type(None)] if union else [kind]
    if all(get_origin(each) is Literal for each in members):
        return Literal[tuple(value for each in members for value in get_args(each))], False
    if str in members:  # a text, or a list of texts
        return (kind if len(members) == 1 else str), False
    if get_origin(members[0]) is Sequence:
        return list[str], True
    return kind, False


def check_effect(group: Any, names: Sequence[str], without: str) -> None:
    """Refuse an option of a group that is given and needs another that is not."""
    for each in fields(group):
        if each.name in names and getattr(group, each.name) != default_of(each):
            raise KnobError(
                f"`{option_of(each.name)}` has no effect without `{without}`; leave it out"
            )


def option_of(name: str) -> str:
    """Return what the option of a field is called, where its group does not say otherwise.

    Example:
        >>> option_of("own_examples")
        '--own-examples'
    """
    return f"--{name.replace('_', '-')}"


def bare_flags(options: list[Any]) -> list[Any]:
    """Return options of which those that take no value do not look in the help as if they took one."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options
