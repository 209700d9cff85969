"""Restricted workers take tensors, and nothing that leads outside of their memory."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch

from farcall.errors import NotAllowedError, SerializationError
from farcall.pytorch import layouts, plain_tensors, tensors
from farcall.security.allowed import Allowed
from farcall.serialization import OUT_OF_BAND_SIZE, dumps, loads_guarded

plain_tensors.count_as_plain()


def travelled(value: Any) -> Any:
    payload, buffers = dumps(value)
    return loads_guarded(payload, [bytearray(buffer) for buffer in buffers], Allowed([]))


class Call:
    """A pickle that calls that."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "sent",
    [
        torch.rand(2, 2),
        torch.tensor(3),
        torch.empty(0, 3),
        torch.rand(OUT_OF_BAND_SIZE),
        torch.rand(4, 5).t(),
        torch.rand(5, 5)[:, 2:4],
        torch.rand(1).expand(3),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.tensor([True, False]),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors_are_plain_data(sent: torch.Tensor) -> None:
    got = travelled({"it": [sent, sent]})["it"][0]
    assert type(got) is type(sent)
    assert (got.dtype, got.requires_grad) == (sent.dtype, sent.requires_grad)
    assert torch.equal(got, sent)


def test_sparse_tensors_are_plain_data() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sent in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
            assert torch.equal(travelled(sent).to_dense(), torch.eye(3))


class Forged:
    """Not a tensor, though it has the methods of one."""

    def detach(self) -> Any:
        raise AssertionError("it was called")

    expand = requires_grad_ = detach


@pytest.mark.parametrize(
    "call",
    [
        Call(tensors.rebuild_tensor, b"12345678", "float32", (1 << 40,)),
        Call(tensors.rebuild_tensor, b"12345678", "float32", (2,), (1 << 40,)),
        Call(tensors.rebuild_tensor, b"12345678", "bfloat16", (2, 3)),
        Call(tensors.rebuild_tensor, [1, 2], "float32", (1,)),
        Call(tensors.rebuild_tensor, b"12345678", "qint8", (8,)),
        Call(tensors.rebuild_with_gaps, torch.ones(2), (1 << 40,), False),
        Call(tensors.rebuild_parameter, {"detach": 1}, False),
        Call(layouts.rebuild_coordinates, torch.tensor([[9]]), torch.ones(1), (2,), False, False),
        Call(layouts.rebuild_compressed, "csr", torch.tensor([0, 5]), torch.tensor([0]), torch.ones(1), (1, 1), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_does_not_fit_is_refused(call: Call) -> None:
    with pytest.raises(SerializationError):
        travelled(call)


def test_only_tensors_are_parts_of_tensors() -> None:
    for function in (tensors.rebuild_parameter, tensors.rebuild_expanded):
        with pytest.raises(TypeError, match="Forged was sent as a part of a tensor"):
            plain_tensors.checked(function)(Forged(), False)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_what_torch_rebuilds_is_not_taken() -> None:
    quantized = torch.quantize_per_tensor(torch.rand(2), 0.1, 2, torch.quint8)
    for sent in (quantized, Call(torch._utils._rebuild_tensor, 1, 0, (1,), (1,)), torch.rand(2).untyped_storage()):
        with pytest.raises(NotAllowedError):
            travelled(sent)
    with pytest.raises(NotAllowedError):
        loads_guarded(pickle.dumps(torch.rand(2)), [], Allowed([]))


def test_truth_values_are_0_or_1() -> None:
    got = travelled(Call(tensors.rebuild_tensor, b"\2\0\377", "bool", (3,)))
    assert got.view(torch.uint8).tolist() == [1, 0, 1]
