"""The exception tree. Messages say what was given and expected and, where there is a remedy, what to do.

MeshAttentionError
├── UsageError (also ValueError)      the caller's fault; in forward, raised before anything is sent
│   ├── ProblemError                  lengths, heads, head sizes, dtype, ranks
│   ├── MaskError                     a mask that is malformed or does not fit the problem
│   ├── TileError                     a tile or a Ulysses degree that does not fit
│   ├── ScheduleError                 schedule options that contradict each other
│   ├── TopologyError                 an impossible cluster, or one that does not fit the plan
│   ├── MemoryLimitError              no plan stays below the memory limit
│   ├── CacheFullError                more tokens than a cache has room for
│   └── ParseError                    text, JSON or TOML that cannot be read: a plan, a cluster, a size
├── PlanError                         a plan that breaks a rule or deadlocks
│   └── BrokenPlanError               the same with its step tables (verification/)
├── WorkerError                       a process that the command line started, and that failed (mesh_attention_lab)
├── DisagreementError                 ranks that were called with different arguments, or are in different calls
└── TransportError                    a transfer that failed, with the step and the rank it waited for
    └── StalledError                  ranks that wait for each other
"""

from __future__ import annotations


class MeshAttentionError(Exception):
    """Base of everything this library raises on purpose."""


class UsageError(MeshAttentionError, ValueError):
    """The request cannot be carried out. A forward call raises it before anything is sent."""


class ProblemError(UsageError):
    """A problem that has no plan."""


class MaskError(UsageError):
    """A mask that is malformed, or that does not fit the lengths it is used with."""


class TileError(UsageError):
    """A tile or Ulysses degree that does not fit the ranks or the heads."""


class ScheduleError(UsageError):
    """Schedule options that contradict each other or the plan they are for."""


class TopologyError(UsageError):
    """An impossible cluster, or one with another number of ranks than the plan."""


class MemoryLimitError(UsageError):
    """No plan stays below the memory limit; the message says how much the smallest plan needs."""


class CacheFullError(UsageError):
    """A cache has no room for these tokens; nothing was changed."""


class ParseError(UsageError):
    """Text, JSON or TOML that cannot be read."""


class PlanError(MeshAttentionError):
    """A plan that breaks a rule or deadlocks; `verify` raises `BrokenPlanError`, which also shows the step table."""


class DisagreementError(MeshAttentionError):
    """Ranks were called with different arguments, or are in different calls.

    In a first call it is raised on every rank before anything is sent; later, before a result is returned. (On NCCL,
    where the host does not wait, such results are NaN, and the next call raises a `TransportError`.)
    """


class TransportError(MeshAttentionError):
    """A transfer failed; the message names the step and the rank it waited for."""


class StalledError(TransportError):
    """Ranks wait for each other, and none can continue."""
