"""The Custom Scalars page: one chart of gradient bands by layer, one of update ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

CATEGORY: Final = "GradGuard"
BANDS: Final = ("gradient_log10_p50", "gradient_log10_p05", "gradient_log10_p95")


def layout_bytes(layers: Sequence[str]) -> bytes:
    """The layout as TensorBoard's serialized protocol buffer.

    TensorBoard joins the layouts of all runs: charts that are equal are shown once, and a
    layout of the user's own keeps its categories beside this one.

    Args:
        layers: Names of the layers as they stand in the tags ``gradient_log10_p50/<layer>``.

    Returns:
        A serialized ``Layout`` with one category, "GradGuard".
    """
    from tensorboard.plugins.custom_scalar import layout_pb2

    middle, lower, upper = BANDS
    bands = layout_pb2.MarginChartContent(
        series=[
            layout_pb2.MarginChartContent.Series(
                value=f"{middle}/{layer}", lower=f"{lower}/{layer}", upper=f"{upper}/{layer}"
            )
            for layer in layers
        ]
    )
    ratios = layout_pb2.MultilineChartContent(tag=["^update_ratio/"])
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=CATEGORY,
                chart=[
                    layout_pb2.Chart(
                        title="Gradient size by layer: log10, median with 5th to 95th percentile",
                        margin=bands,
                    ),
                    layout_pb2.Chart(
                        title="Update ratio by variable: step size against weight size",
                        multiline=ratios,
                    ),
                ],
            )
        ]
    )
    data: bytes = layout.SerializeToString()
    return data
