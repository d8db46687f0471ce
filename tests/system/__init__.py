"""End to end on the real model: what a user is promised, through every part at once."""
