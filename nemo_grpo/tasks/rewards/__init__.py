"""Rewards of responses by their references; they take bounded time and never execute a response."""
