"""MindFormers' own TeleChat3-MoE class and our model, compiled from one recipe: parameters and operators."""
