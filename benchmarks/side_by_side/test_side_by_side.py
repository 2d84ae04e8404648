"""Parts of how_fast_on_nccl, on the CPU: the stand-in for flash-attn is right, and wrong contenders are found out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from which_calls_do_peers_get_right import CALLS, outcome

from side_by_side import dense, stand_in
from side_by_side.contenders import RING, ZIGZAG, find_packages

BENCHMARK = Path(__file__).resolve().parents[1] / "how_fast_on_nccl.py"
WRONG = """
import torch.distributed as dist
from flash_attn.flash_attn_interface import _flash_attn_forward

def ring_flash_attn_func(q, k, v, causal):
    return _flash_attn_forward(q, k, v, causal=causal)[0]  # its own tokens only

def zigzag_ring_flash_attn_func(q, k, v, causal):
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    return q + 0 * k + 0 * v
"""


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_stand_in_is_attention(is_causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 12, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    out, lse, *_ = stand_in.forward(q, k, v, causal=is_causal, softmax_scale=0.3)
    gradients = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    stand_in.backward(d_out, q, k, v, out, lse, *gradients, causal=is_causal, softmax_scale=0.3)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    keys = leaves[1].repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], keys) * 0.3
    if is_causal:
        scores = scores.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    due = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2].repeat_interleave(2, dim=2))
    torch.testing.assert_close(out, due)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for gradient, expected in zip(gradients, torch.autograd.grad(due, leaves, d_out), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_the_stand_in_refuses_what_it_would_get_wrong() -> None:
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 8, 1, 8)
    for options in ({"causal": True}, {"window_size_left": 2}, {"softcap": 1.0}, {"dropout_p": 0.1}):
        with pytest.raises(NotImplementedError):
            stand_in.forward(q, k, k, **options)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size_left": 2, "window_size_right": 1}, {"causal": True, "softcap": 0.5}]
)
def test_the_dense_stand_in_is_attention_one_query_at_a_time(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 4, generator=generator) for tokens, heads in ((5, 2), (7, 1), (7, 1)))
    out, lse, *_ = dense.forward(q, k, v, softmax_scale=0.7, **options)
    for query in range(5):
        place = query + 2  # aligned at the bottom right
        first = max(0, place - options["window_size_left"]) if "window_size_left" in options else 0
        last = place if options.get("causal") else min(6, place + options.get("window_size_right", 7))
        scores = q[0, query] @ k[0, first : last + 1, 0].T * 0.7
        scores = 0.5 * (scores / 0.5).tanh() if "softcap" in options else scores
        torch.testing.assert_close(out[0, query], scores.softmax(-1) @ v[0, first : last + 1, 0])
        torch.testing.assert_close(lse[0, :, query], scores.logsumexp(-1))


def test_the_dense_stand_in_keeps_documents_apart_and_marks_queries_that_see_nothing() -> None:
    q, k, v = torch.randn(3, 6, 2, 4, generator=torch.Generator().manual_seed(0))
    cuts = torch.tensor([0, 2, 6])
    out, lse, *_ = dense.varlen_forward(q, k, v, cuts, cuts, 4, 4, causal=True)
    alone, alone_lse, *_ = dense.forward(q[None, 2:], k[None, 2:], v[None, 2:], causal=True)
    torch.testing.assert_close(out[2:], alone[0])
    torch.testing.assert_close(lse[:, 2:], alone_lse[0])
    longer, nothing, *_ = dense.forward(q[None], k[None, :2], v[None, :2], causal=True)  # 6 queries, 2 keys
    assert longer[0, :4].eq(0).all()
    assert nothing[0, :, :4].eq(torch.inf).all()
    assert nothing[0, :, 4:].isfinite().all()


def test_a_call_that_a_peer_gets_wrong_or_refuses_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "ring_flash_attn").mkdir()
    (tmp_path / "ring_flash_attn" / "__init__.py").write_text(WRONG.replace("v, causal):", "v, causal, window_size):"))
    folders = {"ring_flash_attn": tmp_path}
    said = {name: outcome(name, CALLS[0], 2, folders) for name in ("mesh-attention", *RFA)}
    assert said["mesh-attention"] == "right"
    assert said["ring_flash_attn_func"].startswith("WRONG, without a word: error ")
    assert said["zigzag_ring_flash_attn_func"].startswith("WRONG"), "rank 0 did not raise"
    assert said["stripe_flash_attn_func"].startswith("raised AttributeError: module 'ring_flash_attn' has no attribute")
    softcap = next(call for call in CALLS if call.softcap)
    assert outcome("ring_flash_attn_func", softcap, 2, folders) == "no argument for it"


RFA = ("ring_flash_attn_func", "zigzag_ring_flash_attn_func", "stripe_flash_attn_func")


def test_our_own_kernels_do_not_find_the_stand_in() -> None:
    with stand_in.standing_in():
        assert sys.modules["flash_attn"].__version__ == stand_in.VERSION
    assert getattr(sys.modules.get("flash_attn"), "__version__", None) != stand_in.VERSION


@pytest.mark.slow
def test_contenders_that_are_wrong_or_raise_are_reported_and_not_timed(tmp_path: Path) -> None:
    package = tmp_path / "clone" / "ring_flash_attn"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(WRONG)
    assert list(find_packages(tmp_path)) == ["ring_flash_attn"]
    small = ["--device", "cpu", "--ranks", "2", "--seq", "64", "--heads", "2", "--head-dim", "8", "--rounds", "1"]
    chosen = ["--only", "default$|pass-q|ring-flash|USP 2", "--timeout", "5", "--store", str(tmp_path / "found.json")]
    command = [sys.executable, str(BENCHMARK), str(tmp_path), *small, *chosen]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (found,) = json.loads(tmp_path.joinpath("found.json").read_text())
    entries = {entry["name"]: entry for entry in found["contenders"]}
    for name, failure in {RING: "wrong", ZIGZAG: "rank 1 does not like this", "USP 2·1": "no yunchang"}.items():
        assert failure in entries[name]["failure"]
        assert not entries[name]["final"]
    for name in ("ours, default", "ours, pass-q 2x1"):
        assert not entries[name]["failure"]
        assert entries[name]["final"]
    (claim,) = found["claims"]
    assert claim["rival"] == "ours, pass-q 2x1"
