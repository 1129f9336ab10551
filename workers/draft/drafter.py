"""Where drafts come from: the protocol of all drafters, and the choice of one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from crossdock.workers.draft.draft_model import DraftModel
from crossdock.workers.draft.head_drafter import HeadDrafter
from crossdock.workers.draft.mtp_head import MtpHead
from crossdock.workers.draft.paged_eagle import PagedEagle
from crossdock.workers.draft.prompt_lookup import PromptLookup
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig


class Drafter(Protocol):
    """Drafts tokens of streams, after those that grammars dictate: forced ones."""

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`."""

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return how many of the last tokens support the drafts after `forced`; 0: there will be no drafts."""

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return at most so many drafts for each request, to follow its `forced` tokens. Requests without any are left
        out."""


class NoDrafter:
    """Drafts nothing: method grammar has forced tokens alone."""

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Do nothing."""

    def remove(self, request_id: str) -> None:
        """Do nothing."""

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return 0."""
        return 0.0

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return 0."""
        return 0

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return no drafts."""
        return {}


def new_drafter(config: SpeculativeConfig, target: LoadedModel) -> Drafter:
    """Return the drafter that `config` asks for. A small model, or a head, is loaded onto the device of `target`.

    Call this before the pool of `target` is allocated: on a GPU the pool takes all memory that is left.

    Raises:
        ValueError: `config.model` cannot draft for `target`.
    """
    if config.method == "grammar":
        return NoDrafter()
    memory = int(config.draft_kv_cache_memory)
    if config.method == "eagle3":
        assert config.model is not None, "the configuration asks for it"
        return HeadDrafter.of(PagedEagle.load(config.model, target), target, memory)
    if config.method == "mtp":
        return HeadDrafter.of(MtpHead.load(config.model, target), target, memory)
    return DraftModel.load(config, target) if config.method == "draft_model" else PromptLookup(config)
