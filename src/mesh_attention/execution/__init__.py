"""Run: from a call to kernels and transfers.

Reading order: engine (problem, plans and programs of a call, made once), agreement (ranks compare them), driving (how
ranks advance), buffers (memory of items), compiled (steps with every offset worked out), executor (walks them), graphs
(passes as CUDA graphs), autograd, operators, sharding, watching and recorder (measured timelines).
"""
