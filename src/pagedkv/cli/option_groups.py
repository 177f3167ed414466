"""Options that belong together as one parameter: a dataclass whose fields are the options.

A command takes shared options as a value of the class that declares them::

    @command
    def report(sources: ..., *, output: ..., serving: ServingOptions) -> None: ...

typer sees the fields in place of that parameter, including those of nested classes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

from pagedkv.cli.user_errors import reported

__all__ = ["command"]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command from a function: its groups of options become single options, and user errors are reported.

    Args:
        function: its parameters are arguments and options of typer, or dataclasses of them.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        group = groups.get(parameter.name)
        known = parameter.replace(annotation=hints[parameter.name])
        parameters += [known] if group is None else _options(group)

    typed = {parameter.name: _typed(parameter) for parameter in parameters if _is_option(parameter)}

    @wraps(function)
    def run(**values: object) -> None:
        with reported(typed):
            gathered = {name: _gather(group, values) for name, group in groups.items()}
            function(**values, **gathered)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_option(parameter: Parameter) -> bool:
    return parameter.kind is Parameter.KEYWORD_ONLY


def _typed(parameter: Parameter) -> str:
    """Return the typed form of an option: from its declaration, else from its name."""
    declared = [
        name
        for metadata in getattr(parameter.annotation, "__metadata__", ())
        for name in getattr(metadata, "param_decls", None) or ()
        if name.startswith("--")
    ]
    return declared[0] if declared else f"--{parameter.name.replace('_', '-')}"


def _options(group: Any) -> Iterator[Parameter]:  # noqa: ANN401 - a class; typeshed has no type of dataclasses
    """Yield the options of a group, and of the groups in it, in the order of its fields."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _options(hint)
        else:
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=_default(field), annotation=hint)


def _default(field: "Field[Any]") -> object:
    return Parameter.empty if field.default is MISSING else field.default


def _gather(group: Any, values: dict[str, object]) -> object:  # noqa: ANN401 - as above
    """Make a group from the values of its options, which are removed from ``values``."""
    hints: Mapping[str, Any] = get_type_hints(group, include_extras=True)
    return group(
        **{
            field.name: _gather(hints[field.name], values)
            if is_dataclass(hints[field.name])
            else values.pop(field.name)
            for field in fields(group)
        }
    )
