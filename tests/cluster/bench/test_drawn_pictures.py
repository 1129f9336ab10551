"""Pictures of a benchmark's requests."""

import io
from typing import Any

import pytest
from PIL import Image

from crossdock.cluster.bench.client import Server
from crossdock.cluster.bench.pictures import DrawnPicture, png
from crossdock.cluster.bench.run import BenchOptions, bench_jobs
from crossdock.cluster.bench.workloads import Interference


@pytest.mark.parametrize("side", [1, 8, 50])
def test_drawn_file_is_a_picture_of_its_size(side: int) -> None:
    image = Image.open(io.BytesIO(png(DrawnPicture("a", side), "seed")))
    image.load()
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (side, side))


def test_key_and_seed_decide_the_picture() -> None:
    assert png(DrawnPicture("a", 20), "1") == png(DrawnPicture("a", 20), "1")
    assert len({png(DrawnPicture(key, 20), seed) for key in ("a", "b") for seed in ("1", "2")}) == 4


def test_requests_of_the_workload_have_pictures_of_their_own() -> None:
    options = BenchOptions("http://a", "images", num_requests=3, pictures=2, picture_size=40)
    jobs = list(bench_jobs(options))
    assert len({picture.key for job in jobs for picture in job.pictures}) == 6
    path, body = Server("http://a", model="m")._body(jobs[0])
    assert path == "/v1/chat/completions"
    content: Any = body["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert [len(job.pictures) for job in Interference(long_pictures=8).jobs()] == [8] * 4


def test_pictures_of_other_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="long_pictures"):
        BenchOptions("http://a", "chat", pictures=1)


def test_pictures_of_long_prompts_are_refused_where_there_are_none() -> None:
    for workload in ("chat", "images", "mix", "agents"):
        with pytest.raises(ValueError, match="long_pictures: the workload"):
            BenchOptions("http://a", workload, interference=Interference(long_pictures=1))
    for workload in ("interference", "short-vs-long"):
        BenchOptions("http://a", workload, interference=Interference(long_pictures=1))


def test_size_of_pictures_is_refused_where_there_are_none() -> None:
    for workload in ("chat", "mix", "agents", "interference", "short-vs-long"):
        with pytest.raises(ValueError, match="picture_size"):
            BenchOptions("http://a", workload, picture_size=64)
    BenchOptions("http://a", "interference", picture_size=64, interference=Interference(long_pictures=1))
    BenchOptions("http://a", "images", picture_size=64)
