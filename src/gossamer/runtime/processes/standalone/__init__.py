"""What takes a supervisor's place where each node's process is by itself."""
