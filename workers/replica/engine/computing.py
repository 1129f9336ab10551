"""An engine whose steps a model computes: what `Executor` says of a loaded model."""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.workers.draft.drafter import new_drafter
from crossdock.workers.draft.head_drafter import HeadDrafter
from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.end_tokens import end_of_tokenizer
from crossdock.workers.model.grammar.compiler import GrammarCompiler
from crossdock.workers.model.memory.kv_memory import count_pages_that_fit
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.adapter_loader import AdapterLoader
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.executor import Executor
from crossdock.workers.replica.engine.speculation import Speculation
from crossdock.workers.replica.engine.step_sampler import StepSampler
from crossdock.workers.replica.engine.weight_update import WeightUpdate
from crossdock.workers.replica.ranks.pool_layout import choose_groups, held_layers, memory_of, pool_spec
from crossdock.workers.replica.ranks.rank_memory import RankMemory, change_on_all
from crossdock.workers.replica.ranks.rank_messages import AllocatePool, OpenFiles, RecordSteps
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.step_sizes import sized
from crossdock.workers.replica.tiers.object_tier import OBJECT_RATE, is_store
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_files import PageFiles, open_parts
from crossdock.workers.replica.tiers.page_thread import PageThread
from crossdock.workers.replica.tiers.tier_store import FILE_RATE, HOST_RATE, TierStore, slots_for
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams

logger = logging.getLogger("ray.serve")

_ROW_TILE = 128  # rows of a tile of cuBLAS's products on GPUs: 2,112 rows take the time of 2,176


def new_engine(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_dir: Path | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    worker_group: WorkerGroup | None = None,
    weights: str = "",
    step_deadline: Callable[[], StepDeadline] | None = None,
    fits_memory: bool = False,
) -> Engine:
    """Return an engine on one model, not calibrated yet.

    `tokenizer_dir` is needed for grammars, and names the tokenizer's end token. `worker_group`: the other ranks, where
    `model` is one rank's part. `weights` names the weights, for tiers whose files outlive the engine.
    `step_deadline`: of one rank's steps on a GPU; a worker group has its own. `fits_memory`: requests may be as long as
    the KV pages hold, where that is less than the model's context.

    Raises:
        ValueError: the model cannot be served with these settings; the message names the field.
    """
    config = _without_missing_head(sized(config, model), model)
    executor = _executor(model, config, tokenizer_dir, worker_group, weights, fits_memory=fits_memory)
    deadline = step_deadline if worker_group is None else worker_group.step_deadline
    return Engine(replace(executor, step_deadline=deadline), clock)


def _without_missing_head(config: EngineConfig, model: LoadedModel) -> EngineConfig:
    """Return the settings without speculation where nothing would be drafted for `model`: no answer changes."""
    speculative = config.speculative_config
    if speculative is None or (why := speculative.why_no_drafts(text_config(model.config).model_type)) is None:
        return config
    logger.warning("speculative_config is left out: %s", why)
    return config.model_copy(update={"speculative_config": None})


