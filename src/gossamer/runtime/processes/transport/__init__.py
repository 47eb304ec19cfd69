"""Messages between nodes: asyncio TCP with credit-based flow control, shaped by the experiment's network."""
