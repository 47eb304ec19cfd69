"""The operating system's part: shared memory, CPU slots, open files, and the ends of processes."""
