"""What a configuration takes of a GPU: real model code traced without data, then replayed."""
