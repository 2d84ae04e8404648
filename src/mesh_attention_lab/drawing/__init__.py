"""Traces, charts and the explorer page. Values come in, files go out; nothing is simulated here.

`trace` is for Perfetto, `charts` need matplotlib, imported when one is drawn.
"""
