"""One pool of eight workers for all tests of a process that need real ranks."""

from __future__ import annotations

import atexit
from functools import lru_cache

from mesh_attention.testing.run_ranks import RankPool


@lru_cache(maxsize=1)
def shared_pool() -> RankPool:
    pool = RankPool(8)
    atexit.register(pool.close)
    return pool
