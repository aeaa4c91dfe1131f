"""Options in groups: a group is a dataclass whose fields are options, and a panel of the command's help.

A field is annotated with typer's `Option` or `Argument`, or has the `Setting` of a description that
it inherits.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

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
        option = Option(help=note.help) if isinstance(note, Setting) else copy.copy(note)
        option.rich_help_panel = option.rich_help_panel or panel
        annotation = Annotated[kind, option]  # type: ignore[valid-type]  # made as the program runs
        made: Any = {"default": default_of(field), "annotation": annotation}
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, **made))
    return parameters


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
