"""The laboratory: what measures this package; never imported by it."""
