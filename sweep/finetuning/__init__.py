"""A configuration trained for real: texts in, an adapter out, beside what was promised of it."""
