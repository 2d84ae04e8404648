"""Facts: what a rank says about its host and its device, so that ranks know which of them share one."""

from __future__ import annotations

import socket
from pathlib import Path

import torch

from mesh_attention.machine.shape import Facts
from mesh_attention.units import GIB

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def facts_of(device: torch.device) -> Facts:
    """This rank's facts."""
    host = f"{socket.gethostname()} {_boot_id()}".strip()
    if device.type != "cuda":
        return Facts(host=host, device=device.type)
    properties = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return Facts(
        host=host,
        device=torch.cuda.get_device_name(device),
        uuid=str(getattr(properties, "uuid", "")),
        generation=0 if is_amd else properties.major,
        memory_gib=properties.total_memory / GIB,
    )


def _boot_id() -> str:
    """A number that the system draws when it starts: hosts may share a name."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
