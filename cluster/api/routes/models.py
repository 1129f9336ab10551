"""GET /v1/models: the served model, how its messages are read, and the further names that it answers to."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import Name, json_answer
from crossdock.cluster.dispatch.dispatcher import ModelCard, TokenSource


class Models:
    def __init__(self, source: TokenSource, aliases: Sequence[str], families: Mapping[str, str | None]) -> None:
        """`families`: of tool calls and of reasoning, see `MessageFormat.families`."""
        self._source = source
        self._families = families
        self._aliases = aliases

    def card(self, name: str | None) -> ModelCard:
        """Return the card of the model `name`, or of the served one for None. Raises ApiError 404 for another model."""
        card = self._source.model
        if name is not None and name != card.name and name not in self._aliases:
            reason = f"The model '{name[:200]}' does not exist; this server has {', '.join(self._names())}."
            raise ApiError(reason, status=404, param="model", code="model_not_found")
        return card

    async def all(self) -> Response:
        card = self._source.model
        models = [self._model(card, name) for name in self._names()]
        return json_answer({"object": "list", "data": models})

    async def one(self, name: Name) -> Response:
        return json_answer(self._model(self.card(name), name))

    def _names(self) -> tuple[str, ...]:
        """Return the model's name and its aliases."""
        return (self._source.model.name, *self._aliases)

    def _model(self, card: ModelCard, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": card.created,
            "owned_by": "crossdock",
            "root": card.name,
            "parent": None,
            "max_model_len": card.max_model_len,
            **self._families,
        }
