"""What a link costs and what a swarm costs, measured side by side on this machine."""
