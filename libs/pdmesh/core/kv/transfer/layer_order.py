"""Decides which layers of a prompt may be sent while a step still computes the others (S48).

The receiver pulls layers in their order. So a layer may be announced only if the layer and all
layers before it are computed. An engine calls a hook for each layer with attention when the layer
is computed. There is no hook for layers that keep a state (such as linear attention). Such a layer
counts as computed when the hook of a later layer is called. This is right only if the model's
layers are computed in the order in which they were built. Some models do not: Zamba2 builds its
shared layers first. So layers of a model with states are sent early only after a whole step has
shown this order, and never again after a step has broken it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class LayerOrder:
    """The order of a model's layers in a step. Layers are numbered as the model was built.

    `without_hook` has the numbers of the layers with a state.
    """

    num_layers: int
    without_hook: Collection[int] = frozenset()
    _told: dict[int, None] = field(default_factory=dict)  # layers whose hook was called, in order
    _last: int = -1  # the layer whose hook was called last in this step
    _num_done: int = 0  # how many layers, from the first on, `told` has returned in this step
    _is_shown: bool = False  # in one whole step, all hooks were called in order
    _is_broken: bool = False  # in some step, hooks were called in another order

    def told(self, layer: int) -> range:
        """Record that the hook of a layer was called. Returns the layers that may be sent now.

        A layer whose hook is called again is sent again.
        """
        if layer < self._last:
            self._is_broken = True
        self._told[layer], self._last = None, layer
        if self.without_hook and (self._is_broken or not self._is_shown):
            return range(0)
        if layer < self._num_done:
            return range(layer, layer + 1)
        first = self._num_done
        while (following := self._next_with_hook()) in self._told:
            self._num_done = following + 1
        return range(first, self._num_done)

    def _next_with_hook(self) -> int:
        layer = self._num_done
        while layer in self.without_hook:
            layer += 1
        return layer

    def end_step(self) -> range:
        """End the step. Returns the layers that `told` has not returned in this step."""
        if self.without_hook and not self._is_shown:
            hooked = [n for n in range(self.num_layers) if n not in self.without_hook]
            self._is_shown = list(self._told) == hooked
        rest = range(self._num_done, self.num_layers)
        self._told.clear()
        self._last, self._num_done = -1, 0
        return rest
