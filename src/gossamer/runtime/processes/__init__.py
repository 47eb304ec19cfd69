"""The engine ``processes``: one node, one process, over TCP.

::

    launcher       prepares a run, in the user's process, and has it coordinated there
    coordinator/   decides (lifecycle), records the run, puts checkpoints together, and knows the workers
    fork_server    starts the worker of a run on one machine
    worker/        forks the nodes of one machine; on other machines, it joins with a token
    node_process/  the process of one node: its clock, its computations, its checkpoints
    transport/     messages between nodes

    protocol       typed messages between coordinator, workers and nodes
    channel        carries them, in a session that outlives its connections
    security       who may speak to a node, and who may join a run
    system         CPU slots, open files, and the ends of processes
    executors      Ray and others, which start workers
"""
