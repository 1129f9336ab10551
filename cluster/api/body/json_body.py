"""A body as JSON becomes fields: honoured fields are validated, all others are accepted or refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.other_fields import NO_EFFECT, REFUSED, RefusedField, check_other_fields
from crossdock.cluster.api.errors import ApiError, shown, wrong


class Body(BaseModel):
    """The common part of all bodies. As in OpenAI's API, null means "not given"."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None

    no_effect: ClassVar[Mapping[str, str]] = NO_EFFECT  # fields that the API knows and that change nothing here
    refused_fields: ClassVar[Mapping[str, RefusedField]] = REFUSED  # … and those that would change the answer

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse and validate a body. Raises ApiError, which names the first field at fault."""
        try:
            data = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError("The body must be a JSON object.", code="invalid_json")
        return cls.of(data)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """Validate the fields of a body. Raises ApiError, which names the first field at fault."""
        if len(data) > bounds.BODY_FIELDS:
            reason = f"The body has {len(data)} fields, more than the {bounds.BODY_FIELDS} that are accepted."
            raise ApiError(reason, code="invalid_json")
        honoured = cls.model_fields.keys()
        check_other_fields(data, honoured, no_effect=cls.no_effect, refused_fields=cls.refused_fields)
        given = {name: data[name] for name in cls.model_fields if data.get(name) is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise invalid_field(first["loc"], first["type"], first["msg"]) from None


def invalid_field(loc: Sequence[int | str], kind: str, message: str) -> ApiError:
    """Return the client's error for one of pydantic's: `loc`, `type` and `msg` of an entry of `errors()`."""
    param = ""
    for step in loc:
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else step
    param = shown(param)
    if kind == "missing":
        return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return wrong(param, message.removeprefix("Value error, "))
