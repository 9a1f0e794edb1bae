"""DeepSpeed: the process group, the engine's configuration, and the optimiser's groups."""

import contextlib
import dataclasses
import datetime
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from infra.errors import ConfigError
from trainer.config import OptimConfig, SftConfig


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, float64, on the CPU."""
        out = values.detach().to(device=self.device, dtype=torch.float64)
        torch.distributed.all_reduce(out)
        return out.cpu()

    def gather(self, part: Any) -> list[Any]:
        """Every rank's picklable `part`, in the order of the ranks; every rank must call it."""
        parts: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(parts, part)
        return parts

    def any(self, flag: bool) -> bool:
        """True on every rank when it is on one; every rank must call it."""
        return bool(self.sum(torch.tensor([float(flag)]))[0] > 0)

    def barrier(self) -> None:
        torch.distributed.barrier()


def init_world(timeout_s: float = 1800.0) -> World:
    """Join the process group that torchrun, Slurm or Ray Train has described in the environment; alone without one."""
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # said instead of guessed with a warning
    import deepspeed

    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(_free_port())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda:
        torch.cuda.set_device(local_rank)
    else:
        # DeepSpeed would compile a shared-memory all-reduce: 100 s, and a killed build hangs the next run
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.init_distributed(
        "nccl" if cuda else "gloo",
        verbose=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        auto_mpi_discovery=False,
    )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def accumulation_steps(cfg: SftConfig, world_size: int) -> int:
    """Micro-batches per rank and optimiser step.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    per_pass = cfg.data.documents_per_micro_batch * world_size
    if cfg.data.global_batch % per_pass:
        raise ConfigError(
            f"data.global_batch = {cfg.data.global_batch} is not a multiple of {world_size} ranks × "
            f"{cfg.data.documents_per_micro_batch} documents_per_micro_batch; use a number of ranks that divides it"
        )
    return cfg.data.global_batch // per_pass


def deepspeed_config(cfg: SftConfig, world_size: int) -> dict[str, Any]:
    """The JSON that DeepSpeed gets; saved with the run. No "auto" values."""
    return {
        "train_micro_batch_size_per_gpu": cfg.data.documents_per_micro_batch,
        "gradient_accumulation_steps": accumulation_steps(cfg, world_size),
        # DeepSpeed clips after Muon, whose updates have a norm of hundreds whatever the gradient's was
        "gradient_clipping": 0.0 if cfg.optim.matrices == "muon" or _unguarded(cfg) else cfg.optim.clip,
        "bf16": {"enabled": cfg.engine.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": cfg.engine.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _unguarded(cfg: SftConfig) -> bool:
    """DeepSpeed hands the parameters to our optimiser as they are, without a wrapper that watches the gradients."""
    return cfg.engine.zero_stage == 0 and cfg.engine.dtype == "fp32"


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors (norms) without; every trainable parameter in exactly one group."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2]
    vectors = [p for p in trainable if p.ndim < 2]
    assert len(matrices) + len(vectors) == len(trainable) == len({id(p) for p in trainable})
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that clips, and skips non-finite gradients: what DeepSpeed leaves undone under ZeRO-0 in fp32.

    DeepSpeed reads both attributes after each step: `_global_grad_norm` (before clipping), and `overflow`, which is
    equal on every rank because the gradients are.
    """

    def __init__(self, groups: list[dict[str, Any]], clip: float, **settings: Any):
        super().__init__(groups, **settings)
        self.clip, self.overflow, self._global_grad_norm = clip, False, 0.0

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        self._global_grad_norm, self.overflow = float(norm), not bool(norm.isfinite())
        if not self.overflow:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
            super().step()


def build_optimizer(
    model: nn.Module, cfg: OptimConfig, device: torch.device, *, guard: bool = False
) -> torch.optim.Optimizer:
    """AdamW for everything (`GuardedAdamW` where `guard`), or DeepSpeed's Muon for matrices and AdamW for vectors.

    torch's own Muon cannot stand behind ZeRO, which hands flat pieces of matrices to the optimiser; DeepSpeed's gathers
    each matrix before it orthogonalises.
    """
    groups = parameter_groups(model, cfg.weight_decay)
    if cfg.matrices == "adamw":
        settings = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps, "fused": device.type == "cuda"}
        return GuardedAdamW(groups, cfg.clip, **settings) if guard else torch.optim.AdamW(groups, **settings)
    if device.type == "cpu":
        torch._dynamo.config.disable = True  # DeepSpeed compiles Muon's few lines for half a minute with a C++ compiler
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    muon = []
    for group in groups:
        for p in group["params"]:
            p.use_muon = p.ndim >= 2
        if group["params"][0].ndim >= 2:
            muon.append(group | {"use_muon": True, "lr": cfg.muon_lr, "momentum": cfg.muon_momentum})
        else:
            muon.append(group | {"use_muon": False, "lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps})
    return MuonWithAuxAdam(muon)


def build_engine(model: nn.Module, cfg: SftConfig, world: World) -> Any:
    """A DeepSpeed engine around `model` (the drafter alone: embedding and head are outside and never saved)."""
    import deepspeed

    optimizer = build_optimizer(model, cfg.optim, world.device, guard=_unguarded(cfg))
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        config = deepspeed_config(cfg, world.size)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if hasattr(engine.optimizer, "check_grad_overflow"):
        engine.optimizer.check_grad_overflow = True  # in fp32 too: a non-finite gradient skips the step on every rank
    return engine


def set_lr(engine: Any, cfg: OptimConfig, step: int, total: int) -> float:
    """The learning rates of 0-based `step` of `total`; returns AdamW's."""
    lr = cfg.lr_at(step, total)
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * cfg.muon_lr / cfg.lr if group.get("use_muon") else lr
    return lr


def gradient_norm(engine: Any) -> float:
    """Global norm before clipping of the latest step; NaN where DeepSpeed has none."""
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


@contextlib.contextmanager
def whole_parameters(engine: Any) -> Iterator[nn.Module]:
    """The module with all its parameters on every rank.

    ZeRO-3 yields a copy: a forward pass of the module itself is a collective, and ranks pass different numbers of
    documents through it.
    """
    if engine.zero_optimization_stage() < 3:
        yield engine.module
        return
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        copy = type(engine.module)(engine.module.config).to(parameters[0].device, parameters[0].dtype)
        with torch.no_grad():
            for mine, whole in zip(copy.parameters(), parameters, strict=True):
                mine.copy_(whole)
    yield copy


def save_module(engine: Any, world: World, save: Callable[[nn.Module], Any]) -> None:
    """`save(module)` on rank 0; every rank calls it."""
    with whole_parameters(engine) as module:
        if world.is_main:
            save(module)
    world.barrier()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
