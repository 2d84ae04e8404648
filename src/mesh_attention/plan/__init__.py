"""A plan as data. Reading order: layout, assignment, steps, schedule, blocks, text, lowering, plan, counts.

No torch, no clock, no files.
"""
