"""What any merging, and any way of computing rows, must do: checks of one case, on one device, against float64.

Give the checks cases from `cases()`. Tensors lie in memory in any order and with neighbours on all sides, which are NaN
and must stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from mesh_attention.kernels.base import Merging
from mesh_attention.kernels.merging import TorchMerging

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Place:
    """How a tensor is stored: its axes, outermost first, and how many neighbours it has along each axis."""

    order: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes, dtypes and places of a running output and of a partial one, and of their statistics."""

    batch: int
    heads: int
    tokens: int
    dim: int
    wide: torch.dtype
    narrow: torch.dtype
    blind: Literal["no row", "some rows", "all rows"]
    outputs: tuple[Place, Place]
    statistics: tuple[Place, Place]
    seed: int


def places(axes: int) -> st.SearchStrategy[Place]:
    """Records as the executor has them, what kernels give, and anything else."""
    none = (0,) * axes
    margins = st.tuples(*[st.sampled_from((0, 0, 1, 2))] * axes)
    usual = ((2, 0, 1, 3)[:axes], (0, 2, 1, 3)[:axes], (0, 1, 2, 3)[:axes])
    return st.one_of(
        st.builds(Place, st.sampled_from(usual), st.just(none), st.just(none)),
        st.builds(Place, st.permutations(range(axes)).map(tuple), margins, margins),
    )


def cases(tokens: int = 9, dims: Sequence[int] = (1, 3, 8, 64, 80, 128, 192)) -> st.SearchStrategy[Case]:
    pairs = [(torch.float32, narrow) for narrow in DTYPES[:3]] + [(torch.float64, narrow) for narrow in DTYPES[2:]]
    shapes = st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            "heads": st.integers(1, 5),
            "tokens": st.integers(0, tokens),
            "dim": st.sampled_from(dims),
            "blind": st.sampled_from(("no row", "some rows", "all rows")),
            "outputs": st.tuples(places(4), places(4)),
            "statistics": st.tuples(places(3), places(3)),
            "seed": st.integers(0, 999),
        }
    )
    return st.builds(lambda shape, pair: Case(**shape, wide=pair[0], narrow=pair[1]), shapes, st.sampled_from(pairs))


_RECORDS, _DENSE = Place((2, 0, 1, 3), (0, 1, 0, 0), (0, 0, 0, 0)), Place((0, 2, 1, 3), (0,) * 4, (0,) * 4)

TYPICAL = Case(
    batch=2,
    heads=5,
    tokens=43,
    dim=128,
    wide=torch.float32,
    narrow=torch.bfloat16,
    blind="some rows",
    outputs=(_RECORDS, _DENSE),
    statistics=(Place((2, 0, 1), (0, 0, 0), (0, 640, 0)), Place((0, 1, 2), (0,) * 3, (0,) * 3)),
    seed=1,
)
"""As the executor merges, and a kernel gives; more rows than one program takes."""


class Placed:
    """A tensor in its place. `view` is the tensor; the rest is NaN."""

    def __init__(self, values: Tensor, place: Place) -> None:
        sizes = [values.shape[axis] + place.before[axis] + place.after[axis] for axis in place.order]
        self.whole = torch.full(sizes, torch.nan, dtype=values.dtype, device=values.device)
        view = self.whole.permute([place.order.index(axis) for axis in range(values.dim())])
        for axis, size in enumerate(values.shape):
            view = view.narrow(axis, place.before[axis], size)
        self.view = view
        view.copy_(values)
        self._at_first, self._values = self.whole.clone(), values.clone()

    def check_neighbours(self) -> None:
        now = self.whole.clone()
        self._inside(now).copy_(self._values)
        assert _same_bits(now, self._at_first), "wrote outside of the view"

    def check_unchanged(self) -> None:
        assert _same_bits(self.whole, self._at_first), "wrote into what it reads"

    def _inside(self, other: Tensor) -> Tensor:
        return other.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


