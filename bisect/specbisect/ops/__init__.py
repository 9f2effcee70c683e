"""Down to the kernel: where the result of a batch departs from that of single rows, and an op-sized proof of it."""
