"""For tests of your own planners, kernels and transports: strategies, conformance suites, a pool of ranks."""
