"""`crossdock tune`: curves and advice by arithmetic on known costs, reports, and the command on the embedded model."""

import json
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.simulate.fleet import load_fleet, read_profile
from crossdock.cluster.tune import report, sweep
from crossdock.cluster.tune.advice import Advice, advise
from crossdock.cluster.tune.curves import Cell, Curves, relative_errors
from crossdock.cluster.tune.report import Findings
from crossdock.cluster.tune.sweep import grid
from crossdock.workers.replica.engine.calibrate import measure_step
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.policies.chunking import SLACK_SHARE
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from tests.cluster.watch.terminal import run
from tests.workers.architectures import build
from tests.workers.ranks import saved

COST = StepCost(base=9e-3, per_prefill_token=1e-3, per_decode=1e-3, per_context=1e-6)
PROFILE = SchedulingProfile(
    max_model_len=2048,
    vocab_size=100,
    page_size=16,
    num_pages=1000,
    max_num_batched_tokens=512,
    max_num_seqs=64,
    slo_classes=DEFAULT_CLASSES,
    cost=COST,
)
CHUNKS, DECODES, CONTEXTS = (16, 64, 128, 256), (1, 4, 16), (100, 1000)


def curves(cost: StepCost = COST) -> Curves:
    return Curves([replace(cell, seconds=cost.seconds(cell.work)) for cell in grid(CHUNKS, DECODES, CONTEXTS)])


def advice(tpot_s: float, streams: int | None = None) -> Advice:
    return advise(curves(), tpot_s, streams, page_size=16, max_num_seqs=64)


# --- curves


def test_grid_has_chunks_alone_and_decodes_alone() -> None:
    cells = grid([16], [2], [100, 0])
    assert {(cell.chunk, cell.decodes) for cell in cells} == {(16, 0), (0, 2), (16, 2)}
    assert {cell.context for cell in cells} == {0, 100}


def test_stall_is_that_of_the_longest_context() -> None:
    assert curves().stall(64, 4) == pytest.approx(9e-3 + 64e-3 + 4e-3 + (1 + 4) * 1000 * 1e-6)
    assert curves().stall(0, 4) == pytest.approx(9e-3 + 4e-3 + 4 * 1000 * 1e-6)
    assert curves().stall(7, 4) is None


def test_efficiency_is_relative_to_the_best_cell() -> None:
    measured, reading = curves(), sum(CONTEXTS) / 2 * 1e-6  # reading: mean seconds of a chunk for its context
    assert measured.best_rate == pytest.approx(256 / (9e-3 + 256e-3 + reading))
    assert measured.efficiency(256, 0) == 1
    assert measured.efficiency(16, 0) == pytest.approx((16 / (25e-3 + reading)) / measured.best_rate)


def test_knee_is_the_smallest_chunk_within_a_tenth_of_the_best() -> None:
    # Rates are n / (9 + n): 0.64, 0.88, 0.93, 0.97; nine tenths of the last are 0.87.
    assert curves().knee(0) == 64
    assert curves().knee(16) == 256  # 25 ms and more of decodes in every step: n / (34 + n) on average
    assert curves(StepCost(base=0, per_prefill_token=1e-3)).knee(0) == 16
    with pytest.raises(ValueError, match="beside 5 decodes"):
        curves().knee(5)


@given(st.floats(1e-3, 0.3), st.sampled_from(DECODES))
def test_chunk_within_a_time_is_the_largest_that_fits(seconds: float, decodes: int) -> None:
    worst = COST.decode_step_seconds(decodes, decodes * max(CONTEXTS))
    chunk = curves().chunk_within(seconds, decodes, 16)
    if chunk == 0:
        assert worst + COST.chunk_seconds(max(CONTEXTS), CHUNKS[0]) > seconds
    else:
        assert chunk % 16 == 0
        assert worst + COST.chunk_seconds(max(CONTEXTS), chunk) <= seconds * (1 + 1e-9)
        assert chunk == CHUNKS[-1] or worst + COST.chunk_seconds(max(CONTEXTS), chunk + 16) > seconds * (1 - 1e-9)


def test_fit_to_exact_steps_predicts_held_out_steps() -> None:
    measured = curves()
    assert len(measured.held_out_errors()) == len(measured.cells)
    assert max(measured.held_out_errors()) < 0.01
    assert max(relative_errors(measured.fit(), measured.cells)) < 0.01
    assert relative_errors(StepCost(base=0.2, per_prefill_token=0), [Cell(16, 0, 0, seconds=0.1)]) == [1.0]


# --- advice


