"""The guard's arguments, checked once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_gradguard.findings import Finding
from keras_gradguard.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user set on a guard. See :class:`keras_gradguard.GradientGuard` for the meaning.

    Raises:
        ValueError: A number is not a positive integer, or ``policy`` is not a Policy.
        TypeError: ``log_dir`` is not a path.
    """

    log_dir: str | None = "logs"
    policy: Policy = field(default_factory=Policy)
    sample_every: int = 50
    check_every: int = 10
    histograms: bool = True
    images: bool = False
    activations: bool = False
    max_log_bytes: int | None = 1 << 31
    skip_non_finite: bool = False
    diagnose: bool = True
    on_finding: Callable[[Finding], None] | None = None

    def __post_init__(self) -> None:
        for name in ("sample_every", "check_every"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"`{name}` must be an integer of at least 1 (optimizer steps). "
                    f"Received: {name}={value!r}"
                )
        size: Any = self.max_log_bytes
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and size >= 1 << 20):
            raise ValueError(
                "`max_log_bytes` must be an integer of at least 1048576 (1 MiB), or None for no "
                f"limit. Received: max_log_bytes={size!r}"
            )
        if not isinstance(self.policy, Policy):
            raise ValueError(
                "`policy` must be a keras_gradguard.Policy, for example "
                f"Policy(vanishing='ignore'). Received: policy={self.policy!r}"
            )
        if self.log_dir is not None:
            if not isinstance(self.log_dir, (str, os.PathLike)):
                raise TypeError(
                    "`log_dir` must be a path, or None to write nothing. "
                    f"Received: log_dir={self.log_dir!r}"
                )
            object.__setattr__(self, "log_dir", os.fspath(self.log_dir))
        if self.on_finding is not None and not callable(self.on_finding):
            raise TypeError(
                "`on_finding` must be a function that takes a Finding, or None. "
                f"Received: on_finding={self.on_finding!r}"
            )
