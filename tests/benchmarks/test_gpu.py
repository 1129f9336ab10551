"""The benchmark of GPUs: a dry run of every section on the CPU, rows that outlive crashes, verdicts, and the kit."""

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

if importlib.util.find_spec("triton"):
    import triton.runtime.interpreter  # noqa: F401, so that tests/less_work.py finds it; the benchmark imports it later

ROOT = Path(__file__).parents[2]
CALLS = ["truth", "features", "kernels", "servers", "others"]
DRY_RUNS = [  # parts of calls, each far below the limit of a test
    ("truth", ("engine",)),
    ("truth", ("limit", "sampling", "decode", "prefill")),
    ("features", ("packed weights",)),
    ("features", ("adapters", "drafts", "evicted pages", "transfer", "shapes")),
    ("servers", ("latents", "structured output")),
    ("servers", ("weight update", "sleep")),
    ("kernels", ("checks", "steps")),
]
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton: pip install triton")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of benchmarks/gpu/ as the script does."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    if ROOT.name == "gpu":  # pytest imports the checkout as a package of its folder's name
        monkeypatch.delitem(sys.modules, "gpu", raising=False)
    return lambda name: importlib.import_module(f"gpu.{name}")


@pytest.fixture
def rows(gpu: Callable[[str], Any], tmp_path: Path) -> Any:
    return gpu("rows").Rows(tmp_path / "rows.jsonl", "first")


@pytest.fixture
def bench(gpu: Callable[[str], Any], rows: Any) -> Any:
    return gpu("cases").Bench(gpu("device").Cpu(), gpu("sizes").DRY, rows)


def assert_complete(gpu: Callable[[str], Any], bench: Any, calls: list[str]) -> None:
    """Check that the rows have figures for every case of the calls, and that they are right."""
    results = bench.rows.results()
    assert {key: line.get("error") for key, line in results.items() if "error" in line} == {}
    assert set(results) == {
        (section.name, case.name) for section in gpu("sections").of(calls) for case in section.cases(bench)
    }
    sections = {section.name for section in gpu("sections").of(calls)}
    wanted = {"vllm": "others", "nixl": "transfer"}
    uninstalled = [name for name, where in wanted.items() if where in sections and not importlib.util.find_spec(name)]
    assert len([line for line in results.values() if "skipped" in line]) == len(uninstalled)
    checks = {case: line for (section, case), line in results.items() if section == "checks"}
    failed = [case for case, line in checks.items() if not gpu("report").passes(line)]
    if "kernels" in calls:
        assert failed == ["tests of kernels"], "all of these are skipped where there is no GPU"
        assert checks["tests of kernels"]["figures"]["exit_code"] == 0
    assert all(checks[case]["figures"]["relative_error"] < 1e-5 for case in checks if case not in failed)  # in float32


