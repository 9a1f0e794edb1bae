"""Memory of dropped tensors is used again, and never while anything still looks at it."""

import gc

import torch

from features.buffers import Buffers


def test_memory_is_used_again_only_when_the_last_view_is_gone():
    buffers = Buffers(64 * 2**20)
    a = buffers.empty((1024, 5, 512), torch.bfloat16)
    a.fill_(1)
    where, view = a.data_ptr(), a[3:5, 1].view(torch.int16)
    del a
    gc.collect()
    b = buffers.empty((1024, 5, 512), torch.bfloat16)
    b.fill_(2)
    assert b.data_ptr() != where and (view.view(torch.bfloat16) == 1).all()
    del view
    gc.collect()
    c = buffers.empty((900, 5, 512), torch.bfloat16)  # a smaller one fits
    assert c.data_ptr() == where and c.shape == (900, 5, 512) and c.is_contiguous()


def test_the_reserve_is_bounded_and_keeps_the_largest():
    buffers = Buffers(3 * 2**20)
    tensors = [buffers.empty((n, 2**20), torch.uint8) for n in (1, 2, 1, 3)]
    del tensors
    gc.collect()
    assert [len(block) for block in buffers.free] == [3 * 2**20]


def test_small_tensors_come_from_the_allocator():
    buffers = Buffers(2**20)
    assert buffers.empty((4, 3), torch.float32).shape == (4, 3) and not buffers.free
    assert buffers.empty((0, 3), torch.float32).shape == (0, 3)
