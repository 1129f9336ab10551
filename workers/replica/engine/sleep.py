"""The sleep of a replica: it gives its memory back and computes nothing, until an operator wakes it."""

from collections.abc import Collection
from pathlib import Path

from crossdock.workers.replica.engine.engine import Engine

TAGS = ("weights", "kv_cache")
_KEPT = "mode must be abort or wait: requests that are kept need their pages"


def given_up(engine: Engine) -> list[str]:
    """Return the tags of the memory that an engine is to take again before a step; none: the engine is awake."""
    model = engine.executor.model
    update = engine.executor.new_weights
    lacks = update is not None and update.are_given_up, model is not None and model.pool.is_asleep
    return [tag for tag, is_lacking in zip(TAGS, lacks, strict=True) if is_lacking]


class Sleep:
    """The memory that an engine and its other ranks have given up. The engine is paused meanwhile."""

    def __init__(self, engine: Engine, folder: Path | None, checkpoint: str) -> None:
        """`folder`: the weights of the start, None if they are in no file; `checkpoint`: their fingerprint."""
        self._engine = engine
        self._start = (folder, checkpoint)
        self._update = engine.executor.new_weights

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
        if model.device.type != "cpu":
            raise ValueError("level: replicas on GPUs do not sleep yet: steps recorded as graphs keep their addresses")
        if level == 2 and (reason := self._why_not_read()):
            raise ValueError(f"level must be 1: the weights cannot be read again: {reason}")

    def sleep(self, level: int) -> None:
        """Give up the pages, and at level 2 the weights. Belongs to the engine's thread, between two steps."""
        if self._engine.scheduler.table.requests():
            raise ValueError(_KEPT)
        self.check(level)
        if "kv_cache" not in self.lacks:
            self._give_up_pages()
        if level == 2 and self._update is not None and "weights" not in self.lacks:
            self._update.give_up()

    def needs_weights(self, tags: Collection[str]) -> bool:
        """Return whether the weights are missing and `tags` name them, or name nothing: all is taken."""
        return "weights" in (tags or TAGS) and "weights" in self.lacks

    def read(self, tags: Collection[str]) -> None:
        """Read the weights if `tags` name them and they are missing. May run in any thread, before `wake`.

        Raises:
            ValueError: a tag is none of `TAGS`; or the files are gone, or are others: the engine sleeps on.
        """
        if unknown := {*tags} - {*TAGS}:
            raise ValueError(f"tags has {sorted(unknown)[0]!r}; it may have {', '.join(TAGS)}")
        if self._update is not None and self.needs_weights(tags):
            folder, checkpoint = self._files
            if self._update.call("read", {"folder": str(folder)}) != checkpoint:
                raise ValueError(f"tags: {folder} has other weights than before: replace them with an update")

    def wake(self, tags: Collection[str]) -> None:
        """Take again what `tags` name, none for all, after `read` of the same `tags`. Belongs to the engine's thread.

        Weights that an update has read, or that `read` refused, are not those of `tags`: they are not put in place."""
        if self._update is not None and self.needs_weights(tags):
            self._update.put()
        if "kv_cache" in (tags or TAGS) and "kv_cache" in self.lacks:
            if self._engine.worker_group is not None:
                self._engine.worker_group.change_memory("take pages")
            self._engine.model.pool.wake()

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
        if engine.worker_group is not None:
            engine.worker_group.change_memory("give pages")
        model.pool.sleep()
