"""Pictures of plans, timelines and rates: values come in, files and figures go out. Nothing is simulated or measured
here.

Reading order: tracks, trace, units, scales, labels, canvas, lanes, charts, matrix, steps, passes, against, rates,
files, page. Charts need matplotlib; it is imported when one is drawn.
"""
