"""The exception tree: every message says what came, what was expected and what to do.

MeshAttentionError
├── UsageError (also ValueError)      the caller's fault, found before anything runs
│   ├── ProblemError                  lengths, heads, head sizes, dtype, ranks
│   ├── MaskError                     a mask that is malformed or does not fit the problem
│   ├── TileError                     a tile or a Ulysses degree that does not fit
│   ├── ScheduleError                 schedule options that contradict each other
│   ├── TopologyError                 a cluster that cannot be, or that does not fit the plan
│   ├── MemoryLimitError              no plan stays below the memory that was allowed
│   └── ParseError                    text or JSON that is not a plan, a step or a size
├── PlanError                         a plan that breaks a rule (see verification/)
├── DisagreementError                 ranks that were asked for different things
└── TransportError                    a transfer that failed, with the step and the rank waited for
    └── StalledError                  ranks that wait for each other and nothing moves
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MeshAttentionError(Exception):
    """Base of everything this library raises on purpose."""


class UsageError(MeshAttentionError, ValueError):
    """What was asked cannot be done; nothing has been run or sent."""


class ProblemError(UsageError):
    """A problem no plan can exist for."""


class MaskError(UsageError):
    """A mask that is malformed, or that does not fit the lengths it is used with."""


class TileError(UsageError):
    """A tile or Ulysses degree that does not fit the ranks or the heads."""


class ScheduleError(UsageError):
    """Schedule options that contradict each other or the plan they are for."""


class TopologyError(UsageError):
    """A cluster that cannot be, or that has not as many ranks as the plan."""


class MemoryLimitError(UsageError):
    """No plan stays below the memory that was allowed; the message says what the smallest needs."""


class ParseError(UsageError):
    """Text or JSON that does not say what it should."""


class PlanError(MeshAttentionError):
    """A plan that breaks a rule; the message shows the step table with the row marked."""


class DisagreementError(MeshAttentionError):
    """Ranks were asked for different things; raised on every rank before anything is sent."""


class TransportError(MeshAttentionError):
    """A transfer failed; the message names the step and the rank that was waited for."""


class StalledError(TransportError):
    """Ranks wait for each other and nothing moves."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the system to write a file into a `UsageError` that names the file."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{path}: cannot be written: {reason}; write elsewhere") from error
