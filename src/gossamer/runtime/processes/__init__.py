"""The engine ``processes``: one node, one process, over TCP.

::

    launcher       prepares and coordinates a run in the user's process
    coordinator/   decides (lifecycle), records the run, assembles checkpoints, and manages the workers
    fork_server    starts the worker of a run on one machine
    worker/        forks the nodes of one machine; a worker on another machine joins with a token
    node_process/  the process of one node: its clock, its computations, its checkpoints
    transport/     messages between nodes

    protocol       typed messages between coordinator, workers and nodes
    channel        carries them, in a session that outlives its connections
    security       authentication of nodes, and of workers that join a run
    system         CPU slots, open files, and how processes end
    executors      start workers with Ray and others
"""
