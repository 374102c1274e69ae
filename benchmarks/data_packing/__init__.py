"""How many documents packing cuts, and how much padding it leaves, in order and by best fit."""
