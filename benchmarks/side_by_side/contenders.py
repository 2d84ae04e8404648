"""What is compared: names, and what each name stands for on a rank.

A name says everything, so that it can be sent to other processes: "ours, ulysses 4 + mesh 2x1", "USP 4·2".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mesh_attention import MeshAttention
from mesh_attention.plan.assignment import Tile, divisors, tiles_of
from mesh_attention.plan.steps import DIRECTIONS
from side_by_side.stand_in import standing_in

OURS = "ours, "
DEFAULT, MEASURED = OURS + "default", OURS + "default, links measured"
RING, ZIGZAG = "ring-flash-attention ring", "ring-flash-attention zigzag"
USP = "USP "
ALL_GATHER, ALL_TO_ALL = "torch all-gather", "torch all-to-all"
PACKAGES = {"ring_flash_attn": "zhuzilin/ring-flash-attention", "yunchang": "feifeibear/long-context-attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to compute causal attention over a sharded sequence."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """This rank's output from its Q, K and V, (batch, tokens, heads, dim)."""
    positions: Callable[[int], Tensor]
    """The position of each of this rank's tokens in a sequence of this length."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around both passes."""
    plan: Callable[[], str] = str
    """The plan of the last call, if there is one."""


# Names


def choice_names(ranks: int, kv_heads: int) -> list[str]:
    """Every method on every tile times every Ulysses degree that the heads allow."""
    return [
        OURS + name
        for degree in _degrees(ranks, kv_heads)
        for tile in tiles_of(ranks // degree)
        for name in _of_tile(degree, tile)
    ]


def _of_tile(degree: int, tile: Tile) -> list[str]:
    if tile == Tile(1, 1):
        return ["ulysses"]
    prefix = f"ulysses {degree} + " if degree > 1 else ""
    method = "ring" if tile.rows == 1 else "pass-q" if tile.cols == 1 else "mesh"
    return [f"{prefix}{method} {tile}", f"{prefix}attention2d {tile}"]


def peer_names(ranks: int, kv_heads: int) -> list[str]:
    usp = [f"{USP}{degree}·{ranks // degree}" for degree in _degrees(ranks, kv_heads)]
    return [RING, ZIGZAG, *usp, ALL_GATHER, ALL_TO_ALL]


def _degrees(ranks: int, kv_heads: int) -> list[int]:
    return [degree for degree in divisors(ranks) if kv_heads % degree == 0]


def is_choice(name: str) -> bool:
    return name.startswith(OURS) and name not in (DEFAULT, MEASURED)


def is_ring(name: str) -> bool:
    """True for a peer that passes keys and values from neighbour to neighbour through all ranks."""
    return name in (RING, ZIGZAG, ALL_TO_ALL) or name.startswith(f"{USP}1·")


def kind_of(name: str) -> str:
    """Contenders of one kind are weighed against each other before those of another."""
    return name if name in (DEFAULT, MEASURED) else name.split()[0]


# The other libraries


def find_packages(folder: Path | None) -> dict[str, Path]:
    """The folder that holds each package of the other libraries, in or below a folder."""
    found: dict[str, Path] = {}
    for package in PACKAGES if folder is not None else ():
        places = [*folder.glob(f"{package}/__init__.py"), *folder.glob(f"*/{package}/__init__.py")]
        if places:
            found[package] = places[0].parent.parent.resolve()
    return found


def digest_of(package: str, folder: Path) -> str:
    """A short hash of a package's code, since a folder need not be a checkout."""
    whole = sha256()
    for file in sorted(folder.joinpath(package).rglob("*.py")):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:12]


