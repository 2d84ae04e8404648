"""Which lanes a transfer occupies, and for how long.

A lane serves one transfer at a time. Inside a node a transfer occupies the sender's outgoing port and the receiver's
incoming one; between nodes, the outgoing side of the sender's NIC and the incoming side of the receiver's. Where links
are not duplex, the two sides are one lane.
"""

from __future__ import annotations

from typing import NamedTuple

from mesh_attention.topology import LinkClass, Topology


class Path(NamedTuple):
    """The lanes of a transfer, as numbers, and its link class."""

    out_lane: int
    in_lane: int
    link_class: LinkClass


class Network:
    """The lanes of a cluster: ports out, ports in, NICs out, NICs in."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        ranks, nics = topology.ranks, topology.nodes * topology.nics_per_node
        self.num_lanes = 2 * (ranks + nics)
        self.out_ports, self.out_nics = 0, 2 * ranks
        self.in_ports = ranks if topology.full_duplex else self.out_ports
        self.in_nics = 2 * ranks + nics if topology.full_duplex else self.out_nics
        self.is_shared = not topology.full_duplex or topology.nics_per_node < topology.ranks_per_node

    def path(self, source: int, dest: int) -> Path:
        topology = self.topology
        if topology.node(source) == topology.node(dest):
            return Path(self.out_ports + source, self.in_ports + dest, "inside")
        return Path(self.out_nics + topology.nic(source), self.in_nics + topology.nic(dest), "between")

    def seconds(self, nbytes: int, link_class: LinkClass) -> float:
        return self.topology.link(link_class).seconds(nbytes)
