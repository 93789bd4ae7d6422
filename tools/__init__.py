"""What people run: the `kvtier` command, the demo, the benchmarks."""
