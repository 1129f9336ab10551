"""The encoder's seconds for videos: each group of frames costs what a picture of its rows costs."""

import numpy as np
import pytest

from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost, EncoderCostFit
from crossdock.workers.schedule.request.items import Item

TRUTH = EncoderCost(base=2e-3, per_embedding_token=1e-4, per_square=1e-6)


def video(groups: int, rows: int) -> Item:
    return Item(0, groups * rows, groups * rows, "video", b"", {"video_grid_thw": np.array([[groups, 2 * rows, 2]])})


def picture(rows: int) -> Item:
    return Item(0, rows, rows, "image", b"", {"image_grid_thw": np.array([[1, 2 * rows, 2]])})


def test_video_costs_as_much_as_its_groups_as_pictures() -> None:
    assert (video(6, 100).num_parts, picture(100).num_parts) == (6, 1)
    assert TRUTH.seconds([video(6, 100)]) == pytest.approx(TRUTH.seconds([picture(100)] * 6))
    assert TRUTH.seconds([video(6, 100)]) < TRUTH.seconds([picture(600)]) / 2


def test_videos_teach_the_cost_of_pictures() -> None:
    fit = EncoderCostFit([([rows], 2 * TRUTH.seconds([picture(rows)])) for rows in (4, 64, 512)])
    for _ in range(600):
        for items in ([video(8, 64)], [video(4, 256), picture(64)], [video(16, 16)]):
            fit.observe(items, TRUTH.seconds(items))
    for item in (picture(64), picture(512), video(8, 128)):
        assert fit.cost.seconds([item]) == pytest.approx(TRUTH.seconds([item]), rel=0.25)
