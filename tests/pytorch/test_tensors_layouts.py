"""Sparse, quantized and other tensors arrive as they were sent, and bad indices are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farcall.errors import SerializationError
from farcall.pytorch import tensors  # noqa: F401 (its reducers)
from farcall.pytorch.tensors import rebuild_compressed, rebuild_coordinates
from farcall.serialization import dumps, loads


@pytest.fixture(autouse=True)
def _beta() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse|.*prototype stage|.*deprecated")
        yield


def travelled(value: Any) -> Any:
    payload, buffers = dumps(value)
    return loads(payload, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("is_coalesced", [False, True])
@pytest.mark.parametrize("rest", [(), (3,)])
@pytest.mark.parametrize("size", [0, 4, 40_000])
def test_coordinates(requires_grad: bool, is_coalesced: bool, rest: tuple[int, ...], size: int) -> None:
    indices = torch.arange(size).repeat(2, 1) // (1 if is_coalesced else 2)
    sent = torch.sparse_coo_tensor(indices, torch.rand(size, *rest), (size, size, *rest), requires_grad=requires_grad)
    if is_coalesced:
        sent = sent.detach().coalesce().requires_grad_(requires_grad)
    got = travelled(sent)
    assert (got.layout, got.shape, got.requires_grad) == (sent.layout, sent.shape, requires_grad)
    assert got.is_coalesced() == sent.is_coalesced()
    assert torch.equal(got._indices(), sent._indices())
    assert torch.equal(got._values(), sent._values())


@pytest.mark.parametrize("to", ["to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc"])
def test_compressed(to: str) -> None:
    dense = torch.eye(6) * torch.arange(6)
    sent = getattr(dense, to)(*([(2, 2)] if "bs" in to else []))
    got = travelled(sent)
    assert got.layout == sent.layout
    assert torch.equal(got.to_dense(), dense)


def test_indices_outside_are_refused() -> None:
    with pytest.raises(RuntimeError):
        rebuild_coordinates(torch.tensor([[7]]), torch.ones(1), (3,), False, False)
    with pytest.raises(RuntimeError):
        rebuild_coordinates(torch.tensor([[1, 1]]), torch.ones(2), (3,), True, False)
    with pytest.raises(RuntimeError):
        rebuild_compressed("csr", torch.tensor([0, 9]), torch.tensor([0]), torch.ones(1), (1, 1), False)


@pytest.mark.parametrize("kind", [torch.qint8, torch.quint8, torch.qint32])
def test_quantized(kind: torch.dtype) -> None:
    sent = torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 2, kind)
    got = travelled(sent)
    assert got.dtype == kind
    assert torch.equal(got.int_repr(), sent.int_repr())
    assert (got.q_scale(), got.q_zero_point()) == (sent.q_scale(), sent.q_zero_point())
    if kind is not torch.qint32:
        channels = torch.quantize_per_channel(torch.rand(3, 4), torch.rand(3) + 0.1, torch.tensor([0, 1, 2]), 0, kind)
        got = travelled(channels)
        assert torch.equal(got.dequantize(), channels.dequantize())
        assert got.q_per_channel_axis() == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested(layout: torch.layout) -> None:
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    got = travelled(torch.nested.nested_tensor(parts, layout=layout))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got.unbind(), parts, strict=True))


class Marked(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize("length", [0, 3, 30_000])
def test_subclasses_and_storages(length: int) -> None:
    got = travelled(torch.arange(length).as_subclass(Marked))
    assert type(got) is Marked
    assert torch.equal(got, torch.arange(length).as_subclass(Marked))
    storage = (
        torch.arange(length, dtype=torch.uint8).untyped_storage()
        if length < 255
        else torch.zeros(length).untyped_storage()
    )
    assert list(travelled(storage)) == list(storage)


def test_large_subclasses_are_beside_the_pickle() -> None:
    payload, [buffer] = dumps(torch.zeros(100_000).as_subclass(Marked))
    assert len(payload) < 1000
    assert buffer.nbytes == 400_000


def test_other_devices_are_refused_with_what_to_do() -> None:
    with pytest.raises(SerializationError, match=r"only supports CPU tensors by default.*`set_device_map` on"):
        dumps(torch.zeros(2, device="meta"))
    with pytest.raises(SerializationError, match="Response device mapping is not available"):
        dumps(torch.zeros(2, device="meta").untyped_storage())
