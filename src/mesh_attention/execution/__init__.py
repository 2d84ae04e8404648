"""Run: from a call to kernels and transfers.

Reading order: engine (problem, plans and programs of a call, made once), together (rank 0 plans for all), agreement
(ranks compare them), driving (how ranks advance), buffers (memory of items), compiled (steps with every offset worked
out), executor (walks them), rehearsal (a first pass without transfers), alarm (what a device tells the host of a pass),
graphs (passes as CUDA graphs), autograd, operators, sharding, watching and recorder (measured timelines).
"""
