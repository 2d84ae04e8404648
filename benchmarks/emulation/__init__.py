"""Ranks on an emulated slow network, on one Linux machine. Not part of the library.

Reading order: network (namespaces and links), check_rate (is the limit real?), contenders (what is compared, from plans
alone), calibration (figures for a simulator), worker (one rank).
"""
