"""Options of a command: the arguments of its function, or the fields of dataclasses, each a panel of the help.

What an option does is said as `coterie.arguments` has it, under `Args:` in the docstring. An
annotation with typer's `Option` or `Argument` says what else there is to it.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer import Option
from typer.core import TyperCommand
from typer.models import ParameterInfo

from coterie.arguments import default_of, documented
from coterie.errors import KnobError


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes every option by itself, as typer wants them.

    The panel of a group is the first line of its docstring, unless an option names another. A list
    is empty where its option is left out.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Table:
        ...     '''The table.
        ...
        ...     Args:
        ...         data: A file.
        ...         sep: What is between columns.
        ...     '''
        ...     data: str
        ...     sep: str = ","
        >>> @grouped
        ... def show(table: Table) -> None:
        ...     print(table)
        >>> show(data="a.csv", sep=";")
        Table(data='a.csv', sep=';')
        >>> list(inspect.signature(show).parameters)
        ['data', 'sep']
    """
    kinds = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}
    described: list[Any] = [*groups.values()] or [command]
    parameters = [parameter for each in described for parameter in _parameters(each)]

    @functools.wraps(command)
    def flat(**options: Any) -> None:
        made = {
            name: group(**{f.name: options[f.name] for f in fields(group)})
            for name, group in groups.items()
        }
        command(**made or options)

    required = sorted(parameters, key=lambda each: each.default is not each.empty)
    flat.__signature__ = inspect.Signature(required)  # type: ignore[attr-defined]  # what `inspect` looks for
    flat.__annotations__ = {each.name: each.annotation for each in required}
    flat.__doc__ = (inspect.getdoc(command) or "").partition("\nArgs:\n")[0]
    return flat


def _parameters(described: Any) -> list[inspect.Parameter]:
    """Return the options of a group, or of a command without groups."""
    hints, about, panel = (
        get_type_hints(described, include_extras=True),
        documented(described),
        None,
    )
    if is_dataclass(described):
        panel = (inspect.getdoc(described) or "").partition("\n")[0].rstrip(".")
        defaults = {each.name: default_of(each) for each in fields(described)}
    else:
        defaults = {k: each.default for k, each in inspect.signature(described).parameters.items()}
    parameters = []
    for name, default in defaults.items():
        kind, *notes = get_args(hint) if get_origin(hint := hints[name]) is Annotated else [hint]
        kind, again = _as_options(kind)
        given = next((note for note in notes if isinstance(note, ParameterInfo)), Option())
        option = copy.copy(given)
        option.help = given.help or about[name] + (" Repeat it." if again else "")
        if kind is bool and given.default is ...:  # where typer keeps a name that is given
            option.param_decls = _flags(name, default)
        option.rich_help_panel = option.rich_help_panel or panel
        annotation = Annotated[kind, option]  # type: ignore[valid-type]  # made as the program runs
        default = "" if kind is str and default == () else default  # noqa: PLW2901  # as typer wants it
        made: Any = {"default": default, "annotation": annotation}
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **made))
    return parameters


def _flags(name: str, default: object) -> tuple[str, ...]:
    """Return what turns a flag on, and off where it is on if left out."""
    option = option_of(name)
    return (f"{option}/--no-{option[2:]}" if default else option,)


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


class Command(TyperCommand):
    """A command whose help lists the names that are registered when it is shown, the user's own among them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, `--help` among them."""
        return bare_flags(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from coterie.cli.options.registered import NAMES  # which imports all that has a name

        options: list[Any] = [option for option in self.params if getattr(option, "help", None)]
        texts = [option.help for option in options]
        for option in options:
            for mark in filter(option.help.__contains__, NAMES):
                option.help = option.help.replace(mark, ", ".join(NAMES[mark]))
        super().format_help(ctx, formatter)
        # more may be registered before the next time
        for option, text in zip(options, texts, strict=True):
            option.help = text
