"""A transport whose transfers take longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mesh_attention.comm.base import Parcel, Work, Wrapper


@dataclass
class Delaying(Wrapper):
    """Makes every transfer take at least `seconds` longer."""

    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_capturable = False

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        return _Later(self.inner.post(sends, recvs), self.seconds)


class _Later:
    def __init__(self, work: Work, seconds: float) -> None:
        self.work, self.due = work, time.monotonic() + seconds

    def is_done(self) -> bool:
        return time.monotonic() >= self.due and self.work.is_done()

    def wait(self) -> None:
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.work.wait()
