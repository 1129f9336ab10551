"""Does any stream break, hang or get a wrong token when everything around it fails? Is anything left afterwards?

    python benchmarks/chaos/run.py --streams 4000 --faults kill,ingress,pause,clients,messages --seed 1

Prefill and decode replicas run on Ray nodes of their own on this machine (`ray.cluster_utils.Cluster`: a raylet each),
two ingresses on the head's. Clients stream without a pause, and compare every token with the answer that an undisturbed
engine gave to the same prompt beforehand. Faults overlap. Prints how often each kind happened, what became of the
streams, and what is left at the end; exits with 1 if anything is wrong.

| kind | faults |
|---|---|
| kill | `kill -9` of a prefill replica, a decode replica, or one of each |
| ingress | `kill -9` of an ingress, whose streams are cut; an ingress stopped (SIGSTOP), whose streams must survive |
| pause | replicas stopped for less and for more than the 10 s after which they count as lost |
| clients | clients that vanish, and clients that read slowly |
| messages | transfer messages that are lost or late |
| answers | one leg of a placement refused, or taken but answered after 12 s |
| hostile | requests that every server should refuse |
| poison | requests that kill the replica that gets them |
| nodes | a node of replicas lost; Ray's GCS killed and restarted |
| changes | rolling upgrades, drained replicas, flipped roles |
| upgrades | rolling upgrades alone, one after the other |
| batches | two batches at a time of the same requests beside the streams, some of them cancelled |
| adapters | adapters unloaded and loaded again; requests name six of them and the base model, replicas hold two |
| tiers | files of pages that are changed, cut or removed; host memory and files below pools that are small |

`--requests agents` streams the turns of agents, which repeat the turns before: pages are loaded from tiers, and fetched
from other replicas. `conversations`: chats (with `n`), responses and messages, with reasoning, tool calls and grammars.
What the deltas of each add up to must be what an undisturbed engine wrote, with ids that do not change within the
stream. `pictures`: chats with pictures; `mixed`: both. `--emulated h100-8b*4 --prefill 12 --decode 20` disturbs a fleet
of emulated devices, as large as memory allows.

Overload is a matter of settings: `--clients 48 --set engine.kv_cache_memory=768KiB` fills both pools, and with
`--set engine.admission=reject` and short promises requests are refused.
"""

import argparse
import collections
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from crossdock.cluster.serve.ray_environment import ENVIRONMENT
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES

