"""A plan as data. Reading order: layout, assignment, blocks, steps, schedule, lowering, plan, queries, text, codec.

No torch, no clock, no files.
"""
