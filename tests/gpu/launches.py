"""How many kernels, copies and fills a call launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def count_launches(act: Callable[[], object]) -> int:
    act()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        act()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())
