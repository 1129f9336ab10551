"""Where drafts come from: the protocol of all drafters, and the choice of one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from crossdock.workers.draft.draft_model import DraftModel
from crossdock.workers.draft.prompt_lookup import PromptLookup
from crossdock.workers.model.model import PagedModel
from crossdock.workers.schedule.drafting import DraftSource
from crossdock.workers.schedule.speculative_config import SpeculativeConfig


class Drafter(DraftSource, Protocol):
    """Drafts tokens of streams."""

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""

    def propose(self, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Return at most so many drafts for each request. Requests without any are left out."""


def new_drafter(config: SpeculativeConfig, target: PagedModel) -> Drafter:
    """Return the drafter that `config` asks for. A small model is loaded onto the device of `target`.

    Call it before the pool of `target` is allocated: on a GPU that takes all memory that is left.

    Raises:
        ValueError: `config.model` cannot draft for `target`.
    """
    return DraftModel.load(config, target) if config.method == "draft_model" else PromptLookup(config)
