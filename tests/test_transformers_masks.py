"""What transformers' models ask for, in one process: masks recognised exactly, and everything else refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_model, tokens
from torch import Tensor, nn
from transformers import PreTrainedConfig, masking_utils

from mesh_attention import LocalGroup, UsageError, causal, documents
from mesh_attention.api import MeshAttention
from mesh_attention.batches import shard_batch
from mesh_attention.masks import Mask
from mesh_attention.sequences import BatchRow, cuts_of_restarts, join_rows, split_rows
from mesh_attention.transformers import parallelize, unparallelize
from mesh_attention.transformers.attention import ShardedCall, attend, read_call
from mesh_attention.transformers.masks import BatchMask, band_of, check_meanings
from mesh_attention.transformers.models import least_end, refuse_mixing, refuse_rotary
from mesh_attention_lab.testing.kernel_conformance import is_unmasked


def alone() -> MeshAttention:
    return MeshAttention(LocalGroup(1).comm(0))


@pytest.fixture
def attention() -> MeshAttention:
    return alone()


def call_of(attention: MeshAttention | None = None, *, rows: int = 1, tokens: int = 8, **inputs: Any) -> ShardedCall:
    """The call of a model without any peculiarities."""
    model = SimpleNamespace(config=PreTrainedConfig())
    return read_call(model, {"input_ids": torch.zeros(rows, tokens)} | inputs, attention or alone())


# Masks


def windows(draw_from: st.SearchStrategy[int]) -> st.SearchStrategy[Callable[..., Any]]:
    return st.one_of(
        st.just(masking_utils.causal_mask_function),
        st.just(masking_utils.bidirectional_mask_function),
        draw_from.map(masking_utils.sliding_window_overlay),
        draw_from.map(masking_utils.sliding_window_causal_mask_function),
        draw_from.map(masking_utils.sliding_window_bidirectional_mask_function),
    )


mask_functions = st.recursive(
    windows(st.integers(1, 9)),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: masking_utils.and_masks(*parts)),
    max_leaves=4,
)


def dense(function: Callable[..., Any], batch: int, seq: int) -> Tensor:
    """What transformers itself makes of a mask function: (batch, seq, seq), True where a query sees a key."""
    mask = masking_utils.sdpa_mask(batch, seq, seq, mask_function=function, allow_is_causal_skip=False)
    assert mask is not None
    return mask[:, 0]


def dense_row(band: Any, cuts: tuple[int, ...], seq: int) -> Tensor:
    mask = band & documents(cuts)
    return torch.tensor([[is_unmasked(mask, x, y, seq, seq) for y in range(seq)] for x in range(seq)])


@given(mask_functions, st.integers(1, 10))
def test_a_mask_function_is_read_as_what_it_lets_through(function: Callable[..., Any], seq: int) -> None:
    assert torch.equal(dense(function, 1, seq)[0], dense_row(band_of(function), (0, seq), seq))


@st.composite
def padded_rows(draw: st.DrawFn) -> Tensor:
    seq, rows = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    mask = torch.zeros(rows, seq, dtype=torch.bool)
    for row in range(rows):
        start, stop = sorted(draw(st.lists(st.integers(0, seq), min_size=2, max_size=2)))
        mask[row, start:stop] = True
    return mask


@given(mask_functions, padded_rows())
def test_padding_is_honoured_for_all_real_tokens(function: Callable[..., Any], padding: Tensor) -> None:
    rows, seq = padding.shape
    call = call_of(alone(), rows=rows, tokens=seq, attention_mask=padding)
    assert call.seq_len == seq
    made = call.make_mask(batch_size=rows, q_length=seq, kv_length=seq, mask_function=function, attention_mask=padding)
    said = dense(masking_utils.and_masks(function, masking_utils.padding_mask_function(padding)), rows, seq)
    for row in range(rows):
        assert torch.equal(dense_row(made.band, made.cuts[row], seq)[padding[row]], said[row][padding[row]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_documents_are_those_transformers_finds_in_whole_position_ids(lengths: list[int]) -> None:
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    seq = sum(lengths)
    indices = masking_utils.find_packed_sequence_indices(position_ids)
    function = masking_utils.causal_mask_function
    if indices is not None:
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(indices))
    (cuts,) = cuts_of_restarts(position_ids)
    assert torch.equal(dense(function, 1, seq)[0], dense_row(causal(), cuts, seq))


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_boundaries_of_rows_are_those_of_the_flattened_batch_and_back(lengths: list[list[int]]) -> None:
    longest = max(map(sum, lengths))
    rows = tuple(tuple(sorted({*torch.tensor([0, *row]).cumsum(0).tolist(), longest})) for row in lengths)
    assert split_rows(join_rows(rows), batch=len(rows)) == rows


def test_a_transformers_that_means_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_meanings()
    monkeypatch.setattr(masking_utils, "causal_mask_function", lambda b, h, q, kv: kv < q)
    with pytest.raises(UsageError, match="of this version of transformers does not mask as"):
        check_meanings()


# What is refused: tests/golden/python/transformers-masks.txt asks for it by these


def ask_mask(given: Tensor | None = None, **changes: Any) -> BatchMask:
    asked = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": masking_utils.causal_mask_function}
    return call_of(rows=2, attention_mask=given).make_mask(**(asked | changes))


def with_hole() -> Tensor:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 3:5] = False
    return mask


one_of_four = partial(MeshAttention, LocalGroup(4).comm(1))


def ask_layer(mask: object = causal(), keys: int = 8, **arguments: Any) -> Tensor:
    q, k, v = torch.randn(1, 4, 8, 4), torch.randn(1, 2, keys, 4), torch.randn(1, 2, keys, 4)
    if isinstance(mask, Mask):
        mask = BatchMask(band=mask, call=call_of(), cuts=((0, 8),))
    return attend(nn.Identity(), q, k, v, mask, **arguments)[0]


def cuts(*ends: int, k: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"cu_seq_lens_q": torch.tensor(ends), "cu_seq_lens_k": torch.tensor(ends if k is None else k)}


def test_what_is_without_effect_is_let_through() -> None:
    ask_layer(use_cache=True, num_items_in_batch=3, output_hidden_states=True, position_bias=None, is_causal=True)


def test_sinks_take_their_share_of_every_row() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 8, 4, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = BatchMask(band=causal(), call=call_of(), cuts=((0, 8),))
    out, _ = attend(nn.Identity(), q, k, v, mask, scaling=0.5, s_aux=sinks)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    shares = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, 8, 1)], dim=-1).softmax(-1)[..., :-1]
    due = (shares @ v.repeat_interleave(2, 1)).transpose(1, 2)
    assert torch.allclose(out, due, rtol=1e-12, atol=1e-14)
    ours, theirs = (torch.autograd.grad((x * x).sum(), sinks, retain_graph=True)[0] for x in (out, due))
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# Models


def test_a_cache_that_is_only_filled_changes_nothing(attention: MeshAttention) -> None:
    model = parallelize(make_model("gemma2"), attention).eval()
    local = shard_batch(attention, tokens(2, 9) | {"attention_mask": torch.ones(2, 9)})
    filled = model(**(local | {"use_cache": True}))
    assert filled.past_key_values.get_seq_length() == 9
    assert torch.equal(filled.logits, model(**local).logits)


def test_a_hybrid_without_other_layers_is_run() -> None:
    refuse_mixing(make_model("convolutions", layer_types=["full_attention"] * 2).config)


def rotary_config(**fields: Any) -> Any:
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    return config


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5), st.sampled_from(["zigzag", "contiguous", "striped"]))
def test_long_rotary_is_let_through_when_every_rank_chooses_as_one_process_would(
    limit: int, seq: int, ranks: int, layout: str
) -> None:
    attention = MeshAttention(LocalGroup(ranks), layout=layout)
    ends = [int(ids.max()) + 1 for ids in attention.position_ids(seq) if len(ids)]
    rotary = {"rope_type": "longrope", "original_max_position_embeddings": limit}
    for parameters in (rotary, {"full_attention": rotary, "sliding_attention": {"rope_type": "default"}}):
        config = rotary_config(rope_parameters=parameters, max_position_embeddings=100)
        is_same = all((end > limit) == (seq > limit) for end in ends)
        with nullcontext() if is_same else pytest.raises(UsageError, match=r"\(longrope\)"):
            refuse_rotary(config, (least_end(attention, [BatchRow((0, seq), (0, seq))]), seq))


def test_documents_and_padding_count_as_short_for_long_rotary() -> None:
    config = rotary_config(rope_parameters={"rope_type": "longrope"}, max_position_embeddings=4)
    for row in (BatchRow((0, 20, 40), (0, 40)), BatchRow((0, 40), (3, 40))):
        with pytest.raises(UsageError, match="without padding or documents"):
            refuse_rotary(config, (least_end(alone(), [row]), 40))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_autocast_is_that_of_matrix_products(attention: MeshAttention, name: str) -> None:
    model = parallelize(make_model(name), attention).float().eval()
    local = shard_batch(attention, {"input_ids": tokens(2, 9)["input_ids"]})
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours = model(**local).logits
        unparallelize(model)
        theirs = model(local["input_ids"]).logits
    with torch.no_grad():
        exact = model(local["input_ids"]).logits
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
