"""What runs inside the sandbox: standard library only, so that it starts in milliseconds and carries nothing secret."""
