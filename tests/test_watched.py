"""Every thread, pool, task and process has a watcher: its end is an error of what it worked on, or ends the process."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cluster", "router", "workers", "kvtransfer", "kernels")
STARTS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "Popen", "fork"}
STARTS |= {"create_task", "ensure_future", "run_in_executor", "to_thread", "run_coroutine_threadsafe"}
STARTS |= {"create_subprocess_exec", "create_subprocess_shell", "start_new_thread"}
DROPPED = {"submit"}  # of a pool, if the future that it returns is dropped


class Watcher(NamedTuple):
    """Names what sees the end of what is started. `where`: a function or class of the same file, or FILE:NAME."""

    where: str
    how: str


ASKED = "a caller waits for it, and gets its error"
HEALTH = "the health check ends the process, or has Serve replace it"
WATCHERS = {
    # FILE:FUNCTION WHAT
    "cluster/api/batches/results.py:Results.add create_task": Watcher(
        "Results._write", "all that wait for their records get the error"
    ),
    "cluster/api/batches/run.py:Run._run_lines create_task": Watcher("Run._until_done", ASKED),
    "cluster/api/batches/run.py:Run._validate create_task": Watcher("Run._until_done", ASKED),
    "cluster/api/batches/worker.py:BatchWorker._begin create_task": Watcher(
        "BatchWorker._ended", "its batch is run again after a while"
    ),
    "cluster/api/batches/worker.py:BatchWorker.start create_task": Watcher("BatchWorker.check", HEALTH),
    "cluster/api/heap.py:Heap.trim_later run_in_executor": Watcher("trim", "nothing depends on it: it calls C alone"),
    "cluster/api/http/http_guard.py:_while_connected ensure_future": Watcher(
        "_while_connected", "a connection that cannot be read is one whose client has left"
    ),
    "cluster/api/http/listener.py:listen create_task": Watcher("Listener.check", HEALTH),
    "cluster/api/http/tracing.py:Tracing.close Thread": Watcher("Tracing.close", "joined, and left after a while"),
    "cluster/api/http/tracing.py:Tracing._spawn create_task": Watcher("Tracing._forget", "logged"),
    "cluster/api/media/fetch.py:PictureFetcher.__init__ ThreadPoolExecutor": Watcher("PictureFetcher.fetch", ASKED),
    "cluster/api/media/fetch.py:PictureFetcher.fetch run_in_executor": Watcher("PictureFetcher.fetch", ASKED),
    "cluster/api/media/fetch.py:PictureFetcher._address ensure_future": Watcher("PictureFetcher._address", ASKED),
    "cluster/api/media/media.py:Media._processed create_task": Watcher("Media._end", ASKED),
    "cluster/api/media/processes.py:PictureProcesses.__init__ ThreadPoolExecutor": Watcher(
        "PictureProcesses.prepare", ASKED
    ),
    "cluster/api/media/processes.py:PictureProcesses._begin run_in_executor": Watcher(
        "PictureProcesses.prepare", ASKED
    ),
    "cluster/api/routes/responses.py:Responses._create_in_background create_task": Watcher(
        "Responses._create_in_background", "its response fails with the error"
    ),
    "cluster/api/text/choices.py:merge.begin create_task": Watcher("merge", "its error is an item of the queue"),
    "cluster/api/text/choices.py:merge create_task": Watcher("merge", "it only starts tasks, and is waited for"),
    "cluster/api/routes/simulator.py:Simulator.__init__ ThreadPoolExecutor": Watcher("Simulator.run", ASKED),
    "cluster/api/text/prompts.py:PromptEncoder.__init__ ThreadPoolExecutor": Watcher("PromptEncoder", ASKED),
    "cluster/bench/progress.py:progress Thread": Watcher("progress", "a display of the bench: joined at its end"),
    "cluster/bench/run.py:interfere ensure_future": Watcher("interfere", "a bench: gathered at its end"),
    "cluster/dispatch/connections.py:ReplicaConnections.spawn create_task": Watcher(
        "ReplicaConnections._forget", "logged; the two that run for ever are watched by `_lost` and by `check`"
    ),
    "cluster/dispatch/dispatcher.py:Dispatcher._submit ensure_future": Watcher("_answer", "an event of its attempt"),
    "cluster/dispatch/rollouts.py:Rollouts.start create_task": Watcher("Rollouts.check", HEALTH),
    "cluster/offline/llm.py:LLM.run ThreadPoolExecutor": Watcher("LLM.run", ASKED),
    "cluster/offline/local_engine.py:_worker_group_engine Process": Watcher(
        "workers/replica/ranks/worker_group.py:WorkerGroup._serve", "its connection ends, so the worker group is lost"
    ),
    "cluster/offline/local_replica.py:LocalReplica.generate create_task": Watcher(
        "LocalReplica._step", "all requests end with its error; the next one starts another"
    ),
    "cluster/serve/own_ray/forked_replicas.py:forked_replicas Popen": Watcher(
        "is_forking", "without it Ray starts workers itself, slower"
    ),
    "cluster/serve/own_ray/forked_replicas.py:fork_workers fork": Watcher("fork_workers", "Ray watches its workers"),
    "cluster/serve/scaler.py:Scaler.__init__ create_task": Watcher("Scaler.check_health", HEALTH),
    "cluster/serve/scaler.py:Scaler._join create_task": Watcher("Scaler.check_health", HEALTH),
    "cluster/serve/shared_adapters.py:SharedAdapters.start create_task": Watcher("SharedAdapters.check", HEALTH),
    "workers/model/grammar/compiler.py:GrammarCompiler.__init__ ThreadPoolExecutor": Watcher(
        "GrammarCompiler._compile_next", "every request has a future of its own, which gets the error"
    ),
    "workers/model/grammar/compiler.py:GrammarCompiler._request submit": Watcher(
        "GrammarCompiler._compile_next", "every request has a future of its own, which gets the error"
    ),
    "workers/model/weights/fingerprint.py:fingerprint ThreadPoolExecutor": Watcher("fingerprint", ASKED),
    "workers/replica/engine/adapter_loader.py:AdapterLoader.__init__ ThreadPoolExecutor": Watcher(
        "AdapterLoader._load", "its error is a load that failed"
    ),
    "workers/replica/engine/adapter_loader.py:AdapterLoader.begin submit": Watcher(
        "AdapterLoader._load", "its error is a load that failed"
    ),
    "workers/replica/ranks/worker_group.py:WorkerGroup.__init__ Thread": Watcher(
        "WorkerGroup._accept", "it accepts again after every error, until all ranks have joined"
    ),
    "workers/replica/ranks/worker_group.py:WorkerGroup._accept Thread": Watcher(
        "WorkerGroup._serve", "the worker group is lost"
    ),
    "workers/replica/ranks/step_deadline.py:StepDeadline.__init__ Thread": Watcher(
        "StepDeadline._watch", "it compares times alone"
    ),
    "workers/replica/serving/engine_thread.py:EngineThread.__init__ Thread": Watcher(
        "workers/replica/serving/replica.py:Replica.check_health", HEALTH
    ),
    "workers/replica/serving/follower.py:_listen Thread": Watcher(
        "_listen", "the rank ends, and with it the worker group"
    ),
    "workers/replica/serving/follower.py:_work Thread": Watcher("_load_adapter", "it reports its error to the driver"),
    "workers/replica/serving/kv_events.py:KVEventPublisher.__init__ Thread": Watcher(
        "KVEventPublisher._run", "it logs every error and goes on; readers see a gap"
    ),
    "workers/replica/serving/model_start.py:ModelStart._load_worker_group Thread": Watcher(
        "ModelStart._lost", "the start fails with the reason"
    ),
    "workers/replica/serving/model_start.py:ModelStart._start_followers create_task": Watcher(
        "ModelStart._watch", "it watches a rank, whose end is the end of the replica"
    ),
    "workers/replica/serving/outlet.py:Outlet._stream create_task": Watcher(
        "Outlet._stream", "the stream ends, which its ingress sees"
    ),
    "workers/replica/serving/outlet.py:Outlet._hear create_task": Watcher("Outlet._answer", "the error is the answer"),
    "workers/replica/tiers/object_tier.py:ObjectTier.__init__ ThreadPoolExecutor": Watcher("ObjectTier.read", ASKED),
    "workers/replica/tiers/page_thread.py:PageThread.__init__ Thread": Watcher(
        "workers/replica/serving/engine_thread.py:EngineThread.is_alive", HEALTH
    ),
    "workers/replica/tiers/part_keeper.py:PartKeeper.open Thread": Watcher(
        "PartKeeper._run", "every error is an answer; without one, the log of the driver names a volume that is silent"
    ),
    "workers/sandbox/limited_child.py:run_limited fork": Watcher("run_limited", "its parent waits for it"),
    "workers/sandbox/sandbox.py:Sandbox.start Popen": Watcher("Sandbox.ask", "there is no answer: it is started again"),
    "kvtransfer/dock.py:Dock.__init__ Thread": Watcher(
        "workers/replica/serving/engine_thread.py:EngineThread.is_alive", HEALTH
    ),
    "kernels/cpu/huge_pages.py:MemoryTaker.__init__ Thread": Watcher(
        "MemoryTaker.wait", "joined; where it ends early, steps take the memory"
    ),
}


def starts_in(name: str, text: str) -> Iterator[str]:
    """Yield `FILE:FUNCTION WHAT` for each place that starts something and does not wait for it in the same expression.

    A task of a `TaskGroup` has the group for a watcher.
    """
    tree = ast.parse(text)
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    items = [item for node in ast.walk(tree) if isinstance(node, ast.AsyncWith) for item in node.items]
    groups = {
        item.optional_vars.id
        for item in items
        if "TaskGroup" in ast.unparse(item.context_expr) and isinstance(item.optional_vars, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            what = node.attr if isinstance(node, ast.Attribute) else node.id
            parent = above[node]
            is_call = isinstance(parent, ast.Call) and parent.func is node
            if is_call and what in STARTS | DROPPED:
                is_awaited = isinstance(above[parent], ast.Await)
                is_grouped = isinstance(node, ast.Attribute) and ast.unparse(node.value) in groups
                is_kept = what in DROPPED and not isinstance(above[parent], ast.Expr)
                if not (is_awaited or is_grouped or is_kept):
                    yield f"{name}:{_function(above, node)} {what}"
            elif not is_call and what == "create_task":  # as an argument: it is called elsewhere
                yield f"{name}:{_function(above, node)} {what}"


def _function(above: dict[ast.AST, ast.AST], node: ast.AST) -> str:
    names = list[str]()
    while (node := above.get(node, node)) in above:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
    return ".".join(names[::-1])


def defined_in(path: Path) -> set[str]:
    """Return the names of functions and classes, with those that they are in."""
    tree = ast.parse(path.read_text())
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {f"{_function(above, each)}.{each.name}".strip(".") for each in ast.walk(tree) if isinstance(each, kinds)}


def test_whatever_is_started_has_a_watcher() -> None:
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = {start for path in files for start in starts_in(str(path.relative_to(ROOT)), path.read_text())}
    unwatched = sorted(found - set(WATCHERS))
    assert not unwatched, (
        f"name in WATCHERS who sees the end of each, after you have made sure that it is seen: {unwatched}"
    )
    assert not (gone := sorted(set(WATCHERS) - found)), f"these start nothing any more: {gone}"


def test_watchers_exist() -> None:
    for start, watcher in WATCHERS.items():
        file, _, name = watcher.where.rpartition(":")
        path = ROOT / (file or start.partition(":")[0])
        assert name in defined_in(path), f"{start} is watched by {watcher.where}, which is not there"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("asyncio.create_task(run())", ["create_task"]),
        ("kept = loop.create_task(run())", ["create_task"]),
        ("await asyncio.create_task(run())", []),
        ("threading.Thread(target=run).start()", ["Thread"]),
        ("await loop.run_in_executor(None, run)", []),
        ("reading = loop.run_in_executor(None, run)", ["run_in_executor"]),
        ("pool.submit(run)", ["submit"]),
        ("answer = pool.submit(run)", []),
        ("task = context.run(loop.create_task, run())", ["create_task"]),
        ("async with asyncio.TaskGroup() as group:\n            group.create_task(run())", []),
    ],
)
def test_place_that_starts_something_is_found(text: str, found: list[str]) -> None:
    places = starts_in("file.py", f"class Room:\n    async def start(self):\n        {text}")
    assert [*places] == [f"file.py:Room.start {what}" for what in found]