def test_ceiling_is_the_knee_beside_the_most_streams() -> None:
    assert advice(0.05).ceiling_chunk == 256
    assert advice(0.05).max_num_batched_tokens == 256 + 64


def test_floor_for_given_streams_fills_their_target() -> None:
    four = advice(0.1, streams=4)
    assert four.is_attainable
    assert four.min_chunk_tokens == 64  # 0.85 * 100 ms - 17 ms of decodes = 68 tokens
    assert four.fixed_tokens == 64 + 4
    assert advice(10.0, streams=4).min_chunk_tokens == 256  # never above the ceiling


def test_advice_without_streams_sizes_for_the_most_that_can_meet_the_target() -> None:
    assert advice(1.0).streams == 16
    assert advice(0.05).streams == 4  # 16 take 41 ms without any chunk, of 42.5
    assert advice(0.001).streams == 1


def test_advice_for_an_unattainable_target_has_attainable_ones() -> None:
    tight = advice(0.02)
    assert not tight.is_attainable
    assert (tight.min_chunk_tokens, tight.fixed_tokens) == (16, 0)
    one, four, sixteen = tight.attainable
    assert one.tpot_s == pytest.approx((9e-3 + 1e-3 + 16e-3 + 2 * 1000 * 1e-6) / SLACK_SHARE)
    assert four.tpot_s < sixteen.tpot_s
    assert advice(one.tpot_s * 1.001, streams=1).is_attainable


def test_advice_for_streams_that_were_not_measured_raises() -> None:
    with pytest.raises(ValueError, match=r"streams \(5\) must be one of those measured beside chunks: 1, 4, 16"):
        advice(0.1, streams=5)
    alone = Curves([Cell(16, 0, 0, seconds=0.1), Cell(0, 4, 0, seconds=0.1)])
    with pytest.raises(ValueError, match="no chunk was measured beside streams"):
        advise(alone, 0.1, None, page_size=16, max_num_seqs=64)


def test_advice_for_a_prefill_pool_is_of_chunks_alone() -> None:
    """Its steps hold no streams, so nothing needs to be measured beside them."""
    alone = Curves([cell for cell in curves().cells if not cell.decodes])
    found = advise(alone, 0.05, None, page_size=16, max_num_seqs=64, role="prefill")
    assert (found.ceiling_chunk, found.ceiling_decodes, found.min_chunk_tokens) == (alone.knee(0), 0, 0)
    assert found.max_num_batched_tokens == alone.knee(0) + 64
    text = "\n".join(report.sentences(replace(findings(), curves=alone, advice=found)))
    assert "min_chunk_tokens needs no setting" in text
    assert "min_chunk_tokens" not in report.snippet(replace(findings(), curves=alone, advice=found))


def test_curves_of_a_pipeline_have_its_rate_and_its_gaps() -> None:
    """Two stages, the slower one with 0.6 of a step: a step ends every 0.6, and a stream waits for two of them."""
    single, pipeline = curves(), Curves(curves().cells, depth=2, interval_share=0.6)
    for chunk, decodes in ((64, 0), (128, 4)):
        rate, stall = single.rate(chunk, decodes), single.stall(chunk, decodes)
        assert rate is not None
        assert stall is not None
        assert pipeline.rate(chunk, decodes) == pytest.approx(rate / 0.6)
        assert pipeline.stall(chunk, decodes) == pytest.approx(stall * 1.2)
    assert pipeline.efficiency(64, 4) == pytest.approx(single.efficiency(64, 4))
    assert pipeline.fit() == single.fit()
    wide, narrow = (advise(each, 0.2, 4, page_size=16, max_num_seqs=64) for each in (single, pipeline))
    assert narrow.min_chunk_tokens < wide.min_chunk_tokens
    text = "\n".join(report.sentences(replace(findings(), curves=pipeline)))
    assert "The pipeline has 2 in flight" in text


# --- reports


def findings(tpot_s: float = 0.1, pool: int = 0, **settings: Any) -> Findings:
    config = ClusterConfig.model_validate(settings)
    found = curves(), advice(tpot_s), PROFILE, [Cell(16, 99, 9999)]
    return Findings("a device", config, config.pools[pool], tpot_s, *found)


