"""The flags of a command as a dataclass: every flag is declared once, as an annotated field."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

Flags = TypeVar("Flags")


def takes(flags: type[Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Return a decorator for typer commands: their flags are the fields of the dataclass `flags`.

    A field is annotated as a parameter of a typer command would be. The command takes one object of that class.
    """

    def decorate(run: Callable[[Flags], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**given: Any) -> None:
            run(flags(**given))

        signature = inspect.signature(flags)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {name: flag.annotation for name, flag in signature.parameters.items()}
        return command

    return decorate


def matching(kind: Any, flags: object) -> dict[str, Any]:
    """Return the flags that are named like a field of the dataclass `kind`, and were given or have a default."""
    given = {field.name: getattr(flags, field.name, None) for field in fields(kind)}
    return {name: value for name, value in given.items() if value is not None}
