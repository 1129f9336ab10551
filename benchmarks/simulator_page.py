"""Write docs/simulator.html: the page `/simulator` in one file that needs no server, with runs of the real scheduler.

    python benchmarks/simulator_page.py        # 20 s; again after a change of the scheduler, its costs or the page

tests/cluster/simulate/test_scenario_run.py compares the file with new runs.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from crossdock.cluster.simulate.scenario import Scenario
from crossdock.cluster.simulate.scenario_run import play

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "cluster" / "web"
PAGE = ROOT / "docs" / "simulator.html"
CHOICES: dict[str, list[Any]] = {  # in the order of the page's form
    "prompt_tokens": [4096, 16384],
    "num_prompts": [1],
    "num_streams": [8, 32],
    "max_num_batched_tokens": [512, 2048, 8192],
    "tpot_s": [0.05],
    "profile": ["h100-8b"],
}
POLICIES = ("adaptive", "fixed", "alternating", "whole")


def stored_runs() -> dict[str, Any]:
    """Return the choices of the page, and the run of each choice under the query that a server would get."""
    fields = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    asked = [{**each, "policy": policy} for each in fields for policy in POLICIES]
    return {"choices": CHOICES, "runs": {urlencode(each): play(Scenario(**each)) for each in asked}}


def page(runs: dict[str, Any]) -> str:
    """Return the HTML of the page with its styles, scripts and runs."""
    script = "\n".join((WEB / name).read_text() for name in ("api.js", "timeline.js", "simulator.js"))
    script = re.sub(r"^import .*\n|^export ", "", script, flags=re.MULTILINE)
    data = json.dumps(runs, separators=(",", ":"))
    head = f"<style>\n{(WEB / 'style.css').read_text()}</style>\n"
    head += f'<script type="application/json" id="runs">{data}</script>\n<script type="module">\n{script}</script>\n'
    html = re.sub(r"  <(link rel|script).*\n", "", (WEB / "simulator.html").read_text())
    return html.replace("</head>", f"{head}</head>")


if __name__ == "__main__":
    PAGE.write_text(page(stored_runs()))
