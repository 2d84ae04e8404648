"""The program of one rank: its steps, and the memory they need."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.steps import Step
from mesh_attention.plan.text import format_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's steps, and the peak buffer bytes that it states for them, without the inputs of the call."""

    rank: int
    steps: tuple[Step, ...]
    peak_nbytes: int

    def __str__(self) -> str:
        lines = (f"program {self.rank} peak {self.peak_nbytes}", *(f"  {format_step(step)}" for step in self.steps))
        return "\n".join(lines)
