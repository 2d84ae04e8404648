"""Run: from a call to kernels and transfers.

Reading order: call (the five stages, from options to agreement), engine (runs passes), compiled (steps with every
offset worked out), buffers (memory of items), executor (walks the steps), warm_up (a first pass without transfers),
graphs (passes as CUDA graphs), autograd, operators (for compilers), sharding.
"""
