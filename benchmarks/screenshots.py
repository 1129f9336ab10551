"""Make the picture of the dashboard in README: of a real server, under a real load.

    python benchmarks/screenshots.py            # a minute; needs Debian's packages chromium and chromium-driver

Four chats stream while prompts of 2,048 tokens arrive one after the other. Writes docs/dashboard.png.
"""

import argparse
import asyncio
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests

from PIL import Image
from servers import ROOT, add_server_options, crossdock_server

from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference
from tests.cluster.api.routes.browser import Browser

LOAD_S = 18.0  # seconds of load before the first picture: more than the dashboard's window of 15 s
SIZE = (1200, 760)  # pixels


def load(address: str) -> None:
    """Stream, while long prompts arrive one after the other, until the last of them has ended."""
    plan = Interference(long_prompts=6, long_prompt_tokens=2048, interval=1.5, quiet=3.0)
    sizes = {"output_tokens": 4000, "streams": 4}
    asyncio.run(run_bench(BenchOptions(url=address, workload="interference", interference=plan, **sizes)))


def take(browser: Browser, url: str, path: Path) -> None:
    """Save a picture of the page, once it shows steps as they happen."""
    browser.resize(*SIZE)
    browser.prefers("light")
    browser.open(url)
    browser.eventually(lambda: browser.text("#state").startswith("live"), 60)
    time.sleep(2)  # until the timeline has been drawn twice
    browser.screenshot(path)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the bytes, which git keeps
    print(path, f"{path.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser, "screenshots", 8423)
    args = parser.parse_args()
    with crossdock_server(args) as server:
        url = f"{server.address}/dashboard"
        threading.Thread(target=load, args=(server.address,), daemon=True).start()
        time.sleep(LOAD_S)
        browser = Browser()
        try:
            take(browser, url, ROOT / "docs" / "dashboard.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