class Inputs:
    """A running output and a partial one, in their places, with their statistics."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.seed)
        shape = (case.batch, case.heads, case.tokens, case.dim)
        self.total = _placed(torch.randn(shape, dtype=case.wide), case.outputs[0], device)
        self.partial = _placed(torch.randn(shape).to(case.narrow), case.outputs[1], device)
        lses = [3 * torch.randn(shape[:3], dtype=case.wide) for _ in range(2)]
        if case.blind == "some rows":
            lses = [lse.masked_fill(torch.rand(shape[:3]) < 0.4, -torch.inf) for lse in lses]
        if case.blind == "all rows":
            lses[case.seed % 2].fill_(-torch.inf)
        lses[0] = lses[0].double()  # as the executor has it, for every dtype
        self.total_lse, self.lse = (
            _placed(lse, place, device) for lse, place in zip(lses, case.statistics, strict=True)
        )

    def merge(self, merging: Merging) -> tuple[Tensor, Tensor]:
        """Of fresh copies."""
        total, total_lse = self.total.view.clone(), self.total_lse.view.clone()
        merging.merge_output(total, total_lse, self.partial.view, self.lse.view)
        return total, total_lse

    def truth(self) -> tuple[Tensor, Tensor]:
        ours, theirs = self.total_lse.view.double(), self.lse.view.double()
        joint = torch.logaddexp(ours, theirs)
        weights = [(lse - joint).exp().nan_to_num(0.0)[..., None] for lse in (ours, theirs)]
        return weights[0] * self.total.view.double() + weights[1] * self.partial.view.double(), joint

    def error(self, merged: tuple[Tensor, Tensor]) -> float:
        """The largest, in units of what rounding to the running dtype alone may do."""
        (total, lse), (due, due_lse) = merged, self.truth()
        blind = due_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, blind), "the wrong rows saw nothing"
        size = self.total.view.double().abs() + self.partial.view.double().abs()
        errors = ((total.double() - due).abs() / size.clamp_min(1e-3)).amax(-1)
        lse_errors = ((lse - due_lse).abs() / due_lse.abs().clamp_min(1.0)).masked_fill(blind, 0.0)
        assert not errors.isnan().any(), "NaN"
        return max(errors.max().item(), lse_errors.max().item()) / torch.finfo(total.dtype).eps if total.numel() else 0


LARGEST_ERROR = 6
"""Of a merge: an exponential of a difference of up to 20 that is rounded, a product and a sum."""

Check = Callable[[Merging, torch.device, Case], None]


def partials_are_folded_in_by_their_weights(merging: Merging, device: torch.device, case: Case) -> None:
    given, before = Inputs(case, device), Inputs(case, device)
    merging.merge_output(given.total.view, given.total_lse.view, given.partial.view, given.lse.view)
    assert before.error((given.total.view, given.total_lse.view)) < LARGEST_ERROR
    for running in (given.total, given.total_lse):
        running.check_neighbours()
    for source in (given.partial, given.lse):
        source.check_unchanged()


def merging_is_no_less_exact_than_torch(merging: Merging, device: torch.device, case: Case) -> None:
    if case.wide == torch.float64:
        return  # the truth is no better
    given = Inputs(case, device)
    assert given.error(given.merge(merging)) <= 2 + 1.5 * given.error(given.merge(TorchMerging()))


def the_same_inputs_give_the_same_bits(merging: Merging, device: torch.device, case: Case) -> None:
    given = Inputs(case, device)
    first, second = given.merge(merging), given.merge(merging)
    assert all(map(_same_bits, first, second))


def what_saw_nothing_changes_nothing(merging: Merging, device: torch.device, case: Case) -> None:
    """To the bit: neither as the partial, nor as the running sum."""
    given = Inputs(case, device)
    total, lse = given.total.view.clone(), given.total_lse.view.clone()
    nothing = torch.full_like(given.lse.view, -torch.inf)
    merging.merge_output(given.total.view, given.total_lse.view, given.partial.view, nothing)
    seen = (lse > -torch.inf)[..., None]
    assert torch.equal(given.total.view, torch.where(seen, total, 0.0))
    assert torch.equal(given.total_lse.view, lse)
    given.total_lse.view.fill_(-torch.inf)
    merging.merge_output(given.total.view, given.total_lse.view, given.partial.view, given.lse.view)
    seen = (given.lse.view > -torch.inf)[..., None]
    assert torch.equal(given.total.view, torch.where(seen, given.partial.view.to(case.wide), 0.0))
    assert torch.equal(given.total_lse.view, given.lse.view.double())


def the_first_partial_is_taken_without_reading(merging: Merging, device: torch.device, case: Case) -> None:
    given = Inputs(case, device)
    given.total.view.fill_(torch.nan)
    given.total_lse.view.fill_(torch.nan)
    merging.start_output(given.total.view, given.total_lse.view, given.partial.view, given.lse.view)
    assert _same_bits(given.total.view, given.partial.view.to(case.wide))
    assert _same_bits(given.total_lse.view, given.lse.view.double())
    for running in (given.total, given.total_lse):
        running.check_neighbours()


def copies_are_rounded_to_nearest_even(merging: Merging, device: torch.device, case: Case) -> None:
    """Between any two dtypes, as torch rounds: ties, overflow, subnormals and NaN included."""
    given = Inputs(case, device)
    for source, dest_place in ((given.total, case.outputs[1]), (given.lse, case.statistics[0])):
        _spoil(source.view)
        for dtype in DTYPES:
            dest = _placed(torch.full(source.view.shape, torch.nan, dtype=dtype), dest_place, device)
            merging.copy(dest.view, source.view)
            due = source.view.to(dtype)
            assert torch.equal(dest.view.isnan(), due.isnan())
            assert _same_bits(
                dest.view.nan_to_num(0.0, torch.inf, -torch.inf), due.nan_to_num(0.0, torch.inf, -torch.inf)
            )
            dest.check_neighbours()


def gradients_are_added_with_one_rounding(merging: Merging, device: torch.device, case: Case) -> None:
    given = Inputs(case, device)
    due = given.total.view + given.partial.view.to(case.wide)
    merging.add(given.total.view, given.partial.view)
    assert torch.equal(given.total.view, due)
    given.total.check_neighbours()
    given.partial.check_unchanged()


def an_output_and_its_lse_may_share_a_record(merging: Merging, device: torch.device, case: Case) -> None:
    """Both as bytes of one (tokens, batch, bytes), side by side: the running sum, and what has arrived."""
    given = Inputs(case, device)
    running = _record(given.total.view, given.total_lse.view)
    arrived = _record(given.partial.view, given.lse.view)
    merging.merge_output(*running, *arrived)
    assert given.error(running) < LARGEST_ERROR


def weights_add_up_to_1_at_any_size(merging: Merging, device: torch.device, case: Case) -> None:
    """A merge of equal values gives that value, and a merge of others lies between them, however large the LSEs are."""
    for size in (1e3, 1e5, 1e8, 1e30, 1e38):
        given = Inputs(case, device)
        for lse in (given.total_lse.view, given.lse.view):
            lse.copy_(torch.where(lse == -torch.inf, lse, (lse / 9).clamp(-3, 3) * size))
        given.total.view.copy_(given.partial.view)
        total, _ = given.merge(merging)
        blind = torch.maximum(given.total_lse.view, given.lse.view) == -torch.inf
        due = given.partial.view.to(case.wide).masked_fill(blind[..., None], 0.0)
        torch.testing.assert_close(total, due, rtol=4 * torch.finfo(case.wide).eps, atol=0.0)
        other = Inputs(case, device)
        other.total_lse.view.copy_(given.lse.view)  # equal: the mean
        other.lse.view.copy_(given.lse.view)
        mean = (other.total.view.double() + other.partial.view.double()) / 2
        mean = mean.masked_fill((given.lse.view == -torch.inf)[..., None], 0.0)
        bound = 4 * torch.finfo(case.wide).eps * (other.total.view.double().abs() + other.partial.view.double().abs())
        assert ((other.merge(merging)[0].double() - mean).abs() <= bound).all(), f"not the mean at {size:.0e}"


def what_is_not_finite_stays_so(merging: Merging, device: torch.device, case: Case) -> None:
    """NaN and inf are not hidden, whichever side they are on; and they stay in their rows."""
    if not case.tokens:
        return
    for spoiled, theirs in product((torch.nan, torch.inf), (False, True)):
        given, clean = Inputs(case, device), Inputs(case, device)
        output, lse = (given.partial, given.lse) if theirs else (given.total, given.total_lse)
        output.view[0, 0, 0], lse.view[0, 0, 0] = torch.nan, spoiled  # as kernels return them
        total, total_lse = given.merge(merging)
        assert total[0, 0, 0].isnan().all()
        assert not total_lse[0, 0, 0].isfinite()
        due, due_lse = clean.merge(merging)
        for ours, expected in ((total, due), (total_lse, due_lse)):
            ours[0, 0, 0] = expected[0, 0, 0]
            assert _same_bits(ours, expected)


CHECKS: tuple[Check, ...] = (
    partials_are_folded_in_by_their_weights,
    weights_add_up_to_1_at_any_size,
    what_is_not_finite_stays_so,
    merging_is_no_less_exact_than_torch,
    the_same_inputs_give_the_same_bits,
    what_saw_nothing_changes_nothing,
    the_first_partial_is_taken_without_reading,
    copies_are_rounded_to_nearest_even,
    gradients_are_added_with_one_rounding,
    an_output_and_its_lse_may_share_a_record,
)


# Rows: `functions` has `row_delta` and `stand_in_rows`, as the module `kernels.merging` has them.

GRADIENT_POWERS = ((0, 0), (-80, -80), (-130, -130), (123, 118))
"""Powers of two for dO and delta: usual ones; squares that are 0; subnormal numbers; sums that overflow."""
RowCheck = Callable[[Any, torch.device, Case], None]


def delta_is_the_sum_over_a_row(functions: Any, device: torch.device, case: Case) -> None:
    given = Inputs(case, device)
    out, d_out = given.partial.view.transpose(1, 2), given.total.view.to(case.narrow).transpose(1, 2)
    delta = functions.row_delta(out, d_out, wide=case.wide)
    products = out.double() * d_out.double()
    assert delta.dtype == case.wide
    assert delta.shape == out.shape[:3]
    bound = (case.dim + 1) * torch.finfo(case.wide).eps * products.abs().sum(-1)
    assert ((delta.double() - products.sum(-1)).abs() <= bound).all()


def a_stand_in_has_the_same_delta(functions: Any, device: torch.device, case: Case) -> None:
    """Of gradients of any size; rows without gradient get zeros."""
    given = Inputs(case, device)
    do, delta = given.partial.view, given.total.view.sum(-1)
    if case.narrow != torch.float16:  # which holds no such numbers
        power, delta_power = GRADIENT_POWERS[case.seed % len(GRADIENT_POWERS)]
        do, delta = do.mul_(2.0**power), delta * 2.0**delta_power
    do[:, :, ::3] = 0.0
    out, _ = functions.stand_in_rows(do, delta, delta)
    assert (out.dtype, out.shape) == (do.dtype, do.shape)
    sums = (out.double() * do.double()).sum(-1)
    bound = 2 * torch.finfo(case.narrow).eps + case.dim * torch.finfo(case.wide).eps
    has_gradient = (do != 0).any(-1)
    assert ((sums - delta.double()).abs() <= bound * delta.double().abs())[has_gradient].all()
    assert not out[~has_gradient].any()


def stand_ins_come_with_a_finite_lse(functions: Any, device: torch.device, case: Case) -> None:
    given = Inputs(case, device)
    do, delta, lse = given.partial.view, given.total.view.sum(-1), given.lse.view
    out, filled = functions.stand_in_rows(do, delta, lse)
    assert torch.equal(out, functions.stand_in_rows(do, delta, delta)[0])
    assert torch.equal(filled, lse.masked_fill(lse == -torch.inf, 0.0))
    assert filled.is_contiguous()
    assert filled.dtype == lse.dtype


ROW_CHECKS: tuple[RowCheck, ...] = (
    delta_is_the_sum_over_a_row,
    a_stand_in_has_the_same_delta,
    stand_ins_come_with_a_finite_lse,
)


def _placed(values: Tensor, place: Place, device: torch.device) -> Placed:
    return Placed(values.to(device), place)


def _record(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of both, as fields of a record with the LSE first."""
    batch, heads, tokens, dim = output.shape
    at = heads * lse.itemsize
    end = at + heads * dim * output.itemsize
    raw = torch.empty((tokens, batch, end + -end % lse.itemsize), dtype=torch.uint8, device=output.device)
    o = raw[..., at:end].view(output.dtype).view(tokens, batch, heads, dim).permute(1, 2, 0, 3)
    statistic = raw[..., :at].view(lse.dtype).permute(1, 2, 0)
    return o.copy_(output), statistic.copy_(lse)


def _spoil(values: Tensor) -> None:
    """Puts values among them that are hard to round to 16 bits."""
    hard = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, -7e4, 3.4e38, 1e-7, 9e-41]
    hard += [-0.0, torch.inf, -torch.inf, torch.nan, 1 + 2.0**-8 + 2.0**-20]
    for at, value in enumerate(hard):
        if at < values.numel():
            flat = [int(index) for index in torch.unravel_index(torch.tensor(at * 7919 % values.numel()), values.shape)]
            values[tuple(flat)] = value


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))
