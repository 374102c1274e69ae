"""Swapped activations and moments on CPU processes with a slowed link: peak memory and waiting, predicted and measured."""
