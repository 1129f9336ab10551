"""The rows file of a GPU run: JSON lines, appended as soon as something is measured, so that no crash loses a figure.

A case writes a line when it begins and a line with its result: `figures`, `error` or `skipped`. Files of several
machines or calls may be concatenated: the last result of a case counts.
"""

import json
import time
from pathlib import Path
from typing import Any, TypeAlias

Figures: TypeAlias = dict[str, Any]
Line: TypeAlias = dict[str, Any]


class Rows:
    """The lines of one file, and the lines that this run adds. Several processes may append, one after the other."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path, run

    def begin(self, section: str, case: str, limit_s: float) -> None:
        """Note that a case begins. A case that takes longer than `limit_s` is ended by the process that watches."""
        self._append({"section": section, "case": case, "began": time.time(), "limit_s": limit_s})

    def end(self, section: str, case: str, seconds: float, **result: Any) -> Line:
        """Write the result of a case: one of `figures`, `error` and `skipped`. Returns the line."""
        line = {"section": section, "case": case, "seconds": round(seconds, 2), **result}
        self._append(line)
        return line

    def results(self) -> dict[tuple[str, str], Line]:
        """Return the last result of each case, in the order in which the cases were first measured.

        Figures are not replaced by a later error.
        """
        found: dict[tuple[str, str], Line] = {}
        for line in self._lines():
            key = line["section"], line["case"]
            if "began" not in line and ("figures" in line or "figures" not in found.get(key, {})):
                found[key] = line
        return found

    def figures(self, section: str, case: str) -> Figures:
        """Return the figures of a case; none if it has not been measured."""
        figures: Figures = self.results().get((section, case), {}).get("figures", {})
        return figures

    def is_done(self, section: str, case: str) -> bool:
        """Return whether the case has figures, or has been tried in this run: it is not measured again."""
        line = self.results().get((section, case), {})
        return "figures" in line or line.get("run") == self._run

    def seconds_of(self, section: str) -> float:
        """Return the seconds that the section's cases have taken in this run."""
        return sum(line.get("seconds", 0.0) for line in self._lines() if self._is_here(line, section))

    def open_case(self) -> Line | None:
        """Return the line of the case that has begun in this run and has no result; None: every case has one."""
        found: dict[tuple[str, str], Line] = {}
        for line in self._lines():
            if line["run"] == self._run:
                key = line["section"], line["case"]
                found.pop(key, None)
                if "began" in line:
                    found[key] = line
        return next(iter(found.values()), None)

    def _is_here(self, line: Line, section: str) -> bool:
        return bool(line["run"] == self._run and line["section"] == section)

    def _append(self, line: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**line, "run": self._run}) + "\n"
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:  # a process that was killed may have left half a line
            file.write("\n" * torn + text)

    def _lines(self) -> list[Line]:
        try:
            texts = self.path.read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for text in texts:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        return found
