"""A CUDA graph as a CPU can have it: what a function does to tensors is written down once, and done again without the function.

Python's numbers and branches are those of the first time, as in a graph, and so are numbers read from tensors (on a CPU by checks of
contents). Results lie where they lay then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from flashmix.op import remember
from flashmix.op.call import Op

Action = tuple[Callable[[], Any], list[Tensor]]  # what computes results, and where they lie


class _Recorder(TorchDispatchMode):
    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        self.actions = actions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if found and not func.is_view:  # neither looks at a tensor only nor hands out the memory of one
            self.actions.append((lambda: func(*args, **(kwargs or {})), found))
        return result


def recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Like `flashmix.models.replay.captured`. Unlike a graph's capture it runs the function, so it puts back what that changed."""
    actions: list[Action] = []
    with own_ops_recorded(actions), _Recorder(actions):
        run()

    def replay() -> None:
        for compute, places in actions:
            results = [t for t in tree_leaves(compute()) if isinstance(t, Tensor)]
            for place, new in zip(places, results, strict=True):
                if place.data_ptr() != new.data_ptr():
                    place.copy_(new)

    return replay


@contextmanager
def own_ops_recorded(actions: list[Action]) -> Iterator[None]:
    """Records each call of an implementation as one action, whatever it does inside."""
    forward = Op.forward

    def noted(self: Op, call: Any, save: bool, impl: str) -> Any:
        with _disable_current_modes():
            outputs, kept = forward(self, call, save, impl)
        actions.append((lambda: forward(self, call, save, impl)[0], list(outputs)))
        return outputs, kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "forward", noted)
        patch.setattr(remember, "rememberable", lambda tensors: False)
        yield
