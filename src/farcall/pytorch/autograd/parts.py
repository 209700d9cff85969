"""What a backward pass has to run on this worker, in parts that have nothing to do with each other.

The graph behind the roots is one part, that behind each message that was sent is another. Most often they share no
node: then each can be run by itself, as soon as its gradients are there, and nothing has to wait inside of torch's
engine (`parted`). `survey` says so, or that they are not apart. What is behind a message is walked through once, and
best while others work: right after it was sent (`through`).

Rules
- Parts are apart if no node is in two of them. Variables may be: their gradients are sums, in whatever order the parts
  are run. But one with hooks may not, as those are to see the whole sum.
- A run has the engine hand out the gradients of variables and of what was received, with no Python in between. The
  hooks of tensors run as ever. Those of a variable's node would not, and nothing can be seen of them but that somebody
  holds that node: such graphs are not taken apart.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.autograd.accumulating import add_up, shows_others
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
                    and not shows_others(gradient)
                ):
                    gradients_here[id(variable)] = variable, gradient  # as nearly always: what `add_up` would do
                else:
                    with torch.no_grad():
                        add_up(context.gradients, variable, gradient, is_unshared)


class Walk:
    """What a walk through the graph has found that cannot change: hooks come and go, the graph stays."""

    __slots__ = ("leaves", "nodes", "received")

    def __init__(self) -> None:
        self.nodes: set[Any] = set()
        self.received: list[Any] = []
        self.leaves: list[tuple[Any, list[int]]] = []
        """Nodes that come right before those of variables, and where. Not these themselves: who holds one counts."""

    def go(self, starts: Iterable[Any], others: Container[Any]) -> bool:
        """Notes what is behind these nodes; False if some of it is among those others."""
        nodes, leaves = self.nodes, set()
        ahead: list[Any] = []
        for start in starts:
            if start in others:
                return False
            if start not in nodes:
                nodes.add(start)
                ahead.append(start)
        while ahead:
            node = ahead.pop()
            if isinstance(node, RECEIVE_FUNCTION):
                self.received.append(node)
                continue
            places = None
            for place, (following, _) in enumerate(node.next_functions):
                if following is None or following in nodes:
                    continue
                if type(following) is _Leaf:
                    if following not in leaves:
                        leaves.add(following)
                        if places is None:
                            self.leaves.append((node, places := []))
                        places.append(place)
                    continue
                if following in others:
                    return False
                nodes.add(following)
                ahead.append(following)
        return True


class Walks:
    """The walks through what is behind the messages of one context. One thread at a time."""

    __slots__ = ("_are_apart", "_nodes", "_walks")

    def __init__(self) -> None:
        self._walks: dict[Any, Walk] = {}  # by send function
        self._nodes: set[Any] = set()
        self._are_apart = True

    def through(self, node: Any) -> Walk | None:
        """What is behind that send function. None, from then on always, if it is not apart from all others."""
        walk = self._walks.get(node)
        if walk is None and self._are_apart:
            walk = Walk()
            self._are_apart = walk.go([node], self._nodes)
            self._nodes |= walk.nodes
            self._walks[node] = walk
        return walk if self._are_apart else None

    def survey(self, roots: Sequence[torch.Tensor], sent: Iterable[Any]) -> tuple[Part | None, list[Part]] | None:
        """The part behind the roots, if there are any, and those behind these send functions; None if they touch."""
        leaves: dict[Any, list[Part]] = {}
        parts: list[Part] = []
        for node in sent:
            walk = self.through(node)
            if walk is None:
                return None
            following = node.next_functions
            starts = tuple([at.variable if type(at) is _Leaf else GradientEdge(at, place) for at, place in following])
            parts.append(_part(starts, walk, leaves))
        root_part = None
        if roots:
            walk = Walk()
            if not walk.go([root.grad_fn for root in roots], self._nodes):
                return None
            root_part = _part(tuple(roots), walk, leaves)
        node = following = None  # leaves may be in there, whose holders are counted now
        if leaves and max(_leaf_holders(leaves)) > _unheld():
            return None
        for leaf, behind in leaves.items():
            variable = leaf.variable
            if variable._post_accumulate_grad_hooks or (len(behind) > 1 and variable._backward_hooks):
                return None
            for part in behind:
                part.variables.append(variable)
        for part in (*parts, root_part) if root_part is not None else parts:
            for node in part.received:
                if is_hooked(node):
                    return None
        return root_part, parts


def _part(starts: tuple[Any, ...], walk: Walk, leaves: dict[Any, list[Part]]) -> Part:
    """A part of which the variables are to be found yet: by their nodes, which it adds to `leaves`."""
    part = Part(starts, [], walk.received)
    for node, places in walk.leaves:
        following = node.next_functions
        for place in places:
            leaf = following[place][0]
            behind = leaves.get(leaf)
            if behind is None:
                leaves[leaf] = [part]
            else:
                behind.append(part)
    return part


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
