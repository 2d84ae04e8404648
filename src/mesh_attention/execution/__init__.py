"""Run: walks one rank's steps and calls a kernel or the network. Decides nothing.

Reading order: buffers (what items lie in), compiled (steps with every offset worked out), executor (walks them),
autograd, agreement, sharding.
"""
