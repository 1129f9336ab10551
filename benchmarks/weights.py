"""Measure how long new weights take to be read and put in place, by source: seconds for each GB.

Usage: python benchmarks/weights.py [--repeats 5] [MODEL]. One rank on this machine's CPU, in its own dtype; no requests
run. The sources are read in turn. CPU seconds are of all threads: other work disturbs them less.
"""

import argparse
import threading
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from crossdock.cluster.serve.rollouts import arrays_of
from crossdock.workers.model.checksums import checksums_in
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.replica.engine.weight_update import WeightUpdate
from crossdock.workers.replica.ranks.rank_network import listen_on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or hub name; default: the embedded model")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    disable_progress_bar()
    path = resolve_model(args.model)
    model = load_model(ModelSpec(str(path)))
    update = WeightUpdate(NewWeights(model), None)
    source = load_model(ModelSpec(str(path), attention_backend="torch")).module
    tensors = [(name, tensor.detach()) for name, tensor in source.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in tensors)
    print(f"{path.name}: {size / 1e9:.3f} GB, {model.dtype}, products by {model.kernels or 'transformers'}")

    def from_folder() -> None:
        update.call("read", {"folder": str(path)})

    def from_objects() -> None:
        update.read_arrays(arrays_of(tensors))

    def from_group() -> None:
        sending = threading.Thread(target=lambda: [group.broadcast(each, 0).wait() for _, each in tensors])
        sending.start()
        update.call("start", {})
        dtypes = [str(each.dtype).removeprefix("torch.") for _, each in tensors]
        info = {"names": [name for name, _ in tensors], "dtype_names": dtypes}
        update.call("receive", {"update_info": info | {"shapes": [list(each.shape) for _, each in tensors]}})
        sending.join()
        update.call("read", {"folder": ""})

    with listen_on("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    joining = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    join = threading.Thread(target=lambda: update.call("join", {"init_info": joining, "first": 0}))
    join.start()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroupGloo(store, 0, 2, timedelta(minutes=5))
    join.join()
    # Seconds, CPU seconds, and seconds between two steps.
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for _ in range(args.repeats):
        for name, read in (("folder", from_folder), ("objects", from_objects), ("gloo", from_group)):
            began, began_cpu = time.perf_counter(), time.process_time()
            read()
            is_read, is_read_cpu = time.perf_counter(), time.process_time()
            update.put()
            found[name].append((is_read - began, is_read_cpu - began_cpu, time.perf_counter() - is_read))
    began_cpu = time.process_time()
    checksums_in(path)
    of_sent, began_cpu = time.process_time() - began_cpu, time.process_time()
    update.call("check", {})
    of_held = time.process_time() - began_cpu
    for name, measured in found.items():
        seconds, cpu, stop = (min(each) for each in zip(*measured, strict=True))
        per_gb = f"{seconds / size * 1e9:.2f} s/GB, {cpu / size * 1e9:.2f} CPU s/GB"
        print(f"{name}: read {seconds:.2f} s ({per_gb}), between two steps {1000 * stop:.1f} ms")
    costs = f"{of_sent / size * 1e9:.2f} CPU s/GB of tensors as sent, {of_held / size * 1e9:.2f} as steps read them"
    print(f"checksums, which every read includes: {costs}")


if __name__ == "__main__":
    main()
