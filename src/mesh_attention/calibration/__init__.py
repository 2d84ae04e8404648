"""Measurement of the machines at hand, as a `Topology`.

Reading order: fit (from times to figures, without torch), effort (how much to measure), timing, kernels, memory, links,
measurement.
"""
