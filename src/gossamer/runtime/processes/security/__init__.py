"""Who may speak to a node, how it is proved, and what strangers may cost."""
