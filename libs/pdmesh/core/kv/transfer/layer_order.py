"""Decides which layers of a prompt may be sent while a step still computes the others (S48).

The receiver pulls layers in their order, so a layer may be announced only if it and all layers
before it have been computed. An engine reports when a layer with attention is computed (its hook).
It does not report layers that keep a state: these count as computed when the next layer with a hook
is. That holds only if the model computes its layers in the order in which it was built, and some
models do not (Zamba2 builds its shared layers first). So layers of a model with states are sent
early only after a whole step has shown this order, and never again once a step has broken it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class LayerOrder:
    """Layers are numbered as the model was built. `without_hook`: those that keep a state."""

    num_layers: int
    without_hook: Collection[int] = frozenset()
    _told: dict[int, None] = field(default_factory=dict)  # in this step, by hooks, in their order
    _last: int = -1  # the layer whose hook was called last in this step
    _num_done: int = 0  # from the first layer on, how many this step has returned
    _is_shown: bool = False  # a whole step reported all layers in order
    _is_broken: bool = False  # a step reported them in another order

    def told(self, layer: int) -> range:
        """The hook of a layer was called. Returns the layers that may be sent now.

        A layer whose hook comes again is sent again.
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
        """The step is over. Returns the layers that were not sent in it yet."""
        if self.without_hook and not self._is_shown:
            hooked = [n for n in range(self.num_layers) if n not in self.without_hook]
            self._is_shown = list(self._told) == hooked
        rest = range(self._num_done, self.num_layers)
        self._told.clear()
        self._last, self._num_done = -1, 0
        return rest
