"""Let the further drafts of a head attend to the tokens that the indexer chose for the first one (GLM-5.2).

The tokens of drafts are not among these. Where the first draft's row reads all tokens, rows of further drafts do too.
(`index_share_for_mtp_iteration` in config.json; vLLM's pull requests 44420 and 47238.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.indexed_attention import ChosenTokens, Indexer, choice_of_rows
from crossdock.workers.model.architecture import is_indexed


def shared_choice(module: Any) -> "SharedChoice | None":
    """Return a holder of choices for a head's one layer; None: its configuration does not ask for that.

    `module`: a causal LM of the head's layer, whose indexer returns an `Indexer`.
    """
    if not (is_indexed(module.config) and getattr(module.config, "index_share_for_mtp_iteration", False)):
        return None
    return SharedChoice(module.get_decoder().layers[0].self_attn.indexer)


class SharedChoice:
    """Takes the place of an indexer's `forward`: gives further drafts the choice of the pass before."""

    def __init__(self, module: Any) -> None:
        """Replace the method."""
        self._own: Callable[..., Any] = module.forward
        self._given: ChosenTokens | None = None  # None: the pass chooses
        self._newest: Indexer | None = None
        self._chosen: ChosenTokens | None = None  # of the pass before; None: its rows saw all tokens
        self._rows: Tensor | None = None  # [N], of the pass before: those that further drafts come after
        module.forward = self

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the indexer's own result, with the choice that is given; its keys are of the pass's own rows."""
        found = self._own(*inputs, **named)
        if isinstance(found, Indexer):
            self._newest = found = replace(found, chosen=self._given)
        return found

    @contextmanager
    def held(self, batch: AttentionBatch, rows: Tensor, follows: Sequence[int] | None) -> Iterator[None]:
        """Hold the choice of the pass before for one pass over `batch`, or have it choose where `follows` is None.

        rows: [N] int64, those that further drafts may come after. `follows`: for each sequence of a batch with one row
        each, which of `rows` of the pass before it comes after.
        """
        if follows is not None:
            assert self._rows is not None, "a further draft comes after another"
            self._given = choice_of_rows(self._chosen, self._rows[list(follows)], batch)
        try:
            yield
            assert self._newest is not None, "the head's layer asks its indexer"
            self._chosen = self._newest.chosen if len(rows) else None  # of a chunk it is large, and nothing reads it
            self._rows = rows
        finally:
            self._given = self._newest = None
