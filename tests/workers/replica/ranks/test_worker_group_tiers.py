"""Pages that leave the pool of several ranks come back from the hosts' memory and from files, each rank's part to its
rank. A page of which one part is lost is computed."""

import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine import engine_loader
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.schedule.prefixes.tier_pages import PageKey
from tests.sweeps import shared_out
from tests.workers.architectures import build
from tests.workers.ranks import DIVISIONS, PROCESSES, Ranks, saved
from tests.workers.replica.engine.test_tiers import (
    MAX_MODEL_LEN,
    MODELS,
    PAGE_SIZE,
    PROMPTS,
    answers,
    offer_all,
    settle,
)
from tests.workers.replica.engines import generated, served
from tests.workers.worker_groups import engine_of_ranks, spec_of

HOST_BYTES = 16 << 20
NAMES = ["llama", "gemma3_text", "lfm2 conv"]  # the last have windows, and states


def settings_for(path: Path, num_pages: int, division: tuple[int, int]) -> dict[str, Any]:
    """Return settings by which every rank has some `num_pages` pages of its part."""
    whole = load_model(ModelSpec(str(path), "float32", MAX_MODEL_LEN)).layout(PAGE_SIZE).page_bytes
    return {
        "page_size": PAGE_SIZE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory": ByteSize(num_pages * whole // (division[0] * division[1])),
        "kv_cache_host_memory": ByteSize(HOST_BYTES),
    }


@pytest.mark.parametrize(("name", "division"), shared_out(len(DIVISIONS), NAMES, DIVISIONS))
def test_prompt_whose_pages_were_evicted_is_loaded_on_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    """The tokens of the second time are computed from pages of each rank: those of another page would be others."""
    module = build(name, MODELS[name])
    path = saved(module, tmp_path)
    prompts = PROMPTS[:4]
    expected = generated(module, prompts, 5)
    with engine_of_ranks(ranks, path, *division, **settings_for(path, 40, division)) as engine:
        try:
            tokens, cached = answers(engine, [*prompts, *prompts])
            assert engine.tiers is not None
            (host,) = engine.tiers.counts()
        finally:
            engine.tiers.close()
    assert tokens == expected * 2
    assert cached == [0] * len(prompts) + [88] * len(prompts)
    assert host.loaded > 0
    assert 0 < host.bytes <= HOST_BYTES, "of all ranks together"


TWO = (2, 1)  # tensor ranks, stages


def settings_with_files(path: Path, num_pages: int, division: tuple[int, int], folder: Path | str) -> dict[str, Any]:
    """Return settings by which pages go to files alone. `folder`: also the URL of an object store."""
    settings = settings_for(path, num_pages, division)
    return settings | {"kv_cache_host_memory": None, "kv_cache_files": f"{folder},1GiB"}


@contextmanager
def engine_with_files(
    ranks: Ranks, path: Path, division: tuple[int, int], folder: Path | str, num_pages: int = 60, **options: Any
) -> Iterator[Engine]:
    """Yield an engine of ranks whose tier is closed in the end."""
    settings = settings_with_files(path, num_pages, division, folder)
    with engine_of_ranks(ranks, path, *division, **settings, **options) as engine:
        try:
            yield engine
        finally:
            assert engine.tiers is not None
            engine.tiers.close()


def parts_in(folder: Path) -> list[list[Path]]:
    """Return the files of each rank's folder, those of one page at the same place."""
    own_folders = sorted(folder.iterdir())
    return [sorted(file for file in own.glob("*/*") if not file.name.startswith(".")) for own in own_folders]


@pytest.mark.parametrize(("name", "division"), shared_out(len(DIVISIONS), NAMES, DIVISIONS))
def test_ranks_that_start_again_find_their_parts_of_pages_and_other_divisions_find_none(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    module = build(name, MODELS[name])
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS[:2], 5)
    with engine_with_files(ranks, path, division, tmp_path / "kv") as engine:
        assert answers(engine, PROMPTS[:2]) == (expected, [0, 0])
        offer_all(engine)
    names = [[file.name for file in part] for part in parts_in(tmp_path / "kv")]
    assert len(names) == division[0] * division[1]
    assert names == names[:1] * len(names), "parts of a page have one name"
    with engine_with_files(ranks, path, division, tmp_path / "kv") as again:
        assert answers(again, PROMPTS[:2]) == (expected, [88, 88])
        assert again.tiers is not None
        (files,) = again.tiers.counts()
    assert files.loaded > 0
    assert files.missed == 0
    other = (1, 2) if division == TWO else TWO
    with engine_with_files(ranks, path, other, tmp_path / "kv") as unlike:
        assert answers(unlike, PROMPTS[:1]) == (expected[:1], [0])


