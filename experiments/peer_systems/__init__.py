"""The systems that `kvlab peers` compares, each in a process of its own."""
