"""Measurement: what the machines at hand do, as a `Topology`.

Reading order: fit (from times to figures, without torch), timing, kernels, memory, links, measurement.
"""
