"""A worker: the process that forks the nodes of its slots, and relays their messages to the coordinator."""
