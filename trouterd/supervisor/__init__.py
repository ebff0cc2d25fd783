"""The supervisor: opens sockets and rings, spawns the children, watches, restarts and drains them. No torch, no HTTP."""
