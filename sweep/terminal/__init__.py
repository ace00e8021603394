"""What a person types and sees: options, the live view, summaries, plans, the doctor."""