@needs_triton
@pytest.mark.filterwarnings("ignore")  # of torch, about what is slow on a CPU
@pytest.mark.parametrize(("call", "names"), DRY_RUNS, ids=str)
def test_dry_run_has_figures_for_every_case(
    call: str, names: tuple[str, ...], gpu: Callable[[str], Any], bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported what these calls need. Those left start processes of their own."""
    monkeypatch.setenv("CROSSDOCK_GPU_RUN", "first")
    monkeypatch.setenv("CROSSDOCK_GPU_DEADLINE", str(time.time() + 480))
    found = gpu("sections").of([call])
    assert {section.name for section in found} >= set(names)
    sections = [replace(each, seconds=480.0) for each in found if each.name in ("machine", "ceilings", *names)]
    monkeypatch.setattr(gpu("sections"), "of", lambda _: sections)  # a slow machine leaves out no case
    gpu("run").measure(argparse.Namespace(out=bench.rows.path, dry=True, calls=[call]))
    assert_complete(gpu, bench, [call])


@needs_triton
@pytest.mark.soak
def test_dry_run_of_the_command_has_figures_for_every_case(gpu: Callable[[str], Any], bench: Any) -> None:
    out, cache = str(bench.rows.path), str(bench.rows.path.parent / "cache")
    calls = [call for call in CALLS if call != "servers"]  # a start takes as long as this machine is slow
    command = [sys.executable, "benchmarks/gpu/run.py", *calls, "--dry", "--out", out, "--cache", cache]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_complete(gpu, bench, calls)
    assert "| a GPU run must show |" in done.stdout


def test_limit_engine_has_transformers_logits(gpu: Callable[[str], Any], bench: Any) -> None:
    import torch

    module = gpu("models").random_module(bench, "Llama-3.1-8B", num_hidden_layers=2).eval()
    engine, ids = gpu("limit").LimitEngine(module), torch.randint(0, 96, (3, 12))
    engine.open(3, 12)
    with torch.inference_mode():
        expected = module(ids).logits
    prompt = engine.step(ids[:, :10], 0)
    torch.testing.assert_close(prompt, expected[:, 9])
    for start in (10, 11):
        torch.testing.assert_close(engine.step(ids[:, start : start + 1], start), expected[:, start])
    assert not torch.allclose(prompt, expected[:, 8], atol=1e-2), "these logits tell positions apart"


def sections(gpu: Callable[[str], Any], seconds: float = 60.0) -> tuple[list[Any], list[str], dict[str, Any]]:
    """Return a section of three cases, the names of those that were measured, and what each case does."""
    cases = gpu("cases")
    measured: list[str] = []
    outcome: dict[str, Any] = {"a": {"x": 1.0}, "b": ValueError("broken"), "c": cases.UnavailableError("no such thing")}

    def measure(name: str) -> Any:
        measured.append(name)
        if isinstance(outcome[name], Exception):
            raise outcome[name]
        return outcome[name]

    def listed(_: Any) -> Iterator[Any]:
        for name in outcome:
            yield cases.Case(name, lambda name=name: measure(name))

    return [cases.Section("s", seconds, listed)], measured, outcome


def test_every_section_has_a_dry_run(gpu: Callable[[str], Any]) -> None:
    """`others` has its dry run in the soak test of the command; `servers` is run by hand."""
    for call in CALLS[:3]:
        named = {name for each, names in DRY_RUNS if each == call for name in ("machine", "ceilings", *names)}
        assert {section.name for section in gpu("sections").of([call])} == named


def test_next_run_measures_only_what_has_no_figures(gpu: Callable[[str], Any], bench: Any) -> None:
    work, work_later = gpu("cases").work, time.time() + 60
    these, measured, outcome = sections(gpu)
    work(these, bench, work_later)
    work(these, bench, work_later)  # a process that was started again in the same run
    assert measured == ["a", "b", "c"]
    first = {case: line for (_, case), line in bench.rows.results().items()}
    assert first["a"]["figures"] == {"x": 1.0}
    assert first["b"]["error"] == "ValueError: broken"
    assert first["c"]["skipped"] == "no such thing"
    outcome["b"] = {"x": 2.0}
    second = gpu("cases").Bench(bench.device, bench.sizes, gpu("rows").Rows(bench.rows.path, "second"))
    work(these, second, work_later)
    assert measured == ["a", "b", "c", "b", "c"]
    assert second.rows.figures("s", "b") == {"x": 2.0}


@pytest.mark.parametrize(("seconds", "left"), [(0.0, 60.0), (60.0, -1.0)], ids=["section", "call"])
def test_case_is_skipped_without_time(gpu: Callable[[str], Any], bench: Any, seconds: float, left: float) -> None:
    these, measured, _ = sections(gpu, seconds)
    gpu("cases").work(these, bench, time.time() + left)
    assert not measured
    assert {line["skipped"] for line in bench.rows.results().values()} == {"no time was left"}


def test_case_after_which_the_device_is_lost_ends_the_process(gpu: Callable[[str], Any], bench: Any) -> None:
    class Lost(gpu("device").Cpu):  # type: ignore[misc]
        def works(self) -> bool:
            return False

    these, measured, _ = sections(gpu)
    lost = gpu("cases").Bench(Lost(), bench.sizes, bench.rows)
    with pytest.raises(gpu("cases").DeviceLostError):
        gpu("cases").work(these, lost, time.time() + 60)
    assert measured == ["a", "b"]
    assert "error" in bench.rows.results()["s", "b"]


@pytest.mark.parametrize("name", ["device", "commit", "torch"])
def test_rows_of_another_machine_or_commit_are_refused(
    gpu: Callable[[str], Any], bench: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = gpu("sections").describe(bench)
    bench.rows.end("machine", "device", 0.0, figures={**figures, "date": "2000-01-01", name: "another"})
    args = argparse.Namespace(out=bench.rows.path, dry=True, calls=[])
    monkeypatch.setenv("CROSSDOCK_GPU_RUN", "second")
    with pytest.raises(SystemExit, match=f"has rows of {name} another, .*: give another --out"):
        gpu("run").measure(args)


MEASURING = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.append(sys.argv[1])
from gpu.rows import Rows

rows = Rows(Path(sys.argv[2]), "first")
for name in ("good", "killed", "hung", "device lost", "last"):
    if rows.is_done("s", name):
        continue
    if name in ("killed", "hung"):
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as Ray's are
        Path(sys.argv[3], name).write_text(str(daemon.pid))
    rows.begin("s", name, 0.2 if name == "hung" else 600.0)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hung":
        time.sleep(600)
    if name == "device lost":
        rows.end("s", name, 0.0, error="illegal memory access")
        os._exit(75)
    rows.end("s", name, 0.0, figures={"x": 1})
"""


def test_crashes_and_hangs_are_rows_end_all_they_started_and_the_other_cases_run(
    gpu: Callable[[str], Any], rows: Any, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", MEASURING, str(ROOT / "benchmarks"), str(rows.path), str(tmp_path)]
    gpu("supervise").supervise(command, os.environ, rows, time.time() + 300)
    found = {case: line.get("error", "has figures") for (_, case), line in rows.results().items()}
    assert found == {
        "good": "has figures",
        "killed": "the process ended with signal 9",
        "hung": "took longer than 0 s",
        "device lost": "illegal memory access",
        "last": "has figures",
    }
    for case in ("killed", "hung"):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int((tmp_path / case).read_text())).status() == psutil.STATUS_ZOMBIE


def test_time_limit_from_outside_ends_the_process_that_measures(tmp_path: Path) -> None:
    options = ["--dry", "--out", str(tmp_path / "rows.jsonl"), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen([sys.executable, "benchmarks/gpu/run.py", "truth", *options], cwd=ROOT) as process:
        watched = psutil.Process(process.pid)
        while not (measuring := watched.children()):
            time.sleep(0.01)
        process.terminate()
    assert process.returncode == 143
    assert not psutil.wait_procs(measuring, timeout=240)[1]


def test_process_that_cannot_start_is_tried_once(gpu: Callable[[str], Any], rows: Any) -> None:
    command = [sys.executable, "-c", f"open({str(rows.path.parent / 'starts')!r}, 'a').write('x'); raise SystemExit(3)"]
    gpu("supervise").supervise(command, os.environ, rows, time.time() + 300)
    assert (rows.path.parent / "starts").read_text() == "x"
    assert rows.results()["process", "start"]["error"] == "the process ended with exit code 3"


def test_half_a_line_does_not_spoil_the_rows_around_it(rows: Any) -> None:
    rows.end("s", "a", 1.0, figures={"x": 1})
    with rows.path.open("a") as file:
        file.write('{"section": "s", "case": "b", "fig')
    rows.end("s", "c", 1.0, figures={"x": 3})
    assert [case for _, case in rows.results()] == ["a", "c"]


GOALS = {  # section, case: the figures that just meet a goal, and that just miss it
    ("engine", "Llama-3.1-8B: decode 64 x 1024"): ({"ahead_over_least": 1.2}, {"ahead_over_least": 1.21}),
    ("engine", "Llama-3.1-8B: prefill 8192"): ({"of_peak": 0.6}, {"of_peak": float("nan")}),
    ("engine", "Llama-3.1-8B: chunks of 2048 beside 64 decodes"): ({"of_prefill": 0.95}, {"of_prefill": 0.94}),
    ("engine", "gaps"): ({"of_tpot": 1.25}, {"of_tpot": 1.26}),
    ("engine", "Llama-3.1-8B: chunk of 64 at 122880 beside 64 decodes"): ({"ms": 22.0}, {"ms": 22.1}),
    ("engine", "Llama-3.1-8B: decode 1 x 1024"): ({"ahead_over_least": 1.45}, {"ahead_over_least": 1.46}),
    ("packed weights", "FP8 by rows: decode 64 x 1024"): ({"of_plain": 0.75}, {"of_plain": 0.76}),
    ("packed weights", "FP8 by rows: prefill"): ({"of_plain": 0.7}, {"of_plain": float("nan")}),
    ("adapters", "adapters"): ({"step_over_base": 1.25}, {"step_over_base": 1.26}),
    ("servers", "one replica"): ({"of_engine": 0.95}, {"of_engine": 0.94}),
    ("servers", "a pair, its decode replica killed"): ({"answers_that_differ": 0}, {"answers_that_differ": 1}),
    ("weight update", "all weights"): ({"answers_that_differ": 0}, {"answers_that_differ": 1}),
    ("sleep", "level 1"): (
        {"freed_share": 0.9, "answers_that_differ": 0},
        {"freed_share": 0.89, "answers_that_differ": 0},
    ),
    ("sleep", "level 2"): (
        {"freed_share": 1.0, "answers_that_differ": 0},
        {"freed_share": 1.0, "answers_that_differ": 1},
    ),
    ("transfer", "NIXL, 512 pages of 2097152 bytes"): ({"pages_that_differ": 0}, {"pages_that_differ": 1}),
    ("others", "transformers, continuous batching"): ({"tokens_per_s": 99.0}, {"tokens_per_s": 101.0}),
    ("others", "vLLM"): ({"tokens_per_s": 100.0}, {"tokens_per_s": 101.0}),
    ("checks", "attention, prefill"): (
        {"relative_error": 0.01, "bound": 0.01},
        {"relative_error": float("nan"), "bound": 0.01},
    ),
}


@pytest.mark.parametrize("missed", [None, *GOALS], ids=str)
def test_report_says_which_goal_is_not_met(
    gpu: Callable[[str], Any], rows: Any, missed: tuple[str, str] | None
) -> None:
    rows.end("engine", "throughput, ahead", 1.0, figures={"tokens_per_s": 100.0})
    rows.end("engine", "Llama-3.1-8B: decode 64 x 1024, eager", 1.0, figures={"in_turn_ms": 1.0})  # no goal
    for (section, case), (met, not_met) in GOALS.items():
        rows.end(section, case, 1.0, figures=not_met if (section, case) == missed else met)
    rows.end("checks", "tests of kernels", 1.0, figures={"exit_code": 0, "passed": 9})
    lines = [line for line in gpu("report").report(rows).splitlines() if re.search(r"\bmet\b", line)]
    assert len(lines) == len(GOALS)
    assert sum("**not met**" in line for line in lines) == (missed is not None)


@pytest.mark.parametrize("figures", [{"exit_code": 1, "passed": 9}, {"exit_code": 0, "skipped": 9}], ids=str)
def test_failed_or_skipped_tests_do_not_pass(gpu: Callable[[str], Any], figures: dict[str, int]) -> None:
    assert not gpu("report").passes({"figures": figures})
    assert not gpu("report").passes({"error": "the process ended with signal 9"})


def test_report_gives_reasons_for_what_was_not_measured(gpu: Callable[[str], Any], rows: Any) -> None:
    rows.end("others", "vLLM", 0.0, skipped="vllm is not installed")
    text = gpu("report").report(rows)
    assert "not measured: vllm is not installed" in text
    assert text.count("not measured: not run") == len(gpu("report").GOALS)  # the others, and the checks


def test_every_goal_has_a_case_at_real_sizes(gpu: Callable[[str], Any], rows: Any) -> None:
    real = gpu("cases").Bench(gpu("device").Cpu(), gpu("sizes").REAL, rows)
    cases = [(section.name, case.name) for section in gpu("sections").of(CALLS) for case in section.cases(real)]
    assert len(set(cases)) == len(cases), "no two rows have one name"
    report = gpu("report")
    for goal in report.GOALS:
        assert sum(report._is_of(goal, *case) for case in cases) == 1, goal.text


def test_calls_fit_into_their_time(gpu: Callable[[str], Any]) -> None:
    for call in CALLS:
        assert sum(section.seconds for section in gpu("sections").of([call])) <= 520, "480 s, and most take less"


VLLM = """
class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos, detokenize):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, load_format, skip_tokenizer_init, dtype, enable_prefix_caching):
        import json, pathlib
        assert json.loads((pathlib.Path(model) / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

    def generate(self, prompts, params, use_tqdm):
        class Output:
            token_ids = [0] * params.max_tokens
        class Request:
            outputs = [Output]
        assert all(len(prompt["prompt_token_ids"]) == 8 for prompt in prompts)
        print("a line of its log")
        return [Request for prompt in prompts]
"""


def test_vllm_is_measured_where_it_is_installed(
    gpu: Callable[[str], Any], bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    figures = gpu("others")._vllm(bench)
    assert figures["tokens"] == 4
    assert figures["tokens_per_s"] > 0


# -- the kit -----------------------------------------------------------------------------------------------------------


def wheel(path: Path, **files: str) -> None:
    with zipfile.ZipFile(path, "w") as output:
        for name, text in files.items():
            output.writestr(name.replace("__", "/"), text)


def test_kit_is_unpacked_once_and_is_importable(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    kit, wheels = gpu("kit"), tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels / "one-1.whl", one__init="", one__data="1", nixl_ep_cu13__large="x")
    kit.pack(wheels, tmp_path / "kit")
    site = tmp_path / "cache" / "site" / "truth"
    values = kit.environment(ROOT, tmp_path / "cache", tmp_path / "kit", True)
    assert sorted(path.name for path in site.iterdir()) == [".kit", "one"]
    assert values["PYTHONPATH"].split(os.pathsep)[1] == str(site)
    program = (
        "import crossdock.kernels.options as m, importlib.metadata as of, os; print(os.path.realpath(m.__file__)); "
        "found = of.distribution('crossdock'); print(found.locate_file(''), found.version)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=values, cwd="/", capture_output=True, text=True, check=True
    )
    file, installed = done.stdout.splitlines()
    assert file == str((ROOT / "kernels" / "options.py").resolve()), "this checkout, not another"
    assert installed.startswith(f"{tmp_path / 'cache' / 'import'} "), "servers say their version"
    (site / "one" / "data").write_text("kept")
    kit.unpack(tmp_path / "kit", site.parent)
    assert (site / "one" / "data").read_text() == "kept", "the same kit is not unpacked again"
    wheel(wheels / "one-1.whl", one__init="", one__data="2")
    kit.pack(wheels, tmp_path / "kit")
    kit.unpack(tmp_path / "kit", site.parent)
    assert (site / "one" / "data").read_text() == "2"


def test_kit_refuses_a_wheel_that_only_pip_can_install(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "two-1.whl", "w") as output:
        output.writestr("two-1.data/purelib/two.py", "")
    with pytest.raises(ValueError, match="must be installed by pip"):
        gpu("kit").pack(tmp_path, tmp_path / "kit")


def test_kit_is_refused_if_it_is_too_large(
    gpu: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "one-1.whl", one__init="")
    monkeypatch.setattr(gpu("kit"), "MOST_MIB", 0)
    with pytest.raises(ValueError, match="more than 0"):
        gpu("kit").pack(tmp_path, tmp_path / "kit")


def test_kit_of_an_earlier_call_is_found_beside_a_new_one(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    """A program of a wheel stays one."""
    for name in ("truth", "servers"):
        (tmp_path / name).mkdir()
        file = zipfile.ZipInfo(f"{name}_package/tool")
        file.external_attr = 0o755 << 16
        with zipfile.ZipFile(tmp_path / name / "one-1.whl", "w") as output:
            output.writestr(file, "text")
        gpu("kit").pack(tmp_path / name, tmp_path / "kits" / name, name)
        values = gpu("kit").environment(ROOT, tmp_path / "cache", tmp_path / "kits" / name, True)
    paths = values["PYTHONPATH"].split(os.pathsep)[1:3]
    assert paths == [str(tmp_path / "cache" / "site" / name) for name in ("servers", "truth")]
    assert os.access(Path(paths[0]) / "servers_package" / "tool", os.X_OK)
    with pytest.raises(SystemExit, match="there is no file"):
        gpu("kit").unpack(tmp_path, tmp_path / "cache" / "site")


@pytest.mark.parametrize("name", ["truth", "features", "servers"])
def test_lock_has_the_tested_versions_and_a_hash_each(name: str) -> None:
    """Two packages are of GPUs alone, and stand in no other list."""

    def versions(text: str) -> dict[str, str]:
        found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
        return {name.lower().replace("_", "-"): version for name, version in found}

    lock = (ROOT / "benchmarks" / "gpu-kits" / f"{name}.lock").read_text()
    tested = versions((ROOT / "constraints.txt").read_text())
    locked = versions(lock)
    assert {name: tested.get(name) for name in locked if name not in ("humming-kernels", "tabulate")} == {
        name: version for name, version in locked.items() if name not in ("humming-kernels", "tabulate")
    }
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", lock, re.MULTILINE)) == len(locked) > 0
