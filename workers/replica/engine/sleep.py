"""The sleep of a replica: it gives its memory back and computes nothing, until an operator wakes it."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from crossdock.workers.replica.engine.engine import Engine

if TYPE_CHECKING:  # an engine on an emulated device imports no torch
    from crossdock.workers.replica.ranks.rank_messages import MemoryChange

TAGS = ("weights", "kv_cache")
_KEPT = "mode must be abort or wait: requests that are kept need their pages"


def given_up(engine: Engine) -> list[str]:
    """Return the tags of the memory that an engine is to take again before a step; none: the engine is awake."""
    model = engine.executor.model
    update = engine.executor.new_weights
    lacks = update is not None and update.are_given_up, model is not None and model.pool.is_asleep
    return [tag for tag, is_lacking in zip(TAGS, lacks, strict=True) if is_lacking]


def level_of(engine: Engine) -> int:
    """Return the level of an engine's sleep. 0: awake; 1: all that is given up is pages, and what the host keeps."""
    lacks = given_up(engine)
    update = engine.executor.new_weights
    is_lost = "weights" in lacks and update is not None and not update.are_kept
    return 2 if is_lost else min(len(lacks), 1)


class Sleep:
    """The memory that an engine and its other ranks have given up. The engine is paused meanwhile."""

    def __init__(
        self,
        engine: Engine,
        folder: Path | None,
        checkpoint: str,
        withdraw: Callable[[], None] = lambda: None,
        reopen: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder`: the weights of the start, None if they are in no file; `checkpoint`: their fingerprint.

        `withdraw` closes the transfers of the engine's pages before their memory moves; `reopen` opens them again.
        """
        self._engine = engine
        self._withdraw = withdraw
        self._reopen = reopen
        self._start = (folder, checkpoint)
        self._update = engine.executor.new_weights
        self._has_forgotten_steps = False

    @property
    def lacks(self) -> list[str]:
        return given_up(self._engine)

    def check(self, level: int, mode: str = "wait") -> None:
        """Raise ValueError where this replica cannot sleep so; the message names the field and the reason."""
        model = self._engine.executor.model
        if level not in (1, 2):
            raise ValueError(f"level is {level}; it must be 1 (pages) or 2 (pages and weights)")
        if mode == "keep":
            raise ValueError(_KEPT)
        if model is None or self._update is None:
            raise ValueError("level: this replica has no KV pages in memory that it could give back")
        if level == 2 and (reason := self._why_not_read()):
            raise ValueError(f"level must be 1: the weights cannot be read again: {reason}")

    def sleep(self, level: int) -> None:
        """Give up the pages, and at level 2 the weights. Belongs to the engine's thread, between two steps.

        On a GPU level 1 gives up the weights, too: the host's memory has them until `wake`.
        """
        if self._engine.scheduler.table.requests():
            raise ValueError(_KEPT)
        self.check(level)
        if self.moves:
            self._change("forget steps")
            self._has_forgotten_steps = True
        if "kv_cache" not in self.lacks:
            self._give_up_pages()
        if (level == 2 or self.moves) and level_of(self._engine) < 2:
            self._change("keep weights" if level == 1 else "give weights")

    def needs_weights(self, tags: Collection[str]) -> bool:
        """Return whether the weights are missing and `tags` name them, or name nothing: all is taken."""
        return "weights" in (tags or TAGS) and "weights" in self.lacks

    def read(self, tags: Collection[str]) -> None:
        """Read the weights if `tags` name them and no memory has them. May run in any thread, before `wake`.

        Raises:
            ValueError: a tag is none of `TAGS`; or the files are gone, or are others: the engine sleeps on.
        """
        if unknown := {*tags} - {*TAGS}:
            raise ValueError(f"tags has {sorted(unknown)[0]!r}; it may have {', '.join(TAGS)}")
        if self._update is not None and self.needs_weights(tags) and not self._update.are_kept:
            folder, checkpoint = self._files
            if self._update.call("read", {"folder": str(folder)}) != checkpoint:
                raise ValueError(f"tags: {folder} has other weights than before: replace them with an update")

    def wake(self, tags: Collection[str]) -> None:
        """Take again what `tags` name, none for all, after `read` of the same `tags`. Belongs to the engine's thread.

        Weights that an update has read, or that `read` refused, are not those of `tags`: they are not put in place.
        ValueError: a GPU has not enough free memory for all of that. What it lacks is still given up."""
        if self._update is not None and self.needs_weights(tags):
            if self._update.are_kept:
                self._change("take weights")
            else:
                self._update.put()
        if "kv_cache" in (tags or TAGS) and "kv_cache" in self.lacks:
            self._change("take pages")
            self._reopen()
        self.record_steps()

    def record_steps(self) -> None:
        """Record the steps of a GPU again, once it has pages and weights. Belongs to the engine's thread."""
        if self._has_forgotten_steps and not self.lacks:
            self._change("record steps")
            self._has_forgotten_steps = False

    @property
    def moves(self) -> bool:
        """Return whether memory that is taken again has another address."""
        model = self._engine.executor.model
        return model is not None and model.pool.moves

    def _change(self, what: "MemoryChange") -> None:
        change = self._engine.executor.change_memory
        assert change is not None, "`check` refuses what has no memory"
        change(what)

    @property
    def _files(self) -> tuple[Path | None, str]:
        """The folder of the present weights, None if they are in none, and its fingerprint."""
        weights = self._engine.scheduler.weights
        if not weights.number:
            return self._start
        return (Path(weights.folder) if weights.folder else None), weights.id

    def _why_not_read(self) -> str:
        folder, _ = self._files
        if folder is None:
            return "a trainer has pushed them, so they are in no file" if self._start[0] else "they are in no file"
        assert self._update is not None
        return self._update.why_not()

    def _give_up_pages(self) -> None:
        engine = self._engine
        model = self._engine.model
        engine.pages.block_pool.clear_cache()
        engine.scheduler.encoding.clear()
        if model.encoder is not None:
            model.encoder.clear()
        if self.moves:
            self._withdraw()
        self._change("give pages")
