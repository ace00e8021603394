"""How long a step takes on a card, from what it computes, moves and launches."""
