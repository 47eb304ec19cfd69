"""The engine ``processes``: one node, one process, over TCP.

::

    launcher       in the user's process: starts the coordinator (fork_server), shows what it says, collects the models
    coordinator/   decides (lifecycle), records the run, puts checkpoints together, and knows the workers
    worker/        forks the nodes of one machine; on other machines, a process that joins with a token
    node_process/  the process of one node: its clock, its computations, its checkpoints
    transport/     messages between nodes

    protocol       typed messages between launcher, coordinator, workers and nodes
    channel        carries them; between machines in a session that outlives its connections
    security       who may speak to a node, and who may join a run
    shared_models  the models of all nodes, in a file that processes share
    system         CPU slots, open files, and the ends of processes
    executors      Ray and others, which start workers
"""
