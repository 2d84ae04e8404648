"""How good a fitted cluster is: the times that its figures give, next to those that were measured."""

from __future__ import annotations

from statistics import median

from mesh_attention.machine.fit import CallTime, Measurement, MessageTime
from mesh_attention.topology import Device, LinkClass, Topology


def kernel_seconds(device: Device, call: CallTime) -> float:
    """The fitted time of a call."""
    return device.call_seconds(
        call.direction,
        heads=call.heads,
        q_tokens=call.q_tokens,
        kv_tokens=call.kv_tokens,
        flops=call.flops,
        is_masked=call.is_causal,
    )


def message_seconds(topology: Topology, message: MessageTime) -> float:
    """The fitted time of a message, both ways if links are duplex."""
    waiting = max(1.0, message.pairs / topology.nics_per_node) if message.link_class == "between" else 1.0
    return topology.link(message.link_class).seconds(message.nbytes * waiting)


def unmeasured_links(measurement: Measurement) -> list[LinkClass]:
    """The kinds of link that the ranks do not have."""
    both: tuple[LinkClass, ...] = ("inside", "between")
    return [kind for kind in both if all(message.link_class != kind for message in measurement.messages)]


def fitted_time_s(message: MessageTime, topology: Topology) -> float:
    """The one of its times that was fitted."""
    return message.both_ways_s if topology.full_duplex else message.one_way_s


def median_error(measurement: Measurement, topology: Topology) -> float:
    """Relative error of the fitted times: that of calls or that of messages, the larger of the two."""
    calls = [abs(kernel_seconds(topology.device, call) / call.time_s - 1) for call in measurement.calls]
    messages = [abs(message_seconds(topology, m) / fitted_time_s(m, topology) - 1) for m in measurement.messages]
    return max(median(calls), median(messages or [0.0]))
