"""Poison: results of a failed pass become NaN over NCCL, where the host does not wait and cannot raise in time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.kernels.launching import Launch, launch, triton_unsupported_reason, with_strides
from mesh_attention.session.pass_reports import DIFFERENT_CALLS
from mesh_attention.session.watchdog import Watchdog

POISONING_PROGRAMS = 64
"""Programs that fill results with NaN; as a rule they have nothing to do."""


class Poison:
    """What host and device of a rank tell each other about passes on NCCL, where the host does not wait.

    Results of a pass whose ids differ, or whose transfers will bring nothing any more, are made NaN on the device. The
    host is told through two numbers: NaN once ids differed and 0 before, and how many passes are over.

    `seen` is a copy of them in host memory, with a third number, which the device reads: NaN once this rank gave up.
    Giving up must not need the device, where another thread may be waiting.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # later passes need not be in inference mode
            is_cuda = device.type == "cuda"
            self.state = torch.zeros(2, device=device, dtype=torch.float64)
            self.poisoned, self.over = self.state.unbind()
            self.seen = torch.zeros(3, device="cpu", dtype=torch.float64, pin_memory=is_cuda)
        self._seen = self.seen.numpy()
        self.watchdog: Watchdog | None = None

    def check(self, largest: Tensor, results: Sequence[Tensor], *, counts: bool = False) -> None:
        """Make all results NaN unless the largest hash and -hash of all ranks add up to 0; count the pass as over."""
        if largest.is_cuda and triton_unsupported_reason(largest.device) is None:
            self._check_fused(largest, results, counts)
            return
        self.poisoned.masked_fill_(largest.sum() != 0, torch.nan)
        poisoned = self.poisoned + self.seen[2].to(self.poisoned.device, non_blocking=True)
        for result in results:
            result.add_(poisoned)
        self.over.add_(int(counts))
        self.seen[:2].copy_(self.state, non_blocking=True)

    def _check_fused(self, largest: Tensor, results: Sequence[Tensor], counts: bool) -> None:
        """The same of up to three results without gaps in memory."""
        sizes = [*(result.numel() for result in results), 0, 0, 0][:3]
        filled = [*results, *[self.state] * 3][:3]  # a rank without tokens has no results
        strides = ((), (), (), *((size,) for size in sizes))
        grid, name = (POISONING_PROGRAMS, 1, 1), "poison_if_different"
        launch(
            (name, *sizes, counts),
            (largest, self.state, self.seen, *filled),
            lambda: Launch("merging_kernels", name, grid, with_strides(strides, (counts, 1024))),
        )

    def passes_over(self) -> int:
        return int(self._seen[1])

    def give_up(self) -> None:
        """Make the results of all passes under way NaN: from now on, their transfers bring nothing."""
        self._seen[2] = math.nan

    def verdict(self) -> str | None:
        """Why the results of some pass are NaN; None if none are, as far as the host knows."""
        watchdog, different = self.watchdog, bool(self._seen[0] != self._seen[0])
        if watchdog is not None and watchdog.verdict is not None:
            return watchdog.verdict.text
        if not different:
            return None
        reason = f"ranks made different calls, and results are NaN; {DIFFERENT_CALLS}"
        return reason if watchdog is None else watchdog.explain(reason) or reason
