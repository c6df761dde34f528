"""The Custom Scalars page as TensorBoard's own plugin assembles it."""

from __future__ import annotations

import re

import pytest

from keras_gradguard.tensorboard.events import EventWriter
from keras_gradguard.tensorboard.layout import layout_bytes

from . import runs


def layouts(directory):
    from tensorboard.plugins.custom_scalar import layout_pb2

    return [
        layout_pb2.Layout.FromString(array.item())
        for _, tag, plugin, array in runs.values(directory)
        if (tag, plugin) == ("custom_scalars__config__", "custom_scalars")
    ]


def test_the_layout_is_written_once_and_every_chart_finds_its_tags(tmp_path):
    table = runs.table("a/kernel", "a/bias", "b/kernel")
    writer = EventWriter(tmp_path)
    for step in range(3):
        writer.write_sample(table, runs.sample(step, [[1.0], [2.0], [3.0]]))
        writer.close()
    [layout] = layouts(tmp_path / "gradguard")
    tags = {tag for _, tag, plugin, _ in runs.values(tmp_path / "gradguard") if plugin == "scalars"}
    [category] = layout.category
    bands, ratios = category.chart
    assert [s.value for s in bands.margin.series] == [
        "gradient_log10_p50/a",
        "gradient_log10_p50/b",
    ]
    for series in bands.margin.series:
        assert {series.value, series.lower, series.upper} <= tags
    [pattern] = ratios.multiline.tag
    assert {t for t in tags if re.match(pattern, t)} == {
        "update_ratio/a/kernel",
        "update_ratio/a/bias",
        "update_ratio/b/kernel",
    }


def test_every_announced_optimizers_layers_are_in_it(tmp_path):
    tables = [runs.table("a/k", optimizer="one"), runs.table("a/k", optimizer="two")]
    writer = EventWriter(tmp_path)
    writer.begin(tables)
    for table in tables:
        writer.write_sample(table, runs.sample(0, [[1.0]]))
    writer.close()
    [layout] = layouts(tmp_path / "gradguard")
    series = layout.category[0].chart[0].margin.series
    assert [s.value for s in series] == ["gradient_log10_p50/one/a", "gradient_log10_p50/two/a"]


@pytest.mark.parametrize("histograms", [True, False])
def test_without_histograms_there_is_no_layout(tmp_path, histograms):
    writer = EventWriter(tmp_path, histograms=histograms)
    writer.write_sample(runs.table(), runs.sample(0, [[1.0], [1.0]]))
    writer.close()
    assert len(layouts(tmp_path / "gradguard")) == histograms


def test_equal_models_give_equal_charts_so_that_tensorboard_shows_them_once():
    assert layout_bytes(["a", "b"]) == layout_bytes(["a", "b"])
    assert layout_bytes(["a"]) != layout_bytes(["b"])
