"""What a backward pass has to run on this worker, in parts that have nothing to do with each other.

The graph behind the roots is one part, that behind each message that was sent is another. Most often they share no
node: then each can be run by itself, as soon as its gradients are there, and nothing has to wait inside of torch's
engine (`parted`). `survey` walks through the graph once and says so, or that they are not apart.

Rules
- Parts are apart if no node is in two of them. Variables may be: their gradients are sums, in whatever order the parts
  are run. But one with hooks may not, as those are to see the whole sum.
- A run has the engine hand out the gradients of variables and of what was received, with no Python in between. The
  hooks of tensors run as ever. Those of a variable's node would not, and nothing can be seen of them but that somebody
  holds that node: such graphs are not taken apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.accumulating import add_up
from farcall.pytorch.autograd.contexts import DistAutogradContext
from farcall.pytorch.autograd.nodes import RECEIVE_FUNCTION, is_hooked

_strided: Final = torch.strided
_count_holders: Final = sys.getrefcount
_Leaf: Final = type(torch.zeros(0, requires_grad=True).view(0).grad_fn.next_functions[0][0])
"""The type of the nodes of variables."""
_NO_SECOND_DERIVATIVES: Final = False
_UNREACHED_IS_NONE: Final = True
_NOT_IN_GRAD: Final = False


Found: TypeAlias = Sequence[torch.Tensor | None]
"""Gradients, as torch's engine hands them out: of variables first."""


class Produced(NamedTuple):
    """Gradients for another worker: of what came from it with that message."""

    to: WorkerInfo
    message_id: int
    gradients: list[torch.Tensor]


class Part(NamedTuple):
    """A part of the graph."""

    starts: tuple[Any, ...]
    """Where gradients go in: tensors, or edges of the graph."""
    variables: list[torch.Tensor]
    received: list[Any]
    """The receive functions, from which it goes on elsewhere."""

    def run(self, gradients: Sequence[torch.Tensor], retain_graph: bool) -> tuple[list[Produced], Found]:
        """Runs it: the gradients of what was received, and all that were found, which are to be kept (`keep`).

        Raises what hooks and nodes raise.
        """
        origins, edges = [], []  # loops, not comprehensions, each of which is a call: most often there is one to see to
        for node in self.received:
            origins.append(node.origin)
            for place in range(len(node.origin.likes)):
                edges.append(GradientEdge(node, place))
        found: Found = Variable._execution_engine.run_backward(
            self.starts,
            tuple(gradients),
            retain_graph,
            _NO_SECOND_DERIVATIVES,
            (*self.variables, *edges),
            _UNREACHED_IS_NONE,
            _NOT_IN_GRAD,
        )
        produced = []
        place = len(self.variables)
        for origin in origins:
            filled = []
            for shape, kind in origin.likes:
                gradient = found[place]
                filled.append(torch.zeros(shape, **kind) if gradient is None else gradient)
                place += 1
            produced.append(Produced(origin.sender, origin.message_id, filled))
            gradient = None  # who counts holders should not find this frame
        return produced, found

    def keep(self, context: DistAutogradContext, found: Found) -> None:
        """The gradients of variables that a run has found go into the context.

        Those of what was received must be in somebody's hands meanwhile, so that none of them is taken for unshared.
        """
        if not self.variables:
            return
        used, held = _unshared_holders()
        with context.lock:
            gradients_here = context.gradients.by_id
            for place, variable in enumerate(self.variables):
                gradient = found[place]
                if gradient is None:
                    continue
                is_unshared = gradient._use_count() <= used and _count_holders(gradient) <= held
                if (
                    is_unshared
                    and id(variable) not in gradients_here
                    and gradient.layout is _strided
                    and gradient.is_contiguous()
                    and variable.is_contiguous()
                ):
                    gradients_here[id(variable)] = variable, gradient  # as nearly always: what `add_up` would do
                else:
                    with torch.no_grad():
                        add_up(context.gradients, variable, gradient, is_unshared)


def survey(roots: Sequence[torch.Tensor], sent: Iterable[Any]) -> tuple[Part | None, list[Part]] | None:
    """The part behind the roots, if there are any, and those behind these send functions. None: they are not apart."""
    seen: dict[Any, int] = {}
    leaves: dict[Any, list[Part]] = {}
    parts: list[Part] = []
    for node in sent:
        following = node.next_functions
        starts = tuple([at.variable if type(at) is _Leaf else GradientEdge(at, place) for at, place in following])
        parts.append(part := Part(starts, [], []))
        if not _walk([node], part, len(parts), seen, leaves):
            return None
    root_part = None
    if roots:
        root_part = Part(tuple(roots), [], [])
        if not _walk([root.grad_fn for root in roots], root_part, 0, seen, leaves):
            return None
    node = following = None  # leaves may be in there, whose holders are counted now
    if leaves and max(_leaf_holders(leaves)) > _unheld():
        return None
    for leaf, behind in leaves.items():
        variable = leaf.variable
        if variable._post_accumulate_grad_hooks or (len(behind) > 1 and variable._backward_hooks):
            return None
        for part in behind:
            part.variables.append(variable)
    return root_part, parts


def _walk(starts: Iterable[Any], part: Part, number: int, seen: dict[Any, int], leaves: dict[Any, list[Part]]) -> bool:
    """Notes what is behind these nodes; False if some of it is behind another part, too."""
    ahead: list[Any] = []
    for start in starts:
        if start not in seen:
            seen[start] = number
            ahead.append(start)
        elif seen[start] != number:
            return False
    while ahead:
        node = ahead.pop()
        if isinstance(node, RECEIVE_FUNCTION):
            if is_hooked(node):
                return False
            part.received.append(node)
            continue
        for following, _ in node.next_functions:
            if following is None:
                continue
            if type(following) is _Leaf:
                behind = leaves.get(following)
                if behind is None:
                    leaves[following] = [part]
                elif behind[-1] is not part:
                    behind.append(part)
                continue
            known = seen.get(following)
            if known is None:
                seen[following] = number
                ahead.append(following)
            elif known != number:
                return False
    return True


def _leaf_holders(leaves: Iterable[Any]) -> list[int]:
    return [sys.getrefcount(leaf) for leaf in leaves]


@cache
def _unheld() -> int:
    """What `_leaf_holders` gives for a node that nobody else holds: measured, as it is Python's affair."""
    variable = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        view = variable.view_as(variable)  # a node that is in a graph is held by torch as well
    return _leaf_holders({view.grad_fn.next_functions[0][0]: None})[0]


@cache
def _unshared_holders() -> tuple[int, int]:
    """What torch and Python say, where `Part.keep` asks, of a gradient that only the engine's result holds."""
    found = (torch.zeros(1),)
    gradient = found[0]
    return gradient._use_count(), _count_holders(gradient)