def test_profile_can_be_simulated(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(report.profile(findings()))
    profile = read_profile("profile.json", tmp_path)
    assert profile.num_pages == PROFILE.num_pages
    for name, value in asdict(COST).items():
        assert getattr(profile.cost, name) == pytest.approx(value, rel=1e-5, abs=1e-12)  # the fit has a weak prior
    assert load_fleet(None, f"mixed=2x{file}").pools[0].profile.cost == profile.cost


def test_snippet_is_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    found = findings(model={"path": "org/model", "max_model_len": 4096}, engine={"page_size": 32})
    file.write_text(report.snippet(found))
    config = load(file)
    assert (config.model.path, config.model.max_model_len, config.engine.page_size) == ("org/model", 4096, 32)
    assert config.engine.max_num_batched_tokens == found.advice.max_num_batched_tokens
    assert config.engine.min_chunk_tokens == found.advice.min_chunk_tokens
    file.write_text(report.snippet(findings()))
    assert load(file).model == ClusterConfig().model


def test_snippet_of_one_pool_of_several_keeps_the_shape_of_all(tmp_path: Path) -> None:
    """Only the tuned pool has the new settings; each keeps its ranks, role and own engine settings."""
    pools: list[dict[str, Any]] = [
        {"name": "prefill", "tensor_parallel_size": 2, "num_gpus": 1, "engine": {"max_num_batched_tokens": 4096}},
        {"name": "decode", "replicas": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float16"},
    ]
    pools[1]["engine"] = {"max_num_seqs": 64}  # the default, but not the cluster's
    settings: dict[str, Any] = {"engine": {"max_num_seqs": 16}, "pools": pools, "transfer": {"transport": "tcp"}}
    before = load(None, {**settings, "http.api_keys": ["secret"]})
    found = replace(findings(), config=before, pool=before.pools[1])
    file = tmp_path / "tune.yaml"
    file.write_text(report.snippet(found))
    assert "secret" not in file.read_text()
    after = load(file)
    assert (after.engine, after.transfer, after.pools[0]) == (before.engine, before.transfer, before.pools[0])
    tuned, was = after.pools[1], before.pools[1]
    assert tuned.model_copy(update={"engine": None}) == was.model_copy(update={"engine": None})
    assert tuned.engine is not None
    assert tuned.engine.max_num_seqs == 64
    assert tuned.engine.max_num_batched_tokens == found.advice.max_num_batched_tokens
    assert tuned.engine.min_chunk_tokens == found.advice.min_chunk_tokens


def test_snippet_of_the_only_pool_keeps_its_ranks(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text(report.snippet(findings(pools=({"name": "big", "tensor_parallel_size": 4},))))
    config = load(file)
    assert [(pool.name, pool.tensor_parallel_size) for pool in config.pools] == [("big", 4)]
    assert config.engine.min_chunk_tokens == advice(0.1).min_chunk_tokens


def rows(table: Table, width: int = 80) -> list[list[str]]:
    """Return the words of each line of a table on a terminal of this width."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return [line.split() for line in capture.get().splitlines() if line.strip()]


@pytest.mark.parametrize("decodes", [(1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256)])
def test_tables_keep_the_sizes_of_chunks_at_80_columns(decodes: tuple[int, ...]) -> None:
    chunks = (16, 64, 256, 1024, 2048, 16384)
    cells = [replace(cell, seconds=COST.seconds(cell.work)) for cell in grid(chunks, decodes, CONTEXTS)]
    cells = [replace(cell, is_measured=cell.chunk != 256) for cell in cells]
    assert [line[0] for line in rows(report.promises(findings()))][-3:] == ["1", "4", "16"]
    wide = replace(findings(), curves=Curves(cells))
    for table in (report.stalls(wide.curves), report.trade_off(wide)):
        lines = rows(table)
        assert [int(line[0]) for line in lines if line[0] in map(str, chunks)] == [*chunks]
        assert not any("…" in word for line in lines for word in line)
    if len(decodes) == 4:
        [line] = [line for line in rows(report.stalls(wide.curves)) if line[0] == "256"]
        assert line[1].startswith("~")
        assert len(line) == 1 + 2 * (1 + len(decodes))  # all in one line


def test_column_whose_long_contexts_did_not_fit_says_so() -> None:
    """Else its steps look shorter than those beside fewer streams, whose contexts are longer."""
    short = Curves([cell for cell in curves().cells if cell.decodes < 16 or cell.context == 100])
    assert ["chunk", "none", "1", "4", "16", "≤100"] in rows(report.stalls(short))
    assert not any("≤100" in line for line in rows(report.stalls(curves())))


def test_points_of_the_trade_off_are_steps_times_seconds() -> None:
    found = findings()
    assert found.prompt == 1000
    mean = 9e-3 + 64e-3 + 4e-3 + (1 + 4) * 550 * 1e-6  # of both contexts
    point = next(p for p in report.as_json(found)["trade_off"]["points"] if (p["decodes"], p["chunk"]) == (4, 64))
    assert point["tpot_s"] == pytest.approx(mean)
    assert point["ttft_s"] == pytest.approx(16 * mean)  # chunks
    [line] = [line for line in rows(report.trade_off(found)) if line[0] == "64"]
    assert line[3:5] == ["1.28", "79.7"]


def test_pages_of_a_chunk_must_travel_within_the_step_of_the_next() -> None:
    found = replace(findings(), profile=PROFILE.model_copy(update={"page_bytes": 16 * 50_000, "bytes_per_second": 5e8}))
    step = 9e-3 + 64e-3 + 550 * 1e-6  # seconds, the mean of both contexts
    row = next(row for row in report.as_json(found)["kv_pages_of_chunks"] if row["chunk"] == 64)
    assert row["kv_bytes"] == 64 * 50_000
    assert row["bytes_per_second"] == pytest.approx(64 * 50_000 / step)
    [line] = [line for line in rows(report.shipped_pages(found)) if line[0] == "64"]
    assert line[1:] == ["3.05", "43.5", "8.7", "%"]  # 3.2 MB in 73.55 ms; at 500 MB/s they take 6.4 ms


def test_fit_is_to_measured_cells_alone() -> None:
    measured = curves()
    wrong = [replace(cell, seconds=9.0, is_measured=False) if cell.chunk == 64 else cell for cell in measured.cells]
    assert Curves(wrong).fit().per_prefill_token == pytest.approx(measured.fit().per_prefill_token, rel=1e-3)
    assert max(Curves(wrong).held_out_errors()) < 0.01


@pytest.mark.parametrize("tpot_s", [0.001, 0.1])
def test_sentences_name_the_target_and_the_dropped_cells(tpot_s: float) -> None:
    text = "\n".join(report.sentences(findings(tpot_s)))
    assert "compute-bound from chunks of 64 tokens" in text
    assert "a chunk of 9 tokens takes twice its fixed cost, and one of 81 is within" in text
    assert "99 streams at 9999 tokens" in text
    assert ("cannot meet the target" in text) == (tpot_s < 0.01)


# --- the command


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--chunks", "64;128"], "chunks: '64;128' is not of the form 64,128,256"),
        (["--contexts", "-1"], "contexts: -1 is less than 0"),
        (["--decodes", "0"], "chunks and decodes must each name a number above 0"),
        (["--tpot", "0"], "tpot (0.0) must be more than 0 seconds"),
        (["--streams", "3"], "streams (3) must be one of --decodes: 1, 4, 16, 64"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--pool", "absent"], "pool: there is no 'absent'; there are mixed"),
        (["--json", "/nowhere/tune.json"], "json: there is no directory /nowhere"),
    ],
)
def test_wrong_flag_is_reported_before_the_model_is_loaded(args: list[str], complaint: str) -> None:
    result = run("tune", *args)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_interrupted_command_writes_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("crossdock.workers.replica.engine.engine_loader.load_engine", interrupted)
    result = run("tune", "--output", str(tmp_path / "tune.yaml"))
    assert result.exit_code == 130
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_cluster(tmp_path: Path) -> Path:
    """A file of a cluster with a tiny model."""
    file = tmp_path / "cluster.yaml"
    model = saved(build("llama", {}), tmp_path / "model")
    file.write_text(f"model: {{path: {model}, dtype: float32}}\nengine: {{max_num_seqs: 8, kv_cache_memory: 4MiB}}\n")
    return file


@pytest.mark.parametrize(("num_steps", "is_enough"), [(3, False), (6, True)])
def test_interrupted_measurement_shows_what_was_measured(
    small_cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, is_enough: bool
) -> None:
    """Two steps are of chunks alone, three beside one stream; the file is written from then on."""
    num_measured = 0

    def interrupted(*args: Any, **settings: Any) -> Any:
        nonlocal num_measured
        if num_measured == num_steps:
            raise KeyboardInterrupt
        num_measured += 1
        return measure_step(*args, **settings)

    monkeypatch.setattr(sweep, "measure_step", interrupted)
    output = tmp_path / "tune.yaml"
    result = run(
        *("tune", "--config", str(small_cluster), "--tpot", "30"),
        *("--chunks", "16,32", "--decodes", "1,2", "--contexts", "32", "--output", str(output), "--verbose"),
    )
    assert result.exit_code == 130
    assert "Worst stall in ms" in " ".join(result.output.split())  # a narrow table's title takes two lines
    assert output.exists() == is_enough
    if is_enough:
        assert "interrupted: measured until then, beside at most 1 streams" in result.stderr
        assert "# Interrupted: measured beside at most 1 stream.\n" in output.read_text()
        assert load(output).engine.min_chunk_tokens in (16, 32)  # which one, the machine's seconds decide
    else:
        assert "too little was measured to recommend settings; no file was written" in result.stderr


@pytest.mark.parametrize("model", ["tiny", pytest.param("embedded", marks=pytest.mark.soak)])
def test_command_writes_its_files(model: str, small_cluster: Path, model_dir: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"tune.{name}" for name in ("yaml", "json", "svg")}
    if model == "embedded":
        small_cluster.write_text("engine: {max_num_seqs: 8, kv_cache_memory: 200MiB}\n")
    result = run(
        *("tune", "--config", str(small_cluster), "--tpot", "30", "--streams", "2", "--repeats", "1"),
        *("--chunks", "16,32", "--decodes", "1,2", "--contexts", "32,1000000", "--verbose"),
        *("--output", str(files["yaml"]), "--json", str(files["json"]), "--plot", str(files["svg"])),
    )
    assert result.exit_code == 0, result.output
    assert all(f"{count} stream" in files["svg"].read_text() for count in (1, 2))
    assert result.stdout.startswith("With no prompt beside them, ")
    assert "Not all measured, because KV pages or max_model_len do not suffice: " in result.output
    figures = json.loads(files["json"].read_text())
    assert {(cell["chunk"], cell["decodes"]) for cell in figures["cells"]} == {
        *((chunk, decodes) for chunk in (0, 16, 32) for decodes in (0, 1, 2))
    } - {(0, 0)}
    assert all(cell["seconds"] > 0 for cell in figures["cells"])
    config = load(files["yaml"])
    assert config.engine.min_chunk_tokens == figures["advice"]["min_chunk_tokens"] > 0
    assert config.engine.max_num_seqs == 8
    assert figures["trade_off"]["prompt_tokens"] == 32
    assert len(figures["trade_off"]["points"]) == 4
    assert not figures["is_interrupted"]


@pytest.mark.parametrize(
    ("pools", "args", "complaint"),
    [
        ("prefill, decode", [], "pool: the file has prefill, decode, which may differ; name one with --pool"),
        ("prefill, decode", ["--pool", "prefill", "--streams", "4"], "streams: none run in pool 'prefill'"),
    ],
)
def test_pool_that_cannot_be_tuned_is_refused(tmp_path: Path, pools: str, args: list[str], complaint: str) -> None:
    file = tmp_path / "cluster.yaml"
    named = ", ".join(f"{{name: {name}}}" for name in pools.split(", "))
    file.write_text(f"model: {{path: org/pictures}}\npools: [{named}]\n")
    result = run("tune", "--config", str(file), *args)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_command_measures_the_ranks_of_the_pool_it_recommends_for(tmp_path: Path) -> None:
    others = {*multiprocessing.active_children()}  # of other tests
    model = saved(build("llama", {}), tmp_path / "model")
    files = {name: tmp_path / f"tune.{name}" for name in ("yaml", "json", "profile.json")}
    (tmp_path / "cluster.yaml").write_text(
        f"model: {{path: {model}, dtype: float32}}\n"
        "engine: {max_num_seqs: 8, kv_cache_memory: 4MiB}\n"
        "pools: [{name: prefill}, {name: decode, pipeline_parallel_size: 2}]\n"
    )
    result = run(
        *("tune", "--config", str(tmp_path / "cluster.yaml"), "--pool", "decode", "--tpot", "30", "--repeats", "1"),
        *("--chunks", "16,32", "--decodes", "1,2", "--contexts", "32"),
        *("--output", str(files["yaml"]), "--json", str(files["json"]), "--profile", str(files["profile.json"])),
    )
    assert result.exit_code == 0, result.output
    lines = " ".join(result.stdout.split())
    assert lines.startswith("With no prompt beside them, ")
    assert "Set max_num_batched_tokens " in lines
    assert "Worst stall" not in lines, "tables are for --verbose"
    profile = read_profile("tune.profile.json", tmp_path)
    assert (profile.pipeline_parallel_size, profile.role) == (2, "decode")
    assert profile.page_bytes == 16 * 4 * 2 * 2 * 12 * 4  # of both stages: tokens, layers, heads, K and V, size, bytes
    figures = json.loads(files["json"].read_text())
    assert figures["interval_share"] == profile.interval_share != 1.0
    assert figures["pool"] == {
        "name": "decode",
        "role": "decode",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
    }
    pools = {pool.name: pool for pool in load(files["yaml"]).pools}
    assert pools["decode"].pipeline_parallel_size == 2
    assert pools["decode"].engine is not None
    assert pools["decode"].engine.min_chunk_tokens == figures["advice"]["min_chunk_tokens"] > 0
    assert {*multiprocessing.active_children()} <= others