def spoil(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def cut(file: Path) -> None:
    os.truncate(file, 200)


@pytest.mark.parametrize(("harm", "number"), shared_out(2, [Path.unlink, spoil, cut], [0, 1]))
def test_page_of_which_one_part_is_harmed_is_a_miss(
    ranks: Ranks, tmp_path: Path, harm: Callable[[Path], None], number: int
) -> None:
    """It is computed, and its other part is not loaded. Half of the pages are harmed, beginning with the first.

    `number`: of the folder. One is the driver's.
    """
    module = build("llama", {"num_hidden_layers": 2})
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS[:2], 5)
    with engine_with_files(ranks, path, TWO, tmp_path / "kv", num_pages=20) as engine:
        first, _ = answers(engine, PROMPTS[:2])
        for file in parts_in(tmp_path / "kv")[number][::2]:
            harm(file)
        second, cached = answers(engine, PROMPTS[:2])
        assert engine.tiers is not None
        assert engine.tiers.counts()[0].missed > 0
        assert engine.pages.counts().quarantined == 0
    assert first + second == expected * 2
    assert sum(cached) < 88 * 2


def test_page_that_lacks_a_part_at_the_start_is_not_looked_for(ranks: Ranks, tmp_path: Path) -> None:
    """One rank's folder is gone: no page counts, and none is missed. They are stored again, with all parts."""
    path = saved(build("llama", {"num_hidden_layers": 2}), tmp_path)
    with engine_with_files(ranks, path, TWO, tmp_path / "kv") as engine:
        expected, _ = answers(engine, PROMPTS[:1])
        offer_all(engine)
    before = parts_in(tmp_path / "kv")
    shutil.rmtree(sorted((tmp_path / "kv").iterdir())[1])
    with engine_with_files(ranks, path, TWO, tmp_path / "kv") as again:
        assert again.tiers is not None
        assert again.tiers.counts()[0].pages == 0
        assert answers(again, PROMPTS[:1]) == (expected, [0])
        assert again.tiers.counts()[0].missed == 0
        offer_all(again)
    assert parts_in(tmp_path / "kv") == before


def kill_at_the_third_rename(spec: ReplicaSpec, rank: int, address: WorkerGroupAddress) -> None:
    """Follow, until a third part is written and has no name yet."""
    rename, number = Path.rename, count(1)

    def rename_or_die(path: Path, target: Path) -> Path:
        if next(number) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.rename = rename_or_die  # type: ignore[method-assign, assignment]
    follow(spec, rank, address)


def test_page_whose_rank_was_killed_while_it_wrote_does_not_count(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("llama", {"num_hidden_layers": 2}), tmp_path)
    settings = settings_with_files(path, 60, TWO, tmp_path / "kv")
    spec, lost = spec_of(path, *TWO, **settings), queue.SimpleQueue[str]()
    group = WorkerGroup(spec, "127.0.0.1", lost.put)
    process = PROCESSES.Process(target=kill_at_the_third_rename, args=(spec, 1, group.address), daemon=True)
    process.start()
    try:
        engine = engine_loader.engine_of_ranks(group.load(), group, None)
        expected, _ = answers(engine, PROMPTS[:1])
        offer_all(engine)
        assert engine.tiers is not None
        assert engine.tiers.counts()[0].stored == 2, "the job of the killed rank ends, and no later page is stored"
        assert "its process has ended" in lost.get(timeout=240)
        engine.tiers.close()
    finally:
        group.close()
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(map(len, parts_in(tmp_path / "kv")))[0] == 2
    with engine_with_files(ranks, path, TWO, tmp_path / "kv") as again:
        assert again.tiers is not None
        assert again.tiers.counts()[0].pages == 2
        assert answers(again, PROMPTS[:1])[0] == expected
        assert again.tiers.counts()[0].missed == 0


def write_once_asked(spec: ReplicaSpec, rank: int, address: WorkerGroupAddress) -> None:
    """Follow, on a volume that takes no page until a file `go` is beside its folder."""
    write = FileTier.write
    go = Path(spec.engine.kv_files[0]).parent / "go"

    def write_later(tier: FileTier, key: PageKey, parts: list[memoryview]) -> set[PageKey]:
        ends = time.monotonic() + 240
        while not go.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        return write(tier, key, parts)

    FileTier.write = write_later  # type: ignore[method-assign, assignment]
    try:
        follow(spec, rank, address)
    finally:
        FileTier.write = write  # type: ignore[method-assign]


def test_steps_go_on_while_the_volume_of_another_rank_hangs(ranks: Ranks, tmp_path: Path) -> None:
    module = build("llama", {"num_hidden_layers": 2})
    path = saved(module, tmp_path)
    expected = generated(module, PROMPTS[:3], 5)
    with engine_with_files(ranks, path, TWO, tmp_path / "kv", num_pages=20, follower=write_once_asked) as engine:
        tiers = engine.tiers
        assert tiers is not None
        tokens = served(engine, PROMPTS[:3], 5)
        assert not tiers.is_idle
        assert tiers.counts()[0].stored == 0
        (tmp_path / "go").touch()
        settle(engine)
        assert tiers.counts()[0].stored > 0
        again, _ = answers(engine, PROMPTS[:3])
    assert tokens == again == expected


def test_folder_that_another_user_may_write_to_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = saved(build("llama", {"num_hidden_layers": 2}), tmp_path)
    with engine_with_files(ranks, path, TWO, tmp_path / "kv"):
        pass
    for own in sorted((tmp_path / "kv").iterdir()):
        own.chmod(0o777)
        with (
            pytest.raises(ValueError, match=r"kv_cache_files: .* its mode is 777"),
            engine_with_files(ranks, path, TWO, tmp_path / "kv"),
        ):
            pass
        own.chmod(0o700)
