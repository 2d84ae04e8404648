"""Which calls do other libraries get right, refuse, or get wrong without a word?

    python benchmarks/which_calls_do_peers_get_right.py PEERS

PEERS is a folder with clones of zhuzilin/ring-flash-attention and feifeibear/long-context-attention. Their own code
runs on processes of this machine over Gloo, with dense attention in place of flash-attn, forward, in float32. Shards
are cut as their own tests and documentation cut them. Each outcome is compared with dense attention in one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run_facts import start_result
from side_by_side import dense
from side_by_side.contenders import PACKAGES, digest_of, find_packages, import_package
from torch import Tensor

from mesh_attention import MeshAttention

HEADS, HEAD_DIM = 4, 8
LIMIT_S = 20.0
TOLERANCE = 1e-4
"""Of outputs in float32; a mask that is ignored makes a difference of about 1."""


@dataclass(frozen=True)
class Call:
    name: str
    tokens: int = 64
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    cuts: tuple[int, ...] = ()

    @property
    def boundaries(self) -> Tensor:
        return torch.tensor(self.cuts or (0, self.tokens), dtype=torch.int32)


CALLS = (
    Call("causal"),
    Call("not causal", causal=False),
    Call("causal, window (7, 0)", window=(7, 0)),
    Call("causal, softcap 2", softcap=2.0),
    Call("causal, 60 tokens: divisible by 4, not by 8", tokens=60),
    Call("causal, 61 tokens: divisible by neither", tokens=61),
    Call("causal, documents of 24 and 40 tokens", cuts=(0, 24, 64)),
    Call("causal, documents of 23 and 41 tokens", cuts=(0, 23, 64)),
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Contender = Callable[[Call, dict[str, Path]], tuple[Tensor, Attend]]
"""The positions of this rank's tokens, and what turns their Q, K and V, (1, tokens, heads, dim), into their output."""


class NoArgumentError(NotImplementedError):
    """The library has no argument for this."""


def ours(call: Call, folders: dict[str, Path]) -> tuple[Tensor, Attend]:
    attention = MeshAttention()
    options: dict[str, Any] = {"cu_seqlens_q": call.cuts} if call.cuts else {}
    options |= {"causal": call.causal, "window_size": call.window, "softcap": call.softcap, "seq_len": call.tokens}
    return attention.position_ids(call.tokens), partial(attention, **options)


def ring_flash_attention(kind: str, call: Call, folders: dict[str, Path]) -> tuple[Tensor, Attend]:
    package = import_package("ring_flash_attn", folders, dense.FUNCTIONS)
    need(not call.softcap and not call.cuts)
    function = getattr(package, f"{kind}_flash_attn_func")
    shares = {"ring": contiguous, "zigzag_ring": zigzag, "stripe": striped}[kind]
    return shares(torch.arange(call.tokens)), partial(function, causal=call.causal, window_size=call.window)


def ring_flash_attention_varlen(kind: str, call: Call, folders: dict[str, Path]) -> tuple[Tensor, Attend]:
    package = import_package("ring_flash_attn", folders, dense.FUNCTIONS)
    need(not call.softcap)
    documents = [torch.arange(a, b) for a, b in pairwise(call.boundaries.tolist())]
    local = call.boundaries // ranks()
    options = {"max_seqlen": int(local.diff().max()), "causal": call.causal, "window_size": call.window}
    function = partial(getattr(package, f"{kind}_flash_attn_varlen_func"), cu_seqlens=local, **options)
    shares = contiguous if kind == "ring" else zigzag
    return torch.cat([shares(document) for document in documents]), lambda q, k, v: function(q[0], k[0], v[0])[None]


def ring_flash_attention_llama3(call: Call, folders: dict[str, Path]) -> tuple[Tensor, Attend]:
    package = import_package("ring_flash_attn", folders, dense.FUNCTIONS)
    need(not call.softcap)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    found = package.llama3_flash_attn_prepare_cu_seqlens(call.boundaries, call.causal, dist.get_rank(), ranks())
    options = dict(zip(names, found, strict=True)) | {"heads_k_stride": 1, "causal": call.causal}
    function = partial(package.llama3_flash_attn_varlen_func, **options, window_size=call.window)
    return contiguous(torch.arange(call.tokens)), lambda q, k, v: function(q[0], k[0], v[0])[None]


def yunchang(kind: str, ulysses: int, kernel: str, call: Call, folders: dict[str, Path]) -> tuple[Tensor, Attend]:
    package = import_package("yunchang", folders, dense.FUNCTIONS)
    need(not call.cuts)
    ring = ranks() // ulysses
    package.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), ranks())
    attention = package.LongContextAttention(
        ring_impl_type=kind, attn_type=sys.modules["yunchang.kernels"].AttnType[kernel]
    )
    extract = partial(package.EXTRACT_FUNC_DICT[kind], rd=ring, ud=ulysses)
    positions = extract(torch.arange(call.tokens)[None, :, None], dist.get_rank(), ranks()).flatten()
    options = {"causal": call.causal, "window_size": call.window, "softcap": call.softcap}
    return positions, partial(attention, **options)