def _executor(
    model: LoadedModel,
    config: EngineConfig,
    tokenizer_dir: Path | None,
    worker_group: WorkerGroup | None,
    weights: str,
    *,
    fits_memory: bool,
) -> Executor:
    ends = model.eos_token_ids | end_of_tokenizer(tokenizer_dir, model.vocab_size)
    sampler = StepSampler(tuple(ends))
    speculative = config.speculative_config
    speculation: Speculation | None = None
    head: HeadDrafter | None = None
    if speculative is not None:  # before pages take all memory
        drafter = new_drafter(speculative, model)
        speculation = Speculation(speculative, drafter, sampler)
        if isinstance(drafter, HeadDrafter):
            if not drafter.reads_last_states:
                _check_eager(model, config)
            head = drafter
    if worker_group is None:  # else its ranks have chosen them together
        model = choose_groups(model, config)
    windows = [group.window for group in model.groups] or [None]
    state_pages = model.state_pages(config.page_size)
    needs = PageNeeds(config.page_size, windows, config.max_num_batched_tokens, state_pages)
    num_pages, max_model_len = _room(model, config, worker_group, needs, fits_memory=fits_memory)
    model = replace(model, max_model_len=max_model_len)
    model.allocate_pool(num_pages, config.page_size)
    tiers = open_tiers(model, config, weights, num_pages, worker_group)
    on_evict = None if tiers is None else tiers.evicted
    runner = _runner(model, config, worker_group)
    new_weights = NewWeights(model)
    if speculation is not None:
        speculation.policy.stop_at(runner.draft_room)
    return Executor(
        config,
        runner,
        sampler,
        GrammarCompiler(tokenizer_dir, model.vocab_size, ends),
        PagePool(
            num_pages,
            config.page_size,
            config.enable_prefix_caching,
            windows,
            state_pages,
            on_evict,
            config.new_page_events(),
        ),
        lambda: memory_of(model.pool.tensor),
        model.max_model_len,
        model.vocab_size,
        ends,
        is_ahead=_runs_ahead(model, config),
        model=model,
        check=lambda sampling: _check(model, sampling),
        spec_of=lambda name: _pool_spec(model, config, worker_group, num_pages, name),
        encoding=_new_encoding(model, config),
        why_text_alone=model.why_text_alone,
        cpu_kernels=model.kernels if model.device.type == "cpu" else "",
        speculation=speculation,
        head=head,
        adapters=None if model.adapters is None else AdapterLoader(model.adapters, worker_group),
        new_weights=WeightUpdate(new_weights, worker_group),
        change_memory=partial(change_on_all, RankMemory(model, new_weights, runner), worker_group),
        tiers=tiers,
        worker_group=worker_group,
        row_tile=_ROW_TILE if model.device.type == "cuda" else 1,
    )


def _check_eager(model: LoadedModel, config: EngineConfig) -> None:
    """Check that no step will be recorded. ValueError: steps would be."""
    if model.device.type == "cuda" and not config.enforce_eager:
        raise ValueError(
            "speculative_config: method eagle3 reads hidden states between layers, which CUDA graphs do not keep: set "
            "enforce_eager (--enforce-eager)"
        )


def _runner(model: LoadedModel, config: EngineConfig, worker_group: WorkerGroup | None) -> Runner:
    """Return the runner of the steps, after every rank has recorded its part of steps."""
    sizes = config.max_num_seqs, config.max_num_batched_tokens
    broadcast: Callable[[bytes], None] | None = None
    if worker_group is not None:
        broadcast = worker_group.run_step
        if not config.enforce_eager:
            worker_group.broadcast(RecordSteps(*sizes, config.most_drafts))  # ends only if this rank records too
    if config.enforce_eager:
        return Runner(model, config.page_size, broadcast)
    return Runner.recorded(model, config.page_size, *sizes, broadcast, most_drafts=config.most_drafts)


def _runs_ahead(model: LoadedModel, config: EngineConfig) -> bool:
    """Return whether steps begin before the tokens of the step before are known.

    Raises:
        ValueError: `async_scheduling` is on, and the model is divided into stages.
    """
    wanted = config.async_scheduling
    is_one_stage = model.part.position.num_stages == 1
    if wanted and not is_one_stage:
        raise ValueError("async_scheduling must be false or null for the stages of a pipeline")
    if config.speculative_config is not None:
        return False  # drafts continue the tokens of the step before
    return wanted if wanted is not None else is_one_stage and model.device.type == "cuda"


def _room(
    model: LoadedModel, config: EngineConfig, worker_group: WorkerGroup | None, needs: PageNeeds, *, fits_memory: bool
) -> tuple[int, int]:
    """Return how many KV pages every rank can hold, and the tokens of the longest request.

    `fits_memory`: the longest request may be shorter than the model's context.

    Raises:
        ValueError: there are fewer pages than one request needs.
    """
    budget = config.budget
    room = (
        worker_group.page_budget if worker_group is not None else count_pages_that_fit(model, budget, needs.page_size)
    )
    longest = model.max_model_len
    if fits_memory:
        longest = max(needs.longest_request(room.num_pages, longest), min(needs.page_size, longest))
        if longest < model.max_model_len:
            logger.warning("max_model_len: the KV pages hold %d of the %d tokens", longest, model.max_model_len)
    budget.check_one_request_fits(room.num_pages, room.page_bytes, needs, longest, model.device.type)
    return room.num_pages, longest