os.environ.update(
    ENVIRONMENT,
    RAY_AUTH_MODE="disabled",
    RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.1",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)
sys.path += [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # for tables, and tests

import batches
import faulty
import streams
from faults import FAULTS, Chaos, rows
from fleet import NodeFleet, make_adapters, tiny_model
from streams import Clients, Habits, make_cases
from tables import markdown

_OTHERS = ("clients", "messages", "answers", "hostile", "batches")  # not begun by the loop below
_CLIENT_FAULTS = ("left by the client", "complete, read slowly", "429 before the first token", "hostile, answered")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600, help="begin no stream and no fault later than this")
    parser.add_argument(
        "--faults", default="kill,ingress,pause,clients,messages", help="kinds, joined by commas; or none"
    )
    parser.add_argument(
        "--requests", choices=("completions", "agents", "conversations", "pictures", "mixed"), default="completions"
    )
    parser.add_argument("--cases", type=int, default=400, help="completions with known answers")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults of processes, on average")
    parser.add_argument(
        "--hung", type=float, default=streams.HUNG_S, help="seconds without a byte after which a stream counts as hung"
    )
    parser.add_argument("--clients", type=int, default=24, help="streams at a time")
    parser.add_argument("--prefill", type=int, default=2, help="prefill replicas")
    parser.add_argument("--decode", type=int, default=3, help="decode replicas")
    parser.add_argument("--emulated", metavar="PROFILE", help="replicas take this profile's seconds: h100-8b*4")
    parser.add_argument("--lost", type=float, default=0.005, help="share of transfer messages that are lost")
    parser.add_argument("--late", type=float, default=0.02, help="share of transfer messages that are late")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the application")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.faults = [] if given.faults == "none" else given.faults.split(",")
    if unknown := set(given.faults) - {*FAULTS, *_OTHERS}:
        parser.error(f"--faults: {', '.join(sorted(unknown))}: there are {', '.join([*FAULTS, *_OTHERS])}")
    for kind in ("adapters", "batches"):
        if kind in given.faults and (given.emulated or given.requests not in ("completions", "agents")):
            parser.error(f"--faults {kind}: with --requests completions or agents, and without --emulated")
    if given.emulated and (given.requests not in ("completions", "agents") or "tiers" in given.faults):
        parser.error("--emulated: with --requests completions or agents, and without tiers")
    return given


def settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the settings of the application, by dotted path. `folder`: for files."""
    chosen: dict[str, Any] = {
        "engine.kv_cache_memory": "32MiB",
        "engine.admission": "queue",
        # By default a batch request may wait for ten minutes: no client could tell that from a hang.
        "engine.slo_classes": [
            each.model_dump() | ({"ttft_s": 20.0} if each.name == "batch" else {}) for each in DEFAULT_CLASSES
        ],
        "engine.starvation_s": 20.0,
        "router.shipping": "always",  # by default the router ships only where that is predicted to be faster
        "transfer.transport": "tcp",
    }
    if given.emulated:
        chosen |= {"engine.kv_cache_memory": None, "model.dtype": "auto", "pools.*.emulated": given.emulated}
    if "adapters" in given.faults:
        chosen |= {"engine.enable_lora": True, "engine.max_loras": 2, "http.lora_folder": f"{folder / 'adapters'}"}
        chosen["model.lora_modules"] = {path.name: f"{path}" for path in (folder / "adapters").iterdir()}
    if "batches" in given.faults:
        chosen["http.batch_folder"] = f"{folder / 'batches'}"
    if "tiers" in given.faults:  # pools are small, so that pages are evicted
        tiers = {"host_memory": "1MiB", "files": f"{folder / 'pages'},8MiB", "memory": "3MiB"}
        chosen |= {f"engine.kv_cache_{name}": value for name, value in tiers.items()}
    return chosen | {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in given.set)}


def disturb(chaos: Chaos, given: argparse.Namespace, began: float) -> None:
    """Begin faults of processes until the clients are done, or the time is over."""
    shares = [choice for kind in given.faults if kind in FAULTS for choice in FAULTS[kind]]
    shown = time.monotonic()
    while not chaos.clients.is_done and time.monotonic() - began < given.seconds:
        pause = chaos.rng.expovariate(1 / given.every)
        while shares and not chaos.begin(chaos.rng.choices(shares, [share for share, _ in shares])[0][1]):
            time.sleep(0.2)
            if chaos.clients.is_done:
                break
        time.sleep(min(pause, 3 * given.every))
        if time.monotonic() - shown > 15:
            shown = time.monotonic()
            print(progress(chaos, shown - began), flush=True)


def progress(chaos: Chaos, seconds: float) -> str:
    ended, problems = chaos.clients.ended, len(chaos.clients.problems) + len(chaos.problems)
    return (
        f"{seconds:5.0f} s: {ended} streams ({ended / seconds:.1f} a second), {chaos.counts.total()} faults, "
        f"{problems} problems, {dict(chaos.fleet.listed())}"
    )


def main() -> None:
    given = parse()
    folder = Path(tempfile.mkdtemp(prefix="cd-chaos-", dir="/tmp"))
    try:
        sys.exit(run(given, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(given: argparse.Namespace, folder: Path) -> bool:
    """Return whether anything went wrong."""
    began, rng = time.monotonic(), random.Random(given.seed)
    streams.HUNG_S = given.hung
    counted = folder / "counts"
    counted.mkdir()
    does_messages, does_answers = "messages" in given.faults, "answers" in given.faults
    faulty.Disturbance(
        str(counted),
        lost=given.lost * does_messages,
        late=given.late * does_messages,
        refused=0.02 * does_answers,
        unanswered=0.002 * does_answers,
    ).to_environment()
    model, cases = questions(given, folder / "model")
    chosen = settings(given, folder)
    print(f"{len(cases)} answers known after {time.monotonic() - began:.0f} s", flush=True)
    pools = {"prefill": given.prefill, "decode": given.decode}
    fleet = NodeFleet(folder, model, pools, chosen)
    try:
        fleet.wait_until_whole()
        print(f"whole after {time.monotonic() - began:.0f} s", flush=True)
        does_clients, does_hostile = "clients" in given.faults, "hostile" in given.faults
        may_refuse = chosen["engine.admission"] == "reject" or does_answers
        may_suspect = not {"kill", "nodes", "poison"}.isdisjoint(given.faults)
        odd = 0.1 * does_clients, 0.05 * does_clients, 0.02 * does_hostile
        habits = Habits(*odd, may_refuse, may_suspect, "adapters" in given.faults)
        clients = Clients(fleet.port, cases, habits, given.seed, given.streams)
        chaos = Chaos(fleet, clients, rng)
        beside = batches.Batches(fleet.url, clients, given.seed)
        began = time.monotonic()
        clients.start(given.clients)
        beside.start(2 if "batches" in given.faults else 0)
        try:
            disturb(chaos, given, began)
        finally:
            chaos.wait_for_pauses()
            clients.stop()
            beside.stop()
        seconds = time.monotonic() - began
        fleet.wait_until_whole()
        left = fleet.wait_until_idle()
    finally:
        leftovers = fleet.close()
    leftovers += batches.left_in(folder / "batches")
    return report(chaos, beside, faulty.counts(counted), left, leftovers, seconds)


def questions(given: argparse.Namespace, folder: Path) -> tuple[Path, Sequence[Any]]:
    """Make a model in a folder. Return the folder, and requests with known answers."""
    if given.requests in ("completions", "agents"):
        model = tiny_model(folder)
        turns, adapters = given.requests == "agents", []
        if "adapters" in given.faults:
            adapters = make_adapters(model, folder.parent / "adapters")
        return model, make_cases(
            model, given.cases, given.seed, are_turns=turns, emulated=given.emulated, adapters=adapters
        )
    # Late: they import the tests' small models.
    from conversations import agent_tokenizer, make_agent, make_conversations
    from picture_chats import make_picture_chats

    from tests.cluster.serve.pools.picture_server import save_picture_model

    if given.requests == "conversations":
        model = tiny_model(folder, agent_tokenizer())
        return model, make_conversations(model, 120, given.seed)
    is_mixed = given.requests == "mixed"
    folder.mkdir(parents=True)
    save_picture_model(folder, make_agent if is_mixed else None)
    conversations = make_conversations(folder, 120, given.seed) if is_mixed else []
    return folder, [*conversations, *make_picture_chats(folder, 60, given.seed)]


def report(
    chaos: Chaos,
    beside: batches.Batches,
    inside: dict[str, int],
    left: dict[str, int],
    leftovers: list[str],
    seconds: float,
) -> bool:
    """Print the tables. Return whether anything went wrong."""
    clients = chaos.clients
    others = inside | {
        f"client: {name}": count for name, count in clients.outcomes.items() if name.startswith(_CLIENT_FAULTS)
    }
    others |= {"batch cancelled": beside.cancelled} if beside.cancelled else {}
    problems = clients.problems + chaos.problems + beside.problems
    outcomes = clients.outcomes + beside.outcomes
    print("\n" + markdown([("fault", "times", "whole again, median", "longest"), *rows(chaos, others)]))
    print(markdown([("streams and lines", "count"), *([name, str(count)] for name, count in sorted(outcomes.items()))]))
    gaps = sorted(clients.gaps) or [0.0]
    hung = sum("hung" in problem for problem in problems)
    print(
        f"{sum(others.values()) + chaos.counts.total()} faults, {clients.began} streams ({clients.ended} attempts) "
        f"in {seconds:.0f} s ({clients.began / seconds:.1f} a second), {len(problems) - hung} broken, {hung} hung; "
        f"longest pause of a stream: p50 {gaps[len(gaps) // 2]:.2f} s, p99 {gaps[int(len(gaps) * 0.99)]:.1f} s, "
        f"max {gaps[-1]:.1f} s; left: {left}, {leftovers or 'no process, port or shared memory'}"
    )
    for problem, count in collections.Counter(problems).most_common(20):
        print(count, problem[:300])
    return bool(problems or any(left.values()) or leftovers)


if __name__ == "__main__":
    main()
