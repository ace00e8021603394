"""Owns a person's texts: reading, templates, tokens, lengths, batches."""
