"""A plan as data.

Reading order: layout, assignment, steps, schedule, blocks, text, routes, lowering, program (what is posted together),
buffers (memory, and the kernel calls of a step), plan, counts, serving (a decoded step).

No torch, no clock, no files.
"""
