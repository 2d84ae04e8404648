"""Replay: one device plays one rank of a plan, at real sizes, with real copies for transfers. See `comm.replay`.

Reading order: cluster (this device as a cluster), parts (what to replay), actor (one rank of one plan, ready to run),
result (what was measured), replay (runs and compares them).
"""
