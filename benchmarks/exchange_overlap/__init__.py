"""Exchanges beside computation on CPU processes with a slowed link: measured, and simulated with the same times."""
