"""A worker: the process that forks the nodes of its slots, watches them, and relays between them and the coordinator."""
