"""A step: forward passes, loss, update and what they show, on one rank or several."""
