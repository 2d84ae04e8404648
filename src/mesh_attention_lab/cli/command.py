"""Commands as functions of groups of options.

A `group` is a dataclass whose fields are made by `option`. A command takes groups, and `command` gives it the signature
that typer reads, in which every option is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typing_extensions import dataclass_transform

Read = Callable[[str, str], Any]
"""``read("--seq", "128k")`` returns the value of an option, or raises a `ParseError`."""


def option(
    name: str,
    help_text: str,
    metavar: str | None = None,
    read: Read | None = None,
    default: Any = MISSING,
    *,
    also: str | None = None,
    panel: str | None = None,
    show_default: bool | str = True,
) -> Any:
    """A field that is an option, with another name if `also` states one. Without `read`, typer reads it as the type of
    the field."""
    names = [name] if also is None else [name, also]
    info = typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=show_default)
    return field(default=default, metadata={"name": name, "info": info, "read": read})


def argument(metavar: str, help_text: str, default: Any = MISSING) -> Any:
    info = typer.Argument(help=help_text, metavar=metavar, show_default=False)
    return field(default=default, metadata={"name": metavar, "info": info, "read": None})


Group = TypeVar("Group")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, argument))
def group(cls: type[Group]) -> type[Group]:
    """Makes a class whose fields are options a dataclass."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: with one parameter for each option of its groups."""
    hints = {name: hint for name, hint in get_type_hints(function).items() if name != "return"}
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(function)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{one.name: _value(one, given.pop(one.name)) for one in fields(kind)})
            for name, kind in groups.items()
        }
        function(**made, **given)

    parameters: list[Parameter] = []
    for name, hint in hints.items():
        parameters += _parameters(hint) if name in groups else [_parameter(name, hint, MISSING)]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(group: Any) -> list[Parameter]:
    hints, found = get_type_hints(group), []
    for one in fields(group):
        hint, default = hints[one.name], one.default
        if one.metadata["read"] is not None:
            hint = str | None if default is None else str
            default = default if default in (None, MISSING) else str(default)
        found.append(_parameter(one.name, Annotated[hint, one.metadata["info"]], default))
    return found


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is MISSING else default, annotation=hint
    )


def _value(one: Field[Any], given: Any) -> Any:
    read = one.metadata["read"]
    return read(one.metadata["name"], given) if read is not None and isinstance(given, str) else given


def options_given(context: typer.Context, *groups: Any) -> list[str]:
    """The options of these groups that the command line states."""
    names = {one.name: one.metadata["name"] for group in groups for one in fields(group)}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [names[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
