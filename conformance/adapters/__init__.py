"""Ways to other people's engines: each imports the engine when it is used, and nothing of it before."""
