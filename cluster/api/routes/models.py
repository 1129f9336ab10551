"""GET /v1/models: the served model, how its messages are read, its adapters, and the further names of all these."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import Name, json_answer
from crossdock.cluster.dispatch.dispatcher import ModelCard, TokenSource
from crossdock.workers.schedule.submission import Adapter


class Models:
    def __init__(
        self,
        source: TokenSource,
        aliases: Sequence[str],
        families: Mapping[str, str | None],
        adapters: Mapping[str, Adapter],
    ) -> None:
        """`families`: of tool calls and of reasoning, see `MessageFormat.families`. `adapters`: by name, as of now."""
        self._adapters = adapters
        self._source = source
        self._families = families
        self._aliases = aliases

    def card(self, name: str | None) -> ModelCard:
        """Return the card of the model or adapter `name`, or of the served model for None.

        Raises ApiError 404 for another model.
        """
        card = self._source.model
        if name is not None and name not in self._names():
            reason = f"The model '{name[:200]}' does not exist; this server has {', '.join(self._names())}."
            raise ApiError(reason, status=404, param="model", code="model_not_found")
        return card

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter of that name; None: the name is one of the base model's."""
        is_base = name is None or name == self._source.model.name or name in self._aliases
        return None if is_base or name is None else self._adapters.get(name)

    async def all(self) -> Response:
        card = self._source.model
        models = [self._model(card, name) for name in self._names()]
        return json_answer({"object": "list", "data": models})

    async def one(self, name: Name) -> Response:
        return json_answer(self._model(self.card(name), name))

    def _names(self) -> tuple[str, ...]:
        """Return the model's name, its aliases, and its adapters."""
        return (self._source.model.name, *self._aliases, *self._adapters)

    def _model(self, card: ModelCard, name: str) -> dict[str, Any]:
        adapter = self.adapter(name)
        return {
            "id": name,
            "object": "model",
            "created": card.created,
            "owned_by": "crossdock",
            "root": card.name if adapter is None else adapter.path,
            "parent": None if adapter is None else card.name,
            "max_model_len": card.max_model_len,
            **self._families,
        }
