"""Many tensors as one, to hand them from one branch of a graph to another at the price of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_ANY_SHAPE = -1


class Bundle:
    """Tensors of known kinds, tied together by dtype. Nothing is copied.

    A condition costs something for every tensor that goes in or out, taken or not. A list of
    tensors counts as one.

    Args:
        kinds: ``(dtype, shape)`` of each tensor.
    """

    def __init__(self, kinds: Sequence[tuple[Any, Any]]) -> None:
        self._kinds = list(kinds)
        self._dtypes = list(dict.fromkeys(dtype for dtype, _ in kinds))

    def empty(self) -> list[Any]:
        """Return a bundle without tensors in it: one tensor a dtype."""
        return [
            tf.raw_ops.EmptyTensorList(
                element_shape=_ANY_SHAPE, max_num_elements=-1, element_dtype=dtype
            )
            for dtype in self._dtypes
        ]

    def tied(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the tensors as one tensor a dtype.

        Args:
            tensors: Of the kinds this bundle was made for, in their order.
        """
        lists = dict(zip(self._dtypes, self.empty(), strict=True))
        for (dtype, _), tensor in zip(self._kinds, tensors, strict=True):
            lists[dtype] = tf.raw_ops.TensorListPushBack(input_handle=lists[dtype], tensor=tensor)
        return list(lists.values())

    def untied(self, lists: Sequence[Any]) -> list[Any]:
        """Return the tensors of what :meth:`tied` returned."""
        handles = dict(zip(self._dtypes, lists, strict=True))
        taken = dict.fromkeys(self._dtypes, 0)
        tensors = []
        for dtype, shape in self._kinds:
            tensors.append(
                tf.raw_ops.TensorListGetItem(
                    input_handle=handles[dtype],
                    index=taken[dtype],
                    element_shape=tf.constant(
                        _ANY_SHAPE if not shape.is_fully_defined() else shape.as_list(), tf.int32
                    ),
                    element_dtype=dtype,
                )
            )
            taken[dtype] += 1
        return tensors