def _pool_spec(
    model: LoadedModel, config: EngineConfig, worker_group: WorkerGroup | None, num_pages: int, name: str
) -> PoolSpec:
    held = worker_group.held_by_rank if worker_group is not None else [held_layers(model)]
    return pool_spec(held, model.part.position.rank, model, name, config.page_size, num_pages)


def _check(model: LoadedModel, sampling: SamplingParams) -> None:
    """Refuse what the model cannot answer. InvalidField: names the field."""
    if sampling.pooling is not None and not model.tap.is_possible:
        reason = f"{model.config.model_type}: no hidden states can be taken out of this model"
        raise InvalidField(f"pooling: {reason}", "pooling")


def _new_encoding(model: LoadedModel, config: EngineConfig) -> Encoding | None:
    """Return the cache of a model's embeddings of pictures; None: the model takes none."""
    if model.encoder is None:
        return None
    model.encoder.clear()
    rows = int(config.mm_encoder_cache) // model.encoder.embedding_token_bytes
    return Encoding(rows, None, model.encoder.attends_both_ways)


def open_tiers(
    model: LoadedModel, config: EngineConfig, weights: str, num_pages: int, worker_group: WorkerGroup | None
) -> TierStore | None:
    """Return the tiers below the pool of a model; None: the settings ask for none. `worker_group`: the other ranks,
    which allocate their pools here, too.

    `weights` names the weights. Raises ValueError: a folder cannot be written to, or the memory is too small.
    """
    place, most_bytes = config.kv_files
    host_bytes = int(config.kv_cache_host_memory or 0)
    if not place and not host_bytes:
        if worker_group is not None:
            worker_group.broadcast(AllocatePool(num_pages, 0))
        return None
    pages = model.pool.by_page
    most_pages = max(model.state_pages(config.page_size), 1)
    page_bytes = pages.shape[1] if worker_group is None else worker_group.page_bytes
    if 0 < host_bytes < most_pages * page_bytes:
        raise ValueError(f"kv_cache_host_memory ({host_bytes}) must be at least {most_pages * page_bytes} bytes")
    num_slots = slots_for(host_bytes, page_bytes, most_pages)
    if worker_group is not None:
        worker_group.broadcast(AllocatePool(num_pages, num_slots))
    copies = PoolCopies(pages, num_slots, None if worker_group is None else worker_group.broadcast)
    model.pool.watch(copies.claim, copies.settle)
    files = None
    if place:
        assert weights, "files outlive the engine: their pages are of named weights"
        fingerprint = _fingerprint(model, config, worker_group, num_pages, weights)
        if worker_group is not None:
            worker_group.broadcast(OpenFiles(fingerprint))
        position = model.part.position
        own = open_parts(place, most_bytes, fingerprint, position.rank, position.size)
        files = PageFiles(own, copies, worker_group)
    return TierStore(
        PageThread(copies, files, most_pages),
        page_bytes,
        host_rate=HOST_RATE if host_bytes else None,
        file_rate=None if files is None else OBJECT_RATE if is_store(place) else FILE_RATE,
        most_pages=most_pages,
    )


def _fingerprint(
    model: LoadedModel, config: EngineConfig, worker_group: WorkerGroup | None, num_pages: int, weights: str
) -> bytes:
    """Return 16 bytes that differ where a page's bytes, or one rank's part of them, would mean something else."""
    spec = _pool_spec(model, config, worker_group, num_pages, weights)
    text = f"{spec.compatibility} {spec.page_bytes} {model.state_pages(config.page_size)}"
    if worker_group is not None:
        text += f" {spec.shards}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
