"""Pictures of timelines and rates: values come in, files and figures go out. Nothing is simulated or measured here.

Reading order: tracks, trace, units, scales, labels, canvas, charts, rates, files. Charts need matplotlib; it is
imported when one is drawn.
"""
