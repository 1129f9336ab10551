"""A headless Chromium, driven over the WebDriver protocol by plain HTTP."""

import base64
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.ports import free_port
from tests.waiting import PATIENCE_S, eventually

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
REASON = "needs a browser: apt-get install chromium chromium-driver"
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1280,1100"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element


class Browser:
    """One window. Every method is a request to chromedriver."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        """Start Chromium. A request to it, such as the opening of a page, may take `patience_s` seconds."""
        port = free_port()
        self._profile = tempfile.mkdtemp(prefix="cd-browser-")
        command = ["chromedriver", f"--port={port}", "--log-level=OFF"]
        environment = os.environ | {"HOME": self._profile}  # Chromium and its libraries write there
        self._driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=patience_s)
        self._session = ""
        arguments = [*ARGUMENTS.split(), f"--user-data-dir={self._profile}"]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        deadline = time.monotonic() + PATIENCE_S
        while not self._session:
            try:
                made = self._http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            except httpx.ConnectError:
                assert time.monotonic() < deadline, "chromedriver does not come up"
                time.sleep(0.05)
                continue
            assert "sessionId" in made, made
            self._session = made["sessionId"]

    def close(self) -> None:
        self._http.delete(f"/session/{self._session}")
        self._http.close()
        self._driver.terminate()
        self._driver.wait(240)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _post(self, what: str, **body: Any) -> Any:
        answer = self._http.post(f"/session/{self._session}/{what}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function and return its result."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def type(self, selector: str, keys: str) -> None:
        found = self._post("element", using="css selector", value=selector)[ELEMENT]
        self._post(f"element/{found}/value", text=keys)

    def click(self, selector: str) -> None:
        """Click an element. Where the page has replaced the element since it was found, the new one is clicked."""

        def is_clicked() -> bool:
            found = self._post("element", using="css selector", value=selector)[ELEMENT]
            answer = self._http.post(f"/session/{self._session}/element/{found}/click", json={}).json()["value"]
            is_stale = isinstance(answer, dict) and answer.get("error") == "stale element reference"
            assert is_stale or answer is None, answer
            return not is_stale

        self.eventually(is_clicked)

    def prefers(self, scheme: str) -> None:
        """Set the preferred colour scheme, `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._post("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in pixels, also below the least width of a window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._post("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)

    def complaints(self) -> list[str]:
        """Return the console's entries since the last call: errors of scripts, the network and the security policy."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._http.get(f"/session/{self._session}/screenshot").json()["value"]))

    def eventually(self, holds: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        eventually(holds, lambda: f"did not come true: {self.text('body')[:1000]}", seconds)
