"""The names of SciPy that the package uses."""
