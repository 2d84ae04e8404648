"""Tools to test your own planners, kernels and transports: strategies, conformance suites, a pool of ranks."""
