"""How long a step takes on a GPU, from what it computes, moves and launches."""
