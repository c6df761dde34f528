"""What TensorBoard imports at start-up: nothing but this until the tab is really set up."""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin


class GradGuardLoader(base_plugin.TBLoader):  # type: ignore[misc, unused-ignore]
    """Makes the plugin; named by the entry point ``tensorboard_plugins``."""

    def load(self, context: base_plugin.TBContext) -> Any:
        """Return the plugin for one TensorBoard server."""
        from keras_gradguard.tensorboard.plugin.plugin import GradGuardPlugin

        return GradGuardPlugin(context)
