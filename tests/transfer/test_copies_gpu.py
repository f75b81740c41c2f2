"""Copies in one go on a CUDA device: bits, and their place in the order of the stream."""

import pytest
import torch

from equipoise.transfer.pulls import Copy, make_copier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 9])
@pytest.mark.parametrize(("method", "is_pinned"), [("kernel", False), ("parallel", False), ("parallel", True)])
def test_copies_come_after_what_was_before_and_before_what_comes_after(count, method, is_pinned):
    copier, stream = make_copier(DEVICE, method), torch.cuda.Stream(DEVICE)
    assert copier.name == method
    targets = [torch.full((2**20 + n,), torch.nan, device=DEVICE) for n in range(count + 1)]
    sources = [torch.zeros(2**20 + n, device=DEVICE) for n in range(count)]
    wanted = [torch.randn(2**20 + n, device=DEVICE) for n in range(count)]
    sources = [source.cpu().pin_memory() for source in sources] if is_pinned else sources
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Long enough for a copy that does not wait to read the zeros.
        torch.cuda._sleep(100_000_000)
        for source, values in zip(sources, wanted, strict=True):
            source.copy_(values, non_blocking=True)
        copier.copy([Copy(target, source) for target, source in zip(targets[:count], sources, strict=True)])
        seen = [target.clone() for target in targets]
    stream.synchronize()
    assert all(torch.equal(got, values) for got, values in zip(seen[:count], wanted, strict=True))
    assert seen[-1].isnan().all()


@pytest.mark.parametrize("method", ["plain", "kernel", "parallel"])
def test_copies_on_the_default_stream_are_the_same(method):
    targets, sources = torch.zeros(5, 2**18, device=DEVICE), torch.randn(5, 2**18, device=DEVICE)
    make_copier(DEVICE, method).copy([Copy(*pair) for pair in zip(targets, sources, strict=True)])
    assert torch.equal(targets, sources)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [1, 7, 2047, 2048, 16384, 100_001])
def test_any_number_of_bytes_at_any_place_is_copied_and_nothing_beside_it(size, dtype):
    for shift in (0, 1, 4):
        source = torch.randint(0, 255, (size + 8,), device=DEVICE).to(dtype)
        target = torch.full_like(source, 77)
        make_copier(DEVICE, "kernel").copy([Copy(target[shift : shift + size], source[shift : shift + size])])
        assert torch.equal(target[shift : shift + size], source[shift : shift + size])
        assert (target[:shift] == 77).all() and (target[shift + size :] == 77).all()


def test_memory_of_one_device_is_copied_by_a_kernel():
    assert make_copier(DEVICE, sources=[torch.zeros(3, device=DEVICE)]).name == "kernel"
