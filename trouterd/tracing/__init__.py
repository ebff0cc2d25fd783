"""`trouterctl trace`: what workers record of their decode loops, how it is shown, and what it sums up to."""
