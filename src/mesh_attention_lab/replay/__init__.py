"""Replay: one device plays one rank of a plan, at real sizes, with real copies for transfers (see `transport`).

Reading order: result (what is replayed, and what was measured), actor (one rank of one plan, ready to run), cache (the
same for a decoded step), device (its memory, and the device as a cluster), replay (runs and compares plans).
"""
