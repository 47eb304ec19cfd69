"""Messages between nodes: asyncio TCP under the receiver's credit, and the network of an experiment carried out on it."""