CONTENDERS: dict[str, Contender] = {
    "mesh-attention": ours,
    "ring_flash_attn_func": partial(ring_flash_attention, "ring"),
    "zigzag_ring_flash_attn_func": partial(ring_flash_attention, "zigzag_ring"),
    "stripe_flash_attn_func": partial(ring_flash_attention, "stripe"),
    "ring_flash_attn_varlen_func": partial(ring_flash_attention_varlen, "ring"),
    "zigzag_ring_flash_attn_varlen_func": partial(ring_flash_attention_varlen, "zigzag_ring"),
    "llama3_flash_attn_varlen_func": ring_flash_attention_llama3,
    "yunchang LongContextAttention, zigzag, 2·2": partial(yunchang, "zigzag", 2, "FA"),
    "yunchang LongContextAttention, basic, 2·2": partial(yunchang, "basic", 2, "FA"),
    "yunchang LongContextAttention, basic, 4·1": partial(yunchang, "basic", 4, "FA"),
    "yunchang LongContextAttention, basic, 2·2, TORCH_MATH": partial(yunchang, "basic", 2, "TORCH_MATH"),
    "yunchang LongContextAttention, basic, 4·1, TORCH_MATH": partial(yunchang, "basic", 4, "TORCH_MATH"),
}


def need(has_argument: bool) -> None:
    if not has_argument:
        raise NoArgumentError("no argument for it")


def ranks() -> int:
    return dist.get_world_size()


def contiguous(tokens: Tensor) -> Tensor:
    return tokens.chunk(ranks())[dist.get_rank()]


def zigzag(tokens: Tensor) -> Tensor:
    chunks = tokens.chunk(2 * ranks())
    return torch.cat([chunks[dist.get_rank()], chunks[2 * ranks() - 1 - dist.get_rank()]])


def striped(tokens: Tensor) -> Tensor:
    return tokens[dist.get_rank() :: ranks()]


# One call on all ranks


def due(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options: dict[str, Any] = {"causal": call.causal, "window": call.window, "softcap": call.softcap}
    cuts = pairwise(call.boundaries.tolist())
    return torch.cat([dense.attend(q[:, a:b], k[:, a:b], v[:, a:b], **options)[0] for a, b in cuts], dim=1)


def run_rank(rank: int, size: int, folder: str, name: str, call: Call, folders: dict[str, Path]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
    dist.barrier()  # a rank that has its answer at once must not leave while others still connect
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, call.tokens, HEADS, HEAD_DIM, generator=random).unbind()
    with torch.no_grad():
        try:
            positions, attend = CONTENDERS[name](call, folders)
            out = attend(*(tensor[:, positions].contiguous() for tensor in whole))
            error = float((out - due(call, *whole)[:, positions]).abs().max())
            said = "right" if error < TOLERANCE else f"WRONG, without a word: error {error:.1g}"
        except NoArgumentError as error:
            said = str(error)
        except Exception as error:
            said = f"raised {type(error).__name__}: {' '.join(str(error).split())[:60]}"
    Path(folder, f"rank{rank}").write_text(said)


def outcome(name: str, call: Call, size: int, folders: dict[str, Path]) -> str:
    """What the ranks say, the worst first: that of one rank with a wrong result, then of one that did not end."""
    start = multiprocessing.get_context("fork").Process
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        processes = [start(target=run_rank, args=(r, size, folder, name, call, folders)) for r in range(size)]
        for process in processes:
            process.start()
        end = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        said = {path.read_text() for path in Path(folder).glob("rank*")}
    wrong = sorted(one for one in said if one.startswith("WRONG"))
    raised = sorted(one for one in said if one.startswith("raised"))
    if wrong:
        return wrong[-1]
    if raised:
        return raised[0]
    return said.pop() if len(said) == 1 else f"no answer in {LIMIT_S:.0f} s"


def outcomes(size: int, folders: dict[str, Path]) -> Iterator[tuple[str, Call, str]]:
    for name in CONTENDERS:
        for call in CALLS:
            yield name, call, outcome(name, call, size, folders)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("peers", type=Path, metavar="PEERS")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = find_packages(options.peers)
    if missing := [source for package, source in PACKAGES.items() if package not in folders]:
        parser.error(f"{options.peers} has no clone of {' and '.join(missing)}")
    facts = start_result(Path(__file__).stem)
    digests = {package: digest_of(package, folder) for package, folder in folders.items()}
    print(f"{', '.join(f'{package} {digest}' for package, digest in digests.items())}; dense attention for flash-attn")
    print(f"{options.ranks} processes, Gloo, {HEADS} heads of {HEAD_DIM}, float32, forward")
    rows, last = [], ""
    for name, call, said in outcomes(options.ranks, folders):
        print(f"\n{name}" if name != last else "", end="\n" if name != last else "")
        print(f"  {call.name:46} {said}", flush=True)
        rows.append({"contender": name, "call": asdict(call), "outcome": said})
        last = name
    print(json.dumps(facts | {"peers": digests, "ranks": options.ranks, "outcomes": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
