"""The engine ``processes``: one node, one process, over TCP.

::

    launcher      in the user's process: starts the supervisor, shows what it says, collects the models
    supervisor/   forks the nodes, watches over them, brings their faults about, records what is about all of them
    standalone/   does without one, where each node's process is on its own (gossamer.deploy)
    worker/       the process of one node: its life, its clock, its computations, its checkpoints
    transport/    messages between nodes
    security/     who may speak to a node
    system/       channels, shared memory, open files, and the ends of processes
"""
