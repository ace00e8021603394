"""What a configuration takes of a card: real model code traced without data, then replayed."""
