"""For your own kernels and transports: conformance suites, and transports that count or fail transfers."""
