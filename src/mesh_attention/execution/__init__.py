"""Run: from a call to kernels and transfers."""
