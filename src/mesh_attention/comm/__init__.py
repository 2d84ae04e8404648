"""Network: how items travel. Reading order: base (the protocol), torch_dist, local, wrappers."""
