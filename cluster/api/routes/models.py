"""GET /v1/models: the served model, how its messages are read, its adapters, and the further names of all these."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.dispatch.dispatcher import ModelCard, ReplicaLost, TokenSource
from crossdock.workers.schedule.request.submission import Adapter


class Models:
    def __init__(
        self,
        source: TokenSource,
        aliases: Sequence[str],
        families: Mapping[str, str | None],
        adapters: Mapping[str, Adapter],
        name: str = "",
    ) -> None:
        """`families`: of tool calls and of reasoning, see `MessageFormat.families`. `adapters`: by name, as of now.
        `name`: known before a replica is up; empty: that of the source."""
        self._name = name
        self._since = int(time.time())
        self._adapters = adapters
        self._source = source
        self._families = families
        self._aliases = aliases

    def card(self, name: str | None) -> ModelCard:
        """Return the card of the model or adapter `name`, or of the served model for None.

        Raises ApiError 404 for another model.
        """
        card = self._source.model
        if name is not None and name not in self.names:
            raise no_such_model(name, ", ".join(self.names))
        return card

    def adapter(self, name: str | None) -> Adapter | None:
        """Return the adapter of that name; None: the name is one of the base model's."""
        is_base = name is None or name == self._base or name in self._aliases
        return None if is_base or name is None else self._adapters.get(name)

    def all(self) -> list[dict[str, Any]]:
        """Describe the model, under each of its names, and its adapters."""
        return [self._model(name) for name in self.names]

    def one(self, name: str) -> dict[str, Any]:
        """Describe the model or adapter of that name. Raises ApiError 404."""
        if name not in self.names:
            raise no_such_model(name, ", ".join(self.names))
        return self._model(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, its aliases, and its adapters."""
        return (self._base, *self._aliases, *self._adapters)

    @property
    def _base(self) -> str:
        return self._name or self._source.model.name

    def _model(self, name: str) -> dict[str, Any]:
        card: ModelCard | None = None
        with suppress(ReplicaLost):  # a model of several that has no replica now
            card = self._source.model
        adapter = self.adapter(name)
        created = self._since if card is None else card.created
        return {
            "id": name,
            "object": "model",
            "created": created,
            # Anthropic's fields: its client lists models at the same path.
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
            "owned_by": "crossdock",
            "root": self._base if adapter is None else adapter.path,
            "parent": None if adapter is None else self._base,
            "max_model_len": None if card is None else card.max_model_len,
            **self._families,
        }


def no_such_model(name: str, served: str) -> ApiError:
    """Return the error for a model that is not served. `served`: the names that are."""
    reason = f"The model '{name[:200]}' does not exist; this server has {served}."
    return ApiError(reason, status=404, param="model", code="model_not_found")