def import_package(
    name: str, folders: dict[str, Path], functions: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Import another library over a stand-in for flash-attn, without those of its parts that nothing here calls."""
    if name in sys.modules:
        return sys.modules[name]
    if name not in folders:
        raise ModuleNotFoundError(f"no {name} in the folder of the other libraries; clone {PACKAGES[name]} there")
    unused = {
        "ring_flash_attn.adapters": ("substitute_hf_flash_attn", "update_ring_flash_attn_params"),
        "einops": ("rearrange",),
    }
    for module, names in unused.items():
        if module not in sys.modules:
            sys.modules[module] = ModuleType(module)
            for attribute in names:
                setattr(sys.modules[module], attribute, None)
    sys.path.insert(0, str(folders[name]))
    with standing_in(functions):
        return __import__(name)


# Contenders


def make_contender(name: str, device: torch.device, folders: dict[str, Path]) -> Contender:
    """All ranks must make the same contenders in the same order, because some make groups."""
    if name.startswith(OURS):
        return _ours(name)
    if name in (RING, ZIGZAG):
        return _ring_flash_attention(name, import_package("ring_flash_attn", folders))
    if name.startswith(USP):
        ulysses, ring = map(int, name.removeprefix(USP).split("·"))
        return _usp(import_package("yunchang", folders), ulysses, ring)
    if device.type != "cuda":
        raise NotImplementedError("torch's context_parallel needs CUDA")
    return _torch(name, device)


def _ours(name: str) -> Contender:
    options: dict[str, Any] = {DEFAULT: {}, MEASURED: {"cluster": "measure"}}.get(
        name, {"choice": name.removeprefix(OURS)}
    )
    attention = MeshAttention(**options)

    def plan() -> str:
        engine = next(reversed(attention.calls.engines.values()), None)
        if engine is None:
            return ""
        plans = [engine.programs(direction)[0].plan for direction in DIRECTIONS]
        return "; ".join(dict.fromkeys(f"{plan.method} {plan.assignment}" for plan in plans))

    return Contender(
        attend=lambda q, k, v: attention(q, k, v, causal=True),
        positions=lambda tokens: attention.position_ids(tokens),
        plan=plan,
    )


def _ring_flash_attention(name: str, package: Any) -> Contender:
    is_zigzag = name == ZIGZAG
    function = package.zigzag_ring_flash_attn_func if is_zigzag else package.ring_flash_attn_func
    return Contender(
        attend=lambda q, k, v: function(q, k, v, causal=True),
        positions=_zigzag if is_zigzag else lambda tokens: torch.arange(tokens).chunk(dist.get_world_size())[_rank()],
    )


def _usp(package: Any, ulysses: int, ring: int) -> Contender:
    """Its groups are global, but an attention keeps those that were there when it was made."""
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    try:
        # Else NCCL connects every group at once, one after the other, most of them without this rank.
        world.bound_device_id = None
        package.set_seq_parallel_pg(ulysses, ring, _rank(), ulysses * ring)
    finally:
        world.bound_device_id = bound
    attention = package.LongContextAttention(
        ring_impl_type="zigzag", attn_type=sys.modules["yunchang.kernels"].AttnType.FA
    )

    def positions(tokens: int) -> Tensor:
        place, head_slice = divmod(_rank(), ulysses)
        return _zigzag(tokens, rank=place, ranks=ring).chunk(ulysses)[head_slice]

    return Contender(attend=lambda q, k, v: attention(q, k, v, causal=True), positions=positions)


def _torch(name: str, device: torch.device) -> Contender:
    """Its gradients are wrong unless backward runs inside of its context. It has no grouped heads, so K and V grow."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, device.type)

    def around() -> AbstractContextManager[object]:
        set_rotate_method(name.removeprefix("torch ").replace("-", ""))
        buffer = torch.zeros(2 * dist.get_world_size(), device=device)
        stack = ExitStack()
        stack.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}))
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        return stack

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        if k.shape[1] < q.shape[1]:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Contender(attend=attend, positions=_zigzag, around=around)


def _rank() -> int:
    return dist.get_rank()


def _zigzag(tokens: int, *, rank: int | None = None, ranks: int | None = None) -> Tensor:
    rank, ranks = (_rank(), dist.get_world_size()) if rank is None or ranks is None else (rank, ranks)
    parts: Sequence[Tensor] = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])
