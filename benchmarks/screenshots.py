"""Make pictures of the dashboard: of a real server, under a real load. Needs Debian's chromium and chromium-driver.

    python benchmarks/screenshots.py                  # a minute: docs/dashboard.png, the picture in README
    python benchmarks/screenshots.py --replicas 16    # two minutes: benchmarks/records/dashboard-16.png
    python benchmarks/screenshots.py --replicas 64 --slower 40    # five minutes; needs 8 GiB of memory

One replica computes: four chats stream while prompts of 2,048 tokens arrive one after the other. Several replicas are
emulated, slowly enough for two cores, and the usual mix comes with four requests a second.
"""

import argparse
import asyncio
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests

from PIL import Image
from servers import ROOT, add_server_options, crossdock_server

from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference
from tests.cluster.api.routes.browser import Browser

LOAD_S = 18.0  # seconds of load before the first picture: more than the dashboard's window of 15 s
SIZE = (1200, 760)  # pixels
SIZE_OF_FLEET = (1200, 1100)
REPLICAS_AT_SPEED = 4  # that two cores carry as fast as an H100
PATIENCE_S = 300.0  # Chromium shares the cores with the fleet


def load(address: str) -> None:
    """Stream, while long prompts arrive one after the other, until the last of them has ended."""
    plan = Interference(long_prompts=6, long_prompt_tokens=2048, interval=1.5, quiet=3.0)
    sizes = {"output_tokens": 4000, "streams": 4}
    asyncio.run(run_bench(BenchOptions(url=address, workload="interference", interference=plan, **sizes)))


def load_of_fleet(address: str) -> None:
    """Send the usual mix to a fleet until the picture has been taken."""
    mix = replace(MIXES["chat-heavy"], rate=4.0)
    asyncio.run(run_bench(BenchOptions(url=address, workload="mix", mix=mix, duration=3 * LOAD_S)))


def take(browser: Browser, url: str, path: Path, size: tuple[int, int]) -> None:
    """Save a picture of the page, once it shows steps as they happen."""
    browser.resize(*size)
    browser.prefers("light")
    browser.open(url)
    browser.eventually(lambda: browser.text("#state").startswith("live"), PATIENCE_S)
    time.sleep(2)  # until the timeline has been drawn twice
    browser.screenshot(path)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the bytes, which git keeps
    print(path, f"{path.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1, help="how many; several are emulated")
    parser.add_argument("--slower", type=int, help="times that emulated devices are slowed down (default: by replicas)")
    add_server_options(parser, "screenshots", 8423)
    args = parser.parse_args()
    flags: list[str] = []
    path, size, send = ROOT / "docs" / "dashboard.png", SIZE, load
    if args.replicas > 1:
        times_slower = args.slower or max(1, args.replicas // REPLICAS_AT_SPEED)
        flags = [f"--pools=mixed={args.replicas}", f"--device=emulated:h100-8b*{times_slower}"]
        path, size = ROOT / "benchmarks" / "records" / f"dashboard-{args.replicas}.png", SIZE_OF_FLEET
        send = load_of_fleet
    with crossdock_server(args, *flags) as server:
        threading.Thread(target=send, args=(server.address,), daemon=True).start()
        time.sleep(LOAD_S)
        browser = Browser(PATIENCE_S)
        try:
            take(browser, f"{server.address}/dashboard", path, size)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
