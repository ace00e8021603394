"""A person's texts: reading, templates, tokens, lengths, batches."""
