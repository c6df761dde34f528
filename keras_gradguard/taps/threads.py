"""Work that must not see the graph, the strategy or the device scope it is called from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def alone(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own: no graph, no strategy, no device scope there."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function())
        except BaseException as error:  # handed on below
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
