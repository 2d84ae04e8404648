"""Network: how items travel between ranks."""
