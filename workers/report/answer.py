"""A replica's answer to a submission, as plain data."""

from dataclasses import dataclass
from typing import Self

from crossdock.workers.schedule.request.submission import InvalidField, Overloaded


@dataclass(frozen=True, slots=True)
class Refusal:
    """An exception that says why a submission is refused."""

    kind: str  # name of its class
    message: str
    retry_after: float = 0.0  # of Overloaded
    field: str = ""  # of InvalidField

    @classmethod
    def of(cls, error: Exception) -> Self:
        message = str(error)
        match error:
            case Overloaded():
                return cls("Overloaded", message, retry_after=error.retry_after)
            case InvalidField():
                return cls("InvalidField", message, field=error.field)
            case ValueError():
                return cls("ValueError", message)
        return cls("RuntimeError", message or type(error).__name__)

    def error(self) -> Exception:
        """Return the exception. Of a class that is not known here, a RuntimeError."""
        match self.kind:
            case "Overloaded":
                return Overloaded(self.message, self.retry_after)
            case "InvalidField":
                return InvalidField(self.message, self.field)
            case "ValueError":
                return ValueError(self.message)
        return RuntimeError(self.message)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the submission with this number."""

    number: int  # as its ingress counts
    sequence: int = -1  # of the last live profile that does not include the request
    refusal: Refusal | None = None  # None: the request is taken
