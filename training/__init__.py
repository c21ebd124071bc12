"""Draft-head training, beside layer 5: the heads' modules and, later, their trainer."""
