"""The state of training, named by parameter: what checkpoints hold, whatever ranks and ZeRO stage made it.

DeepSpeed's optimisers step on flat fp32 tensors, in which every stage lays the parameters out differently: whole (0),
cut through at the ranks' borders (1, 2), or a padded part of each parameter (3). Here each rank's part is a list of
`Slot`s, ranges of named parameters, so that one that reads needs to know nothing about the one that wrote. Per element:
the fp32 master weight, and Adam's two moments or Muon's momentum; the bf16 weights are the rounded masters.

DeepSpeed's own way to other ranks is its universal checkpoint, which is not used: for ZeRO-3 it hands one counter of
Adam's steps to all groups of parameters, so that it counts once per group and step; it does not know Muon's momentum;
it cannot change between all stages; and it needs a second copy of the checkpoint, made of pickles.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MASTER, STEP, MOMENTUM = "master", "step", "momentum_buffer"

Read = Callable[[str, str, int, int], Tensor]
"""(parameter, kind, first element, how many) -> flat tensor"""


@dataclasses.dataclass(frozen=True)
class Slot:
    """`length` elements of the flattened parameter `name` from `start` on, which lie in `flat` from `at` on."""

    name: str
    parameter: Tensor
    start: int
    length: int
    flat: Tensor
    """fp32, one of those that the base optimiser steps on and keeps state for"""
    at: int
    group: int
    """of the base optimiser"""

    def of(self, flat: Tensor) -> Tensor:
        """The slot's elements of a tensor laid out like `flat`: a view."""
        return flat.detach().view(-1).narrow(0, self.at, self.length)


def slots(engine: Any) -> list[Slot]:
    """This rank's; under stage 0 every rank has everything."""
    named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        return [s for n, p in named if (s := _partitioned(zero, n, p)).length > 0]
    if _base(engine) is zero:  # fp32 without ZeRO: the parameters are their own masters
        group = {id(p): i for i, g in enumerate(zero.param_groups) for p in g["params"]}
        return [Slot(n, p, 0, p.numel(), p, 0, group[id(p)]) for n, p in named]
    out = []
    for n, p in named:
        if (mapping := p._hp_mapping) is not None:
            where, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = zero.optimizer.param_groups[mapping.param_group_index]["params"][0]
            out.append(Slot(n, p, where.start, where.numel, flat, here.start, mapping.param_group_index))
    return out


def _partitioned(zero: Any, name: str, p: Any) -> Slot:
    """ZeRO-3 pads each parameter to a multiple of the ranks; the padding is no part of the state."""
    sub_group, at, size = zero.grad_position[zero.get_param_id(p)]
    start = size * torch.distributed.get_rank(p.ds_process_group)
    length = max(min(size, p.ds_numel - start), 0)
    flat = zero.fp32_partitioned_groups_flat[sub_group]
    return Slot(name, p, min(start, p.ds_numel), length, flat, at, zero.sub_group_to_group_id[sub_group])


def sizes(engine: Any) -> dict[str, int]:
    """Elements of every trainable parameter."""
    named = engine.module.named_parameters()
    return {n: getattr(p, "ds_numel", p.numel()) for n, p in named if p.requires_grad}


def parts(engine: Any, rank: int, ranks: int) -> Iterator[tuple[str, str, int, Tensor]]:
    """(parameter, kind, first element, flat view) of what this rank saves; all ranks together save everything once."""
    base = _base(engine)
    momentum_at = _whole_momentum(engine)
    replicated = base is engine.optimizer
    for slot in slots(engine):
        if replicated:
            first, last = slot.length * rank // ranks, slot.length * (rank + 1) // ranks
            slot = dataclasses.replace(slot, start=first, at=first, length=last - first)
        if slot.length == 0:
            continue
        yield slot.name, MASTER, slot.start, slot.of(slot.flat)
        for kind, value in base.state.get(slot.flat, {}).items():
            if kind == STEP:  # a tensor of AdamW, an integer of DeepSpeed's Muon; once per parameter
                if slot.start == 0:
                    yield slot.name, STEP, 0, torch.as_tensor(value, dtype=torch.float32).reshape(1)
            elif kind == MOMENTUM and id(slot.parameter) in momentum_at:
                begin = momentum_at[id(slot.parameter)] + slot.start
                yield slot.name, MOMENTUM, slot.start, value.detach().narrow(0, begin, slot.length)
            elif value.numel() == slot.flat.numel():
                yield slot.name, kind, slot.start, slot.of(value)


@torch.no_grad()
def fill(engine: Any, kinds_of: Callable[[str], set[str]], read: Read) -> None:
    """Put a saved state into this rank's slots; no collective. `publish` must follow on all ranks.

    Args:
        kinds_of: parameter -> kinds that were saved of it; none before its first step.
    """
    base = _base(engine)
    momentum_at = _whole_momentum(engine)
    for slot in slots(engine):
        slot.of(slot.flat).copy_(read(slot.name, MASTER, slot.start, slot.length))
        for kind in sorted(kinds_of(slot.name) - {MASTER, STEP}):
            state = base.state[slot.flat]
            if kind == MOMENTUM and id(slot.parameter) in momentum_at:
                whole = read(slot.name, MOMENTUM, 0, slot.parameter.numel())
                if MOMENTUM not in state:
                    members = engine.optimizer.params_in_partition[slot.group]
                    state[MOMENTUM] = slot.flat.new_zeros(sum(p.numel() for p in members), dtype=whole.dtype)
                state[MOMENTUM].narrow(0, momentum_at[id(slot.parameter)], len(whole)).copy_(whole)
                continue
            if kind not in state:
                state[kind] = torch.zeros_like(slot.flat.detach())  # padding has no momentum
            slot.of(state[kind]).copy_(read(slot.name, kind, slot.start, slot.length))
        if STEP in kinds_of(slot.name):
            steps = read(slot.name, STEP, 0, 1)
            if isinstance(base, torch.optim.AdamW):
                fused = base.param_groups[slot.group]["fused"]
                base.state[slot.flat][STEP] = steps[0].clone().to(slot.flat.device if fused else "cpu")
            else:
                base.state[slot.flat][STEP] = int(steps)


def publish(engine: Any) -> None:
    """The weights of the forward pass become the masters that `fill` has put there; every rank calls it."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        zero.checkpoint_event_prologue()  # small parameters stay whole on every rank: let go of the old ones
        for sub_group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)
        zero.checkpoint_event_epilogue()  # and gather the new ones
    elif _base(engine) is not zero:
        zero.update_lp_params()


def _base(engine: Any) -> torch.optim.Optimizer:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _whole_momentum(engine: Any) -> dict[int, int]:
    """id of a parameter -> where its momentum begins in its group's buffer, under ZeRO 1 and 2 with Muon.

    Such a buffer holds the whole matrices that the rank has a part of, because only whole ones can be orthogonalised;
    two ranks with parts of one matrix have the same momentum of it.
    """
    if not hasattr(engine.optimizer, "params_in_partition"):
        return {}
    out: dict[int, int] = {}
    for members in engine.optimizer.params_in_partition:
        if members and getattr(members[0], "use_muon", False):
            at = 0
            for p in members:
                out[id(p)] = at
                at += p.numel()
    return out
