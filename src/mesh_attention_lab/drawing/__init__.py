"""Pages, traces and charts of plans, timelines and rates. Values come in, files go out; nothing is simulated here.

Reading order: trace; canvas, gantt, times, rates; page. Charts need matplotlib, imported when one is drawn.
"""
