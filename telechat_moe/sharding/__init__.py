"""How the model is split: mesh axes, one layout table, and its application to a built model."""
