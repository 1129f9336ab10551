"""Turn a rows file into Markdown for a record: what a GPU run must show, met or not, and every figure."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu.rows import Figures, Line, Rows
from tables import cell, markdown

MODEL = "Llama-3.1-8B"


@dataclass(frozen=True, slots=True)
class Goal:
    """A claim that a GPU run must prove. `value` reads the figures of one case; NaN counts as not met."""

    text: str
    section: str
    case: str  # how its name begins
    required: str
    value: Callable[[Figures, Rows], float]
    is_met: Callable[[float], bool]


def _faster(figures: Figures, rows: Rows) -> float:
    """Return our tokens per second over those of another engine."""
    return float(rows.figures("engine", "throughput, ahead").get("tokens_per_s", "nan")) / figures["tokens_per_s"]


def _freed(figures: Figures) -> float:
    return float("nan") if figures["answers_that_differ"] else float(figures["freed_share"])


GOALS = [
    Goal("a decode step, 64 x 1,024, ahead, over its bytes at the measured bandwidth", "engine",
         f"{MODEL}: decode 64 x 1024",
         "≤ 1.2", lambda row, _: row["ahead_over_least"], lambda value: value <= 1.2),
    Goal("a prefill of 8,192, share of the measured peak of products", "engine", f"{MODEL}: prefill 8192",
         "≥ 0.6", lambda row, _: row["of_peak"], lambda value: value >= 0.6),
    Goal("chunks of 2,048 beside 64 decodes, share of the prefill's tokens per second", "engine",
         f"{MODEL}: chunks of 2048 beside 64 decodes",
         "≥ 0.95", lambda row, _: row["of_prefill"], lambda value: value >= 0.95),
    Goal("p99 gap of 64 streams under prompts of 32,768, over their class's target", "engine", "gaps",
         "≤ 1.25", lambda row, _: row["of_tpot"], lambda value: value <= 1.25),
    Goal("a chunk of 64 at 122,880 beside 64 streams, ms on an H200", "engine",
         f"{MODEL}: chunk of 64 at 122880 beside 64 decodes",
         "≤ 22", lambda row, _: row["ms"], lambda value: value <= 22),
    Goal("a decode step of one stream, ahead, over its bytes", "engine", f"{MODEL}: decode 1 x 1024",
         "≤ 1.45", lambda row, _: row["ahead_over_least"], lambda value: value <= 1.45),
    Goal("FP8 by rows over bfloat16: a decode step of 64 x 1,024", "packed weights", "FP8 by rows: decode 64 x 1024",
         "≤ 0.75", lambda row, _: row["of_plain"], lambda value: value <= 0.75),
    Goal("FP8 by rows over bfloat16: a prefill of 8,192", "packed weights", "FP8 by rows: prefill",
         "≤ 0.7", lambda row, _: row["of_plain"], lambda value: value <= 0.7),
    Goal("8 adapters with 8 streams each over the same streams of the base model, time", "adapters", "adapters",
         "≤ 1.25", lambda row, _: row["step_over_base"], lambda value: value <= 1.25),
    Goal("64 clients of a server over the engine alone, tokens per second", "servers", "one replica",
         "≥ 0.95", lambda row, _: row["of_engine"], lambda value: value >= 0.95),
    Goal("answers that differ after SIGKILL of a decode replica", "servers", "a pair, its decode replica killed",
         "0", lambda row, _: row["answers_that_differ"], lambda value: value == 0),
    Goal("answers that differ after new weights in place", "weight update", "all weights",
         "0", lambda row, _: row["answers_that_differ"], lambda value: value == 0),
    *(Goal(f"freed by a sleep of level {level}, share of weights and pages; NaN if an answer differs after waking",
           "sleep", f"level {level}", "≥ 0.9", lambda row, _: _freed(row), lambda value: value >= 0.9)
      for level in (1, 2)),
    Goal("pages that differ after NIXL between two processes", "transfer", "NIXL",
         "0", lambda row, _: row["pages_that_differ"], lambda value: value == 0),
    Goal("tokens per second over transformers' continuous batching", "others", "transformers, continuous batching",
         "≥ 1", _faster, lambda value: value >= 1),
    Goal("tokens per second over vLLM", "others", "vLLM",
         "≥ 1", _faster, lambda value: value >= 1),
]  # fmt: skip


def report(rows: Rows) -> str:
    """Return all tables of a rows file."""
    results = rows.results()
    device = rows.figures("machine", "device")
    parts = [", ".join(f"{name} {value}" for name, value in device.items()) + "\n", _goals(rows)]
    parts += [_section(name, results) for name in dict.fromkeys(section for section, _ in results)]
    missing = [
        [f"{section}: {case}", line.get("error") or line.get("skipped", "")]
        for (section, case), line in results.items()
        if "figures" not in line
    ]
    if missing:
        parts.append("Without figures:\n\n" + markdown([["case", "reason"], *missing]))
    return "\n".join(part for part in parts if part)


def _goals(rows: Rows) -> str:
    lines = [["a GPU run must show", "required", "measured", ""], _checks(rows)]
    for goal in GOALS:
        found = [line for (section, case), line in rows.results().items() if _is_of(goal, section, case)]
        if not found or "figures" not in found[0]:
            reason = (found[0].get("error") or found[0].get("skipped", "")) if found else "not run"
            lines.append([goal.text, goal.required, "-", f"not measured: {reason}"])
            continue
        value = float(goal.value(found[0]["figures"], rows))
        lines.append([goal.text, goal.required, cell(value), "met" if goal.is_met(value) else "**not met**"])
    return markdown(lines)


def _is_of(goal: Goal, section: str, case: str) -> bool:
    return section == goal.section and (case == goal.case or case.startswith(f"{goal.case},")) and "eager" not in case


def _checks(rows: Rows) -> list[str]:
    """Return the line of all comparisons with references and of the tests."""
    checks = {case: line for (section, case), line in rows.results().items() if section == "checks"}
    wrong = [case for case, line in checks.items() if not passes(line)]
    verdict = "not measured: not run" if not checks else "met" if not wrong else f"**not met**: {'; '.join(wrong)}"
    text = "kernels and logits against references in float32, and tests marked gpu"
    return [text, "all", f"{len(checks) - len(wrong)} of {len(checks)}", verdict]


def passes(line: Line) -> bool:
    """Return whether a row of the section `checks` is as it must be. Neither a NaN nor tests all skipped are."""
    figures = line.get("figures", {})
    if "exit_code" in figures:
        return figures["exit_code"] == 0 and figures.get("passed", 0) > 0
    return "bound" in figures and bool(figures["relative_error"] <= figures["bound"])


def _section(name: str, results: dict[tuple[str, str], Line]) -> str:
    """Return a table for each kind of row in a section: rows with the same figures."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for (section, case), line in results.items():
        if section == name != "machine" and "figures" in line:
            figures = line["figures"]
            kinds.setdefault(tuple(figures), []).append([case, *(_cell(value) for value in figures.values())])
    return "\n".join(markdown([[name, *figures], *lines]) for figures, lines in kinds.items())


def _cell(value: object) -> str:
    return cell(value) if isinstance(value, int | float) and value == value else str(value)
