"""Run: walks one rank's steps and calls a kernel or the network. Decides nothing.

Reading order: buffers (what items lie in), compiled (steps with every offset worked out), executor (walks them),
graphs (passes recorded and played), autograd, agreement, sharding, watching and recorder (what happened when).
"""
