"""Small helpers with no knowledge of reinforcement learning. Standard library only."""
