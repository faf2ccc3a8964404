"""A swarm in one process, on a virtual clock, run by the code that ships."""
